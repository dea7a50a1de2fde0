"""How cut values depend on what only the end of a loop tells: the maximum, the sum that they are divided by.

`exp(x - m) / s`, `m` and `s` reductions over the cut axis, is a value of the loop after those of `m` and `s`. But it is
also `exp(x)` times a factor that is constant along the cut axis, and a sum of it can be formed earlier: see online.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray

from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Node, Value, constant
from transforms.tiling.ir.numbering import Numbering, Numbers
from transforms.tiling.ir.placement import Partial, Tiled, Whole
from transforms.tiling.mesh.layout import named
from transforms.tiling.passes.online.follow import RULES
from transforms.tiling.passes.online.terms import Dims, Early, Term, along, peel
from transforms.tiling.rules import Move

SAME = frozenset("stop_gradient convert_element_type copy copy_p name optimization_barrier".split())


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
        shape = tuple(n for d, n in enumerate(source.shape) if d != cut.dim)
        inner = dataclasses.replace(node, params=node.params | {"axes": (cut.dim,)}, outputs=[], bodies={})
        inner.outputs.append(Value(ShapedArray(shape, source.dtype), inner))
        early = self.follow(inner, Move((Partial("sum"),), move.ins))
        if early is not None and early.stage < self.found.fact(node.outputs[0]).stage:
            self.sums[node.outputs[0]], self.parts[node.outputs[0]] = early, inner

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
        early = rule(self, node, move, late[0] if late else None) if len(late) < 2 else None
        return early and dataclasses.replace(early, stage=max(early.stage, self.completed(node)))

    def completed(self, node: Node) -> int:
        """The first loop after those that end in what the node reads whole, of cut values."""
        already = self.found.inputs | self.found.stored
        read = (v for i, v in enumerate(node.inputs) if (node, i) in self.found.completed and self.is_cut(v))
        return max((self.found.fact(v).stage + 1 for v in read if v not in already), default=0)

    def is_cut(self, value: Value) -> bool:
        return isinstance(self.found.fact(value).placement, Tiled)

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
