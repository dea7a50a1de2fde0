"""Sums along the cut axis that are linear in what is known late: log-probabilities looked up, weighted, masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import quick
from tests.helpers import assert_tiles
from transforms import tile

F32 = jnp.float32
T, D, V = 6, 4, 10  # tiles of 3, 3, 3, 1 along V for n = 4
CUT = (1, None)  # of (x, y): along the classes
ROWS = np.arange(T)
LABELS = np.random.default_rng(0).integers(0, V, T, dtype=np.int32)

logs = functools.partial(jax.nn.log_softmax, axis=1)
hot = lambda x, y: jax.nn.one_hot(y, V, dtype=x.dtype)
odd = np.arange(V) % 2 == 1

# name: a function of x [T, V], cut along V, and labels y [T].
SUMS = {
    "looked up": lambda x, y: jnp.take_along_axis(logs(x), y[:, None], 1)[:, 0],
    "looked up by two indices": lambda x, y: logs(x)[jnp.arange(T), y],
    "looked up under vmap": lambda x, y: jax.vmap(lambda row, i: row[i])(logs(x), y),
    "looked up of two": lambda x, y: logs(jnp.stack([x, x[::-1]], 2))[jnp.arange(T), y],
    "looked up and masked": lambda x, y: jnp.where(y > 3, jnp.take_along_axis(logs(x), y[:, None], 1)[:, 0], 0.0),
    "probability looked up": lambda x, y: jax.nn.softmax(x, 1)[jnp.arange(T), y],
    "one-hot": lambda x, y: (logs(x) * hot(x, y)).sum(1),
    "one-hot, over all": lambda x, y: (logs(x) * hot(x, y)).sum(),
    "one-hot, by einsum": lambda x, y: jnp.einsum("tv,tv->t", logs(x), hot(x, y)),
    "picked by comparison": lambda x, y: jnp.where(jnp.arange(V) == y[:, None], logs(x), 0).sum(1),
    "smoothed": lambda x, y: 0.9 * logs(x)[jnp.arange(T), y] + 0.1 * logs(x).mean(1),
    "smoothed labels": lambda x, y: optax.softmax_cross_entropy(x, optax.smooth_labels(hot(x, y), 0.1)),
    "of some classes": lambda x, y: jnp.where(odd, logs(x), 0).sum(1),
    "of both signs": lambda x, y: (lambda p: (jnp.sin(jnp.arange(V)) * p - p * hot(x, y)).sum(1))(logs(x)),
    "divided": lambda x, y: (-logs(x) / jnp.arange(1.0, V + 1)).sum(1),
    "relative to the maximum": lambda x, y: (x - x.max(1, keepdims=True)).sum(1),
    "focal": lambda x, y: (lambda p: (1 - jnp.exp(p)) ** 2 * p)(logs(x)[jnp.arange(T), y]),
}
STABLE = [name for name in SUMS if name not in ("relative to the maximum",)]


@pytest.mark.parametrize("name", SUMS)
def test_is_exact(name):
    x = np.random.default_rng(1).normal(size=(T, V))
    with jax.enable_x64(True):
        assert_tiles(SUMS[name], CUT, (4, 1), (x, LABELS), dtype=jnp.float64, fast=True)


@pytest.mark.parametrize("name", SUMS)
def test_value_takes_one_loop(name):
    plan = tile(SUMS[name], CUT, 4).plan(jnp.zeros((T, V)), LABELS)
    assert len(plan.value.loops) == 1
    assert not plan.value.completed


def head(name):
    """The products of a loss of logits `h @ w`, and those of an untiled one, in 2TDV."""
    shapes = jnp.zeros((T, D)), jnp.zeros((D, V)), LABELS
    loss = lambda h, w, y: -SUMS[name](h @ w, y).mean()
    plan = tile(loss, (None, 1, None), 4).plan(*shapes)
    return plan.value.flops / (2 * T * D * V), plan.gradient.flops / (2 * T * D * V)


@pytest.mark.parametrize("name", ["looked up", "looked up by two indices", "one-hot", "picked by comparison", "focal"])
def test_loss_takes_one_product_and_its_gradient_four(name):
    assert head(name) == (1, 4)


SPECIAL = {
    "far above": lambda x: x + 1e4,
    "rising": lambda x: x + 1e3 * np.arange(V),
    "falling": lambda x: x - 1e3 * np.arange(V),
    "first tile masked": lambda x: np.where(np.arange(V) < 3, -np.inf, x),
    "a row masked": lambda x: np.where(ROWS[:, None] == 1, -np.inf, x),
    "an infinity": lambda x: np.where(np.arange(T * V).reshape(T, V) == 25, np.inf, x),
    "not a number": lambda x: np.where(np.arange(T * V).reshape(T, V) == 25, np.nan, x),
}


@functools.cache
def every(n):
    """A program of the values and gradients of all that is stable: in tiles, or untiled for `None`."""
    fns = [SUMS[name] if n is None else tile(SUMS[name], CUT, n) for name in STABLE]

    def run(x):
        outs = [jax.vjp(lambda x, fn=fn: fn(x, LABELS), x) for fn in fns]
        return [(out, pull(jnp.ones_like(out))[0]) for out, pull in outs]

    return quick.unoptimised(run) if n else quick.jit(run)


@pytest.mark.parametrize("kind", SPECIAL)
def test_numbers_out_of_the_ordinary_are_as_in_the_untiled_function(kind):
    x = jnp.asarray(SPECIAL[kind](np.random.default_rng(1).normal(size=(T, V))), F32)
    for name, g, w in zip(STABLE, every(4)(x), every(None)(x), strict=True):
        for part, a, b in zip(("value", "gradient"), g, w, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=f"{name}, {part}")


@pytest.mark.parametrize("name", ["one-hot", "smoothed labels", "of some classes"])
def test_large_logits_lose_no_digits(name):
    x = jnp.asarray(1e4 + np.random.default_rng(1).normal(size=(T, V)), F32)
    got = quick.unoptimised(tile(SUMS[name], CUT, 4))(x, LABELS)
    with jax.enable_x64(True):
        want = SUMS[name](jnp.asarray(x, jnp.float64), LABELS)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("bad", [V + 1, -1, -V - 1])
def test_label_out_of_range_counts_as_in_the_untiled_function(mode, bad):
    looked_up = lambda x, y: jnp.take_along_axis(logs(x), y[:, None], 1, mode=mode)[:, 0]
    x, labels = np.random.default_rng(1).normal(size=(T, V)), np.asarray([bad, *LABELS[1:]], np.int32)
    got, want = tile(looked_up, CUT, 4)(x, labels), looked_up(jnp.asarray(x), labels)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("fill", [-2.0, 0.0, np.nan])
def test_what_stands_for_labels_out_of_range_is_left_as_it_is(fill):
    looked_up = lambda x, y: logs(x).at[jnp.arange(T), y].get(mode="fill", fill_value=fill)
    x, labels = jnp.asarray(np.random.default_rng(1).normal(size=(T, V))), np.asarray([V + 1, *LABELS[1:]], np.int32)
    np.testing.assert_allclose(tile(looked_up, CUT, 4)(x, labels), looked_up(x, labels), rtol=1e-5)


def test_a_sum_in_sixteen_bits_is_cropped():
    """It is wider than it will be, and so is what would fill it up."""
    crop = lambda x: jax.lax.pad(x.sum(0), jnp.bfloat16(0), [(-1, 0, 0)])
    np.testing.assert_array_equal(tile(crop, axis=0, n=4)(jnp.ones((8, 4), jnp.bfloat16)), np.full(3, 8))
