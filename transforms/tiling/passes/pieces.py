"""Pieces of an axis that is joined of several arrays, or a part of the cut axis: what runs on them as on tiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.placement import COMBINE, Partial, Span, Tiled, fold, identity, unfold
from transforms.tiling.rules import Move, run


class Piece(Span):
    """Steps `start` to `start + length` of an axis that is `total` long, known beforehand: maybe more than it has."""

    __slots__ = ()

    @property
    def beyond(self) -> bool:
        """Whether it has more than the axis."""
        return self.length > self.total

    def take(self, array: Any, placement: Tiled) -> Any:
        """The piece of a whole array; zeros where it has none."""
        parts, dim = unfold(array, placement)
        before, after = -self.start * placement.minor, (self.start + self.length - self.total) * placement.minor
        config = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(parts.ndim)]
        return fold(lax.pad(parts, jnp.zeros((), array.dtype), config), placement)

    def inside(self, shape: tuple[int, ...], placement: Tiled) -> Any:
        """Which elements of a piece of an array of `shape` the axis has."""
        steps = lax.broadcasted_iota(jnp.int32, self.local_shape(shape, placement), placement.dim)
        for number, apply in ((placement.minor, lax.div), (self.length, lax.rem)):
            if number != 1 and not (apply is lax.rem and placement.major == 1):
                steps = apply(steps, jnp.full_like(steps, number))
        low, high = max(0, -self.start), min(self.length, self.total - self.start)
        below, above = ([steps >= low] if low else []), ([steps < high] if high < self.length else [])
        return functools.reduce(jnp.logical_and, [*below, *above])


@dataclasses.dataclass(frozen=True)
class Cut:
    """A value in pieces: `placement` says where the axis stands that they are pieces of."""

    placement: Tiled
    pieces: tuple[Value, ...]


def compute(node: Node, move: Move, span: Piece, number: int, *values: Any) -> list[Any]:
    """The results of a node for piece `number`."""
    operands = list(values)
    if number:
        for i, placement in enumerate(move.ins):
            if isinstance(placement, Partial):  # counted once
                operands[i] = jnp.full_like(values[i], identity(placement.op, values[i].dtype))
    part = next((p.op for p in move.outs if isinstance(p, Partial)), None)
    adds = node.name == "scatter-add"  # rows that the axis does not have would be added to others
    if span.beyond and (adds or (part is not None and node.name != "gather")):
        for i, placement in enumerate(move.ins):
            if isinstance(placement, Tiled) and (not adds or i == 2):
                fill = identity(part or "sum", values[i].dtype)
                operands[i] = jnp.where(span.inside(node.inputs[i].shape, placement), values[i], fill)
    return run(node, operands, move, span)


def combine(op: str, dtype: Any, *parts: Any) -> list[Any]:
    return [functools.reduce(COMBINE[op], parts).astype(dtype)]


def join(cut: Tiled, spans: Sequence[Piece], *pieces: Any) -> list[Any]:
    """The array that pieces are of."""
    parts, (dim, *_) = zip(*(unfold(piece, cut) for piece in pieces), strict=True)
    if len(parts) > 1:
        return [fold(lax.concatenate(parts, dim), cut)]
    start = -spans[0].start * cut.minor
    return [fold(lax.slice_in_dim(parts[0], start, start + spans[0].total * cut.minor, axis=dim), cut)]


def places(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Start and length of pieces one after the other."""
    return [(sum(lengths[:i]), n) for i, n in enumerate(lengths)]
