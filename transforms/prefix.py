"""Operations along the cut axis that hand a state from tile to tile: `cumsum` and its like, `lax.scan`, `argmax`.

Each is rewritten as the same operation on one tile, begun with what the tiles before it left (`carried`, an equation of
our own, which reads a loop's accumulator). Backwards, where later tiles come first, it needs its operand whole.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from transforms.choice import write_choice
from transforms.graph import Graph, Node, Value, body_graph
from transforms.placement import COMBINE, WHOLE, Partial, Placement, Span, Tiled, identity
from transforms.rewrite import add, carried_p, replace
from transforms.rules import Complete, Move, register, scan_counts, tiled
from transforms.rules.regions import whole_body
from transforms.rules.scan import run_scan

part_p = Primitive("cumulative_part")  # a cumulative operation on one tile
total_p = Primitive("cumulative_total")  # its last entry
joined_p = Primitive("cumulative_joined")  # it, with what came before
scan_p = Primitive("scan_part")  # a scan over one tile

OPS = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min", "cumlogsumexp": "logaddexp"}


def carry(graph: Graph, node: Node, span: Span) -> None:
    """Rewrite an operation that runs forward along the cut axis."""
    nodes: list[Node] = []
    write = {"scan": _write_scan, "argmax": write_choice, "argmin": write_choice, "top_k": write_choice}
    outs = write.get(node.name, _write_cumulative)(nodes, node, span)
    replace(graph, node, nodes, dict(zip(node.outputs, outs, strict=True)))


def _write_cumulative(nodes: list[Node], node: Node, span: Span) -> list[Value]:
    (operand,), axis, op = node.inputs, node.params["axis"], OPS[node.name]
    aval = node.outputs[0].aval
    shape = (*aval.shape[:axis], *aval.shape[axis + 1 :])
    dtype = span.wide(aval.dtype) if op == "sum" else aval.dtype
    (part,) = add(nodes, node, part_p, [operand], [aval], of=node)
    (total,) = add(nodes, node, total_p, [part], [ShapedArray(shape, dtype)], axis=axis, op=op)
    empty = Value(ShapedArray((), dtype), const=identity(op, dtype))
    (before,) = add(nodes, node, carried_p, [empty], [total.aval], total=total)
    # The state is known before the tile's own total: it comes first.
    nodes.insert(0, nodes.pop())
    return list(add(nodes, node, joined_p, [before, part], [aval], axis=axis, op=op))


def _write_scan(nodes: list[Node], node: Node, span: Span) -> list[Value]:
    constants, count = scan_counts(node)
    consts, init, xs = (
        node.inputs[:constants],
        node.inputs[constants : constants + count],
        node.inputs[constants + count :],
    )
    before = [add(nodes, node, carried_p, [v], [v.aval])[0] for v in init]
    outs = add(nodes, node, scan_p, [*consts, *before, *xs], [v.aval for v in node.outputs], of=node)
    for state, final in zip(before, outs[:count], strict=True):
        assert state.producer is not None
        state.producer.params = {"total": final}
    return list(outs)


# --------------------------------------------------------------------------------------------------------------- rules


def push_carried(node: Node, placements: tuple[Placement, ...]) -> Move:
    raise Complete([0], "begins a loop along the cut axis with it")


def push_part(node: Node, placements: tuple[Placement, ...]) -> Move:
    return Move(placements, placements)


def emit_part(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    return node.params["of"].bind(values)


def push_total(node: Node, placements: tuple[Placement, ...]) -> Move:
    return Move((Partial(node.params["op"]),), placements)


def emit_total(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    return [jnp.take(values[0], -1, axis=node.params["axis"]).astype(node.outputs[0].dtype)]


def push_joined(node: Node, placements: tuple[Placement, ...]) -> Move:
    return Move(placements[1:], (WHOLE, placements[1]))


def emit_joined(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    before, part = values
    before = jnp.expand_dims(before, node.params["axis"])
    return [COMBINE[node.params["op"]](*jnp.broadcast_arrays(before, part.astype(before.dtype))).astype(part.dtype)]


def push_scan_part(node: Node, placements: tuple[Placement, ...]) -> Move:
    """Constants are whole; all that is scanned is cut along its first dimension."""
    constants, count = scan_counts(node.params["of"])
    if found := tiled(placements[:constants]):
        raise Complete(found, "reads it in each step along the cut axis")
    first = constants + count
    if other := [i for i, p in enumerate(placements) if i >= first and p not in (WHOLE, Tiled(0))]:
        raise Complete(other, "runs along another axis than the cut one")
    ins = (*(WHOLE,) * first, *(Tiled(0),) * (len(placements) - first))
    return Move((*(Partial("last"),) * count, *(Tiled(0),) * (len(node.outputs) - count)), ins)


def emit_scan_part(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    scan = node.params["of"]
    wanted = range(len(node.outputs))
    whole = whole_body(body_graph(scan, "jaxpr"), wanted)
    return run_scan(scan, values, wanted, whole, span.length)


register("carried", push=push_carried)
register("cumulative_part", push=push_part, emit=emit_part)
register("cumulative_total", push=push_total, emit=emit_total)
register("cumulative_joined", push=push_joined, emit=emit_joined)
register("scan_part", push=push_scan_part, emit=emit_scan_part)
