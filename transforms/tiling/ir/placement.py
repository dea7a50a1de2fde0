"""Where a value stands while an axis of length `L` is walked tile by tile, and how it moves between those places.

    Whole              the same for every tile
    Tiled(dim)         its tile `i` is slice `i` of dimension `dim`
    Partial(op)        tile `i` holds one part of a reduction over the cut axis
    Stacked            an array of one entry for each tile, which holds its own

A cut axis keeps its identity through reshapes: dimension `dim` of a `Tiled` value is the product `major * L * minor`,
so `[B, S, D] -> [B*S, D]` stays tiled whichever of `B` and `S` is cut. Where `group` rows of the axis have become one
element (chunks, patches, strides), it is `major * L / group * minor`, and tiles hold whole groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transforms import layout
from transforms.bits import slice_of, with_slice


@dataclasses.dataclass(frozen=True)
class Whole:
    def __str__(self) -> str:
        return "Whole"


@dataclasses.dataclass(frozen=True)
class Tiled:
    dim: int
    major: int = 1
    minor: int = 1
    group: int = 1

    def __str__(self) -> str:
        grouped = "" if self.group == 1 else f"/{self.group}"
        inner = "" if self.plain else f", {self.major}*L{grouped}*{self.minor}"
        return f"Tiled(dim={self.dim}{inner})"

    @property
    def plain(self) -> bool:
        """Whether the axis is a dimension of its own."""
        return (self.major, self.minor, self.group) == (1, 1, 1)

    def steps(self, rows: Any) -> Any:
        """How many elements of the dimension so many rows of the axis are."""
        return rows * self.minor if self.group == 1 else rows // self.group * self.minor

    def rows(self, steps: Any) -> Any:
        """The row of the axis that an element begins with."""
        return steps // self.minor if self.group == 1 else steps // self.minor * self.group

    def at(self, dim: int) -> Tiled:
        """The same cut, in another dimension."""
        return dataclasses.replace(self, dim=dim)

    def scaled(self, times: Fraction | int) -> Tiled:
        """The cut of a dimension in which each row of the axis has so many times as many elements."""
        ratio = Fraction(self.minor, self.group) * times
        return dataclasses.replace(self, minor=ratio.numerator, group=ratio.denominator)

    def block(self, shape: tuple[int, ...]) -> int:
        """How long one piece of the cut dimension of an array of `shape` is that holds all of the cut axis once."""
        return max(1, shape[self.dim] // self.major)

    def repeated(self, shape: tuple[int, ...], size: int) -> Tiled | None:
        """The same cut of that dimension if it is `size` long, as many pieces as that is; None for a part of one."""
        times, rest = divmod(size, self.block(shape))
        return None if rest or not times else dataclasses.replace(self, major=times)


@dataclasses.dataclass(frozen=True)
class Partial:
    op: str

    def __str__(self) -> str:
        return f"Partial({self.op})"


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Entry `i` is tile `i`'s own; tiles are `size` long."""

    size: int


Placement = Whole | Tiled | Partial | Stacked
WHOLE = Whole()


def wide(dtype: Any, accumulate: Any) -> Any:
    """The dtype in which a sum of `dtype` is formed, no narrower than `accumulate`."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    if jnp.finfo(dtype).bits < 16:  # JAX promotes these to nothing by itself
        return jnp.dtype(accumulate)
    with jax.numpy_dtype_promotion("standard"):  # the user's own code may run under "strict"
        return jnp.promote_types(dtype, accumulate)


Reach = tuple[int, int]  # how many rows before and after
ALONE: Reach = (0, 0)


@dataclasses.dataclass(frozen=True)
class Move:
    """Where a node's results stand, and where its operands must stand for that.

    `reach`: of which operands it reads rows beside the tile, and how many before and after.
    """

    outs: tuple[Placement, ...]
    ins: tuple[Placement, ...]
    reach: Mapping[int, Reach] = dataclasses.field(default_factory=dict, kw_only=True, hash=False)


class Span(NamedTuple):
    """The tile: `length` steps from `start` of an axis that is `total` long; sums are formed in `accumulate`.

    `chunks`: a product may be added to an accumulator chunk by chunk. `halo`: how many of its first and last steps are
    its neighbours', or outside of the axis. `effects`: whether the side effects of the equation at hand run here.
    """

    start: Any
    length: int
    total: int
    accumulate: Any = jnp.float32
    chunks: bool = True
    halo: Reach = ALONE
    effects: bool = True

    def beside(self, halo: Reach) -> Span:
        """The tile with as many steps before and after it."""
        if halo == ALONE:
            return self
        before, after = halo
        start = jnp.asarray(self.start, jnp.int32) - before
        return self._replace(start=start, length=self.length + before + after, halo=halo)

    def wide(self, dtype: Any) -> Any:
        """The dtype in which a sum of `dtype` is formed."""
        return wide(dtype, self.accumulate)

    def local_shape(self, shape: tuple[Any, ...], placement: Placement) -> tuple[Any, ...]:
        """The shape that a tile of a value of `shape` has."""
        if not isinstance(placement, Tiled):
            return tuple(shape)
        size = placement.major * placement.steps(self.length)
        return (*shape[: placement.dim], size, *shape[placement.dim + 1 :])

    def take(self, array: Any, placement: Tiled) -> Any:
        """This tile of a whole array."""
        if self.halo != ALONE:
            return self._take_beside(array, placement)
        if self.length == self.total:
            return array
        array, dim = unfold(array, placement)
        start, length = placement.steps(self.start), placement.steps(self.length)
        return fold(slice_of(array, start, length, dim), placement)

    def _take_beside(self, array: Any, placement: Tiled) -> Any:
        """The tile and its neighbours; outside of the axis stand other rows of it, whichever."""
        (array, dim), steps = unfold(array, placement), placement.steps
        size, (before, after) = min(self.length, self.total), self.halo
        first = jnp.clip(self.start, 0, self.total - size).astype(jnp.int32)
        rows = slice_of(array, steps(first), steps(size), dim)
        ends = lax.slice_in_dim(rows, steps(size - before), None, axis=dim), rows
        rows = lax.concatenate([*ends, lax.slice_in_dim(rows, 0, steps(after), axis=dim)], dim)
        offset = jnp.asarray(self.start, jnp.int32) - first + before
        return fold(lax.dynamic_slice_in_dim(rows, steps(offset), steps(self.length), dim), placement)

    def narrow(self, array: Any, placement: Tiled, halo: Reach) -> Any:
        """Of an array of this tile with its neighbours, the tile with as many as `halo`."""
        if halo == self.halo:
            return array
        (array, dim), steps = unfold(array, placement), placement.steps
        low, high = (have - want for have, want in zip(self.halo, halo, strict=True))
        return fold(lax.slice_in_dim(array, steps(low), steps(self.length - high), axis=dim), placement)

    def cleared(self, array: Any, placement: Tiled, fill: Any) -> Any:
        """This tile of an array, with `fill` outside of the axis."""
        steps = jnp.arange(placement.major * placement.steps(self.length), dtype=jnp.int32)
        steps = placement.rows(steps) % self.length + jnp.asarray(self.start, jnp.int32)
        inside = lax.broadcast_in_dim((steps >= 0) & (steps < self.total), array.shape, (placement.dim,))
        return jnp.where(inside, array, jnp.asarray(fill, array.dtype))

    def put(self, array: Any, part: Any, placement: Tiled | Stacked) -> Any:
        """The whole array with this tile overwritten."""
        if isinstance(placement, Stacked):
            return with_slice(array, part, self.start // placement.size, 0)
        if self.length == self.total:
            return part
        (whole, dim), (part, _) = unfold(array, placement), unfold(part, placement)
        return fold(with_slice(whole, part, placement.steps(self.start), dim), placement)

    def positions(self, placement: Tiled, dtype: Any) -> Any:
        """The index in the whole array of each element along this tile's dimension."""
        steps, whole = placement.steps(self.length), placement.steps(self.total)
        local = jnp.arange(placement.major * steps, dtype=dtype)
        offset = jnp.asarray(placement.steps(self.start), dtype)
        if placement.major == 1:
            return local + offset
        return local // steps * whole + local % steps + offset

    def localise(self, positions: Any, placement: Tiled) -> Any:
        """The inverse of `positions`: indices into the whole array that are known to fall into this tile."""
        offset = jnp.asarray(placement.steps(self.start), positions.dtype)
        if placement.major == 1:
            return positions - offset
        steps, stride = placement.steps(self.length), placement.steps(self.total)
        return positions // stride * steps + positions % stride - offset

    def find(self, positions: Any, placement: Tiled) -> tuple[Any, Any]:
        """Which indices into the whole array fall into this tile; and where in it, 0 for those that do not."""
        start = jnp.asarray(self.start, positions.dtype)
        steps = placement.rows(positions) % self.total
        inside = (positions >= 0) & (positions < placement.major * placement.steps(self.total))
        here = inside & (steps >= start) & (steps < start + self.length)
        return here, jnp.where(here, self.localise(positions, placement), 0)


def unfold(array: Any, placement: Tiled) -> tuple[Any, int]:
    """An array of which the axis is a dimension that begins with it, and which dimension that is."""
    if placement.major == 1:
        return array, placement.dim
    return layout.split(array, placement.dim, placement.major), placement.dim + 1


def fold(array: Any, placement: Tiled) -> Any:
    """The inverse."""
    return array if placement.major == 1 else layout.merge(array, placement.dim)


def identity(op: str, dtype: Any) -> Any:
    """What a reduction starts from, as a scalar of `dtype`."""
    if op in ("sum", "or", "last"):
        return np.zeros((), dtype)
    if op == "and":
        return np.array(-1).astype(dtype)
    if op == "prod":
        return np.ones((), dtype)
    sign = -1 if op in ("max", "logaddexp") else 1
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.asarray(op == "min", dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max, dtype)
    infinite = np.asarray(sign * np.inf, dtype)
    return infinite if np.isinf(infinite) else np.asarray(sign * float(jnp.finfo(dtype).max), dtype)  # some have none


def neutral(op: str, dtype: Any) -> Any:
    """What a reduction may be combined with and stays as it is: of sums minus zero, for they may be minus zero."""
    value = identity(op, dtype)
    return -value if op == "sum" and jnp.issubdtype(dtype, jnp.inexact) else value


COMBINE = {
    "sum": lax.add,
    "prod": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "logaddexp": jnp.logaddexp,
    "last": lambda before, now: now,
}
