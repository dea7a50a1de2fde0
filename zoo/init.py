"""Random weights, drawn leaf by leaf from the rows of `zoo.tables`."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from zoo.configs import Config
from zoo.nn import accumulator
from zoo.tables import rows

_SLAB = 2**22  # elements drawn at a time, at most


def draw(config: Config, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> dict[str, Array]:
    """Return every leaf of a model, by its path: normal with the standard deviation of its row, or its constant.

    Each leaf is drawn in slabs of 16 MiB, so nothing larger than the model is ever held. For billions of parameters
    use `jax.random.key(seed, impl="rbg")`, which draws several times faster than the default.
    """
    table = rows(config)
    leaves = {}
    for row, leaf_key in zip(table, jax.random.split(key, len(table)), strict=True):
        shape, std = row.shape(config.dims), row.std(config.dims)
        drawn = _normal(leaf_key, std, shape, jnp.dtype(dtype)) if std else jnp.full(shape, row.start, dtype)
        leaves[row.leaf] = drawn
    return leaves


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, std, shape, dtype):
    """Normal numbers of any shape, drawn in equal slabs of rows, each rounded as soon as it is drawn."""
    count, width = math.prod(shape[:-1]), shape[-1]
    slabs = next(n for n in range(-(-count * width // _SLAB), count + 1) if count % n == 0)

    def slab(i):
        drawn = jax.random.normal(jax.random.fold_in(key, i), (count // slabs, width), accumulator(dtype))
        return (std * drawn).astype(dtype)

    return jax.lax.map(slab, jnp.arange(slabs)).reshape(shape)
