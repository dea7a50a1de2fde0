"""Nothing overflows where texts are millions of tokens: by shape at that size, and by value where that is cheap."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments import configs
from experiments.step import objectives, tiling
from tests.quick import QUICK
from transforms import tile
from transforms.remat import remat
from transforms.sharding import make_mesh
from zoo.kernels.attention import tiled
from zoo.models import layers
from zoo.models.layers import Ops

LONG = 2**23
SIZES = {"vocab_size": 512, "embed_dim": 4096, "mlp_dim": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def sub_jaxprs(jaxpr):
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner := getattr(one, "jaxpr", one), "eqns"):
                    yield from sub_jaxprs(inner)


def gradients(seq, batch=1, **how):
    """The jaxpr of the gradients of one layer as wide as Llama-3.1-8B's, of sequences of so many tokens."""
    config = zoo.LlamaConfig(num_layers=1, **SIZES)
    model = jax.eval_shape(lambda: zoo.Llama.init(config, key=jax.random.key(0), dtype=jnp.bfloat16))
    ops = Ops(**tiling.slices(configs.Tiling(heads=True, tokens=4096), config), attention=tiled(seq // 16))
    loss = lambda model, ids: model.hidden(ids, ops=ops, remat=remat("full"), **how).astype(jnp.float32).sum()
    return jax.make_jaxpr(jax.grad(loss))(model, jax.ShapeDtypeStruct((batch, seq), jnp.int32))


def test_no_product_has_more_elements_than_32_bits_count():
    """At 8,388,608 tokens, of which all heads' queries would be 2^35."""
    closed = gradients(LONG)
    products = [e for jaxpr in sub_jaxprs(closed.jaxpr) for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    sizes = [var.aval.size for equation in products for var in (*equation.invars, *equation.outvars)]
    assert len(sizes) > 30 and max(sizes) < 2**31


def test_positions_are_computed_and_no_constant_of_the_program():
    closed = gradients(LONG)
    consts = [np.asarray(const).nbytes for const in closed.consts]
    literals = [
        var.val.nbytes
        for jaxpr in sub_jaxprs(closed.jaxpr)
        for equation in jaxpr.eqns
        for var in equation.invars
        if isinstance(getattr(var, "val", None), np.ndarray)
    ]
    assert sum(consts) + sum(literals) < 2**20


def test_places_and_offsets_of_tiles_are_whole_numbers_of_32_bits_or_more():
    """And no float counts tokens: float16 and bfloat16 cannot, float32 can to 2^24."""
    for jaxpr in sub_jaxprs(gradients(LONG).jaxpr):
        for equation in jaxpr.eqns:
            if (
                equation.primitive.name == "iota"
                and equation.outvars[0].aval.shape[equation.params["dimension"]] > 2**8
            ):
                assert equation.outvars[0].aval.dtype in (jnp.int32, jnp.uint32)


def exact(x, frequency):
    """The rotation in float64."""
    angle = np.arange(x.shape[1])[:, None, None] * np.asarray(frequency, np.float64)
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("counted", [2**24, 2**10])
def test_the_rotation_that_counts_beyond_float32_is_the_same_rotation(counted, monkeypatch):
    monkeypatch.setattr(layers, "COUNTED", counted)
    x = jax.random.normal(jax.random.key(0), (1, 2**13, 1, 8))
    frequency = np.asarray([1.0, 0.31, 0.1, 0.013], np.float32)
    bound = 2e-3 if counted == 2**24 else 1e-3  # an angle of 2^13 is rounded to 2^-11
    np.testing.assert_allclose(layers.rope(x, frequency), exact(x, frequency), atol=bound)


def test_neighbours_beyond_2_to_24_are_turned_by_different_angles():
    length, frequency = 2**24 + 2**12, np.ones(1, np.float32)
    places = jnp.asarray([2**24, 2**24 + 1, length - 1])[None, :, None, None]
    found = np.asarray(layers._angle(places, frequency, length)).ravel() % (2 * np.pi)
    wanted = np.asarray([2**24, 2**24 + 1, length - 1], np.float64) % (2 * np.pi)
    np.testing.assert_allclose(found, wanted, atol=5e-3)
    shape = jax.eval_shape(lambda x: layers.rope(x, frequency), jax.ShapeDtypeStruct((1, length, 1, 2), jnp.bfloat16))
    assert shape.shape == (1, length, 1, 2)


def test_a_mean_over_more_tokens_than_float32_counts():
    """2^25 losses with a mask, 4,096 at a time, as the head forms them."""
    count = 2**25
    values = (jnp.arange(count, dtype=jnp.int32) % 1021).astype(jnp.float32)
    mask = (jnp.arange(count, dtype=jnp.int32) % 3 != 0).astype(jnp.float32)
    mean = tile(objectives._mean, axis=(0, 0), size=4096)
    wanted = np.asarray(values, np.float64)[np.asarray(mask) > 0].mean()
    assert float(jax.jit(mean)(values, mask)) == pytest.approx(wanted, rel=2e-6)


def test_words_that_no_table_has_are_none_however_many_tokens_there_are(monkeypatch):
    """Rows of a 16-bit table in slices of its width, its distinct words fewer than tokens; and gradients in float32."""
    monkeypatch.setattr(layers, "SPREAD_BYTES", 4096)
    table = jax.random.normal(jax.random.key(0), (5, 64)).astype(jnp.bfloat16)
    ids = jnp.asarray([[0, 4, 4, -1, 3, 7, 0, 100, 2]] * 2)
    run = functools.partial(jax.jit, **QUICK)(lambda table: layers.lookup(table, ids, jnp.bfloat16))
    rows = np.asarray(run(table), np.float32)
    known = np.asarray((ids >= 0) & (ids < 5))
    assert np.isnan(rows[~known]).all()
    np.testing.assert_array_equal(rows[known], np.asarray(table, np.float32)[np.asarray(ids)[known]])
    count = jax.grad(lambda table: jnp.where(known[..., None], layers.lookup(table, ids, jnp.float32), 0).sum())(table)
    np.testing.assert_array_equal(np.asarray(count, np.float32)[:, 0], [4, 0, 2, 2, 4])


def test_a_device_that_is_a_mesh_sums_words_in_slices_too(monkeypatch):
    monkeypatch.setattr(layers, "SPREAD_BYTES", 4096)
    with jax.set_mesh(make_mesh(1, devices=jax.devices()[:1])):
        table, ids = jnp.ones((5, 64), jnp.bfloat16), jnp.zeros((2, 9), jnp.int32)
        loss = lambda table: layers.lookup(table, ids, jnp.bfloat16).sum()
        found = re.findall(r"f32\[2,9,(\d+)", str(jax.make_jaxpr(jax.grad(loss))(table)))
        assert set(found) == {"32"}
        assert jax.jit(jax.grad(loss))(table)[:, 0].tolist() == [18, 0, 0, 0, 0]


def test_every_token_of_a_long_text_may_be_the_same_word():
    """256 sums of one in bfloat16 would stand still at 256."""
    table, ids = jnp.ones((3, 8), jnp.bfloat16), jnp.full((1, 1000), 1)
    found = jax.grad(lambda table: layers.lookup(table, ids, jnp.float32).sum())(table)
    assert found[1, 0] == 1000 and not found[::2].any()
