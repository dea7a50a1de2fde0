"""Reductions along the cut axis in one loop: sums of exponentials, cross-entropy over the vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.planning.hlo import dot_flops
from tests import quick
from tests.helpers import assert_tiles
from transforms import tile

F32 = jnp.float32
T, D, V = 6, 4, 10  # tiles of 3, 3, 3, 1 along V for n = 4
HEAD = (None, 1, None)  # of (h, w, y): over the vocabulary
Array = jax.ShapeDtypeStruct


def draw(*shape, scale=1.0):
    return scale * np.random.default_rng(sum(shape)).normal(size=shape)


def exact(fn, axis, args, n=4, floor=0.0):
    """Value and gradients are those of the untiled function, in float64."""
    with jax.enable_x64(True):
        assert_tiles(fn, axis, n, args, dtype=jnp.float64, fast=True, floor=floor)


def loops(fn, axis, args, n=4):
    """How many loops the value takes, and how many value and gradient."""
    plan = tile(fn, axis, n).plan(*args)
    return len(plan.value.loops), len(plan.gradient.loops) if plan.gradient else None


# ------------------------------------------------------------------------------------------------ sums of exponentials


REDUCTIONS = {
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), (1, 3)),
    "logsumexp by hand": (lambda x: jnp.log(jnp.exp(x - x.max(1)[:, None]).sum(1)) + x.max(1), (1, 4)),
    "two maxima": (lambda x: jax.nn.logsumexp(x, 1) - jax.nn.logsumexp(2 * x, 1), (1, 3)),
    "weighted": (lambda x: jax.nn.logsumexp(x, 1, b=jnp.arange(1.0, V + 1)), (1, 3)),
    "smooth minimum": (lambda x: -jax.nn.logsumexp(-x, 1), (1, 3)),
    "mean of exponentials": (lambda x: jnp.log(jnp.exp(x).mean(1)), (1, 3)),
    "softmax": (lambda x: jax.nn.softmax(x, 1), (2, 4)),
    "log softmax": (lambda x: jax.nn.log_softmax(x, 1), (2, 4)),
    "softmax where": (lambda x: jax.nn.softmax(x, 1, where=jnp.arange(V) % 3 > 0), (2, 4)),
    "entropy": (lambda x: -(jax.nn.softmax(x, 1) * jax.nn.log_softmax(x, 1)).sum(1), (2, 5)),
    "expectation": (lambda x: jax.nn.softmax(x, 1) @ jnp.arange(1.0 * V), (1, 4)),
    "base two": (lambda x: jnp.log2(jnp.exp2(x - x.max(1, keepdims=True)).sum(1)), (1, 4)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_is_exact(name):
    exact(REDUCTIONS[name][0], 1, (draw(T, V),), n=(4, 2))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_takes_as_few_loops_as_can_be(name):
    fn, (value, gradient) = REDUCTIONS[name]
    found = loops(fn, 1, (Array((T, V), F32),))
    assert found[0] <= value and found[1] <= gradient, found


SPECIAL = {
    "far above": draw(T, V) + 1e4,
    "far below": draw(T, V) - 1e4,
    "rising": draw(T, V) + 1e4 * np.arange(V),
    "falling": draw(T, V) - 1e4 * np.arange(V),
    "first tile masked": np.where(np.arange(V) < 3, -np.inf, draw(T, V)),
    "last tile masked": np.where(np.arange(V) > 8, -np.inf, draw(T, V)),
    "a row masked": np.where(np.arange(T)[:, None] == 1, -np.inf, draw(T, V)),
    "all masked": np.full((T, V), -np.inf),
    "masked, then far below": np.where(np.arange(V) < 3, -np.inf, -1e4 + draw(T, V)),
    "an infinity": np.where(np.arange(T * V).reshape(T, V) == 25, np.inf, draw(T, V)),
    "infinities of both signs": np.where(np.arange(V) == 1, -np.inf, np.where(np.arange(V) == 5, np.inf, draw(T, V))),
    "not a number": np.where(np.arange(T * V).reshape(T, V) == 25, np.nan, draw(T, V)),
    "the largest numbers": np.where(np.arange(V) % 2, 3e38, -3e38) * np.ones((T, 1)),
}
STABLE = ("logsumexp", "softmax", "log softmax", "softmax where", "expectation")


@functools.cache
def every(n):
    """A program of the gradients and values of all that is stable: in tiles, or untiled for `None`."""
    fns = [REDUCTIONS[name][0] if n is None else tile(REDUCTIONS[name][0], 1, n) for name in STABLE]

    def run(x):
        return [
            (jax.vjp(fn, x)[1](jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(F32))[0], out)
            for fn in fns
            for out in [fn(x)]
        ]

    return quick.unoptimised(run) if n else quick.jit(run)


@pytest.mark.parametrize("kind", SPECIAL)
def test_numbers_out_of_the_ordinary_are_as_in_the_untiled_function(kind):
    x = jnp.asarray(SPECIAL[kind], F32)
    for name, g, w in zip(STABLE, every(4)(x), every(None)(x), strict=True):
        for part, a, b in zip(("gradient", "value"), g, w, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=f"{name}, {part}")


@pytest.mark.parametrize("n", [2, 3])
def test_a_row_of_which_all_is_masked_is_divided_by_zero_where_the_function_does(n):
    """A mask before the division leaves 0 / 0 there, one behind it zeros."""

    def late(s, v, m):
        e = jnp.where(m, jnp.exp(s - s.max(-1, keepdims=True)), 0)
        return (e / e.sum(-1, keepdims=True)) @ v

    def early(s, v, m):
        return jnp.where(m, jax.nn.softmax(s, -1), 0) @ v

    args = draw(2, V), draw(V, 3), np.arange(2 * V).reshape(2, V) < V
    for fn in (late, early):
        np.testing.assert_allclose(tile(fn, (1, 0, 1), n)(*args), fn(*args), rtol=2e-5, atol=1e-6)


_MASK = np.arange(12)[:, None] % 2 == 0
DIVIDED = {
    "masked": lambda x, y: jnp.where(_MASK, x / jnp.abs(x).sum(0), 0).sum(0),
    "masked, then scaled": lambda x, y: (jnp.where(_MASK, x / jnp.abs(x).sum(0), 0) * -0.0 / jnp.abs(y).max(0)).sum(0),
    "masked apart": lambda x, y: (
        jnp.where(_MASK, x / jnp.abs(x).sum(0), 0) - jnp.where(_MASK, y * 0 / jnp.abs(x).sum(0), 0)
    ).sum(0),
    "masked, turned": lambda x, y: (
        jnp.where(_MASK, x / jnp.abs(x).sum(0), 0) + -jnp.where(_MASK, y * 0 / jnp.abs(x).sum(0), 0)
    ).sum(0),
    "all masked": lambda x, y: jnp.where(jnp.abs(y) > 9, x / jnp.abs(x).sum(0), 0).sum(0),
}


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize("case", DIVIDED)
def test_terms_that_are_0_are_not_taken_for_masked_ones(case, n):
    """Divided by a sum that is 0 they are NaN, and masked ones are 0, whatever they would be divided by."""
    x, y = draw(12, 4), draw(12, 4)
    x[:, 2] = 0
    want = quick.jit(DIVIDED[case])(x, y)
    assert np.isnan(want[2]) == (case != "all masked")
    np.testing.assert_allclose(quick.jit(tile(DIVIDED[case], 0, n))(x, y), want, rtol=1e-5, atol=1e-6)


def test_accumulator_of_bfloat16_is_wider():
    x = jnp.asarray(draw(T, 4096), jnp.bfloat16)
    got = jax.jit(tile(lambda x: jax.nn.logsumexp(x, 1), 1, 1024))(x)
    assert got.dtype == jnp.bfloat16
    want = jax.nn.logsumexp(x.astype(F32), 1)
    np.testing.assert_allclose(got.astype(F32), want, rtol=2**-7)


# ------------------------------------------------------------------------------------- cross-entropy over a vocabulary


def integer_labels(h, w, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean()


def one_hot(h, w, y):
    return -(jax.nn.one_hot(y, w.shape[1], dtype=h.dtype) * jax.nn.log_softmax(h @ w)).sum(-1).mean()


def softcap_and_z_loss(h, w, y):
    z = 5 * jnp.tanh(h @ w / 5)
    norm = jax.nn.logsumexp(z, -1)
    return (norm - jnp.take_along_axis(z, y[:, None], -1)[:, 0] + 1e-2 * norm**2).mean()


def smoothed(h, w, y):
    labels = optax.smooth_labels(jax.nn.one_hot(y, w.shape[1], dtype=h.dtype), 0.1)
    return optax.softmax_cross_entropy(h @ w, labels).mean()


def indexed(h, w, y):
    z = h @ w
    return (jax.nn.logsumexp(z, -1) - z[jnp.arange(len(y)), y]).mean()


def columns_of_the_table(h, w, y):
    return (jax.nn.logsumexp(h @ w, -1) - (h * w.T[y]).sum(-1)).mean()


def padded_vocabulary(h, w, y):
    z = jnp.where(jnp.arange(w.shape[1]) < w.shape[1] - 2, h @ w, -jnp.inf)
    return optax.softmax_cross_entropy_with_integer_labels(z, y % (w.shape[1] - 2)).mean()


def masked_perplexity(h, w, y):
    mask = y > 2
    return jnp.exp((optax.softmax_cross_entropy_with_integer_labels(h @ w, y) * mask).sum() / mask.sum())


def per_token(h, w, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y)


def confident(h, w, y):
    p = jax.nn.softmax(h @ w)
    return -(jnp.log(p.max(-1)) * (p**2).sum(-1)).mean()


def against_a_teacher(h, w, y):
    student, teacher = jax.nn.log_softmax(h @ w), jax.nn.log_softmax(jax.lax.stop_gradient(h[:, ::-1] @ w))
    return (jnp.exp(teacher) * (teacher - student)).sum(-1).mean()


LOSSES = [
    integer_labels, one_hot, softcap_and_z_loss, smoothed, indexed, columns_of_the_table, padded_vocabulary,
    masked_perplexity, per_token, confident, against_a_teacher,
]  # fmt: skip


def tokens():
    return draw(T, D), draw(D, V), np.random.default_rng(0).integers(0, V, T, dtype=np.int32)


@pytest.mark.parametrize("fn", LOSSES)
def test_loss_over_the_vocabulary_is_exact(fn):
    exact(fn, HEAD, tokens(), n=4)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_vocabulary_that_tiles_do_not_divide(n):
    exact(softcap_and_z_loss, HEAD, tokens(), n=n)


@pytest.mark.crossed("fn", "bad")
@pytest.mark.parametrize("fn", [integer_labels, one_hot, indexed])
@pytest.mark.parametrize("bad", [V + 1, -1, -V - 1])
def test_label_out_of_range_counts_as_in_the_untiled_function(fn, bad):
    h, w, y = tokens()
    exact(fn, HEAD, (h, w, np.asarray([bad, *y[1:]], np.int32)))


def test_loss_over_vocabulary_and_tokens():
    fn = lambda h, w, y: tile(softcap_and_z_loss, HEAD, 3)(h, w, y)
    exact(fn, (0, None, 0), tokens(), n=2)


@pytest.mark.parametrize("scale", [1e-4, 3e3])
def test_logits_of_any_size(scale):
    h, w, y = tokens()
    exact(integer_labels, HEAD, (h, scale * w, y))


SHAPES = (Array((64, 32), F32), Array((32, 1000), F32), Array((64,), jnp.int32))  # and a last tile of 125
UNIT = 2 * 64 * 32 * 1000


@pytest.mark.measured
@pytest.mark.parametrize("fn", [integer_labels, softcap_and_z_loss, indexed, one_hot])
def test_loss_over_the_vocabulary_takes_two_loops_and_four_products(fn):
    tiled = tile(fn, HEAD, 8)
    plan = tiled.plan(*SHAPES)
    assert len(plan.gradient.loops) == 2
    assert not plan.gradient.completed
    program = jax.jit(jax.value_and_grad(tiled, (0, 1))).lower(*SHAPES).compile()
    assert dot_flops(program.as_text()) == 4 * UNIT


def temp(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.measured
def test_memory_of_a_loss_over_the_vocabulary():
    shapes = (Array((512, 64), F32), Array((64, 8192), F32), Array((512,), jnp.int32))
    gradient = functools.partial(jax.value_and_grad, argnums=(0, 1))
    tiled = temp(gradient(tile(integer_labels, HEAD, 16)), *shapes)
    assert tiled <= temp(gradient(integer_labels), *shapes) / 7
