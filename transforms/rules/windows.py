"""Convolutions and windows that slide over some dimensions, and transforms of some.

Along the cut axis a window moves in steps of 1 and makes as many elements as there are: it reads rows beside the tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from transforms.graph import Node
from transforms.placement import WHOLE, Partial, Placement, Reach, Span, Tiled, Whole, identity
from transforms.rules import Complete, Move, aligned, one_cut, partial, register, tiled


def stays(node: Node, dim: int) -> bool:
    """Whether windows have length and stride 1 along a dimension, and add nothing to it."""
    p = node.params
    plain = all(p.get(k) is None or p[k][dim] == 1 for k in STEPS)
    return plain and tuple(p["padding"][dim]) == (0, 0)


STEPS = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


class Slide(NamedTuple):
    """How windows slide in steps of 1: along which dimension of the operand, what of the `padding` is for it, how much
    further than an element a window reaches, and how much is added before and after.
    """

    dim: int
    number: int
    wide: int
    before: int
    after: int

    @property
    def reach(self) -> Reach | None:
        """How many rows before and after its place a window reads, if there are as many places as rows."""
        same = self.before >= 0 and self.after >= 0 and self.before + self.after == self.wide
        return (self.before, self.after) if same else None

    def params(self, node: Node, before: int, after: int) -> dict[str, Any]:
        """The node's, with other padding."""
        padding = [(before, after) if i == self.number else tuple(p) for i, p in enumerate(node.params["padding"])]
        return node.params | {"padding": tuple(padding)}


def slide(node: Node, dim: int) -> Slide | None:
    """How a node's windows make dimension `dim` of its result."""
    p = node.params
    if node.name == "conv_general_dilated":
        (source, kernel, out), places = p["dimension_numbers"], p["padding"]
        if dim not in out[2:]:
            return None
        number = out[2:].index(dim)
        size, inner = node.inputs[1].shape[kernel[2 + number]], source[2 + number]
        stride, gap, apart = (p[k][number] for k in ("window_strides", "lhs_dilation", "rhs_dilation"))
    elif node.name in WINDOWS:
        number, inner, places = dim, dim, p["padding"]
        size, stride, gap, apart = (1 if p.get(k) is None else p[k][dim] for k in STEPS)
    else:
        return None
    return Slide(inner, number, (size - 1) * apart, *places[number]) if stride == gap == 1 else None


def cleared(array: Any, placement: Tiled, span: Span, fill: Any) -> Any:
    """The rows of a tile, with `fill` outside of the axis."""
    inside = lax.broadcast_in_dim(span.within(placement), array.shape, (placement.dim,))
    return jnp.where(inside, array, jnp.asarray(fill, array.dtype))


WINDOWS = {"reduce_window_sum": "sum", "reduce_window_max": "max", "reduce_window_min": "min", "reduce_window": None}


def push_window(node: Node, placements: tuple[Placement, ...]) -> Move:
    """Operands of one shape, or nearly, and scalars to start from."""
    cut = one_cut(node, placements)
    outs = (cut,) * len(node.outputs)
    if stays(node, cut.dim):
        return Move(outs, pull_window(node, cut) or ())
    along = slide(node, cut.dim) if (cut.major, cut.minor) == (1, 1) else None
    beside = along.reach if along is not None else None
    if beside is None:
        raise Complete(tiled(placements), "slides over the cut axis")
    count = len(node.outputs)
    ins = (cut,) * count + (WHOLE,) * (len(placements) - count)
    return Move(outs, ins, reach=dict.fromkeys(range(count), beside))


def pull_window(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    size = node.outputs[0].shape[want.dim]
    return tuple(aligned(v, want, size) for v in node.inputs) if stays(node, want.dim) else None


def emit_window(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    if not move.reach:
        return node.bind(values)
    (cut, *_), count = move.outs, len(node.outputs)
    assert isinstance(cut, Tiled)
    for i, beside in move.reach.items():
        op = WINDOWS[node.name]
        fill = values[count + i] if op is None else identity(op, values[i].dtype)
        values[i] = cleared(values[i], cut, span.beside(beside), fill)
    along = slide(node, cut.dim)
    assert along is not None
    return node.bind(values, along.params(node, 0, 0))


# --------------------------------------------------------------------------------------------------------- convolutions


def push_convolution(node: Node, placements: tuple[Placement, ...]) -> Move:
    """A cut batch stays cut; a cut feature dimension (the batch, in the gradient of a kernel) is summed over."""
    if found := partial(placements):
        raise Complete(found, "is not run on partial sums")
    numbers = node.params["dimension_numbers"]
    single = node.params["feature_group_count"] == node.params["batch_group_count"] == 1
    lhs, rhs = placements
    contracted = (numbers.lhs_spec[1], numbers.rhs_spec[1])
    for (value, dim), other in (((lhs, contracted[0]), 1), ((rhs, contracted[1]), 0)):
        if single and isinstance(value, Tiled) and value.dim == dim:
            ins = (value.at(contracted[0]), value.at(contracted[1]))
            if placements[other] in (WHOLE, ins[other]):
                return Move((Partial("sum"),), ins)
    if (
        isinstance(lhs, Tiled)
        and lhs.dim == numbers.lhs_spec[0]
        and rhs == WHOLE
        and node.params["batch_group_count"] == 1
    ):
        return Move((lhs.at(numbers.out_spec[0]),), placements)
    if isinstance(rhs, Tiled) and rhs.dim == numbers.rhs_spec[0] and lhs == WHOLE and single:
        return Move((rhs.at(numbers.out_spec[1]),), placements)
    if (found := push_along(node, placements)) is not None:
        return found
    raise Complete(tiled(placements), "slides over the cut axis, or groups it")


def push_along(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """A convolution along the cut axis; or, of two arrays as long as that, the sum that is the gradient of a kernel."""
    p = node.params
    (left, right), numbers = node.inputs, p["dimension_numbers"]
    cuts = [(v, spec) for v, spec in zip(placements, numbers[:2], strict=True) if isinstance(v, Tiled)]
    number = next((spec[2:].index(v.dim) for v, spec in cuts if v.dim in spec[2:]), None)
    if number is None or any((v.major, v.minor) != (1, 1) for v, _ in cuts):
        return None
    dims = [spec[2 + number] for spec in numbers]
    if any(v.dim != spec[2 + number] for v, spec in cuts) or p["lhs_dilation"][number] != 1:
        return None
    before, after = p["padding"][number]
    stride, apart = p["window_strides"][number], p["rhs_dilation"][number]
    size = right.shape[dims[1]]
    if isinstance(placements[1], Whole) and size != left.shape[dims[0]]:
        same = stride == 1 and before + after == (size - 1) * apart
        out, kernel = Tiled(dims[2]), WHOLE
    else:
        same = apart == 1 and left.shape[dims[0]] == size
        after = (node.outputs[0].shape[dims[2]] - 1) * stride - before
        out, kernel = Partial("sum"), Tiled(dims[1])
    found = Move((out,), (Tiled(dims[0]), kernel), reach={0: (before, after)})
    return found if same and before >= 0 and after >= 0 else None


def emit_convolution(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    params = node.params
    if move.reach:
        cut = move.ins[0]
        assert isinstance(cut, Tiled)
        values[0] = cleared(values[0], cut, span.beside(move.reach[0]), 0)
        number = params["dimension_numbers"].lhs_spec[2:].index(cut.dim)
        padding = [(0, 0) if i == number else p for i, p in enumerate(params["padding"])]
        params = params | {"padding": tuple(padding)}
    if move.outs[0] != Partial("sum"):
        return node.bind(values, params)
    dtype = span.wide(node.outputs[0].dtype)
    return node.bind([v.astype(dtype) for v in values], params | {"preferred_element_type": dtype})


def push_fft(node: Node, placements: tuple[Placement, ...]) -> Move:
    cut = one_cut(node, placements)
    if cut.dim >= len(node.inputs[0].shape) - len(node.params["fft_lengths"]):
        raise Complete([0], "transforms the cut axis")
    return Move((cut,), placements)


def pull_fft(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    return (want,) if want.dim < len(node.inputs[0].shape) - len(node.params["fft_lengths"]) else None


def push_reduce(node: Node, placements: tuple[Placement, ...]) -> Move:
    """`jax.lax.reduce` with a function of the user's own."""
    cut = one_cut(node, placements)
    count, axes = len(node.outputs), node.params["dimensions"]
    if cut.dim in axes:
        raise Complete(tiled(placements), "combines the cut axis by a function of its own")
    kept = cut.at(cut.dim - sum(a < cut.dim for a in axes))
    return Move((kept,) * count, (cut,) * count + (WHOLE,) * (len(node.inputs) - count))


register(
    *"""reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter
    select_and_scatter_add""".split(),
    push=push_window,
    pull=pull_window,
    emit=emit_window,
)
register("conv_general_dilated", push=push_convolution, emit=emit_convolution)
register("fft", push=push_fft, pull=pull_fft)
register("reduce", push=push_reduce)
