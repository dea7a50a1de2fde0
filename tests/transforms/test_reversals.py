"""What is reversed along the cut axis, and reversed back, summed or scanned: no tile sees a reversal."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from tests import quick
from tests.helpers import planned
from tests.transforms.test_rounding import assert_right, untiled
from transforms import TileError, tile

pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("float64")]

N, D, V = 32, 5, 12
LABELS = np.random.default_rng(2).integers(0, V, N)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def recurrence(x, w, **how):
    step = lambda c, z: (jnp.tanh(z + 0.5 * c), c * z)
    return lax.scan(step, jnp.zeros(V, x.dtype), x @ w, **how)[1]


def bidirectional(x, w):
    """Both directions of a recurrent network, the second on the reversed sequence, as in most libraries."""
    backwards = jnp.flip(recurrence(jnp.flip(x @ w, 0) @ jnp.eye(V), jnp.eye(V)), 0)
    return ((recurrence(x, w) + backwards) ** 2).sum()


def linear(first, second):
    return first[0] * second[0], second[1] + second[0] * first[1]


def returns(x, w):
    """Discounted sums of all later rewards, by halves."""
    z = x @ w
    _, later = lax.associative_scan(linear, (jnp.full_like(z, 0.9), z), reverse=True)
    return (later**2).mean()


# Of tokens [N, D] and weights [D, V], whose product is larger than both.
LOSSES = {
    "scan": lambda x, w: (recurrence((x @ w)[::-1], jnp.eye(V))[::-1] ** 2).sum(),
    "both directions": bidirectional,
    "associative scan": returns,
    "cumulative sum": lambda x, w: (jnp.cumsum((x @ w)[::-1], 0)[::-1] ** 2).sum(),
    "cumulative log-sum-exp": lambda x, w: (lax.cumlogsumexp((x @ w)[::-1], 0)[::-1] ** 2).sum(),
    "sum": lambda x, w: (nn.softmax((x @ w)[::-1]) ** 2).sum(),
    "with weights": lambda x, w: ((1 + x @ w)[::-1] * jnp.arange(N)[:, None]).sum(),  # terms that do not cancel
    "with themselves": lambda x, w: (jnp.sin(x @ w)[::-1] * jnp.cos(x @ w)[::-1]).sum(),
    "both dimensions": lambda x, w: (jnp.flip(jnp.sin(jnp.flip(x @ w)), 0) * jnp.arange(V)).sum(),
    "neighbours": lambda x, w: ((lambda z: z[1:] - 2 * z[:-1])((x @ w)[::-1]) ** 2).sum(),
    "padded": lambda x, w: (jnp.pad((x @ w)[::-1], ((3, 0), (0, 0)))[:-3][::-1] * jnp.sin(x @ w)).sum(),
    "every second": lambda x, w: ((x @ w)[::-1][::2][::-1] ** 2 * jnp.cos(x @ w)[1::2]).sum(),
    "joined": lambda x, w: (
        jnp.concatenate([(x @ w)[::-1], jnp.sin(x @ w)[::-1]])[::-1].reshape(2, N, V) * jnp.arange(1, 3)[:, None, None]
    ).sum(),
    "products": lambda x, w: (nn.softmax(((x @ w)[::-1]).T @ (x @ w)[::-1] / N) ** 2).sum(),
    "the best of each row": lambda x, w: (jnp.argmax((x @ w)[::-1], 1) * jnp.arange(N)).sum() + (x @ w).sum(),
    "per token": lambda x, w: jnp.sin(x @ w)[::-1].sum(1) @ jnp.cos(x[:, 0]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_equals_untiled_one_tile_at_a_time(name):
    args = jnp.asarray(draw(0, N, D)), jnp.asarray(draw(1, D, V)) / 3
    fn = LOSSES[name]
    plan, tiled = planned(tile(fn, (0, None), 4), *args)
    both = (quick.jit(jax.value_and_grad(f, (0, 1)))(*args) for f in (tiled, fn))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    assert max(loop.largest for loop in plan.gradient.loops) <= plan.gradient.untiled_largest / 2


@pytest.mark.optimised
@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_as_close_to_float64_as_untiled(name):
    """At the compiler's own flags, as people run it."""
    fn = LOSSES[name]
    with jax.enable_x64(False):
        args = jnp.asarray(draw(0, N, D), jnp.float32), jnp.asarray(draw(1, D, V) / 3, jnp.float32)
        assert_right(tile(fn, (0, None), 4), args, untiled(fn, args))


ASKED = {
    "of each row one": lambda x, w: jnp.take_along_axis(nn.log_softmax(x @ w)[::-1], LABELS[:, None], 1).sum(),
    "where it stood": lambda x, w: ((x @ w) * (x @ w)[::-1]).sum(),
    "by its place": lambda x, w: (x @ w)[::-1][jnp.arange(N), LABELS].sum(),
    "which place": lambda x, w: (x @ w)[::-1].argmax(0).sum(),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_asks_for_places_in_the_reversed_order_has_them_or_is_refused(name):
    args = jnp.asarray(draw(0, N, D)), jnp.asarray(draw(1, D, V))
    for gather in ("small", "any"):
        try:
            found = tile(ASKED[name], (0, None), 4, gather=gather)(*args)
        except TileError as error:
            assert gather == "small" and re.search(r"cannot tile `\w+` at .*: it ", str(error))
        else:
            np.testing.assert_allclose(found, ASKED[name](*args), rtol=1e-9)
