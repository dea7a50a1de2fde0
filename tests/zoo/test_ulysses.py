"""Attention by heads on devices that share sequences: the values of one device, and no more bytes than it must send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments.planning.hlo import collectives
from tests.quick import QUICK
from tests.tiny import drawn, on_mesh
from tests.zoo.test_attention_kernels import ADAPTERS
from transforms import tile
from transforms.remat import remat
from transforms.sharding import AXES, make_mesh, partitions, place, sharding_of
from zoo.models.attention.ulysses import repeats
from zoo.models.layers import Ops, lookup

SHARED = {**AXES, "D": ("data", "context")}
SIZES = {"vocab_size": 64, "num_layers": 2, "embed_dim": 32, "mlp_dim": 32, "num_heads": 16, "head_dim": 4}
GEMMA = {"post_norms": True, "attn_softcap": 5.0, "window": 7, "attention_pattern": "LG"}
CONFIGS = {
    "groups": zoo.LlamaConfig(**SIZES, num_kv_heads=8),
    "windows, cap": zoo.GemmaConfig(**SIZES, **GEMMA, num_kv_heads=4),  # as kv heads are fewer than devices, repeated
    "one kv head": zoo.GemmaConfig(**SIZES, num_kv_heads=1),
    "sinks": zoo.GptOssConfig(**SIZES, num_kv_heads=8, num_experts=4, experts_per_token=2, window=4),
    "biases": zoo.Qwen2Config(**SIZES | {"num_heads": 24}, num_kv_heads=6),
    "no groups": zoo.GPT2Config(**SIZES | {"num_heads": 8}, num_kv_heads=8, context_length=32),
}
MESHES = {"context": (1, 1, 8), "fsdp": (2, 1, 4), "model": (1, 2, 4), "all": (2, 2, 2)}
LIGHT = [
    ("windows, cap", "context", "packed, by turns"),
    ("windows, cap", "fsdp", "numbers"),
    ("sinks", "all", "by turns"),
]
HOW = ("", "by turns", "packed, by turns", "numbers")
ROWS = [
    pytest.param(*row, marks=[] if row in LIGHT else [pytest.mark.heavy])
    for row in ((config, mesh, how) for config in CONFIGS for mesh in MESHES for how in HOW)
]


def ops(how):
    """In turns, some tokens at a time and tiled itself; or with windows as numbers."""
    if how == "numbers":
        return {"static_windows": True}
    if "by turns" not in how:
        return {}
    heads = lambda part, axes, groups: tile(part, axis=axes, n=groups)
    tokens = lambda part, axes: tile(part, axis=axes, size=16)
    return {"heads": heads, "tokens": tokens, "attention": ADAPTERS["tiled"], "keeps": True}


def gradients(model, ids, segments, how, options=QUICK):
    def loss(model, ids, segments):
        out = model.hidden(ids, ops=how, segments=segments, remat=remat("full"))
        waves = jnp.sin(jnp.arange(out.size)).reshape(out.shape)
        return (out * place(waves, jax.P(*partitions(out)))).sum()

    return jax.jit(jax.grad(loss), **options)(model, ids, segments)


@pytest.mark.parametrize(("name", "mesh", "how"), ROWS)
def test_models_have_the_gradients_of_one_device(name, mesh, how):
    model = drawn(CONFIGS[name])
    ids = np.random.default_rng(2).integers(3, 60, (2, 32), dtype=np.int32)
    segments = np.repeat([[1, 2, 3]] * 2, [10, 5, 17], axis=1).astype(np.int32) if "packed" in how else None
    wanted = gradients(model, ids, segments, None)
    made = make_mesh(*MESHES[mesh])
    with jax.set_mesh(made):
        where = sharding_of(made, "B S", ids.shape)
        put = lambda array: None if array is None else jax.device_put(array, where)
        found = gradients(on_mesh(model, made, SHARED), put(ids), put(segments), Ops(**ops(how), ulysses=True))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * (np.abs(other).max() + 1))


def sent(config, turns):
    """What each device sends in a layer's forward pass, by kind, in elements."""
    model = jax.eval_shape(lambda: zoo.model_class(config).init(config, key=jax.random.key(0)))
    made = make_mesh(1, context=8)
    with jax.set_mesh(made):
        ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32, sharding=sharding_of(made, "B S", (1, 1024)))
        typed = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(made, jax.P()))
        how = Ops(**ops("by turns") if turns else {}, ulysses=True)
        run = jax.jit(lambda model, ids: model.hidden(ids, ops=how))
        text = run.lower(jax.tree.map(typed, model), ids).compile().as_text()
    counted = {}
    for one in collectives(text, 8):
        counted[one.op] = counted.get(one.op, 0) + one.bytes * one.times / 4
    return counted


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("kv_heads", "times"), [(8, 1), (2, 4)])
def test_devices_send_heads_once_and_gather_no_keys(kv_heads, times, turns):
    config = zoo.LlamaConfig(**SIZES | {"num_layers": 1}, num_kv_heads=kv_heads)
    queries, keys = 1024 * 16 * 4 / 8, 1024 * kv_heads * times * 4 / 8
    assert sent(config, turns) == {"all-to-all": 7 / 8 * (2 * queries + 2 * keys)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "times"),
    [(32, 8, 8, 1), (32, 8, 4, 1), (32, 8, 16, 2), (32, 1, 8, 8), (24, 6, 4, 2), (20, 4, 10, 5), (8, 8, 1, 1)],
)
def test_kv_heads_are_repeated_as_seldom_as_can_be(heads, kv_heads, count, times):
    assert repeats(heads, kv_heads, count) == times
    assert (kv_heads * times) % count == 0 and heads % (kv_heads * times) == 0


def test_heads_that_devices_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"share 12 query heads among 8 devices: .*context_by=gather, or 4 of them"):
        repeats(12, 4, 8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_device_looks_its_own_words_up(dtype):
    """In 16 bits a frequent word's gradient is summed in float32."""
    table = jax.random.normal(jax.random.key(0), (16, 8), dtype)
    ids = jnp.where(jnp.arange(4096) % 8 == 0, 3, 5)[None].at[0, 7].set(99)
    made = make_mesh(1, context=8)
    with jax.set_mesh(made):
        where = sharding_of(made, "B S", ids.shape)
        args = jax.device_put(table, sharding_of(made, "V D", table.shape, SHARED)), jax.device_put(ids, where)
        run = jax.jit(lambda table, ids: lookup(table, ids, jnp.float32))
        rows, pull = jax.vjp(lambda table: run(table, args[1]), args[0])
        ones = np.ones(rows.shape, np.float32)
        ones[0, 7] = 0
        (gradient,) = pull(jax.device_put(ones, sharding_of(made, "B S D", ones.shape)))
    wanted = table.at[ids].get(mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_allclose(gradient[3], 512, rtol=1e-2)
    np.testing.assert_allclose(gradient[5], 4096 - 512 - 1, rtol=1e-2)
