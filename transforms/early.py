"""How cut values depend on what only the end of a loop tells: the maximum, the sum that they are divided by.

`exp(x - m) / s`, `m` and `s` reductions over the cut axis, is a value of the loop after those of `m` and `s`. But it is
also `exp(x)` times a factor that is constant along the cut axis, and a sum of it can be formed earlier: see online.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from transforms.analysis import Analysis
from transforms.graph import Node, Value, constant
from transforms.placement import Partial, Tiled, Whole
from transforms.rules import Move
from transforms.terms import Dims, Early, Term, merge, peel, weigh

# ------------------------------------------------------------------------------------------- what is not yet known


class Finder:
    """The early forms of all cut values of an analysed graph."""

    def __init__(self, found: Analysis):
        self.found = found
        self.early: dict[Value, Early] = {}
        self.sums: dict[Value, Early] = {}  # partial sums that an earlier loop could form
        self.ready: dict[Value, int] = {}  # whole values of which a loop has a running form
        for node in found.graph.nodes:
            self.visit(node)

    def visit(self, node: Node) -> None:
        move = self.found.moves.get(node)
        if move is None:
            return
        if all(isinstance(p, Whole) for p in move.outs):
            self.run(node)
            return
        if len(node.outputs) != 1:
            return
        out, placement = node.outputs[0], move.outs[0]
        fact = self.found.fact(out)
        early = self.follow(node, move)
        if early is None or early.stage >= fact.stage:
            return
        if isinstance(placement, Tiled):
            self.early[out] = early
        elif placement == Partial("sum") and node.name in ("reduce_sum", "dot_general"):
            self.sums[out] = early

    def run(self, node: Node) -> None:
        """Find the loop that has a running form of a whole value: one that depends on extrema alone."""
        stages = []
        for value in node.inputs:
            ready = self.runs(value)
            stages.append(self.known(value) if ready is None else ready)
        for value in node.outputs:
            if max(stages, default=0) < self.found.fact(value).stage:
                self.ready[value] = max(stages, default=0)

    def runs(self, value: Value) -> int | None:
        """The loop that has a running form of a value, if one has before the value itself is known."""
        fact = self.found.fact(value)
        if isinstance(fact.placement, Partial):
            return fact.stage if fact.placement.op in ("max", "min") else None
        return self.ready.get(value)

    def known(self, value: Value) -> int:
        """The first loop that can read a value whole; of a cut value, that can compute it."""
        fact = self.found.fact(value)
        return fact.stage + isinstance(fact.placement, Partial)

    def operand(self, value: Value) -> Early:
        return self.early.get(value) or Early(self.known(value))

    def late(self, node: Node) -> list[int]:
        """The operands that are whole and not known when the cut ones are."""
        stage = max((self.operand(v).stage for v in node.inputs if self.is_cut(v)), default=0)
        return [i for i, v in enumerate(node.inputs) if not self.is_cut(v) and self.known(v) > stage]

    def follow(self, node: Node, move: Move) -> Early | None:
        parts = (isinstance(p, Partial) for p in move.ins)
        rule = RULES.get(node.name)
        if rule is None or any(parts) or not any(map(self.is_cut, node.inputs)):
            return None
        late = self.late(node)
        return rule(self, node, move, late[0] if late else None) if len(late) < 2 else None

    def is_cut(self, value: Value) -> bool:
        return isinstance(self.found.fact(value).placement, Tiled)

    def term(self, value: Value, node: Node, move: Move, weight: float) -> tuple[Term, int | None] | None:
        """A late operand as a term, and the loop that has a running form of it, if it is constant along the cut."""
        base, dims = peel(value, len(node.outputs[0].shape))
        cut = move.outs[0]
        if not isinstance(cut, Tiled) or dims[cut.dim] is not None or not jnp.issubdtype(base.dtype, jnp.floating):
            return None
        return Term(base, dims, weight), self.runs(base)


Follow = Callable[[Finder, Node, Move, int | None], Early | None]  # the last: the number of the late operand


def follow_add(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    """Adding to what is to be exponentiated; or adding two things that are scaled alike."""
    signs = (1.0, -1.0 if node.name == "sub" else 1.0)
    if late is not None:
        other = 1 - late
        base = self.operand(node.inputs[other])
        found = self.term(node.inputs[late], node, move, signs[late])
        if found is None or base.scaled or base.factors:
            return None
        term, running = found
        if signs[other] < 0:
            base = weigh(base, -1.0)
        if running is None:
            return dataclasses.replace(base, offsets=merge(base.offsets, (term,)))
        stage = max(base.stage, running)
        return dataclasses.replace(base, stage=stage, anchors=merge(base.anchors, (term,)))
    a, b = (self.operand(v) for v in node.inputs)
    stage = max(a.stage, b.stage)
    if not (a.scaled or a.factors or b.scaled or b.factors):
        anchors, offsets = merge(a.anchors, b.anchors, signs[1]), merge(a.offsets, b.offsets, signs[1])
        return Early(stage, anchors, offsets)
    alike = (a.anchors, a.offsets, a.factors, a.scaled) == (b.anchors, b.offsets, b.factors, b.scaled)
    return dataclasses.replace(a, stage=stage, masked=a.masked or b.masked) if alike else None


def follow_multiply(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    exponents = (1.0, -1.0 if node.name == "div" else 1.0)
    if late is not None:
        other = 1 - late
        base = self.operand(node.inputs[other])
        found = self.term(node.inputs[late], node, move, exponents[late])
        unscaled = (base.anchors or base.offsets) and not base.scaled
        if found is None or unscaled or (node.name == "div" and other == 1):
            return None
        return dataclasses.replace(base, scaled=True, factors=merge(base.factors, (found[0],)))
    a, b = (self.operand(v) for v in node.inputs)
    stage = max(a.stage, b.stage)
    for early, other, exponent in ((a, node.inputs[1], exponents[1]), (b, node.inputs[0], 1.0)):
        if (early.anchors or early.offsets) and not early.scaled:
            number = constant(other)
            if number is None or (node.name == "div" and early is b):
                return None
            return dataclasses.replace(weigh(early, float(number) ** exponent), stage=stage)
    if node.name == "div" and not b.plain:
        return None
    joined = {k: merge(getattr(a, k), getattr(b, k)) for k in ("anchors", "offsets", "factors")}
    return Early(stage, **joined, scaled=True, masked=a.masked or b.masked)


def follow_exp(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    early = self.operand(node.inputs[0])
    if early.scaled or early.factors:
        return None
    return dataclasses.replace(weigh(early, math.log(2) if node.name == "exp2" else 1.0), scaled=True)


def follow_neg(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    early = self.operand(node.inputs[0])
    return early if early.scaled or early.factors else weigh(early, -1.0)


def follow_same(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    both = (node.inputs[0].dtype, node.outputs[0].dtype)
    return self.operand(node.inputs[0]) if all(jnp.issubdtype(d, jnp.floating) for d in both) else None


def follow_select(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    """A mask: 0 after an exponential, minus infinity before it, elsewhere values that are scaled alike."""
    which, *cases = node.inputs
    if late is not None or not self.operand(which).plain:
        return None
    found = [self.operand(v) for v in cases if self.is_cut(v) and constant(v) is None]
    filled = [v for v in cases if not self.is_cut(v) or constant(v) is not None]
    if not found or any((e.terms, e.scaled) != (found[0].terms, found[0].scaled) for e in found):
        return None
    stage = max(e.stage for e in (*found, self.operand(which)))
    fill = [constant(v) for v in filled]
    if found[0].scaled or found[0].factors:
        if any(f is None or f != 0 for f in fill):
            return None
        return dataclasses.replace(found[0], stage=stage, masked=bool(fill) or any(e.masked for e in found))
    if any(f is None or np.iscomplexobj(f) or not np.isneginf(f) for f in fill):
        return None
    return dataclasses.replace(found[0], stage=stage)


def follow_moved(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    source, rank = node.inputs[0], len(node.outputs[0].shape)
    match node.name:
        case "broadcast_in_dim":
            places = {int(out): i for i, out in enumerate(node.params["broadcast_dimensions"])}
        case "transpose":
            places = dict(enumerate(node.params["permutation"]))
        case "reduce_sum":
            places = dict(enumerate(d for d in range(len(source.shape)) if d not in node.params["axes"]))
        case _:
            real, came = ([d for d, n in enumerate(v.shape) if n != 1] for v in (node.outputs[0], source))
            if [node.outputs[0].shape[d] for d in real] != [source.shape[d] for d in came]:
                return None
            places = dict(zip(real, came, strict=True))

    def dims(old: Dims) -> Dims | None:
        lost = [d for i, d in enumerate(old) if d is not None and i not in places.values()]
        return None if lost else tuple(old[places[i]] if i in places else None for i in range(rank))

    early = self.operand(source)
    if node.name == "reduce_sum" and not early.plain and not early.scaled:
        return None
    return early.moved(dims)


def follow_dot(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    if late is not None:
        return None
    contract, batch = node.params["dimension_numbers"]
    parts: list[Early] = []
    for side, value in enumerate(node.inputs):
        early = self.operand(value)
        free = [d for d in range(len(value.shape)) if d not in contract[side] and d not in batch[side]]
        before = len(batch[0])
        if side == 1:
            before += len(node.inputs[0].shape) - len(contract[0]) - len(batch[0])
        places = dict(enumerate(batch[side])) | {before + i: d for i, d in enumerate(free)}

        def dims(old: Dims, places: dict[int, int] = places) -> Dims | None:
            lost = [d for i, d in enumerate(old) if d is not None and i not in places.values()]
            rank = len(node.outputs[0].shape)
            return None if lost else tuple(old[places[i]] if i in places else None for i in range(rank))

        moved = early.moved(dims)
        if moved is None or not (early.plain or early.scaled):
            return None
        parts.append(moved)
    a, b = parts
    joined = {k: merge(getattr(a, k), getattr(b, k)) for k in ("anchors", "offsets", "factors")}
    return Early(max(a.stage, b.stage), **joined, scaled=True, masked=a.masked or b.masked)


RULES: dict[str, Follow] = {
    **dict.fromkeys(["add", "sub", "add_any"], follow_add),
    **dict.fromkeys(["mul", "div"], follow_multiply),
    **dict.fromkeys(["exp", "exp2"], follow_exp),
    **dict.fromkeys(
        ["convert_element_type", "copy", "copy_p", "stop_gradient", "name", "optimization_barrier"], follow_same
    ),
    **dict.fromkeys(["broadcast_in_dim", "transpose", "squeeze", "reshape", "reduce_sum"], follow_moved),
    "neg": follow_neg,
    "select_n": follow_select,
    "dot_general": follow_dot,
}
