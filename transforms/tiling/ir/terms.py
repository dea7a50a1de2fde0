"""Terms that every element of a cut value depends on alike, and that are not known when the rest of it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from transforms.tiling.ir.graph import Value

Dims = tuple[int | None, ...]  # for each dimension of a value, that of another which varies along it


@dataclasses.dataclass(frozen=True)
class Term:
    """A whole value that each element depends on, constant along the cut axis: `dims` says where it lies."""

    value: Value
    dims: Dims
    weight: float  # of an anchor or an offset: how often it is added; of a factor: its exponent


@dataclasses.dataclass(frozen=True)
class Early:
    """A value of loop `stage`, but for terms that are not known yet.

    Before an exponential (`scaled` is false), `value = known + sum(weight * term)` over anchors, whose running form
    loop `stage` has, and offsets, which come later. After it, `value = known * exp(the same) * product(factors)`.
    `masked`: some elements were set to 0. `weighted`: not exponentiated, but made linearly, by masks and weights, of
    such a value: the terms are added as often as the same makes of ones.

    Rounding and range allow to leave terms out only where what remains is as bounded as the value itself.
    `anchored`: what remains is relative to an extremum of it. `bounded`: before an exponential, that is at most 0;
    after it, what was exponentiated was.
    """

    stage: int
    anchors: tuple[Term, ...] = ()
    offsets: tuple[Term, ...] = ()
    factors: tuple[Term, ...] = ()
    scaled: bool = False
    masked: bool = False
    weighted: bool = False
    anchored: bool = False
    bounded: bool = False

    @property
    def plain(self) -> bool:
        return not (self.anchors or self.offsets or self.factors)

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*self.anchors, *self.offsets, *self.factors)

    @property
    def factorable(self) -> bool:
        """Whether what remains may be multiplied by something else before the factors that were left out."""
        return self.bounded or not self.factors

    def moved(self, dims: Callable[[Dims], Dims | None]) -> Early | None:
        """The same for a rearrangement of the value, if its terms can follow."""
        found = {}
        for name in ("anchors", "offsets", "factors"):
            terms = [(t, dims(t.dims)) for t in getattr(self, name)]
            if any(d is None for _, d in terms):
                return None
            found[name] = tuple(dataclasses.replace(t, dims=d) for t, d in terms)
        return dataclasses.replace(self, **found)


def along(dims: Dims, inner: Dims) -> Dims:
    """What varies along each dimension, where `inner` says so of the dimensions that `dims` names."""
    return tuple(None if d is None else inner[d] for d in dims)


def broadcast_by(array: Any, dims: Dims, shape: Sequence[Any]) -> Any:
    """An array as one that broadcasts to `shape`, its dimension `dims[i]` along dimension `i`."""
    varying = [i for i, d in enumerate(dims) if d is not None]
    order = [d for d in dims if d is not None]
    rest = [d for d in range(array.ndim) if d not in order]
    turned = lax.transpose(array, [*order, *rest]).reshape([shape[i] for i in varying])
    return lax.broadcast_in_dim(turned, [n if i in varying else 1 for i, n in enumerate(shape)], varying)


def merge(first: tuple[Term, ...], second: tuple[Term, ...], sign: float = 1.0) -> tuple[Term, ...]:
    weights: dict[tuple[Value, Dims], float] = {}
    for terms, factor in ((first, 1.0), (second, sign)):
        for t in terms:
            weights[t.value, t.dims] = weights.get((t.value, t.dims), 0.0) + factor * t.weight
    return tuple(Term(v, d, w) for (v, d), w in weights.items() if w)


def weigh(early: Early, weight: float) -> Early:
    """A sum that is yet to be exponentiated, times a constant."""
    scale = lambda terms: tuple(dataclasses.replace(t, weight=t.weight * weight) for t in terms)
    terms = {"anchors": scale(early.anchors), "offsets": scale(early.offsets)}
    return dataclasses.replace(early, **terms, bounded=early.bounded and weight > 0)
