"""Loops as they run: lengths that tiles do not divide, dtypes of accumulators, and products added chunk by chunk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import quick
from tests.helpers import equations
from transforms import TileError, tile
from transforms.tiling.frontend.flatten import flatten
from transforms.tiling.ir.placement import Span
from transforms.tiling.rules import RULES, dot

PROFILE = settings(max_examples=12, deadline=None, derandomize=True, database=None)


def scans(fn, *args):
    """The length of every loop, and the avals that it carries."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    found = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    return [(e.params["length"], [v.aval for v in e.outvars]) for e in found]


def gram(x):
    return jnp.sin(x).T @ x


# --------------------------------------------------------------------------------------------------------------- tails


@pytest.mark.parametrize(
    ("length", "options", "tiles"),
    [
        (12, {"n": 4}, [4]),
        (10, {"n": 4}, [3]),  # and a tail of 1
        (10, {"n": 6}, [5]),  # tiles of 2: five are enough
        (10, {"size": 7}, []),  # one tile and a tail
        (10, {"n": 1}, []),
        (10, {"size": 99}, []),
        (10, {"n": 10}, [10]),
        (1, {"n": 1}, []),
    ],
)
def test_every_element_is_in_one_tile(length, options, tiles):
    x = jnp.arange(3.0 * length).reshape(length, 3)

    def fn(x):
        return gram(x), jnp.cos(x) @ x.sum(0), (jnp.sin(x) @ jnp.ones((3, 9))).max()

    tiled = tile(fn, 0, **options)
    for got, want in zip(tiled(x), fn(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-5)
    assert {count for count, _ in scans(tiled, x)} == set(tiles)


@PROFILE
@given(st.integers(1, 12), st.integers(1, 14))
def test_cut_results_are_put_where_they_belong(length, size):
    x = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    got = quick.jit(tile(lambda x: ((x * x).T, jnp.repeat(x[None], 3, 0)), 1, size=size))(x)
    np.testing.assert_array_equal(got[0], (x * x).T)
    np.testing.assert_array_equal(got[1], np.repeat(x[None], 3, 0))


# -------------------------------------------------------------------------------------------------------------- dtypes


def carried(fn, *args, **options):
    """The dtypes of what the loops carry, by shape."""
    return {a.shape: a.dtype for _, avals in scans(tile(fn, n=4, **options), *args) for a in avals}


def test_sums_of_bfloat16_are_accumulated_in_float32():
    x = jnp.ones((10, 3), jnp.bfloat16)
    assert carried(gram, x, axis=0)[(3, 3)] == jnp.float32
    assert tile(gram, 0, 4)(x).dtype == jnp.bfloat16
    assert carried(gram, x, axis=0, accumulate=jnp.bfloat16)[(3, 3)] == jnp.bfloat16


def test_sum_of_bfloat16_loses_nothing_between_tiles():
    x = jnp.full((1024, 2), 1.0, jnp.bfloat16)
    fn = lambda x: jnp.einsum("ld,le->de", x, x)
    np.testing.assert_array_equal(tile(fn, 0, 256)(x), np.full((2, 2), 1024))
    rounded = tile(fn, 0, 1024, accumulate=jnp.bfloat16)(x)
    assert (np.asarray(rounded, np.float32) == 256).all()  # 256 + 1 is 256 in bfloat16


def test_gradients_of_bfloat16_are_accumulated_in_float32():
    w, x = jnp.ones((3, 5), jnp.bfloat16), jnp.ones((10, 3), jnp.bfloat16)
    grad = jax.grad(tile(lambda w, x: jnp.sin(x @ w).astype(jnp.float32).sum(), (None, 0), 4))
    assert {a.dtype for _, avals in scans(grad, w, x) for a in avals if a.shape == (3, 5)} == {jnp.dtype("float32")}
    assert grad(w, x).dtype == jnp.bfloat16


def test_a_tile_of_another_shape_than_planned_is_refused(monkeypatch):
    """One row would be broadcast to what it meets, and be a wrong number."""
    fn, x = lambda x: (jnp.sin(x) * x).sum(), jnp.ones((12, 3))
    one_row = lambda node, values, move, span: [jnp.sin(values[0][:1])]
    monkeypatch.setitem(RULES, "sin", dataclasses.replace(RULES["sin"], emit=one_row))
    with pytest.raises(TileError, match=r"cannot tile `sin` at .*: a tile of it is float32\[1,3\], .* has \[\d+, 3\]"):
        tile(fn, 0, 3)(x)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint32])
def test_integers_keep_their_dtype(dtype):
    x = jnp.arange(30).reshape(10, 3).astype(dtype)

    def fn(x):
        y = jnp.stack([x, 2 * x, x])  # larger than x, so not summed in one piece
        return y.sum(1, dtype=dtype), y.max(1), y.prod(1, dtype=dtype), x.T @ x

    assert set(carried(fn, x, axis=0).values()) == {jnp.dtype(dtype)}
    for got, want in zip(tile(fn, 0, 4)(x), fn(x), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_maxima_and_cut_results_keep_their_dtype():
    x = jnp.ones((10, 3), jnp.bfloat16)
    dtypes = carried(lambda x: ((x @ jnp.ones((3, 9), x.dtype)).max(0), jnp.sin(x)), x, axis=0)
    assert dtypes == {(9,): jnp.bfloat16, (10, 3): jnp.bfloat16}


def test_complex_sums_stay_complex():
    x = jnp.arange(30).reshape(10, 3) * (1 + 2j)
    assert carried(gram, x, axis=0)[(3, 3)] == jnp.complex64
    np.testing.assert_allclose(tile(lambda x: x.T @ x, 0, 4)(x), x.T @ x, rtol=1e-5)


def test_random_keys_can_be_results():
    keys = jax.random.split(jax.random.key(0), 10)
    split = lambda keys: jax.vmap(lambda key: jax.random.split(key, 2))(keys)
    got = tile(split, (0,), 4)(keys)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(split(keys)))


# ----------------------------------------------------------------------------------------------------- chunked products


@pytest.fixture
def chunks(monkeypatch):
    """Every product is added chunk by chunk, whatever its size, in chunks of this many bytes; counts them."""
    calls = []
    chunked = dot.chunked
    monkeypatch.setattr(dot, "SMALL", 0)
    monkeypatch.setattr(dot, "chunked", lambda *args: calls.append(1) or chunked(*args))

    def of(size):
        monkeypatch.setattr(dot, "CHUNK", size)
        return calls

    return of


@pytest.mark.crossed("spec", "size")
@pytest.mark.parametrize("spec", ["ld,lv->dv", "lv,ld->vd", "zld,zlv->zdv", "dl,lv->dv", "ldk,lv->dkv"])
@pytest.mark.parametrize("size", [1, 50, 80, 1 << 20])
def test_chunked_accumulation_equals_plain(spec, size, chunks):
    sizes = {"l": 4, "d": 3, "v": 7, "z": 2, "k": 2}
    rng = np.random.default_rng(0)
    sides = spec.split("->")[0].split(",")
    a, b = (jnp.asarray(rng.integers(-8, 8, [sizes[x] for x in side]), jnp.float32) for side in sides)
    calls = chunks(size)
    graph = flatten(jax.make_jaxpr(lambda a, b: jnp.einsum(spec, a, b))(a, b))
    (node,) = [n for n in graph.nodes if n.name == "dot_general"]
    operands = [a, b] if node.inputs[0] is graph.inputs[0] else [b, a]
    total = jnp.asarray(rng.integers(-8, 8, node.outputs[0].shape), jnp.float32)
    got = quick.jit(lambda total, *ops: RULES["dot_general"].accumulate(node, list(ops), total, Span(0, 4, 4)))
    np.testing.assert_array_equal(got(total, *operands), total + node.bind(operands)[0])
    assert calls


@pytest.mark.parametrize("size", [8, 50])
def test_chunked_gradient_equals_plain(size, chunks):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((3, 7), (10, 3)))
    loss = lambda w, x: jax.nn.logsumexp((x @ w).astype(jnp.float32), -1).mean()
    calls = chunks(1 << 30)
    gradient = lambda: np.asarray(quick.jit(jax.grad(tile(loss, (None, 0), 3)))(w, x), np.float32)
    plain = gradient()
    chunks(size)
    np.testing.assert_allclose(gradient(), plain, rtol=1e-2)
    assert calls


@pytest.mark.parametrize("batched", [False, True])
def test_a_large_narrow_operand_is_not_made_wide_as_a_whole(batched, chunks):
    """Neither in value nor in memory: XLA:CPU would upcast all of `w` before the loop."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((64, 4096), (128, 64)))
    w = w[None] if batched else w
    loss = lambda w, x: jax.nn.logsumexp(jnp.dot(x, w, preferred_element_type=jnp.float32), -1).mean()
    temporaries, found = [], []
    for size in (1 << 30, 1 << 16):
        chunks(size)
        grad = jax.grad(tile(loss, (None, 0), 16))
        compiled = jax.jit(jax.vmap(grad, (0, None)) if batched else grad).lower(w, x).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        found.append(np.asarray(compiled(w, x), np.float32))
    np.testing.assert_allclose(*found, rtol=1e-2, atol=1e-6)
    assert temporaries[1] < temporaries[0] - 0.8 * 4 * w.size


def test_a_large_narrow_operand_of_a_program_that_is_cut_again_is_upcast_as_a_whole(chunks):
    chunks(1 << 9)
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((64, 8), (8, 32)))
    loss = lambda h, w: jax.nn.logsumexp((h @ w).astype(jnp.float32), -1).sum()
    tiled = tile(loss, (0, None), 4, lowmem=True)
    found, wanted = (quick.jit(jax.grad(fn, (0, 1)))(h, w) for fn in (tiled, loss))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), atol=0.05, rtol=0.02)


def test_product_without_free_dimensions_is_added_plainly(chunks):
    calls = chunks(1)
    x = jnp.arange(10.0)
    np.testing.assert_allclose(tile(lambda x: jnp.sin(x) @ x, 0, 3)(x), jnp.sin(x) @ x, rtol=1e-5)
    assert not calls


def test_a_large_narrow_operand_in_chunks_inside_shard_map(chunks):
    calls = chunks(1 << 8)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((64, 16), (16, 64)))
    fn = lambda x, w: jnp.einsum("td,tv->dv", x[:, :2], jnp.tanh(x @ w), preferred_element_type=jnp.float32)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def summed(fn):
        local = lambda x, w: jax.lax.psum(fn(x, w), "d")
        return quick.jit(jax.shard_map(local, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P()))(x, w)

    np.testing.assert_allclose(summed(tile(fn, (0, None), 2)), summed(fn), atol=0.1)
    assert calls


# --------------------------------------------------------------------------------------------- dtypes of several kinds


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64, jnp.int32])
def test_what_goes_through_beside_a_sum_keeps_its_dtype(dtype):
    def fn(x, z):
        total, z = jax.lax.optimization_barrier((x.sum(0), z))
        return total, z, z + z

    x, z = jnp.arange(16.0).reshape(8, 2), jnp.asarray(np.arange(8), dtype)
    z = z * (1 + 0.5j) if dtype == jnp.complex64 else z
    for got, want in zip(tile(fn, 0, 2)(x, z), fn(x, z), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("within", ["checkpoint", "cond", "scan", "platform"])
def test_a_barrier_of_what_is_cut_and_what_is_whole(within):
    """In bodies too, where a whole result was looked for among the whole operands of all."""

    def product(x, w):
        x, w = jax.lax.optimization_barrier((x, w))
        return jnp.tanh(x @ w)

    around = {
        "checkpoint": jax.checkpoint(product),
        "cond": lambda x, w: jax.lax.cond(w[0, 0] > 0, product, lambda x, w: x @ w, x, w),
        "scan": lambda x, w: jax.lax.scan(lambda x, _: (product(x, w), None), x, length=2)[0],
        "platform": lambda x, w: jax.lax.platform_dependent(x, w, cpu=product, default=product),
    }
    fn = lambda x, w: around[within](x, w).sum()
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((10, 4), (4, 4)))
    found, expected = (quick.jit(jax.grad(f, (0, 1)))(x, w) for f in (tile(fn, (0, None), 4), fn))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_part_that_is_not_apart_ends_planning(monkeypatch):
    """A rule whose part of a scan is the scan again."""
    again = dataclasses.replace(RULES["scan"], part=lambda node, values, wanted: node.bind(values))
    monkeypatch.setitem(RULES, "scan", again)

    def fn(x, w):
        def step(w, _):
            kept, w = jax.lax.optimization_barrier((x, w))
            return w, kept @ w

        return jax.lax.scan(step, w, None, length=2)

    with pytest.raises(AssertionError, match=r"what is apart of `scan` at .*test_lower.* still depends on the tile"):
        tile(fn, (0, None), 4).plan(jnp.ones((8, 4)), jnp.ones((4, 4)))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_floats_of_eight_bits(dtype):
    """As a weight that no tile cuts, summed, and compared: some of these dtypes have no infinity."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), dtype) for s in ((8, 4), (4, 3)))
    x = x.at[:, 0].set(jnp.asarray(-100, dtype))
    wide = lambda x: x.astype(jnp.float32)
    fn = lambda x, w: (wide(x) @ wide(w), x.max(0), (-x).min(0), jnp.einsum("td,tk->dk", x, x))
    for got, want in zip(tile(fn, (0, None), 4)(x, w), fn(x, w), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-6)


# ------------------------------------------------------------------------------------------------- gradients of lookups

LOOKUPS = {  # of logits [N V], one of each row
    "take_along_axis": lambda z, y: jnp.take_along_axis(z, y[:, None], 1)[:, 0],
    "positions": lambda z, y: z[jnp.arange(len(z)), y],
    "from the end": lambda z, y: jnp.take_along_axis(z, y[:, None] - 7, 1)[:, 0],
    "clipped": lambda z, y: jnp.take_along_axis(z, y[:, None] + 3, 1, mode="clip")[:, 0],
    "out of bounds": lambda z, y: z.at[jnp.arange(len(z)), y + 3].get(mode="fill", fill_value=0),
    "turned": lambda z, y: jnp.take_along_axis(z.T, y[None], 0)[0],
    "of bytes": lambda z, y: jnp.take_along_axis(z, y[:, None].astype(jnp.uint8), 1)[:, 0],
    "by a scatter": lambda z, y: (jnp.zeros_like(z).at[jnp.arange(len(z)), y].add(z[:, 0]) * z).sum(1),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize(("axis", "n"), [((0, 0), 1), ((0, 0), 5), ((0, 0), 12), ((1, None), 3)])
def test_gradient_of_one_element_of_each_row_is_made_with_what_is_beside_it(lookup, axis, n):
    """A scatter into a tile of logits would be a pass of its own over all of them: it is a comparison in another."""
    rng = np.random.default_rng(0)
    logits, labels = jnp.asarray(rng.normal(size=(12, 7)), jnp.float32), jnp.asarray(rng.integers(7, size=12))

    def loss(logits, labels):
        z = jnp.tanh(logits)
        return 3 * (jax.nn.logsumexp(z, -1) - LOOKUPS[lookup](z, labels) ** 2).sum()

    both = [quick.jit(jax.value_and_grad(fn)).trace(logits, labels) for fn in (tile(loss, axis, n), loss)]
    for got, want in zip(*(traced.lower().compile()(logits, labels) for traced in both), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)
    of_all = [e for e in equations(both[0].jaxpr) if e.primitive.name == "scatter-add"]
    assert not [e for e in of_all if e.outvars[0].aval.ndim == 2 and n > 1]
