"""What runs along the cut axis and hands a state from tile to tile: cumulative operations, scans, choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests import quick
from transforms import tile

pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("float64")]


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def assert_same(fn, axis, args, counts=(3, 4), gradients=True):
    total = lambda f: lambda *args: sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(f(*args)))

    def evaluated(f):
        found = lambda *args: (f(*args), jax.grad(total(f), range(len(args)))(*args) if gradients else ())
        return jax.tree.leaves(quick.jit(found)(*args))

    expected = evaluated(fn)
    for n in counts:
        for got, want in zip(evaluated(tile(fn, axis, n)), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


CUMULATIVE = (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)


@pytest.mark.parametrize("cumulative", CUMULATIVE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative(cumulative, reverse):
    x = draw(7, 3)
    assert_same(lambda x: cumulative(jnp.sin(x), axis=0, reverse=reverse), 0, (x,), (3,))
    plan = tile(lambda x: cumulative(jnp.sin(x), axis=0, reverse=reverse), 0, 3).plan(x).value
    assert len(plan.loops) == 1
    assert bool(plan.completed) is reverse  # backwards it needs all of its operand


def test_cumulative_intermediates_are_never_whole():
    fn = lambda x: jnp.cumsum(x[:, :, None] * x[:, None, :], 0).max((1, 2))
    x = draw(23, 5)
    assert_same(fn, 0, (x,), (4,))
    assert [loop.reverse for loop in tile(fn, 0, 4).plan(x).gradient.loops] == [False, False, True]


def test_one_after_the_other_and_along_another_dimension():
    assert_same(lambda x: jnp.cumsum(jnp.tanh(jnp.cumsum(x, 0)), 0).sum(1), 0, (draw(7, 3),), (3,))
    assert_same(lambda x: jnp.cumsum(jnp.tanh(x), 1).reshape(14, 3), 1, (draw(2, 7, 3),), (3,))


def test_rounded_sums_are_not_compared_with_others():
    x = draw(13, 4)
    assert_same(lambda x: (jnp.cumsum(x, 0) / 13).min(0), 0, (x,), (3, 5))


def test_scans():
    x, w = draw(7, 3), draw(3, 3, seed=1)

    def recurrent(w, x):
        def step(state, row):
            state = jnp.tanh(state @ w + row)
            return state, 2 * state

        return lax.scan(step, jnp.zeros(3), x)

    assert_same(recurrent, (None, 0), (w, x))
    assert_same(lambda w, x: (recurrent(w, x)[1] ** 2).mean(), (None, 0), (w, x))

    def moving_average(x):  # begins with a row of the cut axis
        return lax.scan(lambda m, row: (0.9 * m + 0.1 * row, row - m), x[0], x)[1]

    assert_same(moving_average, 0, (x,))


def special():
    x = draw(6, 11)
    x = x.at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf).at[2].set(0.0).at[3, 2].set(9).at[3, 8].set(9)
    x = x.at[4].set(-jnp.inf).at[5, ::2].set(-jnp.inf).at[5, 4].set(jnp.nan)
    return x.at[5, 9].set(jnp.nan)


CHOICES = {
    "argmax": lambda x: jnp.argmax(2 * x, 1),
    "argmin": lambda x: jnp.argmin(2 * x, 1),
    "top_1": lambda x: lax.top_k(2 * x, 1),
    "top_5": lambda x: lax.top_k(2 * x, 5),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("x", [special(), np.random.default_rng(0).integers(0, 4, (5, 11))], ids=["special", "ints"])
def test_choices(choose, x):
    expected = jax.tree.leaves(choose(jnp.asarray(x)))
    for n in (2, 3, 4, 11):
        for got, want in zip(jax.tree.leaves(quick.jit(tile(choose, 1, n))(x)), expected, strict=True):
            np.testing.assert_array_equal(got, want)


def test_choices_among_words():
    h, w = draw(6, 4), draw(4, 11, seed=1)
    assert_same(lambda h, w: lax.top_k(h @ w, 3)[0], (None, 1), (h, w))
    assert_same(lambda h, w: jax.nn.softmax(h @ w)[jnp.arange(6), jnp.argmax(h @ w, -1)], (None, 1), (h, w), (4,))
    plan = tile(lambda h, w: (jnp.argmax(h @ w, -1) == 2).mean(), (None, 1), 4).plan(h, w).value
    assert len(plan.loops) == 1
    assert not plan.completed


def test_sums_of_narrow_steps_are_formed_wide():
    x, w = draw(7, 3).astype(jnp.bfloat16), draw(3, 9).astype(jnp.bfloat16)
    fn = lambda x, w: lax.scan(lambda total, row: (total + jnp.tanh(row @ w), None), jnp.zeros(9, x.dtype), x)[0]
    plan = tile(fn, (0, None), 3).plan(x, w).value
    assert [carry.nbytes for loop in plan.loops for carry in loop.carries] == [9 * 4]
    np.testing.assert_allclose(tile(fn, (0, None), 3)(x, w).astype(float), fn(x, w).astype(float), atol=0.1)


def partition(x, w, table):
    """The logarithm of a linear chain's partition function (Lafferty et al. 2001): all paths, by the forward sums."""
    scores = x @ w
    step = lambda before, row: (jax.nn.logsumexp(before[:, None] + table, 0) + row, None)
    return jax.nn.logsumexp(lax.scan(step, scores[0], scores[1:])[0]) - scores[:, 0].sum()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradient_of_a_narrow_recurrence(dtype):
    """What it hands on is rounded in each step; the gradient of what all steps read is summed wide."""
    args = draw(13, 6), 0.6 * draw(6, 5), draw(5, 5)
    grads = lambda fn, *args: jax.grad(fn, (0, 1, 2))(*args)
    exact, narrow = grads(partition, *args), [a.astype(dtype) for a in args]
    near, got = (
        grads(partition, *narrow),
        quick.jit(grads, static_argnums=0)(tile(partition, (0, None, None), 3), *narrow),
    )
    for a, b, e in zip(got, near, exact, strict=True):
        error = lambda a, e=e: float(jnp.abs(a.astype(jnp.float32) - e).max())
        assert a.dtype == b.dtype
        assert error(a) <= 2 * error(b) + 0.01


# ------------------------------------------------------------------------------------ steps that do not see each other


def mapped(w, x):
    """Each row is sorted on its own, so only a loop over the rows can be cut."""

    def row(r):
        order = jnp.argsort(r[:, 0])
        return jnp.zeros_like(r).at[order].add(jnp.tanh(r[order] @ w)), (r @ w).sum(0)

    return lax.map(row, x)


def summed(w, x):
    return lax.scan(lambda total, r: (total + jnp.sin(r @ w), None), jnp.ones(3), x)[0]


def losses(w, x):
    def step(total, row):
        loss = jax.nn.logsumexp(jnp.tanh(row[0]) @ w)
        return (total[0] + loss, total[1] + (loss > 1)), loss

    (total, count), losses = lax.scan(step, (jnp.zeros(()), 0), x)
    return total / (1 + count), losses.max()


def of_layers(w, x):
    def layer(x, scale):
        y, counts = mapped(w, x * scale)
        return x + y, counts.sum(0)

    return lax.scan(jax.checkpoint(layer), x, jnp.linspace(0.5, 1, 3))


@pytest.mark.parametrize("fn", [mapped, losses, of_layers, lambda w, x: summed(w, x.reshape(-1, 3))])
def test_steps_that_do_not_see_each_other_are_cut_with_their_gradients(fn):
    args = draw(3, 3), draw(7, 4, 3, seed=1)
    assert_same(fn, (None, 0), args)
    plan = tile(fn, (None, 0), 3).plan(*args)
    # The gradient of a maximum is a comparison: the losses of all steps are kept for it.
    assert not plan.value.completed and {c.primitive for c in plan.gradient.completed} <= {"stored"}
    assert plan.value.flops == plan.value.untiled_flops


@pytest.mark.parametrize(
    "step",
    [
        lambda total, r: (total + r, total.sum()),  # it is read
        lambda total, r: (2 * total + r, r.sum()),
        lambda total, r: (total + r * total, r.sum()),
        lambda total, r: (total + r, total),
    ],
)
def test_steps_that_see_what_others_left_hand_it_on(step):
    assert_same(lambda x: lax.scan(step, jnp.zeros(3), jnp.sin(x)), 0, (draw(7, 3),), (3,))
