"""Rows of the cut axis that become one element: chunks, patches, strides and pools. Tiles hold whole groups of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from tests.helpers import assert_no_large, assert_tiles
from transforms import tile

pytestmark = pytest.mark.symbolic

L, D = 48, 6  # rows, features
IMAGES = ("NHWC", "HWIO", "NHWC")


def chunks(x):
    q = jnp.tanh(x).reshape(L // 4, 4, D)
    scores = nn.softmax(jnp.einsum("nqd,nkd->nqk", q, q))
    return jnp.einsum("nqk,nkd->nqd", scores, q).reshape(L, D).sum(0)


def retention(x):
    """A state over chunks, and products inside them."""

    def step(state, chunk):
        return state + chunk.T @ chunk, jnp.tril(chunk @ chunk.T) @ chunk + chunk @ state

    return lax.scan(step, jnp.zeros((D, D)), jnp.tanh(x).reshape(L // 4, 4, D))[1].reshape(L, D)


def convolve(x, w, stride, padding="SAME"):
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=IMAGES)


def pool(x, op, init, size, stride):
    return lax.reduce_window(x, init, op, (1, size, size, 1), (1, stride, stride, 1), "VALID")


def pooled(x, w):
    h = pool(nn.relu(convolve(x, w, 1)), lax.max, -jnp.inf, 2, 2)
    return jnp.sin(convolve(h, w, 1)).mean((1, 2))


ROWS = {
    "merged": lambda x: jnp.tanh(jnp.sin(x).reshape(L // 4, 4 * D)) ** 2,
    "chunks": chunks,
    "retention": retention,
    "sums of chunks": lambda x: jnp.cumsum(jnp.sin(x).reshape(L // 4, 4, D).sum(1), 0),
    "neighbouring chunks": lambda x: (lambda h: h - jnp.pad(h, ((1, 0), (0, 0)))[:-1])(
        jnp.sin(x).reshape(-1, 2, D).sum(1)
    ),
    "map in batches": lambda x: lax.map(lambda row: jnp.tanh(row) * 2, x, batch_size=4),
    "every second": lambda x: jnp.tanh(x)[1::2] * jnp.sin(x)[::2],
    "woven": lambda x: jnp.stack([jnp.sin(x[::2]), jnp.cos(x[1::2])], 1).reshape(L, D),
}
IMAGE = {
    "patches": lambda x, w: nn.gelu(convolve(x, w, 3, "VALID")).sum(0),
    "stride 2": lambda x, w: nn.gelu(convolve(jnp.sin(x), w, 2)).sum((0, 1)),
    "two strides": lambda x, w: convolve(nn.relu(convolve(nn.relu(convolve(x, w, 2)), w, 1)), w, 2).mean((1, 2)),
    "maxima": pooled,
    "means": lambda x, w: jnp.sin(pool(jnp.cos(x), lax.add, 0.0, 2, 2) * w.sum()).sum((0, 1)),
    "transposed": lambda x, w: lax.conv_transpose(
        jnp.sin(convolve(x, w, 2)), w, (2, 2), "SAME", dimension_numbers=IMAGES
    ).sum((1, 2)),
}


@pytest.mark.parametrize("name", ROWS)
def test_groups_of_rows_stay_together(name):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(L, D)), jnp.float32)
    assert_tiles(ROWS[name], 0, (5, 12), (x,), fast=True)


@pytest.mark.parametrize("name", IMAGE)
def test_windows_with_strides(name):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 24, 12, 3), (3, 3, 3, 3)))
    assert_tiles(IMAGE[name], (1, None), (4, 2) if name != "two strides" else 3, (x, w), fast=True)


def test_a_tile_holds_whole_groups():
    """A tile is a little longer than was asked for, up to twice; the plan says so. Longer groups are refused."""
    x = jnp.ones((480, 6))
    wide = jnp.ones((6, 64))
    scores = lambda x, w: (jnp.tanh(x @ w).reshape(-1, 8, 64) ** 2).sum((1, 2))
    tiled = tile(scores, (0, None), 96)
    assert "60 tiles of 8" in str(tiled.plan(x, wide))
    assert_no_large(jax.make_jaxpr(tiled)(x, wide), 480 * 64)
    with pytest.raises(ValueError, match="keeps 8 rows together, and tiles have 3"):
        tile(scores, (0, None), 160)(x, wide)


def test_one_of_every_few_rows_takes_no_memory():
    x, w = jnp.ones((480, 6)), jnp.ones((6, 64))
    grad = jax.grad(lambda x: tile(lambda x, w: (jnp.tanh(x @ w)[::2] ** 2).mean(), (0, None), 16)(x, w))
    assert_no_large(jax.make_jaxpr(grad)(x), 240 * 64)
