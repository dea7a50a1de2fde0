"""Neighbours along the cut axis as shifts: slices, padding and joins of one array, brought to the places of its rows.

`jnp.pad(h, (1, 0))[:-1]`, and a join of one row with `h[:-1]`, have as many rows as `h`: they are `h`, shifted by one
row, with others in the rows that are left. A shift is one `pad` (one more row before, one less after), which runs
tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from transforms.across import cropped, padded
from transforms.graph import Graph, Node, Value, constant, prune
from transforms.placement import identity
from transforms.rewrite import replace, traced
from transforms.rules import RULES
from transforms.rules.elementwise import pull
from transforms.rules.windows import slide


class Segment(NamedTuple):
    """Rows `low` to `high` of a result: row `p` is row `p - shift` of `source`, or they are filled with that."""

    low: int
    high: int
    source: Value
    shift: int | None


def align(graph: Graph, total: int) -> bool:
    """Rewrite what is made of shifted rows of arrays that are `total` long. Returns whether anything was."""
    changed = False
    for node in list(graph.nodes):
        for dim in [d for v in node.outputs[:1] for d in range(len(v.shape))]:
            made = _shift(node, dim, total) or _sink(node, dim, total) or _window(node, dim, total)
            if made is not None:
                nodes, (out,) = made
                replace(graph, node, nodes, {node.outputs[0]: out})
                changed = True
                break
    graph.nodes[:] = prune(graph).nodes
    return changed


Made = tuple[list[Node], list[Value]] | None

# -------------------------------------------------------------------------------------------------------------- shifts


def _shift(node: Node, dim: int, total: int) -> Made:
    """A slice, padding or join that is as long as what it is made of."""
    out = node.outputs[0]
    if node.name not in ("slice", "pad", "concatenate") or out.shape[dim] != total:
        return None
    found = list(_segments(out, dim, 0, total, 0))
    large = [s for s in found if _large(s, dim, total)]
    few = [s for s in found if s.shift is not None and s not in large]
    again = node.name == "pad" and [s.source for s in large] == node.inputs[:1]
    if not large or again or out in [s.source for s in found] or 2 * sum(s.high - s.low for s in few) > total:
        return None
    return traced(lambda *values: [_joined(found, values, dim, total)], [s.source for s in found], node)


def _large(segment: Segment, dim: int, total: int) -> bool:
    shift, source = segment.shift, segment.source
    return shift is not None and source.shape[dim] == total and 2 * abs(shift) <= total


def _segments(value: Value, dim: int, low: int, high: int, shift: int) -> Iterator[Segment]:
    """What rows `low` to `high` of a result are, of which row `p` is row `p - shift` of `value`."""
    node = value.producer
    if low >= high:
        return
    if node is not None and node.name == "slice" and (part := cropped(node, dim)) is not None:
        yield from _segments(node.inputs[0], dim, low, high, shift - part[0])
    elif node is not None and node.name == "concatenate" and node.params["dimension"] == dim:
        for source in node.inputs:
            end = shift + source.shape[dim]
            yield from _segments(source, dim, max(low, shift), min(high, end), shift)
            shift = end
    elif node is not None and node.name == "pad" and _pads(node, dim):
        source, fill = node.inputs
        start = shift + node.params["padding_config"][dim][0]
        end = start + source.shape[dim]
        inner = max(low, start), max(low, min(high, end))
        yield from [Segment(low, min(high, start), fill, None)] if low < start else []
        yield from _segments(source, dim, *inner, start)
        yield from [Segment(max(low, end), high, fill, None)] if end < high else []
    else:
        yield Segment(low, high, value, shift)


def _pads(node: Node, dim: int) -> bool:
    """Whether a node pads (or cuts off) along one dimension alone, without gaps."""
    config = node.params["padding_config"]
    return config[dim][2] == 0 and all(tuple(c) == (0, 0, 0) for d, c in enumerate(config) if d != dim)


def _joined(found: list[Segment], values: tuple[Any, ...], dim: int, total: int) -> Any:
    """The array that has these segments."""
    order = sorted(zip(found, values, strict=True), key=lambda both: not _large(both[0], dim, total))
    (first, array), *rest = order
    assert first.shift is not None
    shift, shape = first.shift, array.shape
    fills = [constant(s.source) for s, _ in rest]
    beyond = all(s.shift is None and (s.high <= shift or s.low >= total + shift) for s, _ in rest)
    if beyond and None not in fills and len(set(fills)) == 1:
        return _moved(array, dim, shift, -shift, rest[0][1])
    result = _moved(array, dim, shift, -shift)
    rows = lax.broadcasted_iota(jnp.int32, shape, dim)
    for segment, value in rest:
        if segment.shift is None:
            part = jnp.broadcast_to(value, shape)
        elif _large(segment, dim, total):
            part = _moved(value, dim, segment.shift, -segment.shift)
        else:
            low, high = segment.low - segment.shift, segment.high - segment.shift
            part = _moved(lax.slice_in_dim(value, low, high, axis=dim), dim, segment.low, total - segment.high)
        result = jnp.where((rows >= segment.low) & (rows < segment.high), part, result)
    return result


def _moved(array: Any, dim: int, before: int, after: int, fill: Any = None) -> Any:
    if (before, after) == (0, 0):
        return array
    config = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(array.ndim)]
    return lax.pad(array, jnp.zeros((), array.dtype) if fill is None else fill, config)


def _sink(node: Node, dim: int, total: int) -> Made:
    """A part, as long as the axis, of what an elementwise operation makes of longer arrays: made of their parts."""
    part = cropped(node, dim) if node.name in ("slice", "pad") else None
    if part is None or node.outputs[0].shape[dim] != total:
        return None
    low, high = part
    source = node.inputs[0]
    made = source.producer
    if made is None or made.effects or len(made.outputs) > 1 or source.shape[dim] == total:
        return None
    rule = RULES.get(made.name)
    if rule is None or rule.pull is not pull or any(v.shape not in ((), source.shape) for v in made.inputs):
        return None

    def run(*values: Any) -> list[Any]:
        return made.bind([lax.slice_in_dim(v, low, high, axis=dim) if v.ndim else v for v in values])

    return traced(run, made.inputs, node)


# ------------------------------------------------------------------------------------------------------------- windows


def _window(node: Node, dim: int, total: int) -> Made:
    """A window that slides along the axis: it takes padding into itself, and makes as many rows as there are."""
    if (along := slide(node, dim)) is None:
        return None
    source, size = node.inputs[0], node.outputs[0].shape[dim]
    made = source.producer
    beside = padded(made, along.dim) if made is not None else None
    if made is not None and beside is not None and made.inputs[0].shape[along.dim] == total and beside != (0, 0):
        op = {"reduce_window_max": "max", "reduce_window_min": "min"}.get(node.name, "sum")
        if constant(made.inputs[1]) == identity(op, source.dtype) and node.name != "reduce_window":
            params = along.params(node, along.before + beside[0], along.after + beside[1])
            return traced(lambda *v: node.bind(list(v), params), [made.inputs[0], *node.inputs[1:]], node)
    if source.shape[along.dim] != total or not 0 <= along.before <= along.wide or not 0 < size < total:
        return None
    params = along.params(node, along.before, along.wide - along.before)
    return traced(lambda *v: [lax.slice_in_dim(node.bind(list(v), params)[0], 0, size, axis=dim)], node.inputs, node)
