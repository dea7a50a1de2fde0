"""scatter: batch dimensions, windows, tables, and indices that are places along the cut axis."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.tiling.ir.graph import Node, constant, elements
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled, Whole
from transforms.tiling.rules import Move, linear, register, tiled
from transforms.tiling.rules.affine_index import find_position
from transforms.tiling.rules.gather import ARBITRARY, batch_dims, clamped, localise_column, widened, with_column

ADDS = ("scatter-add", "scatter-sub")
EXTREMA = {"scatter-max": "max", "scatter_max": "max", "scatter-min": "min", "scatter_min": "min"}


def push_scatter(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    if (found := linear(node, placements)) is not None:
        return found
    for result, ins in scatter_candidates(node, placements):
        if all(isinstance(p, Whole) or p == q for p, q in zip(placements, ins, strict=True)):
            return Move((result,), ins)
    return Complete(tiled(placements), ARBITRARY)


def scatter_candidates(node: Node, placements: tuple[Placement, ...]) -> list[tuple[Placement, tuple[Placement, ...]]]:
    """Ways to place a scatter, best first: the result cut, or a partial sum of the updates of each tile."""
    numbers = node.params["dimension_numbers"]
    operand, indices, updates = placements
    outer = batch_dims(len(node.inputs[2].shape), numbers.update_window_dims)
    batched = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    window = [d for d in range(len(node.inputs[0].shape)) if d not in numbers.inserted_window_dims]
    window = [d for d in window if d not in numbers.operand_batching_dims]
    windows = list(zip(window, numbers.update_window_dims, strict=True))
    paired = numbers.scatter_indices_batching_dims
    positions = [
        (dim, found)
        for column, dim in enumerate(numbers.scatter_dims_to_operand_dims)
        if dim in numbers.inserted_window_dims
        and (found := find_position(node.inputs[1], column, node.inputs[0].shape[dim], paired)) is not None
    ]
    ways: list[tuple[Placement, tuple[Placement, ...]]] = []
    for o, i in [*batched, *positions]:
        for cut in _cuts_at((operand, o), (indices, i), (updates, outer[i])):
            ways.append((cut.at(o), (cut.at(o), cut.at(i), cut.at(outer[i]))))
    for o, u in windows:
        if node.inputs[0].shape[o] == node.inputs[2].shape[u]:
            for cut in _cuts_at((operand, o), (updates, u)):
                ways.append((cut.at(o), (cut.at(o), WHOLE, cut.at(u))))
    single = {o for o, u in windows if node.inputs[2].shape[u] == 1}
    for o in numbers.scatter_dims_to_operand_dims:
        if o in single.union(numbers.inserted_window_dims) and o not in dict(positions):
            for cut in _cuts_at((operand, o)):
                ways.append((cut, (cut, WHOLE, WHOLE)))
    if node.name in (*ADDS, *EXTREMA):
        whole = EXTREMA.get(node.name, "sum")
        for i, u in enumerate(outer):
            for cut in _cuts_at((indices, i), (updates, u)):
                start = WHOLE if node.name in EXTREMA else Partial("sum")
                ways.append((Partial(whole), (start, cut.at(i), cut.at(u))))
    return ways


def pull_scatter(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    few = 2 * elements(node.inputs[2].shape) <= elements(node.outputs[0].shape)
    ways = scatter_candidates(node, (want, WHOLE, WHOLE))
    ways = [(result, ins) for result, ins in ways if few or ins[1:] != (WHOLE, WHOLE)]
    return next((ins for result, ins in ways if result == want), None)


def _cuts_at(*wanted: tuple[Placement, int]) -> list[Tiled]:
    return [p for p, dim in wanted if isinstance(p, Tiled) and p.dim == dim][:1]


def position_column(node: Node, move: Move) -> int | None:
    """The column of the indices that counts along the cut axis, where that is how the scatter was placed."""
    numbers, cut = node.params["dimension_numbers"], move.outs[0]
    if not isinstance(cut, Tiled) or not isinstance(move.ins[1], Tiled) or cut.dim in numbers.operand_batching_dims:
        return None
    return numbers.scatter_dims_to_operand_dims.index(cut.dim)


def emit_scatter(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    operand, indices, updates = values
    if move.outs[0] == Partial("sum"):
        return [add_at(node, operand.astype(span.wide(operand.dtype)), indices, updates)]
    if isinstance(move.outs[0], Tiled) and move.ins[1:] == (WHOLE, WHOLE):
        return [write(node, operand, indices, updates, move.outs[0], span)]
    column = position_column(node, move)
    if column is not None:
        assert isinstance(move.outs[0], Tiled)
        indices = localise_column(indices, column, move.outs[0], span)
    return node.bind([operand, indices, updates])


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
    indices = with_column(indices, column, jnp.where(here, local, length))
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


PARTS = {"push": push_scatter, "pull": pull_scatter, "emit": emit_scatter}
register("scatter", "scatter-mul", "scatter_mul", *EXTREMA, **PARTS)
register(*ADDS, **PARTS, accumulate=accumulate_scatter)
