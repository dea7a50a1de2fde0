"""Matrices kept in fewer bits: against formulas, in products, under adapters, gradients and `tile`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import QUICK
from tests.tiny import drawn, same
from transforms import tile
from transforms.sharding import make_mesh, sharding_of
from zoo.adapters import lora
from zoo.formats import NF4
from zoo.models.layers import gated_mlp, linear
from zoo.quantised import Quantised, quantise, shardings, whole

SIZES = dict(vocab_size=64, num_layers=3, embed_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=2, head_dim=32)
GROUPS = {"int8": None, "int4": 32, "nf4": 64}  # of the kinds that are made; fp8 is read alone


def ids():
    return jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 9)), jnp.int32)


@functools.cache
def llama():
    return drawn(zoo.LlamaConfig(**SIZES))


def _by_hand(matrix, kind, group):
    """Return what each number of a matrix `[out, in]` becomes."""
    out = np.zeros_like(matrix)
    for row, i in np.ndindex(matrix.shape[0], matrix.shape[1] // (group or matrix.shape[1])):
        where = slice(i * (group or 0), (i + 1) * group if group else None)
        part = matrix[row, where]
        most = np.abs(part).max()
        if kind == "nf4":
            nearest = np.abs(part[:, None] / most - np.array(NF4)).argmin(1)
            out[row, where] = np.array(NF4, np.float32)[nearest] * most
        else:
            scale = most / np.float32(127 if kind == "int8" else 7.5)
            out[row, where] = np.clip(np.round(part / scale), *((-127, 127) if kind == "int8" else (-8, 7))) * scale
    return out


@pytest.mark.parametrize("kind", GROUPS)
def test_matrices_become_the_nearest_that_their_bits_can_say(kind):
    model = quantise(llama(), kind, group=GROUPS[kind])
    assert isinstance(model.layers.q, Quantised) and isinstance(model.embed, jax.Array) and model.head is not None
    for leaf, turn in {
        "q": lambda w: w.reshape(64, -1).T,
        "o": lambda w: w.reshape(-1, 64).T,
        "down": lambda w: w.T,
    }.items():
        part, before = getattr(model.layers, leaf), getattr(llama().layers, leaf)
        assert part.shape == before.shape and part.dtype == before.dtype and part.ndim == before.ndim
        for layer in range(3):
            exact, ours = np.asarray(turn(before[layer])), np.asarray(turn(whole(part)[layer]))
            expected = _by_hand(exact, kind, GROUPS[kind])
            same = np.isclose(ours, expected, rtol=1e-6, atol=1e-7)
            # The largest of a group of four bits stands between two numbers, and rounding decides.
            tie = np.isclose(abs(ours - exact), abs(expected - exact), rtol=1e-4) & (kind == "int4")
            assert np.all(same | tie) and same.mean() > 0.98


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, jnp.float32) for kind in GROUPS), ("int8", jnp.bfloat16), ("nf4", jnp.bfloat16)]
)
def test_a_model_computes_what_its_dequantised_matrices_do(kind, dtype):
    model = quantise(llama(), kind, group=GROUPS[kind])
    plain = jax.tree.map(whole, model, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    run = eqx.filter_jit(lambda model: model(ids(), dtype=dtype), **QUICK)
    tolerance = 2e-6 if dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(run(model), run(plain), atol=tolerance * np.abs(run(plain)).max())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_an_adapter_over_few_bits_learns_alone(kind):
    """QLoRA: gradients of A and B are those over the dequantised matrices, and the base has none."""
    model = quantise(llama(), kind, group=GROUPS[kind])
    adapted = lora.attach(model, ["q", "down", "head"], rank=2, alpha=4.0, key=jax.random.key(1))
    raise_b = lambda part: eqx.tree_at(lambda p: p.b, part, part.b + 0.1) if isinstance(part, lora.LowRank) else part
    adapted = jax.tree.map(raise_b, adapted, is_leaf=lambda leaf: isinstance(leaf, lora.LowRank))
    plain = jax.tree.map(whole, adapted, is_leaf=lambda leaf: isinstance(leaf, Quantised))

    @functools.partial(eqx.filter_jit, **QUICK)
    def gradients(model):
        learn, frozen = eqx.partition(model, lora.trainable(model))
        return jax.grad(lambda learn: eqx.combine(learn, frozen)(ids()).var())(learn)

    ours, expected = gradients(adapted), gradients(plain)
    assert len(jax.tree.leaves(ours)) == 6  # A and B of three
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5 * np.abs(other).max())
    everything = eqx.filter_jit(eqx.filter_grad(lambda model: model(ids()).var()), **QUICK)(adapted)
    assert not np.any(everything.layers.q.base.scale) and not np.any(everything.layers.up.scale)
    merged, same = (lora.merge(one) for one in (adapted, plain))
    np.testing.assert_allclose(merged.layers.q, same.layers.q, atol=1e-6)
    assert isinstance(merged.layers.up, Quantised) and isinstance(lora.detach(adapted).layers.q, Quantised)


@pytest.mark.measured
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_backward_pass_keeps_no_copy_of_the_layers(kind):
    """Dequantised matrices of all layers would be the largest thing that waits for the backward pass."""

    def temporaries(layers):
        config = zoo.LlamaConfig(**SIZES | {"num_layers": layers, "mlp_dim": 1024})
        make = lambda: quantise(zoo.Llama.init(config, key=jax.random.key(0)), kind)
        model = eqx.filter_eval_shape(lambda: lora.attach(make(), ["q"], rank=2, alpha=4.0, key=jax.random.key(1)))
        learn, frozen = eqx.partition(model, lora.trainable(model))
        loss = lambda learn, frozen: eqx.combine(learn, frozen)(ids()[:1, :3]).var()
        compiled = jax.jit(jax.value_and_grad(loss)).lower(learn, frozen).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    matrices_of_a_layer = 3 * 64 * 1024 * 4
    assert temporaries(18) - temporaries(2) < 16 * matrices_of_a_layer / 2


@pytest.mark.parametrize("kind", GROUPS)
def test_tile_cuts_what_multiplies_by_few_bits(kind):
    """A head over tokens and an MLP over tokens: the same values and gradients, with the matrix whole for each tile."""
    layer = jax.tree.map(lambda leaf: leaf[0], quantise(llama(), kind, group=GROUPS[kind]).layers)
    x = jax.random.normal(jax.random.key(2), (1, 32, 64))
    mlp = lambda x, *weights: (gated_mlp(x, *weights) ** 2).sum(-1)
    tiled = tile(mlp, axis=(1, None, None, None), n=4)
    args = (x, layer.gate, layer.up, layer.down)
    np.testing.assert_allclose(tiled(*args), mlp(*args), rtol=1e-5)
    ours, expected = (jax.jit(jax.grad(lambda x, fn=fn: fn(x, *args[1:]).sum()))(x) for fn in (tiled, mlp))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)

    def loss(weight, x, labels):
        logits = linear("sd,df->sf", x, weight, wide=True)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean()

    labels = jnp.arange(32) % 128
    cuts = [tile(loss, axis=(None, 0, 0), n=4, lowmem=lowmem) for lowmem in (False, True)]
    plain, *tiled = (jax.jit(jax.value_and_grad(fn, argnums=1))(layer.up, x[0], labels) for fn in (loss, *cuts))
    for one in tiled:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, plain)


def test_what_cannot_be_kept_in_fewer_bits_is_refused():
    with pytest.raises(ValueError, match=r"groups of 48 inputs.*layers.q has 64.*layers.down has 128"):
        quantise(llama(), "int4", group=48)


@functools.cache
def gpt2():
    sizes = SIZES | {"num_kv_heads": 4, "head_dim": 16}
    return drawn(zoo.GPT2Config(**sizes))


@functools.cache
def gpt_oss():
    return drawn(zoo.GptOssConfig(**SIZES, num_experts=4, experts_per_token=2))


# Matrices that lie on disk as inputs by outputs, and experts of which one tensor holds all.
UNWRITTEN = {"gpt2": (gpt2, ["up", "down"]), "gpt_oss": (gpt_oss, ["gate", "down"])}


@pytest.mark.crossed("kind", "family")
@pytest.mark.parametrize("family", UNWRITTEN)
@pytest.mark.parametrize("kind", GROUPS)
def test_matrices_that_no_folder_has_in_fewer_bits_are_so_in_memory(kind, family, tmp_path):
    init, leaves = UNWRITTEN[family]
    model, before = quantise(init(), kind, group=GROUPS[kind]), init()
    for leaf in leaves:
        found, exact = getattr(model.layers, leaf), getattr(before.layers, leaf)
        assert isinstance(found, Quantised) and found.shape == exact.shape and found.dtype == exact.dtype
        for index in ((0, 0), (2, -1)) if exact.ndim == 4 else ((0,), (2,)):
            ours, matrix = (np.asarray(one[index]).T for one in (whole(found), exact))
            expected = _by_hand(matrix, kind, GROUPS[kind])
            tie = np.isclose(abs(ours - matrix), abs(expected - matrix), rtol=1e-4) & (kind == "int4")
            assert np.all(np.isclose(ours, expected, rtol=1e-6, atol=1e-7) | tie)
    plain = jax.tree.map(whole, model, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    run = eqx.filter_jit(lambda model: model(ids()), **QUICK)
    np.testing.assert_allclose(run(model), run(plain), atol=2e-6 * np.abs(run(plain)).max())
    with pytest.raises(ValueError, match=r"cannot save layers.down, .*layers.up.* in fewer bits"):
        zoo.save(model, tmp_path)


def test_what_is_to_be_saved_leaves_whole_what_no_folder_has_in_fewer_bits(tmp_path):
    with pytest.warns(
        UserWarning, match=r"GptOssConfig: layers.gate, layers.up, layers.down stay whole, 294,912 numbers"
    ):
        model = quantise(gpt_oss(), "int4", group=32, to_be_saved=True)
    assert isinstance(model.layers.q, Quantised) and isinstance(model.layers.gate, jax.Array)
    zoo.save(model, tmp_path)
    assert same(zoo.load(tmp_path, quantise="as_stored"), model)
    with pytest.raises(ValueError, match="cannot quantise a GPT2Config to be saved"):
        quantise(gpt2(), "int8", to_be_saved=True)


@pytest.mark.crossed("kind", "sizes")
@pytest.mark.parametrize("sizes", [{"data": 4, "model": 2}, {"data": 8}], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_each_device_of_a_mesh_holds_its_part(kind, sizes, tmp_path):
    zoo.save(quantise(llama(), kind, group={"int8": None, "int4": 8}[kind]), tmp_path)
    mesh = make_mesh(**sizes)
    adapted = lambda model: lora.attach(model, ["q", "down"], rank=2, alpha=4.0, key=jax.random.key(1))
    moved = lambda model: eqx.tree_at(lambda m: m.layers.q.b, model, replace_fn=lambda b: b + 0.1)
    alone, spread = (zoo.load(tmp_path, quantise="as_stored", mesh=where) for where in (None, mesh))
    for leaf in (spread.layers.q, spread.layers.o, spread.layers.gate, spread.layers.down):
        held = [{one.data.nbytes for one in part.addressable_shards} for part in (leaf.values, leaf.scale)]
        # One scale for all inputs lies beside each part of them.
        parts = 8 if kind == "int4" else mesh.shape[leaf.scale.sharding.spec[1]] if leaf.scale.sharding.spec[1] else 1
        assert held == [{leaf.values.nbytes // 8}, {leaf.scale.nbytes // parts}]
    loss = eqx.filter_jit(lambda model, ids: eqx.filter_value_and_grad(_score)(model, ids), **QUICK)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (8, 9)), jnp.int32)
    expected = loss(moved(adapted(alone)), tokens)
    with jax.set_mesh(mesh):
        found = loss(moved(adapted(spread)), jax.device_put(tokens, sharding_of(mesh, "B S", tokens.shape)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(one.dtype, jnp.inexact):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=2e-6, rtol=2e-6)


@pytest.mark.crossed("kind", "init")
@pytest.mark.parametrize("init", [llama, gpt_oss])
@pytest.mark.parametrize("kind", GROUPS)
def test_what_is_made_on_a_mesh_is_what_is_made_on_one_device(kind, init, tmp_path):
    mesh = make_mesh(data=4, model=2)
    zoo.save(init(), tmp_path)
    alone = quantise(init(), kind, group=GROUPS[kind])
    with jax.set_mesh(mesh):
        made = quantise(zoo.load(tmp_path, mesh=mesh), kind, group=GROUPS[kind])
    for one, other in zip(jax.tree.leaves(made.layers), jax.tree.leaves(alone.layers), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    gate = made.layers.gate
    assert {part.data.shape[-2] for part in gate.values.addressable_shards} == {SIZES["mlp_dim"] // 2}
    assert gate.values.sharding == shardings(gate, ("L", *"E" * (init is gpt_oss), "D", "F"), mesh).values


def test_usual_groups_fit_all_matrices():
    config = zoo.LlamaConfig(**SIZES | {"num_heads": 3, "num_kv_heads": 3})  # 96 inputs behind attention
    model = drawn(config)
    assert {quantise(model, kind).layers.o.group for kind in ("int4", "nf4")} == {32}


def _score(model, ids):
    return jnp.square(model(ids)).mean()
