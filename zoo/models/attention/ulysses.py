"""Attention of sequences that a mesh cuts, with every position of some heads on each device, in place of some positions
of all heads (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): devices exchange queries, keys, values and what is
seen, and no device gathers the keys and values of all heads.

Dimensions: `B` batch `S` sequence `N` query heads `K` kv heads `H` head size.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from transforms.sharding import axes_of, partitions, place, shares


def devices(q: Float[Array, "B S N H"]) -> int:
    """Return among how many devices attention shares the heads of queries that lie so on the mesh that is set."""
    return shares(jax.typeof(q), 1) * shares(jax.typeof(q), 2)


def repeats(heads: int, kv_heads: int, count: int) -> int:
    """Return how often each kv head is there, so that as many of them are on each of so many devices.

    That is once where they divide; otherwise as seldom as lets every device have the kv heads that its queries read.

    Raises:
        ValueError: not even query heads can be shared out so.
    """
    if heads % count:
        raise ValueError(
            f"cannot share {heads} query heads among {count} devices: every device "
            f"takes as many. Use mesh.context_by=gather, or {math.gcd(heads, count)} of them."
        )
    times = math.lcm(kv_heads, count) // kv_heads
    return times if heads % (kv_heads * times) == 0 else heads // kv_heads


def attend(
    attention: Callable[..., Float[Array, "B S N H"]],
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    sinks: Float[Array, " N"] | None = None,
    kept: Any = None,
) -> Any:
    """Return `attention(q, k, v, sinks, kept)` of whole sequences of the heads that each device gets.

    What else attention returns, and what is `kept` (`Ops.keeps`), are numbers of each query `[B N S]`.

    Each device sends `(devices - 1) / devices` of its share of queries and of the result, `B S N H / devices` elements
    each, and of keys and values, `B S K H / devices` elements each, times `repeats`.
    """
    batch, sequence, of_model, _ = partitions(q)
    if sequence is None:
        return attention(q, k, v, sinks, kept)
    heads = axes_of([of_model, sequence])
    times = repeats(q.shape[2], k.shape[2], devices(q))
    lies = jax.NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*partitions(k)))
    k, v = (jnp.repeat(x, times, axis=2, out_sharding=lies) if times > 1 else x for x in (k, v))
    q, k, v = (place(x, PartitionSpec(batch, None, heads, None)) for x in (q, k, v))
    sinks = None if sinks is None else place(sinks, PartitionSpec(heads))
    seen = attention(q, k, v, sinks, jax.tree.map(lambda x: place(x, PartitionSpec(batch, heads, None)), kept))
    home = {3: PartitionSpec(batch, of_model, sequence), 4: PartitionSpec(batch, sequence, of_model, None)}
    return jax.tree.map(lambda x: place(x, home[x.ndim]), seen)
