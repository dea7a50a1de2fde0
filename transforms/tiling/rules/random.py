"""Random keys and bits: keys that are cut like any other array, and bits made tile by tile from a Whole key.

Threefry makes each element from the key and the element's position in the whole array alone, so a tile of the bits is
made from the positions of the tile. Other generators run through the whole array in one stream.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import Placement, Span, Tiled, Whole
from transforms.tiling.rules import Move, aligned, by_cut, complete, partial, refuse_partial, register, tiled

THREEFRY = "threefry2x32"
ONE_STREAM = "draws from one stream for the whole array"


@functools.cache
def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=THREEFRY)).dtype


def counts(node: Node) -> bool:
    """Whether a node's generator counts positions: then what it makes of a key depends on no other key."""
    return any(v.dtype == _threefry() for v in (*node.inputs, *node.outputs))


@by_cut()
def push_leading(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    """The result has the operand's dimensions first, then its own."""
    if cut.dim >= len(node.outputs[0].shape):
        return Complete([0], "takes the cut axis apart")
    return Move((cut,) * len(node.outputs), placements)


def pull_leading(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    return (want,) if want.dim < len(node.inputs[0].shape) else None


def push_generator(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Keys that are cut make what they are leading dimensions of."""
    if not counts(node):
        return refuse_partial(node, placements) or Complete(tiled(placements), ONE_STREAM)
    return push_leading(node, placements)


def pull_generator(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    """One tile of the bits, or keys, of a whole key."""
    if not counts(node):
        return None
    if want.dim < len(node.inputs[0].shape):
        return (want,)
    by_position = jax.config.jax_threefry_partitionable  # ty: ignore[missing-attribute]
    return (Whole(),) if by_position else None


def one_stream(node: Node, placements: tuple[Placement, ...]) -> Complete | None:
    return None if counts(node) else Complete([*tiled(placements), *partial(placements)], ONE_STREAM)


@by_cut(one_stream)
def push_fold(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move:
    return Move((cut,), tuple(aligned(v, cut, node.outputs[0].shape[cut.dim]) for v in node.inputs))


def pull_fold(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    size = node.outputs[0].shape[want.dim]
    return tuple(aligned(v, want, size) for v in node.inputs) if counts(node) else None


def made_by_counting(move: Move) -> bool:
    return isinstance(move.ins[0], Whole) and isinstance(move.outs[0], Tiled)


def emit_bits(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """What `jax.random.bits` computes of each position, for the positions of the tile."""
    if not made_by_counting(move):
        return node.bind(values)
    first, second = count(node, values[0], move, span)
    width = node.params["bit_width"]
    if width == 64:
        return [lax.shift_left(first.astype(jnp.uint64), jnp.uint64(32)) | second.astype(jnp.uint64)]
    return [(first ^ second).astype(node.outputs[0].dtype)]


def emit_split(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """What `jax.random.split` computes of each position, for the positions of the tile."""
    if not made_by_counting(move):
        return node.bind(values)
    return [jax.random.wrap_key_data(jnp.stack(count(node, values[0], move, span), -1), impl=THREEFRY)]


def count(node: Node, key: Any, move: Move, span: Span) -> list[Any]:
    """Threefry's two words for each element of a tile."""
    (cut,) = move.outs
    assert isinstance(cut, Tiled)
    own = len(key.shape)
    shape = node.outputs[0].shape[own:]
    high, low = positions(shape, cut.at(cut.dim - own), span)
    data = jax.random.key_data(key)
    words = [lax.expand_dims(data[..., i], range(own, own + len(shape))) for i in (0, 1)]
    full = (*key.shape, *low.shape)
    return list(threefry2x32_p.bind(*(jnp.broadcast_to(x, full) for x in (*words, high, low))))


def positions(shape: tuple[int, ...], cut: Tiled, span: Span) -> tuple[Any, Any]:
    """The place of each element of a tile in the whole array, in row-major order: the high and the low 32 bits."""
    local = span.local_shape(shape, cut)
    high = low = jnp.zeros(local, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :])
        if dim == cut.dim:
            index = lax.broadcast_in_dim(span.positions(cut, jnp.uint32), local, (dim,))
        else:
            index = lax.broadcasted_iota(jnp.uint32, local, dim)
        step = index * jnp.uint32(stride % 2**32)
        if math.prod(shape) > 2**32:
            carry = (low + step < low).astype(jnp.uint32)
            high += index * jnp.uint32(stride >> 32) + lax.mulhi(index, jnp.full_like(index, stride % 2**32)) + carry
        low += step
    return high, low


@by_cut()
def push_gamma(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    """Each sample has a key of its own, which a Whole key is split into."""
    if not counts(node) or cut.dim >= len(node.inputs[0].shape):
        return Complete(tiled(placements), "splits its key for all of the cut axis")
    return Move((cut,), (cut, cut))


register("random_wrap", "random_unwrap", push=push_leading, pull=pull_leading)
register("random_bits", push=push_generator, pull=pull_generator, emit=emit_bits)
register("random_split", push=push_generator, pull=pull_generator, emit=emit_split)
register("random_fold_in", push=push_fold, pull=pull_fold)
register("random_seed", push=push_fold, pull=pull_fold)
register("random_clone", push=push_leading, pull=pull_leading)
register("random_gamma", push=push_gamma)
complete("rng_bit_generator", "rng_uniform", reason=ONE_STREAM)
