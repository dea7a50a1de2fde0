"""Several documents in one row: each attends to itself alone, and its positions start from 0.

The `segments` of a row number its documents, one after another: neighbours of one number are one document.

Dimensions: `B` batch `S` sequence `N` query heads `H` head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer

from transforms.sharding import partitions, place, uncut
from zoo.models.layers import Ops


def positions(segments: Integer[Array, "B S"]) -> Integer[Array, "B S"]:
    """Return where each token stands in its own document, from 0."""
    lies, segments = PartitionSpec(*partitions(segments)), uncut(segments, 1)
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return place(index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1), lies)


def chunks(
    q: Float[Array, "B S N H"], positions: Integer[Array, "#B S"] | None, size: Int[Array, ""]
) -> Integer[Array, "B S"]:
    """Return the number of each query's chunk, where documents are cut into chunks of so many tokens."""
    steps = jnp.arange(q.shape[1], dtype=jnp.int32)[None] if positions is None else uncut(positions, 1)
    numbers = jnp.cumsum(steps % size == 0, axis=1, dtype=jnp.int32)
    return place(jnp.broadcast_to(numbers, q.shape[:2]), PartitionSpec(*partitions(q)[:2]))


def within(ops: Ops, segments: Integer[Array, "B S"]) -> Ops:
    """Return how a model's parts run where attention stays within documents."""
    return dataclasses.replace(
        ops, attention=functools.partial(ops.attention, q_segments=segments, k_segments=segments)
    )
