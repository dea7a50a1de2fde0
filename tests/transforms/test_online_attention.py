"""Attention cut over its keys is one loop, and its gradient one more; over its queries; over both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.planning.hlo import dot_flops
from tests import quick
from tests.helpers import assert_tiles
from tests.transforms.test_online import draw, exact, loops, temp
from transforms import tile

F32, Array = jnp.float32, jax.ShapeDtypeStruct
KEYS, QUERIES = (None, 0, 0), (0, None, None)
Q, K, H = 6, 10, 4


def plain(q, k, v):
    return jax.nn.softmax(q @ k.T / 2, -1) @ v


def causal(q, k, v):
    later = jnp.arange(k.shape[0]) > jnp.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    return jax.nn.softmax(jnp.where(later, -jnp.inf, q @ k.T), -1) @ v


def causal_from_the_start(q, k, v):  # the last keys are masked for all queries
    later = jnp.arange(k.shape[0]) > jnp.arange(q.shape[0])[:, None]
    return jax.nn.softmax(jnp.where(later, -1e30, q @ k.T), -1) @ v


def window(q, k, v):  # the first queries see keys of the first tile alone
    apart = jnp.arange(q.shape[0])[:, None] + 1 - jnp.arange(k.shape[0])
    return jax.nn.softmax(jnp.where((apart >= 0) & (apart < 3), q @ k.T, -jnp.inf), -1) @ v


def softcap(q, k, v):
    scores = 3 * jnp.tanh(q @ k.T / 3)
    later = jnp.arange(k.shape[0]) > jnp.arange(q.shape[0])[:, None] + 4
    return jax.nn.softmax(jnp.where(later, jnp.finfo(scores.dtype).min, scores), -1) @ v


def alibi(q, k, v):
    return jax.nn.softmax(q @ k.T - 0.1 * jnp.abs(jnp.arange(k.shape[0]) - jnp.arange(q.shape[0])[:, None]), -1) @ v


def by_hand(q, k, v):
    scores = q @ k.T
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ v) / weights.sum(-1, keepdims=True)


def by_log_softmax(q, k, v):
    return jnp.exp(jax.nn.log_softmax(q @ k.T, -1)) @ v


def with_a_sink(q, k, v):
    scores = q @ k.T
    top = jnp.maximum(scores.max(-1, keepdims=True), 0)
    weights = jnp.exp(scores - top)
    return weights @ v / (weights.sum(-1, keepdims=True) + jnp.exp(-top))


def softmax_where(q, k, v):  # the first query sees nothing
    seen = jnp.arange(k.shape[0]) < 2 * jnp.arange(q.shape[0])[:, None]
    return jax.nn.softmax(q @ k.T, -1, where=seen) @ v


def two_temperatures(q, k, v):
    scores = q @ k.T
    return (jax.nn.softmax(scores, -1) - 0.5 * jax.nn.softmax(2 * scores, -1)) @ v


def normalised_keys(q, k, v):
    q, k = (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) for x in (q, k))
    return jax.nn.softmax(q @ k.T, -1) @ v


def grouped_heads(q, k, v):
    scores = jnp.einsum("qgh,kh->gqk", q.reshape(q.shape[0], 2, -1), k[:, :2])
    return jnp.einsum("gqk,kv->qgv", jax.nn.softmax(scores, -1), v)


def gated(q, k, v):
    return jax.nn.sigmoid(q @ k.T - 1) @ v


ATTENTION = [
    plain, causal, causal_from_the_start, window, softcap, alibi, by_hand, by_log_softmax, with_a_sink, softmax_where,
    two_temperatures, normalised_keys, grouped_heads, gated,
]  # fmt: skip


def operands():
    return draw(Q, H), draw(K, H), draw(K, 3)


@pytest.mark.parametrize("fn", ATTENTION)
def test_attention_over_keys(fn):
    exact(fn, KEYS, operands(), n=4)
    # The difference of two softmaxes is no sum under one maximum.
    assert loops(fn, KEYS, operands(), n=4)[0] == (2 if fn is two_temperatures else 1)


@pytest.mark.parametrize("fn", ATTENTION)
def test_attention_over_queries(fn):
    exact(fn, QUERIES, operands(), n=4)


@pytest.mark.parametrize("fn", [softcap, by_hand])
def test_attention_over_keys_within_attention_over_queries(fn):
    exact(lambda q, k, v: tile(fn, KEYS, 3)(q, k, v), QUERIES, operands(), n=2)
    exact(lambda q, k, v: tile(fn, QUERIES, 2)(q, k, v), KEYS, operands(), n=3)


LIBRARY = {
    "plain": lambda q, k, v: jax.nn.dot_product_attention(q, k, v),
    "causal": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    "window": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, local_window_size=(2, 1)),
    "bias": lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, bias=0.3 * jnp.cos(jnp.arange(36)).reshape(1, 1, 6, 6)
    ),
    "mask": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=(jnp.arange(36) % 5 > 0).reshape(1, 1, 6, 6)),
    "lengths": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([4, 2])),
    "grouped": lambda q, k, v: jax.nn.dot_product_attention(q, k[:, :, :1], v[:, :, :1], scale=0.7),
}


@pytest.mark.parametrize("kind", LIBRARY)
def test_attention_of_the_library(kind):
    args = tuple(draw(2, 6, 2, 4) + shift for shift in (0, 0.1, 0.2))
    for axis in ((None, 1, 1), (1, None, None)):
        assert_tiles(LIBRARY[kind], axis, 4, args, fast=True, tolerance=3e-5)
    assert loops(LIBRARY[kind], (None, 1, 1), args)[0] == 1


def test_attention_in_bfloat16():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (draw(16, 8), draw(512, 8), draw(512, 8)))
    want = np.asarray(plain(*(x.astype(F32) for x in (q, k, v))))
    got = jax.jit(tile(plain, KEYS, 64))(q, k, v)
    assert got.dtype == jnp.bfloat16
    tiled, untiled = (np.abs(np.asarray(x, np.float32) - want).max() for x in (got, plain(q, k, v)))
    assert tiled <= 1.5 * untiled


S = 256
LONG = (Array((S, 16), F32),) * 3
PRODUCT = 2 * S * S * 16


@pytest.mark.measured
@pytest.mark.parametrize("fn", [plain, causal, softcap])
def test_attention_over_keys_has_the_products_of_the_untiled_function(fn):
    tiled = tile(fn, KEYS, 8)
    assert dot_flops(jax.jit(tiled).lower(*LONG).compile().as_text()) == 2 * PRODUCT
    gradient = jax.grad(lambda q, k, v: (tiled(q, k, v) ** 2).sum(), (0, 1, 2))
    assert dot_flops(jax.jit(gradient).lower(*LONG).compile().as_text()) == 7 * PRODUCT  # 2 forward, 5 backward
    assert loops(fn, KEYS, LONG, n=8) == (1, 2)


@pytest.mark.measured
@pytest.mark.parametrize("fn", [plain, causal, softcap])
def test_memory_of_attention_over_keys(fn):
    long = (Array((1024, 16), F32),) * 3
    tiled = tile(fn, KEYS, 16)
    assert temp(tiled, *long) <= temp(fn, *long) / 7  # two arrays of a tile, of sixteen
    loss = lambda f: jax.grad(lambda q, k, v: (f(q, k, v) ** 2).sum(), (0, 1, 2))
    assert temp(loss(tiled), *long) <= temp(loss(fn), *long) / 8


def heads(q, k, v):
    return jnp.einsum("nqk,knh->qnh", jax.nn.softmax(jnp.einsum("qnh,knh->nqk", q, k) / 8), v)


def library(q, k, v):
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


@pytest.mark.parametrize(
    ("fn", "shape"), [(plain, (64, 16)), (causal, (64, 16)), (heads, (64, 3, 8)), (library, (64, 3, 8))]
)
def test_narrow_attention_of_as_many_queries_as_keys(fn, shape):
    """In float32 the output would be larger than any input, and has a dimension as long as the cut axis."""
    args = list(jnp.asarray(np.random.default_rng(0).standard_normal((3, *shape)), jnp.bfloat16))
    assert loops(fn, KEYS, args) == (1, 2)
    gradient = lambda fn: lambda *args: jax.vjp(fn, *args)[1](jnp.cos(args[0]))
    with jax.enable_x64():
        exact = quick.jit(gradient(fn))(*(a.astype(jnp.float64) for a in args))
        error = lambda found: [np.linalg.norm(np.asarray(a, float) - b) for a, b in zip(found, exact, strict=True)]
        tiled, untiled = (error(jax.jit(gradient(f))(*args)) for f in (tile(fn, KEYS, 4), fn))
        assert all(a <= 1.4 * b for a, b in zip(tiled, untiled, strict=True))
