"""Gradients formed piece by piece: exact, with no accumulator of their size, for one product more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.planning.hlo import dot_flops
from tests import quick
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic


def mean_loss(hidden, table, labels):
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, labels).mean()


def perplexity(hidden, table, labels):
    return jnp.exp(mean_loss(hidden, table, labels))


def softcapped(hidden, table, labels):
    logits = 30 * jnp.tanh(hidden @ table.T / 30)
    normaliser = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (normaliser - picked + 1e-3 * normaliser**2).mean()


def token_losses(hidden, table, labels):
    return jnp.square(optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, labels))


def draw(tokens=100, embed=8, vocab=1100, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden, table = (jnp.asarray(rng.normal(size=(rows, embed)), dtype) for rows in (tokens, vocab))
    return hidden, table, jnp.asarray(rng.integers(0, vocab, tokens))


@pytest.mark.parametrize("loss", [mean_loss, perplexity, softcapped, token_losses])
def test_gradients_equal_untiled(loss):
    args = draw()
    total = lambda fn: lambda *args: fn(*args).sum()
    got = quick.jit(jax.value_and_grad(total(tile(loss, (0, None, 0), 3, lowmem=True)), (0, 1)))(*args)
    want = quick.jit(jax.value_and_grad(total(loss), (0, 1)))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.measured
def test_no_accumulator_is_as_large_as_its_gradient():
    tokens, embed, vocab = 256, 128, 32768
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((tokens, embed), "float32"), ((vocab, embed), "float32"))]
    shapes.append(jax.ShapeDtypeStruct((tokens,), "int32"))

    def compiled(**options):
        fn = jax.value_and_grad(tile(mean_loss, (0, None, 0), 8, **options), (0, 1))
        return jax.jit(fn).lower(*shapes).compile()

    low = compiled(lowmem=True)
    assert low.memory_analysis().temp_size_in_bytes < 4 * vocab * embed / 3
    assert dot_flops(low.as_text()) == 4 * 2 * tokens * embed * vocab
    assert dot_flops(compiled().as_text()) == 3 * 2 * tokens * embed * vocab


@pytest.mark.optimised
def test_narrow_gradients_are_rounded_once():
    hidden, table, labels = draw(dtype=jnp.bfloat16)
    exact = quick.jit(jax.grad(mean_loss, 1))(hidden.astype("float32"), table.astype("float32"), labels)
    error = lambda grad: float(jnp.linalg.norm(grad.astype("float32") - exact) / jnp.linalg.norm(exact))
    low = jax.grad(tile(mean_loss, (0, None, 0), 4, lowmem=True), 1)(hidden, table, labels)
    assert low.dtype == jnp.bfloat16
    assert error(low) <= 1.2 * error(jax.grad(mean_loss, 1)(hidden, table, labels))


@pytest.mark.optimised
def test_nothing_whole_to_differentiate():
    fn = lambda x: jnp.tanh(x).sum()
    got = jax.grad(tile(fn, 0, 3, lowmem=True))(jnp.arange(7.0))
    np.testing.assert_allclose(got, jax.grad(fn)(jnp.arange(7.0)), rtol=1e-6)


@jax.custom_jvp
def ruled(x):
    return jnp.sin(x)


@jax.custom_jvp
def slope(x):
    return 2 * jnp.cos(x)


ruled.defjvp(lambda primals, tangents: (ruled(*primals), slope(*primals) * tangents[0]))
slope.defjvp(lambda primals, tangents: (slope(*primals), 5 * jnp.exp(*primals) * tangents[0]))


def solved(weight, x):
    return jnp.sin(jnp.linalg.solve(jnp.sin(weight) + 4 * jnp.eye(4), x.T)).sum()


def by_rules(weight, x):
    return (ruled(x @ weight) ** 2).sum()


def entropy(weight, x):
    log_probs = jax.nn.log_softmax(x @ weight)
    return -(jnp.exp(log_probs) * log_probs).sum()


SECOND = {
    "forward over reverse": lambda fn, weight, x: jax.jvp(jax.grad(fn), (weight, x), (jnp.cos(weight), x**2))[1],
    "reverse over reverse": lambda fn, weight, x: jax.grad(lambda w: (jax.grad(fn)(w, x) * jnp.cos(w)).sum())(weight),
    "third": lambda fn, weight, x: jax.jvp(lambda w: jax.hessian(fn)(w, x), (weight,), (weight,))[1],
}


@pytest.mark.parametrize("way", SECOND)
@pytest.mark.parametrize("fn", [solved, by_rules, entropy], ids=lambda fn: fn.__name__)
def test_derivatives_of_gradients_are_those_of_the_function_not_of_the_loops(fn, way):
    """Which have no rules of derivatives any more: a solve reads factors, that are taken for constants."""
    rng = np.random.default_rng(0)
    weight, x = (jnp.asarray(rng.normal(size=(rows, 4)), jnp.float32) for rows in (4, 12))
    want = quick.jit(SECOND[way], static_argnums=0)(fn, weight, x)
    got = jax.jit(SECOND[way], static_argnums=0)(tile(fn, (None, 0), 3, lowmem=True), weight, x)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * float(jnp.abs(want).max()))


def of_all(weight, x):
    return jax.nn.logsumexp(jnp.sin(x) @ weight)


def gated(weight, x):
    both = x @ weight
    return (both[:, :5] * jax.nn.sigmoid(both[:, 5:])).repeat(2, 1).max(-1).mean()


@pytest.mark.parametrize("size", [3, 5])  # of ten: the last one shorter, or not
@pytest.mark.parametrize("fn", [of_all, gated], ids=lambda fn: fn.__name__)
def test_a_second_cut_may_leave_a_shorter_piece(fn, size, monkeypatch):
    """Of a tile within a tile, and of `lowmem`, whose pieces are as short here."""
    monkeypatch.setattr("transforms.tiling.autodiff.program.SMALLEST", size)
    monkeypatch.setattr("transforms.tiling.autodiff.program.PIECE", 1)
    rng = np.random.default_rng(0)
    weight, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 10), (12, 4)))
    within = lambda weight, x: tile(fn, (1, None), size=size, gather="any")(weight, x)
    want = quick.jit(jax.value_and_grad(fn, (0, 1)))(weight, x)
    for tiled in (tile(within, (None, 0), 2, gather="any"), tile(fn, (None, 0), 2, lowmem=True, gather="any")):
        got = jax.jit(jax.value_and_grad(tiled, (0, 1)))(weight, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.measured
def test_products_with_the_hessian_are_formed_piece_by_piece_too():
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((1024, 64), "float32"), ((8192, 64), "float32"))]
    shapes.append(jax.ShapeDtypeStruct((1024,), "int32"))

    def memory(lowmem):
        gradient = jax.grad(tile(mean_loss, (0, None, 0), 8, lowmem=lowmem), (0, 1))
        product = lambda *args: jax.jvp(lambda *two: gradient(*two, args[2]), args[:2], args[:2])[1]
        return jax.jit(product).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert memory(True) < 0.9 * memory(False)


def test_what_cannot_be_cut_again_is_refused():
    def sorted_loss(hidden, table):
        return (jnp.sort(jnp.tanh(hidden @ table.T), axis=-1) * jnp.arange(table.shape[0])).mean()

    hidden, table, _ = draw()
    with pytest.raises(TileError, match="lowmem=True, which cuts dimension 0 of the argument float32"):
        jax.grad(tile(sorted_loss, (0, None), 4, lowmem=True), 1)(hidden, table)
    jax.eval_shape(functools.partial(tile(sorted_loss, (0, None), 4, lowmem=True)), hidden, table)  # no gradient
