"""Attention in tiles of queries and keys: plain attention, and no products of tiles that nobody sees."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.planning.hlo import dot_flops
from tests.quick import QUICK
from zoo.models.attention.blockwise import blockwise_attention, walk
from zoo.models.layers import attention

LENGTH = 50
SEGMENTS = jnp.asarray(np.repeat([[1, 2, 3]] * 2, [20, 5, 25], axis=1), jnp.int32)
CASES = {
    "causal": (7, {}),
    "one": (1, {}),
    "more tiles than tokens": (80, {"window": 30}),
    "few tiles are seen": (12, {"window": 7}),
    "both ways": (5, {"causal": False}),
    "window, both ways": (12, {"causal": False, "window": 9}),
    "cap, documents, sinks": (7, {"cap": 3.0, "window": 12, "segments": SEGMENTS, "sinks": jnp.linspace(-1, 2, 4)}),
}


def gradients(run, sinks):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weights = (jax.random.normal(key, (2, LENGTH, n, 8)) for key, n in zip(keys, (4, 2, 2, 4), strict=True))
    loss = lambda q, k, v, sinks: (run(q, k, v, scale=0.3, sinks=sinks) * weights).sum()
    return jax.jit(jax.grad(loss, (0, 1, 2) if sinks is None else (0, 1, 2, 3)), **QUICK)(q, k, v, sinks)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("n", "how"), CASES.values(), ids=CASES)
def test_tiles_are_the_whole(n, how, traced):
    if traced and "window" not in how:
        pytest.skip("has no window")
    how = how | {"window": jnp.asarray(how["window"])} if traced else dict(how)
    segments, sinks = how.pop("segments", None), how.pop("sinks", None)
    plain = lambda *args, **rest: attention(*args, q_segments=segments, k_segments=segments, **how, **rest)
    tiles = lambda *args, **rest: blockwise_attention(*args, n=n, segments=segments, **how, **rest)
    for one, other in zip(gradients(tiles, sinks), gradients(plain, sinks), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


def test_a_sink_above_all_scores_has_a_gradient_where_the_last_tile_is_filled_up():
    """Given what a forward pass has kept, of which queries that are not there have none."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weights = (jax.random.normal(key, (1, 9, n, 8)) for key, n in zip(keys, (2, 2, 2, 2), strict=True))
    sinks = jnp.array([95.0, 1.0])
    run = lambda sinks, **more: blockwise_attention(q, k, v, n=4, scale=0.3, sinks=sinks, **more)
    seen, logs = run(sinks, keep=True)
    kept = logs, jnp.moveaxis((weights * seen).sum(-1), 1, -1)
    found = jax.grad(lambda sinks: (run(sinks, kept=kept) * weights).sum())(sinks)
    wanted = jax.grad(lambda sinks: (attention(q, k, v, scale=0.3, sinks=sinks) * weights).sum())(sinks)
    np.testing.assert_allclose(found, wanted, atol=5e-6)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_keep_no_mask_of_all_tiles(remat):
    """What is seen depends on counters alone, and JAX takes what no layer changes out of their loop."""

    def layer(x, weights):
        q = (x @ weights).reshape(2, 64, 4, 8)
        return x + blockwise_attention(q, q, q, n=8, scale=0.3).reshape(x.shape), None

    loss = lambda x, weights: jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)[0].sum()
    text = jax.jit(jax.grad(loss, (0, 1)), **QUICK).lower(jnp.ones((2, 64, 32)), jnp.ones((3, 32, 32))).compile()
    masks = [[int(size) for size in sizes.split(",")] for sizes in re.findall(r"pred\[([\d,]+)\]", text.as_text())]
    assert max(map(math.prod, masks)) <= 2 * 4 * 8 * 8


@pytest.mark.parametrize(("before", "behind"), [(7, 0), (5, 0), (2, 0), (0, 0), (1, 1), (7, 7)])
def test_every_tile_is_met_once_and_rows_from_their_beginning(before, behind):
    found = walk(8, before, behind)
    tiles = [found.at(turn, step) for turn in range(found.turns) for step in range(found.steps)]
    met = [(int(one.row), int(one.column)) for one in tiles if one.there]
    wanted = {(row, column) for row in range(8) for column in range(8) if -behind <= row - column <= before}
    assert len(met) == len(set(met)) and set(met) >= wanted
    assert [one.begins for one in tiles] == [i == 0 or one.row != tiles[i - 1].row for i, one in enumerate(tiles)]


@pytest.mark.parametrize("backward", [False, True])
def test_products_are_those_of_what_is_visible(backward):
    """Two of the forward pass, five of the backward pass, which has its own forward before it."""
    length, n = 2048, 16
    q, k = (jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2))
    run = lambda q, k, v: blockwise_attention(q, k, v, n=n, scale=1.0).sum()
    counted = dot_flops(jax.jit(jax.grad(run, (0, 1, 2)) if backward else run).lower(q, k, k).compile().as_text())
    visible = length * (length + 1) // 2 * 2 * 4 * 16
    assert visible * (7 if backward else 2) <= counted <= 1.1 * visible * (7 if backward else 2)
