"""Operations along the cut axis that hand a state from tile to tile: `cumsum` and its like, `lax.scan`, `argmax`.

Each is rewritten as the same operation on one tile, begun with what the tiles before it left (`loop_state`). Backwards
the tiles before it are the later ones: its loop goes from the last to the first. So do the gradients of what runs
forward.
What runs backwards on an operand that may be whole is left as it is: that takes one loop less.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from transforms.layout import slice_of
from transforms.tiling.ir.graph import Graph, Node, Value, add
from transforms.tiling.ir.obstacles import Complete, Obstacle, Refusal
from transforms.tiling.ir.placement import COMBINE, WHOLE, Partial, Placement, Span, Tiled, identity
from transforms.tiling.ir.walks import scan_counts
from transforms.tiling.passes.argmax import write_choice
from transforms.tiling.passes.loop_state import begin, hand_on, leave, scalar
from transforms.tiling.regions.bodies import added, run_part
from transforms.tiling.rules import Move, partial, register, tiled

cumulative_p = Primitive("cumulative")  # a cumulative operation on one tile, with what came before; and its own total
scan_p = Primitive("scan_part")  # a scan over one tile
shifted_p = Primitive("shifted")  # a tile of what is shifted, with the rows that come from beside it; and those of it

REMEDY = '  To go on: cut another axis, or pass gather="any".'
OPS = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min", "cumlogsumexp": "logaddexp"}


def carry(graph: Graph, node: Node, span: Span) -> None:
    """Rewrite an operation that runs along the cut axis."""
    nodes: list[Node] = []
    write = {"scan": _write_scan, "pad": _write_shift, **dict.fromkeys(["argmax", "argmin", "top_k"], write_choice)}
    outs = write.get(node.name, _write_cumulative)(nodes, node, span)
    graph.replace(node, nodes, outs)


def _write_cumulative(nodes: list[Node], node: Node, span: Span) -> list[Value]:
    (operand,), axis, op = node.inputs, node.params["axis"], OPS[node.name]
    aval = node.outputs[0].aval
    dtype = aval.dtype if op in ("max", "min") else span.wide(aval.dtype)
    empty, total = scalar(identity(op, dtype), dtype), slice_of(aval, axis).update(dtype=dtype)
    return hand_on(nodes, node, cumulative_p, [operand], [empty], [aval, total], span, of=node, dim=axis, op=op)[:1]


def _write_shift(nodes: list[Node], node: Node, span: Span) -> list[Value]:
    """Rewrite a shift: the rows beside each tile are the last, or first, that the tile there had."""
    operand, fill = node.inputs
    aval, (dim, rows) = node.outputs[0].aval, shift_of(node)
    few = aval.update(shape=(*aval.shape[:dim], abs(rows), *aval.shape[dim + 1 :]))
    how = {"dim": dim, "op": "last", "reverse": rows < 0}
    return hand_on(nodes, node, shifted_p, [operand], [fill], [aval, few], span, **how)[:1]


def shift_of(node: Node) -> tuple[int, int]:
    """Along which dimension a `pad` shifts its operand, and by how many elements."""
    return next((d, low) for d, (low, high, _) in enumerate(node.params["padding_config"]) if low == -high != 0)


def _write_scan(nodes: list[Node], node: Node, span: Span) -> list[Value]:
    constants, count = scan_counts(node)
    first = constants + count
    consts, init, xs = node.inputs[:constants], node.inputs[constants:first], node.inputs[first:]
    sums = added(node)
    before = [
        v if i in sums else begin(nodes, node, v, v.aval, span, node.params["reverse"]) for i, v in enumerate(init)
    ]
    outs = add(nodes, node, scan_p, [*consts, *before, *xs], [v.aval for v in node.outputs], of=node)
    for i, (state, final) in enumerate(zip(before, outs[:count], strict=True)):
        if i not in sums:
            leave(state, final)
    return list(outs)


# --------------------------------------------------------------------------------------------------------------- rules


def push_along(node: Node, placements: tuple[Placement, ...]) -> Move | Refusal:
    """A tile, and what it leaves; of what it meets may have had its operand cut another way since, none."""
    cut, dim = placements[0], node.params["dim"]
    if isinstance(cut, Tiled) and cut.dim != dim:
        return Refusal(f"cannot tile {node}: it is cut along dimension {cut.dim}, and runs along {dim}.\n{REMEDY}")
    return Move((cut, Partial(node.params["op"])), (cut, WHOLE))


def emit_cumulative(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    of, axis, (array, before) = node.params["of"], node.params["dim"], values
    (part,) = of.bind([array])
    both = jnp.broadcast_arrays(jnp.expand_dims(before, axis), part.astype(before.dtype))
    joined = COMBINE[node.params["op"]](*both).astype(part.dtype)
    total = jnp.take(part, 0 if of.params["reverse"] else -1, axis=axis).astype(before.dtype)
    return [joined, total]


def emit_shifted(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    (array, beside), dim, reverse = values, node.params["dim"], node.params["reverse"]
    joined = jnp.concatenate([array, beside] if reverse else [beside, array], dim)
    rows, length, end = beside.shape[dim], array.shape[dim], joined.shape[dim]
    first, last = lax.slice_in_dim(joined, 0, length, axis=dim), lax.slice_in_dim(joined, rows, end, axis=dim)
    if reverse:
        return [last, lax.slice_in_dim(joined, 0, rows, axis=dim)]
    return [first, lax.slice_in_dim(joined, end - rows, end, axis=dim)]


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
    return run_part(node.params["of"], values, move, span)


register("cumulative", push=push_along, emit=emit_cumulative, alone=True, trims=True)
register("shifted", push=push_along, emit=emit_shifted, alone=True, trims=True)
register("scan_part", push=push_scan_part, emit=emit_scan_part, trims=True)
