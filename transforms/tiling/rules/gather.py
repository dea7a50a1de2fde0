"""gather: batch dimensions, windows, tables, and indices that are places along the cut axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transforms.tiling.ir.graph import Node, elements
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled, Whole, identity, neutral
from transforms.tiling.rules import Move, linear, partial, register
from transforms.tiling.rules.affine_index import find_position
from transforms.tiling.rules.factors import Factors, push_factor

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


def factors(node: Node) -> Factors:
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


by_factors = push_factor(factors, gathered_sum)


def push_gather(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    (operand, indices), numbers = placements, node.params["dimension_numbers"]
    if isinstance(operand, Whole) and isinstance(indices, Tiled):
        want = indices.at(batch_dims(len(node.outputs[0].shape), numbers.offset_dims)[indices.dim])
        return Move((want,), pull_gather(node, want) or ())
    if not isinstance(operand, Tiled) or partial(placements):
        return by_factors(node, placements)
    of_operand, of_indices = factors(node).ins
    if (dim := of_operand[operand.dim]) is not None:
        if isinstance(indices, Tiled) and of_indices[indices.dim] != dim:
            return Complete([1], "has operands that are cut along different dimensions")
        return by_factors(node, placements)
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


register("gather", push=push_gather, pull=pull_gather, emit=emit_gather, factors=factors)
