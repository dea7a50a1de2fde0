"""Reductions: along the cut axis they leave partial results, along others the cut passes."""

from __future__ import annotations

from typing import Any

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import Partial, Placement, Span, Tiled
from transforms.tiling.rules import Move, by_cut, refuse_partial, register, summed

OPS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
}


def alike(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """Sums of sums, maxima of maxima."""
    same = placements == (Partial(OPS.get(node.name, "")),)
    return Move(placements, placements) if same else None


@by_cut(alike)
def push(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    op, axes = OPS.get(node.name), node.params["axes"]
    if cut.dim not in axes:
        return Move((cut.at(cut.dim - sum(a < cut.dim for a in axes)),) * len(node.outputs), placements)
    if op is None:
        return Complete([0], "runs along the cut axis", along=picks(node, cut))
    return Move((Partial(op),), placements)


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """Sums across tiles are formed in the wide dtype from the start."""
    if move.outs[0] == Partial("sum"):
        values = [values[0].astype(span.wide(values[0].dtype))]
    return node.bind(values)


def push_unvmap(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Equinox's reductions of all that there is to a scalar."""
    return refuse_partial(node, placements) or Move((Partial(UNVMAP[node.name]),), placements)


UNVMAP = {"unvmap_all": "and", "unvmap_any": "or", "unvmap_max": "max"}


@by_cut(lambda node, placements: summed(node, placements) if node.name == "cumsum" else None)
def push_cumulative(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    """cumsum and its like keep every length."""
    if node.params["axis"] == cut.dim:
        return Complete([0], "runs along the cut axis", along=cut.major == 1)
    return Move((cut,), placements)


@by_cut()
def push_sort(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    if node.params["dimension"] == cut.dim:
        return Complete([i for i, p in enumerate(placements) if p == cut], "runs along the cut axis")
    return Move((cut,) * len(node.outputs), (cut,) * len(node.inputs))


@by_cut()
def push_top_k(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    axis = node.params.get("axis", node.params.get("reduction_dimension", -1)) % len(node.inputs[0].shape)
    if axis == cut.dim:
        return Complete([0], "runs along the cut axis", along=picks(node, cut))
    return Move((cut,) * len(node.outputs), placements)


def picks(node: Node, cut: Tiled) -> bool:
    """Whether the best so far can go from tile to tile; what is whole to begin with needs no loop."""
    return node.name in ("argmax", "argmin", "top_k") and cut.major == 1 and node.inputs[0].producer is not None


def pull_same(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    axis = node.params.get("axis", node.params.get("dimension"))
    return None if axis is None or axis == want.dim else (want,) * len(node.inputs)


def pull_reduction(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    dim = want.dim
    for axis in sorted(node.params["axes"]):
        dim += axis <= dim
    return (want.at(dim),)


register(*OPS, "reduce_xor", "argmax", "argmin", push=push, pull=pull_reduction, emit=emit)
register(*UNVMAP, push=push_unvmap)
register("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", push=push_cumulative, pull=pull_same)
register("sort", push=push_sort)
register("top_k", "approx_top_k", push=push_top_k)
