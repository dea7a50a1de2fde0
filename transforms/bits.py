"""Arrays in bfloat16 by their bits, for loops that read or overwrite a part of one.

XLA:CPU has no bfloat16 but for products: to read a slice of an array, or to overwrite one, it converts the whole of it
to float32 (and back), in every step of a loop. Of 16-bit integers it reads or overwrites the slice alone, in place.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array


def bits(x: Array) -> Array:
    """Return an array in bfloat16 as 16-bit integers, and any other as it is."""
    return lax.bitcast_convert_type(x, jnp.uint16) if jnp.result_type(x) == jnp.bfloat16 else x


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
    if x.dtype != jnp.bfloat16 or jax.typeof(x).sharding.mesh.explicit_axes:
        return fn(x, *operands)
    moved = lambda *operands: numbers(fn(*map(bits, operands)), jnp.bfloat16)
    return lax.platform_dependent(x, *operands, cpu=moved, default=fn)
