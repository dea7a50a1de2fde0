"""Optimizers by configuration, and what they leave alone."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import configs
from experiments.step import optimizer
from tests.experiments.test_adafactor import gradients, make
from tests.zoo.hf_tiny import FAST, loaded
from transforms.sharding import AXES
from transforms.step import State, make_train_step
from zoo import Mixture, Qwen3MoeConfig
from zoo.adapters import lora
from zoo.config import rows


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
        ({"cooldown": 0.5}, "optimizer.cooldown=0.5: schedule=cosine has none: give optimizer.schedule=wsd"),
        (
            {"final": 0.5, "schedule": configs.Schedule.constant},
            "optimizer.final=0.5: schedule=constant ends at its peak",
        ),
        ({"cooldown": 0.9, "warmup": 0.2, "schedule": configs.Schedule.wsd}, "with warmup=0.2 it takes more than all"),
        ({"final": 1.5}, "optimizer.final=1.5: it is a share of the peak"),
        ({"ema": 1.0}, "optimizer.ema=1.0: the weights of old steps must decay"),
        ({"ema": 0.0}, "optimizer.ema=0.0: it must be greater than zero"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        configs.check(configs.AdamW(**values), "optimizer.")


CONFIG = Qwen3MoeConfig(
    vocab_size=64, num_layers=3, embed_dim=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=4,
    experts_per_token=2, dense_mlp_dim=32, dense_layers=(1,), attention_bias=True,
)  # fmt: skip


@functools.cache
def mixture():
    return Mixture.init(CONFIG, key=jax.random.key(0))


def decay(tx):
    """What moves a mixture of ones that no gradient moves."""
    params = jax.tree.map(np.ones_like, jax.device_get(mixture()))
    return moved(tx, jax.tree.map(np.zeros_like, params), params)


def moved(tx, grads, params):
    """The first update, in one program: operation by operation, each shape would be compiled for."""
    return jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params)[0], **FAST)(grads, params)


@pytest.mark.parametrize("case", ["gemma3n", "gemma4_small", "gemma4_moe"])
def test_what_only_scales_has_no_weight_decay(case):
    model = loaded(case)
    mask = optimizer.decayed(configs.AdamW(), model)
    decayed = {name for name, on in zip(optimizer.names(mask), jax.tree.leaves(mask), strict=True) if on}
    assert decayed == {row.leaf for row in rows(model.config) if row.fan_in}


def test_norms_and_biases_have_no_weight_decay():
    mask = optimizer.decayed(configs.AdamW(), mixture())
    decayed = {name for name, on in zip(optimizer.names(mask), jax.tree.leaves(mask), strict=True) if on}
    assert decayed == {row.leaf for row in rows(CONFIG) if row.fan_in}
    updates = decay(optimizer.build(configs.AdamW(learning_rate=0.1, warmup=0.0, weight_decay=0.5), steps=10))
    np.testing.assert_allclose(updates.layers.q, -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates.layers.attn_norm, 0)
    np.testing.assert_array_equal(updates.layers.q_bias, 0)


def test_patterns_say_what_has_no_weight_decay():
    mask = optimizer.decayed(configs.AdamW(no_decay="embed, dense.*"), mixture())
    exempt = {name for name, on in zip(optimizer.names(mask), jax.tree.leaves(mask), strict=True) if not on}
    assert exempt == {"embed", *(row.leaf for row in rows(CONFIG) if row.leaf.startswith("dense."))}
    adapted = eqx.filter(lora.attach(mixture(), ["q"], rank=2, alpha=1.0, key=jax.random.key(0)), eqx.is_array)
    assert not optimizer.decayed(configs.AdamW(no_decay="layers.q.a"), adapted).layers.q.a
    with pytest.raises(ValueError, match=r"no_decay=q,atn_norm: `atn_norm` matches no .* Did you mean `attn_norm`"):
        optimizer.decayed(configs.AdamW(no_decay="q,atn_norm"), mixture())


@pytest.mark.parametrize("cls", [configs.AdamW, configs.Muon, configs.Sgd])
def test_whatever_moves_a_matrix_it_has_weight_decay(cls):
    """Of Muon, also what Adam moves: the table and the head."""
    updates = decay(optimizer.build(cls(learning_rate=0.1, warmup=0.0, weight_decay=0.5), 10, model=CONFIG))
    for leaf in (updates.embed, updates.layers.q):
        np.testing.assert_allclose(leaf, -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates.layers.attn_norm, 0)


@pytest.mark.parametrize("cls", [configs.AdamW, configs.Muon, configs.Sgd])
def test_an_optimizer_begins_only_if_patterns_name_parameters(cls):
    how = {"learning_rate": 1.0, "weight_decay": 0.0, "ema": 0.9}
    build = lambda patterns: optimizer.build(cls(**how, no_decay=patterns), 10, model=CONFIG, dtype=jnp.float32)
    with pytest.raises(ValueError, match="=q,nothing: `nothing` matches no parameter"):
        jax.eval_shape(build("q,nothing").init, mixture())
    jax.eval_shape(build("q,embed").init, mixture())


def test_muon_makes_steps_orthogonal_over_the_inputs_and_outputs_of_each_layers_matrix():
    tx = optimizer.build(
        configs.Muon(learning_rate=1.0, warmup=0.0, weight_decay=0.0, consistent_rms=None), 10, model=CONFIG
    )
    model, rng = mixture(), np.random.default_rng(1)
    grads = jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32), model)
    updates = moved(tx, grads, model)
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
    kinds = optimizer._matrices(CONFIG, AXES, model)
    found = jax.tree.structure(model).flatten_up_to(kinds)  # parameters that a family lacks are None, and no leaves
    assert {name for name, kind in zip(optimizer.names(model), found, strict=True) if kind is None} == others


def test_muon_keeps_what_optax_does_under_the_same_names():
    """So that runs go on, whichever of the two began them."""
    model = mixture()
    ours = optimizer.build(configs.Muon(learning_rate=0.1, warmup=0.0), 10, model=CONFIG).init(model)
    kinds = lambda params: jax.tree.map(
        lambda kind: kind and optax.contrib.MuonDimensionNumbers(*kind.dims), optimizer._matrices(CONFIG, AXES, params)
    )
    theirs = optax.contrib.muon(lambda _: 0.1, muon_weight_dimension_numbers=kinds).init(model)
    assert set(optimizer.names(ours)) == set(optimizer.names(theirs))


def test_muon_moves_adapters():
    model = lora.attach(mixture(), ["q", "gate"], rank=2, alpha=1.0, key=jax.random.key(0))
    params = eqx.filter(model, lora.trainable(model))
    tx = optimizer.build(configs.Muon(learning_rate=0.1, warmup=0.0), 10, model=CONFIG)
    updates = moved(tx, jax.tree.map(np.ones_like, params), params)
    assert updates.embed is None and float(abs(updates.layers.q.b).max()) > 0
    assert optimizer._matrices(CONFIG, AXES, params).layers.gate.b.dims[0] == (2,)


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
