"""Reductions: along the cut axis they leave partial results, along others the cut passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transforms.layout import named
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.placement import Partial, Placement, Span, Tiled
from transforms.tiling.rules import Move
from transforms.tiling.rules.factors import ALONG, Factors, keeping, register_factors

OPS = {f"reduce_{op}": op for op in ("sum", "max", "min", "prod", "and", "or")}
UNVMAP = {"unvmap_all": "and", "unvmap_any": "or", "unvmap_max": "max"}  # Equinox's, of all that there is to a scalar


def alike(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """Sums of sums, maxima of maxima."""
    same = placements == (Partial(OPS.get(node.name, "")),)
    return Move(placements, placements) if same else None


def factors(node: Node) -> Factors:
    """`([i j]) -> [i]`."""
    dims = range(len(node.inputs[0].shape))
    axes, op = node.params.get("axes", dims), (OPS | UNVMAP).get(node.name)
    outs = [[d for d in dims if d not in axes]] * len(node.outputs)
    if op is None:
        return Factors([dims], outs, blocked=dict.fromkeys(axes, ALONG))
    return Factors([dims], outs, reduced=dict.fromkeys(axes, op))


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """Sums across tiles are formed in the wide dtype from the start."""
    if move.outs[0] == Partial("sum"):
        values = [values[0].astype(span.wide(values[0].dtype))]
    return node.bind(values)


def picks(node: Node, cut: Tiled) -> bool:
    """Whether the best so far can go from tile to tile; what is whole to begin with needs no loop."""
    return node.name in ("argmax", "argmin", "top_k") and cut.major == 1 and node.inputs[0].producer is not None


def first_best(node: Node, values: list[Any], cut: Tiled, span: Span) -> list[Any]:
    """The best up to and with a tile and its place, by `argmax` or `argmin`, from the tile and what was best before.

    The first of the best: nan counts as better than anything, and an earlier tile's as better than the same.
    """
    array, before, place = values
    (local,) = node.bind([array])
    if named(jax.typeof(array)) is None:
        found = jnp.take_along_axis(array, jnp.expand_dims(local, cut.dim), cut.dim).squeeze(cut.dim)
    else:  # to look it up takes what is not spread
        found = (jnp.max if node.name == "argmax" else jnp.min)(array, cut.dim)
    better = found > before if node.name == "argmax" else found < before
    if jnp.issubdtype(found.dtype, jnp.inexact):
        better |= jnp.isnan(found) & ~jnp.isnan(before)
    better |= jnp.equal(span.start, 0)
    here = local + jnp.asarray(cut.steps(span.start), local.dtype)
    return [jnp.where(better, found, before), jnp.where(better, here, place)]


def best(node: Node) -> int:
    """The dimension that a `top_k` picks from."""
    return node.params.get("axis", node.params.get("reduction_dimension", -1)) % len(node.inputs[0].shape)


register_factors(*OPS, *UNVMAP, "reduce_xor", "argmax", "argmin", factors=factors, sums=alike, along=picks, emit=emit)
register_factors(
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    factors=keeping(lambda node: node.params["axis"]),
    along=lambda node, cut: cut.major == 1,
)
register_factors("sort", factors=keeping(lambda node: node.params["dimension"]), pull=None)
register_factors("top_k", "approx_top_k", factors=keeping(best), along=picks, pull=None)
