"""Arrays in bfloat16 by their bits, for loops that overwrite a part of one.

XLA:CPU has no bfloat16 but for products: to overwrite a slice of an array it converts the whole of it to float32 and
back, in every step of a loop. Of 16-bit integers it overwrites the slice alone, in place.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


def bits(x: Array) -> Array:
    """Return an array in bfloat16 as 16-bit integers, and any other as it is."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def numbers(x: Array, dtype: DTypeLike) -> Array:
    """Return what `bits` was given: an array of `dtype`."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
