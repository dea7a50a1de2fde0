"""One tile of a loop: its steps run in order, on whole values, slices of them, and what steps before have made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from transforms import layout
from transforms.tiling.ir.errors import TileError
from transforms.tiling.ir.graph import Node, Value, describe
from transforms.tiling.ir.loops import Loop, Ref, Step
from transforms.tiling.ir.placement import ALONE, Partial, Placement, Span, Tiled, Whole, neutral
from transforms.tiling.ir.walks import is_zero, read
from transforms.tiling.lower.epilogue import Env, combine_partials, narrow
from transforms.tiling.mesh import weight_gather
from transforms.tiling.mesh.sums import fit, kept
from transforms.tiling.primitives import having
from transforms.tiling.rules import RULES, run

REARRANGE = having("rearranges")


@dataclasses.dataclass
class Tile:
    """What is computed of one tile.

    Args:
        span: the tile.
        env: whole values.
        made: tiles that are there already, those of a body's inputs; those that steps compute join them.
        before: what the tiles before this one accumulated; empty on the first.
        held: sums that devices hold parts of.
        broad: values of which the tile is kept unrounded, too.
    """

    span: Span
    env: Env
    made: dict[tuple[Value, Placement], Any] = dataclasses.field(default_factory=dict)
    before: Mapping[Value, Any] = dataclasses.field(default_factory=dict)
    held: layout.Held = dataclasses.field(default_factory=layout.Held)
    broad: Set[Value] = frozenset()
    # Of what has a halo, all of it.
    longer: dict[tuple[Value, Placement], tuple[Any, Span]] = dataclasses.field(default_factory=dict)
    unrounded: dict[Value, Any] = dataclasses.field(default_factory=dict)
    moved: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what products need spread otherwise

    def run(self, loop: Loop) -> Tile:
        for step in loop.steps:
            self.step(step)
        return self

    def step(self, step: Step) -> None:
        rule = RULES[step.node.name]
        if rule.resume is not None:  # a loop's state, as the tiles before left it; not of rows that no other tile has
            (ref,), key, array = step.refs, step.keys[0], self.fetch(*step.refs)
            own = isinstance(key[1], Tiled)
            self.made[key] = array if own else rule.resume(step.node, ref.value, array, self.before, self.span)
            return
        how = self.held[step.node.outputs[0]] if step.node.outputs else layout.TOGETHER
        node, values = self.fitted(step, how)
        if step.node.effects and all(isinstance(p, Whole) for p in step.move.ins):  # in a region, the same every time
            if self.span.effects:
                _on_first_tile(node, values, self.span)
            return
        if step.halo == ALONE and (wide := self.wide(step, node, values)) is not None:
            value, _ = step.keys[0]
            self.unrounded[value] = wide = layout.conform(wide, value.aval, how)
            self.made[step.keys[0]] = wide.astype(value.dtype)
            return
        there = self.span.beside(step.halo)._replace(effects=self.span.effects and not step.silent)
        sums = Partial("sum") in step.move.outs and Partial("sum") in step.move.ins
        if sums and rule.emit is None:
            results = combine_partials(node, values, self.span)
        else:
            results = run(node, values, step.move, there)
        made = zip(step.node.outputs, results, strict=True)
        by_value = {v: layout.conform(x, v.aval, self.held[v]) for v, x in made}
        for key in step.keys:
            (value, want), array = key, by_value[key[0]]
            if isinstance(want, Tiled):
                _check(step.node, array, there.local_shape(value.shape, want))
            if step.halo != ALONE and isinstance(want, Tiled):
                self.longer[key] = array, there
                array = there.narrow(array, want, self.span.halo)
            self.made[key] = array

    def fitted(self, step: Step, how: layout.Apart) -> tuple[Node, list[Any]]:
        """The equation and operands of a step as they are spread; what several products need is moved once for all."""

        def moved(operand: int, array: Any, target: PartitionSpec, always: bool) -> Any:
            key = step.refs[operand], array.dtype, target
            if always and key not in self.moved:
                self.moved[key] = layout.move(array, target)
            return self.moved.get(key, array)

        return fit(step.node, self.operands(step), how, moved)

    def operands(self, step: Step) -> list[Any]:
        """The operands of a step; those that were gathered for it, as they were."""
        ready = [weight_gather.find(self.env, step.node, i, ref, self.held) for i, ref in enumerate(step.refs)]
        return [self.fetch(r) if x is None else x for r, x in zip(step.refs, ready, strict=True)]

    def fetch(self, ref: Ref) -> Any:
        """An operand as a loop reads it."""
        array, parts = self._fetched(ref), ref.how != "tile" and layout.unreduced(ref.value.aval)
        return layout.conform(array, ref.value.aval, layout.TOGETHER) if parts else array

    def _fetched(self, ref: Ref) -> Any:
        value, want = ref.value, ref.want
        if ref.how == "tile" and ref.halo == ALONE:
            return self.made[value, want]
        if ref.how == "tile":
            assert isinstance(want, Tiled), ref
            array, there = self.longer[value, want]
            return there.narrow(array, want, ref.halo)
        if ref.how == "once":
            if want == Partial("sum") and is_zero(value):
                with value.producer.context.manager if value.producer else nullcontext():
                    return layout.full(value.aval, 0, value.dtype, layout.TOGETHER)
            whole = layout.here(jnp.asarray(read(self.env, value)), kept(value))
            op = want.op if isinstance(want, Partial) else "sum"
            once = jnp.where(self.span.start == 0, whole, jnp.full_like(whole, neutral(op, whole.dtype)))
            return layout.there(once, value.aval)
        whole = narrow(self.env, value)
        if not isinstance(want, Tiled) or ref.how != "slice":
            return whole
        rows = self.span.beside(ref.halo).take(layout.here(jnp.asarray(whole), kept(value)), want)
        return layout.there(rows, value.aval)

    def wide(self, step: Step, node: Node, values: list[Any]) -> Any | None:
        """One step on the way from a product to a value in `broad`, without rounding in between."""
        if not step.keys or step.keys[0][0] not in self.broad or not isinstance(step.move.outs[0], Tiled):
            return None
        rule = RULES[node.name]
        if node.name not in REARRANGE:
            return rule.wide and rule.wide(node, values, self.span.wide(node.outputs[0].dtype), self.span)
        if (source := self.unrounded.get(node.inputs[0])) is None:
            return None
        if rule.wide is not None:
            return rule.wide(node, [source], source.dtype, self.span)
        return run(node, [source], step.move, self.span)[0]


def _check(node: Node, array: Any, shape: tuple[Any, ...]) -> None:
    """Refuse what a plan says of a tile and is not so: what it meets might be broadcast to it, and be wrong.

    Raises:
        TileError: the tile that was made has another shape.
    """
    if array.shape != shape:
        raise TileError(
            f"cannot tile {node}: a tile of it is {describe(jax.typeof(array))}, where the plan has {list(shape)}. "
            "That is a defect of `tile`: please report the function.\n  To go on: cut another axis."
        )


def _on_first_tile(node: Node, values: list[Any], span: Span) -> None:
    """Have the side effects of a node once in all."""

    def effects(*values: Any) -> tuple[()]:
        node.bind(values)
        return ()

    lax.cond(span.start == 0, effects, lambda *_: (), *values)
