"""Several documents in one row: each attends to itself alone, and its positions start from 0.

The `segments` of a row number its documents, one after another: neighbours of one number are one document.

Dimensions: `B` batch `S` sequence.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Integer

from transforms.sharding import partitions, place, uncut
from zoo.models.layers import Ops


def positions(segments: Integer[Array, "B S"]) -> Integer[Array, "B S"]:
    """Return where each token stands in its own document, from 0."""
    lies, segments = PartitionSpec(*partitions(segments)), uncut(segments, 1)
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return place(index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1), lies)


def within(ops: Ops, segments: Integer[Array, "B S"]) -> Ops:
    """Return how a model's parts run where attention stays within documents."""
    return dataclasses.replace(
        ops, attention=functools.partial(ops.attention, q_segments=segments, k_segments=segments)
    )
