"""Slices, reversals and padding, at places known beforehand or not: along the cut axis a tile takes what it has."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled, Whole, neutral
from transforms.tiling.rules import Move, by_cut, register, tiled
from transforms.tiling.rules.factors import Factors, register_factors
from transforms.tiling.rules.indexing import clamped, push_part
from transforms.tiling.rules.reshape import resized


def pick(rows: Any, places: Any, cut: Tiled, span: Span) -> list[Any]:
    """Of a tile, the rows at `places` along the whole axis, and nothing for those that are not in it."""
    here, local = span.find(places, cut)
    found = jnp.take(rows, local, axis=cut.dim, mode="clip")
    return [jnp.where(lax.broadcast_in_dim(here, found.shape, (cut.dim,)), found, neutral("sum", found.dtype))]


def cut_part(move: Move) -> Tiled | None:
    """The cut of an operand that a part is taken of."""
    cut = move.ins[0]
    return cut if isinstance(cut, Tiled) and isinstance(move.outs[0], Partial) else None


# ------------------------------------------------------------------------------------------------------ slice, rev


@by_cut
def push_slice(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    kept = pieces(node, cut, node.inputs[0].shape, node.outputs[0].shape) or strided(node, cut)
    return push_part(node, placements) if kept is None else Move((kept,), placements)


def strided(node: Node, cut: Tiled) -> Tiled | None:
    """Where the axis stands in a slice that takes one of every few of its rows, from the first few on."""
    dim, stride = cut.dim, _stride(node, cut.dim)
    size, count = node.inputs[0].shape[dim], node.outputs[0].shape[dim]
    plain = (cut.major, cut.minor) == (1, 1) and stride > 1 and node.params["start_indices"][dim] < stride
    return cut.scaled(Fraction(1, stride)) if plain and count * stride == size else None


def pull_slice(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    source = pieces(node, want, node.outputs[0].shape, node.inputs[0].shape)
    return None if source is None else (source,)


def pieces(node: Node, cut: Tiled, shape: tuple[int, ...], other: tuple[int, ...]) -> Tiled | None:
    """The cut on the other side of a slice that takes the cut axis whole, once or several times."""
    whole = _stride(node, cut.dim) == 1 and node.params["start_indices"][cut.dim] % cut.block(shape) == 0
    return cut.repeated(shape, other[cut.dim]) if whole else None


def _stride(node: Node, dim: int) -> int:
    return 1 if node.params["strides"] is None else node.params["strides"][dim]


def localise_slice(node: Node, move: Move, span: Span) -> dict[str, Any]:
    (source,), (cut,) = move.ins, move.outs
    if not isinstance(source, Tiled) or not isinstance(cut, Tiled):
        return node.params
    if cut.group > source.group:
        return node.params | {"limit_indices": _at(node.params["limit_indices"], cut.dim, source.steps(span.length))}
    dim, block = cut.dim, cut.block(node.outputs[0].shape)
    start = node.params["start_indices"][dim] // block * cut.steps(span.length)
    limit = start + span.local_shape(node.outputs[0].shape, cut)[dim]
    starts, limits = (node.params[k] for k in ("start_indices", "limit_indices"))
    return node.params | {"start_indices": _at(starts, dim, start), "limit_indices": _at(limits, dim, limit)}


def emit_slice(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    cut = cut_part(move)
    if cut is None:
        return node.bind(values, localise_slice(node, move, span))
    p, dim = node.params, cut.dim
    places = p["start_indices"][dim] + _stride(node, dim) * jnp.arange(node.outputs[0].shape[dim], dtype=jnp.int32)
    strides = None if p["strides"] is None else _at(p["strides"], dim, 1)
    start, limit = _at(p["start_indices"], dim, 0), _at(p["limit_indices"], dim, values[0].shape[dim])
    (rows,) = node.bind(values, p | {"start_indices": start, "limit_indices": limit, "strides": strides})
    return pick(rows, places, cut, span)


def _at(items: tuple[Any, ...], i: int, new: Any) -> tuple[Any, ...]:
    return (*items[:i], new, *items[i + 1 :])


def turned(node: Node) -> Factors:
    """`([i j]) -> [i j]`, the other way round along some."""
    dims, turns = range(len(node.inputs[0].shape)), node.params["dimensions"]
    return Factors([dims], [dims], blocked=dict.fromkeys(turns, "reverses the cut axis"))


# ---------------------------------------------------------------------------------------------------------------- pad


@by_cut
def push_pad(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    low, high, gap = node.params["padding_config"][cut.dim]
    shape, alone = node.inputs[0].shape, (cut.major, cut.minor) == (1, 1)
    behind = gap == 0 and low >= 0 and high >= 0 and low % cut.block(shape) == 0
    if behind and (landed := cut.repeated(shape, node.outputs[0].shape[cut.dim])) is not None:
        return Move((landed,), placements)
    if gap == 0 and low == -high and alone:
        return Move((cut,), placements, reach={0: (max(low, 0) * cut.group, max(high, 0) * cut.group)})  # a shift
    if gap > 0 and low + high == gap and low >= 0 <= high and alone and cut.group % (gap + 1) == 0:
        return Move((cut.scaled(gap + 1),), placements)  # an element stands for a multiple of so many rows
    return Complete([0], "pads the cut axis")


def pull_pad(node: Node, want: Tiled) -> tuple[Placement, ...]:
    """Along a padded dimension the tile is picked from the whole operand."""
    return (want if tuple(node.params["padding_config"][want.dim]) == (0, 0, 0) else WHOLE, WHOLE)


def emit_pad(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    source, cut = move.ins[0], move.outs[0]
    values = [values[0], values[1].astype(values[0].dtype)]  # sums are wider than they will be
    if not isinstance(cut, Tiled):
        return node.bind(values)
    if move.reach:
        return [shifted(node, *values, cut, span)]
    low, high, gap = node.params["padding_config"][cut.dim]
    if isinstance(source, Tiled) and source.group > cut.group:
        return node.bind(values)
    if isinstance(source, Tiled):
        steps, block = cut.steps(span.length), cut.block(node.outputs[0].shape)
        return [padded(node, *values, cut, (low // block * steps, high // block * steps, 0))]
    size = node.inputs[0].shape[cut.dim]
    rows = padded(node, *values, cut, (0, 0, 0))
    offset = span.positions(cut, jnp.int32) - low
    inside = (offset >= 0) & (offset % (gap + 1) == 0) & (offset // (gap + 1) < size)
    if size == 0:
        return [jnp.full(span.local_shape(node.outputs[0].shape, cut), values[1])]
    found = jnp.take(rows, offset // (gap + 1), axis=cut.dim, mode="clip")
    return [jnp.where(lax.broadcast_in_dim(inside, found.shape, (cut.dim,)), found, values[1])]


def shifted(node: Node, rows: Any, fill: Any, cut: Tiled, span: Span) -> Any:
    """A tile of what is shifted along the cut axis, from a tile with the rows beside it."""
    low, _, _ = node.params["padding_config"][cut.dim]
    rows = lax.slice_in_dim(rows, max(-low, 0), max(-low, 0) + cut.steps(span.length), axis=cut.dim)
    rows = padded(node, rows, fill, cut, (0, 0, 0))
    return span._replace(start=span.start - low * cut.group).cleared(rows, cut, fill)


def padded(node: Node, rows: Any, fill: Any, cut: Tiled, config: tuple[int, int, int]) -> Any:
    """Some rows padded as the node says, but along the cut axis by `config`."""
    configs = _at(node.params["padding_config"], cut.dim, config)
    return node.bind([rows, fill], node.params | {"padding_config": configs})[0]


# ------------------------------------------------------------------------------------------------------ dynamic slices


@by_cut
def push_dynamic_slice(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    if tiled(placements) != [0]:
        return Complete([i for i in tiled(placements) if i], "starts at a place that differs from tile to tile")
    if node.params["slice_sizes"][cut.dim] != node.inputs[0].shape[cut.dim]:
        return push_part(node, placements)
    return Move((cut,), placements)


@by_cut
def push_update(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    if any(i > 1 for i in tiled(placements)):
        return Complete([i for i in tiled(placements) if i > 1], "starts at a place that differs from tile to tile")
    if tiled(placements) != [0] and isinstance(_update(node, cut), Whole):
        return Complete(tiled(placements), "overwrites a part of the cut axis")
    return Move((cut,), (cut, _update(node, cut), *placements[2:]))


def emit_dynamic_slice(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    cut = cut_part(move)
    if cut is None:
        return node.bind(values, resized("slice_sizes")(node, move, span))
    operand, *starts = values
    dim, count = cut.dim, node.params["slice_sizes"][cut.dim]
    places = _start(starts[dim], node.inputs[0].shape[dim] - count) + jnp.arange(count, dtype=jnp.int32)
    starts[dim] = jnp.zeros_like(starts[dim])
    sizes = _at(node.params["slice_sizes"], dim, operand.shape[dim])
    (rows,) = node.bind([operand, *starts], node.params | {"slice_sizes": sizes})
    return pick(rows, places, cut, span)


def _start(start: Any, last: int) -> Any:
    """Where a dynamic slice starts."""
    return clamped(jnp.asarray(start), last).astype(jnp.int32)


def pull_dynamic_slice(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    if node.params["slice_sizes"][want.dim] != node.inputs[0].shape[want.dim]:
        return None
    return (want, *(WHOLE,) * (len(node.inputs) - 1))


def pull_update(node: Node, want: Tiled) -> tuple[Placement, ...]:
    return (want, _update(node, want), *(WHOLE,) * (len(node.inputs) - 2))


def _update(node: Node, cut: Tiled) -> Placement:
    """How an update stands that overwrites all of the cut axis, or a part of it."""
    return cut if node.inputs[1].shape[cut.dim] == node.inputs[0].shape[cut.dim] else WHOLE


def emit_update(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    cut = move.outs[0]
    if not isinstance(cut, Tiled) or move.ins[1] == cut:
        return node.bind(values)
    operand, update, *starts = values
    dim, count = cut.dim, node.inputs[1].shape[cut.dim]
    offset = span.positions(cut, jnp.int32) - _start(starts[dim], node.inputs[0].shape[dim] - count)
    starts[dim] = jnp.zeros_like(starts[dim])
    new = jnp.take(update, offset, axis=dim, mode="clip")
    old = lax.dynamic_slice(operand, starts, new.shape)
    inside = lax.broadcast_in_dim((offset >= 0) & (offset < count), new.shape, (dim,))
    return node.bind([operand, jnp.where(inside, new, old), *starts])


register("slice", push=push_slice, pull=pull_slice, emit=emit_slice)
register_factors("rev", factors=turned)
register("pad", push=push_pad, pull=pull_pad, emit=emit_pad)
register("dynamic_slice", push=push_dynamic_slice, pull=pull_dynamic_slice, emit=emit_dynamic_slice)
register("dynamic_update_slice", push=push_update, pull=pull_update, emit=emit_update)
