"""Canonical forms: what JAX writes in several ways, as rules expect it.

Collectives over dimensions are reductions, barriers have one operand, joins no empty ones, products absorb the
transposes around them.
Rules and passes know primitives by name, and so does this, their forerunner: what it writes is all that they see.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from transforms.layout import axes, layout, named
from transforms.products import usual
from transforms.tiling.ir.graph import Graph, Node, Value

# Collectives. `jax.vmap` turns its name into a dimension, a number, and over dimensions they are these reductions.
REDUCES = {"psum": lax.reduce_sum_p, "pmax": lax.reduce_max_p, "pmin": lax.reduce_min_p}


def canonical(graph: Graph) -> Graph:
    """The same graph, its joins, products and the transposes around these in one form."""
    return spread_dots(turn_dots(narrow_dots(part_turns(drop_empty(graph)))))


def drop_empty(graph: Graph) -> Graph:
    """Let a join read what its result holds anything of, and be that if it is one: a padding by nothing is one, too.

    So are, in its derivative, splits into one part and nothing, and sums with what is summed of nothing. What is one
    long is its own reversal.
    """
    same: dict[Value, Value] = {}
    zeros: set[Value] = set()
    for node in graph.nodes:
        if node.name == "concatenate":
            held = [v for v in node.inputs if v.shape[node.params["dimension"]]] or node.inputs[:1]
            node.change(inputs=[same.get(v, v) for v in held])
            if len(node.inputs) == 1:
                same[node.outputs[0]] = node.inputs[0]
            continue
        if not node.inputs:
            continue
        operand, *others = [same.get(v, v) for v in node.inputs]
        parts = [v for v in node.outputs if v.shape == operand.shape]
        nothing = node.name == "reduce_sum" and 0 in operand.shape
        kept = operand in zeros and node.name in ("broadcast_in_dim", "reshape", "pad")
        if nothing or (kept and all(map(_is_zero, others))):
            zeros.add(node.outputs[0])
        elif node.name == "split" and parts:
            same[parts[0]] = operand
        elif node.name == "rev" and all(operand.shape[d] in (0, 1) for d in node.params["dimensions"]):
            same[node.outputs[0]] = operand
        elif node.name in ("add", "add_any") and not zeros.isdisjoint((operand, *others)):
            same[node.outputs[0]] = others[0] if operand in zeros else operand
    graph.substitute(same)
    return graph


def _is_zero(value: Value) -> bool:
    return isinstance(value.const, np.ndarray | np.generic) and not np.any(value.const)


def barriers(node: Node) -> list[Node]:
    """A barrier of several values as one of each: some may be cut, and others whole."""
    if node.name != "optimization_barrier" or len(node.inputs) == 1:
        return [node]
    return _result_in(node, _of_each(node))


def reductions(node: Node) -> list[Node]:
    """A collective over dimensions as the reductions that it is, then itself if there are names among its axes."""
    axes = node.params.get("axes", ()) if node.name in REDUCES else ()
    dims = tuple(a for a in axes if isinstance(a, int))
    if not dims:
        return [node]
    parts = _of_each(node, primitive=REDUCES[node.name], params={"axes": dims, "out_sharding": None})
    if len(dims) == len(axes):
        return _result_in(node, parts)
    params = node.params | {"axes": tuple(a for a in axes if a not in dims)}
    node.change(params=params, inputs=[v for part in parts for v in part.outputs])
    return [*parts, node]


def _of_each(node: Node, **changes: Any) -> list[Node]:
    """Nodes like one, of one operand each, but for `changes`."""
    both = zip(node.inputs, node.outputs, strict=True)
    return [node.like([value], [out.aval], **changes) for value, out in both]


def _result_in(node: Node, parts: list[Node]) -> list[Node]:
    """Let the results of a node be those of its parts, one by one."""
    return [part.make([out]) for out, part in zip(node.outputs, parts, strict=True)]


# ------------------------------------------------------------------------------ products and the transposes around them


def turn_dots(graph: Graph) -> Graph:
    """Let `transpose(dot(a, b))`, which is how JAX writes the gradient of a matrix, be `dot(b, a)`.

    So the gradient of `[D, V]` is accumulated as `[D, V]`, and not copied once more in the end. And let dots read what
    is turned for them as it lies.
    """
    for node in graph.nodes[:]:
        if node.name == "dot_general":
            for side in (0, 1):
                _absorb(graph, node, side)
    readers = Counter(v for node in graph.nodes for v in node.inputs)
    for node in graph.nodes[:]:
        dot = node.inputs[0].producer if node.name == "transpose" else None
        if dot is None or dot.name != "dot_general" or readers[dot.outputs[0]] > 1 or dot.outputs[0] in graph.outputs:
            continue
        _turn(graph, node, dot)
    return graph


def narrow_dots(graph: Graph) -> Graph:
    """Let a float32 product of what was made wide from bfloat16 read the bfloat16: it is the same."""

    def narrow(value: Value) -> Value:
        made = value.producer if value.dtype == jnp.float32 else None
        source = made.inputs[0] if made is not None and made.name == "convert_element_type" else value
        return source if source.dtype == jnp.bfloat16 else value

    for node in graph.nodes:
        wide = node.name == "dot_general" and node.outputs[0].dtype == jnp.float32
        if wide and usual(node.params["precision"]):
            operands = [narrow(v) for v in node.inputs]
            if operands != node.inputs and all(v.dtype == jnp.bfloat16 for v in operands):
                node.change(inputs=operands, params=node.params | {"preferred_element_type": jnp.dtype(jnp.float32)})
    return graph


def part_turns(graph: Graph) -> Graph:
    """Let a reshape that turns its operand first, as in the gradient of a product, be a transpose and a reshape."""
    for node in graph.nodes[:]:
        if node.name == "reshape" and node.params["dimensions"] is not None:
            turned = _turned(graph, node, node.inputs[0], node.params["dimensions"])
            node.change(inputs=[turned], params=node.params | {"dimensions": None})
    return graph


def spread_dots(graph: Graph) -> Graph:
    """Let `reshard(dot(a, b))` be a dot whose result is spread so: what devices sum is then scattered, not copied."""
    readers = Counter(v for node in graph.nodes for v in {*node.inputs})
    for node in graph.nodes:
        sharding = named(node.outputs[0].aval) if node.name == "reshard" else None
        if sharding is None:
            continue
        path, value, order = [], node.inputs[0], list(range(len(node.inputs[0].shape)))
        while readers[value] == 1 and value not in graph.outputs and value.producer is not None:
            path.append((value, tuple(order)))
            if value.producer.name not in ("convert_element_type", "transpose"):
                break
            if value.producer.name == "transpose":
                order = [order[value.producer.params["permutation"].index(d)] for d in range(len(order))]
            value = value.producer.inputs[0]
        dot = path[-1][0].producer if path else None
        if dot is None or dot.name != "dot_general":
            continue
        for value, order in path:
            entries = [axes(node.outputs[0].aval, d) for d in order]
            value.retype(value.aval.update(sharding=NamedSharding(sharding.mesh, layout(entries))))
        dot.change(params=dot.params | {"out_sharding": named(dot.outputs[0].aval)})
    return graph


def _turn(graph: Graph, node: Node, dot: Node) -> None:
    """Let `transpose(dot(a, b))` be `dot(b, a)`, or `dot(transpose(a), b)`, where that makes what it makes.

    Scores of attention whose heads and queries change places are a copy for each head; queries are small.
    """
    (contract, batch), order = dot.params["dimension_numbers"], node.params["permutation"]
    both = list(zip(dot.inputs, contract, batch, strict=True))
    free = [[(side, d) for d in range(len(v.shape)) if d not in (*c, *b)] for side, (v, c, b) in enumerate(both)]
    made = [*range(len(batch[0])), *free[0], *free[1]]
    wanted = [made[d] for d in order]
    turned = [[name for name in wanted if name in own] for own in free]
    swapped = wanted != [*range(len(batch[0])), *turned[0], *turned[1]]
    if swapped and wanted != [*range(len(batch[0])), *turned[1], *turned[0]]:
        return
    sides = [side for side in (0, 1) if turned[side] != free[side]]
    spread = any(named(v.aval) is not None for v in (*dot.inputs, *dot.outputs))
    large = any(2 * dot.inputs[i].aval.size > node.outputs[0].aval.size for i in sides)
    if sides and (swapped or spread or large):
        return
    operands, params = list(dot.inputs), dict(dot.params)
    for side in sides:
        turn = list(range(len(operands[side].shape)))
        for (_, place), (_, d) in zip(free[side], turned[side], strict=True):
            turn[place] = d
        operands[side] = _turned(graph, node, operands[side], turn)
    if swapped:
        operands, params["dimension_numbers"] = operands[::-1], (contract[::-1], batch[::-1])
        if isinstance(params["precision"], tuple):
            params["precision"] = params["precision"][::-1]
        if params.get("out_sharding") is not None:
            params["out_sharding"] = named(node.outputs[0].aval)
    node.change(primitive=dot.primitive, params=params, inputs=operands, context=dot.context, source=dot.source)


def _turn_result(graph: Graph, node: Node, order: Sequence[int]) -> None:
    """Have a node make its result in another order of dimensions, which an equation after it puts in `order`."""
    (out,) = node.outputs
    made = Value(out.aval.update(shape=tuple(out.shape[order.index(d)] for d in range(len(order)))))
    back = node.like([made], [], primitive=lax.transpose_p, params={"permutation": tuple(order)}).make([out])
    node.make([made])
    graph.insert([back], after=node)


def _turned(graph: Graph, node: Node, value: Value, order: Sequence[int]) -> Value:
    """`value` transposed, by an equation before `node`."""
    aval = value.aval.update(shape=tuple(value.shape[d] for d in order))
    if (sharding := named(value.aval)) is not None:
        spec = layout([axes(value.aval, d) for d in order])
        aval = aval.update(sharding=NamedSharding(sharding.mesh, spec))
    made = node.like([value], [aval], primitive=lax.transpose_p, params={"permutation": tuple(order)})
    graph.insert([made], before=node)
    return made.outputs[0]


def _absorb(graph: Graph, node: Node, side: int) -> None:
    """Let `dot(a, transpose(b))` read `b`: what is not contracted keeps its order, or is turned in a smaller result."""
    turn = node.inputs[side].producer
    if turn is None or turn.name != "transpose":
        return
    order = turn.params["permutation"]
    contract, batch = node.params["dimension_numbers"]
    free = [order[d] for d in range(len(order)) if d not in contract[side] and d not in batch[side]]
    if free != sorted(free):
        (out,) = node.outputs
        small = 2 * math.prod(out.shape) <= math.prod(turn.outputs[0].shape)
        if not small or any(named(v.aval) is not None for v in (*node.inputs, out)):
            return
        start = len(batch[0]) + (len(out.shape) - len(batch[0]) - len(free)) * side
        back = list(range(len(out.shape)))
        for i, d in enumerate(free):
            back[start + i] = start + sorted(free).index(d)
        _turn_result(graph, node, back)
    moved = [
        tuple(tuple(order[d] for d in dims) if s == side else dims for s, dims in enumerate(pair))
        for pair in (contract, batch)
    ]
    inputs = [turn.inputs[0] if s == side else v for s, v in enumerate(node.inputs)]
    node.change(inputs=inputs, params=node.params | {"dimension_numbers": tuple(moved)})
