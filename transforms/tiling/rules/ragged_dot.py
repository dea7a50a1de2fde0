"""Products of rows with the matrix of their group (mixtures of experts): a tile of the rows has its own group sizes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Placement, Span, Tiled
from transforms.tiling.rules import Move, no_sums, partial, refuse_partial, register, tiled
from transforms.tiling.rules.factors import Factors, push_factor


def dims(node: Node) -> tuple[Any, Any, Any, Any]:
    """The contracted and the batch dimensions of both operands; the ragged one of the rows, the groups' of the rest."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    pairs = [tuple(tuple(map(int, d)) for d in pair) for pair in (contract, batch)]
    return pairs[0], pairs[1], int(numbers.lhs_ragged_dimensions[0]), tuple(map(int, numbers.rhs_group_dimensions))


def factors(node: Node) -> Factors:
    """`([m k], [g k n], [g]) -> [m n]`; where `m` is summed over, `([k m], [m n], [g]) -> [g k n]`."""
    contract, batch, ragged, group = dims(node)
    left, right = ([(side, d) for d in range(len(v.shape))] for side, v in enumerate(node.inputs[:2]))
    for mine, its in (*zip(*contract, strict=True), *zip(*batch, strict=True)):
        right[its] = left[mine]
    groups = [right[d] for d in group]
    summed, batched = ([left[d] for d in dims] for dims in (contract[0], batch[0]))
    free = [name for name in dict.fromkeys([*left, *right]) if name not in (*summed, *batched, *groups)]
    first = ["group"] if ragged in contract[0] else []
    blocked = dict.fromkeys([*groups, *([left[ragged]] if ragged in batch[0] else ())], "groups the cut axis")
    outs = [[*first, *batched, *free]]
    return Factors([left, right, ["group"]], outs, reduced=dict.fromkeys(summed, "sum"), blocked=blocked)


by_factors = push_factor(factors, no_sums)


def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """As factors say, where each tile of the rows can tell which groups they are of: not from a part of the groups."""
    cuts, ragged = tiled(placements), dims(node)[2]
    if 2 in cuts or len(node.inputs[2].shape) != 1 or node.params["group_offset"] is not None:
        return refuse_partial(node, placements) or Complete(cuts, "needs the sizes of all groups")
    move = by_factors(node, placements)
    rows = move.ins[0] if isinstance(move, Move) else WHOLE
    if isinstance(rows, Tiled) and rows.dim == ragged and not rows.plain:
        return Complete(cuts, "groups the cut axis")
    return move


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    lhs, rhs, sizes = values
    cut, ragged = move.ins[0], dims(node)[2]
    if isinstance(cut, Tiled) and cut.dim == ragged:
        ends = jnp.cumsum(sizes, dtype=sizes.dtype)
        start = jnp.asarray(span.start, sizes.dtype)
        inside = [jnp.clip(x, start, start + span.length) for x in (ends - sizes, ends)]
        sizes = inside[1] - inside[0]
    if not partial(move.outs):
        return node.bind([lhs, rhs, sizes])
    dtype = span.wide(node.outputs[0].dtype)
    return node.bind([lhs.astype(dtype), rhs.astype(dtype), sizes], node.params | {"preferred_element_type": dtype})


register("ragged_dot_general", push=push, emit=emit, alone=True)
