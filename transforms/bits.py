"""Arrays in bfloat16 by their bits, for loops that read or overwrite a part of one.

XLA:CPU had no bfloat16 but for products: to read a slice of an array, or to overwrite one, it converted the whole of it
to float32 (and back), in every step of a loop. Of 16-bit integers it reads or overwrites the slice alone, in place.
Since JAX 0.11.2 it does so of bfloat16, and not where that is made of integers: nothing is done there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

IN_PLACE = jax.__version_info__ >= (0, 11, 2)  # whether XLA:CPU reads and overwrites slices of bfloat16 as they are


def bits(x: Array) -> Array:
    """Return an array in bfloat16 as 16-bit integers, and any other as it is; all are, where nothing is to be done."""
    whole = IN_PLACE or jnp.result_type(x) != jnp.bfloat16
    return x if whole else lax.bitcast_convert_type(x, jnp.uint16)


def numbers(x: Array, dtype: DTypeLike) -> Array:
    """Return what `bits` was given: an array of `dtype`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def slice_of(x: Array, start: Any, size: int, dim: int) -> Array:
    """Return `lax.dynamic_slice_in_dim(x, start, size, dim)`, on a CPU by its bits."""
    return _by_bits(lambda x, start: lax.dynamic_slice_in_dim(x, start, size, dim), x, start)


def with_slice(x: Array, part: Array, start: Any, dim: int) -> Array:
    """Return `lax.dynamic_update_slice_in_dim(x, part, start, dim)`, on a CPU by its bits."""
    return _by_bits(lambda x, part, start: lax.dynamic_update_slice_in_dim(x, part, start, dim), x, part, start)


def _by_bits(fn: Callable[..., Array], x: Array, *operands: Any) -> Array:
    """`fn(x, *operands)`, which moves elements of arrays of one dtype; on an explicit mesh bits have no types."""
    if IN_PLACE or x.dtype != jnp.bfloat16 or jax.typeof(x).sharding.mesh.explicit_axes:
        return fn(x, *operands)
    # Of what a loop does not change XLA would take the bits before it: a copy of all of `x`.
    moved = lambda *operands: numbers(fn(*map(bits, lax.optimization_barrier(operands))), jnp.bfloat16)
    return lax.platform_dependent(x, *operands, cpu=moved, default=fn)
