"""Pairs of rows that meet cut along different dimensions are made along the same one, which is that of the cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import nn

from tests.helpers import assert_no_large, assert_tiles
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic

S, D = 48, 6  # rows, features


def attend(x, w):
    return nn.softmax((x @ w[0]) @ (x @ w[1]).T) @ (x @ w[2])


def contrast(x, w):
    """NT-Xent-like: pairs of the same label are the only ones that an `eq` cuts the other way."""
    h = x @ w[0]
    cosine = (h[None] * h[:, None]).sum(-1) / jnp.sqrt((h**2).sum(-1))
    labels = jnp.arange(S) % 5 + 0 * x[:, 0].astype(int)
    same = labels[:, None] == labels[None]
    scores = jnp.where(same, cosine, -1e30)
    return jnp.mean(nn.logsumexp(cosine, -1) - nn.logsumexp(scores, -1))


FUNCTIONS = {
    "mean": lambda x, w: attend(x, w).mean(),
    "sum over rows": lambda x, w: attend(x, w).sum(0),
    "mean of causal": lambda x, w: nn.dot_product_attention(*(x @ w)[:, None, :, None], is_causal=True).mean(),
    "twice": lambda x, w: attend(attend(x, w), w).sum(),
    "contrast": contrast,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_constant_cotangent_follows_what_it_meets(name):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((S, D), (3, D, D)))
    assert_tiles(FUNCTIONS[name], (0, None), 7, (x, w), fast=True)
    grad = jax.grad(lambda *a: jnp.sum(tile(FUNCTIONS[name], (0, None), 12)(*a)), (0, 1))
    assert_no_large(jax.make_jaxpr(grad)(x, w), S * S)


def smoothed(w, h):
    """Of as many tokens as there are words."""
    return -(nn.log_softmax(h @ w) * (0.9 * nn.one_hot(jnp.arange(S) * 5 % S, S) + 0.1 / S)).sum(-1).mean()


def both_ways(k, q):
    logits, pairs = q @ k.T, jnp.eye(S)
    return (nn.log_softmax(logits, 0) * pairs).sum() + (nn.log_softmax(logits, 1) * pairs).sum()


# Of keys that are cut and as many queries that are not: all pairs are as long as the axis both ways.
diagonal = lambda a: jax.lax.platform_dependent(
    a, default=lambda a: a[jnp.arange(S), jnp.arange(S)], rocm=lambda a: jnp.einsum("ii->i", a)
)
SQUARE = {
    "in-batch negatives": lambda k, q: -(nn.log_softmax(q @ k.T) * jnp.eye(S)).sum(-1).mean(),
    "both ways": both_ways,
    "smoothed labels": lambda k, q: smoothed(k.T, q),
    "by places": lambda k, q: -nn.log_softmax(q @ k.T)[jnp.arange(S), jnp.arange(S)].sum(),
    "diagonal": lambda k, q: -jnp.diag(nn.log_softmax(q @ k.T)).mean(),
    "diagonal of any platform": lambda k, q: -diagonal(nn.log_softmax(q @ k.T)).mean(),
    "diagonal both ways": lambda k, q: -sum(jnp.diag(nn.log_softmax(q @ k.T, d)) for d in (0, 1)).mean(),
    "trace": lambda k, q: -jnp.trace(nn.log_softmax(q @ k.T)),
    "but the pairs": lambda k, q: nn.logsumexp(jnp.where(jnp.eye(S, dtype=bool), -jnp.inf, q @ k.T), -1).sum(),
    "hinge": lambda k, q: nn.relu(1 + q @ k.T - (q * k).sum(-1, keepdims=True)).max(-1).sum(),
}


@pytest.mark.parametrize("n", [3, S])
@pytest.mark.parametrize("name", SQUARE)
def test_of_two_dimensions_of_its_length_the_axis_is_cut(name, n):
    k, q = (jnp.asarray(np.random.default_rng(seed).normal(size=(S, D)), jnp.float32) for seed in (0, 1))
    fn = SQUARE[name]
    both = (jax.value_and_grad(lambda *a, f=f: 3 * f(*a), (0, 1))(k, q) for f in (tile(fn, (0, None), n), fn))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert_no_large(jax.make_jaxpr(jax.grad(tile(fn, (0, None), n), (0, 1)))(k, q), S * S)


def neighbours(k, q):
    """Stochastic neighbour embedding: pairs by rows, the axis is their second dimension."""
    distances = lambda a: ((a[None] - a[:, None]) ** 2).sum(-1)
    p, log_q = nn.softmax(-distances(q), 1), nn.log_softmax(-distances(k), 1)
    return (p * (jnp.log(p + 1e-9) - log_q)).sum()


def kernel(a, b):
    return jnp.exp(-((a[:, None] - b[None]) ** 2).sum(-1))


# Arrays of all pairs of what is whole, which have nothing to do with the axis, or meet it along either dimension.
BESIDE = {
    "neighbour embedding": neighbours,
    "sparse Gaussian process": lambda k, q: (
        kernel(k, q) @ jnp.linalg.solve(kernel(q, q) + 0.1 * jnp.eye(S), jnp.sin(q[:, 0]))
    ).sum(),
    "decay": lambda k, q: nn.log_softmax(
        jnp.tanh(k @ k.T).T - jnp.cumsum(nn.softplus(q[:, 0])[None] * jnp.tri(S), 1), 1
    ).sum(),
    "sorted": lambda k, q: nn.logsumexp(jnp.sort(jnp.sin(q @ q.T), 1) + jnp.tanh(k @ k.T).T, 1).sum(),
    "rows in another order": lambda k, q: (jnp.sin(q @ q.T)[jnp.arange(S) * 5 % S] * k[:, 0]).sum(),
    "convolved along the other dimension": lambda k, q: (
        jax.lax.conv_general_dilated(jnp.sin(q @ q.T)[:, None], jnp.array([[[0.3, 0.5, 0.1]]]), (1,), "SAME")[:, 0]
        * k[:, :1]
    ).sum(),
    "a part of a longer array": lambda k, q: (nn.softmax(q @ k.T) * nn.one_hot(jnp.arange(S), S + 1)[:, 1:]).sum(),
    "a part of a product": lambda k, q: (
        nn.softmax(q @ k.T) * jnp.cos(jnp.arange(S * (S + 1.0))).reshape(S, -1)[:, 1:]
    ).sum(),
}


MAY_BE_REFUSED = "decay", "rows in another order", "a part of a longer array", "a part of a product"


@pytest.mark.parametrize("n", [2, S])
@pytest.mark.parametrize("name", BESIDE)
def test_what_is_as_long_as_the_axis_and_is_not_the_axis(name, n):
    k, q = (jnp.asarray(np.random.default_rng(seed).normal(size=(S, 2)), jnp.float32) for seed in (0, 1))
    fn = BESIDE[name]
    refused = n == S or name in MAY_BE_REFUSED
    for run in (lambda f: f(k, q), lambda f: jax.grad(lambda *a: 3 * f(*a), (0, 1))(k, q)):
        try:
            found = run(tile(fn, (0, None), n))
        except TileError as error:
            assert refused and "defect" not in str(error)
        else:
            for got, want in zip(*map(jax.tree.leaves, (found, run(fn))), strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
