"""What the tiles of a loop make up together: one accumulator for each result that the loop ends in or hands on.

A loop knows three things of it: what it holds before the first tile (`begin`), once a tile joins it (`add`), and what
comes of it after the last (`end`). Its value's placement says how a tile joins:

    Partial(op)    a reduction: sum, extremum, product, ..., "last"; sums in a dtype that is wide enough
    Tiled          the tile's slice is written where it belongs
    Stacked        so is the tile's own entry
    Whole          an anchor: the next tile reads it

A sum may be relative to anchors, and is rescaled as they move (online softmax, Milakov & Gimelshein 2018), and it may
be unreduced: each device holds a part of it until the loop is over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from transforms import layout
from transforms.tiling.ir.graph import Value
from transforms.tiling.ir.loops import Loop, Schedule, Step, Update
from transforms.tiling.ir.placement import COMBINE, WHOLE, Partial, Placement, Span, Whole, identity, neutral
from transforms.tiling.ir.terms import Term, broadcast_by
from transforms.tiling.ir.walks import is_zero
from transforms.tiling.mesh.sums import kept
from transforms.tiling.primitives import has
from transforms.tiling.rules import RULES, run

Tile = Any  # of `lower.tile`: what is computed of one


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """One result of a loop. `broad`: it is kept in the dtype that sums are formed in."""

    update: Update
    placement: Placement
    apart: layout.Apart
    broad: bool

    @property
    def value(self) -> Value:
        return self.update.value

    @functools.cached_property
    def aval(self) -> Any:
        """The type of its value, but on the mesh that the loop runs on."""
        return kept(self.value)

    def begin(self, span: Span) -> Any:
        """What it holds before the first tile."""
        op = self.placement.op if isinstance(self.placement, Partial) else "sum"
        wide = self.broad or self.placement == Partial("sum")
        dtype = span.wide(self.value.dtype) if wide else self.value.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            return lax.full(self.value.shape, 0, dtype)
        fill = neutral(op, dtype) if self.rows else identity(op, dtype)
        return layout.full(self.aval, fill, dtype, self.apart)

    @property
    def rows(self) -> bool:
        """Whether it is a sum of rows that one tile has, and the others nothing: minus zeros stay as they are.

        What lands in zeros is added to these.
        """
        nodes = (term.node if isinstance(term, Step) else term.value.producer for term in self.update.terms)
        lands = lambda node: has(node.name, "lands") and not is_zero(node.inputs[0])
        return all(node is not None and (has(node.name, "picks") or lands(node)) for node in nodes)

    def add(self, total: Any | None, tile: Tile) -> Any:
        """What it holds with one more tile; with no total yet, the tile is all there is."""
        if total is not None and self.update.online.anchors:
            total = self.rescaled(total, tile)
        for term in self.update.terms:
            if isinstance(term, Step):
                total = self.computed(total, term, tile)
                continue
            part = tile.unrounded.get(term.value) if self.broad else None
            part = tile.fetch(term) if part is None else part
            total = self.joined(total, part, tile.span)
        return total

    def joined(self, total: Any | None, part: Any, span: Span) -> Any:
        """The tile's part with what is there."""
        part = layout.here(part, self.aval)
        if isinstance(self.placement, Partial):
            part = layout.conform(part, self.aval, self.apart)
        if total is None or isinstance(self.placement, Whole):
            return part
        part = part.astype(total.dtype)
        if isinstance(self.placement, Partial):
            return COMBINE[self.placement.op](total, part)
        return span.put(total, part, self.placement)

    def computed(self, total: Any | None, step: Step, tile: Tile) -> Any:
        """What is there with a sum that nobody else reads: its rule may add it without making it first."""
        node, values = tile.fitted(step, tile.held[step.node.outputs[0]])
        accumulate = RULES[node.name].accumulate
        if total is None or accumulate is None or layout.named(node.outputs[0].aval) is not None:
            return self.joined(total, run(node, values, step.move, tile.span)[0], tile.span)
        return accumulate(node, values, total, tile.span)

    def rescaled(self, total: Any, tile: Tile) -> Any:
        """What was summed up to the last tile, relative to the anchors of this one."""
        weight = None if self.update.online.weight is None else tile.before[self.update.online.weight]
        for term in self.update.online.anchors:
            old, new = tile.before[term.value], tile.made[term.value, WHOLE]
            total = _moved(total, term, old.astype(total.dtype), new.astype(total.dtype), weight)
        return total

    def end(self, total: Any, reduce_dtype: Any) -> Any:
        """The result, once all tiles are in it: the sum over the devices, too."""
        return layout.there(layout.settle(total, self.aval, self.apart, reduce_dtype), self.value.aval)


def _moved(total: Any, term: Term, old: Any, new: Any, weight: Any | None) -> Any:
    """A sum relative to one anchor, which has moved; if it is linear in that, `weight` says how often it is in it."""
    if weight is not None:
        moved = broadcast_by((new - old) * term.weight, term.dims, total.shape)
        return total + jnp.where(weight == 0, 0, moved * weight)
    # Before the first term that is not masked, all were inf - inf, as they remain if there is none. Against any
    # other, they are 0.
    moved = broadcast_by(jnp.where(old == new, 0, (new - old) * term.weight), term.dims, total.shape)
    return jnp.where(moved == -jnp.inf, 0, jnp.where(total == 0, total, total * jnp.exp(moved)))


def accumulators(plan: Schedule, loop: Loop, broad: Set[Value]) -> list[Accumulator]:
    """Those of a loop, one for each of its updates."""
    fact, apart = plan.analysis.fact, plan.analysis.apart
    return [Accumulator(u, fact(u.value).placement, apart[u.value], u.value in broad) for u in loop.updates]
