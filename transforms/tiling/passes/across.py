"""Operations along an axis that is in pieces: slices, padding, splits and choices, as functions of the pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.tiling.frontend.flatten import body_graph
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.placement import Tiled
from transforms.tiling.ir.walks import scan_counts
from transforms.tiling.passes.pieces import Piece
from transforms.tiling.regions.bodies import added, run_scan, summing, whole_body
from transforms.tiling.rules.reduction import first_best

Found = Callable[..., list[Any]] | None


def cropped(node: Node, dim: int) -> tuple[int, int] | None:
    """The range of dimension `dim` that a node keeps of its operand, if all that it does is to keep one."""
    shape = node.inputs[0].shape
    if node.name == "slice":
        ranges = list(zip(node.params["start_indices"], node.params["limit_indices"], strict=True))
        plain = node.params["strides"] is None or set(node.params["strides"]) <= {1}
    elif node.name == "pad":
        config = node.params["padding_config"]
        ranges = [(-low, size + high) for (low, high, _), size in zip(config, shape, strict=True)]
        plain = all(low <= 0 and high <= 0 and gap == 0 for low, high, gap in config)
    else:
        return None
    others = all(r == (0, size) for d, (r, size) in enumerate(zip(ranges, shape, strict=True)) if d != dim)
    return ranges[dim] if plain and others and ranges[dim] != (0, shape[dim]) else None


def padded(node: Node, dim: int) -> tuple[int, int] | None:
    """How much a node puts before and after its operand in dimension `dim`, if that is all that it does."""
    if node.name != "pad" or not pads(node, dim):
        return None
    low, high, _ = node.params["padding_config"][dim]
    return (low, high) if low >= 0 and high >= 0 else None


def pads(node: Node, dim: int) -> bool:
    """Whether a `pad` adds (or cuts off) along one dimension alone, without gaps."""
    config = node.params["padding_config"]
    return config[dim][2] == 0 and all(tuple(c) == (0, 0, 0) for d, c in enumerate(config) if d != dim)


def crop(node: Node, cut: Tiled, spans: Sequence[Piece]) -> Found:
    """One of the pieces, or several; of one that has more than the axis, a part."""
    if (part := cropped(node, cut.dim)) is None:
        return None
    start, limit = part
    if spans[0].beyond:
        offset = -spans[0].start
        return lambda x, *_: [lax.slice_in_dim(x, start + offset, limit + offset, axis=cut.dim)]
    inner = [k for k, s in enumerate(spans) if start <= s.start and s.start + s.length <= limit]
    if sum(spans[k].length for k in inner) != limit - start:
        return None
    return lambda *xs: [lax.concatenate([xs[k] for k in inner], cut.dim) if len(inner) > 1 else xs[inner[0]]]


def pad(node: Node, cut: Tiled, spans: Sequence[Piece]) -> Found:
    """A part put back where it was taken from, or a longer part: the rows beside it are those of the padding."""
    span, beside = spans[0], padded(node, cut.dim)
    if not span.beyond or beside is None:
        return crop(node, cut, spans)
    start, end = -span.start - beside[0], span.total - span.start + beside[1]  # of what that is of the whole axis
    if start < 0 or end > span.length:
        return None

    def put(x: Any, fill: Any) -> list[Any]:
        full = jnp.where(span.inside(node.inputs[0].shape, cut), x, fill)
        return [full if end - start == span.length else lax.slice_in_dim(full, start, end, axis=cut.dim)]

    return put


def split(node: Node, cut: Tiled, spans: Sequence[Piece]) -> Found:
    """A split at the ends of pieces."""
    sizes = [s.length for s in spans]
    return (lambda *xs: list(xs)) if node.params["axis"] == cut.dim and list(node.params["sizes"]) == sizes else None


def choose(node: Node, cut: Tiled, spans: Sequence[Piece]) -> Found:
    """`argmax` and `argmin`: the first of the best."""
    if tuple(node.params["axes"]) != (cut.dim,) or spans[0].beyond:
        return None
    (out,) = node.outputs

    def run(*pieces: Any) -> list[Any]:
        found = [jnp.zeros(out.shape, pieces[0].dtype), jnp.zeros(out.shape, out.dtype)]
        for piece, span in zip(pieces, spans, strict=True):
            found = first_best(node, [piece, *found], cut, span)
        return found[1:]

    return run


def rejoin(node: Node, number: int, cut: Tiled, spans: Sequence[Piece]) -> Found:
    """A part put back where it was taken from, operand `number` of a join: the rows beside it are the others'."""
    span, shapes = spans[0], [v.shape for v in node.inputs]
    start = sum(shape[cut.dim] for shape in shapes[:number])
    here = span.beyond and (start, node.outputs[0].shape[cut.dim]) == (-span.start, span.length)
    if not here or node.params["dimension"] != cut.dim:
        return None

    def put(part: Any, *others: Any) -> list[Any]:
        hole = jnp.zeros(shapes[number], part.dtype)
        beside = lax.concatenate([*others[:number], hole, *others[number:]], cut.dim)
        return [jnp.where(span.inside(shapes[number], cut), part, beside)]

    return put


def scanned(node: Node, span: Piece, *values: Any) -> list[Any]:
    """A scan whose steps leave what it carries as it is where the axis has no row."""
    constants, carried = scan_counts(node)
    whole = whole_body(body_graph(node, "jaxpr"))

    def masked(inner: Sequence[Any]) -> list[Any]:
        *given, inside = inner
        outs, before = whole(given), given[constants : constants + carried]
        outs[:carried] = [jnp.where(inside, new, old) for new, old in zip(outs, before, strict=False)]
        return outs

    inside = span.inside((span.total,), Tiled(0))
    return run_scan(node, [*values, inside], summing(node, masked, added(node)), span.length)


ACROSS = {"slice": crop, "pad": pad, "split": split, "argmax": choose, "argmin": choose}
