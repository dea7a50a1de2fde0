"""Indexing, `x[i]` and `x.at[i]` by gather and scatter.

Batch dimensions, windows, tables, and indices that are places along the cut axis.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transforms.layout import named
from transforms.tiling.ir.graph import Node, elements
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled, Whole, identity, neutral
from transforms.tiling.ir.walks import constant
from transforms.tiling.rules import Move, count_once, linear, partial, register
from transforms.tiling.rules.affine_index import find_position
from transforms.tiling.rules.factors import Factors, pull_factor, push_factor

ARBITRARY = "looks up arbitrary places along the cut axis"


def picks_few(node: Node) -> bool:
    """Whether a node's result is so much smaller than its operand that each tile can make all of it, of numbers.

    An argument of the function is whole to begin with: nothing is gained.
    """
    (source, *_), (out,) = node.inputs, node.outputs
    few = source.producer is not None and 2 * elements(out.shape) <= elements(source.shape)
    return few and not jax.dtypes.issubdtype(out.dtype, jax.dtypes.extended)


def push_part(
    node: Node, placements: tuple[Placement, ...], why: str = "takes a part of the cut axis"
) -> Move | Obstacle:
    """A small part of the cut axis: each tile has some of it, and what is nothing in a sum in place of the rest."""
    if not picks_few(node):
        return Complete([0], why)
    return Move((Partial("or" if node.outputs[0].dtype == bool else "sum"),), placements)


def widened(indices: Any) -> Any:
    """Indices in a signed dtype that holds any of them."""
    narrow = jnp.dtype(indices.dtype).itemsize < 4 or indices.dtype == jnp.uint32
    return indices.astype(jnp.int32) if narrow else indices


def clamped(places: Any, last: Any) -> Any:
    """Places no larger than `last`, as JAX clamps them, in such a dtype: their own may not hold `last`."""
    most = np.minimum(last, jnp.iinfo(places.dtype).max).astype(places.dtype)
    return widened(jnp.clip(places, 0, most))


def batch_dims(rank: int, window: tuple[int, ...]) -> list[int]:
    """The dimensions of a gather's result, or a scatter's updates, that come from its indices."""
    return [d for d in range(rank) if d not in window]


def gather_factors(node: Node) -> Factors:
    """`([v d], [n]) -> [n d]`; `v` is `n` where indices are positions along it, or it is a batch of both."""
    numbers, sizes, (source, indices) = node.params["dimension_numbers"], node.params["slice_sizes"], node.inputs
    dims = range(len(node.outputs[0].shape))
    outer = batch_dims(len(dims), numbers.offset_dims)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(source.shape)) if d not in gone]
    own = {d: o for o, d in zip(numbers.offset_dims, kept, strict=True) if sizes[d] == source.shape[d]}
    pairs = zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    own |= {d: outer[i] for i, d in pairs}
    for column, dim in enumerate(numbers.start_index_map):
        if dim not in own and sizes[dim] == 1:
            at = find_position(indices, column, source.shape[dim], numbers.start_indices_batching_dims)
            own |= {} if at is None else {dim: outer[at]}
    return Factors([[own.get(d) for d in range(len(source.shape))], [*outer, None]], [dims])


def fills_alike(node: Node, operand: Partial) -> bool:
    """Whether what stands in for places out of bounds is the same after the tiles' parts are combined."""
    if node.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP or operand.op not in ("sum", "prod"):
        return True
    fill, exact = node.params["fill_value"], not jnp.issubdtype(node.outputs[0].dtype, jnp.inexact)
    return not exact if fill is None else bool(np.isnan(fill) or fill == identity(operand.op, node.outputs[0].dtype))


def gathered_sum(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle | None:
    if isinstance(placements[0], Partial) and not fills_alike(node, placements[0]):
        return Complete([0], "fills in a value that each tile would add")
    return linear(node, placements)


by_gather_factors = push_factor(gather_factors, gathered_sum)


def push_gather(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    (operand, indices), numbers = placements, node.params["dimension_numbers"]
    if isinstance(operand, Whole) and isinstance(indices, Tiled):
        want = indices.at(batch_dims(len(node.outputs[0].shape), numbers.offset_dims)[indices.dim])
        return Move((want,), pull_gather(node, want) or ())
    if not isinstance(operand, Tiled) or partial(placements):
        return by_gather_factors(node, placements)
    of_operand, of_indices = gather_factors(node).ins
    if (dim := of_operand[operand.dim]) is not None:
        if isinstance(indices, Tiled) and of_indices[indices.dim] != dim:
            return Complete([1], "has operands that are cut along different dimensions")
        return by_gather_factors(node, placements)
    if operand.dim not in numbers.start_index_map or node.params["slice_sizes"][operand.dim] != 1:
        return Complete([0], "takes a part of the cut axis")
    if isinstance(indices, Tiled):
        return Complete([1], "looks up places that are cut themselves")
    return push_part(node, placements, ARBITRARY)


def pull_gather(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    """Of a whole operand only batches are sliced: it is read where it lies."""
    numbers = node.params["dimension_numbers"]
    if want.dim in numbers.offset_dims:
        return None
    dim = batch_dims(len(node.outputs[0].shape), numbers.offset_dims).index(want.dim)
    back = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    return (want.at(back[dim]) if dim in back else WHOLE, want.at(dim))


def with_column(indices: Any, column: int, places: Any) -> Any:
    """Indices with other places in one of their columns."""
    own = places[..., None].astype(indices.dtype)
    return jnp.concatenate([indices[..., :column], own, indices[..., column + 1 :]], -1)


def look_up(node: Node, operand: Any, indices: Any, cut: Tiled, span: Span) -> Any:
    """What falls into the tile, and nothing elsewhere; places out of bounds are filled in on the first tile."""
    numbers, fills = node.params["dimension_numbers"], node.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    column, size = numbers.start_index_map.index(cut.dim), node.inputs[0].shape[cut.dim]
    places = widened(indices[..., column]) if fills else clamped(indices[..., column], size - 1)
    here, local = span.find(places, cut)
    outside = (places < 0) | (places >= size)
    local = jnp.where(outside, operand.shape[cut.dim], local)
    (found,) = node.bind([operand, with_column(widened(indices), column, local)])
    keep = here | (outside & (jnp.asarray(span.start) == 0))
    outer = batch_dims(len(found.shape), numbers.offset_dims)
    return jnp.where(lax.broadcast_in_dim(keep, found.shape, outer), found, neutral("sum", found.dtype))


def localise_column(indices: Any, column: int, cut: Tiled, span: Span) -> Any:
    """Indices along the cut axis, counted from the tile's start."""
    return with_column(indices, column, span.localise(indices[..., column], cut))


def emit_gather(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    operand, indices = values
    numbers, cut = node.params["dimension_numbers"], move.ins[0]
    sizes = node.params["slice_sizes"]
    if isinstance(cut, Tiled) and isinstance(move.outs[0], Partial):
        return [look_up(node, operand, indices, cut, span)]
    if isinstance(cut, Tiled) and cut.dim not in numbers.operand_batching_dims:
        if isinstance(move.ins[1], Tiled):
            indices = localise_column(indices, numbers.start_index_map.index(cut.dim), cut, span)
        else:
            sizes = span.local_shape(sizes, cut)
    return node.bind([operand, indices], node.params | {"slice_sizes": sizes})


# -------------------------------------------------------------------------------------------------------------- scatter


ADDS = ("scatter-add", "scatter-sub")
EXTREMA = {"scatter-max": "max", "scatter_max": "max", "scatter-min": "min", "scatter_min": "min"}
SUMMED = EXTREMA | dict.fromkeys(ADDS, "sum")


def scatter_factors(node: Node) -> Factors:
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


by_scatter_factors = push_factor(scatter_factors, linear)


def push_scatter(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    move = by_scatter_factors(node, placements)
    if isinstance(move, Move) and move.outs == (Partial("sum"),):
        return Move(move.outs, tuple(map(count_once, move.ins[:1])) + move.ins[1:])
    return move


def pull_scatter(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    few = 2 * elements(node.inputs[2].shape) <= elements(node.outputs[0].shape)
    ins = pull_factor(scatter_factors)(node, want)
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
    (own, (*rows, _), _) = scatter_factors(node).ins
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


PARTS = {"push": push_scatter, "pull": pull_scatter, "emit": emit_scatter, "factors": scatter_factors}
register("scatter", "scatter-mul", "scatter_mul", *EXTREMA, **PARTS)
register(*ADDS, **PARTS, accumulate=accumulate_scatter)
register("gather", push=push_gather, pull=pull_gather, emit=emit_gather, factors=gather_factors)
