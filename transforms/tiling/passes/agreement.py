"""Agreement: what loops compute again, and what knows of it from before, are brought together to the last bit.

What `analysis.rounding` found is mended: a value is stored by the loop that computes it first (`store`), a stored copy
is computed again beside its source (`compute_again`), or what is computed again is told what is known of it, where that
stands (a *witness*: `agree`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from transforms.layout import named
from transforms.tiling.analysis.rounding import Walk, is_mask
from transforms.tiling.frontend.trace import append
from transforms.tiling.ir.facts import Analysis, Outlined
from transforms.tiling.ir.graph import Graph, Node, Value, add, elements
from transforms.tiling.ir.obstacles import Disagreement
from transforms.tiling.ir.placement import WHOLE, Placement, Span, Tiled
from transforms.tiling.ir.walks import ancestors, constant
from transforms.tiling.passes.witness import EXTREMA, grouped, snapped_p, witness
from transforms.tiling.rules import Move, push_completed, register
from transforms.tiling.rules.factors import peel

stored_p = Primitive("stored")  # a cut value as the loop left it that computed it first
stored_p.def_impl(lambda x: x)  # of what turned out to be whole
stored_p.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(stored_p, lambda context, x: [x])
agreed_p = Primitive("agreed")  # the first operand, computed again, as the second: as what is known, the rest, has it


def store(graph: Graph, value: Value) -> None:
    """Have a cut value stored by the loop that computes it, and read from there by all others."""
    node = value.maker
    (kept,) = add(nodes := [], node, stored_p, [value], [value.aval])
    graph.substitute({value: kept})
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
            (known,) = append(nodes, partial(_put, other), [known, other.inputs[1], copy], node)
            continue
        kind, (operand, *indices) = grouped(other)
        mask = _mask_of(operand, value) if kind["op"] == "sum" else None
        places = [*witness(graph, other, span), *indices] if mask is None else [mask]
        steps = _lets_through(value, operand) or []
        there = [known]
        for step in steps:
            there += append(nodes, step.into, [there[-1], *step.beside], node)
        (known,) = add(nodes, node, snapped_p, [there.pop(), copy, *places], [operand.aval], **kind)
        for step in reversed(steps):
            (known,) = append(nodes, step.back, [known, there.pop(), *step.beside], node)
        for total in _counts(graph, node, other):
            convert = partial(lax.convert_element_type, new_dtype=total.dtype)
            (counted[total],) = append(nodes, convert, places[2:3], node)
    copies = [other.outputs[0] for other in copying]
    (known,) = add(nodes, node, agreed_p, [value, known, *copies], [value.aval])
    _read(met, {value: known}, nodes)
    graph.insert(nodes, before=node)
    graph.substitute(counted)
    graph.sort().prune()
    return True


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
        cut = [v for v in node.outputs if v in seen and found.is_cut(v)]
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
        return named(value.aval) is None and not found.is_cut(node.inputs[1])
    if node.name not in EXTREMA or not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    kind, (operand, *indices) = grouped(node)
    cut = found.fact(operand).placement
    known = isinstance(cut, Tiled) and cut.dim in kind["groups"].dims and _lets_through(value, operand) is not None
    return known and not (indices and named(value.aval))


class Through(NamedTuple):
    """A step from a value to what an extremum is taken of.

    Args:
        into: makes it of the value and of what stands `beside` it.
        back: makes the value of what has become of it, of what the value was, and of what stands beside.
    """

    into: Callable[..., Any]
    back: Callable[..., Any]
    beside: tuple[Value, ...] = ()


def _lets_through(value: Value, masked: Value) -> list[Through] | None:
    """The steps, the innermost first, between a value and what an extremum is taken of."""
    found: list[Through] = []
    while masked is not value:
        node = masked.producer
        step = None if node is None else _step(node)
        if node is None or step is None:
            return None
        found.insert(0, step)
        masked = next(v for v in node.inputs if v not in step.beside)
    return found


def _step(node: Node) -> Through | None:
    """How an equation's result comes of one operand: without signs, in another order, or where a condition says so."""
    if node.name == "abs":
        return Through(jnp.abs, jnp.copysign)
    alone = len(node.inputs) == 1 and elements(node.inputs[0].shape) == elements(node.outputs[0].shape)
    if alone and node.name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
        return Through(partial(jnp.reshape, shape=node.outputs[0].shape), lambda new, old: jnp.reshape(new, old.shape))
    if node.name == "transpose":
        order = node.params["permutation"]
        back = [order.index(d) for d in range(len(order))]
        return Through(partial(jnp.transpose, axes=order), lambda new, old: jnp.transpose(new, back))
    if node.name != "select_n" or len(node.inputs) != 3 or node.inputs[0].shape != node.outputs[0].shape:
        return None
    filled = [constant(v) is not None for v in node.inputs[1:]]
    if filled.count(True) != 1:
        return None
    case = filled.index(False)

    def choose(which: Any, array: Any, other: Any) -> Any:
        return jnp.where(which if case else ~which, array, other)

    return Through(
        lambda value, which, rest: choose(which, value, rest),
        lambda new, old, which, rest: choose(which, new, old),
        (node.inputs[0], node.inputs[2 - case]),
    )


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


def _counts(graph: Graph, node: Node, reduction: Node) -> list[Value]:
    """The sums, in the derivative of an extremum, which count the elements that equal it."""
    kind, (operand, *indices) = grouped(reduction)
    if node.name != "eq" or operand not in node.inputs:
        return []
    groups, (equal,) = kind["groups"], node.outputs
    other = next(v for v in node.inputs if v is not operand)
    if not indices:
        mine = peel(other, len(operand.shape))[0] is reduction.outputs[0]
        floats = {n.outputs[0] for n in graph.nodes if n.name == "convert_element_type" and n.inputs[0] is equal}
        sums = (n for n in graph.nodes if n.name == "reduce_sum" and n.inputs[0] in floats)
        return [n.outputs[0] for n in sums if mine and tuple(sorted(n.params["axes"])) == groups.dims]
    mine = other.producer is not None and other.producer.inputs == [reduction.outputs[0], *indices]
    ones = {n.outputs[0] for n in graph.nodes if n.name == "select_n" and n.inputs[0] is equal and _is_count(n)}
    sums = (n for n in graph.nodes if n.name == "scatter-add" and n.inputs[2] in ones and n.inputs[1] in indices)
    alike = lambda n: (n.params["dimension_numbers"], n.params["mode"]) == (groups.numbers, groups.mode)
    return [n.outputs[0] for n in sums if mine and alike(n) and constant(n.inputs[0]) == 0]


def _is_count(node: Node) -> bool:
    """Whether a choice is 1 where a condition holds, and 0 elsewhere."""
    return list(map(constant, node.inputs[1:])) == [0, 1]


def push_agreed(node: Node, placements: tuple[Placement, ...]) -> Move:
    return Move(placements[:1], (*placements[:1] * 2, *(WHOLE,) * len(placements[2:])))


def emit_agreed(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    return values[1:2]


KEPT = "is kept for comparisons with copies of its elements"


def store_whole(node: Node, placements: tuple[Placement, ...], limits: Any) -> Move:
    """Cut as it was, but read slice by slice."""
    return Outlined(placements, (WHOLE,), (), (0,), list, reason=KEPT)


register("agreed", push=push_agreed, emit=emit_agreed)
register("stored", push=push_completed, reason=KEPT, outline=store_whole)
