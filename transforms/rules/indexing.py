"""gather and scatter: batch dimensions, windows, tables, and indices that are the position along the cut axis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transforms.graph import Node, Value, constant
from transforms.placement import WHOLE, Partial, Placement, Span, Tiled, Whole, identity
from transforms.rules import Complete, Move, count_once, partial, refuse_partial, register, shrinks, tiled

ARBITRARY = "looks up arbitrary places along the cut axis"


def is_position(value: Value, dim: int, column: int | None = None) -> bool:
    """Whether `value` (its last dimension at `column`, if given) is provably the index along its dimension `dim`.

    This is what makes `logits[jnp.arange(n), labels]` a lookup within the tile.
    """
    if value.const is not None or value.producer is None:
        return _is_arange(value.const, dim, column)
    if not jnp.issubdtype(value.dtype, jnp.integer) or jnp.iinfo(value.dtype).max < value.shape[dim] - 1:
        return False
    node, source = value.producer, value.producer.inputs[0] if value.producer.inputs else value
    match node.name:
        case "iota":
            return node.params["dimension"] == dim
        case "convert_element_type" | "copy" | "copy_p" | "stop_gradient":
            return is_position(source, dim, column)
        case "select_n":  # jnp counts negative indices from the end: where(i < 0, i + n, i)
            test = node.inputs[0].producer
            never = test is not None and test.name == "lt" and constant(test.inputs[1]) == 0
            return never and is_position(test.inputs[0], dim, column) and is_position(node.inputs[1], dim, column)
        case "clamp":
            low, high = constant(node.inputs[0]), constant(node.inputs[2])
            wide = low is not None and high is not None and low <= 0 and high >= value.shape[dim] - 1
            return wide and is_position(node.inputs[1], dim, column)
        case "concatenate" if column is not None and node.params["dimension"] == len(value.shape) - 1:
            for piece in node.inputs:
                if column < piece.shape[-1]:
                    return is_position(piece, dim, column)
                column -= piece.shape[-1]
            return False
        case "broadcast_in_dim" | "reshape" | "squeeze":
            return _through_reshape(node, value, source, dim, column)
    return False


def _is_arange(array: Any, dim: int, column: int | None) -> bool:
    if not isinstance(array, np.ndarray):
        return False
    array = array if column is None else array[..., column]
    steps = np.arange(array.shape[dim]).reshape([-1 if d == dim else 1 for d in range(array.ndim)])
    return bool((array == steps).all())


def _through_reshape(node: Node, value: Value, source: Value, dim: int, column: int | None) -> bool:
    """Follow a dimension, and the column of the last one, back through changes of rank."""
    if node.name == "broadcast_in_dim":
        back = {int(out): i for i, out in enumerate(node.params["broadcast_dimensions"])}
    else:
        real = [d for d, size in enumerate(value.shape) if size != 1]
        came = [d for d, size in enumerate(source.shape) if size != 1]
        if [value.shape[d] for d in real] != [source.shape[d] for d in came]:
            return False
        back = dict(zip(real, came, strict=True))
    if dim not in back or source.shape[back[dim]] != value.shape[dim]:
        return False
    last = back.get(len(value.shape) - 1) if column is not None else None
    if last is None or source.shape[last] == 1:
        return is_position(source, back[dim])
    return last == len(source.shape) - 1 and last != back[dim] and is_position(source, back[dim], column)


def find_position(indices: Value, column: int, size: int, batching: tuple[int, ...]) -> int | None:
    """The dimension of `indices`, of length `size`, whose position its column holds; not one paired with another."""
    dims = (d for d in range(len(indices.shape) - 1) if indices.shape[d] == size and d not in batching)
    return next((d for d in dims if is_position(indices, d, column)), None)


# -------------------------------------------------------------------------------------------------------------- gather


def batch_dims(rank: int, window: tuple[int, ...]) -> list[int]:
    """The dimensions of a gather's result, or a scatter's updates, that come from its indices."""
    return [d for d in range(rank) if d not in window]


def fills_alike(node: Node, operand: Partial) -> bool:
    """Whether what stands in for places out of bounds is the same after the tiles' parts are combined."""
    if node.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP or operand.op not in ("sum", "prod"):
        return True
    fill, exact = node.params["fill_value"], not jnp.issubdtype(node.outputs[0].dtype, jnp.inexact)
    return not exact if fill is None else bool(np.isnan(fill) or fill == identity(operand.op, node.outputs[0].dtype))


def push_gather(node: Node, placements: tuple[Placement, ...]) -> Move:
    operand, indices = placements
    if isinstance(operand, Partial) and isinstance(indices, Whole) and shrinks(node, 0):
        if not fills_alike(node, operand):
            raise Complete([0], "fills in a value that each tile would add")
        return Move((operand,), placements)
    refuse_partial(node, placements)
    numbers = node.params["dimension_numbers"]
    outer = batch_dims(len(node.outputs[0].shape), numbers.offset_dims)
    pairs = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if isinstance(operand, Tiled):
        dim = operand.dim
        if dim in pairs:
            other = pairs[dim]
        elif dim in numbers.start_index_map and node.params["slice_sizes"][dim] == 1:
            column, size = numbers.start_index_map.index(dim), node.inputs[0].shape[dim]
            found = find_position(node.inputs[1], column, size, numbers.start_indices_batching_dims)
            alone = len(numbers.start_index_map) == 1 or node.params["mode"] != lax.GatherScatterMode.CLIP
            if found is None and isinstance(indices, Whole) and node.inputs[0].producer is not None and alone:
                op = "or" if node.outputs[0].dtype == bool else "sum"
                return Move((Partial(op),), placements)  # each place is in one tile
            if found is None:
                raise Complete([0], ARBITRARY)
            other = found
        elif node.params["slice_sizes"][dim] == node.inputs[0].shape[dim]:
            if isinstance(indices, Tiled):
                raise Complete([1], "has operands that are cut along different dimensions")
            kept = [d for d in range(len(node.inputs[0].shape)) if d not in numbers.collapsed_slice_dims]
            kept = [d for d in kept if d not in numbers.operand_batching_dims]
            return Move((operand.at(numbers.offset_dims[kept.index(dim)]),), placements)
        else:
            raise Complete([0], "takes a part of the cut axis")
        if isinstance(indices, Tiled) and indices != operand.at(other):
            raise Complete([1], "has operands that are cut along different dimensions")
        return Move((operand.at(outer[other]),), (operand, operand.at(other)))
    assert isinstance(indices, Tiled)
    back = {i: o for o, i in pairs.items()}
    source = indices.at(back[indices.dim]) if indices.dim in back else WHOLE
    return Move((indices.at(outer[indices.dim]),), (source, indices))


def pull_gather(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    numbers = node.params["dimension_numbers"]
    if want.dim in numbers.offset_dims:
        return None
    dim = batch_dims(len(node.outputs[0].shape), numbers.offset_dims).index(want.dim)
    back = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    return (want.at(back[dim]) if dim in back else WHOLE, want.at(dim))


def localise_column(indices: Any, column: int, cut: Tiled, span: Span) -> Any:
    """Indices along the cut axis, counted from the tile's start."""
    return indices.at[..., column].set(span.localise(indices[..., column], cut))


def within(node: Node, indices: Any, column: int, cut: Tiled, span: Span) -> tuple[Any, Any]:
    """Indices along the cut axis counted from the tile's start, past its end for what lies elsewhere; and which do not.

    What is out of bounds of the whole axis counts as in the first tile, at -1.
    """
    size, stride, steps = node.inputs[0].shape[cut.dim], span.total * cut.minor, span.length * cut.minor
    places = indices[..., column]
    if node.params["mode"] == lax.GatherScatterMode.CLIP:
        places = jnp.clip(places, 0, size - 1)
    valid, start = (places >= 0) & (places < size), span.start * cut.minor
    along = places % stride
    inside = valid & (along >= start) & (along < start + steps)
    local = (places // stride * steps + along - start).astype(indices.dtype)
    local = jnp.where(inside, local, jnp.where(valid, cut.major * steps, -1).astype(indices.dtype))
    return indices.at[..., column].set(local), inside | (~valid & (span.start == 0))


def emit_gather(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    operand, indices = values
    numbers, cut = node.params["dimension_numbers"], move.ins[0]
    sizes = node.params["slice_sizes"]
    if isinstance(cut, Tiled) and isinstance(move.outs[0], Partial):
        indices, inside = within(node, indices, numbers.start_index_map.index(cut.dim), cut, span)
        mode = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
        (found,) = node.bind([operand, indices], node.params | mode)
        outer = batch_dims(found.ndim, numbers.offset_dims)
        return [jnp.where(lax.broadcast_in_dim(inside, found.shape, outer), found, jnp.zeros_like(found))]
    if isinstance(cut, Tiled) and cut.dim not in numbers.operand_batching_dims:
        if isinstance(move.ins[1], Tiled):
            indices = localise_column(indices, numbers.start_index_map.index(cut.dim), cut, span)
        else:
            sizes = span.local_shape(sizes, cut)
    return node.bind([operand, indices], node.params | {"slice_sizes": sizes})


# ------------------------------------------------------------------------------------------------------------- scatter


def push_scatter(node: Node, placements: tuple[Placement, ...]) -> Move:
    operand, indices, updates = placements
    if partial(placements):
        linear = node.name == "scatter-add" and not tiled(placements) and isinstance(indices, Whole)
        if linear and {p for p in placements if isinstance(p, Partial)} == {Partial("sum")}:
            return Move((Partial("sum"),), (count_once(operand), indices, count_once(updates)))
        refuse_partial(node, placements)
    one_cut_each = scatter_candidates(node, placements)
    for result, ins in one_cut_each:
        if all(isinstance(p, Whole) or p == q for p, q in zip(placements, ins, strict=True)):
            return Move((result,), ins)
    raise Complete(tiled(placements), ARBITRARY)


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
    alone = len(numbers.scatter_dims_to_operand_dims) == 1 or node.params["mode"] != lax.GatherScatterMode.CLIP
    for o in numbers.scatter_dims_to_operand_dims:
        if o in numbers.inserted_window_dims and alone:
            for cut in _cuts_at((operand, o)):  # each tile takes what falls into it
                ways.append((cut, (cut, WHOLE, WHOLE)))
    if node.name == "scatter-add":
        for i, u in enumerate(outer):
            for cut in _cuts_at((indices, i), (updates, u)):
                ways.append((Partial("sum"), (Partial("sum"), cut.at(i), cut.at(u))))
    return ways


def pull_scatter(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    ways = scatter_candidates(node, (want, WHOLE, WHOLE))
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
    if isinstance(move.outs[0], Partial):
        return [add_at(node, operand.astype(span.wide(operand.dtype)), indices, updates)]
    cut, numbers = move.outs[0], node.params["dimension_numbers"]
    scattered = isinstance(cut, Tiled) and cut.dim in numbers.inserted_window_dims
    if scattered and move.ins[1:] == (WHOLE, WHOLE):
        column = numbers.scatter_dims_to_operand_dims.index(cut.dim)
        indices, _ = within(node, indices, column, cut, span)
        loose = {"indices_are_sorted": False, "unique_indices": False, "mode": lax.GatherScatterMode.FILL_OR_DROP}
        return node.bind([operand, indices, updates], node.params | loose)
    column = position_column(node, move)
    if column is not None:
        assert isinstance(move.outs[0], Tiled)
        indices = localise_column(indices, column, move.outs[0], span)
    return node.bind([operand, indices, updates])


def accumulate_scatter(node: Node, values: list[Any], total: Any, span: Span) -> Any:
    """Scatter straight into the accumulator: no array of its size is made for a tile."""
    operand, indices, updates = values
    if constant(node.inputs[0]) != 0:
        total = total + operand.astype(total.dtype)
    return add_at(node, total, indices, updates)


def add_at(node: Node, operand: Any, indices: Any, updates: Any) -> Any:
    """The node's scatter-add in the dtype of `operand`."""
    flags = {k: node.params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
    return lax.scatter_add(operand, indices, updates.astype(operand.dtype), node.params["dimension_numbers"], **flags)


register("gather", push=push_gather, pull=pull_gather, emit=emit_gather)
register(
    "scatter",
    "scatter-sub",
    "scatter-mul",
    "scatter_mul",
    "scatter-min",
    "scatter-max",
    "scatter_min",
    "scatter_max",
    push=push_scatter,
    pull=pull_scatter,
    emit=emit_scatter,
)
register("scatter-add", push=push_scatter, pull=pull_scatter, emit=emit_scatter, accumulate=accumulate_scatter)
