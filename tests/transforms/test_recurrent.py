"""Gradients of products along the cut axis, and of cumulative products, which run along it as recurrences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from tests import quick
from tests.transforms.test_rounding import assert_right, untiled
from transforms import tile

pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("float64")]

T, D, V = 24, 8, 48
SIGNS = np.cos(np.arange(V))


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def rows(h):
    return jnp.arange(len(h))[:, None]


# Of products [24, 48], which are larger than what they are made of.
LOSSES = {
    "noisy or": lambda h: -jnp.log(1 - jnp.prod(1 - nn.sigmoid(h - 3), 0)) @ SIGNS,
    "noisy or of classes": lambda h: -jnp.log(1 - jnp.prod(1 - nn.sigmoid(h - 3), 1)).sum(),
    "product of all": lambda h: jnp.prod(1 + 0.01 * h),
    "one factor is 0": lambda h: jnp.prod(jnp.where(rows(h) == 5, 0 * h, 1 + 0.1 * h), 0) @ SIGNS,
    "one factor is to be 0": lambda h: jnp.prod(jnp.where(rows(h) == 5, h - lax.stop_gradient(h), h), 0) @ SIGNS,
    "two factors are 0": lambda h: jnp.prod(jnp.where(rows(h) % 7 == 5, h - lax.stop_gradient(h), h), 0) @ SIGNS,
    "survival": lambda h: (jnp.cumprod(1 - nn.sigmoid(h), 0) @ SIGNS).sum(),
    "backwards": lambda h: (lax.cumprod(1 - nn.sigmoid(h), 0, reverse=True) @ SIGNS).sum(),
    "discounted": lambda h: (lax.stop_gradient(jnp.cumprod(nn.sigmoid(h), 0)) * h @ SIGNS).sum(),
    "logsumexp of those before": lambda h: (lax.cumlogsumexp(h) @ SIGNS).sum(),
    "of numbers far below 0": lambda h: (lax.cumlogsumexp(h - 1000) @ SIGNS).sum(),
    "Plackett-Luce": lambda h: (lax.cumlogsumexp(h, 0, reverse=True) - h).sum(0) @ SIGNS,
    "none before some": lambda h: (
        jnp.where(rows(h) > 2, lax.cumlogsumexp(jnp.where(rows(h) > 2, h, -jnp.inf), 0), 0).sum(0) @ SIGNS
    ),
}


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_untiled_function(name, along, n):
    args = jnp.asarray(draw(0, T, D)), jnp.asarray(draw(1, D, V)) / 3
    loss = lambda x, w: LOSSES[name](x @ w)
    tiled = tile(loss, (0, None) if along == "rows" else (None, 1), n)
    both = (quick.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (tiled, loss))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    assert all(c.nbytes <= sum(a.nbytes for a in args) for c in tiled.plan(*args).gradient.completed)  # no product


def test_the_gradient_of_a_complex_weight_is_as_large_as_its_two_parts():
    args = [jnp.asarray(draw(i, *shape)) for i, shape in enumerate([(12, 8), (8, 40), (8, 40)])]
    loss = lambda h, real, imaginary: (jnp.abs(h @ (real + 1j * imaginary)) ** 2).sum()
    both = (jax.grad(fn, (1, 2))(*args) for fn in (tile(loss, (0, None, None), 6), loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *both)


@pytest.mark.optimised
@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_as_close_to_float64_as_untiled(name):
    """At the compiler's own flags, as people run it."""
    fn = lambda x, w: LOSSES[name](x @ w)
    with jax.enable_x64(False):
        args = jnp.asarray(draw(0, T, D), jnp.float32), jnp.asarray(draw(1, D, V) / 3, jnp.float32)
        assert_right(tile(fn, (0, None), 2), args, untiled(fn, args))
