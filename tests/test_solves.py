"""Triangular and linear solves of many right-hand sides: these are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import cho_solve, solve_triangular

from tests.helpers import assert_no_large, assert_tiles
from transforms import tile

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
