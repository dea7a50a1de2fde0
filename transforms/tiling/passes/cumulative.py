"""Operations along the cut axis that hand a state from tile to tile: `cumsum` and its like, `lax.scan`, `argmax`.

Each is rewritten as the same operation on one tile, begun with what the tiles before it left (`loop_state`). Backwards
the tiles before it are the later ones: its loop goes from the last to the first. So do the gradients of what runs
forward.
What runs backwards on an operand that may be whole is left as it is: that takes one loop less.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from transforms.tiling.ir.edit import add, replace
from transforms.tiling.ir.graph import Graph, Node, Value, scan_counts
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import COMBINE, WHOLE, Partial, Placement, Span, Whole, identity
from transforms.tiling.passes.argmax import write_choice
from transforms.tiling.passes.loop_state import begin, leave
from transforms.tiling.rules import Move, partial, register, tiled
from transforms.tiling.rules.bodies import added, run_part

part_p = Primitive("cumulative_part")  # a cumulative operation on one tile
total_p = Primitive("cumulative_total")  # its last entry
joined_p = Primitive("cumulative_joined")  # it, with what came before
scan_p = Primitive("scan_part")  # a scan over one tile

OPS = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min", "cumlogsumexp": "logaddexp"}


def carry(graph: Graph, node: Node, span: Span) -> None:
    """Rewrite an operation that runs along the cut axis."""
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
    reverse = node.params["reverse"]
    (total,) = add(nodes, node, total_p, [part], [ShapedArray(shape, dtype)], axis=axis, op=op, reverse=reverse)
    empty = Value(ShapedArray((), dtype), const=identity(op, dtype))
    before = begin(nodes, node, empty, total.aval, span, reverse)
    leave(before, total)
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
    sums, reverse = added(node), node.params["reverse"]
    before = [v if i in sums else begin(nodes, node, v, v.aval, span, reverse) for i, v in enumerate(init)]
    outs = add(nodes, node, scan_p, [*consts, *before, *xs], [v.aval for v in node.outputs], of=node)
    for i, (state, final) in enumerate(zip(before, outs[:count], strict=True)):
        if i not in sums:
            leave(state, final)
    return list(outs)


# --------------------------------------------------------------------------------------------------------------- rules


def push_part(node: Node, placements: tuple[Placement, ...]) -> Move:
    return Move(placements, placements)


def emit_part(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    return node.params["of"].bind(values)


def push_total(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    return Move((Partial(node.params["op"]),), placements)


def emit_total(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    end = 0 if node.params["reverse"] else -1
    return [jnp.take(values[0], end, axis=node.params["axis"]).astype(node.outputs[0].dtype)]


def push_joined(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    return Move(placements[1:], (WHOLE, placements[1]))


def emit_joined(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    before, part = values
    before = jnp.expand_dims(before, node.params["axis"])
    return [COMBINE[node.params["op"]](*jnp.broadcast_arrays(before, part.astype(before.dtype))).astype(part.dtype)]


def push_scan_part(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Constants are whole; all that is scanned is cut along its first dimension."""
    constants, count = scan_counts(node.params["of"])
    if found := tiled(placements[:constants]):
        return Complete(found, "reads it in each step along the cut axis")
    first = constants + count
    cut = placements[first:][tiled(placements[first:])[0]]
    if other := [i for i, p in enumerate(placements) if i >= first and p not in (WHOLE, cut)]:
        return Complete(other, "runs along another axis than the cut one")
    sums = added(node.params["of"])
    if parts := [i for i in partial(placements) if i - constants not in sums or placements[i] != Partial("sum")]:
        return Complete(parts, "begins a loop along the cut axis with it")
    state = [Partial("sum") if i in sums else WHOLE for i in range(count)]
    ends = [Partial("sum" if i in sums else "last") for i in range(count)]
    ins = (*(WHOLE,) * constants, *state, *(cut,) * (len(placements) - first))
    return Move((*ends, *(cut,) * (len(node.outputs) - count)), ins)


def emit_scan_part(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    wanted = [i for i, p in enumerate(move.outs) if not isinstance(p, Whole)]
    constants, count = scan_counts(node.params["of"])
    return run_part(node.params["of"], values, move, span, wanted, values[constants + count].shape[0])


register("cumulative_part", push=push_part, emit=emit_part, alone=True)
register("cumulative_total", push=push_total, emit=emit_total)
register("cumulative_joined", push=push_joined, emit=emit_joined)
register("scan_part", push=push_scan_part, emit=emit_scan_part, trims=True)
