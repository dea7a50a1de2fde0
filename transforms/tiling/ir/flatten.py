"""From jaxprs to graphs: nested calls inlined, collectives over dimensions as reductions, products in one form."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import NamedSharding

from transforms.tiling.ir.effects import check_pure, loud, silenced
from transforms.tiling.ir.graph import (
    CALLS,
    CUSTOM_CALLS,
    REMAT,
    SOLVE,
    Graph,
    Node,
    Value,
    body,
    prune,
    read,
)
from transforms.tiling.mesh.layout import axes, layout, named

# Collectives. `jax.vmap` turns its name into a dimension, a number, and over dimensions they are these reductions.
REDUCES = {"psum": lax.reduce_sum_p, "pmax": lax.reduce_max_p, "pmin": lax.reduce_min_p}


def flatten(closed: ClosedJaxpr, *, custom: bool = True, remat: bool = False, together: bool = False) -> Graph:
    """Return `closed` with nested calls inlined and dead code removed; constants become constant values.

    Args:
        closed: the program.
        custom: inline `custom_jvp` and `custom_vjp` calls too (their rules are lost: for graphs that are only run).
        remat: inline the bodies of `jax.checkpoint` too (their effect on memory is lost).
        together: what devices hold parts of is summed at once.
    """
    table = CALLS | (CUSTOM_CALLS if custom else {}) | (dict.fromkeys(REMAT, "jaxpr") if remat else {})
    nodes: list[Node] = []

    def run(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value], outer: Any) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update(zip(jaxpr.constvars, [Value(jax.typeof(c), const=c) for c in consts], strict=True))

        def read(atom: Any) -> Value:
            return Value(atom.aval, const=as_array(atom.val, atom.aval)) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            check_pure(eqn)
            ins = [read(a) for a in eqn.invars]
            key = table.get(eqn.primitive.name)
            if key or (custom and eqn.primitive.name == SOLVE):
                inner, ins = (body(eqn.params, key), ins) if key else solver(eqn.params, ins)
                outs = run(inner.jaxpr, inner.consts, ins, outer or eqn.source_info)
            elif eqn.primitive.name == "concatenate" and len(parts := _long(eqn, ins)) == 1:
                outs = parts
            else:
                ins = _long(eqn, ins) if eqn.primitive.name == "concatenate" else ins
                effects = loud(eqn.effects)
                node = Node(eqn.primitive, plain(eqn.params), ins, [], eqn.source_info, outer, eqn.ctx, effects)
                node.together = together
                outs = node.outputs = [Value(v.aval, node, i) for i, v in enumerate(eqn.outvars)]
                nodes.extend(reductions(node))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    inputs = [Value(v.aval) for v in closed.jaxpr.invars]
    graph = Graph(inputs, nodes, run(closed.jaxpr, closed.consts, inputs, None))
    return prune(spread_dots(turn_dots(part_turns(prune(graph)))))


def _long(eqn: Any, operands: list[Value]) -> list[Value]:
    """Those operands of a `concatenate` that its result holds anything of: a padding by nothing is one, too."""
    return [v for v in operands if v.shape[eqn.params["dimension"]]] or operands[:1]


def reductions(node: Node) -> list[Node]:
    """A collective over dimensions as the reductions that it is, then itself if there are names among its axes."""
    axes = node.params.get("axes", ()) if node.name in REDUCES else ()
    dims = tuple(a for a in axes if isinstance(a, int))
    if not dims:
        return [node]
    parts = []
    for value, out in zip(node.inputs, node.outputs, strict=True):
        params = {"axes": dims, "out_sharding": None}
        parts.append(node.like([value], [out.aval], primitive=REDUCES[node.name], params=params))
    if len(dims) == len(axes):
        for out, part in zip(node.outputs, parts, strict=True):
            out.producer, out.index, part.outputs = part, 0, [out]
        return parts
    node.params = node.params | {"axes": tuple(a for a in axes if a not in dims)}
    node.inputs = [v for part in parts for v in part.outputs]
    return [*parts, node]


def plain(param: Any) -> Any:
    """A parameter with Python's numbers where JAX, under `vmap`, leaves NumPy's."""
    if not isinstance(param, (dict, tuple, np.integer, np.bool_)):
        return param
    if isinstance(param, (np.integer, np.bool_)):
        return param.item()
    if isinstance(param, dict):
        return {k: plain(v) for k, v in param.items()}
    items = map(plain, param)
    return type(param)(*items) if hasattr(param, "_fields") else tuple(items)


def as_array(const: Any, aval: Any) -> Any:
    """A literal as an array of its own dtype: JAX writes some as Python numbers."""
    return const if isinstance(const, (jax.Array, Tracer)) else np.asarray(const, aval.dtype)


def body_graph(node: Node, key: str, number: int | None = None) -> Graph:
    """A body of an equation as a graph: the parameter `key`, or the entry `number` of it. Flattened once."""
    if (key, number) not in node.bodies:
        jaxpr = node.params[key] if number is None else node.params[key][number]
        closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
        node.bodies[key, number] = flatten(closed, together=node.together)
    return node.bodies[key, number]


def solver(params: dict[str, Any], operands: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]]:
    """The body of a `custom_linear_solve` that computes its result, and those of its operands which that takes."""
    counts = params["const_lengths"]
    first = counts.matvec + counts.vecmat
    taken = [*operands[first : first + counts.solve], *operands[sum(counts) :]]
    return body({"call_jaxpr": params["jaxprs"].solve}, "call_jaxpr"), taken


# ------------------------------------------------------------------------------- back again: a graph's values, computed


def evaluate(env: dict[Value, Any], wanted: Sequence[Value], effects: Collection[Node] = ()) -> list[Any]:
    """Compute `wanted` from the known values in `env`, which is filled along the way.

    Of the side effects run those of the nodes `effects`; what else has any is run without them.
    """

    def run(node: Node) -> list[Any]:
        silent = node.effects and node not in effects
        params = silenced(node.name, node.where, node.params) if silent else None
        return node.bind([read(env, v) for v in node.inputs], params)

    compute(env, [*wanted, *(v for node in effects for v in (node.outputs[:1] or node.inputs))], run)
    for node in (n for n in effects if not n.outputs):
        node.bind([read(env, v) for v in node.inputs])
    return [read(env, v) for v in wanted]


def compute(
    env: dict[Value, Any],
    wanted: Iterable[Value],
    run: Callable[[Node], Sequence[Any]],
    needs: Callable[[Node], Sequence[Value]] = lambda node: node.inputs,
) -> None:
    """Put `wanted` into `env`, and what they are computed from: by `run`, once what a node `needs` is there."""
    stack = [*wanted]
    while stack:
        value = stack[-1]
        node = value.producer
        if value in env or value.const is not None:
            stack.pop()
            continue
        assert node is not None, f"{value} is neither known nor computed"
        if missing := [v for v in needs(node) if v not in env and v.const is None]:
            stack.extend(missing)
            continue
        env.update(zip(node.outputs, run(node), strict=True))


# ------------------------------------------------------------------------------ products and the transposes around them


def turn_dots(graph: Any) -> Any:
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
        if dot is None or dot.name != "dot_general" or readers[dot.outputs[0]] > 1:
            continue
        if dot.outputs[0] in graph.outputs:
            continue
        contract, batch = dot.params["dimension_numbers"]
        left, right = (len(v.shape) - len(c) - len(batch[0]) for v, c in zip(dot.inputs, contract, strict=True))
        first = len(batch[0])
        turned = (*range(first), *range(first + left, first + left + right), *range(first, first + left))
        if _turn_operands(graph, node, dot, left):
            continue
        if tuple(node.params["permutation"]) != turned:
            continue
        node.primitive, node.context = dot.primitive, dot.context
        node.params = dot.params | {"dimension_numbers": (contract[::-1], batch[::-1])}
        if dot.params.get("out_sharding") is not None:
            node.params["out_sharding"] = named(node.outputs[0].aval)
        precision = dot.params["precision"]
        if isinstance(precision, tuple):
            node.params["precision"] = precision[::-1]
        node.inputs, node.source = dot.inputs[::-1], dot.source
    return graph


def part_turns(graph: Any) -> Any:
    """Let a reshape that turns its operand first, as in the gradient of a product, be a transpose and a reshape."""
    nodes = []
    for node in graph.nodes:
        if node.name == "reshape" and node.params["dimensions"] is not None:
            (value,), order = node.inputs, node.params["dimensions"]
            aval = value.aval.update(shape=tuple(value.shape[d] for d in order))
            if (sharding := named(value.aval)) is not None:
                spec = layout([axes(value.aval, d) for d in order])
                aval = aval.update(sharding=NamedSharding(sharding.mesh, spec))
            turn = node.like([value], [aval], primitive=lax.transpose_p, params={"permutation": order})
            node.inputs, node.params = turn.outputs[:], node.params | {"dimensions": None}
            nodes.append(turn)
        nodes.append(node)
    graph.nodes[:] = nodes
    return graph


def spread_dots(graph: Any) -> Any:
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
        if not path or path[-1][0].producer.name != "dot_general":
            continue
        for value, order in path:
            entries = [axes(node.outputs[0].aval, d) for d in order]
            value.aval = value.aval.update(sharding=NamedSharding(sharding.mesh, layout(entries)))
        dot = path[-1][0].producer
        dot.params = dot.params | {"out_sharding": named(dot.outputs[0].aval)}
    return graph


def _turn_operands(graph: Any, node: Any, dot: Any, left: int) -> bool:
    """Let `transpose(dot(a, b))` be `dot(transpose(a), b)` where only the dimensions of `a` change places, or of `b`.

    Scores of attention whose heads and queries change places are a copy for each head; queries are small.
    """
    (contract, batch), order = dot.params["dimension_numbers"], tuple(node.params["permutation"])
    first, count = len(batch[0]), len(order)
    if any(named(v.aval) is not None for v in (*dot.inputs, *dot.outputs)) or order[:first] != tuple(range(first)):
        return False
    blocks = [(first, first + left), (first + left, count)]
    if any(sorted(order[a:b]) != list(range(a, b)) for a, b in blocks) or order == tuple(range(count)):
        return False
    operands = list(dot.inputs)
    for side, (start, stop) in enumerate(blocks):
        value, moved = operands[side], [d - start for d in order[start:stop]]
        if moved == sorted(moved):
            continue
        if 2 * math.prod(value.shape) > math.prod(node.outputs[0].shape):
            return False
        free = [d for d in range(len(value.shape)) if d not in contract[side] and d not in batch[side]]
        turn = list(range(len(value.shape)))
        for place, k in zip(free, moved, strict=True):
            turn[place] = free[k]
        operands[side] = _turned(graph, node, value, turn)
    node.primitive, node.context, node.params, node.source = dot.primitive, dot.context, dot.params, dot.source
    node.inputs = operands
    return True


def _turn_result(graph: Any, node: Any, order: Sequence[int]) -> None:
    """Have a node make its result in another order of dimensions, which an equation after it puts in `order`."""
    (out,) = node.outputs
    shape = [0] * len(order)
    for place, d in enumerate(order):
        shape[d] = out.shape[place]
    made = type(out)(out.aval.update(shape=tuple(shape)), node)
    back = dataclasses.replace(node, primitive=lax.transpose_p, params={"permutation": tuple(order)}, inputs=[made])
    back.outputs, node.outputs, out.producer = [out], [made], back
    graph.nodes.insert(graph.nodes.index(node) + 1, back)


def _turned(graph: Any, node: Any, value: Any, order: Sequence[int]) -> Any:
    """`value` transposed, by an equation before `node`."""
    aval = value.aval.update(shape=tuple(value.shape[d] for d in order))
    made = node.like([value], [aval], primitive=lax.transpose_p, params={"permutation": tuple(order)})
    graph.nodes.insert(graph.nodes.index(node), made)
    return made.outputs[0]


def _absorb(graph: Any, node: Any, side: int) -> None:
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
    node.params = node.params | {"dimension_numbers": tuple(moved)}
    node.inputs[side] = turn.inputs[0]
