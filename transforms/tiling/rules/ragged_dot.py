"""Products of rows with the matrix of their group (mixtures of experts): a tile of the rows has its own group sizes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled
from transforms.tiling.rules import Move, partial, refuse_partial, register, smaller, tiled


def dims(node: Node) -> tuple[Any, Any, Any, Any]:
    """The contracted and the batch dimensions of both operands; the ragged one of the rows, the groups' of the rest."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    pairs = [tuple(tuple(map(int, d)) for d in pair) for pair in (contract, batch)]
    return pairs[0], pairs[1], int(numbers.lhs_ragged_dimensions[0]), tuple(map(int, numbers.rhs_group_dimensions))


def out_dim(node: Node, side: int, dim: int) -> int:
    """Where a free or batch dimension of an operand stands in the result."""
    contract, batch, ragged, group = dims(node)
    first = int(ragged in contract[0])  # the groups come first where the rows are summed over
    if dim in batch[side]:
        return first + batch[side].index(dim)
    dropped = (set(contract[0]) | set(batch[0]), set(contract[1]) | set(batch[1]) | set(group))
    free = [[d for d in range(len(node.inputs[s].shape)) if d not in dropped[s]] for s in (0, 1)]
    return first + len(batch[0]) + (len(free[0]) if side == 1 else 0) + free[side].index(dim)


def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    if (parts := refuse_partial(node, placements, "is not run on partial sums")) is not None:
        return parts
    contract, batch, ragged, group = dims(node)
    cuts = [i for i in tiled(placements) if i < 2]
    if len(cuts) < len(tiled(placements)) or len(node.inputs[2].shape) != 1 or node.params["group_offset"] is not None:
        return Complete(tiled(placements), "needs the sizes of all groups")
    side = cuts[0]
    cut = placements[side]
    assert isinstance(cut, Tiled)
    partner: Placement = WHOLE
    for pairs in (contract, batch):
        if cut.dim in pairs[side]:
            partner = cut.at(pairs[1 - side][pairs[side].index(cut.dim)])
    if len(cuts) == 2 and placements[1] != partner:
        return Complete(smaller(node, cuts), "has operands that are cut along different dimensions")
    rows = (side == 0 and cut.dim == ragged) or (isinstance(partner, Tiled) and side == 1 and partner.dim == ragged)
    if (side == 1 and cut.dim in group) or (rows and (ragged in batch[0] or not cut.plain)):
        return Complete(cuts, "groups the cut axis")
    ins = (cut, partner, WHOLE) if side == 0 else (partner, cut, WHOLE)
    if cut.dim in contract[side]:
        return Move((Partial("sum"),), ins)
    return Move((cut.at(out_dim(node, side, cut.dim)),), ins)


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


register("ragged_dot_general", push=push, emit=emit)
