"""Deferral: what cut values depend on that only the end of a loop tells, a maximum or the sum they are divided by.

`exp(x - m) / s`, `m` and `s` reductions over the cut axis, is a value of the loop after those of `m` and `s`. But it is
also `exp(x)` times a factor that is constant along the cut axis, and a sum of it can be formed earlier (`rewrite`).

    Term, Early    the terms that every element of a cut value depends on alike, and the rest, which is known early
    follow_*       how such terms follow a value through each kind of equation. Each is told of an equation, its move,
                   and the number of the operand that is whole and late, if there is one; it returns the early form of
                   the result, or None where the result has none
    Finder         finds the early forms of a graph's values
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from transforms.layout import named, slice_of
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.numbering import Numbering, Numbers
from transforms.tiling.ir.placement import Partial, Tiled, Whole
from transforms.tiling.ir.terms import Dims, Early, Term, along, merge, weigh
from transforms.tiling.ir.walks import constant
from transforms.tiling.rules import Move
from transforms.tiling.rules.factors import origins, peel

Follow = Callable[["Finder", Node, Move, int | None], Early | None]  # the last: the number of the late operand


# ---------------------------------------------------------------------------------------- through each kind of equation


def follow_add(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    """Adding to what is to be exponentiated; or adding two things that are scaled alike."""
    signs = (1.0, -1.0 if node.name == "sub" else 1.0)
    if late is not None:
        other = 1 - late
        base = self.operand(node.inputs[other])
        found = self.terms(late, node, move, signs[late], signs[other])
        if found is None or base.scaled or base.factors or base.weighted:
            return None
        anchors = tuple(term for term, running in found if running is not None)
        if anchors and not base.plain:  # an extremum of what is known only with the terms that were left out before
            return None
        if signs[other] < 0:
            base = weigh(base, -1.0)
        return dataclasses.replace(
            base,
            stage=max([base.stage, *(running for _, running in found if running is not None)]),
            anchors=merge(base.anchors, anchors),
            offsets=merge(base.offsets, tuple(term for term, running in found if running is None)),
            anchored=base.anchored or bool(anchors),
            # What was taken apart is not rounded as the sum of its parts is, which others subtract before they
            # exponentiate: where both are to cancel, as in the gradient of such weights, they would not.
            bounded=base.bounded or (bool(anchors) and len(found) == 1),
        )
    a, b = (self.operand(v) for v in node.inputs)
    stage = max(a.stage, b.stage)
    if a.weighted or b.weighted:
        return _added(a, b)
    if not (a.scaled or a.factors or b.scaled or b.factors):
        anchors, offsets = merge(a.anchors, b.anchors, signs[1]), merge(a.offsets, b.offsets, signs[1])
        relative = (a.plain or a.anchored) and (b.plain or b.anchored) and bool(anchors)
        bounded = a.bounded and b.bounded and signs[1] > 0
        return Early(stage, anchors, offsets, anchored=relative, bounded=bounded)
    alike = (a.anchors, a.offsets, a.factors, a.scaled) == (b.anchors, b.offsets, b.factors, b.scaled)
    bounded = a.bounded and b.bounded
    return dataclasses.replace(a, stage=stage, masked=a.masked or b.masked, bounded=bounded) if alike else None


def _added(a: Early, b: Early) -> Early | None:
    """The sum of two values, of which one is weighted: the same terms, or none, are in the other."""
    if a.plain or b.plain:
        return dataclasses.replace(b if a.plain else a, stage=max(a.stage, b.stage))
    if a.scaled or b.scaled or a.terms != b.terms:
        return None
    return dataclasses.replace(a, stage=max(a.stage, b.stage), masked=a.masked or b.masked, weighted=True)


def follow_multiply(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    exponents = (1.0, -1.0 if node.name == "div" else 1.0)
    if late is not None:
        other = 1 - late
        base = self.operand(node.inputs[other])
        found = self.term(node.inputs[late], node, move, exponents[late])
        unscaled = (base.anchors or base.offsets) and not base.scaled
        if found is None or unscaled or (node.name == "div" and other == 1):
            return None
        return dataclasses.replace(base, scaled=True, factors=merge(base.factors, (found,)))
    a, b = (self.operand(v) for v in node.inputs)
    stage = max(a.stage, b.stage)
    for early, other, exponent in ((a, node.inputs[1], exponents[1]), (b, node.inputs[0], 1.0)):
        if (early.anchors or early.offsets) and not early.scaled:
            number = constant(other)
            if node.name == "div" and early is b:
                return None
            if number is None or early.weighted:
                return dataclasses.replace(early, stage=stage, weighted=True) if self.operand(other).plain else None
            return dataclasses.replace(weigh(early, float(number) ** exponent), stage=stage)
    if node.name == "div" and not b.plain:
        return None
    moderate = any(constant(v) is not None for v in node.inputs)
    return _multiplied(a, b) if moderate or (a.factorable and b.factorable) else None


def _multiplied(a: Early, b: Early) -> Early:
    """The product of two values: what was exponentiated is at most 1, and does not make the other any larger."""
    terms = (merge(getattr(a, kind), getattr(b, kind)) for kind in ("anchors", "offsets", "factors"))
    bounded = all(e.plain or e.bounded for e in (a, b))
    return Early(max(a.stage, b.stage), *terms, scaled=True, masked=a.masked or b.masked, bounded=bounded)


def follow_exp(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    early = self.operand(node.inputs[0])
    if early.scaled or early.factors or early.weighted or not (early.plain or early.bounded):
        return None
    return dataclasses.replace(weigh(early, math.log(2) if node.name == "exp2" else 1.0), scaled=True)


def follow_neg(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    early = self.operand(node.inputs[0])
    return early if early.scaled or early.factors or early.weighted else weigh(early, -1.0)


def follow_same(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    both = (node.inputs[0].dtype, node.outputs[0].dtype)
    return self.operand(node.inputs[0]) if all(jnp.issubdtype(d, jnp.floating) for d in both) else None


def follow_select(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    """A mask: 0 after an exponential, minus infinity before it, or 0 for a sum; elsewhere values of the same terms."""
    which, *cases = node.inputs
    if late is not None or not self.operand(which).plain:
        return None
    found = [self.operand(v) for v in cases if self.found.is_cut(v) and constant(v) is None]
    filled = [v for v in cases if not self.found.is_cut(v) or constant(v) is not None]
    if len({(e.terms, e.scaled, e.bounded) for e in found}) != 1:
        return None
    stage = max(e.stage for e in (*found, self.operand(which)))
    fill = [constant(v) for v in filled]
    if found[0].scaled or found[0].factors:
        if any(f is None or f != 0 for f in fill):
            return None
        # What is multiplied later meets the zeros, too.
        masked = bool(fill) and bool(found[0].offsets or found[0].factors)
        return dataclasses.replace(found[0], stage=stage, masked=masked or any(e.masked for e in found))
    weighted = any(e.weighted for e in found)
    if found[0].terms and all(f is not None and f == 0 for f in fill):
        return dataclasses.replace(found[0], stage=stage, masked=True, weighted=bool(fill) or weighted)
    if weighted or any(f is None or np.iscomplexobj(f) or not np.isneginf(f) for f in fill):
        return None
    return dataclasses.replace(found[0], stage=stage)


def follow_moved(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    if (places := origins(node)) is None:
        return None
    moved = self.operand(node.inputs[0]).moved(_carried(places, len(node.outputs[0].shape)))
    if node.name != "reduce_sum" or moved is None or moved.plain or moved.scaled:
        return moved
    # Relative to nothing, what remains may be much larger than the value itself: its sum would cancel.
    return dataclasses.replace(moved, weighted=True) if moved.anchored else None


def _carried(places: dict[int, int], rank: int) -> Callable[[Dims], Dims | None]:
    """How the dimensions of terms follow those of a value, whose dimension `places[i]` becomes dimension `i`."""

    def dims(old: Dims) -> Dims | None:
        lost = [d for i, d in enumerate(old) if d is not None and i not in places.values()]
        return None if lost else tuple(old[places[i]] if i in places else None for i in range(rank))

    return dims


def follow_gather(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    """Looked up along the cut axis, a value is what it is there, whatever the others are."""
    source, indices = node.inputs
    early, fill = self.operand(source), node.params["fill_value"]
    other = fill is not None and fill != 0 and not np.isnan(fill)  # a number that no term is to change
    if late is not None or not self.operand(indices).plain or other:
        return None
    moved = early.moved(_carried(origins(node) or {}, len(node.outputs[0].shape)))
    if moved is None:
        return None
    stage = max(early.stage, self.operand(indices).stage)
    return dataclasses.replace(moved, stage=stage, weighted=not early.plain and not early.scaled)


def follow_dot(self: Finder, node: Node, move: Move, late: int | None) -> Early | None:
    if late is not None:
        return None
    places = [origins(node, side) or {} for side in (0, 1)]
    moved = zip(node.inputs, places, strict=True)
    a, b = [self.operand(v).moved(_carried(p, len(node.outputs[0].shape))) for v, p in moved]
    if a is None or b is None:
        return None
    inner = places[0].keys() == places[1].keys()  # no product of matrices, but one of vectors
    if not all(e.plain or e.scaled for e in (a, b)):
        both = dataclasses.replace(b if a.plain else a, stage=max(a.stage, b.stage), weighted=True)
        return both if inner and (a.plain or b.plain) and both.anchored else None
    return _multiplied(a, b) if a.factorable and b.factorable else None


SAME = ("convert_element_type", "copy", "copy_p", "stop_gradient", "name", "optimization_barrier")
FOLLOW: dict[str, Follow] = {
    **dict.fromkeys(["add", "sub", "add_any"], follow_add),
    **dict.fromkeys(["mul", "div"], follow_multiply),
    **dict.fromkeys(["exp", "exp2"], follow_exp),
    **dict.fromkeys(SAME, follow_same),
    **dict.fromkeys(["broadcast_in_dim", "transpose", "squeeze", "reshape", "reduce_sum"], follow_moved),
    "neg": follow_neg,
    "select_n": follow_select,
    "dot_general": follow_dot,
    "gather": follow_gather,
}


# -------------------------------------------------------------------------------------------------- what a graph defers


class Anchor(NamedTuple):
    """A term of a sum, and the loop that has a running form of it, if it is an extremum of what it is added to."""

    term: Term
    running: int | None


class Finder:
    """The early forms of all cut values of an analysed graph."""

    def __init__(self, found: Analysis):
        self.found = found
        self.early: dict[Value, Early] = {}
        self.sums: dict[Value, Early] = {}  # partial sums that an earlier loop could form
        self.parts: dict[Value, Node] = {}  # of these, the sum over the cut axis alone
        self.ready: dict[Value, int] = {}  # whole values of which a loop has a running form
        for node in found.graph.nodes:
            self.visit(node)

    @functools.cached_property
    def numbers(self) -> Numbers:
        """What tells values from each other."""
        return Numbering()(self.found.graph)

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
        if early is None and placement == Partial("sum") and node.name == "reduce_sum":
            self.split(node, move)
        if early is None or early.stage >= fact.stage:
            return
        if isinstance(placement, Tiled):
            self.early[out] = early
        elif placement == Partial("sum") and node.name in ("reduce_sum", "dot_general", "gather"):
            self.sums[out] = early

    def split(self, node: Node, move: Move) -> None:
        """A sum over other dimensions too may be made early if it is one over the cut axis first."""
        (source,), (cut,), axes = node.inputs, move.ins, node.params["axes"]
        if not isinstance(cut, Tiled) or len(axes) < 2 or self.operand(source).plain or named(source.aval) is not None:
            return
        inner = node.like([source], [slice_of(source.aval, cut.dim)], params=node.params | {"axes": (cut.dim,)})
        early = self.follow(inner, Move((Partial("sum"),), move.ins))
        if early is not None and early.stage < self.found.fact(node.outputs[0]).stage:
            self.sums[node.outputs[0]], self.parts[node.outputs[0]] = early, inner

    def run(self, node: Node) -> None:
        """Find the loop that has a running form of a whole value: one that depends on extrema alone."""
        both = ((self.runs(v), self.known(v)) for v in node.inputs)
        stage = max((known if ready is None else ready for ready, known in both), default=0)
        self.ready.update((v, stage) for v in node.outputs if stage < self.found.fact(v).stage)

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
        stage = max((self.operand(v).stage for v in node.inputs if self.found.is_cut(v)), default=0)
        return [i for i, v in enumerate(node.inputs) if not self.found.is_cut(v) and self.known(v) > stage]

    def follow(self, node: Node, move: Move) -> Early | None:
        parts = (isinstance(p, Partial) for p in move.ins)
        rule = FOLLOW.get(node.name)
        if rule is None or any(parts) or not any(map(self.found.is_cut, node.inputs)):
            return None
        late = self.late(node)
        early = rule(self, node, move, late[0] if late else None) if len(late) < 2 else None
        return early and dataclasses.replace(early, stage=max(early.stage, self.completed(node)))

    def completed(self, node: Node) -> int:
        """The first loop after those that end in what the node reads whole, of cut values."""
        read = (v for i, v in enumerate(node.inputs) if (node, i) in self.found.completed and self.found.is_cut(v))
        return max((self.found.fact(v).stage + 1 for v in read if not self.found.is_there(v)), default=0)

    def term(self, value: Value, node: Node, move: Move, weight: float) -> Term | None:
        """A late operand as a term, if it is constant along the cut."""
        base, dims = peel(value, len(node.outputs[0].shape))
        cut = move.outs[0]
        if not isinstance(cut, Tiled) or dims[cut.dim] is not None or not jnp.issubdtype(base.dtype, jnp.floating):
            return None
        return Term(base, dims, weight)

    def terms(self, late: int, node: Node, move: Move, weight: float, sign: float) -> list[Anchor] | None:
        """The terms that a late operand of a sum adds to the other one, which has the `sign`.

        A logarithm of a sum of exponentials is the maximum, and what that leaves: what is such a sum is taken apart.
        """
        term = self.term(node.inputs[late], node, move, weight)
        if term is None:
            return None
        other = node.inputs[1 - late]
        anchor = self.anchor(term, other, sign)
        if anchor.running is not None or named(other.aval) is not None:
            return [anchor]
        parts = [self.anchor(t, other, sign) for t in self.parted(term)]
        return parts if any(p.running is not None for p in parts) else [anchor]

    def parted(self, term: Term) -> list[Term]:
        """What a term is a sum or difference of."""
        base, node = term.value, term.value.producer
        if node is None or node.name not in ("add", "sub", "add_any"):
            return [term]
        found = []
        for value, weight in zip(node.inputs, (1.0, -1.0 if node.name == "sub" else 1.0), strict=True):
            inner, dims = peel(value, len(base.shape))
            found += self.parted(Term(inner, along(term.dims, dims), term.weight * weight))
        return found

    def anchor(self, term: Term, other: Value, sign: float) -> Anchor:
        """A term, and the loop that has a running form of it, if it is an extremum that bounds `sign * other`."""
        running = self.runs(term.value)
        op = "max" if term.weight < 0 else "min"
        proven = term.weight == -sign and self.bounds(op, term.value, term.dims, other)
        return Anchor(term, running if proven else None)

    def bounds(self, op: str, value: Value, dims: Dims, other: Value) -> bool:
        """Whether a whole value is the extremum of another over the cut axis, or of that and further values.

        `dims`: which dimension of the value lies along each of the other.
        """
        value, inner = peel(value, len(value.shape))
        dims, node = along(dims, inner), value.producer
        if node is None:
            return False
        if node.name == f"reduce_{op}":
            (source,) = node.inputs
            kept = [d for d in range(len(source.shape)) if d not in node.params["axes"]]
            mine, theirs = (self.origin(v) for v in (source, other))
            aligned = all(d is None or mine[1][kept[d]] == theirs[1][i] for i, d in enumerate(dims))
            return mine[0] == theirs[0] and aligned
        if node.name in SAME or node.name in (op, "select_n"):
            # Of a choice, the other case is a number that stands for an extremum which is not finite.
            cases = [v for v in node.inputs[node.name == "select_n" :] if constant(v) is None]
            found = [self.bounds(op, v, dims, other) for v in cases if v.shape == value.shape]
            return any(found) if node.name == op else bool(found) and all(found)
        return False

    def origin(self, value: Value) -> tuple[int | None, Dims]:
        """What tells a value from others, however it is turned and written; and which of its dimensions lies where."""
        rank = len(value.shape)
        dims: Dims = tuple(range(rank))
        while True:
            value, inner = peel(value, len(value.shape))
            dims, node = along(dims, inner), value.producer
            if node is None or node.name not in SAME:
                return self.numbers.get(value), dims
            if not all(jnp.issubdtype(v.dtype, jnp.floating) for v in (value, node.inputs[0])):
                return self.numbers.get(value), dims
            value = node.inputs[0]
