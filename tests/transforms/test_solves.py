"""Triangular and linear solves of many right-hand sides: these are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import cho_solve, solve_triangular

from tests.helpers import assert_no_large, assert_tiles
from transforms import tile

pytestmark = pytest.mark.symbolic

SOLVES = {
    "whitened": lambda a, x: (solve_triangular(a, jnp.tanh(x).T, lower=True) ** 2).sum(0),
    "transposed": lambda a, x: solve_triangular(a, x.T, lower=True, trans=1).T,
    "linear": lambda a, x: (jnp.linalg.solve(a @ a.T, jnp.tanh(x).T) ** 2).sum(),
    "cholesky": lambda a, x: (cho_solve((a, True), jnp.tanh(x).T) * x.T).sum(),
    "batched": lambda a, x: solve_triangular(jnp.stack([a, a]), jnp.stack([x.T, jnp.sin(x).T]), lower=True).sum(0),
    "of a sum": lambda a, x: solve_triangular(a, x.T @ jnp.tanh(x), lower=True),
}


@pytest.mark.parametrize("name", SOLVES)
def test_right_hand_sides_are_cut(name):
    rng = np.random.default_rng(0)
    a, x = jnp.asarray(rng.normal(size=(5, 5))), jnp.asarray(rng.normal(size=(48, 5)))
    a = jnp.tril(a) + 3 * jnp.eye(5)
    assert_tiles(SOLVES[name], (None, 0), 7, (a, x), fast=True)


def test_a_solve_makes_nothing_whole():
    a, x, w = jnp.eye(16), jnp.ones((480, 4)), jnp.ones((4, 16))
    loss = lambda x: tile(lambda x: (solve_triangular(a, jnp.tanh(x @ w).T) ** 2).sum(), 0, 16)(x)
    assert_no_large(jax.make_jaxpr(jax.grad(loss))(x), 480 * 16)


INVERTED = {
    "inverse": lambda a: jnp.linalg.inv(a).sum(),
    "inverses": lambda a: jnp.linalg.inv(a).sum((1, 2)),
    "of what is constant": lambda a: (jnp.linalg.solve(a, jnp.ones_like(a)) ** 2).sum(),
    "one by one": lambda a: jax.vmap(lambda m: jnp.linalg.solve(m, jnp.arange(3.0)))(a).sum(),
}


@pytest.mark.parametrize("name", INVERTED)
def test_matrices_are_cut(name):
    """The matrices are factored behind a `stop_gradient`: what depends on them says the solve's own derivative."""
    a = jnp.asarray(np.random.default_rng(0).normal(size=(10, 3, 3))) + 4 * jnp.eye(3)
    assert_tiles(INVERTED[name], 0, 3, (a,), fast=True)


@jax.custom_jvp
def rounded(x):
    return jnp.round(x).astype(jnp.int32).astype(x.dtype)


rounded.defjvps(lambda t, out, x: t)


@pytest.mark.parametrize("loss", [lambda x: rounded(3 * x).sum(), lambda x: jnp.log(jnp.exp(rounded(x)).sum(1))])
def test_a_derivative_of_its_own_is_followed_through_integers(loss):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)))
    assert_tiles(loss, 0, 3, (x,), fast=True)
