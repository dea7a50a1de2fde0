"""Slices of bfloat16 on CPUs by their bits: no array is converted to float32 and back for each of its slices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from transforms import tile
from transforms.bits import IN_PLACE, slice_of, with_slice

pytestmark = pytest.mark.optimised
HALF = jnp.bfloat16
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.4e38, 1.0]  # the last but two is subnormal


def temporaries(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def same(found, expected):
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("dtype", [HALF, jnp.float32, jnp.int8])
def test_slices_are_those_of_lax_to_the_last_bit(dtype):
    x = jnp.asarray(np.resize(SPECIAL, (6, 8)) if dtype != jnp.int8 else np.arange(48).reshape(6, 8), dtype)
    part = x[::3] + x[1::3]
    for dim, size in ((0, 2), (1, 3)):
        taken = jax.jit(lambda x, i, size=size, dim=dim: slice_of(x, i, size, dim))(x, 3)
        same(taken, lax.dynamic_slice_in_dim(x, 3, size, dim))
    put = jax.jit(lambda x, part, i: with_slice(x, part, i, 0))(x, part, 3)
    same(put, lax.dynamic_update_slice_in_dim(x, part, 3, 0))


def test_bits_are_taken_where_xla_would_convert_the_whole_array():
    """By the compiled loop itself, of the JAX that is installed."""
    write = lambda i, x: lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, 8 * i, 8) + 1, 8 * i, 0)
    loop = jax.jit(lambda x: lax.fori_loop(0, 64, write, x)).lower(jax.ShapeDtypeStruct((512, 256), HALF)).compile()
    assert ("f32[512,256]" in loop.as_text()) == (not IN_PLACE)


def test_tiles_read_and_write_bfloat16_in_place():
    x = jax.ShapeDtypeStruct((1024, 256), HALF)
    taken = temporaries(tile(lambda x: jnp.tanh(1.5 * x) + x, 0, 64), x)
    assert taken <= 4 * x.size // 64 * HALF.dtype.itemsize, taken  # a few tiles: no copy of what is read, nor written


def head():
    """A loss of hidden states and weights in bfloat16, and what it is given."""
    tokens, embed, vocab = 512, 128, 8192
    loss = lambda h, w, y: optax.softmax_cross_entropy_with_integer_labels((h @ w).astype(jnp.float32), y).mean()
    shapes = [jax.ShapeDtypeStruct(shape, HALF) for shape in ((tokens, embed), (embed, vocab))]
    return loss, [*shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32)]


@pytest.mark.parametrize(("axis", "options"), [((None, 1, None), {}), ((0, None, 0), {"lowmem": True})])
def test_weights_in_bfloat16_that_are_cut_are_not_copied(axis, options):
    """Where the vocabulary is cut, alone or too; a slice of logits takes as much as the weights and half as much."""
    loss, (hidden, weights, labels) = head()
    gradients = jax.value_and_grad(tile(loss, axis, 8, **options), (0, 1))
    taken, size = temporaries(gradients, hidden, weights, labels), weights.size * HALF.dtype.itemsize
    assert taken <= (2 if options else 3) * size, taken / size  # a copy is one more


def test_sums_in_bfloat16_take_no_array_of_float32():
    """What one asks for with `accumulate`: the gradient of the weights is summed where it ends up."""
    loss, shapes = head()
    (tokens, embed), (_, vocab) = (x.shape for x in shapes[:2])
    taken = {}
    for dtype in (jnp.float32, HALF):
        tiled = tile(loss, (0, None, 0), 8, accumulate=dtype)
        taken[dtype] = temporaries(jax.value_and_grad(tiled, (0, 1)), *shapes)
    logits = tokens // 8 * vocab
    assert taken[HALF] <= taken[jnp.float32] - embed * vocab * 2 + logits * 4
    assert taken[HALF] <= 1.25 * (logits * (4 + 2) + embed * vocab * 2)
