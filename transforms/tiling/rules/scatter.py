"""scatter: batch dimensions, windows, tables, and indices that are places along the cut axis."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.layout import named
from transforms.tiling.ir.graph import Node, elements
from transforms.tiling.ir.obstacles import Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled
from transforms.tiling.ir.walks import constant
from transforms.tiling.rules import Move, count_once, linear, register
from transforms.tiling.rules.affine_index import find_position
from transforms.tiling.rules.factors import Factors, pull_factor, push_factor
from transforms.tiling.rules.gather import ARBITRARY, batch_dims, clamped, localise_column, widened, with_column

ADDS = ("scatter-add", "scatter-sub")
EXTREMA = {"scatter-max": "max", "scatter_max": "max", "scatter-min": "min", "scatter_min": "min"}
SUMMED = EXTREMA | dict.fromkeys(ADDS, "sum")


def factors(node: Node) -> Factors:
    """`([v d], [n], [n d]) -> [v d]`; `v` is `n` where indices are positions along it, or it is a batch of both.

    Otherwise `n` is added up, if it may be, and along `v` a tile writes what falls into it.
    """
    numbers, (operand, indices, updates) = node.params["dimension_numbers"], node.inputs
    inserted, indexed = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    paired, dims = numbers.scatter_indices_batching_dims, range(len(operand.shape))
    rows: list[Any] = [f"row {i}" for i in range(len(indices.shape) - 1)]
    own = dict(enumerate(dims)) | {d: rows[i] for d, i in zip(numbers.operand_batching_dims, paired, strict=True)}
    for column, dim in enumerate(indexed):
        at = find_position(indices, column, operand.shape[dim], paired) if dim in inserted else None
        own |= {} if at is None else {dim: rows[at]}
    added = {*rows} - {*own.values()}
    free = {*rows} - (set() if node.name in SUMMED else added) | {d for d in inserted if d in indexed}
    names = dict(zip(batch_dims(len(updates.shape), numbers.update_window_dims), rows, strict=True))
    window = [d for d in dims if d not in (*inserted, *numbers.operand_batching_dims)]
    for d, u in zip(window, numbers.update_window_dims, strict=True):
        full = operand.shape[d] == updates.shape[u]
        names[u] = d if full else f"window {u}"
        free |= {d} if full or (updates.shape[u] == 1 and d in indexed) else set()
    ins = [[*own.values()], [*rows, "column"], [names[u] for u in range(len(names))]]
    blocked = dict.fromkeys({name for dims in ins for name in dims} - free, ARBITRARY)
    return Factors(ins, ins[:1], dict.fromkeys(added & free, SUMMED.get(node.name, "")), blocked)


by_factors = push_factor(factors, linear)


def push_scatter(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    move = by_factors(node, placements)
    if isinstance(move, Move) and move.outs == (Partial("sum"),):
        return Move(move.outs, tuple(map(count_once, move.ins[:1])) + move.ins[1:])
    return move


def pull_scatter(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    few = 2 * elements(node.inputs[2].shape) <= elements(node.outputs[0].shape)
    ins = pull_factor(factors)(node, want)
    return ins if ins is not None and (few or ins[1:] != (WHOLE, WHOLE)) else None


def position_column(node: Node, move: Move) -> int | None:
    """The column of the indices that counts along the cut axis, where that is how the scatter was placed."""
    numbers, cut = node.params["dimension_numbers"], move.outs[0]
    if not isinstance(cut, Tiled) or not isinstance(move.ins[1], Tiled) or cut.dim in numbers.operand_batching_dims:
        return None
    return numbers.scatter_dims_to_operand_dims.index(cut.dim)


def emit_scatter(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    (operand, indices, updates), (cut,) = values, move.outs
    if cut == Partial("sum"):
        return [add_at(node, operand.astype(span.wide(operand.dtype)), indices, updates)]
    if isinstance(cut, Tiled) and move.ins[1:] == (WHOLE, WHOLE):
        return [write(node, operand, indices, updates, cut, span)]
    if isinstance(cut, Tiled) and (column := position_column(node, move)) is not None:
        indices = localise_column(indices, column, cut, span)
    if (rows := one_hot_rows(node)) is not None:
        dim, order = rows
        places = widened(indices[..., node.params["dimension_numbers"].scatter_dims_to_operand_dims.index(dim)])
        if node.params["mode"] == lax.GatherScatterMode.CLIP:
            places = clamped(places, operand.shape[dim] - 1)
        return [one_hot(operand, places, updates, dim, order)]
    return node.bind([operand, indices, updates])


def one_hot_rows(node: Node) -> tuple[int, list[int]] | None:
    """The dimension along which a sum into zeros has one element of each row, and which updates belong to which row.

    That is the gradient of a label's logit, by `take_along_axis` or `logits[jnp.arange(n), labels]`.

    Returns:
        The dimension, and of every other one the dimension of the updates that lies along it. None: it is another sum.
    """
    numbers, (operand, _, updates) = node.params["dimension_numbers"], node.inputs
    if node.name != "scatter-add" or constant(operand) != 0 or named(operand.aval) or numbers.update_window_dims:
        return None
    (own, (*rows, _), _) = factors(node).ins
    free = [d for d, name in enumerate(own) if name not in rows]
    if len(free) != 1 or free[0] not in numbers.scatter_dims_to_operand_dims:
        return None
    others = tuple(n for d, n in enumerate(operand.shape) if d != free[0])
    order = [rows.index(name) for name in dict.fromkeys(own) if name in rows]
    return (free[0], order) if elements(updates.shape) == elements(others) else None


def one_hot(zeros: Any, places: Any, updates: Any, dim: int, order: list[int]) -> Any:
    """`where(iota == places, updates, 0)`: XLA makes it with what reads it, where a scatter is a pass of its own.

    Args:
        zeros: where it is scattered to.
        places: along `dim`, one of each row.
        updates: one of each row.
        dim: the dimension that rows lie along.
        order: of the dimensions of `places` and `updates`; others are one long.
    """
    shape, rest = (*zeros.shape[:dim], 1, *zeros.shape[dim + 1 :]), [d for d in range(places.ndim) if d not in order]
    places, updates = (x.transpose(*order, *rest).reshape(shape) for x in (places, updates))
    return jnp.where(lax.broadcasted_iota(places.dtype, zeros.shape, dim) == places, updates, zeros)


def write(node: Node, operand: Any, indices: Any, updates: Any, cut: Tiled, span: Span) -> Any:
    """Scatter to whole places: those outside the tile are dropped."""
    numbers, size = node.params["dimension_numbers"], node.inputs[0].shape
    if node.params["mode"] == lax.GatherScatterMode.CLIP:
        window = iter(numbers.update_window_dims)
        fixed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        lengths = [1 if d in fixed else updates.shape[next(window)] for d in range(len(size))]
        last = [size[d] - lengths[d] for d in numbers.scatter_dims_to_operand_dims]
        indices = clamped(indices, last)
    indices = widened(indices)
    column = numbers.scatter_dims_to_operand_dims.index(cut.dim)
    here, local = span.find(indices[..., column], cut)
    length = operand.shape[cut.dim]
    local = jnp.where(here, local, length)
    if (rows := one_hot_rows(node)) is not None:
        return one_hot(operand, local, updates, *rows)
    indices = with_column(indices, column, local)
    # Where a lone update is to be dropped, XLA:CPU (jaxlib 0.10.2) may read past the end: it falls into a spare row.
    single = math.prod(indices.shape[:-1]) == 1
    if single:
        spare = lax.slice_in_dim(operand, 0, 1, axis=cut.dim)
        operand = lax.concatenate([operand, spare], cut.dim)
    flags = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False, "unique_indices": False}
    (result,) = node.bind([operand, indices, updates], node.params | flags)
    return lax.slice_in_dim(result, 0, length, axis=cut.dim) if single else result


def accumulate_scatter(node: Node, values: list[Any], total: Any, span: Span) -> Any:
    """Scatter straight into the accumulator: no array of its size is made for a tile."""
    operand, indices, updates = values
    if constant(node.inputs[0]) != 0:
        total = total + operand.astype(total.dtype)
    return add_at(node, total, indices, updates)


def add_at(node: Node, operand: Any, indices: Any, updates: Any) -> Any:
    """The node's sum in the dtype of `operand`."""
    updates = -updates if node.name == "scatter-sub" else updates
    flags = {k: node.params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
    return lax.scatter_add(operand, indices, updates.astype(operand.dtype), node.params["dimension_numbers"], **flags)


PARTS = {"push": push_scatter, "pull": pull_scatter, "emit": emit_scatter, "factors": factors}
register("scatter", "scatter-mul", "scatter_mul", *EXTREMA, **PARTS)
register(*ADDS, **PARTS, accumulate=accumulate_scatter)
