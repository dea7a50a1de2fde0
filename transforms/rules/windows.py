"""Windows that slide over some dimensions, and transforms of some: the cut must be another one."""

from __future__ import annotations

from transforms.graph import Node
from transforms.placement import WHOLE, Placement, Tiled
from transforms.rules import Complete, Move, aligned, one_cut, register, tiled


def stays(node: Node, dim: int) -> bool:
    """Whether windows have length and stride 1 along a dimension, and add nothing to it."""
    p = node.params
    plain = all(p.get(k) is None or p[k][dim] == 1 for k in STEPS)
    return plain and tuple(p["padding"][dim]) == (0, 0)


STEPS = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def push_window(node: Node, placements: tuple[Placement, ...]) -> Move:
    """Operands of one shape, or nearly, and scalars to start from."""
    cut = one_cut(node, placements)
    if not stays(node, cut.dim):
        raise Complete(tiled(placements), "slides over the cut axis")
    return Move((cut,) * len(node.outputs), pull_window(node, cut) or ())


def pull_window(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    size = node.outputs[0].shape[want.dim]
    return tuple(aligned(v, want, size) for v in node.inputs) if stays(node, want.dim) else None


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
)
register("fft", push=push_fft, pull=pull_fft)
register("reduce", push=push_reduce)
