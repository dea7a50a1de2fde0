"""Operations that move elements: the cut is followed to the dimension where it lands."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Placement, Span, Tiled
from transforms.tiling.rules import Localise, Move, by_cut, first_cut, linear, of_nothing, register, tiled
from transforms.tiling.rules.factors import Factors, register_factors, squeezed, units


def resized(key: str) -> Localise:
    """The parameter `key` is the shape of the result, or of what is taken of an operand."""
    return lambda node, move, span: node.params | {key: span.local_shape(node.params[key], move.outs[0])}


# ------------------------------------------------------------------------------------ broadcast, transpose, squeeze


@by_cut
def push_broadcast(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move:
    dim = int(node.params["broadcast_dimensions"][cut.dim])
    copies = node.outputs[0].shape[dim] // max(1, node.inputs[0].shape[cut.dim])  # of an axis of length 1
    return Move((dataclasses.replace(cut, dim=dim, major=cut.major * copies),), placements)


def broadcast(node: Node) -> Factors:
    """`([j 1]) -> [i j k]`."""
    dims, shape = node.params["broadcast_dimensions"], node.outputs[0].shape
    own = [int(d) if n == shape[d] else None for d, n in zip(dims, node.inputs[0].shape, strict=True)]
    return Factors([own, *([] for _ in node.inputs[1:])], [range(len(shape))])


def transposed(node: Node) -> Factors:
    """`([i j]) -> [j i]`."""
    return Factors([range(len(node.inputs[0].shape))], [node.params["permutation"]])


# ----------------------------------------------------------------------------------------------------------- reshape


def landing(cut: Tiled, old: tuple[Any, ...], new: tuple[Any, ...]) -> Tiled | None:
    """Where the factor `L` of `old[cut.dim] = major * L / group * minor` stands in `new`, in the smallest groups."""
    if 0 in old:
        return None
    length = old[cut.dim] * cut.group // (cut.major * cut.minor)
    ahead, found = math.prod(old[: cut.dim]) * cut.major, []
    for dim, size in enumerate(new):
        before = math.prod(new[:dim])
        if ahead % before == 0 and size % (ahead // before) == 0:
            major = ahead // before
            chunk = size // major
            if chunk % length != 0 and not isinstance(chunk, int):
                continue  # a symbolic dimension
            common = length if chunk % length == 0 else math.gcd(chunk, length)
            found.append(Tiled(dim, major, chunk // common, length // common))
    best = min(found, key=lambda f: f.group, default=None)
    return None if best is None or best.group == length > 1 else best


@by_cut
def push_reshape(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    landed = landing(cut, node.inputs[0].shape, node.params["new_sizes"])
    if landed is None:
        return Complete([0], "splits the cut axis over several dimensions")
    return Move((landed,), placements)


def pull_reshape(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    source = landing(want, node.params["new_sizes"], node.inputs[0].shape)
    return None if source is None else (source,)


# --------------------------------------------------------------------------------------- concatenate, split, stack


def push_concatenate(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    if (found := linear(node, placements)) is not None:
        return found
    first, cut = first_cut(placements)
    if node.params["dimension"] == cut.dim:
        whole = cut.repeated(node.inputs[first].shape, node.outputs[0].shape[cut.dim])
        ins = pull_concatenate(node, whole) if whole is not None else None
        if whole is None or ins is None or any(p not in (WHOLE, q) for p, q in zip(placements, ins, strict=True)):
            return Complete(tiled(placements), "joins along the cut axis")
        return Move((whole,), ins)
    return push_beside(node, placements)


@by_cut
def push_beside(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move:
    return Move((cut,), (cut,) * len(node.inputs))


def pull_concatenate(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    """Operands that each hold all of the cut axis, once or several times, one after the other."""
    if node.params["dimension"] != want.dim:
        return (want,) * len(node.inputs)
    pieces = [want.repeated(node.outputs[0].shape, v.shape[want.dim]) for v in node.inputs]
    return None if None in pieces else tuple(p for p in pieces if p is not None)


@by_cut
def push_split(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    if node.params["axis"] != cut.dim:
        return Move((cut,) * len(node.outputs), placements)
    pieces = [cut.repeated(node.inputs[0].shape, size) for size in node.params["sizes"]]
    if None in pieces:
        return Complete([0], "splits the cut axis")
    return Move(tuple(p for p in pieces if p is not None), placements)


def localise_split(node: Node, move: Move, span: Span) -> dict[str, Any]:
    axis = node.params["axis"]
    local = [span.local_shape(v.shape, p)[axis] for v, p in zip(node.outputs, move.outs, strict=True)]
    return node.params | {"sizes": tuple(local)}


def stacked(node: Node) -> Factors:
    """`([i j], [i j]) -> [i k j]`; and `([i k j]) -> [i j], [i j]`."""
    axis, dims = node.params["axis"], range(max(len(v.shape) for v in (*node.inputs, *node.outputs)))
    apart = [d for d in dims if d != axis]
    ins, outs = ([dims if len(v.shape) == len(dims) else apart for v in side] for side in (node.inputs, node.outputs))
    return Factors(ins, outs, blocked={axis: "takes the cut axis apart"})


@by_cut
def push_tile(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move:
    """`jnp.tile`: copies of the cut dimension one after the other are a cut dimension with more in front of it."""
    return Move((dataclasses.replace(cut, major=cut.major * node.params["reps"][cut.dim]),), placements)


def pull_tile(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    return (want,) if node.params["reps"][want.dim] == 1 else None


# ---------------------------------------------------------------------------------------------------------------- iota


def pull_iota(node: Node, want: Tiled) -> tuple[Placement, ...]:
    return (WHOLE,) * len(node.inputs)


def emit_iota(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    (cut,) = move.outs
    shape, dim, dtype = node.params["shape"], node.params["dimension"], node.params["dtype"]
    local = span.local_shape(shape, cut)
    if not isinstance(cut, Tiled) or cut.dim != dim:
        return [lax.broadcasted_iota(dtype, local, dim)]
    # Counted in a dtype that holds every position: in a narrow one, start and offset would be rounded one by one.
    exact = dtype if jnp.dtype(dtype).itemsize > 4 else "int32"
    return [lax.broadcast_in_dim(span.positions(cut, exact).astype(dtype), local, (dim,))]


register_factors("broadcast_in_dim", factors=broadcast, push=push_broadcast, localise=resized("shape"))
register_factors("transpose", factors=transposed)
register_factors("squeeze", factors=squeezed)
register("reshape", push=push_reshape, pull=pull_reshape, localise=resized("new_sizes"), factors=units)
register("concatenate", push=push_concatenate, pull=pull_concatenate)


register("split", push=push_split, localise=localise_split)
register("tile", push=push_tile, pull=pull_tile)
register_factors("stack", factors=stacked)
register_factors("unstack", factors=stacked, pull=None)


register("iota", push=of_nothing, pull=pull_iota, emit=emit_iota)
