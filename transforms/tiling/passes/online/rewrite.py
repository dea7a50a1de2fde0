"""Online reductions: sums that are relative to a running maximum and end in the loop that finds the maximum.

`sum(exp(x - m))`, `m` the maximum of `x` over the cut axis, would need a loop for `m` and another for the sum. It is
formed in one: each tile works with the maximum so far, and what was summed before is rescaled when that moves. A whole
value that divides or multiplies each term alike (the denominator of a softmax) is applied after the loop. So attention
cut over its keys is one loop, and so are the statistics of a cross-entropy cut over the vocabulary.

A sum is rewritten as a copy of its computation in which the running maximum (`running`, an equation of our own) stands
for the final one, and what was left out follows it. Where nothing is exponentiated, `sum(w * (x - m - s))`, or the
logarithm of the probability of a label, what was left out is added as often as the weights sum up to (`Weights`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from transforms.tiling.analysis.rounding import decides
from transforms.tiling.frontend.trace import append
from transforms.tiling.ir.facts import Analysis, Fact
from transforms.tiling.ir.graph import Node, Value, add
from transforms.tiling.ir.loops import Online
from transforms.tiling.ir.placement import COMBINE, WHOLE, Partial, Placement, Span, Tiled, Whole
from transforms.tiling.ir.terms import Early, Term, broadcast_by
from transforms.tiling.ir.walks import closure, operands
from transforms.tiling.mesh.sums import contracted
from transforms.tiling.passes.online.deferral import Finder
from transforms.tiling.passes.reassociate import Product, reassociate
from transforms.tiling.rules import Move, register
from transforms.tiling.rules.factors import peel

running_p = Primitive("running")  # a maximum or minimum over the tiles so far
anchor_p = Primitive("anchor")  # one that linear terms are relative to: 0 while all of them are masked


@dataclasses.dataclass
class Rewritten:
    """What was made online in a graph: the sums, and the copies of values that are relative to running anchors."""

    sums: dict[Value, Online] = dataclasses.field(default_factory=dict)
    copies: dict[Any, Value] = dataclasses.field(default_factory=dict)
    results: dict[Value, None] = dataclasses.field(default_factory=dict)  # what was rewritten, and its anchors


def rewrite(found: Analysis, done: Rewritten, span: Span) -> bool:
    """Make sums of an analysed graph online where that saves a loop. Its analysis is void then.

    All that do not build on one another: an analysis for each of them would take a deep program quadratic time.
    """
    finder = Finder(found)
    able = {}
    for value, early in finder.sums.items():
        known = max([early.stage + 1, *(finder.known(t.value) for t in (*early.offsets, *early.factors))])
        # Rescaling needs what all devices hold, in every tile.
        apart = early.anchors and any(contracted(value.producer))
        if value in done.sums or apart or known > found.fact(value).stage:
            continue
        if not decides(found.graph, value):  # what is rescaled afterwards has not the last bits of what it is a copy of
            able[value] = early
    changed = False
    for value, early in able.items():
        node = value.producer
        if node is None or (changed and not _is_intact(finder, value)) or not _saves(found, value, able):
            continue
        if node.name == "dot_general" and reassociate(found.graph, Product(node, value), finder.numbers):
            changed = True
            continue
        if (inner := finder.parts.get(value)) is not None:
            return _divide(found, node, inner)
        done.results.update(dict.fromkeys([*(t.value for t in early.anchors), value]))
        _Writer(finder, done, span).write(value, early)
        changed = True
    return changed


def _is_intact(finder: Finder, value: Value) -> bool:
    """Whether what the analysis says of a sum, and of all that it is copied from, still holds in a changed graph."""
    alive = {*finder.found.graph.nodes}
    same = lambda v: v.producer is None or (v.producer in alive and v in finder.found.facts)

    def copied_from(value: Value) -> Sequence[Value]:
        form = finder.early.get(value) or finder.sums.get(value)
        return () if form is None else (*operands(value), *(t.value for t in form.terms))

    return all(map(same, closure([value], copied_from)))


def _divide(found: Analysis, node: Node, inner: Node) -> bool:
    """Sum over the cut axis first, over what else `node` sums over then."""
    (cut,) = inner.params["axes"]
    rest = tuple(d - (d > cut) for d in node.params["axes"] if d != cut)
    found.graph.insert([inner], before=node)
    node.change(inputs=inner.outputs, params=node.params | {"axes": rest})
    return True


def _saves(found: Analysis, value: Value, able: Collection[Value]) -> bool:
    """Whether a loop waits for the sum; or all results that are formed as late come of sums that are `able` too."""
    stage = found.fact(value).stage
    later = (f for _, facts in _after(found, {value}) for f in facts if f.stage > stage)
    if any(not isinstance(f.placement, Whole) for f in later):
        return True
    reached = {*able, *(v for node, _ in _after(found, set(able)) for v in node.outputs)}
    ends = [found.last_loop(v) for v in found.graph.outputs if v not in reached]
    return max(ends, default=-1) < stage


def _after(found: Analysis, reached: set[Value]) -> Iterator[tuple[Node, list[Fact]]]:
    """The nodes that depend on some values, and what is known of their results."""
    for node in found.graph.nodes:
        if not reached.isdisjoint(node.inputs):
            reached.update(node.outputs)
            yield node, [found.fact(v) for v in node.outputs if v in found.used]


class _Writer:
    def __init__(self, finder: Finder, done: Rewritten, span: Span):
        self.finder, self.found, self.done, self.span = finder, finder.found, done, span
        self.nodes: list[Node] = []
        self.linear = False  # what is summed is not exponentiated

    def write(self, value: Value, early: Early) -> None:
        node = value.maker
        self.linear = early.weighted
        wide = self.span.wide(value.dtype)
        total = self.copy(value)
        weight = Weights(self.finder, self.copy, self.nodes)(value) if early.weighted else None
        # A masked term is 0 whatever it would be multiplied by: 0, infinity or NaN, where nothing bounds it.
        counted = early.masked and bool(early.factors) and not early.anchors
        count = Weights(self.finder, self.copy, self.nodes, counting=True)(value) if counted else None
        sums = [v for v in (total, weight, count) if v is not None]
        for v in sums:
            v.retype(value.aval.update(dtype=wide))
        anchors = tuple(dataclasses.replace(t, value=self.anchor(t.value, t.weight)) for t in early.anchors)
        self.done.sums[total] = Online(anchors, weight)
        terms = early.terms

        def finish(*values: Any) -> Any:
            total, *rest = (v.astype(wide) for v in values)
            if early.weighted:
                return shifted(early, total, *rest).astype(value.dtype)
            unmasked = rest.pop(0) if counted else total
            return _finish(early, total, unmasked == 0 if early.masked else None, *rest).astype(value.dtype)

        known = [self.settled(v, node) for v in sums]
        result = append(self.nodes, finish, [*known, *(t.value for t in terms)], node)
        self.found.graph.replace(node, self.nodes, result)
        self.found.graph.sort()

    def settled(self, total: Value, node: Node) -> Value:
        """A sum once its anchors are final: before that, nothing may be added to it. It is linear in nothing."""
        kind = jnp.finfo(total.dtype)
        params = {"exponent_bits": kind.nexp, "mantissa_bits": kind.nmant}
        return add(self.nodes, node, lax.reduce_precision_p, [total], [total.aval], **params)[0]

    def copy(self, value: Value) -> Value:
        """The value as it can be known early: relative to running anchors, without factors and offsets."""
        node = value.producer
        if node is None or (value not in self.finder.early and value not in self.finder.sums):
            return value
        key = ("linear" if self.linear else "scaled", value)
        if key not in self.done.copies:
            self.done.copies[key] = self._copied(node, self.finder.early.get(value) or self.finder.sums[value])
        return self.done.copies[key]

    def _copied(self, node: Node, early: Early) -> Value:
        inputs = [self.copy(v) for v in node.inputs]
        if not (late := self.finder.late(node)):
            return self.add(node, inputs)
        (place,) = late
        anchors = [] if early.scaled else self._anchors(node, place)
        if not anchors:
            made = inputs[1 - place]
            if node.name == "sub" and place == 0:
                made = self.add(dataclasses.replace(node, primitive=lax.neg_p, params={}), [made])
            return made
        base, _ = peel(node.inputs[place], len(node.outputs[0].shape))
        if [term.value for term in anchors] == [base]:
            inputs[place] = self.anchored(node.inputs[place], base, anchors[0].weight)
        else:
            sign = -1.0 if place == 1 and node.name == "sub" else 1.0
            inputs[place] = self._sum(node, node.inputs[place], anchors, sign)
        return self.add(node, inputs)

    def _anchors(self, node: Node, place: int) -> list[Term]:
        """What of a late operand has a running form."""
        signs = (1.0, -1.0 if node.name == "sub" else 1.0)
        found = self.finder.terms(place, node, self.found.moves[node], signs[place], signs[1 - place])
        assert found is not None
        return [term for term, running in found if running is not None]

    def _sum(self, node: Node, value: Value, terms: Sequence[Term], sign: float) -> Value:
        """The running forms of terms, each as it lies in `value`, an operand of the node."""

        def total(*anchors: Any) -> Any:
            laid = [broadcast_by(a, t.dims, value.shape) for a, t in zip(anchors, terms, strict=True)]
            found = [t.weight * sign * array for array, t in zip(laid, terms, strict=True)]
            return jnp.broadcast_to(sum(found), value.shape).astype(value.dtype)

        return append(self.nodes, total, [self.anchor(t.value, t.weight) for t in terms], node)[0]

    def add(self, node: Node, inputs: Sequence[Value]) -> Value:
        """A node like another one, of other operands."""
        made = node.like(inputs, [node.outputs[0].aval])
        self.nodes.append(made)
        return made.outputs[0]

    def anchored(self, value: Value, base: Value, weight: float) -> Value:
        """`value`, which repeats `base`, of the running form of `base`."""
        if value is base:
            return self.anchor(base, weight)
        node = value.maker
        return self.add(node, [self.anchored(node.inputs[0], base, weight), *node.inputs[1:]])

    def anchor(self, base: Value, weight: float) -> Value:
        """The running form of an anchor; of linear sums, 0 where the terms are all masked."""
        if not self.linear:
            return self.running(base)
        key = ("anchor", base, weight > 0)
        if key not in self.done.copies:
            node = base.maker
            sign, running = 1 if weight > 0 else -1, self.running(base)
            (self.done.copies[key],) = add(self.nodes, node, anchor_p, [running], [base.aval], sign=sign)
        return self.done.copies[key]

    def running(self, value: Value) -> Value:
        placement = self.found.fact(value).placement
        node = value.producer
        if node is None or (isinstance(placement, Whole) and value not in self.finder.ready):
            return value
        key = ("running", value)
        if key not in self.done.copies:
            if isinstance(placement, Partial):
                (made,) = add(self.nodes, node, running_p, [value], [value.aval], op=placement.op)
                self.done.copies[key] = made
            else:
                inputs = [self.running(v) for v in node.inputs]
                made = add(self.nodes, node, node.primitive, inputs, [v.aval for v in node.outputs], **node.params)
                self.done.copies |= {("running", v): twin for v, twin in zip(node.outputs, made, strict=True)}
        return self.done.copies[key]


def _finish(early: Early, total: Any, empty: Any | None, *values: Any) -> Any:
    """Apply to a sum what its terms left out, but where it is `empty`: all of them are masked."""
    result, laid = total, {t: broadcast_by(v, t.dims, total.shape) for t, v in zip(early.terms, values, strict=True)}
    for term in early.offsets:
        result = result * jnp.exp(term.weight * laid[term])
    for term in early.factors:
        for _ in range(int(abs(term.weight))):
            result = result * laid[term] if term.weight > 0 else result / laid[term]
    return result if empty is None else jnp.where(empty, 0, result)


def push_running(node: Node, placements: tuple[Placement, ...]) -> Move:
    """The same for all rows; but where what it runs on has been cut another way since, it is that."""
    return Move(placements if isinstance(placements[0], Tiled) else (WHOLE,), placements)


def resume_running(node: Node, source: Value, given: Any, before: Mapping[Value, Any], span: Span) -> Any:
    """The extremum up to and with this tile."""
    return COMBINE[node.params["op"]](before[source], given) if source in before else given


def emit_anchor(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    (value,) = values
    return [jnp.where(node.params["sign"] * value == jnp.inf, jnp.zeros_like(value), value)]


register("running", push=push_running, resume=resume_running)
register("anchor", push=push_running, emit=emit_anchor)


# ---------------------------------------------------------------------------------------------------------- linear sums


class Weights:
    """Writes, behind `nodes`, how often the terms of a value are in it: `copy` tells what else it is made of.

    Args:
        counting: count those that are not masked, by whatever they are multiplied.
    """

    def __init__(self, finder: Finder, copy: Callable[[Value], Value], nodes: list[Node], counting: bool = False):
        self.finder, self.copy, self.nodes, self.counting = finder, copy, nodes, counting
        self.known: dict[Value, Value] = {}

    def __call__(self, value: Value) -> Value:
        if value not in self.known:
            self.known[value] = self._write(value)
        return self.known[value]

    def _write(self, value: Value) -> Value:
        node = value.maker
        early = self._early(value)
        if not (early.masked if self.counting else early.weighted):
            ones = lambda x: jnp.where(x == x, jnp.ones_like(x), 1)
            return append(self.nodes, ones, [self.copy(value)], node)[0]
        linear = [not self._early(v).plain for v in node.inputs]
        if self.counting and node.name in ("mul", "div", "neg"):  # by a number, or by what is known late
            return self(node.inputs[linear.index(True)])
        sums = node.name in ("add", "sub", "add_any", "select_n")
        inputs = []
        for i, (v, mine) in enumerate(zip(node.inputs, linear, strict=True)):
            other = sums and not (node.name == "select_n" and i == 0)
            if mine:
                inputs.append(self(v))
            elif other:  # it has none of the terms
                inputs += append(self.nodes, jnp.zeros_like, [v], node)
            else:
                inputs.append(self.copy(v))
        unsigned = {"primitive": lax.add_p} if self.counting and node.name == "sub" else {}
        made = node.like(inputs, [node.outputs[0].aval], **unsigned)
        self.nodes.append(made)
        return made.outputs[0]

    def _early(self, value: Value) -> Early:
        return self.finder.sums.get(value) or self.finder.operand(value)


def shifted(early: Early, total: Any, weight: Any, *values: Any) -> Any:
    """Add to a sum what its terms left out, as often as they are in it."""
    result, laid = total, {t: broadcast_by(v, t.dims, total.shape) for t, v in zip(early.terms, values, strict=True)}
    for term in early.offsets:
        added = term.weight * laid[term] * weight
        result = result + (jnp.where(weight == 0, 0, added) if early.masked else added)
    for term in early.anchors:  # every element is inf - inf
        result = jnp.where((term.weight * laid[term] == jnp.inf) & (weight != 0), jnp.nan, result)
    return result
