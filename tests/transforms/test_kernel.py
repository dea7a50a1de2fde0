"""`pallas_call` in a tiled function: kernels whose grid walks the cut axis run on tiles of whole blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests import quick
from tests.helpers import FLOAT32, assert_same, assert_tiles, equations
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic

T, D, B = 24, 16, 4
X, W = np.random.default_rng(0).normal(size=(T, D)).astype(np.float32), np.eye(D, dtype=np.float32) + 0.1


def call(kernel, grid, ins, outs, shapes, **options):
    """A `pallas_call` that an interpreter runs, of float32 results."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return pl.pallas_call(kernel, grid=grid, in_specs=ins, out_specs=outs, out_shape=shapes, interpret=True, **options)


def rows(x, w):
    """Blocks of rows, and of columns; a mean of each block shows where blocks begin."""

    def kernel(x, w, y, mean):
        y[...] = jnp.sin(x[...] @ w[...])
        mean[...] = jnp.broadcast_to(x[...].mean(0)[:8], (2 * B, 8)) * (1 + pl.program_id(1))

    ins = [pl.BlockSpec((B, D), lambda i, j: (i, 0)), pl.BlockSpec((D, 8), lambda i, j: (0, j))]
    outs = [pl.BlockSpec((B, 8), lambda i, j: (i, j)), pl.BlockSpec((None, 2 * B, 8), lambda i, j: (0, i, j))]
    length = x.shape[0]
    return call(kernel, (-(-length // B), D // 8), ins, outs, [x.shape, (1, 2 * length, D)])(x, w)


def turned(x, w):
    """The cut axis last and its index second; operands that are whole and are read block by block."""

    def kernel(x, rest, y):
        y[...] = x[...] * 2 + rest[...]

    ins = [pl.BlockSpec((D // 2, B), lambda i, j: (i, j)), pl.BlockSpec((1, B), lambda i, j: (0, j))]
    outs = [pl.BlockSpec((D // 2, B), lambda i, j: (i, j))]
    whole = jnp.cumsum(jnp.ones((1, T)) * w[0, 0], 1)
    return call(kernel, (2, T // B), ins, outs, [(D, T)])(jnp.sin(x).T, whole)


def added(x, w):
    """Sums over an inner index, in a scratch."""

    def kernel(x, w, y, total):
        @pl.when(pl.program_id(1) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...] @ w[...]
        y[...] = total[...]

    ins = [pl.BlockSpec((B, 8), lambda i, k: (i, k)), pl.BlockSpec((8, D), lambda i, k: (k, 0))]
    outs = [pl.BlockSpec((B, D), lambda i, k: (i, 0))]
    scratch = [pl.MemoryRef(jax.core.ShapedArray((B, D), jnp.float32), pl.ANY)]
    return call(kernel, (T // B, D // 8), ins, outs, [x.shape], scratch_shapes=scratch)(x, w)


@jax.custom_vjp
def differentiated(x, w):
    return rows(x, w)[0]


differentiated.defvjp(
    lambda x, w: (differentiated(x, w), (x, w)),
    lambda kept, g: (rows(kept[0], kept[1])[0] * g @ kept[1].T, kept[0].T @ (rows(g, kept[1])[0])),
)


def lengths(fn, axis, size):
    """The lengths of the grids of a tiled function's kernels."""
    traced = jax.make_jaxpr(tile(fn, axis, size=size))(X, W)
    return {e.params["grid_mapping"].grid for e in equations(traced) if e.primitive.name == "pallas_call"}


@pytest.mark.parametrize("size", [4, 8, 20])
@pytest.mark.parametrize("fn", [rows, turned])
def test_a_tile_of_blocks_is_the_same_call_with_a_shorter_grid(fn, size):
    assert_same(quick.jit(tile(fn, (0, None), size=size))(X, W), quick.jit(fn)(X, W), FLOAT32)
    index = int(fn is turned)
    assert {grid[index] for grid in lengths(fn, (0, None), size)} == {size // B, *([T % size // B] if T % size else [])}


@pytest.mark.parametrize(
    ("fn", "size"), [(added, 8), (differentiated, 12), (lambda x, w: differentiated(x[:22], w), 8)]
)
def test_scratch_derivatives_and_edges(fn, size):
    if fn is added:
        assert_same(quick.jit(tile(fn, (0, None), size=size))(X, W), quick.jit(fn)(X, W), FLOAT32)
        assert lengths(fn, (0, None), size) == {(size // B, 2)}
    else:
        assert_tiles(fn, (0, None), T // size, (X, W), fast=True)


def test_an_axis_that_is_no_multiple_of_the_blocks():
    x = X[:22]
    assert_same(quick.jit(tile(rows, (0, None), size=8))(x, W), quick.jit(rows)(x, W), FLOAT32)


def blocked(place=lambda i: (i, 0), back=lambda i: (i, 0), shape=(T, D), asks=False, block=(B, D)):
    def kernel(x, y):
        y[...] = x[...] * (pl.program_id(0) if asks else 1)

    return lambda x: call(kernel, (T // B,), [pl.BlockSpec(block, place)], [pl.BlockSpec((B, D), back)], [shape])(x)[0]


def summed(x):
    """Sums over the outer index, each in a scratch of its own that the kernel zeroes itself."""

    def kernel(x, y, total):
        total[...] = jnp.where(pl.program_id(0) == 0, 0, total[...]) + x[...]
        y[...] = total[...]

    spec = [pl.BlockSpec((B, 8), lambda k, i: (i, k))]
    scratch = [pl.MemoryRef(jax.core.ShapedArray((B, 8), jnp.float32), pl.ANY)]
    return call(kernel, (D // 8, T // B), spec, spec, [(T, D)], scratch_shapes=scratch)(x)[0]


def counted(x):
    def kernel(x, y):
        y[...] = x[...].sum(0, keepdims=True)

    spec = lambda rows: [pl.BlockSpec((rows, D), lambda i: (i, 0))]
    return call(kernel, (T // B,), spec(B), spec(1), [(T // B, D)])(x)[0]


def beside(x):
    """Blocks of rows, each with all of them."""

    def kernel(x, whole, y):
        y[...] = x[...] + whole[...].sum(0)

    specs = [pl.BlockSpec((B, D), lambda i: (i, 0)), pl.BlockSpec((T, D), lambda i: (0, 0))]
    return call(kernel, (T // B,), specs, specs[:1], [(T, D)])(x, x)[0]


def told(x):
    """Blocks of rows in an order that an operand tells."""

    def kernel(order, x, y):
        y[...] = x[...] + order[pl.program_id(0)]

    spec, shape = pl.BlockSpec((B, D), lambda i, order: (i, 0)), jax.ShapeDtypeStruct((T, D), jnp.float32)
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(T // B,), in_specs=[spec], out_specs=spec)
    run = pl.pallas_call(kernel, grid_spec=grid, out_shape=shape, interpret=True)
    return run(x[:, 0].astype(int), jnp.ones((T, D)))


REFUSED = {
    "is told by it what to do": (told, 8),
    "does not take it in blocks": (blocked(place=lambda i: (i * B, 0), block=(pl.Element(B), pl.Element(D))), 8),
    "at along the cut axis": (beside, 8),
    "may hand something from block to block": (summed, 8),
    "whose operands have other numbers of blocks": (counted, 8),
    "asks which block along the cut axis it is at": (blocked(asks=True), 8),
    "writes to one place from several blocks": (blocked(back=lambda i: (0, 0), shape=(B, D)), 8),
    "are not numbered by an index of its grid": (blocked(place=lambda i: (5 - i, 0)), 8),
    "takes other blocks than those that the grid is at": (blocked(back=lambda i: (5 - i, 0)), 8),
    "blocks, 4 long, do not make up tiles that are 6 long": (blocked(), 6),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_kernels_run_on_whole_operands(reason):
    fn, size = REFUSED[reason]
    tiled = lambda **options: tile(lambda x: fn(jnp.sin(x)) * 2, 0, size=size, **options)
    with pytest.raises(TileError, match=f"cannot tile `pallas_call` at .*it is a kernel .*{reason}"):
        tiled(gather="none")(X)
    assert_same(tiled()(X), fn(jnp.sin(X)) * 2, FLOAT32)


SUMS = {
    "of what is made of one": lambda x: blocked()(jnp.tile(x.sum(0), (T, 1)) * 2),
    "of one": lambda x: blocked(place=lambda i: (0, 0))(x.T @ x),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_finished_before_a_kernel(name):
    assert_same(tile(SUMS[name], 0, size=8)(X), SUMS[name](X), FLOAT32)


def test_in_a_region_tiles_that_cut_blocks_are_refused():
    fn = lambda x: jax.lax.scan(lambda x, _: (blocked()(x), None), x, None, length=2)[0]
    assert_same(tile(fn, 0, size=8)(X), fn(X), FLOAT32)
    with pytest.raises(TileError, match=r"4 long, do not make up tiles that are 6 long.\n  Pass size=, a multiple"):
        tile(fn, 0, size=6)(X)
