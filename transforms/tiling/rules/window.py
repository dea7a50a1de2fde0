"""Convolutions and windows that slide over some dimensions, and transforms of some.

Along the cut axis windows make as many elements as there are rows, or one of every few: they read rows beside the tile.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Reach, Span, Tiled, identity
from transforms.tiling.rules import Move, aligned, by_cut, no_sums, partial, register, tiled
from transforms.tiling.rules.factors import Factors, push_factor, register_factors


class Slide(NamedTuple):
    """How windows slide: along which dimension of the operand, what of the `padding` is for it, how much further than
    an element a window reaches, how much is added before and after, in what steps windows move (`stride`), and how far
    apart the elements of the operand are (`gap`).
    """

    dim: int
    number: int
    extent: int
    before: int
    after: int
    stride: int = 1
    gap: int = 1

    def params(self, node: Node, before: int, after: int) -> dict[str, Any]:
        """The node's, with other padding."""
        padding = [(before, after) if i == self.number else tuple(p) for i, p in enumerate(node.params["padding"])]
        return node.params | {"padding": tuple(padding)}

    def out(self, cut: Tiled, size: int, made: int) -> Tiled | None:
        """Where the axis stands in what windows make, `made` long of `size`: there are as many for every tile."""
        alike = cut.major == 1 and made * self.stride == size * self.gap
        return cut.scaled(Fraction(self.gap, self.stride)) if alike else None

    def reach(self, cut: Tiled) -> Reach:
        """How many rows before and after a tile its windows read."""
        before, after = self.before // self.gap, (self.extent - self.before - self.stride) // self.gap + 1
        rows = lambda steps: -(-max(steps, 0) // cut.minor) * cut.group
        return rows(before), rows(after)

    def padding(self, reach: Reach, cut: Tiled, steps: int, made: int) -> tuple[int, int]:
        """How much is to be put before and after a tile of `steps` elements, its reach included, for `made` windows."""
        low = self.before - cut.steps(reach[0]) * self.gap
        return low, (made - 1) * self.stride + self.extent - low - (steps - 1) * self.gap


def sliding(node: Node, dim: int) -> Slide | None:
    """How a node's windows make dimension `dim` of its result, if they do."""
    if node.name == "conv_general_dilated":
        spatial = node.params["dimension_numbers"].out_spec[2:]
        return convolving(node, spatial.index(dim)) if dim in spatial else None
    return reducing(node, dim) if node.name in (*WINDOWS, *CHOICES) else None


def convolving(node: Node, number: int) -> Slide:
    """How the kernel of a convolution slides along spatial dimension `number`."""
    p = node.params
    source, kernel, _ = p["dimension_numbers"]
    stride, gap, apart = (p[k][number] for k in ("window_strides", "lhs_dilation", "rhs_dilation"))
    extent = (node.inputs[1].shape[kernel[2 + number]] - 1) * apart
    return Slide(source[2 + number], number, extent, *p["padding"][number], stride, gap)


def reducing(node: Node, dim: int) -> Slide:
    """How windows that are reduced, or chosen from, slide along a dimension."""
    p = node.params
    steps = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    size, stride, gap, apart = (1 if p.get(k) is None else p[k][dim] for k in steps)
    return Slide(dim, dim, (size - 1) * apart, *p["padding"][dim], stride, gap)


def stays(node: Node, dim: int) -> bool:
    """Whether windows have length and stride 1 along a dimension, and add nothing to it."""
    return reducing(node, dim) == Slide(dim, dim, extent=0, before=0, after=0)


def slide(node: Node, dim: int) -> Slide | None:
    """The same, if windows move in steps of 1."""
    along = sliding(node, dim)
    return along if along is not None and along.stride == along.gap == 1 else None


WINDOWS = {"reduce_window_sum": "sum", "reduce_window_max": "max", "reduce_window_min": "min", "reduce_window": None}
CHOICES = ("select_and_gather_add", "select_and_scatter", "select_and_scatter_add")


@by_cut
def push_window(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    """Operands of one shape, or nearly, and scalars to start from."""
    count = len(node.outputs)
    if stays(node, cut.dim):
        return Move((cut,) * count, pull_window(node, cut) or ())
    along = reducing(node, cut.dim)
    out = along.out(cut, node.inputs[0].shape[cut.dim], node.outputs[0].shape[cut.dim])
    if out is None:
        return Complete(tiled(placements), "slides over the cut axis")
    ins = (cut,) * count + (WHOLE,) * (len(placements) - count)
    return Move((out,) * count, ins, reach=dict.fromkeys(range(count), along.reach(cut)))


def pull_window(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    size = node.outputs[0].shape[want.dim]
    return tuple(aligned(v, want, size) for v in node.inputs) if stays(node, want.dim) else None


def emit_window(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    cut, count = move.ins[0], len(node.outputs)
    if not move.reach:
        return node.bind(values)
    assert isinstance(cut, Tiled)
    along = reducing(node, cut.dim)
    made = span.local_shape(node.outputs[0].shape, move.outs[0])[cut.dim]
    for i, beside in move.reach.items():
        op = WINDOWS[node.name]
        fill = values[count + i] if op is None else jnp.asarray(identity(op, values[i].dtype))
        rows = span.beside(beside).cleared(values[i], cut, fill)
        low, high = along.padding(beside, cut, rows.shape[cut.dim], made)
        config = [(low, high, along.gap - 1) if d == cut.dim else (0, 0, 0) for d in range(rows.ndim)]
        values[i] = lax.pad(rows, fill, config)
    dilation = tuple(1 if d == cut.dim else g for d, g in enumerate(node.params["base_dilation"]))
    return node.bind(values, along.params(node, 0, 0) | {"base_dilation": dilation})


def push_choices(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """What belongs to the best element of each window, and back to it: of windows that lie side by side."""
    scatters = node.name.startswith("select_and_scatter")
    first, all_ = placements[0], placements[1:] if scatters else placements
    cut = next((p for p in all_ if isinstance(p, Tiled)), None)
    if cut is None:  # only what was chosen is cut
        assert isinstance(first, Tiled)
        cut = first.scaled(node.params["window_strides"][first.dim])
    if stays(node, cut.dim):
        return push_window(node, placements)
    along, few, many = reducing(node, cut.dim), node.inputs[0], node.inputs[1]
    if not scatters:
        few, many = node.outputs[0], few
    chosen = along.out(cut, many.shape[cut.dim], few.shape[cut.dim])
    beside = along.stride == along.extent + 1 and (along.before, along.after, along.gap) == (0, 0, 1)
    if chosen is not None and beside:
        ins = (chosen if scatters else cut, cut, *(WHOLE,) * (len(placements) - 2))
        if all(p in (WHOLE, q) for p, q in zip(placements, ins, strict=True)):
            return Move((cut if scatters else chosen,), ins)
    return Complete(tiled(placements), "slides over the cut axis")


# --------------------------------------------------------------------------------------------------------- convolutions


def convolved(node: Node) -> Factors:
    """`([b f _], [o f _]) -> [b o _]`; in groups of features neither `f` nor `o`, of batches `f` alone."""
    numbers, batched = node.params["dimension_numbers"], node.params["batch_group_count"] == 1
    alike = node.params["feature_group_count"] == 1
    single = batched and alike
    found: list[list[Any]] = []
    for spec, first, second in zip(numbers, "bob", "ffo", strict=True):
        names = [None] * len(spec)
        names[spec[0]] = first if single or (batched and first == "b") else None
        names[spec[1]] = second if single or (alike and second == "f") else None
        found.append(names)
    return Factors(found[:2], found[2:], reduced={"f": "sum"})


by_factors = push_factor(convolved, no_sums)


def push_convolution(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """A cut batch stays cut; a cut feature dimension (the batch, in the gradient of a kernel) is summed over."""
    names = [ins[p.dim] for p, ins in zip(placements, convolved(node).ins, strict=True) if isinstance(p, Tiled)]
    if partial(placements) or None not in names:
        return by_factors(node, placements)
    return push_along(node, placements) or Complete(tiled(placements), "slides over the cut axis, or groups it")


def push_along(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """A convolution along the cut axis; or, of two arrays as long as that, the sum that is the gradient of a kernel."""
    p = node.params
    (left, right), numbers = node.inputs, p["dimension_numbers"]
    cuts = [(v, spec) for v, spec in zip(placements, numbers[:2], strict=True) if isinstance(v, Tiled)]
    number = next((spec[2:].index(v.dim) for v, spec in cuts if v.dim in spec[2:]), None)
    if number is None or any(v.dim != spec[2 + number] for v, spec in cuts):
        return None
    dims = [spec[2 + number] for spec in numbers]
    size, other = left.shape[dims[0]], right.shape[dims[1]]
    along, cut = kernel_of(node, number), cuts[0][0]
    if isinstance(placements[1], Tiled) or other * along.stride == size * along.gap:  # of the same axis: a sum over it
        if placements[0] == WHOLE:  # cut like the right one
            cut = cut.scaled(Fraction(along.stride, along.gap)).at(dims[0])
        kernel = along.out(cut, size, other)
        if kernel is None or placements[1] not in (WHOLE, kernel.at(dims[1])):
            return None
        return Move((Partial("sum"),), (cut, kernel.at(dims[1])), reach={0: along.reach(cut)})
    slides = convolving(node, number)
    out = slides.out(cut, size, node.outputs[0].shape[dims[2]])
    return None if out is None else Move((out.at(dims[2]),), (cut, WHOLE), reach={0: slides.reach(cut)})


def kernel_of(node: Node, number: int) -> Slide:
    """How a convolution with what another made is its kernel's gradient: the strides of the one dilate the other."""
    p = node.params
    source, _, out = p["dimension_numbers"]
    apart = p["window_strides"][number]
    extent = (node.outputs[0].shape[out[2 + number]] - 1) * apart
    before, after = p["padding"][number]
    stride, gap = p["rhs_dilation"][number], p["lhs_dilation"][number]
    return Slide(source[2 + number], number, extent, before, after, stride, gap)


def emit_convolution(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    params = node.params
    if move.reach:
        cut, out = move.ins[0], move.outs[0]
        assert isinstance(cut, Tiled)
        number = params["dimension_numbers"].lhs_spec[2:].index(cut.dim)
        values[0] = span.beside(move.reach[0]).cleared(values[0], cut, 0)
        if isinstance(out, Tiled):
            along, made = convolving(node, number), span.local_shape(node.outputs[0].shape, out)[out.dim]
        else:
            along, kernel = kernel_of(node, number), params["dimension_numbers"].rhs_spec[2 + number]
            made = values[1].shape[kernel]
        params = along.params(node, *along.padding(move.reach[0], cut, values[0].shape[cut.dim], made))
    if move.outs[0] != Partial("sum"):
        return node.bind(values, params)
    dtype = span.wide(node.outputs[0].dtype)
    return node.bind([v.astype(dtype) for v in values], params | {"preferred_element_type": dtype})


def transformed(node: Node) -> Factors:
    """`([i j]) -> [i j]`, with transforms along the last dimensions."""
    dims = range(len(node.inputs[0].shape))
    last = dims[len(dims) - len(node.params["fft_lengths"]) :]
    return Factors([dims], [dims], blocked=dict.fromkeys(last, "transforms the cut axis"))


def combined(node: Node) -> Factors:
    """`([i j], [i j], [], []) -> [i], [i]`: a function of the user's own combines `j`."""
    count, dims, axes = len(node.outputs), range(len(node.inputs[0].shape)), node.params["dimensions"]
    ins, outs = [dims] * count + [[]] * (len(node.inputs) - count), [[d for d in dims if d not in axes]] * count
    return Factors(ins, outs, blocked=dict.fromkeys(axes, "combines the cut axis by a function of its own"))


register(*WINDOWS, push=push_window, pull=pull_window, emit=emit_window)
register(*CHOICES, push=push_choices, pull=pull_window)
register("conv_general_dilated", push=push_convolution, emit=emit_convolution)
register_factors("fft", factors=transformed)
register_factors("reduce", factors=combined, pull=None)
