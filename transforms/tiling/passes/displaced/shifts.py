"""Neighbours along the cut axis as shifts: slices, padding and joins of one array, so that loops need but a halo.

`jnp.pad(h, (1, 0))[:-1]`, and a join of one row with `h[:-1]`, have as many rows as `h`: they are `h`, shifted by one
row, with others in the rows that are left. A shift is one `pad` (one more row before, one less after), which runs
tile by tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from transforms import layout
from transforms.tiling.frontend.flatten import evaluate
from transforms.tiling.frontend.trace import Made, rewrite_all, traced
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.placement import identity
from transforms.tiling.ir.walks import closure, constant, operands
from transforms.tiling.passes.across import cropped, padded, pads
from transforms.tiling.passes.displaced.rows import lengths, made_alike, moved, rows_apart, slices, spread
from transforms.tiling.rules.indexing import clamped, widened
from transforms.tiling.rules.window import CHOICES, WINDOWS, slide, sliding

MOST = 100  # equations between parts and a join of what is made of them


class Segment(NamedTuple):
    """Rows `low` to `high` of a result: row `p` is row `p - shift` of `source`, or they are filled with that."""

    low: int
    high: int
    source: Value
    shift: int | None


def align(graph: Graph, total: int) -> bool:
    """Rewrite what is made of shifted rows of arrays that are `total` long. Returns whether anything was."""
    return rewrite(graph, [(way, t) for t in lengths(graph, total) for way in (WAYS if t == total else OF_SOME)])


def rewrite(graph: Graph, ways: Sequence[tuple[Any, int]]) -> bool:
    """Rewrite equations in the first of some ways that there is, each of arrays of some length."""

    def first(node: Node) -> Made:
        return next((m for dim in _moves(node) for way, t in ways if (m := way(node, dim, t)) is not None), None)

    return rewrite_all(graph, first)


def _moves(node: Node) -> Sequence[int]:
    """The dimensions of a result whose rows an equation takes from, or puts at, other places."""
    p, dims = node.params, range(len(node.outputs[0].shape) if node.outputs else 0)
    if node.name == "slice":
        each = zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(dims), strict=True)
        return [d for d, one in enumerate(each) if one != (0, node.inputs[0].shape[d], 1)]
    if node.name == "pad":
        return [d for d, one in enumerate(p["padding_config"]) if tuple(one) != (0, 0, 0)]
    if node.name in ("concatenate", "split"):
        return [p["dimension" if node.name == "concatenate" else "axis"]]
    return dims if node.name in ("conv_general_dilated", *WINDOWS, *CHOICES) else ()


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


def _parts(node: Node, dim: int, total: int) -> Made:
    """A split of what was padded or joined, as the gradient of a join is: slices, which may be shifts."""
    if node.name != "split":
        return None
    source, long = node.inputs[0], [v for v in node.outputs if v.shape[dim] == total]
    joined = source.producer is not None and source.producer.name == "concatenate" and source.shape[dim] > total
    segments = (s for v in long for s in _segments(v, dim, 0, total, 0))
    if not joined and not any(s.source is not source or made_alike(s.source) for s in segments):
        return None
    return slices(node)


def _few(node: Node, dim: int, total: int) -> Made:
    """A few rows of what is made of longer arrays: rows of those."""
    out = node.outputs[0]
    if cropped(node, dim) is None or not 0 < 2 * out.shape[dim] <= total:
        return None
    found = list(_segments(out, dim, 0, out.shape[dim], 0))
    sources = [s.source for s in found]
    short = all(s.shift is None or s.source.shape[dim] != total for s in found)
    if sources == node.inputs[:1] or (short and node.inputs[0].shape[dim] <= total):
        return None

    def rows(segment: Segment, value: Any) -> Any:
        if segment.shift is not None:
            return lax.slice_in_dim(value, segment.low - segment.shift, segment.high - segment.shift, axis=dim)
        aval = layout.like(out.aval, (*out.shape[:dim], segment.high - segment.low, *out.shape[dim + 1 :]))
        return layout.full(aval, value, aval.dtype, layout.TOGETHER)

    return traced(lambda *values: [lax.concatenate([*map(rows, found, values)], dim)], sources, node)


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
    elif node is not None and node.name == "split" and node.params["axis"] == dim:
        yield from _segments(node.inputs[0], dim, low, high, shift - sum(node.params["sizes"][: value.index]))
    elif node is not None and node.name == "concatenate" and node.params["dimension"] == dim:
        for source in node.inputs:
            end = shift + source.shape[dim]
            yield from _segments(source, dim, max(low, shift), min(high, end), shift)
            shift = end
    elif node is not None and node.name == "pad" and pads(node, dim):
        source, fill = node.inputs
        start = shift + node.params["padding_config"][dim][0]
        end = start + source.shape[dim]
        inner = max(low, start), max(low, min(high, end))
        yield from [Segment(low, min(high, start), fill, None)] if low < start else []
        yield from _segments(source, dim, *inner, start)
        yield from [Segment(max(low, end), high, fill, None)] if end < high else []
    else:
        yield Segment(low, high, value, shift)


def _joined(found: list[Segment], values: tuple[Any, ...], dim: int, total: int) -> Any:
    """The array that has these segments."""
    order = sorted(zip(found, values, strict=True), key=lambda both: not _large(both[0], dim, total))
    (first, array), *rest = order
    assert first.shift is not None
    shift = first.shift
    fills = [constant(s.source) for s, _ in rest]
    beyond = all(s.shift is None and (s.high <= shift or s.low >= total + shift) for s, _ in rest)
    if beyond and None not in fills and len(set(fills)) == 1:
        return moved(array, dim, shift, -shift, rest[0][1])
    result = moved(array, dim, shift, -shift)
    rows = layout.places(result, dim)
    for segment, value in rest:
        if segment.shift is None:
            part = layout.full(jax.typeof(result), value, result.dtype, layout.TOGETHER)
        elif _large(segment, dim, total):
            part = moved(value, dim, segment.shift, -segment.shift)
        else:
            low, high = segment.low - segment.shift, segment.high - segment.shift
            part = moved(lax.slice_in_dim(value, low, high, axis=dim), dim, segment.low, total - segment.high)
        result = jnp.where((rows >= segment.low) & (rows < segment.high), part, result)
    return result


def _sink(node: Node, dim: int, total: int) -> Made:
    """What is made of arrays of another length, and cut off or padded to that of the axis: made of such arrays.

    Sums alone can be padded first, with zeros.
    """
    if node.name not in ("slice", "pad"):
        return None
    config = node.params["padding_config"][dim] if node.name == "pad" and pads(node, dim) else None
    part, source = cropped(node, dim), node.inputs[0]
    made = source.producer
    size, few = node.outputs[0].shape[dim], part is not None and source.shape[dim] > total
    if made is None or source.shape[dim] == total or not (size == total or (few and size < total)):
        return None
    if not made_alike(source):
        return None
    if part is not None:
        low, high = part
        move = lambda x: lax.slice_in_dim(x, low, high, axis=dim)
    elif config is not None and constant(node.inputs[1]) == 0 and _rearranged(source, dim):
        low, high = config[:2]
        move = lambda x: moved(x, dim, low, high)
    else:
        return None
    return traced(lambda *values: made.bind([move(v) if v.ndim else v for v in values]), made.inputs, node)


def _repeated(node: Node, dim: int, total: int) -> Made:
    """A part of what is repeated along the axis: repeated less often."""
    made = node.inputs[0].producer
    if made is None or made.name != "broadcast_in_dim" or node.outputs[0].shape[dim] != total:
        return None
    if cropped(node, dim) is None:
        return None
    dims, (source, *_) = made.params["broadcast_dimensions"], made.inputs
    if any(out == dim and source.shape[d] > 1 for d, out in enumerate(dims)):
        return None
    return traced(lambda x: [lax.broadcast_in_dim(x, node.outputs[0].shape, dims)], [source], node)


def _landed(node: Node, dim: int, total: int) -> Made:
    """A part of what elements were written or added to along the axis: those of that part are, and no others."""
    made, part = node.inputs[0].producer, cropped(node, dim)
    if made is None or part is None or not made.name.startswith("scatter"):
        return None
    numbers, mode, size = made.params["dimension_numbers"], made.params["mode"], made.inputs[0].shape[dim]
    axes, clips = numbers.scatter_dims_to_operand_dims, mode == lax.GatherScatterMode.CLIP
    drops = mode in (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    if dim not in axes or dim not in numbers.inserted_window_dims or not (drops or (clips and len(axes) == 1)):
        return None
    params, first = made.params | {"mode": lax.GatherScatterMode.FILL_OR_DROP}, [part[0] * (d == dim) for d in axes]

    def there(array: Any, places: Any, updates: Any) -> list[Any]:
        places = clamped(places, size - 1) if clips else widened(places)
        places = places - jnp.asarray(first, places.dtype)
        return made.bind([lax.slice_in_dim(array, *part, axis=dim), places, updates], params)

    return traced(there, made.inputs, node)


def lift(node: Node, dim: int, total: int) -> Made:
    """What is made, element by element, of parts, and joined with a few rows or padded: made of all rows.

    The rows that it has not come of what stands there, and are left out.
    """
    out = node.outputs[0]
    if out.shape[dim:] and out.shape[dim] != total:
        return None
    if node.name == "concatenate":
        parts, sizes = node.inputs, [v.shape[dim] for v in node.inputs]
        mine = sizes.index(max(sizes))
    elif node.name == "pad" and (around := padded(node, dim)) is not None:
        source, fill = node.inputs
        parts, sizes, mine = [fill, source, fill], [around[0], source.shape[dim], around[1]], 1
    else:
        return None
    made = parts[mine]
    if not total < 2 * made.shape[dim] < 2 * total or not made_alike(made):
        return None
    reached = list(closure([made], lambda v: operands(v) if made_alike(v) else ()))
    leaves = [v for v in reached if not made_alike(v)]
    if len(reached) - len(leaves) > MOST:
        return None
    ends = [*itertools.accumulate(sizes, initial=0)]

    def all_rows(*values: Any) -> list[Any]:
        low, high = ends[mine], total - ends[mine + 1]
        known = {v: moved(x, dim, low, high) if x.ndim else x for v, x in zip(leaves, values, strict=False)}
        (result,) = evaluate(known, [made])
        rows = layout.places(result, dim)
        for i, few in enumerate(values[len(leaves) :]):
            if i != mine and sizes[i]:
                few = moved(few, dim, ends[i], total - ends[i + 1]) if few.ndim else few
                result = jnp.where((rows >= ends[i]) & (rows < ends[i + 1]), few, result)
        return [result]

    return traced(all_rows, [*leaves, *parts], node)


def _every(node: Node, dim: int, total: int) -> Made:
    """One of every few rows, from a later one on or not to the end: a part of those from one of the first on."""
    if node.name != "slice" or node.params["strides"] is None:
        return None
    stride, (source,) = node.params["strides"][dim], node.inputs
    start, count, made = node.params["start_indices"][dim], node.outputs[0].shape[dim], source.producer
    part_of = None if made is None or not made.inputs else cropped(made, dim)
    if made is not None and part_of is not None and made.inputs[0].shape[dim] == total:
        source, start = made.inputs[0], start + part_of[0]
    if stride == 1 or source.shape[dim] != total or total % stride:
        return None
    if source is node.inputs[0] and count * stride == total and start < stride:
        return None
    first, begin = divmod(start, stride)
    others = [*zip(node.params["start_indices"], node.params["limit_indices"], node.params["strides"], strict=True)]
    others[dim] = (begin, total - stride + begin + 1, stride)

    def part(x: Any) -> list[Any]:
        rows = lax.slice(x, *zip(*others, strict=True))
        return [rows if count == rows.shape[dim] else lax.slice_in_dim(rows, first, first + count, axis=dim)]

    return traced(part, [source], node)


def _less(node: Node, dim: int, total: int) -> Made:
    """A part of what was padded, that leaves out padding alone: padded by less."""
    made, part = node.inputs[0].producer, cropped(node, dim) if node.name == "slice" else None
    both = None if made is None or part is None else padded(made, dim)
    if made is None or part is None or both is None or node.outputs[0].shape[dim] != total:
        return None
    before, after = both[0] - part[0], both[1] - (node.inputs[0].shape[dim] - part[1])
    if before < 0 or after < 0 or 2 * made.inputs[0].shape[dim] > total:
        return None
    return traced(lambda x, fill: [moved(x, dim, before, after, fill)], made.inputs, node)


SUMS = ("add", "add_any", "sub", "neg")


def _rearranged(value: Value, dim: int) -> bool:
    """Whether a value is a sum of what was cut off or padded."""
    node = value.producer
    if node is None or not value.shape:
        return False
    if node.name in SUMS:
        return all(_rearranged(v, dim) for v in node.inputs)
    return node.name == "slice" or (node.name == "pad" and pads(node, dim))


# ------------------------------------------------------------------------------------------------------------- windows


def _window(node: Node, dim: int, total: int) -> Made:
    """A window that slides along the axis: it takes padding into itself, and makes as many rows as there are."""
    along = slide(node, dim)
    if along is None or node.name in ("reduce_window", *CHOICES) or 2 * along.extent >= total:
        return None
    if (outside := _padded_later(node)) is not None:
        return outside
    source, size, inner = node.inputs[0], node.outputs[0].shape[dim], along.dim
    made, length, before, after = source.producer, source.shape[inner], along.before, along.after
    op = {"reduce_window_max": "max", "reduce_window_min": "min"}.get(node.name, "sum")
    empty = identity(op, source.dtype)
    if made is not None and made.name == "pad" and length > total >= made.inputs[0].shape[inner]:
        params = _padding(node, made.params["padding_config"])
        if params is not None and constant(made.inputs[1]) == empty:
            return traced(lambda *v: node.bind(list(v), params), [made.inputs[0], *node.inputs[1:]], node)
    if length < total < 2 * length and before >= 0 and after >= total - length:
        params = along.params(node, before, after - (total - length))
        longer = lambda x: moved(x, inner, 0, total - length, empty)
        return traced(lambda x, *rest: node.bind([longer(x), *rest], params), node.inputs, node)
    if length != total or not 0 <= before <= along.extent or not 0 < size < total:
        return None
    params = along.params(node, before, along.extent - before)
    return traced(lambda *v: [lax.slice_in_dim(node.bind(list(v), params)[0], 0, size, axis=dim)], node.inputs, node)


def _padding(node: Node, config: Sequence[tuple[int, int, int]]) -> dict[str, Any] | None:
    """The parameters of windows that do what a `pad` of this `config` does for them, if they can."""
    own = {along.dim: along.number for d in range(len(config)) if (along := sliding(node, d)) is not None}
    padding = [tuple(p) for p in node.params["padding"]]
    for d, (low, high, gap) in enumerate(config):
        if (low, high, gap) == (0, 0, 0):
            continue
        if d not in own or low < 0 or high < 0 or gap:
            return None
        before, after = padding[own[d]]
        padding[own[d]] = before + low, after + high
    return node.params | {"padding": tuple(padding)}


def _padded_later(node: Node) -> Made:
    """A window over what was padded before it got more dimensions: it is padded afterwards."""
    made = node.inputs[0].producer
    source = made.inputs[0].producer if made is not None and made.name == "broadcast_in_dim" else None
    if made is None or source is None or source.name != "pad" or len(made.inputs) > 1:
        return None
    inner, fill = source.inputs
    dims, shape = made.params["broadcast_dimensions"], list(made.params["shape"])
    config = [(0, 0, 0)] * len(shape)
    for d, out in enumerate(dims):
        if made.inputs[0].shape[d] != shape[out]:
            return None
        shape[out], config[out] = inner.shape[d], source.params["padding_config"][d]

    def later(x: Any, fill: Any, *rest: Any) -> list[Any]:
        return node.bind([lax.pad(lax.broadcast_in_dim(x, shape, dims), fill, config), *rest])

    return traced(later, [inner, fill, *node.inputs[1:]], node)


def _spaced(node: Node, dim: int, total: int) -> Made:
    """A window over elements with gaps between them: it leaves the gaps itself, and makes as many as there are."""
    made = node.inputs[0].producer
    op = {"reduce_window_sum": "sum", "reduce_window_max": "max", "reduce_window_min": "min"}.get(node.name)
    if op is None or made is None or made.name != "pad" or not made.params["padding_config"][dim][2]:
        return None
    config, p = made.params["padding_config"], node.params
    plain = p.get("base_dilation") is None or set(p["base_dilation"]) == {1}
    filled = constant(made.inputs[1]) == identity(op, node.inputs[0].dtype)
    if not plain or not filled or any(low < 0 or high < 0 for low, high, _ in config):
        return None
    padding = tuple((a + low, b + high) for (a, b), (low, high, _) in zip(p["padding"], config, strict=True))
    params = p | {"padding": padding, "base_dilation": tuple(gap + 1 for *_, gap in config)}
    return traced(lambda x: node.bind([x], params), made.inputs[:1], node)


def _kernel(node: Node, dim: int, total: int) -> Made:
    """The gradient of a kernel, from fewer rows than there are: the others are zeros."""
    if node.name != "conv_general_dilated":
        return None
    p = node.params
    left, right, out = p["dimension_numbers"]
    if dim not in out[2:]:
        return None
    number = out[2:].index(dim)
    rows = total - node.inputs[1].shape[right[2 + number]]
    if node.inputs[0].shape[left[2 + number]] != total or not 0 < 2 * rows < total or p["rhs_dilation"][number] != 1:
        return None
    before, after = p["padding"][number]
    padding = [(before, after + rows) if i == number else tuple(c) for i, c in enumerate(p["padding"])]
    longer = lambda x: moved(x, right[2 + number], 0, rows)
    return traced(lambda x, y: node.bind([x, longer(y)], p | {"padding": tuple(padding)}), node.inputs, node)


def _apart(node: Node, dim: int, total: int) -> Made:
    """A slice or padding of several dimensions at once: the axis by itself, of what was joined or for what follows."""
    if node.name not in ("slice", "pad"):
        return None
    source, p, dims = node.inputs[0], node.params, range(len(node.inputs[0].shape))
    if node.name == "pad":
        each, nothing = [tuple(c) for c in p["padding_config"]], (0, 0, 0)
        changed = [d for d in dims if each[d] != nothing]
        less = min(each[dim]) < 0 and source.shape[dim] <= total and node.outputs[0].shape[dim] < total
        take = lambda chosen, x, *fill: lax.pad(x, *fill, [each[d] if d in chosen else nothing for d in dims])
    else:
        each = [*zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(dims), strict=True)]
        changed = [d for d in dims if each[d] != (0, source.shape[d], 1)]
        less = False
        take = lambda chosen, x: lax.slice(
            x, *zip(*(each[d] if d in chosen else (0, x.shape[d], 1) for d in dims), strict=True)
        )
    if less or dim not in changed or len(changed) == 1 or total not in (source.shape[dim], node.outputs[0].shape[dim]):
        return None
    others = [d for d in changed if d != dim]
    first, then = ([dim], others) if node.name == "slice" else (others, [dim])
    return traced(lambda x, *fill: [take(then, take(first, x, *fill), *fill)], node.inputs, node)


WAYS = (_apart, _repeated, _landed, _every, spread, _less, _shift, _parts, _few, _sink, _window, _spaced, _kernel)
OF_SOME = (*WAYS, lift, rows_apart)  # of arrays of every few rows
