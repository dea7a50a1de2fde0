"""Layers of which each is apart: in the same memory, and read where they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests import quick
from tests.tiny import drawn
from tests.zoo.hf_tiny import loaded
from zoo.engine.engine import Engine, lowered
from zoo.engine.sizes import Settings
from zoo.formats import Format
from zoo.models.decoder import Apart, apart, together
from zoo.quantised import Quantised, quantise

SIZES = dict(vocab_size=64, num_layers=3, embed_dim=256, mlp_dim=512, num_heads=4, num_kv_heads=2, head_dim=64)


def test_layers_apart_are_in_the_memory_of_their_stack():
    model = drawn(zoo.LlamaConfig(**SIZES), jnp.bfloat16)
    divided = apart(model).layers.down
    where = [layer.unsafe_buffer_pointer() - model.layers.down.unsafe_buffer_pointer() for layer in divided.layers]
    assert where == [0, 512 * 256 * 2, 2 * 512 * 256 * 2]


@pytest.mark.parametrize("case", ["gemma2_gqa", "deepseek_v3", "mixtral"])
def test_layers_together_are_the_model_that_was_apart(case):
    model = loaded(case)
    divided = apart(model)
    assert any(
        isinstance(leaf, Apart) for leaf in jax.tree.leaves(divided, is_leaf=lambda leaf: isinstance(leaf, Apart))
    )
    jax.tree.map(np.testing.assert_array_equal, together(divided), model)
    jax.tree.map(np.testing.assert_array_equal, together(model), model)


def test_layers_apart_are_where_their_stack_is():
    here = jax.devices()[1]
    model = jax.device_put(drawn(zoo.LlamaConfig(**SIZES)), here)
    assert {device for leaf in jax.tree.leaves(apart(model)) for device in leaf.devices()} == {here}
    on_a_mesh = lambda leaf: jax.NamedSharding(
        jax.make_mesh((1,), ("model",)), jax.P(*(None,) * (leaf.ndim - 1), "model")
    )
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_a_mesh(leaf)), model)
    assert apart(shapes).layers.down.layers[0].shape == (512, 256)


@pytest.mark.measured
@pytest.mark.parametrize(("model", "config"), [(zoo.Llama, zoo.LlamaConfig), (zoo.Gemma, zoo.GemmaConfig)])
def test_a_step_of_the_engine_copies_no_weights(model, config):
    """Beside pages and weights it takes less than the smallest of the attention's matrices."""
    made = jax.eval_shape(lambda key: model.init(config(**SIZES), key=key), jax.random.key(0))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    made = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), made)
    program = lowered(made, Settings(length=64, rows=4)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 256 * 256 * 4


def test_floats_of_8_bits_are_read_a_layer_at_a_time():
    """What a step takes beside pages and weights does not grow with the layers."""
    taken = []
    for layers in (2, 4):
        config = zoo.LlamaConfig(**{**SIZES, "num_layers": layers})
        model = jax.tree.map(_in_fp8, quantise(drawn(config), "int8"), is_leaf=_kept)
        with quick.by_default(quick.UNOPTIMISED):  # but for machine code, as XLA makes it fast
            program = lowered(model, Settings(length=64, rows=4)).compile()
        taken.append(program.memory_analysis().temp_size_in_bytes)
    assert taken[0] == taken[1]
    engine = Engine(model, Settings(length=64, rows=4))
    [answer] = engine.submit([1, 2, 3], max_tokens=4)
    engine.run()
    ids = jnp.array([[1, 2, 3, *(token.id for token in answer.tokens)]])
    logits = quick.jit(lambda model: model(ids))(model)[0, 2:-1]
    assert [token.id for token in answer.tokens] == logits.argmax(-1).tolist()


def _kept(part):
    return isinstance(part, Quantised)


def _in_fp8(part):
    if not _kept(part):
        return part
    values = (part.values.astype(jnp.float32) / 4).astype(jnp.float8_e4m3fn)
    return dataclasses.replace(part, values=values, format=Format.fp8)


@pytest.mark.parametrize("pattern", ["MMA", "MMAMA", "MAMMM", "MAAM"])
def test_layers_in_turns_are_the_layers_one_by_one(pattern):
    """Neighbours in one stack that are all that a turn has of it, and that are a part; turns that end as they begin."""
    sizes = SIZES | {"num_layers": 2 * len(pattern), "embed_dim": 16, "mlp_dim": 16, "head_dim": 4}
    states = dict(mamba_heads=4, mamba_head_dim=4, mamba_state_dim=4)
    experts = dict(num_experts=4, experts_per_token=2, shared_mlp_dim=16)
    config = zoo.Granite4MoeConfig(**sizes, **states, **experts, layer_pattern=pattern)
    _same_one_by_one(config)


def test_windows_are_those_of_each_layer_of_a_turn(float64):
    sizes = SIZES | {"num_layers": 10, "embed_dim": 16, "mlp_dim": 16, "head_dim": 4}
    wider = dict(inputs_dim=4, inputs_vocab_size=64, global_head_dim=8)
    _same_one_by_one(zoo.Gemma4Config(**sizes, **wider, window=3, attention_pattern="LLGLG"))


def _same_one_by_one(config):
    model = zoo.model_class(config).init(config, key=jax.random.key(0))
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), model)
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 64)

    def made(unroll):
        found = model.forward(tokens, zoo.ForwardPass(unroll=unroll))
        return [part for part in (found.hidden, found.balance) if part is not None]

    for got, want in zip(*(quick.jit(made, static_argnums=0)(unroll) for unroll in (False, True)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_engine_whose_model_was_donated_says_so():
    engine = Engine(model := drawn(zoo.LlamaConfig(**SIZES)), Settings(length=64))
    jax.jit(lambda model: jax.tree.map(jnp.square, model), donate_argnums=0)(model)
    with pytest.raises(ValueError, match=r"whose arrays were donated or deleted.*Drop the engine before"):
        engine.submit([1, 2], max_tokens=1)
