"""Random bits made tile by tile: the same bits as untiled, wherever the cut is, whatever they are made into."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import quick
from tests.helpers import assert_no_large
from transforms import tile
from transforms.tiling.ir.placement import Span, Tiled
from transforms.tiling.rules.random import positions

L, D = 10, 3
KEY = jax.random.key(7)
MAKES = {
    "bits": lambda key, shape: jax.random.bits(key, shape),
    "uniform": jax.random.uniform,
    "normal": jax.random.normal,
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.3, shape),
    "randint": lambda key, shape: jax.random.randint(key, shape, 0, 100),
    "gumbel": jax.random.gumbel,
    "truncated": lambda key, shape: jax.random.truncated_normal(key, -1, 1, shape),
    "keys": lambda key, shape: jax.random.key_data(jax.random.split(key, shape)).sum(-1),
    "folded": lambda key, shape: jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i), shape[1:]))(
        jnp.arange(shape[0])
    ),
    "nested": lambda key, shape: jax.vmap(lambda k: jax.random.normal(k, shape[1:]))(jax.random.split(key, shape[0])),
}
INTEGERS = ("bits", "bernoulli", "randint", "keys", "folded")  # the same however they are compiled


def added(make, key, shape):
    return lambda x: jnp.where(x > 0, make(key, shape), make(key, shape) + 1)


@pytest.mark.redundant("shape", "cut")
@pytest.mark.parametrize(("shape", "cut"), [((L, D), 0), ((D, L), 1), ((2, L, D), 1)])
@pytest.mark.parametrize("name", MAKES)
def test_tiles_have_the_same_values(name, shape, cut):
    fn, x = added(MAKES[name], KEY, shape), np.ones(shape, np.float32)
    jit = quick.jit if name in INTEGERS else jax.jit
    np.testing.assert_array_equal(jit(tile(fn, cut, 4))(x), jit(fn)(x))


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_bits_of_every_width(width):
    with jax.enable_x64(True):
        for shape, cut in (((L,), 0), ((2, L, D), 1)):
            fn, x = added(lambda key, shape: jax.random.bits(key, shape, f"uint{width}"), KEY, shape), np.ones(shape)
            np.testing.assert_array_equal(quick.jit(tile(fn, cut, 4))(x), quick.jit(fn)(x))  # integers, however made


def test_bits_of_a_dimension_that_the_cut_axis_is_a_part_of():
    def fn(x):
        return x * jax.random.normal(KEY, x.shape).reshape(x.shape), x.reshape(-1) * jax.random.normal(KEY, (x.size,))

    for shape, cut in (((4, D), 0), ((D, 4), 1)):
        for a, b in zip(tile(fn, cut, 3)(jnp.ones(shape)), fn(jnp.ones(shape)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_dropout_makes_no_mask_of_the_whole():
    def fn(x, w):
        hidden = jnp.tanh(x @ w)
        return (hidden * jax.random.bernoulli(KEY, 0.9, hidden.shape)).sum()

    args = (jnp.ones((64, 2)), jnp.ones((2, 32)))
    assert_no_large(jax.make_jaxpr(jax.value_and_grad(tile(fn, (0, None), 8)))(*args), 64 * 32)


@pytest.mark.redundant("partitionable")
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
@pytest.mark.parametrize("partitionable", [True, False])
def test_generators_that_do_not_count_positions(impl, partitionable):
    key = jax.random.key(3, impl=impl)

    def fn(x, keys):
        cut = jax.vmap(lambda k, x: x * jax.random.uniform(k, x.shape))(keys, x)
        return cut, jax.random.normal(key, x.shape) * x, jax.random.gamma(key, x)

    with jax.threefry_partitionable(partitionable):
        x, keys = jnp.ones((L, D)), jax.random.split(key, L)
        for a, b in zip(tile(fn, 0, 4)(x, keys), fn(x, keys), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(4, 2**31, 3), (2**31, 6), (3, 5, 7)])
def test_positions_beyond_32_bits(shape):
    cut = Tiled(int(np.argmax(shape)))
    start, length = shape[cut.dim] - 3, 2
    local = tuple(length if d == cut.dim else size for d, size in enumerate(shape))
    index = np.indices(local, np.uint64)
    index[cut.dim] += np.uint64(start)
    want = sum(i * np.uint64(int(np.prod(shape[d + 1 :], dtype=np.uint64))) for d, i in enumerate(index))
    high, low = positions(shape, cut, Span(start, length, shape[cut.dim]))
    np.testing.assert_array_equal(high, (want >> np.uint64(32)).astype(np.uint32))
    np.testing.assert_array_equal(low, want.astype(np.uint32))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_a_scan_along_the_axis_may_carry_a_key(make):
    def noisy(x, w):
        def step(key, row):
            key, sub = jax.random.split(key)
            return key, jnp.tanh(jnp.where(jax.random.bernoulli(sub, 0.8, row.shape), row / 0.8, 0) @ w)

        return jax.lax.scan(step, make(0), x)[1]

    x, w = jax.random.normal(jax.random.key(1), (12, 4)), jax.random.normal(jax.random.key(2), (4, 3))
    total = lambda x, w: noisy(x, w).sum()
    gradient = lambda fn: jax.grad(lambda x, w: fn(x, w).sum(), 1)
    run = quick.jit(lambda rows, total, *args: [f(*args) for f in (rows, total, gradient(rows))], static_argnums=(0, 1))
    found, wanted = run(tile(noisy, (0, None), 3), tile(total, (0, None), 3), x, w), run(noisy, total, x, w)
    for got, want, atol in zip(found, wanted, (0, 0, 1e-6), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5 if atol else 1e-6, atol=atol)
