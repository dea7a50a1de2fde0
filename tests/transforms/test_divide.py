"""Arrays that are not quite as long as the cut axis: parts of it, and joins with others, computed piece by piece."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests import quick
from tests.helpers import planned
from transforms import TileError, tile

pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("float64")]

B, S, D, V, N = 3, 11, 5, 24, 30  # batch, sequence, embed, vocab, tokens


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def pick(*shape, high=V):
    return np.random.default_rng(sum(shape)).integers(0, high, shape)


def nll(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def shifted(x, w, ids):
    return nll((x @ w)[:, :-1], ids[:, 1:]).mean()


def flattened(x, w, ids):
    logits, labels = (x @ w)[..., :-1, :].reshape(-1, V), ids[..., 1:].reshape(-1)
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean()


def hidden_shifted(x, w, ids):
    return nll(x[:, :-1] @ w, ids[:, 1:]).mean()


def completion(x, w, ids):
    return -nll((x @ w)[:, 3:-1], ids[:, 4:]).sum(-1)


def several(x, w, ids):
    logits = x @ w
    return sum(nll(logits[:, :-k], ids[:, k:]).mean() for k in (1, 2))


def distilled(x, w, ids):
    student, teacher = (x @ w)[:, :-1], lax.stop_gradient((jnp.sin(x) @ w)[:, :-1])
    kl = (jax.nn.softmax(teacher) * (jax.nn.log_softmax(teacher) - jax.nn.log_softmax(student))).sum(-1)
    return (kl * (ids[:, 1:] != 0)).sum() / (ids[:, 1:] != 0).sum()


def extrema(x, w, ids):
    logits = (x @ w)[:, 2:-3]
    return logits.max(), logits.min((0, 1)), (logits > -9).all(), logits.sum(1)


def checkpointed(x, w, ids):
    return jax.checkpoint(shifted)(x, w, ids)


def checkpointed_after(x, w, ids):
    return jax.checkpoint(lambda logits, labels: nll(logits, labels).mean())((x @ w)[:, :-1], ids[:, 1:])


PARTS = (shifted, flattened, hidden_shifted, completion, several, distilled, extrema, checkpointed, checkpointed_after)


def sinks(q, k, v):
    scores = jnp.concatenate([q @ k.T, q[:, :1]], -1)
    return jax.nn.softmax(scores)[:, :-1] @ v


def prefix(q, k, v):
    k, v = jnp.concatenate([q, k]), jnp.concatenate([jnp.cos(q), v])
    return jax.nn.softmax(q @ k.T) @ v


def padded(q, k, v):
    return jax.nn.softmax(jnp.pad(q @ k.T, ((0, 0), (1, 2))))[:, 1:-2] @ v


def queue(q, k, v):
    scores = jnp.concatenate([(q * q).sum(-1, keepdims=True), q @ k.T, jnp.zeros((len(q), 1))], 1)
    return nll(scores, jnp.zeros(len(q), int)).mean(), scores.argmax(1), scores.argmin(1)


def labelled(q, k, v):
    scores = jnp.concatenate([q @ k.T, q], 1)
    return -jnp.take_along_axis(jax.nn.log_softmax(5 * jnp.tanh(scores)), pick(4, high=N + D)[:, None], 1).mean()


def two_heads(q, k, v):
    first, second = jnp.split(q @ k.T, [8], -1)
    return nll(first, jnp.arange(4)).mean() + jax.nn.logsumexp(second, -1).sum()


JOINS = (sinks, prefix, padded, queue, labelled, two_heads)


def contrasted(q, k, v):
    """Momentum contrast: the positive beside a queue of negatives, which is cut."""
    scores = jnp.concatenate([(q * jnp.cos(q)).sum(-1, keepdims=True), q @ k.T], 1)
    return nll(scores, jnp.zeros(len(q), int)).mean() + nll(jnp.roll(scores, 3, 0), jnp.arange(len(q)) % N).mean()


def causal_sinks(q, k, v):
    scores = jnp.where(jnp.arange(len(q))[:, None] >= jnp.arange(len(k)), q @ k.T, -jnp.inf)
    return jax.nn.softmax(jnp.concatenate([scores, q[:, :1]], -1))[:, :-1] @ v


def clipped(q, k, v):
    """A label that names the column beside the cut axis, or none of all."""
    scores, labels = jnp.pad(q @ k.T, ((0, 0), (0, 1))), jnp.arange(len(q))[:, None] * 2 - 3
    return (jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, labels, 1, mode="clip")[:, 0]).sum()


CASES = [(fn, (1, None, 1), (draw(B, S, D), draw(D, V), pick(B, S))) for fn in PARTS]
CASES += [(fn, (None, 0, 0), (draw(4, D), draw(N, D), draw(N, D))) for fn in JOINS]


def floats(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


@pytest.mark.parametrize(("fn", "axis", "args"), CASES, ids=[case[0].__name__ for case in CASES])
def test_is_computed_piece_by_piece(fn, axis, args):
    args = tuple(map(jnp.asarray, args))

    def both(fn):
        total = lambda *args: sum(jnp.sum(leaf * jnp.cos(1.0 + leaf.ndim)) for leaf in floats(fn(*args)))
        return quick.jit(lambda *args: (fn(*args), jax.grad(total, (0, 1))(*args)))(*args)

    plan, tiled = planned(tile(fn, axis, 4), *args)
    for got, want in zip(*map(jax.tree.leaves, (both(tiled), both(fn))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    largest = max(a.nbytes for a in args)
    for run in filter(None, (plan.value, plan.gradient)):
        assert all(c.nbytes <= largest for loop in run.loops for c in loop.carries)


@pytest.mark.parametrize("rows", [N - 1, N, 2 * N])
@pytest.mark.parametrize("fn", [sinks, padded, queue, contrasted, causal_sinks, clipped])
def test_a_column_beside_those_of_all_pairs_is_no_array_of_them(fn, rows):
    args = tuple(map(jnp.asarray, (draw(rows, D), draw(N, D), draw(N, D))))
    scalar = lambda *args: 3 * sum(jnp.sum(leaf * jnp.cos(1.0 + leaf.ndim)) for leaf in floats(fn(*args)))
    plan, tiled = planned(tile(scalar, (None, 0, 0), 5), *args)
    both = (quick.jit(jax.value_and_grad(fn, (0, 1, 2)))(*args) for fn in (tiled, scalar))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    assert all(loop.largest <= rows * N * 8 / 4 for loop in plan.gradient.loops)


@pytest.mark.optimised  # XLA's untiled scatter compares such places with a bound cut off to their bits where it is not
@pytest.mark.parametrize("mode", ["drop", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8])
def test_places_in_few_bits_are_moved_by_more_than_these_hold(dtype, mode):
    """Of what elements were added to, a part: 300 columns of 500, and of 302."""
    last = 9999 if dtype == np.int32 and mode != "promise_in_bounds" else 127
    places, beside = jnp.asarray([0, 1, 100, 120, 5, last]).astype(dtype)[:, None], 300
    numbers = lax.ScatterDimensionNumbers((0,), (1,), (1,))
    added = lambda n: lax.scatter_add(jnp.zeros((24, beside + n)), places, jnp.ones((24, 6)), numbers, mode=mode)[:, n:]
    fn = lambda q, k: (jnp.tanh(q @ k.T) * (added(200) + 2 * added(2))).sum()
    q, k = map(jnp.asarray, (draw(24, D), draw(beside, D)))
    np.testing.assert_allclose(tile(fn, (None, 0), 3)(q, k), fn(q, k), rtol=1e-9)


def two_ahead(x, w, ids):
    """Multi-token prediction as in DeepSeek-V3: hidden states beside the embedding of the next token, and once more."""
    both = jnp.concatenate([x[:, :-1], w.T[ids[:, 1:]]], -1) @ jnp.cos(jnp.arange(2.0 * D * D)).reshape(2 * D, D)
    return nll(both[:, :-1] @ w, ids[:, 2:]).mean()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_part_of_a_part_is_put_back_step_by_step(n):
    args = tuple(map(jnp.asarray, (draw(B, S, D), draw(D, V), pick(B, S))))
    tiled = tile(two_ahead, (1, None, 1), n)
    both = (quick.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (tiled, two_ahead))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


# A few rows more than the argument has, which is as large as anything that may be whole but for a tile.
ENDS = {
    "the first and last row": lambda x: jnp.diff(jnp.concatenate([x[:1], x, x[-1:]]), axis=0),
    "edge": lambda x: jnp.diff(jnp.pad(x, ((1, 1), (0, 0)), mode="edge"), axis=0),
    "wrap": lambda x: jnp.diff(jnp.pad(x, ((1, 1), (0, 0)), mode="wrap"), axis=0),
    "reflect": lambda x: jnp.convolve(jnp.pad(x[:, 0], (2, 2), mode="reflect"), jnp.arange(5.0), "valid"),
    "rolling mean": lambda x: jnp.diff(jnp.cumsum(jnp.pad(x, ((1, 0), (0, 0))), 0)[::5], axis=0) / 5,
}


@pytest.mark.parametrize("name", ENDS)
def test_rows_are_put_at_both_ends(name):
    both = lambda fn: quick.jit(lambda x: (fn(x), jax.grad(lambda x: (fn(x) ** 2).sum())(x)))(jnp.asarray(draw(N, D)))
    for got, want in zip(both(tile(ENDS[name], 0, 4)), both(ENDS[name]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def differences(padded):
    return ((padded[2:, 1:-1] - padded[:-2, 1:-1]) ** 2).sum()


# Of a product that is larger than what it is made of, with rows and columns around it, or read some rows later.
AROUND = {
    "zeros": lambda h: differences(jnp.pad(h, 1)),
    "Laplacian": lambda h: (lambda p: jnp.abs(p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * h).mean())(
        jnp.pad(h, 1)
    ),
    "edge": lambda h: differences(jnp.pad(h, ((1, 1), (0, 0)), mode="edge")),
    "reflect": lambda h: differences(jnp.pad(h, ((1, 1), (0, 0)), mode="reflect")),
    "a ramp": lambda h: differences(jnp.pad(h, ((1, 1), (0, 0)), mode="linear_ramp")),
    "wrap": lambda h: differences(jnp.pad(h, ((1, 1), (0, 0)), mode="wrap")),
    "sums before": lambda h: (jnp.pad(jnp.cumsum(h, 0), ((1, 0), (0, 0)))[:-1] * jnp.sin(h)).sum(),
    "mean of those before": lambda h: ((h[1:] - jnp.cumsum(h, 0)[:-1] / jnp.arange(1, len(h))[:, None]) ** 2).mean(),
    "sums behind": lambda h: (lax.cumsum(h, reverse=True)[1:] * jnp.sin(h[:-1])).sum(),
    "a row and a column before": lambda h: (
        jnp.sin(h) * lax.pad(jnp.cumsum(h, 0), 0.0, [(1, -1, 0), (1, -1, 0)])
    ).sum(),
    "moving average": lambda h: ((lambda c: c[3:] - c[:-3])(jnp.cumsum(h, 0)) ** 2).sum(),
}


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", AROUND)
def test_rows_around_a_product_that_is_too_large_to_be_whole(name, n):
    args = jnp.asarray(draw(41, 8)), jnp.asarray(draw(8, 60))
    loss = lambda x, w: AROUND[name](x @ w)
    both = (quick.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (tile(loss, (0, None), n), loss))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_nan_and_infinities_outside_the_part_do_not_count():
    x = jnp.asarray(draw(B, S, D)).at[:, -1].set(jnp.nan)
    loss = lambda x, w: jax.nn.logsumexp((x @ w)[:, :-1], -1).sum() + (x @ w)[:, :-1].max()
    (got, grads), (want, expected) = (
        jax.value_and_grad(f, 1)(x, jnp.asarray(draw(D, V))) for f in (tile(loss, (1, None), 3), loss)
    )
    np.testing.assert_allclose(got, want, rtol=1e-9)
    np.testing.assert_allclose(grads, expected, rtol=1e-9)


def test_choices_prefer_what_comes_first_and_nan():
    for special in (3.0, jnp.nan, -jnp.inf):
        x = jnp.full((4, N), special).at[0, 7].set(9.0)
        fn = lambda x: jnp.concatenate([x[:, :2] * 0 + 3, jnp.sin(x) * 0 + x, jnp.full((4, 1), 3.0)], 1).argmax(1)
        np.testing.assert_array_equal(tile(fn, 1, 4, gather="none")(x), fn(x))


def test_parts_far_from_each_other_are_refused():
    with pytest.raises(TileError, match="20 rows before and 0 after each tile of 15"):
        tile(lambda x, w: (jnp.tanh(x @ w)[20:] - jnp.tanh(x @ w)[:-20]).sum(), (0, None), 4)(
            *map(jnp.asarray, (draw(2 * N, D), draw(D, V)))
        )


def test_places_out_of_bounds_are_filled_in():
    x, w, ids = map(jnp.asarray, (draw(N, D), draw(D, V), pick(N, high=V) + 5))
    picked = lambda logits: jnp.take_along_axis(logits, ids[:, None], 1, mode="fill")
    fn = lambda x, w: jnp.nan_to_num(picked(jnp.pad(x @ w, ((0, 0), (2, 0)))), nan=7.0)
    np.testing.assert_allclose(tile(fn, (None, 1), 3)(x, w), fn(x, w), rtol=1e-9)
    fn = lambda x, w: picked((x @ w)[:, 1:])
    with pytest.raises(TileError, match="takes a part of the cut axis"):  # rather than a 0 in place of nan
        tile(fn, (None, 1), 3)(x, w)
