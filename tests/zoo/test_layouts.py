"""The models on meshes: hidden states, logits and gradients are those of one device, whichever way the mesh cuts."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments.planning.hlo import collectives
from tests.quick import QUICK
from tests.tiny import drawn, on_mesh
from transforms.sharding import AXES, make_mesh, partitions, sharding_of
from zoo.kernels.attention import tiled
from zoo.models.layers import attention, lookup

COPIED = {letter: axes for letter, axes in AXES.items() if letter != "D"}  # parameters whole on the data axis
LAYOUTS = {
    "data": ((8, 1, 1, 1), COPIED),
    "fsdp": ((8, 1, 1, 1), AXES),
    "fsdp over the vocabulary": ((8, 1, 1, 1), AXES | {"V": ("data",)}),
    "model": ((1, 8, 1, 1), COPIED),
    "context": ((1, 1, 8, 1), COPIED),
    "fsdp and model": ((4, 2, 1, 1), AXES),
    "fsdp and context": ((4, 1, 2, 1), AXES),
    "all": ((2, 2, 2, 1), AXES),
}
SIZES = {
    "vocab_size": 64,
    "num_layers": 2,
    "embed_dim": 16,
    "mlp_dim": 32,
    "num_heads": 8,
    "head_dim": 4,
}
CONFIGS = {
    "gemma": zoo.GemmaConfig(
        **SIZES, num_kv_heads=4, post_norms=True, attn_softcap=5.0, final_softcap=5.0, window=3, attention_pattern="LG"
    ),
    "qwen2": zoo.Qwen2Config(**SIZES, num_kv_heads=2),  # fewer kv heads than devices, biases
    "mixtral": zoo.MixtralConfig(**SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2),
}


def _model(name, dtype=jnp.float32):
    return drawn(CONFIGS[name], dtype)


def _batch():
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16), dtype=np.int32)
    return tokens, np.roll(tokens, -1, 1)


def _loss(model, tokens, targets, **how):
    hidden = model.hidden(tokens, **how)
    log_probs = jax.nn.log_softmax(model.logits(hidden))
    loss = -jnp.where(jnp.arange(log_probs.shape[-1]) == targets[..., None], log_probs, 0).sum(-1).mean()
    return loss + model.forward(tokens, zoo.ForwardPass()).balance if isinstance(model, zoo.Mixture) else loss


_gradients = eqx.filter_jit(eqx.filter_value_and_grad(_loss), **QUICK)  # for all: of one device, it is compiled once


def _same_on_mesh(model, sizes, axes, atol=2e-6, rtol=1e-6, **how):
    batch = _batch()
    value, grads = _gradients(model, *batch, **how)
    mesh = make_mesh(*sizes)
    with jax.set_mesh(mesh):
        spread = on_mesh(model, mesh, axes)
        where = sharding_of(mesh, "B S", batch[0].shape, axes)
        place = lambda array: jax.device_put(array, where)
        how = jax.tree.map(place, how)
        got, got_grads = _gradients(spread, *map(place, batch), **how)
        for parameter, grad in zip(jax.tree.leaves(spread), jax.tree.leaves(got_grads), strict=True):
            assert jax.typeof(grad) == jax.typeof(parameter)
    np.testing.assert_allclose(got, value, rtol=rtol)
    for one, other in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), atol=atol)


OTHERS = {
    "gpt2": zoo.GPT2Config(**SIZES | {"embed_dim": 32}, num_kv_heads=8, context_length=16),
    "gpt_oss": zoo.GptOssConfig(**SIZES, num_kv_heads=4, num_experts=4, experts_per_token=2, window=4),
    "llama4": zoo.Llama4Config(
        **SIZES, num_kv_heads=2, num_experts=4, dense_mlp_dim=32, expert_pattern="DE", chunk=4, growth_length=4,
        rope_pattern="RN", attention_pattern="LG",
    ),
}  # fmt: skip


STATES = {
    "deepseek_v3": zoo.DeepSeekV3Config(
        **SIZES | {"head_dim": 6}, num_kv_heads=8, nope_head_dim=4, rope_head_dim=2, v_head_dim=4, kv_rank=8, q_rank=8,
        num_experts=4, experts_per_token=2, first_dense=1, dense_mlp_dim=32,
    ),
    "qwen3_next": zoo.Qwen3NextConfig(
        **SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2, shared_mlp_dim=32, layer_pattern="DA",
        delta_key_heads=2, delta_value_heads=4, delta_key_dim=4, delta_value_dim=4, rotary_fraction=0.5,
    ),
    "qwen3_5": zoo.Qwen35Config(
        **SIZES, num_kv_heads=2, layer_pattern="DA",
        delta_key_heads=2, delta_value_heads=4, delta_key_dim=4, delta_value_dim=4, rotary_fraction=0.5,
    ),
    "lfm2_moe": zoo.LfmMoeConfig(
        **SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2, first_dense=1, dense_mlp_dim=32,
        layer_pattern="CA",
    ),
    "granite4_moe": zoo.Granite4MoeConfig(
        **SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2, shared_mlp_dim=32, layer_pattern="MA",
        mamba_heads=8, mamba_head_dim=4, mamba_state_dim=8, mamba_groups=2, residual_multiplier=0.5,
    ),
    "gemma3n": zoo.Gemma3nConfig(
        **SIZES | {"num_layers": 4}, num_kv_heads=2, window=4, attention_pattern="LG", sharing_layers=2, num_streams=3,
        inputs_vocab_size=64, inputs_dim=4, laurel_rank=4, sparsity=(0.5, 0.0, 0.0, 0.0),
    ),
    "gemma4": zoo.Gemma4Config(
        **SIZES | {"num_layers": 4}, num_kv_heads=2, window=4, attention_pattern="LG", sharing_layers=2, inputs_dim=4,
        inputs_vocab_size=64, global_head_dim=8, wide_sharing=True,
    ),
    "gemma4_moe": zoo.Gemma4MoeConfig(
        **SIZES, num_kv_heads=4, window=4, attention_pattern="LG", global_head_dim=8,
        global_kv_heads=2, keys_are_values=True, num_experts=4, experts_per_token=2, dense_mlp_dim=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("layout", ["all", pytest.param("fsdp", marks=pytest.mark.heavy)])
def test_latents_and_states_are_the_same_on_a_mesh(name, layout):
    """To what their norms leave of the roundings, and scores that nothing divides."""
    seed = 3 if name in ("gemma3n", "gemma4") else 0  # of 0 their roundings are the larger ones
    model = drawn(STATES[name], seed=seed)
    _same_on_mesh(model, *LAYOUTS[layout], atol=1e-4 if name == "gemma4" else 2e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "layout"), [("gpt2", "all"), ("gpt_oss", (2, 2, 1, 2)), ("llama4", "all")])
def test_learned_positions_and_biased_experts_are_the_same_on_a_mesh(name, layout):
    """Biases and positions begin at zero, which would hide what happens to them."""
    leaves, tree = jax.tree.flatten(drawn(OTHERS[name]))
    rng = np.random.default_rng(1)
    leaves = [
        jnp.asarray(leaf + np.float32(0.05) * rng.standard_normal(leaf.shape, np.float32))
        for leaf in map(np.asarray, leaves)
    ]
    sizes, axes = LAYOUTS[layout] if isinstance(layout, str) else (layout, AXES)
    _same_on_mesh(jax.tree.unflatten(tree, leaves), sizes, axes)


CASES = [("qwen2", "model"), ("mixtral", "all"), ("gemma", "fsdp and context"), ("mixtral", "fsdp and context")]
REST = [(name, layout) for name in CONFIGS for layout in LAYOUTS if (name, layout) not in CASES]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_model_is_the_same_on_a_mesh(name, layout):
    _same_on_mesh(_model(name), *LAYOUTS[layout])


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "layout"), REST)
def test_a_model_is_the_same_on_every_mesh(name, layout):
    _same_on_mesh(_model(name), *LAYOUTS[layout])


@pytest.mark.parametrize("sizes", [(1, 2, 1, 4), (2, 1, 2, 2)])
def test_experts_on_different_devices_drop_no_token(sizes):
    _same_on_mesh(_model("mixtral"), sizes, AXES)


def test_documents_in_one_row_stay_apart_where_the_sequence_is_cut():
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (8, 16)), 1))
    _same_on_mesh(_model("gemma"), (2, 1, 4, 1), AXES, segments=segments)


@pytest.mark.parametrize("letters", ["V D", "D V"])
def test_the_rows_of_a_16_bit_table_are_summed_in_float32_on_a_mesh_too(letters):
    tokens = np.zeros((4, 512), np.int32)  # one id everywhere: added one by one in bfloat16, ones stop at 256
    table = jnp.ones((8, 8), jnp.bfloat16)
    grad = jax.jit(jax.grad(lambda table, ids: lookup(table, ids, jnp.float32).sum()))
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        table = jax.device_put(table, sharding_of(mesh, letters, table.shape))
        got = grad(table, jax.device_put(tokens, sharding_of(mesh, "B S", tokens.shape)))
        assert jax.typeof(got) == jax.typeof(table)
    np.testing.assert_array_equal(np.asarray(got, np.float32)[0], 2048)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"data": 2, "context": 4}, AXES),
        ({"data": 2, "context": 2, "model": 2}, AXES),
        ({"data": 2, "expert": 4}, AXES),
        ({"data": 2, "context": 2, "expert": 2}, AXES),
        ({"data": 1, "context": 4, "model": 2}, AXES),
        ({"data": 4, "context": 2}, AXES | {"V": ("data",)}),
        ({"data": 2, "context": 2, "model": 2}, AXES | {"D": ("model",), "V": ()}),
    ],
    ids=str,
)
def test_rows_of_a_table_are_traded_where_devices_share_sequences_or_experts(sizes, axes, dtype):
    rng, mesh = np.random.default_rng(0), make_mesh(**sizes)
    ids = rng.integers(0, 256, (8, 32)).astype(np.int32)
    ids[0, 3], ids[5, 9], ids[7, 31] = -1, 256, 2**31 - 1
    args = rng.normal(size=(256, 64)), ids, rng.normal(size=(8, 32, 64))
    args = [jnp.asarray(one, kind) for one, kind in zip(args, (dtype, jnp.int32, jnp.bfloat16), strict=True)]

    @jax.jit
    def run(table, ids, slope):
        out, back = jax.vjp(lambda table: lookup(table, ids, jnp.bfloat16), table)
        return out, *back(slope)

    wanted = run(*args)
    with jax.set_mesh(mesh):
        letters = ("V D", "B S", "B S D")
        args = [
            jax.device_put(one, sharding_of(mesh, lies, one.shape, axes))
            for one, lies in zip(args, letters, strict=True)
        ]
        found = run(*args)
        sent = max(one.bytes for one in collectives(run.lower(*args).compile().as_text(), 8))
    tolerance = 1e-5 if dtype == jnp.float32 else 5e-2
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=tolerance, atol=tolerance)
    if axes is AXES:  # what a device has of the gradient is the most that it sends, around a ring and back
        assert sent <= 2 * 4 * found[1].addressable_shards[0].data.size


@pytest.mark.parametrize("how", [None, "kept"])
def test_one_text_and_one_kv_head_on_a_mesh_of_one_device(how):
    """Dimensions of one forget where they lie when others are reshaped."""
    mesh = make_mesh(devices=jax.devices()[:1])
    kinds = {"q": "B S N H", "k": "B S K H", "v": "B S K H"}
    shapes = {"q": (1, 16, 4, 8), "k": (1, 16, 1, 8), "v": (1, 16, 1, 8)}
    with jax.set_mesh(mesh):
        lies = {name: sharding_of(mesh, kinds[name], shape) for name, shape in shapes.items()}
        args = [jax.ShapeDtypeStruct(shapes[name], jnp.float32, sharding=lies[name]) for name in shapes]
        run = attention if how is None else functools.partial(tiled(2), keep=True)
        found = jax.eval_shape(jax.jit(functools.partial(run, scale=1.0, window=None)), *args)
        assert [partitions(leaf)[0] for leaf in jax.tree.leaves(found)] == ["data"] * len(jax.tree.leaves(found))
