"""The arrays that rows of the table of rules compute with.

Dimension key: `B` sequences, `L` the cut axis, `D` features, `V` vocabulary.
"""

import gc
from typing import Any, NamedTuple

import jax
import jax.experimental.xla_metadata
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

L, D, V = 10, 3, 5
PRIMITIVES = {p.name: p for p in gc.get_objects() if isinstance(p, Primitive)}  # what this version of JAX has


class Arrays(NamedTuple):
    """What rows compute with; `AXES` says where each is cut."""

    x: Any  # [L, D], between 0 and 1
    y: Any  # [L, D], between 0 and 1
    t: Any  # [B, L, D]
    z: Any  # [L, D], complex
    i: Any  # [L, D], integers
    j: Any  # [L, D], integers
    shift: Any  # [L, D], small integers
    label: Any  # [L], below D
    b: Any  # [L, D], booleans
    key: Any  # [L]
    table: Any  # [V, D], whole


AXES = Arrays(0, 0, 1, 0, 0, 0, 0, 0, 0, 0, None)


def arrays() -> Arrays:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0.1, 0.9, (2, L, D))
    i, j = rng.integers(1, 100, (2, L, D))
    return Arrays(
        x=x,
        y=y,
        t=rng.normal(size=(2, L, D)),
        z=x + 1j * y,
        i=jnp.asarray(i, jnp.int32),
        j=jnp.asarray(j, jnp.int32),
        shift=jnp.asarray(j % 7, jnp.int32),
        label=jnp.asarray(rng.integers(0, D, L), jnp.int32),
        b=jnp.asarray(x > y),
        key=jax.random.split(jax.random.key(0), L),
        table=rng.normal(size=(V, D)),
    )


def bind(name, /, *operands, **params):
    """Apply a primitive that has no public function."""
    results = PRIMITIVES[name].bind(*operands, **params)
    return list(results) if PRIMITIVES[name].multiple_results else results


def fixed(x):
    """Operands that JAX cannot differentiate in."""
    return lax.stop_gradient(x)


def each(fn, *operands):
    return jax.vmap(fn)(*operands)


def on(name, *fields):
    """A row: the function of `lax` of these fields."""
    return lambda a: getattr(lax, name)(*(getattr(a, field) for field in fields))


def words(x):
    return x.astype(jnp.uint32)
