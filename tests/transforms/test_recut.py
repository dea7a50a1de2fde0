"""Pairs of rows that meet cut along different dimensions are made along the same one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import nn

from tests.helpers import assert_no_large, assert_tiles
from transforms import tile

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
