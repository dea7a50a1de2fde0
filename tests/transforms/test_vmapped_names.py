"""Collectives over a name of `jax.vmap` inside the tiled function: they take a dimension, or the cut axis, away."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from transforms import tile

pytestmark = pytest.mark.symbolic

X = np.random.default_rng(0).normal(size=(21, 4)).astype(np.float32)
over = lambda fn, **options: lambda x: jax.vmap(fn, axis_name="b", **options)(x)

CASES = {
    "psum": over(lambda r: lax.psum(jnp.sin(r), "b"), out_axes=None),
    "pmax": over(lambda r: lax.pmax(r * r, "b"), out_axes=None),
    "pmin": over(lambda r: lax.pmin(r, "b"), out_axes=None),
    "pmean": over(lambda r: r - lax.pmean(r, "b")),
    "columns": over(lambda c: c - lax.psum(c, "b"), in_axes=1, out_axes=1),
    "columns_max": over(lambda c: c * lax.pmax(c, "b"), in_axes=1),
    "variance": over(lambda r: (r - lax.pmean(r, "b")) / jnp.sqrt(lax.pmean(r**2, "b") + 0.1)),
    "several": over(lambda r: jnp.stack(lax.psum((r, r * r), "b")), out_axes=None),
    "both": lambda x: jax.vmap(jax.vmap(lambda e: e * lax.psum(e, ("b", "c")), axis_name="c"), axis_name="b")(x),
    "inner": lambda x: jax.vmap(jax.vmap(lambda e: e * lax.psum(e, "c"), axis_name="c"), axis_name="b")(x),
    "outer": lambda x: jax.vmap(jax.vmap(lambda e: e * lax.pmean(e, "b"), axis_name="c"), axis_name="b")(x),
}


@pytest.mark.parametrize("name", CASES)
def test_collective_over_a_vmapped_name(name):
    fn = CASES[name]
    for n in (2, 3, 7):
        np.testing.assert_allclose(tile(fn, 0, n)(X), fn(X), rtol=2e-5, atol=2e-5)
    if name in ("pmax", "pmin", "columns_max"):
        return  # JAX has no derivative of these
    loss = lambda fn: lambda x: jnp.sum(jnp.sin(fn(x)))
    found, expected = jax.grad(tile(loss(fn), 0, 3))(X), jax.grad(loss(fn))(X)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_batch_norm_of_equinox(mode):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="b", mode=mode)
    fn = lambda x: jax.vmap(norm, axis_name="b", in_axes=(0, None), out_axes=(0, None))(x, state)[0]
    np.testing.assert_allclose(tile(fn, 0, 4)(X), fn(X), rtol=2e-5, atol=2e-5)
    loss = lambda fn: lambda x: jnp.sum(jnp.sin(fn(x)) ** 2)
    np.testing.assert_allclose(jax.grad(tile(loss(fn), 0, 4))(X), jax.grad(loss(fn))(X), rtol=2e-5, atol=2e-5)


def test_name_of_a_mesh_stays_beside_one_of_vmap():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = lambda x: jax.vmap(lambda r: r * lax.psum(r, ("b", "d")), axis_name="b")(x)
    spec = jax.P("d")
    run = lambda fn: jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(X[:20])
    np.testing.assert_allclose(run(tile(fn, 0, 3)), run(fn), rtol=2e-5, atol=2e-5)
