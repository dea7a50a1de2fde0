"""Random keys and bits: keys that are cut like any other array, and bits made tile by tile from a Whole key.

Threefry makes each element from the key and the element's position in the whole array alone, so a tile of the bits is
made from the positions of the tile. Other generators run through the whole array in one stream.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.placement import Placement, Span, Tiled, Whole
from transforms.tiling.rules import Move, complete
from transforms.tiling.rules.factors import Factors, Stated, elementwise, leading, pull_factor, register_factors

THREEFRY = "threefry2x32"
ONE_STREAM = "draws from one stream for the whole array"


@functools.cache
def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=THREEFRY)).dtype


def counts(node: Node) -> bool:
    """Whether a node's generator counts positions: then what it makes of a key depends on no other key."""
    return any(v.dtype == _threefry() for v in (*node.inputs, *node.outputs))


def counted(stated: Stated) -> Stated:
    """The factors of an equation whose generator counts positions; along others nothing may be cut."""

    def factors(node: Node) -> Factors:
        found = stated(node)
        names = {name for dims in (*found.ins, *found.outs) for name in dims}
        return found if counts(node) else dataclasses.replace(found, blocked=dict.fromkeys(names, ONE_STREAM))

    return factors


def pull_generator(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    """One tile of the bits, or keys, of a whole key."""
    if not counts(node) or want.dim < len(node.inputs[0].shape):
        return pull_factor(counted(leading))(node, want)
    return (Whole(),) if jax.config.jax_threefry_partitionable else None  # ty: ignore[missing-attribute]


def emit_bits(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """What `jax.random.bits` computes of each position, for the positions of the tile."""
    if (words := count(node, values[0], move, span)) is None:
        return node.bind(values)
    first, second = words
    width = node.params["bit_width"]
    if width == 64:
        return [lax.shift_left(first.astype(jnp.uint64), jnp.uint64(32)) | second.astype(jnp.uint64)]
    return [(first ^ second).astype(node.outputs[0].dtype)]


def emit_split(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """What `jax.random.split` computes of each position, for the positions of the tile."""
    if (words := count(node, values[0], move, span)) is None:
        return node.bind(values)
    return [jax.random.wrap_key_data(jnp.stack(words, -1), impl=THREEFRY)]


def count(node: Node, key: Any, move: Move, span: Span) -> list[Any] | None:
    """Threefry's two words for each element of a tile, of a whole key; None where keys are cut."""
    (cut,) = move.outs
    if not isinstance(cut, Tiled) or not isinstance(move.ins[0], Whole):
        return None
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


def sampled(node: Node) -> Factors:
    """`([i], [i j]) -> [i j]`: each sample has a key of its own, which a whole key is split into."""
    dims, own = range(len(node.outputs[0].shape)), len(node.inputs[0].shape)
    return Factors(
        [dims[:own], dims], [dims], blocked=dict.fromkeys(dims[own:], "splits its key for all of the cut axis")
    )


register_factors("random_wrap", "random_unwrap", "random_clone", factors=leading)
register_factors("random_bits", factors=counted(leading), pull=pull_generator, emit=emit_bits)
register_factors("random_split", factors=counted(leading), pull=pull_generator, emit=emit_split)
register_factors("random_fold_in", "random_seed", factors=counted(elementwise))
register_factors("random_gamma", factors=counted(sampled), pull=None)
complete("rng_bit_generator", "rng_uniform", reason=ONE_STREAM)
