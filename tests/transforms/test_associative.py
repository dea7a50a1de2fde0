"""`jax.lax.associative_scan` along the cut axis: every second row, of those every second, down to one of each tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from tests import quick
from tests.helpers import planned
from tests.transforms.test_rounding import assert_right, untiled
from transforms import tile

pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("float64")]

D, V = 3, 7


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def linear(first, second):
    return first[0] * second[0], second[1] + second[0] * first[1]


def recurrent(x, w):
    """A diagonal state space model: each feature has a state of its own, which decays."""
    decay = jnp.broadcast_to(nn.sigmoid(w[0]), (len(x), D, V))
    _, states = lax.associative_scan(linear, (decay, x[:, :, None] * w))
    return ((states * w[1]).sum(-1) ** 2).mean()


# Of tokens [T, D] and weights [D, V], whose product is larger than both.
LOSSES = {
    "sums": lambda x, w: (lax.associative_scan(jnp.add, x @ w) ** 2).sum(),
    "gated": lambda x, w: (lax.associative_scan(linear, (nn.sigmoid(x @ w), x @ w))[1] ** 2).sum(),
    "gates, too": lambda x, w: sum(lax.associative_scan(linear, (nn.sigmoid(x @ w), jnp.sin(x @ w)))).sum(0) @ w[0],
    "along another dimension": lambda x, w: (lax.associative_scan(jnp.add, (x @ w).T, axis=1) ** 2).sum(),
    "each sequence": lambda x, w: (
        jax.vmap(lambda h: lax.associative_scan(linear, (nn.sigmoid(h), h))[1])(jnp.stack([x @ w, -x @ w])) ** 2
    ).sum(),
    "state space": recurrent,
}


@pytest.mark.redundant("length")
@pytest.mark.parametrize("length", [32, 48])  # of four tiles of 8 or 12 rows: three halves, or two and an odd rest
@pytest.mark.parametrize("name", LOSSES)
def test_a_scan_by_halves_runs_tile_by_tile(name, length):
    args = jnp.asarray(draw(0, length, D)), jnp.asarray(draw(1, D, V)) / 3
    plan, tiled = planned(tile(LOSSES[name], (0, None), 4), *args)
    both = (quick.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (tiled, LOSSES[name]))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    assert max(loop.largest for loop in plan.gradient.loops) <= plan.gradient.untiled_largest / 2


# Of a product, every second row of which stands beside others.
ROWS = {
    "pairs": lambda h: jnp.sin(h[::2]) * h[1::2],
    "pairs with those before": lambda h: jnp.sin(h[2::2]) * h[1:-1:2],
    "put between": lambda h: (
        lax.pad(h[::2], 0.0, [(0, 1, 1), (0, 0, 0)]) + lax.pad(h[1::2] ** 2, 0.0, [(1, 0, 1), (0, 0, 0)])
    ),
    "one level": lambda h: jnp.concatenate([h[:1], h[2::2] * h[1:-1:2]]),
    "every fourth": lambda h: h[::2][::2] * h[3::4],
}


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_every_second_row_is_cut_with_the_axis(name, n):
    args = jnp.asarray(draw(0, 64, D)), jnp.asarray(draw(1, D, V)) / 3
    loss = lambda x, w: (ROWS[name](jnp.tanh(x @ w)) ** 2).sum()
    both = (quick.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (tile(loss, (0, None), n), loss))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.optimised
@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_as_close_to_float64_as_untiled(name):
    """At the compiler's own flags, as people run it."""
    fn = LOSSES[name]
    with jax.enable_x64(False):
        args = jnp.asarray(draw(0, 32, D), jnp.float32), jnp.asarray(draw(1, D, V) / 3, jnp.float32)
        assert_right(tile(fn, (0, None), 4), args, untiled(fn, args))
