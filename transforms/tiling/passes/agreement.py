"""Agreement: what loops compute again, and what knows of it from before, are brought together to the last bit.

What `analysis.rounding` found is mended: a value is stored by the loop that computes it first (`store`), a stored copy
is computed again beside its source (`compute_again`), or what is computed again is told what is known of it, where that
stands (a *witness*: `agree`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from transforms.layout import TOGETHER, conform, named
from transforms.tiling.analysis.rounding import Walk, is_mask
from transforms.tiling.frontend.trace import traced
from transforms.tiling.ir.facts import Analysis, Outlined
from transforms.tiling.ir.graph import Graph, Node, Value, add
from transforms.tiling.ir.obstacles import Complete, Disagreement
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled
from transforms.tiling.ir.walks import ancestors, constant
from transforms.tiling.passes.loop_state import hand_on
from transforms.tiling.rules import Move, refuse_partial, register, tiled
from transforms.tiling.rules.factors import peel

stored_p = Primitive("stored")  # a cut value as the loop left it that computed it first
witness_p = Primitive("witness")  # the extremum so far, its place, how many elements equal it, and the next best
snapped_p = Primitive("snapped")  # a value that is computed again, with its extremum where that was
agreed_p = Primitive("agreed")  # the first operand, computed again, as the second: as what is known, the rest, has it


def store(graph: Graph, value: Value) -> None:
    """Have a cut value stored by the loop that computes it, and read from there by all others."""
    node = value.producer
    assert node is not None
    (kept,) = add(nodes := [], node, stored_p, [value], [value.aval])
    graph.replace(node, [node], {value: kept})
    graph.insert(nodes, after=node)


def agree(met: Disagreement, span: Span) -> bool:
    """Let an equation see a value, computed again, with what is known of it: its extrema and what was looked up.

    Where several elements are an extremum, they are told by their values, and so is the one that a mask lets through.
    Returns whether all copies that the equation sees have known places; a sorted one has not.
    """
    found, node, value = met.analysis, met.node, met.value
    graph = found.graph
    seen = ancestors([node.outputs[0]] if node.outputs else node.inputs)
    walk = Walk(found)
    copying = [n for n, copies in walk.copied.items() if value in copies and not seen.isdisjoint(n.outputs)]
    completed = any(value in copies and v in seen for v, copies in walk.whole.items())
    if completed or not all(_has_place(found, n, value) for n in copying):
        return False
    nodes: list[Node] = []
    counted: dict[Value, Value] = {}
    known = value
    for other in copying:
        copy = other.outputs[0]
        if other.name == "gather":
            more, (known,) = traced(partial(_put, other), [known, other.inputs[1], copy], node)
            nodes += more
            continue
        kind = {"axes": tuple(sorted(other.params["axes"])), "op": other.name.removeprefix("reduce_")}
        mask = _mask_of(other.inputs[0], value) if kind["op"] == "sum" else None
        places = _witness(graph, other, span) if mask is None else [mask]
        steps = _lets_through(value, other.inputs[0]) or []
        there = [known]
        for step in steps:
            more, (made,) = traced(*step.into(there[-1]), node)
            nodes += more
            there.append(made)
        (known,) = add(nodes, node, snapped_p, [there.pop(), copy, *places], [value.aval], **kind)
        while there:
            more, (known,) = traced(*steps.pop().back(known, there.pop()), node)
            nodes += more
        for total in _counts(graph, node, other):
            more, (counted[total],) = traced(partial(_as, total.dtype), places[2:3], node)
            nodes += more
    copies = [other.outputs[0] for other in copying]
    (known,) = add(nodes, node, agreed_p, [value, known, *copies], [value.aval])
    _read(met, {value: known}, nodes)
    graph.replace(node, nodes, counted, keep=True)
    graph.sort().prune()
    return True


def _as(dtype: Any, array: Any) -> Any:
    return array.astype(dtype)


def compute_again(met: Disagreement) -> frozenset[Value]:
    """Let an equation see values as its own loop computes them, not as an earlier one stored them; return these."""
    stored = {v: v.producer.inputs[0] for v in met.again if v.producer is not None and v.producer.name == "stored"}
    nodes: list[Node] = []
    _read(met, stored, nodes)
    met.analysis.graph.insert(nodes, before=met.node)
    return frozenset(stored.get(v, v) for v in met.again)


def _read(met: Disagreement, known: dict[Value, Value], nodes: list[Node]) -> None:
    """Let an equation be computed from what is `known` in place of values: what lies between them, once more."""
    found, graph = met.analysis, met.analysis.graph
    seen, now = ancestors(met.node.inputs), dict(known)
    for node in graph.nodes[: graph.nodes.index(met.node)]:
        cut = [v for v in node.outputs if v in seen and isinstance(found.fact(v).placement, Tiled)]
        if cut and not now.keys().isdisjoint(node.inputs):
            made = node.like([now.get(v, v) for v in node.inputs], [v.aval for v in node.outputs])
            nodes.append(made)
            now.update(zip(node.outputs, made.outputs, strict=True))
    met.node.change(inputs=[now.get(v, v) for v in met.node.inputs])


def _has_place(found: Analysis, node: Node, value: Value) -> bool:
    """Whether it is known, or can be found out, where the elements that a node copies stand."""
    cut = found.fact(value).placement
    if not isinstance(cut, Tiled):
        return False
    if node.name == "reduce_sum":
        return cut.dim in node.params["axes"] and _mask_of(node.inputs[0], value) is not None
    if node.name == "gather" and node.inputs[0] is value:
        return named(value.aval) is None and not isinstance(found.fact(node.inputs[1]).placement, Tiled)
    extremum = node.name in ("reduce_max", "reduce_min") and jnp.issubdtype(value.dtype, jnp.floating)
    known = extremum and _lets_through(value, node.inputs[0]) is not None
    return known and cut.major == 1 and cut.dim in node.params["axes"]


class Through(NamedTuple):
    """A step from a value to what an extremum is taken of: of `case` of a `condition` alone, the rest being filled.

    Without a condition, all numbers lose their signs.
    """

    condition: Value | None = None
    case: int = 0
    filling: Value | None = None

    def into(self, value: Value) -> tuple[Any, list[Any]]:
        """What makes it of the value: a function and its operands."""
        choose = partial(_select, self.case)
        return (jnp.abs, [value]) if self.condition is None else (choose, [self.condition, value, self.filling])

    def back(self, new: Value, old: Value) -> tuple[Any, list[Any]]:
        """What makes the value of what has become of it, and of what the value was."""
        choose = partial(_select, self.case)
        return (jnp.copysign, [new, old]) if self.condition is None else (choose, [self.condition, new, old])


def _lets_through(value: Value, masked: Value) -> list[Through] | None:
    """The steps, the innermost first, between a value and what an extremum is taken of."""
    found: list[Through] = []
    while masked is not value:
        node = masked.producer
        if node is not None and node.name == "abs":
            found.insert(0, Through())
            masked = node.inputs[0]
            continue
        if node is None or node.name != "select_n" or len(node.inputs) != 3 or node.inputs[0].shape != value.shape:
            return None
        filled = [constant(v) is not None for v in node.inputs[1:]]
        if filled.count(True) != 1:
            return None
        case = filled.index(False)
        found.insert(0, Through(node.inputs[0], case, node.inputs[2 - case]))
        masked = node.inputs[1 + case]
    return found


def _select(case: int, which: Any, array: Any, other: Any) -> Any:
    """Case number `case` of a choice, where `which` says so."""
    return jnp.where(which if case else ~which, array, other)


def _mask_of(masked: Value, value: Value) -> Value | None:
    """The condition, or zeros and ones, that `masked` is `value` by, and 0 elsewhere."""
    node = masked.producer
    if node is None:
        return None
    if node.name == "mul" and value in node.inputs:
        return next((v for v in node.inputs if v is not value and is_mask(v)), None)
    chosen = node.name == "select_n" and node.inputs[2] is value and node.inputs[0].shape == value.shape
    return node.inputs[0] if chosen else None


def _put(node: Node, array: Any, indices: Any, picked: Any) -> Any:
    """What a `gather` picked, put where it came from."""
    numbers = node.params["dimension_numbers"]
    into = lax.ScatterDimensionNumbers(
        update_window_dims=numbers.offset_dims,
        inserted_window_dims=numbers.collapsed_slice_dims,
        scatter_dims_to_operand_dims=numbers.start_index_map,
        operand_batching_dims=numbers.operand_batching_dims,
        scatter_indices_batching_dims=numbers.start_indices_batching_dims,
    )
    return lax.scatter(array, indices, picked, into, mode=node.params["mode"])


def _witness(graph: Graph, reduction: Node, span: Span) -> list[Value]:
    """The place of an extremum, along the cut axis and along the others, how many elements equal it, and the next."""
    (operand,), axes = reduction.inputs, tuple(sorted(reduction.params["axes"]))
    best = reduction.outputs[0].aval
    places = best.update(dtype=jnp.dtype(jnp.int32), weak_type=False)
    outs = [best, places, places, places, best]
    nodes: list[Node] = []
    zeros = [Value(ShapedArray((), aval.dtype), const=np.zeros((), aval.dtype)) for aval in outs]
    now = hand_on(nodes, reduction, witness_p, [operand, *zeros], outs, span, axes=axes, op=reduction.name[-3:])
    graph.insert(nodes, before=reduction)
    return list(now[1:])


def _counts(graph: Graph, node: Node, reduction: Node) -> list[Value]:
    """The sums, in the derivative of an extremum, which count the elements that equal it."""
    if node.name != "eq" or reduction.inputs[0] not in node.inputs:
        return []
    axes = tuple(sorted(reduction.params["axes"]))
    converted = [n for n in graph.nodes if n.name == "convert_element_type" and n.inputs[0] is node.outputs[0]]
    floats = {n.outputs[0] for n in converted}
    sums = (n for n in graph.nodes if n.name == "reduce_sum" and n.inputs[0] in floats)
    other = next(v for v in node.inputs if v is not reduction.inputs[0])
    mine = peel(other, len(reduction.inputs[0].shape))[0] is reduction.outputs[0]
    return [n.outputs[0] for n in sums if mine and tuple(sorted(n.params["axes"])) == axes]


def _column(array: Any, dim: int, axes: tuple[int, ...]) -> Any:
    """Where each element is along the reduced dimensions but one, row by row."""
    total: Any = jnp.zeros((), jnp.int32)
    for d in (d for d in axes if d != dim):
        total = total * array.shape[d] + lax.broadcasted_iota(jnp.int32, array.shape, d)
    return _beside(array, total)


def _beside(array: Any, places: Any) -> Any:
    """Places of an array's elements, spread as these are."""
    return conform(jnp.broadcast_to(places, array.shape), jax.typeof(array), TOGETHER)


def push_witness(node: Node, placements: tuple[Placement, ...]) -> Move | Complete:
    cut = placements[0]
    if not isinstance(cut, Tiled) or cut.major != 1 or cut.dim not in node.params["axes"]:
        return Complete([0], "takes a place along the cut axis")
    return Move((Partial("last"),) * 5, (cut, *(WHOLE,) * 5))


def emit_witness(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """The best of this tile and those before it, the first place that has it, how often it is there, and the next."""
    array, *before = _rounded(values[0]), *values[1:]
    cut, axes = move.ins[0], node.params["axes"]
    assert isinstance(cut, Tiled)
    wide = jnp.expand_dims
    largest = node.params["op"] == "max"
    worst = jnp.asarray(-jnp.inf if largest else jnp.inf, array.dtype)
    extremum, either = (jnp.max, jnp.maximum) if largest else (jnp.min, jnp.minimum)
    best = extremum(array, axes)
    ties = array == wide(best, axes)
    second = extremum(jnp.where(ties, worst, array), axes)
    column, last = _column(array, cut.dim, axes), np.iinfo(np.int32).max
    rows = _beside(array, lax.broadcasted_iota(jnp.int32, array.shape, cut.dim))
    row = jnp.where(ties, rows, last).min(axes)
    column = jnp.where(ties & (rows == wide(row, axes)), column, last).min(axes)
    now = [best, row + jnp.asarray(span.start * cut.minor, jnp.int32), column, ties.sum(axes, dtype=jnp.int32), second]
    better = best > before[0] if largest else best < before[0]
    better |= jnp.isnan(best) & ~jnp.isnan(before[0])
    better |= jnp.equal(span.start, 0)
    found = [jnp.where(better, x, y) for x, y in zip(now, before, strict=True)]
    equal = best == before[0]
    found[3] += jnp.where(~better & equal, now[3], 0)
    other = jnp.where(equal, worst, jnp.where(better, before[0], best))  # the less good of both
    known = jnp.where(jnp.equal(span.start, 0), second, either(either(second, before[4]), other))
    return [*found[:4], known]


def _rounded(array: Any) -> Any:
    """An array as precise as its dtype says: XLA may leave out conversions to narrow floats."""
    if array.dtype.itemsize > 2:
        return array
    kind = jnp.finfo(array.dtype)
    return lax.reduce_precision(array, kind.nexp, kind.nmant)


def push_snapped(node: Node, placements: tuple[Placement, ...]) -> Move | Complete:
    if (parts := refuse_partial(node, placements, "is compared with it")) is not None:
        return parts
    cut, shape = placements[0], node.inputs[0].shape
    if not isinstance(cut, Tiled):
        return Complete(tiled(placements), "is compared with it")
    along = [len(v.shape) == len(shape) and v.shape[cut.dim] == shape[cut.dim] for v in node.inputs[2:]]
    others = (cut if one else WHOLE for one in along)
    return Move((cut,), (cut, WHOLE, *others))


def emit_snapped(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """A tile with what was copied from it before, to the last bit, where that stood."""
    array, best, *places = _rounded(values[0]), *values[1:]
    cut, axes = move.ins[0], node.params["axes"]
    assert isinstance(cut, Tiled)
    best = jnp.expand_dims(best, axes)
    close = (4 * jnp.finfo(array.dtype).eps if array.dtype.itemsize > 2 else 0) * jnp.abs(best)
    near = (jnp.abs(array - best) <= close) & jnp.isfinite(best)  # to infinity all is equally near
    if node.params["op"] == "sum":  # of a mask that lets one element through
        return [jnp.where(near & (places[0] != 0), best, array)]
    row, column, count, second = (jnp.expand_dims(x, axes) for x in places)
    rows = span.positions(cut, jnp.int32).reshape([-1 if d == cut.dim else 1 for d in range(array.ndim)])
    here = (rows == row) & (_column(array, cut.dim, axes) == column)
    largest = node.params["op"] == "max"
    beyond = array >= best if largest else array <= best
    inside = jnp.nextafter(best, jnp.full_like(best, -jnp.inf if largest else jnp.inf))
    # All else stays on the side where it was.
    lone = jnp.where(here, best, jnp.where(beyond, inside, array))
    # Where a function saturates, others are as near: what has the number itself is a tie then, and nothing else.
    apart = jnp.abs(best - second) > 2 * close
    return [jnp.where(count == 1, lone, jnp.where(beyond | jnp.where(apart, near, here), best, array))]


def push_agreed(node: Node, placements: tuple[Placement, ...]) -> Move:
    return Move(placements[:1], (*placements[:1] * 2, *(WHOLE,) * len(placements[2:])))


def emit_agreed(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    return values[1:2]


KEPT = "is kept for comparisons with copies of its elements"


def push_stored(node: Node, placements: tuple[Placement, ...]) -> Complete:
    return Complete([0], KEPT)


def store_whole(node: Node, placements: tuple[Placement, ...], limits: Any) -> Move:
    """Cut as it was, but read slice by slice."""
    return Outlined(placements, (WHOLE,), (), (0,), list, reason=KEPT)


register("witness", push=push_witness, emit=emit_witness)
register("snapped", push=push_snapped, emit=emit_snapped)
register("agreed", push=push_agreed, emit=emit_agreed)
register("stored", push=push_stored, outline=store_whole)
