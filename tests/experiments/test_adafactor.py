"""Layerwise Adafactor: optax's on every layer's slice, in the memory of one layer, rounded stochastically."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.step import adafactor
from tests.zoo import hf_tiny
from transforms.bits import IN_PLACE


class Stack(eqx.Module):
    """Leaves of every kind: factored and full, stacked and not, three dims, a part that is absent."""

    embed: jax.Array
    layers: dict
    final_norm: jax.Array
    config: str = eqx.field(static=True)

    @property
    def stacks(self):
        return {"layers": self.layers}


def make(dtype=jnp.float32, layers=3, vocab=300):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: (0.1 * jax.random.normal(next(keys), shape)).astype(dtype)
    stacked = {"norm": jnp.zeros((layers, 128), dtype), "q": normal(layers, 128, 2, 130), "o": normal(layers, 16, 8)}
    return Stack(normal(vocab, 128), {**stacked, "absent": None}, jnp.zeros(128, dtype), "static")


def unstack(model):
    """The same parameters with each layer's slice as a leaf of its own."""
    layers = [jax.tree.map(lambda x, i=i: x[i], model.layers) for i in range(3)]
    return {"embed": model.embed, "layers": layers, "final_norm": model.final_norm}


def gradients(model, step):
    keys = iter(jax.random.split(jax.random.key(step + 1), 8))
    return jax.tree.map(lambda p: (10.0**-step * jax.random.normal(next(keys), p.shape)).astype(p.dtype), model)


@pytest.mark.parametrize("block", [2**24, 1000], ids=["whole", "blocks"])
def test_equals_optax_on_every_layers_slice(block, monkeypatch):
    monkeypatch.setattr(adafactor, "BLOCK", block)
    ours, theirs = adafactor.adafactor_layerwise(0.02), optax.adafactor(0.02)
    model = make()
    params = eqx.filter(model, eqx.is_array)
    reference = unstack(params)
    state, reference_state = ours.init(params), theirs.init(reference)
    update, reference_update = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(3):
        grads = gradients(params, step)
        updates, state = update(grads, state, params)
        reference_updates, reference_state = reference_update(unstack(grads), reference_state, reference)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), unstack(updates), reference_updates)
        params, reference = eqx.apply_updates(params, updates), optax.apply_updates(reference, reference_updates)


def test_every_stack_of_a_model_is_one_of_layers():
    """Layers of other kinds are stacked apart, as Qwen 3 Next's with a delta rule."""
    model = hf_tiny.loaded("qwen3_next")
    large = jax.tree.map(lambda x: x * jnp.logspace(0, 2, len(x)).reshape(-1, *[1] * (x.ndim - 1)), model)
    ours, theirs = adafactor.adafactor_layerwise(0.02), optax.adafactor(0.02)
    first = lambda tx: jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params)[0])
    updates, reference = first(ours)(model, large), first(theirs)
    for i, (grad, param, update) in enumerate(zip(model.delta.o, large.delta.o, updates.delta.o, strict=True)):
        expected = reference(grad, param)
        np.testing.assert_allclose(update, expected, rtol=2e-5, err_msg=f"layer {i}")


def test_stochastic_rounding_is_unbiased_and_lands_on_a_neighbour():
    x = jnp.full((200, 500), 1.0 + 2.0**-10, jnp.float32)  # an eighth of the way to the next bfloat16
    rounded = adafactor.stochastic_round(x, jnp.uint32(7)).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1.0, 1.0 + 2.0**-7}
    up = float(jnp.mean(rounded > 1.0))
    assert abs(up - 1 / 8) < 4 * (1 / 8 * 7 / 8 / x.size) ** 0.5
    assert not np.array_equal(rounded, adafactor.stochastic_round(x, jnp.uint32(8)).astype(jnp.float32))


def test_stochastic_rounding_keeps_what_bfloat16_holds():
    x = jnp.array([0.0, -1.5, 3e38, jnp.inf, -jnp.inf, 1e-30], jnp.bfloat16)
    for salt in range(8):
        np.testing.assert_array_equal(adafactor.stochastic_round(x.astype(jnp.float32), jnp.uint32(salt)), x)
    assert np.isnan(float(adafactor.stochastic_round(jnp.float32(jnp.nan), jnp.uint32(1))))


@pytest.mark.parametrize("rounding", [True, False], ids=["stochastic", "nearest"])
def test_small_steps_move_bfloat16_parameters_only_with_stochastic_rounding(rounding):
    tx = adafactor.adafactor_layerwise(2e-4, stochastic_rounding=rounding)
    params = jax.tree.map(jnp.ones_like, eqx.filter(make(jnp.bfloat16), eqx.is_array))
    grads = jax.tree.map(jnp.ones_like, params)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(20):
        updates, state = update(grads, state, params)
        params = eqx.apply_updates(params, updates)
    assert params.embed.dtype == jnp.bfloat16
    moved = 1 - float(params.embed.astype(jnp.float32).mean())
    # 20 steps of 2e-4 relative to the parameter; half a unit in the last place of 1.0 is 2e-3.
    assert abs(moved - 20 * 2e-4) < 4e-4 if rounding else moved == 0


def test_update_gives_the_rounded_parameter_exactly():
    tx = adafactor.adafactor_layerwise(0.02)
    params = eqx.filter(make(jnp.bfloat16), eqx.is_array)
    updates, _ = tx.update(gradients(params, 0), tx.init(params), params)
    for update in jax.tree.leaves(updates):
        assert update.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u.astype(jnp.float32), params, updates)
    narrow = eqx.apply_updates(params, updates)
    same = jax.tree.map(lambda a, b: float(jnp.mean(a == b.astype(jnp.float32))), wide, narrow)
    assert (
        min(jax.tree.leaves(same)) > 0.98
    )  # exact but for parameters near zero, where the difference itself has to be rounded


@pytest.mark.measured
def test_temporary_memory_is_that_of_one_layer():
    layers, rows, cols = 16, 512, 1024
    shape = jax.ShapeDtypeStruct((layers, rows, cols), jnp.bfloat16)
    small = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    params = Stack(small, {"w": shape}, small, "static")
    tx = adafactor.adafactor_layerwise(0.02)
    state = eqx.filter_eval_shape(tx.init, params)
    step = jax.jit(lambda g, s, p: tx.update(g, s, p), donate_argnums=(0, 1))
    options = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
    compiled = step.lower(params, state, params).compile(compiler_options=options)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * rows * cols  # a float32 copy of the tree: 16 layers


def test_params_are_required():
    tx = adafactor.adafactor_layerwise(0.02)
    params = eqx.filter(make(), eqx.is_array)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))


@pytest.mark.measured
def test_a_narrow_leaf_is_overwritten_block_by_block(monkeypatch):
    """Older XLA:CPUs widen the whole of a bfloat16 array to overwrite a part of it, in every step of a loop."""
    monkeypatch.setattr(adafactor, "BLOCK", 2**12)
    table = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    tx = adafactor.adafactor_layerwise(0.02, layers=lambda params: ())
    state = jax.eval_shape(tx.init, table)
    compiled = jax.jit(tx.update, donate_argnums=0).lower(table, state, table).compile()
    made = set(re.findall(r"= (\w+)\[512,256\]\S* dynamic-update-slice\(", compiled.as_text()))
    assert made == {"bf16" if IN_PLACE else "u16"}


def test_more_elements_than_an_integer_counts():
    """Of a table of inputs of all layers, as Gemma 3n E4B and Gemma 4 E2B have: traced, with nothing allocated."""
    table = jax.ShapeDtypeStruct((2**18, 35 * 256), jnp.bfloat16)
    params = Stack(table, {}, jax.ShapeDtypeStruct((128,), jnp.bfloat16), "static")
    optimizer = adafactor.adafactor_layerwise(0.1)
    state = jax.eval_shape(optimizer.init, params)
    new, _ = jax.eval_shape(optimizer.update, params, state, params)
    assert (new.embed.shape, new.embed.dtype) == (table.shape, table.dtype)
