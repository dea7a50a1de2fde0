"""The steps: donated, compiled once from shapes alone, equal to plain gradients; and the tied table's gradient."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import configs
from experiments.commandline import schema
from experiments.planning.resolve import resolve
from experiments.runtime import hardware
from experiments.step import objectives
from experiments.step.build import Programs
from tests.tiny import MODEL
from transforms.step import State, compile_step, make_eval_step, make_train_step

MICRO = [
    *MODEL,
    "batch_size=2",
    "seq_len=16",
    "steps=4",
    "hardware.memory_gib=4",
]
DEVICE = hardware.Device("cpu", "a test", 2**32)


class Line(eqx.Module):
    """A model with a static field and an integer leaf beside its parameters."""

    w: jax.Array
    b: jax.Array
    count: jax.Array
    name: str = eqx.field(static=True)


def line():
    return Line(jnp.ones((8, 8)), jnp.zeros(8), jnp.arange(3), "line")


def loss(model, batch):
    x, y = batch
    error = x @ model.w + model.b - y
    return jnp.mean(error**2), {"largest": jnp.max(jnp.abs(error))}


def batch():
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], (4, 8)), jax.random.normal(keys[1], (4, 8))


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_step_equals_plain_gradients_and_optax():
    optimizer = optax.adam(1e-2)
    state, plain = State.init(line(), optimizer), line()
    opt_state = optimizer.init(eqx.filter(plain, eqx.is_inexact_array))
    step = make_train_step(loss, optimizer)
    for _ in range(3):
        (value, _), grads = eqx.filter_value_and_grad(loss, has_aux=True)(plain, batch())
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(plain, eqx.is_inexact_array))
        plain = eqx.apply_updates(plain, updates)
        state, metrics = step(batch(), state)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-6)
    assert metrics.keys() == {"loss", "grad_norm", "largest"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.model, plain)
    assert int(state.step) == 3


def test_compiled_from_shapes_and_donates_the_state_but_not_the_batch():
    optimizer = optax.adam(1e-2)
    state, data = State.init(line(), optimizer), batch()
    step = compile_step(make_train_step(loss, optimizer), shapes(data), shapes(state))
    stats = step.compiled.memory_analysis()
    assert stats.alias_size_in_bytes >= 3 * 4 * (64 + 8)  # parameters and both moments are updated in place
    new, _ = step(data, state)
    assert state.model.w.is_deleted()
    assert state.opt_state[0].mu.w.is_deleted()
    assert not data[0].is_deleted()
    assert new.model.name == "line"


def test_another_shape_is_an_error_not_a_compilation():
    optimizer = optax.sgd(1e-2)
    state = State.init(line(), optimizer)
    step = compile_step(make_train_step(loss, optimizer), batch(), state)
    with pytest.raises(TypeError, match="compiled"):
        step(jax.tree.map(lambda x: x[:2], batch()), state)


def test_step_traces_once():
    optimizer = optax.sgd(1e-2)
    state = State.init(line(), optimizer)
    step = make_train_step(eqx.debug.assert_max_traces(loss, max_traces=1), optimizer)
    for _ in range(3):
        state, _ = step(batch(), state)


def test_optimizers_that_read_the_loss():
    optimizer = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau())
    state = State.init(line(), optimizer)
    state, metrics = make_train_step(loss, optimizer)(batch(), state)
    assert np.isfinite(metrics["loss"])


def test_eval_step_leaves_the_model_alone():
    model = line()
    metrics = compile_step(make_eval_step(loss), shapes(batch()), shapes(model))(batch(), model)
    np.testing.assert_allclose(metrics["loss"], loss(model, batch())[0], rtol=1e-6)
    assert not model.w.is_deleted()


def resolved(*overrides):
    config, _ = schema.compose([*MICRO, *overrides])
    return resolve(config, DEVICE)


def tokens(config, vocab=300):
    ids = np.random.default_rng(0).integers(0, vocab, (config.batch_size, config.seq_len + 1)).astype(np.int32)
    mask = (np.random.default_rng(1).random((config.batch_size, config.seq_len)) < 0.7).astype(np.float32)
    return ids[:, :-1], ids[:, 1:], mask


def gradients(loss, model, data):
    """Value and gradients, in one compiled program (much faster than one operation at a time)."""
    return eqx.filter_jit(eqx.filter_value_and_grad(lambda m, d: loss(m, d)[0]))(model, data)


def test_tiled_loss_and_gradients_equal_untiled_with_the_table_shared_or_not():
    """A tied table has two gradients: they are added up by rows here, and as whole arrays in the plain function."""
    config = resolved("tiling.n=none", "remat=full")
    model, data = Programs(config).init(), tokens(config, vocab=7)  # every row is looked up several times

    def plain(model, data):
        flat = [x.reshape(-1, *x.shape[2:]) for x in (model.hidden(data[0]), *data[1:])]
        return objectives.cross_entropy((model,), flat[:1], *flat[1:])

    expected = gradients(plain, model, data)
    for n in ("none", 3):
        tiled = dataclasses.replace(config, tiling=configs.Tiling(n=n))
        actual = gradients(Programs(tiled).loss, model, data)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected)


def value(config, model, data):
    return make_eval_step(Programs(config).loss)(data, model)["loss"]


def test_first_loss_is_that_of_guessing():
    config = resolved("model.embed_dim=64")
    model, data = Programs(config).init(), tokens(config)
    assert abs(float(value(config, model, data)) - np.log(300)) < 0.2


def test_masked_tokens_do_not_count():
    config = resolved()
    model, (ids, targets, mask) = Programs(config).init(), tokens(config)
    other = np.where(mask == 0, 5, targets).astype(np.int32)
    a, b = (value(config, model, (ids, t, mask)) for t in (targets, other))
    assert float(a) == float(b)
