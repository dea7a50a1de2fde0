"""How cut values depend on what only the end of a loop tells: the maximum, the sum that they are divided by.

`exp(x - m) / s`, `m` and `s` reductions over the cut axis, is a value of the loop after those of `m` and `s`. But it is
also `exp(x)` times a factor that is constant along the cut axis, and a sum of it can be formed earlier: see online.py.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.core import ShapedArray

from transforms.analysis import Analysis
from transforms.follow import RULES
from transforms.graph import Node, Value
from transforms.placement import Partial, Tiled, Whole
from transforms.rules import Move
from transforms.spread import named
from transforms.terms import Early, Term, peel


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

    def term(self, value: Value, node: Node, move: Move, weight: float) -> tuple[Term, int | None] | None:
        """A late operand as a term, and the loop that has a running form of it, if it is constant along the cut."""
        base, dims = peel(value, len(node.outputs[0].shape))
        cut = move.outs[0]
        if not isinstance(cut, Tiled) or dims[cut.dim] is not None or not jnp.issubdtype(base.dtype, jnp.floating):
            return None
        return Term(base, dims, weight), self.runs(base)
