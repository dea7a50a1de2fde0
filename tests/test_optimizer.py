"""Optimizers by configuration, what they leave alone; layerwise Adafactor, optax's on every layer's slice."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import adafactor, configs, optimizer, parameters
from tests.hf_tiny import FAST
from transforms.step import State, make_train_step
from zoo import Mixture, Qwen3MoeConfig, lora
from zoo.tables import rows


class Stack(eqx.Module):
    """Leaves of every kind: factored and full, stacked and not, three dims, a part that is absent."""

    embed: jax.Array
    layers: dict
    final_norm: jax.Array
    config: str = eqx.field(static=True)


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
    for step in range(3):
        grads = gradients(params, step)
        updates, state = jax.jit(ours.update)(grads, state, params)
        reference_updates, reference_state = theirs.update(unstack(grads), reference_state, reference)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), unstack(updates), reference_updates)
        params, reference = eqx.apply_updates(params, updates), optax.apply_updates(reference, reference_updates)


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


@pytest.mark.parametrize(
    "config",
    [
        configs.AdamW(learning_rate=1e-2),
        configs.Adafactor(learning_rate=1e-2),
        configs.AdafactorLayerwise(learning_rate=1e-2),
        configs.AdamW(learning_rate=1e-2, schedule=configs.Schedule.wsd, ema=0.9),
        configs.Sgd(learning_rate=1e-2, momentum=0.9),
        configs.Sgd(learning_rate=1e-2, clip_norm=1.0, schedule=configs.Schedule.constant, warmup=0.0),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_optimizer_lowers_a_loss(config):
    tx = optimizer.build(config, steps=20)
    params = eqx.filter(make(), eqx.is_array)
    loss = lambda p: sum(jnp.mean(jnp.square(x - 0.5)) for x in jax.tree.leaves(p))
    state, first = tx.init(params), float(loss(params))
    step = jax.jit(lambda p, s: tx.update(jax.grad(loss)(p), s, p, value=loss(p)))
    for _ in range(20):
        updates, state = step(params, state)
        params = eqx.apply_updates(params, updates)
    assert float(loss(params)) < first


def rates(**how):
    rate = optimizer.schedule(configs.AdamW(learning_rate=1.0, **how), steps=10)
    return [float(rate(jnp.asarray(step))) for step in range(11)]


def test_schedules_warm_up_and_decay():
    for schedule in ("cosine", "linear", "wsd"):
        values = rates(warmup=0.2, schedule=configs.Schedule(schedule))
        assert 0 < values[0] < values[1] < values[2] == 1.0
        assert values[-1] == pytest.approx(0.1)
        assert rates(warmup=0.2, schedule=configs.Schedule(schedule), final=0.0)[-1] == pytest.approx(0)
    assert rates(warmup=0.0, schedule=configs.Schedule.linear, final=0.0) == pytest.approx(np.linspace(1, 0, 11))
    wsd = rates(warmup=0.2, schedule=configs.Schedule.wsd, cooldown=0.5, final=0.0)
    assert wsd[2:] == pytest.approx([1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0])
    assert rates(warmup=0.2, schedule=configs.Schedule.constant)[2:] == [1.0] * 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cooldown": 1.0}, "optimizer.cooldown=1.0: it is a share of the steps"),
        ({"cooldown": 0.9, "warmup": 0.2, "schedule": configs.Schedule.wsd}, "with warmup=0.2 it takes more than all"),
        ({"final": 1.5}, "optimizer.final=1.5: it is a share of the peak"),
        ({"ema": 1.0}, "optimizer.ema=1.0: the weights of old steps must decay"),
        ({"ema": 0.0}, "optimizer.ema=0.0: it must be greater than zero"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        configs.AdamW(**values)


CONFIG = Qwen3MoeConfig(
    vocab_size=64, num_layers=3, embed_dim=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=4,
    experts_per_token=2, dense_mlp_dim=32, dense_layers=(1,), attention_bias=True,
)  # fmt: skip


@functools.cache
def mixture():
    return Mixture.init(CONFIG, key=jax.random.key(0))


def test_norms_and_biases_have_no_weight_decay():
    mask = optimizer.decayed(configs.AdamW(), mixture())
    decayed = {name for name, on in zip(parameters.names(mask), jax.tree.leaves(mask), strict=True) if on}
    assert decayed == {row.leaf for row in rows(CONFIG) if row.fan_in}
    tx = optimizer.build(configs.AdamW(learning_rate=0.1, warmup=0.0, weight_decay=0.5), steps=10)
    params = jax.tree.map(jnp.ones_like, mixture())
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates.layers.q, -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates.layers.attn_norm, 0)
    np.testing.assert_array_equal(updates.layers.q_bias, 0)


def test_patterns_say_what_has_no_weight_decay():
    mask = optimizer.decayed(configs.AdamW(no_decay="embed, dense.*"), mixture())
    exempt = {name for name, on in zip(parameters.names(mask), jax.tree.leaves(mask), strict=True) if not on}
    assert exempt == {"embed", *(row.leaf for row in rows(CONFIG) if row.leaf.startswith("dense."))}
    adapted = eqx.filter(lora.attach(mixture(), ["q"], rank=2, alpha=1.0, key=jax.random.key(0)), eqx.is_array)
    assert not optimizer.decayed(configs.AdamW(no_decay="layers.q.a"), adapted).layers.q.a
    with pytest.raises(ValueError, match=r"no_decay=q,atn_norm: `atn_norm` matches no .* Did you mean `attn_norm`"):
        optimizer.decayed(configs.AdamW(no_decay="q,atn_norm"), mixture())


def test_muon_makes_steps_orthogonal_over_the_inputs_and_outputs_of_each_layers_matrix():
    tx = optimizer.build(
        configs.Muon(learning_rate=1.0, warmup=0.0, weight_decay=0.0, consistent_rms=None), 10, model=CONFIG
    )
    model = mixture()
    with pytest.raises(ValueError, match="`nothing` matches no parameter"):
        optimizer.build(configs.Muon(learning_rate=1.0, no_decay="nothing"), 10, model=CONFIG).init(model)
    keys = iter(jax.random.split(jax.random.key(1), 99))
    grads = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape), model)
    updates, _ = jax.jit(tx.update, **FAST)(grads, tx.init(model), model)
    for matrix in (
        updates.layers.q[1].reshape(16, -1),  # D, N H
        updates.layers.o[0].reshape(-1, 16),  # N H, D
        updates.layers.gate[1, 2],  # an expert's own
        updates.dense.down[0],
    ):
        scales = np.linalg.svd(matrix, compute_uv=False)
        scales = scales / max(1, matrix.shape[1] / matrix.shape[0]) ** 0.5
        assert scales.min() > 0.5 and scales.max() < 1.3  # the gradient's go from 0.1 to 8
    others = {"embed", "head", "final_norm"} | {row.leaf for row in rows(CONFIG) if not row.fan_in}
    kinds = optimizer._matrices(CONFIG, model)
    found = jax.tree.leaves(kinds, is_leaf=lambda leaf: leaf is None or hasattr(leaf, "output_axis"))
    assert {name for name, kind in zip(parameters.names(model), found, strict=True) if kind is None} == others


def test_muon_moves_adapters():
    model = lora.attach(mixture(), ["q", "gate"], rank=2, alpha=1.0, key=jax.random.key(0))
    params = eqx.filter(model, lora.trainable(model))
    tx = optimizer.build(configs.Muon(learning_rate=0.1, warmup=0.0), 10, model=CONFIG)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert updates.embed is None and float(abs(updates.layers.q.b).max()) > 0
    assert optimizer._matrices(CONFIG, params).layers.gate.b.reduction_axis == (2,)


def test_the_mean_of_the_weights_follows_them():
    config = configs.Sgd(learning_rate=0.1, warmup=0.0, schedule=configs.Schedule.constant, ema=0.5)
    tx = optimizer.build(config, steps=10)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state, means = tx.init(params), [1.0]
    assert state.mean["w"].dtype == jnp.float32
    for step in range(4):
        updates, state = tx.update({"w": jnp.ones(3, jnp.bfloat16)}, state, params)
        params = optax.apply_updates(params, updates)
        keep = min(0.5, (1 + step) / (10 + step))
        means.append(keep * means[-1] + (1 - keep) * float(params["w"][0]))
    np.testing.assert_allclose(state.mean["w"], means[-1], rtol=1e-6)


def test_wide_gradients_move_narrow_parameters_as_wide_ones_move():
    """Up to the rounding of the parameters themselves; the state is wide, and keeps its type."""
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), eqx.filter(make(), eqx.is_array))
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), narrow)
    config = configs.AdamW(learning_rate=1e-2, warmup=0.0)
    tx, plain = optimizer.build(config, 10, dtype=jnp.float32), optimizer.build(config, 10)
    state, expected = tx.init(narrow), plain.init(wide)
    grads = jax.tree.map(lambda p: p.astype(jnp.float32), gradients(narrow, 0))
    updates, after = tx.update(grads, state, narrow)
    plain_updates, plain_after = plain.update(grads, expected, wide)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=1e-2), updates, plain_updates)
    jax.tree.map(np.testing.assert_array_equal, after, plain_after)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_gradients_have_the_type_that_is_asked_for():
    """Parameters in bfloat16 whose gradient is a sum of many small parts: only wide ones keep them."""
    seen = {}

    def spy(dtype):
        def update(updates, state, params=None, **extra):
            seen[dtype] = updates
            return updates, state

        return optax.GradientTransformationExtraArgs(lambda params: (), update)

    def loss(model, batch):
        return jnp.sum(model["w"].astype(jnp.float32) * batch), {}

    batch = jnp.full(8, 1 + 2.0**-10)
    for dtype in (None, "float32"):
        tx = spy(dtype)
        params = {"w": jnp.ones(8, jnp.bfloat16)}
        tx = tx if dtype is None else optimizer.computed_in(tx, jnp.dtype(dtype))
        with jax.disable_jit():
            state, _ = make_train_step(loss, tx, grad_dtype=dtype)(batch, State.init(params, tx))
        assert state.model["w"].dtype == jnp.bfloat16
    assert seen[None]["w"].dtype == jnp.bfloat16 and float(seen[None]["w"][0]) == 1
    assert seen["float32"]["w"].dtype == jnp.float32 and float(seen["float32"]["w"][0]) == 1 + 2.0**-10


def test_clipping_and_leaving_out_keep_the_same_state():
    plain = configs.AdamW(learning_rate=0.1)
    clipped = optimizer.build(dataclasses.replace(plain, clip_norm=1.0), 10)
    params = {"w": jnp.ones((3, 2))}
    states = [one.init(params) for one in (optimizer.build(plain, 10), clipped, optimizer.finite_alone(clipped))]
    assert len({str(jax.tree.structure(state)) for state in states}) == 1


BAD = {"loss": (jnp.nan, 1.0), "gradient": (1.0, jnp.inf), "norm alone": (1.0, 1e30)}


@pytest.mark.parametrize("loss, gradient", BAD.values(), ids=BAD)
def test_steps_without_a_finite_loss_or_norm_change_nothing(loss, gradient):
    built = optimizer.finite_alone(optimizer.build(configs.AdamW(learning_rate=0.1), 10, dtype=jnp.float32))
    params = {"w": jnp.ones((3, 2), jnp.bfloat16)}
    state, grads = built.init(params), {"w": jnp.full((3, 2), gradient, jnp.float32)}
    updates, after = jax.jit(built.update)(grads, state, params, value=jnp.float32(loss))
    jax.tree.map(np.testing.assert_array_equal, (updates, after), (jax.tree.map(jnp.zeros_like, params), state))
    moved, _ = jax.jit(built.update)({"w": jnp.ones((3, 2))}, after, params, value=jnp.float32(1))
    assert moved["w"].dtype == jnp.bfloat16
    assert jnp.all(moved["w"] != 0)


def test_params_are_required():
    tx = adafactor.adafactor_layerwise(0.02)
    params = eqx.filter(make(), eqx.is_array)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
