"""Where the last bit decides: no comparison sees both a value that a loop computes again and a copy of it from before.

A loop that needs a cut value which an earlier one computed computes it again (rematerialisation), and XLA compiles each
loop by itself: products are fused into additions here and not there, so that two computations of `h` may differ in the
last bit. Most functions do not mind. But `h == h.max()` is true nowhere then, and `h >= top_k(h)[-1]` lacks one.

The rule, for every equation that is run tile by tile: if it is discontinuous (a comparison, a rounding, a sort, a
conversion to integers), or not smooth where two numbers are equal (the root of a difference, a division by one), then
the operands that decide that (of a quotient, the divisor) may not depend on a value that is computed again and also on
a copy of an element of that value which was made before: by a maximum, a sort, a lookup, a masked sum. Values that no
rounding enters, such as inputs and their rearrangements, are the same however often they are computed.

`meeting` finds the first equation that breaks the rule, from the placements alone; `check` looks at the loops that were
planned. What breaks it is mended (`passes.agreement`), or refused:

    stored     the value is stored by the loop that computes it first, and whoever reads it reads that: if it may be
               whole, as any other value that is completed
    again      a cut copy that an earlier loop stored for other readers (each row's maximum, which is sorted too) is
               computed again beside what it is a copy of
    agreed     what is computed again is brought into agreement with what is known of it: what was looked up is put back
               to its place, an extremum to the place that comes out of the loop that finds it (a *witness*, with the
               number of ties: a few integers, however large the value)
    refused    otherwise
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Var

from transforms.tiling.analysis.limits import human, too_large
from transforms.tiling.frontend.flatten import body_graph
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Graph, Node, Value, elements
from transforms.tiling.ir.jaxprs import bodies
from transforms.tiling.ir.loops import Loop, Schedule
from transforms.tiling.ir.obstacles import Disagreement
from transforms.tiling.ir.placement import Placement, Tiled
from transforms.tiling.ir.walks import ancestors, closure, constant, operands
from transforms.tiling.primitives import REMAT, has, having

DISCONTINUOUS = having("discontinuous")  # conversions to integers, too: see `_jumps`
AT_ZERO, AT_ONE, ONE_SIDED = having("at_zero"), having("at_one"), having("one_sided")
THROUGH_ZERO, COPYING, MOVING, CHOOSING = (having(word) for word in ("through_zero", "copying", "moving", "choosing"))
EXACT = MOVING | COPYING | DISCONTINUOUS | having("exact")
SUMMING, ADDING = having("summing"), having("adding")
ONCE = ADDING | having("subtracts")  # one of these rounds always alike: there is no product to be fused with
KEPT = SUMMING | COPYING | having("stored")  # what comes of these is not computed again element by element


MOST = 1 << 16  # elements of a constant array that is looked into


class Origin(NamedTuple):
    """What a value depends on: the values that are `computed` tile by tile, those that it has `copies` of.

    `roundings`: 0 where none enters it, 1 for a single addition, 2 for more.
    """

    computed: frozenset[Value] = frozenset()
    copies: frozenset[Value] = frozenset()
    roundings: int = 0


Meeting = tuple[Node, Value]  # the node reads the value, computed once more, and what was copied from it before


def meeting(found: Analysis) -> Disagreement | None:
    """The first equation of an analysed graph that breaks the rule, if the loops compute again what they can."""
    walk = Walk(found)
    return None if walk.first is None else walk.disagreement(walk.first, walk.stored)


def check(plan: Schedule) -> Disagreement | None:
    """Where a loop breaks the rule, which tells more than `meeting`: loops compute their own parts of whole values too.

    And what it is to compute again, where that mends it.
    """
    refs = (ref for loop in plan.loops for ref in loop.refs if ref.how == "slice")
    walk = Walk(plan.analysis, {ref.value for ref in refs if ref.value not in plan.analysis.inputs})
    first = next((met for loop in plan.loops if (met := walk.within(loop)) is not None), None)
    return None if first is None else walk.disagreement(first, walk.held)


def running(plan: Schedule) -> Disagreement | None:
    """An equation that jumps where a cumulative sum passes a number, and that more than one loop runs.

    A distribution's last cumulative sum is 1 up to rounding. Whether it is above 1, say the sign in the gradient of
    its distance to another's, does not matter to any result as long as all loops say the same.
    """
    graph = plan.analysis.graph
    sums = {n.outputs[0] for n in graph.nodes if has(n.name, "running") and n.params["op"] == "sum"}
    reached = _elementwise(graph, {v for v in sums if _inexact(v)})
    for node in graph.nodes:
        if reached.isdisjoint(node.inputs):
            continue
        operands = [v for v in _jumps_in(node) if v in reached]
        if operands and sum(node in loop.nodes for loop in plan.loops) > 1:
            return disagreement(plan.analysis, (node, root(operands[0])), SUMS)
    return None


def decides(graph: Graph, value: Value) -> bool:
    """Whether a value must have the last bits of what it is a copy of: both meet in a comparison.

    So it may neither be known from another program nor be rescaled after the loop that finds it.
    """
    name = lambda v: "" if v.producer is None else v.producer.name
    made = closure([value], lambda v: () if name(v) in SUMMING | COPYING else operands(v))
    makers = {v.producer for v in made if v.producer is not None}
    roots = {root(source) for node in makers if node.name in COPYING for source in node.inputs}
    let = (v for node in makers for i in range(len(node.inputs)) for v in _let_through(node, i))
    roots |= {source for v in let for source in _sources(v)}
    if not roots:
        return False
    before = ancestors(roots)  # what agrees with these was computed once more from there on
    roots |= {n.outputs[0] for n in graph.nodes if has(n.name, "agreed") and n.inputs[0] in before}
    copies, computed = _elementwise(graph, {value}), _elementwise(graph, roots)
    both = lambda values: not copies.isdisjoint(values) and not computed.isdisjoint(values)
    return any(both(node.inputs) and both(_jumps_in(node)) for node in graph.nodes)


def _elementwise(graph: Graph, sources: set[Value]) -> set[Value]:
    """What is computed from values element by element, and computed again by each loop that reads it."""
    found = set(sources)
    for node in graph.nodes:
        if node.name not in KEPT and not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


COPIES = (
    "it compares values that one loop computes with copies of them (a maximum, a sorted, looked up or masked one) that "
    "came out of an earlier loop, and the last bits of two computations differ"
)
SUMS = "several loops ask where a cumulative sum passes a number, and the last bits of their computations differ"


def disagreement(found: Analysis, met: Meeting, why: str = COPIES) -> Disagreement:
    (node, value), limits = met, found.limits
    assert limits is not None, "no body is compared with another"
    array = f"value: {value}, {human(value.nbytes)}, made by {value.producer}"
    message = too_large(limits, str(node), f"{why}. They would have to be stored", array)
    return Disagreement(message, analysis=found, node=node, value=value, must_store=why is SUMS)


# ------------------------------------------------------------------------------------------------------ who sees what


class Walk:
    """Follows values, their copies and their roundings through a graph."""

    def __init__(self, found: Analysis, read: Iterable[Value] = ()):
        self.found = found
        # Of cut values that are `read` as an earlier loop stored them, or whole, what they have copies of.
        self.held = {v: frozenset(self._held(v)) for v in read if self.found.is_cut(v)}
        whole = {node.inputs[i] for node, i in found.completed if self.found.is_cut(node.inputs[i])} - found.inputs
        self.whole = {v: frozenset(_sources(v)) for v in whole}
        kept = [n for n in found.graph.nodes if has(n.name, "stored")]
        self.stored = {n.outputs[0]: self.whole[n.inputs[0]] for n in kept if n.inputs[0] in self.whole}
        self.copied: dict[Node, frozenset[Value]] = {}
        for node in found.graph.nodes:
            if copies := frozenset(self._copies(node)):
                self.copied[node] = copies
        held = (*self.copied.values(), *self.held.values(), *self.whole.values())
        self.roots = frozenset(v for copies in held for v in copies)
        self.known: dict[Value, Origin] = {}
        self.first: Meeting | None = None
        if self.roots:
            for node in found.graph.nodes:
                reads = [self._read(node, i) for i in range(len(node.inputs))]
                hit = self._visit(node, reads, self.known, found.moves[node].outs)
                self.first = self.first or hit

    def within(self, loop: Loop) -> Meeting | None:
        """The first step of a loop that breaks the rule."""
        if not self.roots:
            return None
        here: dict[Value, Origin] = {}
        for step in loop.steps:
            reads = []
            for ref in step.refs:
                known = self.known.get(ref.value, Origin()).copies
                held = self.whole if ref.how == "whole" else self.held
                outside = Origin(copies=known | held.get(ref.value, frozenset()))
                reads.append(here.get(ref.value, outside) if ref.how == "tile" else outside)
            if (hit := self._visit(step.node, reads, here, [p for _, p in step.keys] or step.move.outs)) is not None:
                return hit
        return None

    def disagreement(self, met: Meeting, held: Mapping[Value, frozenset[Value]]) -> Disagreement:
        """What breaks the rule, and which of the stored copies that are `held` a loop is to compute again for it."""
        node, value = met
        read = closure(filter(self.found.is_cut, node.inputs), lambda v: filter(self.found.is_cut, operands(v)))
        limits = self.found.limits
        assert limits is not None, "no body is planned by itself"
        again = frozenset(v for v in read if value in held.get(v, ())) - limits.again
        return dataclasses.replace(disagreement(self.found, met), again=again)

    def _read(self, node: Node, number: int) -> Origin:
        """An operand as a loop has it: it computes what is cut, and reads what is whole or stored."""
        value = node.inputs[number]
        known = self.known.get(value, Origin())
        if (node, number) in self.found.completed:
            return Origin(copies=known.copies | self.whole.get(value, frozenset()))
        computed = self.found.is_cut(value) and not self.found.is_there(value)
        return known if computed else Origin(copies=known.copies)

    def _visit(
        self, node: Node, reads: list[Origin], known: dict[Value, Origin], outs: Iterable[Placement]
    ) -> Meeting | None:
        computed = frozenset().union(*(r.computed for r in reads))
        copies = frozenset().union(*(r.copies for r in reads), self.copied.get(node, ()))
        roundings = max((r.roundings for r in reads), default=0)
        if node.name in ONCE and roundings == 0 and not any(map(_narrow, node.outputs)):
            roundings = 1
        elif node.name not in EXACT and not _exact_conversion(node):
            roundings = 2
        if has(node.name, "agreed"):
            computed -= self._agreed(node, computed)
        for value in node.outputs:
            own = {value} & self.roots if roundings > 1 else frozenset()
            known[value] = Origin(computed | own, copies, roundings)
        if not any(isinstance(p, Tiled) for p in (*outs, *self.found.moves[node].ins)) or not _met(reads):
            return None
        decisive = _jumps_in(node)
        if met := _met(read for read, value in zip(reads, node.inputs, strict=True) if value in decisive):
            made = (v for n in reversed(self.found.graph.nodes) for v in reversed(n.outputs))
            return node, next((v for v in made if v in met), None) or next(iter(met))
        return None

    def _agreed(self, node: Node, computed: frozenset[Value]) -> set[Value]:
        """What an equation has brought into agreement: a value, and what has no copies but those that it was told."""
        value, _, *known = node.inputs
        told = {v.producer for v in known}
        others = [copies for copying, copies in self.copied.items() if copying not in told]
        others += [*self.held.values(), *self.whole.values()]
        return {value} | {v for v in computed if not any(v in copies for copies in others)}

    def _held(self, value: Value) -> Iterator[Value]:
        """The values whose elements a cut value has, or has been computed from."""
        yield from _sources(value)
        for made in closure([value], lambda v: filter(self.found.is_cut, operands(v))):
            if made.producer is not None and made.producer.name in COPYING:
                yield from self._elements(made.producer.inputs)

    def _copies(self, node: Node) -> Iterator[Value]:
        """The values computed tile by tile copies of whose elements are known once a loop has ended."""
        known = [i for i, p in enumerate(self.found.moves[node].outs) if not isinstance(p, Tiled)]
        if known:
            yield from self._elements(_copied(node, known))

    def _elements(self, values: Iterable[Value]) -> Iterator[Value]:
        """The values whose elements those of some values are that are computed tile by tile."""
        return (w for v in values if self.found.is_cut(v) and _inexact(v) for w in _sources(v))


def _met(reads: Iterable[Origin]) -> frozenset[Value]:
    """The values of which some of the operands are computed, and some have copies."""
    reads = list(reads)
    return frozenset().union(*(r.computed for r in reads)) & frozenset().union(*(r.copies for r in reads))


def root(value: Value) -> Value:
    """What a value is a rearrangement of."""
    while (node := value.producer) is not None and (node.name in MOVING or _exact_conversion(node)):
        value = node.inputs[0]
    return value


def is_mask(value: Value) -> bool:
    """Whether a float is 0 or 1: as a condition says, or as a constant array has it."""
    base = root(value)
    node = base.producer
    if not _inexact(value):
        return False
    if node is not None and has(node.name, "masks"):
        return all(constant(v) in (0, 1) for v in node.inputs[1:])
    if node is not None and has(node.name, "picks"):
        return is_mask(node.inputs[0])
    if base.const is not None and not isinstance(base.const, Tracer) and 1 < elements(base.shape) <= MOST:
        return set(np.unique(base.const)) == {0, 1}
    return base.dtype.kind == "b"


def _unmasked(value: Value) -> list[Value]:
    """What is in a value where a mask lets it through."""
    node = root(value).producer
    if node is not None and has(node.name, "masks"):
        return [v for v in node.inputs[1:] if constant(v) is None]
    if node is not None and has(node.name, "multiplies") and any(map(is_mask, node.inputs)):
        return [v for v in node.inputs if not is_mask(v)]
    return []


def _let_through(node: Node, number: int) -> list[Value]:
    """The values that a sum over an operand has elements of: a mask lets only these through, or a group is of one."""
    if has(node.name, "lands"):
        return [node.inputs[-1]] if number == len(node.inputs) - 1 else []
    if not has(node.name, "contracts"):
        return []
    value, others = node.inputs[number], [v for i, v in enumerate(node.inputs) if i != number]
    return _unmasked(value) or ([value] if any(map(is_mask, others)) else [])


def _copied(node: Node, results: Sequence[int]) -> list[Value]:
    """The operands, or what is in them, of which those `results` of an equation have elements."""
    if node.name in COPYING:
        return list(node.inputs)
    return [v for i in range(len(node.inputs)) for v in _let_through(node, i)] + _carried(node, results)


def _carried(node: Node, results: Sequence[int]) -> list[Value]:
    """The operands whose elements come out of the bodies of an equation as those `results`."""
    if node.name in REMAT or has(node.name, "steps"):
        read, graphs = node.inputs, [body_graph(node, "jaxpr")]
    elif has(node.name, "branches"):
        read, count = node.inputs[1:], len(node.params["branches"])
        graphs = [body_graph(node, "branches", i) for i in range(count)]
    else:
        return []
    reached = {v for graph in graphs for i in results for v in _sources(graph.outputs[i])}
    return [v for graph in graphs for v, inner in zip(read, graph.inputs, strict=True) if inner in reached]


def compares_inside(node: Node, made: Iterable[int]) -> bool:
    """Whether a scan whose body computes its operands `made` itself, in each step, may see or return copies of them.

    A body that returns elements of what it computed has them compared with that in its next step, or after the loop.
    """
    graph, wanted = body_graph(node, "jaxpr"), {node.inputs[i] for i in made}
    rounded = {v for v in ancestors(wanted) if _varies(v) and v.producer is not None and v.producer.name not in EXACT}
    if not rounded:
        return False
    own = {graph.inputs[i] for i in made}
    if any(not own.isdisjoint(_sources(v)) for v in graph.outputs):
        return True
    made_by = ((v, v.producer) for v in ancestors(set(node.inputs) - wanted))
    copies = (w for v, maker in made_by if maker is not None for w in _copied(maker, [v.index]))
    copies = (source for w in copies for source in _sources(w))
    return any(map(_decisive, bodies(node.params))) and any(v in rounded for v in copies)


def _sources(value: Value) -> Iterator[Value]:
    """The values whose elements a value has, as they are computed and as they are stored."""

    def chosen(value: Value) -> Iterable[Value]:
        node = value.producer
        if node is None or (node.name in THROUGH_ZERO and any(v.dtype.kind == "c" for v in node.inputs)):
            return ()  # a modulus is no element
        if node.name in CHOOSING or has(node.name, "stored"):
            picked = [*node.inputs]
        else:
            picked = [*_unmasked(value), *_scaled(node), *_added_to(node), *_copied(node, [value.index])]
        return [v for v in map(root, picked) if _varies(v)]

    return closure(filter(_varies, [root(value)]), chosen)


def _added_to(node: Node) -> list[Value]:
    """What a sum or difference has the numbers of where the other operand is 0: a bias, or where a mask has it so."""
    if node.name not in ONCE or len(node.inputs) != 2:
        return []
    first, second = node.inputs
    return [v for v, other in ((first, second), (second, first)) if _may_be_zero(other)]


def _may_be_zero(value: Value) -> bool:
    """Whether zeros may be added: by an argument that is broadcast, where a mask has them, or in a product of flags."""
    base = root(value)
    node = base.producer
    if node is None:
        return _varies(value) and elements(base.shape) < elements(value.shape)
    zeros = has(node.name, "masks") and any(map(_zero, node.inputs[1:]))
    return zeros or (has(node.name, "multiplies") and any(v.const is None and _is_flag(v) for v in node.inputs))


def _is_flag(value: Value) -> bool:
    """Whether a number is 0 or 1 as a condition or whole numbers say, or one less that."""
    node = root(value).producer
    if node is not None and has(node.name, "subtracts") and constant(node.inputs[0]) == 1:
        return _is_flag(node.inputs[1])
    return is_mask(value) or not _inexact(root(value))


def _scaled(node: Node) -> list[Value]:
    """What a product or quotient has the numbers of, times a power of two: no rounding enters them."""
    if not has(node.name, "multiplies") and not has(node.name, "divides"):
        return []
    known = {v: constant(root(v)) for v in node.inputs[has(node.name, "divides") :]}
    power = any(c is not None and abs(np.frexp(np.real(c))[0]) == 0.5 for c in known.values())
    return [v for v in node.inputs if known.get(v) is None] if power else []


def _varies(value: Value) -> bool:
    return _inexact(value) and constant(value) is None


def _inexact(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.aval.dtype, np.inexact)


def _narrow(value: Value) -> bool:
    """Whether XLA may keep a value more precisely than its dtype says."""
    return _inexact(value) and value.dtype.itemsize < 4


def _exact_conversion(node: Node) -> bool:
    """Whether a conversion leaves numbers as they are: to a wider float, or from what is no float."""
    if not has(node.name, "casts"):
        return False
    (source,), (target,) = node.inputs, node.outputs
    return not _inexact(source) or (_inexact(target) and source.dtype.itemsize <= target.dtype.itemsize)


def _jumps_in(node: Node) -> list[Value]:
    """The operands in whose floats an equation, or one in its bodies, is discontinuous."""
    if len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]:
        return []  # x == x asks for nan
    if node.name in AT_ZERO or _is_reciprocal(node):
        return [v for v in [node.inputs[has(node.name, "divides")]] if _cancels(v, has(node.name, "pole"))]
    if has(node.name, "at_minus_one"):
        return list(filter(_negated, node.inputs))
    if node.name in ONE_SIDED and any(map(_zero, node.inputs)):
        return list(filter(_cancels, node.inputs))
    if node.name in AT_ONE or _discontinuous(node.name, node.inputs, node.outputs):
        return node.inputs
    inside = bodies(node.params)
    if len(inside) == 1 and len(inside[0].invars) == len(node.inputs) and not has(node.name, "steps"):
        decisive = _decisive(inside[0])
        return [v for v, inner in zip(node.inputs, inside[0].invars, strict=True) if inner in decisive]
    return node.inputs if any(map(_decisive, inside)) else []


def _is_reciprocal(node: Node) -> bool:
    """Whether a power by a whole number is one by a negative number."""
    return node.name in THROUGH_ZERO and node.params.get("y", 0) < 0


def _decisive(jaxpr: Jaxpr) -> set[Var]:
    """The values in a body that an equation depends on which is discontinuous in floats."""
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        jumps = _discontinuous(eqn.primitive.name, eqn.invars, eqn.outvars)
        if jumps or any(map(_decisive, bodies(eqn.params))) or not found.isdisjoint(eqn.outvars):
            found.update(v for v in eqn.invars if isinstance(v, Var))
    return found


def _cancels(value: Value, sums: bool = False) -> bool:
    """Whether a value is 0 where a difference is, or `sums` of differences are."""

    def through(value: Value) -> Iterable[Value]:
        node = value.producer
        if node is None:
            return ()
        zero = node.name in ADDING and any(map(_zero, node.inputs))
        kept = node.name in THROUGH_ZERO or (sums and (node.name in AT_ZERO or has(node.name, "contracts")))
        return map(root, operands(value)) if zero or kept else ()

    nodes = (v.producer for v in closure([root(value)], through) if v.producer is not None)
    return any(has(n.name, "subtracts") or (n.name in ADDING and any(map(_negated, n.inputs))) for n in nodes)


def _negated(value: Value) -> bool:
    """Whether a value is written as less than nothing: `-m + h` is a difference too."""
    while (node := value.producer) is not None and (node.name in MOVING or _exact_conversion(node)):
        if has(node.name, "negates"):
            return True
        value = node.inputs[0]
    factors = () if node is None or not has(node.name, "multiplies") else map(constant, node.inputs)
    return any(factor is not None and np.real(factor) < 0 for factor in factors)


def _zero(value: Value) -> bool:
    const = constant(root(value))
    return const is not None and not np.any(np.asarray(const))


def _discontinuous(name: str, ins: Iterable[Any], outs: Iterable[Any]) -> bool:
    jumps = not any(map(_inexact, outs)) if has(name, "casts") else name in DISCONTINUOUS
    return jumps and any(map(_inexact, ins))
