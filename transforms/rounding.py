"""Where the last bit decides: no comparison sees both a value that a loop computes again and a copy of it from before.

A loop that needs a cut value which an earlier one computed computes it again (rematerialisation), and XLA compiles each
loop by itself: products are fused into additions here and not there, so that two computations of `h` may differ in the
last bit. Most functions do not mind. But `h == h.max()` is true nowhere then, and `h >= top_k(h)[-1]` lacks one.

The rule, for every equation that is run tile by tile: if it is discontinuous (a comparison, a rounding, a sort, a
conversion to integers), then what it reads may not depend on a value that is computed again and also on a copy of
an element of that value which was made before: by a maximum, a sort, a lookup, a masked sum. Values that no rounding
enters, such as inputs and their rearrangements, are the same however often they are computed.

`meeting` finds the first equation that breaks the rule, from the placements alone; `check` looks at the loops that were
planned. What breaks it is mended in one of three ways:

    stored     the value is stored by the loop that computes it first, and whoever reads it reads that: if it may be
               whole, as any other value that is completed
    witness    the place of an extremum and the number of ties come out of the loop that finds it, and the equations of
               its derivative compare integers: a few numbers, however large the value
    refused    otherwise
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from transforms.analysis import Analysis, Local
from transforms.graph import Graph, Node, Value, bodies, constant, prune
from transforms.limits import Limits, human
from transforms.loops import Loop, Schedule
from transforms.placement import WHOLE, Partial, Placement, Span, Tiled, TileError
from transforms.rewrite import add, replace, traced
from transforms.rules import Complete, Move, register
from transforms.spread import named
from transforms.states import begin, leave
from transforms.terms import peel

stored_p = Primitive("stored")  # a cut value as the loop left it that computed it first
witness_p = Primitive("witness")  # the extremum so far, its place, and how many elements equal it

names = lambda text: frozenset(text.split())
# Equations that a last bit may change by more than that. Conversions to integers, too: see `_jumps`.
DISCONTINUOUS = names(
    """eq ne lt le gt ge eq_to lt_to le_to floor ceil round sign rem sort top_k approx_top_k argmax argmin
    bitcast_convert_type nextafter population_count"""
)
# Equations whose results hold copies of elements of their operands.
COPYING = names(
    """reduce_max reduce_min sort top_k approx_top_k gather slice dynamic_slice cummax cummin chosen scan_part
    scatter-max scatter-min scatter_max scatter_min rev split"""
)
# The same elements in another order, place or number; `neg` has the same up to the sign.
MOVING = names("reshape transpose squeeze broadcast_in_dim expand_dims copy copy_p stop_gradient name neg rev")
# No rounding enters what these make of values that have none.
EXACT = MOVING | COPYING | DISCONTINUOUS
EXACT |= names(
    """max min abs select_n clamp and or not xor iota concatenate pad is_finite real imag complex conj dynamic_update_slice
    reduce_and reduce_or shift_left shift_right_logical shift_right_arithmetic optimization_barrier stored random_bits
    random_wrap random_unwrap random_fold_in random_split threefry2x32 reduce_window_max reduce_window_min"""
)
ONCE = names("add sub add_any")  # one of these rounds always alike: there is no product to be fused with


class Origin(NamedTuple):
    """What a value depends on: the values that are `computed` tile by tile, those that it has `copies` of.

    `roundings`: 0 where none enters it, 1 for a single addition, 2 for more.
    """

    computed: frozenset[Value] = frozenset()
    copies: frozenset[Value] = frozenset()
    roundings: int = 0


class Meeting(NamedTuple):
    """`node` reads `value`, computed once more, and what was copied from it before."""

    node: Node
    value: Value


def meeting(found: Analysis) -> Meeting | None:
    """The first equation of an analysed graph that breaks the rule, if the loops compute again what they can."""
    return _Walk(found).first


def check(plan: Schedule) -> None:
    """Check that no loop breaks the rule.

    Raises:
        TileError: one does.
    """
    walk = _Walk(plan.analysis)
    for loop in plan.loops:
        if (found := walk.within(loop)) is not None:
            raise TileError(refusal(found, plan.analysis.limits))


def store(graph: Graph, value: Value) -> None:
    """Have a cut value stored by the loop that computes it, and read from there by all others."""
    node = value.producer
    assert node is not None
    (kept,) = add(nodes := [], node, stored_p, [value], [value.aval])
    replace(graph, node, [node], {value: kept})
    graph.nodes.insert(graph.nodes.index(node) + 1, nodes[0])


def refusal(found: Meeting, limits: Limits | None) -> str:
    node, value = found
    assert value.producer is not None
    bound = "" if limits is None else f"; the largest input or output is {human(limits.largest)}"
    return (
        f"cannot tile `{node.name}` at {node.where}: it compares values that one loop computes with copies of them "
        "(a maximum, a sorted, looked up or masked one) that came out of an earlier loop, and the last bits of two "
        "computations differ. They would have to be stored.\n"
        f"  value: {value}, {human(value.nbytes)}, made by `{value.producer.name}` at {value.producer.where}{bound}.\n"
        '  To go on: cut another axis, or pass gather="any".'
    )


# ------------------------------------------------------------------------------------------------------ who sees what


class _Walk:
    """Follows values, their copies and their roundings through a graph."""

    def __init__(self, found: Analysis):
        self.found = found
        self.order = {v: i for i, v in enumerate(v for n in found.graph.nodes for v in n.outputs)}
        self.copied: dict[Node, frozenset[Value]] = {}
        for node in found.graph.nodes:
            if copies := frozenset(self._copies(node)):
                self.copied[node] = copies
        self.roots = frozenset(v for copies in self.copied.values() for v in copies)
        self.known: dict[Value, Origin] = {}
        self.first: Meeting | None = None
        if self.roots:
            for node in found.graph.nodes:
                hit = self._visit(node, [self._read(v) for v in node.inputs], self.known, found.moves[node].outs)
                self.first = self.first or hit

    def within(self, loop: Loop) -> Meeting | None:
        """The first step of a loop that breaks the rule."""
        if not self.roots:
            return None
        here: dict[Value, Origin] = {}
        for step in loop.steps:
            reads = []
            for ref in step.refs:
                outside = Origin(copies=self.known.get(ref.value, Origin()).copies)
                reads.append(here.get(ref.value, outside) if ref.how == "tile" else outside)
            if (hit := self._visit(step.node, reads, here, [p for _, p in step.keys] or step.move.outs)) is not None:
                return hit
        return None

    def _read(self, value: Value) -> Origin:
        """A value as a loop has it: it computes what is cut, and reads what is whole or stored."""
        known = self.known.get(value, Origin())
        kept = value in (self.found.inputs | self.found.stored) or not self._cut(value)
        return Origin(copies=known.copies) if kept else known

    def _cut(self, value: Value) -> bool:
        return isinstance(self.found.fact(value).placement, Tiled)

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
        for value in node.outputs:
            own = {value} & self.roots if roundings > 1 else frozenset()
            known[value] = Origin(computed | own, copies, roundings)
        met = frozenset().union(*(r.computed for r in reads)) & frozenset().union(*(r.copies for r in reads))
        if met and any(isinstance(p, Tiled) for p in (*outs, *self.found.moves[node].ins)) and _jumps(node):
            return Meeting(node, max(met, key=lambda v: self.order.get(v, -1)))
        return None

    def _copies(self, node: Node) -> Iterator[Value]:
        """The values computed tile by tile copies of whose elements are known once a loop has ended."""
        move = self.found.moves[node]
        if isinstance(move, Local) or (move.outs and all(isinstance(p, Tiled) for p in move.outs)):
            return
        cut = [(i, v) for i, v in enumerate(node.inputs) if self._cut(v) and _inexact(v)]
        if node.name in COPYING:
            yield from (root(v) for _, v in cut)
        elif node.name in MOVING:
            yield from (root(v) for i, v in cut if (node, i) in self.found.completed)
        elif node.name in ("reduce_sum", "dot_general"):
            masks = [_mask(v) for v in node.inputs]
            yield from (root(w) for i, v in cut for w in (_unmasked(v) or ([v] if any(masks[:i] + masks[i + 1 :]) else [])))


def root(value: Value) -> Value:
    """What a value is a rearrangement of."""
    while (node := value.producer) is not None and (node.name in MOVING or _exact_conversion(node)):
        value = node.inputs[0]
    return value


def _mask(value: Value) -> bool:
    """Whether a float is 0 or 1 as a condition says."""
    base = root(value)
    return _inexact(value) and not _inexact(base) and base.dtype.kind == "b"


def _unmasked(value: Value) -> list[Value]:
    """What is in a value where a mask lets it through."""
    node = root(value).producer
    if node is not None and node.name == "select_n":
        return [v for v in node.inputs[1:] if constant(v) is None]
    if node is not None and node.name == "mul" and any(map(_mask, node.inputs)):
        return [v for v in node.inputs if not _mask(v)]
    return []


def _inexact(value: Value) -> bool:
    return jax.dtypes.issubdtype(value.dtype, np.inexact)


def _narrow(value: Value) -> bool:
    """Whether XLA may keep a value more precisely than its dtype says."""
    return _inexact(value) and value.dtype.itemsize < 4


def _exact_conversion(node: Node) -> bool:
    """Whether a conversion leaves numbers as they are: to a wider float, or from what is no float."""
    if node.name != "convert_element_type":
        return False
    (source,), (target,) = node.inputs, node.outputs
    return not _inexact(source) or (_inexact(target) and source.dtype.itemsize <= target.dtype.itemsize)


def _jumps(node: Node) -> bool:
    """Whether an equation, or one in its bodies, is discontinuous in a float that it reads."""
    return _discontinuous(node.name, node.inputs, node.outputs) or any(map(_any_jumps, bodies(node.params)))


def _discontinuous(name: str, ins: Iterable[Any], outs: Iterable[Any]) -> bool:
    inexact = [jax.dtypes.issubdtype(v.dtype, np.inexact) for v in ins]
    if name == "convert_element_type":
        return any(inexact) and not any(jax.dtypes.issubdtype(v.dtype, np.inexact) for v in outs)
    return name in DISCONTINUOUS and any(inexact)


def _any_jumps(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    avals = lambda atoms: [a.aval for a in atoms]
    return any(
        _discontinuous(e.primitive.name, avals(e.invars), avals(e.outvars)) or any(map(_any_jumps, bodies(e.params)))
        for e in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


# ------------------------------------------------------------------------------------------------- what mends the rule


def write_witness(found: Analysis, node: Node, span: Span) -> bool:
    """Let the derivative of an extremum, `node`, ask for its place. Returns whether that is what the node is.

    Where several elements are as large, they are told by their values, computed again.
    """
    graph = found.graph
    if (reduction := _extremum(found, node)) is None:
        return False
    (operand,), axes = reduction.inputs, tuple(sorted(reduction.params["axes"]))
    best, places = reduction.outputs[0].aval, ShapedArray(reduction.outputs[0].shape, jnp.int32)
    outs = [ShapedArray(best.shape, best.dtype), places, places, places]
    nodes: list[Node] = []
    zeros = [Value(ShapedArray((), aval.dtype), const=np.zeros((), aval.dtype)) for aval in outs]
    before = [begin(nodes, reduction, v, aval, span) for v, aval in zip(zeros, outs, strict=True)]
    now = add(nodes, reduction, witness_p, [operand, *before], outs, axes=axes, op=reduction.name[-3:])
    for state, left in zip(before, now, strict=True):
        leave(state, left)
    cut = found.fact(operand).placement
    assert isinstance(cut, Tiled)

    def same(array: Any, best: Any, row: Any, column: Any, count: Any) -> Any:
        best, row, column, count = (jnp.expand_dims(x, axes) for x in (best, row, column, count))
        here = (lax.broadcasted_iota(jnp.int32, array.shape, cut.dim) == row) & (_column(array, cut.dim, axes) == column)
        near = jnp.abs(array - best) <= (0 if array.dtype.itemsize < 4 else 4 * jnp.finfo(array.dtype).eps) * jnp.abs(best)
        return jnp.where(count == 1, here, (array == best) | near)

    made, (chosen,) = traced(same, [operand, *now], node)
    counted = {}
    for total in _counts(graph, node, axes):
        more, (count,) = traced(lambda n: n.astype(total.dtype), [now[-1]], node)
        made, counted[total] = [*made, *more], count
    # The states and the witness stand where the extremum does.
    at = graph.nodes.index(reduction)
    graph.nodes[at:at] = nodes
    replace(graph, node, made, {node.outputs[0]: chosen} | counted)
    graph.nodes[:] = prune(graph).nodes
    return True


def _extremum(found: Analysis, node: Node) -> Node | None:
    """The reduction over the cut axis, of a cut value on one device, with whose operand an equation compares it."""
    if node.name != "eq":
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        base, dims = peel(other, len(value.shape))
        made, cut = base.producer, found.fact(value).placement
        if made is None or made.name not in ("reduce_max", "reduce_min") or made.inputs[0] is not value:
            continue
        kept = [d for d in range(len(value.shape)) if d not in made.params["axes"]]
        aligned = all(d is None or kept[d] == i for i, d in enumerate(dims))
        one = isinstance(cut, Tiled) and cut.major == 1 and named(value.aval) is None
        if aligned and one and cut.dim in made.params["axes"] and jnp.issubdtype(value.dtype, jnp.floating):
            return made
    return None


def _counts(graph: Graph, node: Node, axes: tuple[int, ...]) -> list[Value]:
    """The sums which count the elements that equal an extremum."""
    converted = [n for n in graph.nodes if n.name == "convert_element_type" and n.inputs[0] is node.outputs[0]]
    floats = {n.outputs[0] for n in converted}
    sums = (n for n in graph.nodes if n.name == "reduce_sum" and n.inputs[0] in floats)
    return [n.outputs[0] for n in sums if tuple(sorted(n.params["axes"])) == axes]


def _column(array: Any, dim: int, axes: tuple[int, ...]) -> Any:
    """Where each element is along the reduced dimensions but one, row by row."""
    total: Any = jnp.zeros((), jnp.int32)
    for d in (d for d in axes if d != dim):
        total = total * array.shape[d] + lax.broadcasted_iota(jnp.int32, array.shape, d)
    return total


def push_witness(node: Node, placements: tuple[Placement, ...]) -> Move:
    cut = placements[0]
    if not isinstance(cut, Tiled) or cut.major != 1 or cut.dim not in node.params["axes"]:
        raise Complete([0], "takes a place along the cut axis")
    return Move((Partial("last"),) * 4, (cut, *(WHOLE,) * 4))


def emit_witness(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """The best of this tile and those before it, the first place that has it, and how often it is there."""
    array, *before = values
    cut, axes = move.ins[0], node.params["axes"]
    assert isinstance(cut, Tiled)
    wide = jnp.expand_dims
    best = array.max(axes) if node.params["op"] == "max" else array.min(axes)
    ties = array == wide(best, axes)
    column, last = _column(array, cut.dim, axes), np.iinfo(np.int32).max
    rows = jnp.arange(array.shape[cut.dim], dtype=jnp.int32).reshape([-1 if d == cut.dim else 1 for d in range(array.ndim)])
    row = jnp.where(ties, rows, last).min(axes)
    column = jnp.where(ties & (rows == wide(row, axes)), column, last).min(axes)
    now = [best, row + jnp.asarray(span.start * cut.minor, jnp.int32), column, ties.sum(axes, dtype=jnp.int32)]
    better = best > before[0] if node.params["op"] == "max" else best < before[0]
    better |= jnp.isnan(best) & ~jnp.isnan(before[0])
    better |= jnp.equal(span.start, 0)
    found = [jnp.where(better, x, y) for x, y in zip(now, before, strict=True)]
    found[-1] += jnp.where(~better & (best == before[0]), now[-1], 0)
    return found


def push_stored(node: Node, placements: tuple[Placement, ...]) -> Move:
    raise Complete([0], "is stored, for comparisons with copies of its elements")


def store_whole(node: Node, placements: tuple[Placement, ...], limits: Any) -> Move:
    """Cut as it was, but read slice by slice."""
    return Local(placements, (WHOLE,), (), (0,), list)


register("witness", push=push_witness, emit=emit_witness)
register("stored", push=push_stored, local=store_whole)
