"""Where an extremum stands: its witness comes out of the loop that finds it, and is told where it is computed again.

A maximum is taken along dimensions, or of what indices send to one place (`segment_max`, `x.at[i].max(v)`): `Groups`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from transforms.layout import TOGETHER, conform
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.obstacles import Complete
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled, identity
from transforms.tiling.passes.loop_state import hand_on, scalar
from transforms.tiling.rules import Move, refuse_partial, register, tiled

witness_p = Primitive("witness")  # the extremum so far, its place, how many elements equal it, and the next best
snapped_p = Primitive("snapped")  # a value that is computed again, with its extremum where that was

BY_INDEX = {"scatter-max": "max", "scatter_max": "max", "scatter-min": "min", "scatter_min": "min"}
EXTREMA = {"reduce_max": "max", "reduce_min": "min"} | BY_INDEX
NOWHERE = np.iinfo(np.int32).max  # the place of an extremum that no element is


class Groups(NamedTuple):
    """Which elements of an array something is taken of.

    Args:
        dims: along which those of a group lie.
        numbers: how indices, an operand more, say the group of each. None: all along `dims` are a group.
        mode: what becomes of elements whose indices are no group's.
    """

    dims: tuple[int, ...]
    numbers: lax.ScatterDimensionNumbers | None = None
    mode: Any = None

    def reduce(self, op: str, array: Any, like: Any, indices: Sequence[Any]) -> Any:
        """The "max", "min" or "sum" of each group, in the shape of `like`."""
        if self.numbers is None:
            total = functools.partial(jnp.sum, dtype=array.dtype)
            return {"max": jnp.max, "min": jnp.min, "sum": total}[op](array, self.dims)
        scatter = {"max": lax.scatter_max, "min": lax.scatter_min, "sum": lax.scatter_add}[op]
        nothing = jnp.full(like.shape, identity(op, array.dtype), array.dtype)
        return scatter(nothing, indices[0], array, self.numbers, mode=self.mode)

    def spread(self, each: Any, array: Any, indices: Sequence[Any]) -> Any:
        """What belongs to each group, beside the elements of an array."""
        if self.numbers is None:
            return jnp.expand_dims(each, self.dims)
        n = self.numbers
        window, gone, indexed = map(
            tuple, (n.update_window_dims, n.inserted_window_dims, n.scatter_dims_to_operand_dims)
        )
        pairs = map(tuple, (n.operand_batching_dims, n.scatter_indices_batching_dims))
        back = lax.GatherDimensionNumbers(window, gone, indexed, *pairs)
        lengths, alone = (array.shape[d] for d in window), {*gone, *n.operand_batching_dims}
        sizes = tuple(1 if d in alone else next(lengths) for d in range(each.ndim))
        clip = self.mode == lax.GatherScatterMode.CLIP
        return lax.gather(each, indices[0], back, sizes, mode="clip" if clip else "fill")  # with NaN, which equals none


def grouped(reduction: Node) -> tuple[dict[str, Any], list[Value]]:
    """What is taken of which groups; and of what: an array, and what says the groups of its elements."""
    params = reduction.params
    if reduction.name not in BY_INDEX:
        op = reduction.name.removeprefix("reduce_")
        return {"op": op, "groups": Groups(tuple(sorted(params["axes"])))}, reduction.inputs[:1]
    _, indices, updates = reduction.inputs
    numbers = params["dimension_numbers"]
    dims = tuple(d for d in range(len(updates.shape)) if d not in numbers.update_window_dims)
    return {"op": BY_INDEX[reduction.name], "groups": Groups(dims, numbers, params["mode"])}, [updates, indices]


def witness(graph: Graph, reduction: Node, span: Span) -> list[Value]:
    """The place of an extremum, along the cut axis and along the others, how many elements equal it, and the next."""
    kind, operands = grouped(reduction)
    best = reduction.outputs[0].aval
    places = best.update(dtype=jnp.dtype(jnp.int32), weak_type=False)
    outs = [best, places, places, places, best]
    worst = scalar(identity(kind["op"], best.dtype), best.dtype)
    nowhere, none = scalar(NOWHERE, places.dtype), scalar(0, places.dtype)
    start = reduction.inputs[0] if kind["groups"].numbers else worst
    nodes: list[Node] = []
    now = hand_on(nodes, reduction, witness_p, operands, [start, nowhere, nowhere, none, worst], outs, span, **kind)
    graph.insert(nodes, before=reduction)
    return list(now[1:])


def push_witness(node: Node, placements: tuple[Placement, ...]) -> Move | Complete:
    cut, groups = placements[0], node.params["groups"]
    if not isinstance(cut, Tiled) or cut.dim not in groups.dims:
        return Complete([0], "takes a place along the cut axis")
    return Move((Partial("last"),) * 5, (cut, *_beside(groups, cut), *(WHOLE,) * 5))


def _beside(groups: Groups, cut: Tiled) -> list[Placement]:
    """How indices lie that say the group of each element of a cut array."""
    return [dataclasses.replace(cut, dim=groups.dims.index(cut.dim))] if groups.numbers else []


def emit_witness(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """The best of this tile and those before it, a place that has it, how often it is there, and the next."""
    groups, op, cut = node.params["groups"], node.params["op"], move.ins[0]
    array, indices, before = _rounded(values[0]), values[1:-5], values[-5:]
    assert isinstance(cut, Tiled)
    reduce = lambda op, x, like: groups.reduce(op, x, like, indices)
    spread = lambda each: groups.spread(each, array, indices)
    best = reduce(op, array, before[0])
    ties = array == spread(best)
    second = reduce(op, jnp.where(ties, identity(op, array.dtype), array), best)
    rows = _rows(array, cut, span)
    row = reduce("min", jnp.where(ties, rows, NOWHERE), before[1])
    column = jnp.where(ties & (rows == spread(row)), _column(array, cut.dim, groups.dims), NOWHERE)
    now = [best, row, reduce("min", column, row), reduce("sum", ties.astype(jnp.int32), row), second]
    better = best > before[0] if op == "max" else best < before[0]
    better |= jnp.isnan(best) & ~jnp.isnan(before[0])
    equal = best == before[0]
    found = [jnp.where(better | (equal & (row < before[1])), x, y) for x, y in zip(now, before, strict=True)]
    found[3] = jnp.where(better, now[3], before[3] + jnp.where(equal, now[3], 0))
    other = jnp.where(equal, identity(op, best.dtype), jnp.where(better, before[0], best))  # the less good of both
    either = jnp.maximum if op == "max" else jnp.minimum
    return [*found[:4], either(either(second, before[4]), other)]


def _rows(array: Any, cut: Tiled, span: Span) -> Any:
    """Where each element is along the cut axis."""
    return _as(array, span.positions(cut, jnp.int32).reshape([-1 if d == cut.dim else 1 for d in range(array.ndim)]))


def _column(array: Any, dim: int, axes: tuple[int, ...]) -> Any:
    """Where each element is along the reduced dimensions but one, row by row."""
    total: Any = jnp.zeros((), jnp.int32)
    for d in (d for d in axes if d != dim):
        total = total * array.shape[d] + lax.broadcasted_iota(jnp.int32, array.shape, d)
    return _as(array, total)


def _as(array: Any, places: Any) -> Any:
    """Places of an array's elements, spread as these are."""
    return conform(jnp.broadcast_to(places, array.shape), jax.typeof(array), TOGETHER)


def _rounded(array: Any) -> Any:
    """An array as precise as its dtype says: XLA may leave out conversions to narrow floats."""
    if array.dtype.itemsize > 2:
        return array
    kind = jnp.finfo(array.dtype)
    return lax.reduce_precision(array, kind.nexp, kind.nmant)


def push_snapped(node: Node, placements: tuple[Placement, ...]) -> Move | Complete:
    if (parts := refuse_partial(node, placements, "is compared with it")) is not None:
        return parts
    cut, shape = placements[0], node.inputs[0].shape
    if not isinstance(cut, Tiled):
        return Complete(tiled(placements), "is compared with it")
    if node.params["op"] != "sum":
        return Move((cut,), (cut, *(WHOLE,) * 5, *_beside(node.params["groups"], cut)))
    mask = node.inputs[2].shape
    along = len(mask) == len(shape) and mask[cut.dim] == shape[cut.dim]
    return Move((cut,), (cut, WHOLE, cut if along else WHOLE))


def emit_snapped(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """A tile with what was copied from it before, to the last bit, where that stood."""
    array, groups, cut, op = _rounded(values[0]), node.params["groups"], move.ins[0], node.params["op"]
    assert isinstance(cut, Tiled)
    indices = values[6:]
    best, *places = (groups.spread(each, array, indices) for each in (values[1:2] if op == "sum" else values[1:6]))
    close = (4 * jnp.finfo(array.dtype).eps if array.dtype.itemsize > 2 else 0) * jnp.abs(best)
    near = (jnp.abs(array - best) <= close) & jnp.isfinite(best)  # to infinity all is equally near
    if op == "sum":  # of a mask that lets one element through
        return [jnp.where(near & (values[2] != 0), best, array)]
    row, column, count, second = places
    here = (_rows(array, cut, span) == row) & (_column(array, cut.dim, groups.dims) == column)
    beyond = array >= best if op == "max" else array <= best
    inside = jnp.nextafter(best, jnp.full_like(best, identity(op, best.dtype)))
    # All else stays on the side where it was; where a group began with its extremum, that is all.
    lone = jnp.where(here, best, jnp.where(beyond, inside, array))
    # Where a function saturates, others are as near: what has the number itself is a tie then, and nothing else.
    apart = jnp.abs(best - second) > 2 * close
    return [jnp.where(count <= 1, lone, jnp.where(beyond | jnp.where(apart, near, here), best, array))]


register("witness", push=push_witness, emit=emit_witness)
register("snapped", push=push_snapped, emit=emit_snapped)
