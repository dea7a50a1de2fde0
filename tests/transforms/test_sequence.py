"""Self-attention cut over its own sequence: a block, and a whole scanned and checkpointed model, to the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_tiles
from tests.transforms.transformer import block, draw_tokens, parameters, training_loss
from transforms import tile

BLOCK, MODEL = (1, None), (None, None, 1, 1, 1)
gradient = functools.partial(jax.value_and_grad, argnums=(0, 1))


def first_layer(E=16):
    return jax.tree.map(lambda w: w[0], parameters(E)[0])


def draw(*shape):
    return np.random.default_rng(0).normal(size=shape)


def temp(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_block_is_exact():
    with jax.enable_x64(True):
        assert_tiles(block, BLOCK, 4, (draw(2, 10, 16), first_layer()), dtype=jnp.float64, fast=True)


@pytest.mark.parametrize("remat", [False, True])
def test_loss_of_a_block_is_exact(remat):
    run = jax.checkpoint(block) if remat else block
    with jax.enable_x64(True):
        args = (draw(2, 10, 16), first_layer())
        assert_tiles(lambda x, w: (run(x, w) ** 2).mean(), BLOCK, (7, 2), args, dtype=jnp.float64, fast=True)


@pytest.mark.parametrize("n", [2, 4])
def test_model_is_exact(n):
    mask = jnp.asarray(np.arange(10) < np.array([[10], [3]]), jnp.float32)
    with jax.enable_x64(True):
        args = (*parameters(), *draw_tokens(2, 10), mask)
        assert_tiles(training_loss, MODEL, n, args, dtype=jnp.float64, fast=True)


@pytest.mark.measured
def test_memory_of_a_block_falls_with_the_tile():
    args = (jax.ShapeDtypeStruct((1, 512, 16), jnp.float32), first_layer())
    loss = lambda x, w: (block(x, w) ** 2).mean()
    assert temp(gradient(tile(loss, BLOCK, 16)), *args) < temp(gradient(loss), *args) / 8


@pytest.mark.measured
def test_memory_of_a_model_falls_with_the_tile():
    S = 512
    args = (*parameters(), *draw_tokens(1, S), jnp.ones((1, S)))
    untiled = temp(gradient(training_loss), *args)
    two, eight = (temp(gradient(tile(training_loss, MODEL, n)), *args) for n in (2, 8))
    assert eight < untiled / 3 and eight < 0.5 * two, (untiled, two, eight)
