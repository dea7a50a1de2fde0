"""Products of rows with the matrix of their group (mixtures of experts): a tile of the rows has its own group sizes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Placement, Span, Tiled
from transforms.tiling.rules import Move, no_sums, partial, refuse_partial, register, tiled
from transforms.tiling.rules.dot import product
from transforms.tiling.rules.factors import Factors, push_factor


def ragged_dim(node: Node) -> int:
    """The dimension of the first operand whose rows are of groups."""
    return node.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions[0]


def factors(node: Node) -> Factors:
    """`([m k], [g k n], [g]) -> [m n]`; where `m` is summed over, `([k m], [m n], [g]) -> [g k n]`."""
    numbers, ragged = node.params["ragged_dot_dimension_numbers"], ragged_dim(node)
    contract, batch = numbers.dot_dimension_numbers
    found = product(node, (contract, batch))
    (left, right), (out,) = found.ins, found.outs
    groups = [right[d] for d in numbers.rhs_group_dimensions]
    first = ["group"] if ragged in contract[0] else []
    blocked = dict.fromkeys([*groups, *([left[ragged]] if ragged in batch[0] else ())], "groups the cut axis")
    outs = [[*first, *(name for name in out if name not in groups)]]
    return Factors([left, right, ["group"]], outs, reduced=found.reduced, blocked=blocked)


by_factors = push_factor(factors, no_sums)


def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """As factors say, where each tile of the rows can tell which groups they are of: not from a part of the groups."""
    cuts, ragged = tiled(placements), ragged_dim(node)
    if 2 in cuts or len(node.inputs[2].shape) != 1 or node.params["group_offset"] is not None:
        return refuse_partial(node, placements) or Complete(cuts, "needs the sizes of all groups")
    move = by_factors(node, placements)
    rows = move.ins[0] if isinstance(move, Move) else WHOLE
    if isinstance(rows, Tiled) and rows.dim == ragged and not rows.plain:
        return Complete(cuts, "groups the cut axis")
    return move


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    lhs, rhs, sizes = values
    cut, ragged = move.ins[0], ragged_dim(node)
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
