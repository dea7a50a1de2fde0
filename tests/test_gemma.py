"""The models against transformers, against its recorded numbers, and against their own promises."""

import dataclasses
import functools
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from tests import hf_tiny
from tests.test_configs import SMALL, read
from zoo import Gemma, GemmaConfig, Ops, load
from zoo.gemma import _draw
from zoo.nn import attention, gated_mlp, lookup, rms_norm
from zoo.tables import rows

CASES = list(hf_tiny.CASES)
TOKENS = jnp.asarray(hf_tiny.tokens(), jnp.int32)
NAMES = jax.checkpoint_policies.save_only_these_names("attn_out", "mlp_out")
REMAT = functools.partial(jax.checkpoint, prevent_cse=False)
GEMMA_2 = GemmaConfig(**SMALL, post_norms=True, query_scalar=24.0, window=4, attn_softcap=5.0, final_softcap=3.0)


def loss_fn(model, tokens=TOKENS, **how):
    logits = model.logits(model.hidden(tokens, **how))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(), logits


# Compiling takes nearly all of these tests' time, and half of it goes into making machine code fast.
jit = functools.partial(eqx.filter_jit, compiler_options={"xla_backend_optimization_level": 0})


@jit
def evaluate(model, **how):
    """Return loss, logits and gradients."""
    (loss, logits), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, **how)
    return loss, logits, grads


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Every case, loaded once."""
    return {case: load(hf_tiny.write(case, tmp_path_factory.mktemp(case))) for case in CASES}


@pytest.fixture(scope="module")
def results(models):
    """What we make of every case."""
    return {case: evaluate(models[case]) for case in CASES}


@pytest.fixture(scope="module")
def fresh():
    """A tiny bfloat16 Gemma 2, not yet trained."""
    return Gemma.init(GEMMA_2, key=jax.random.key(0), dtype=jnp.bfloat16)


@pytest.fixture(scope="module")
def references():
    """What transformers makes of every case, in float32."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return {case: hf_tiny.run(hf_tiny.reference(case)) for case in CASES}


# --- transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(case, models, results, references):
    model, expected = models[case], references[case]
    loss, logits, grads = results[case]
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-5, rtol=0)
    assert float(loss) == pytest.approx(expected["loss"], abs=5e-6)
    assert float(optax.tree.norm(grads)) == pytest.approx(expected["grad_norm"], rel=5e-6)
    for row in rows(model.config):
        for layer, name in enumerate(row.names(model.config.dims)):
            leaf = functools.reduce(getattr, row.leaf.split("."), grads)
            ours, letters = np.asarray(leaf[layer] if row.stacked else leaf), row.letters[row.stacked :]
            turned = ours.transpose([letters.index(letter) for letter in "".join(row.disk)])
            theirs = expected["grads"][name]
            np.testing.assert_allclose(turned.reshape(theirs.shape), theirs, atol=2e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_every_layer_are_those_of_transformers(case, models, references):
    model, expected = models[case], references[case]["hidden"]
    x = lookup(model.embed, TOKENS, jnp.float32) * math.sqrt(model.config.embed_dim)
    np.testing.assert_allclose(x, expected[0], atol=2e-5)
    run = jax.jit(
        lambda layers, i, x, window: jax.tree.map(lambda leaf: leaf[i], layers)(x, model.config, window=window)
    )
    for i, window in enumerate(model.config.layer_windows):
        x = run(model.layers, i, x, jnp.asarray(99 if window is None else window))
        last = i == model.config.num_layers - 1
        out = rms_norm(x, model.final_norm, model.config.norm_eps) if last else x
        np.testing.assert_allclose(out, expected[i + 1], atol=2e-5, err_msg=f"layer {i}")


@pytest.mark.parametrize("case", ["gemma_mqa", "gemma2_gqa"])
def test_bfloat16_agrees_to_its_precision(case, tmp_path, references):
    model = load(hf_tiny.write(case, tmp_path, ml_dtypes.bfloat16))
    exact = references[case]["logits"]
    theirs = hf_tiny.run(hf_tiny.reference(case, "bfloat16"))["logits"]
    logits = jit(model)(TOKENS)
    ours = np.sqrt(np.mean((np.asarray(logits) - exact) ** 2))
    assert logits.dtype == jnp.float32
    # Rounding alone, in the weights too, moves the logits (about 1 in size) by some 2 ** -7.
    assert ours < 0.02
    assert ours < 1.2 * np.sqrt(np.mean((theirs - exact) ** 2))


def test_golden_numbers_are_those_of_transformers(references):
    for case, expected in json.loads(hf_tiny.GOLDEN.read_text()).items():
        actual = hf_tiny.summary(references[case])
        np.testing.assert_allclose(actual["logits"], expected["logits"], atol=2e-6)
        assert actual["loss"] == pytest.approx(expected["loss"], abs=2e-6)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradient_norm_are_the_recorded_ones(case, results):
    expected = json.loads(hf_tiny.GOLDEN.read_text())[case]
    loss, logits, grads = results[case]
    np.testing.assert_allclose(logits[:, -1, :8], expected["logits"], atol=2e-5, rtol=0)
    assert float(loss) == pytest.approx(expected["loss"], abs=5e-6)
    assert float(optax.tree.norm(grads)) == pytest.approx(expected["grad_norm"], rel=5e-6)


# --- every convention, flipped on purpose, must be seen -------------------------------------------------------------


def _flip(**fields):
    """Change the config; the weights stay."""
    return lambda model, _: with_config(model, dataclasses.replace(model.config, **fields))


def with_config(model, config):
    return Gemma(model.embed, model.layers, model.final_norm, config)


def _patch(target, replacement):
    def change(model, monkeypatch):
        monkeypatch.setattr(target, replacement)
        return model

    return change


def _swap(*names):
    """Exchange two leaves of the layers."""

    def change(model, _):
        where = lambda m: tuple(getattr(m.layers, name) for name in names)
        return eqx.tree_at(where, model, where(model)[::-1])

    return change


def _norm(x, weight, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def _interleaved(x, theta):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def _tile_heads(q):
    """Give query head n the kv head n % K instead of n // (N/K)."""
    return q.reshape(*q.shape[:2], 2, 2, q.shape[-1]).swapaxes(2, 3).reshape(q.shape)


def _without_post_norms(model, _):
    where = lambda m: (m.layers.post_attn_norm, m.layers.post_mlp_norm)
    return eqx.tree_at(where, model, (None, None))


def _exact_gelu(x, approximate):
    return jax.scipy.stats.norm.cdf(x) * x


ODD = property(lambda config: tuple(config.window if i % 2 else None for i in range(config.num_layers)))
MUTANTS = {
    "norm multiplies by w": ("gemma_mqa", _patch("zoo.gemma.rms_norm", _norm)),
    "norm eps": ("gemma_mha", _flip(norm_eps=1e-6)),
    "gelu exact": ("gemma_mqa", _patch("jax.nn.gelu", _exact_gelu)),
    "gate and up swapped": ("gemma_mqa", _swap("gate", "up")),
    "k and v swapped": ("gemma_mqa", _swap("k", "v")),
    "norms swapped": ("gemma_mqa", _swap("attn_norm", "mlp_norm")),
    "no embedding scale": ("gemma_mqa", _patch("zoo.gemma.math.sqrt", lambda _: 1.0)),
    "rope theta": ("gemma_mqa", _flip(rope_theta=500.0)),
    "rope interleaved": ("gemma_mqa", _patch("zoo.gemma.rope", _interleaved)),
    "scale from head size": ("gemma2_gqa", _flip(query_scalar=None)),
    "no attention soft cap": ("gemma2_gqa", _flip(attn_softcap=None)),
    "no final soft cap": ("gemma2_gqa", _flip(final_softcap=None)),
    "window too long": ("gemma2_gqa", _flip(window=5)),
    "window too short": ("gemma2_gqa", _flip(window=3)),
    "no window": ("gemma2_gqa", _flip(window=None)),
    "window on odd layers": ("gemma2_gqa", _patch("zoo.configs.GemmaConfig.layer_windows", ODD)),
    "pre and post norms swapped": ("gemma2_gqa", _swap("post_attn_norm", "mlp_norm")),
    "post norms swapped": ("gemma2_gqa", _swap("post_attn_norm", "post_mlp_norm")),
    "no post norms": ("gemma2_gqa", _without_post_norms),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_flipped_convention_is_seen(name, models, results, monkeypatch):
    case, flip = MUTANTS[name]
    mutant = flip(models[case], monkeypatch)
    logits = jit(lambda model: model(TOKENS))(mutant)  # a fresh function, so that it is traced with the patch
    # Parity holds to 2e-5. The faintest flip, that of gelu, moves logits by 9e-4.
    assert float(jnp.abs(logits - results[case][1]).max()) > 5e-4


def test_kv_heads_shared_in_the_wrong_order_are_seen(models, results):
    shuffled = lambda q, k, v, **how: _tile_heads(attention(_tile_heads(q), k, v, **how))
    logits = jit(lambda m: m.logits(m.hidden(TOKENS, ops=Ops(attention=shuffled))))(models["gemma2_gqa"])
    assert float(jnp.abs(logits - results["gemma2_gqa"][1]).max()) > 1e-2


# --- initialisation -------------------------------------------------------------------------------------------------


def test_the_first_loss_is_that_of_a_uniform_guess(fresh):
    tiny = Gemma.init(read("tiny")[0], key=jax.random.key(0))
    for model in (fresh, tiny):
        vocab_size = model.config.vocab_size
        tokens = jax.random.randint(jax.random.key(1), (4, 64), 0, vocab_size)
        loss, _ = jit(loss_fn)(model, tokens)
        assert float(loss) == pytest.approx(math.log(vocab_size), abs=0.2)


def test_leaves_start_with_their_standard_deviations_and_norms_with_zero(fresh):
    for row in rows(fresh.config):
        leaf = np.asarray(functools.reduce(getattr, row.leaf.split("."), fresh), np.float64)
        std = row.std(fresh.config.dims)
        if std:
            assert abs(leaf.mean()) < 4 * std / math.sqrt(leaf.size)
            assert leaf.std() == pytest.approx(std, rel=0.05)
            assert abs(np.corrcoef(leaf[0].ravel(), leaf[1].ravel())[0, 1]) < 4 / math.sqrt(leaf[0].size)
        else:
            assert not leaf.any()


def test_a_gemma_2b_table_starts_near_two_thousandths():
    config, _ = read("gemma2b")
    assert rows(config)[0].std(config.dims) == pytest.approx(0.002, rel=0.2)


def test_leaves_of_one_shape_differ_and_the_key_decides(fresh):
    same, other = (Gemma.init(GEMMA_2, key=jax.random.key(seed), dtype=jnp.bfloat16) for seed in (0, 1))
    assert eqx.tree_equal(fresh, same)
    assert float(jnp.corrcoef(fresh.layers.gate.ravel(), fresh.layers.up.ravel())[0, 1]) < 0.05
    assert float(jnp.corrcoef(fresh.embed.ravel(), other.embed.ravel())[0, 1]) < 0.07


def test_init_draws_in_slabs_that_do_not_repeat(monkeypatch):
    monkeypatch.setattr("zoo.gemma._SLAB", 1000)
    table = np.asarray(_draw(jax.random.key(7), 0.1, (97, 50), jnp.dtype(jnp.float32)))
    assert len(np.unique(table, axis=0)) == 97
    assert table.std() == pytest.approx(0.1, rel=0.05)


def test_init_works_with_fast_keys_and_abstractly(fresh):
    fast = Gemma.init(GEMMA_2, key=jax.random.key(0, impl="rbg"), dtype=jnp.bfloat16)
    abstract = eqx.filter_eval_shape(Gemma.init, GEMMA_2, key=jax.random.key(0), dtype=jnp.bfloat16)
    assert jax.tree.structure(fast) == jax.tree.structure(abstract) == jax.tree.structure(fresh)
    assert [leaf.dtype for leaf in jax.tree.leaves(fast)] == [leaf.dtype for leaf in jax.tree.leaves(abstract)]


# --- how a pass is run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, NAMES])
def test_remat_changes_neither_loss_nor_gradients(policy, models, results):
    loss, _, grads = results["gemma2_gqa"]
    again, _, again_grads = evaluate(models["gemma2_gqa"], remat=functools.partial(REMAT, policy=policy))
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(again_grads), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_remat_policies_find_the_names_of_the_branches(models):
    saved = []
    for policy in (None, NAMES):
        step = jax.grad(lambda model, policy=policy: loss_fn(model, remat=functools.partial(REMAT, policy=policy))[0])
        text = str(jax.make_jaxpr(step)(models["gemma_mqa"]))
        saved.append(text.count("f32[3,2,11,48]"))  # one stack over layers per kept activation
    assert saved[1] > saved[0]


@pytest.mark.parametrize("field", ["attention", "mlp"])
def test_ops_decide_how_attention_and_mlp_run(field, models):
    calls = []
    plain = {"attention": attention, "mlp": gated_mlp}[field]

    def spy(*args, **how):
        calls.append(how)
        return 2 * plain(*args, **how)

    model = models["gemma2_gqa"]
    out = model.hidden(TOKENS, ops=Ops(**{field: spy}))
    assert len(calls) == 1  # the scanned body is traced once
    if field == "attention":
        assert calls[0]["scale"] == 24**-0.5 and calls[0]["cap"] == 5.0 and calls[0]["window"] is not None
    assert bool((out != model.hidden(TOKENS)).any())


def test_windows_longer_than_the_sequence_are_not_traced(models):
    seen = []
    ops = Ops(attention=lambda *args, **how: seen.append(how["window"]) or attention(*args, **how))
    jax.eval_shape(lambda model: model.hidden(TOKENS[:, :4], ops=ops), models["gemma2_gqa"])
    jax.eval_shape(lambda model: model.hidden(TOKENS[:, :5], ops=ops), models["gemma2_gqa"])
    assert seen[0] is None and seen[1].shape == ()


def test_no_position_sees_a_later_token(models):
    logits = jit(models["gemma2_gqa"])
    before, after = logits(TOKENS), logits(TOKENS.at[:, 6].add(1))
    np.testing.assert_array_equal(after[:, :6], before[:, :6])
    assert bool((after[:, 6] != before[:, 6]).any())


def test_bfloat16_weights_computed_in_float32_lose_only_the_weights_rounding(models):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), models["gemma2_gqa"])
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    (_, logits, grads), (_, exact_logits, exact_grads) = evaluate(narrow, dtype=jnp.float32), evaluate(exact)
    np.testing.assert_allclose(logits, exact_logits, atol=2e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True):
        assert one.dtype == jnp.bfloat16
        error = jnp.linalg.norm((one.astype(jnp.float32) - other).ravel()) / jnp.linalg.norm(other.ravel())
        assert float(error) < 2**-8


@pytest.mark.parametrize("case", ["gemma_mqa", "gemma2_gqa"])
def test_every_parameter_of_every_layer_gets_a_gradient(case, results):
    for path, grad in jax.tree_util.tree_leaves_with_path(results[case][2]):
        per_layer = grad.reshape(len(grad) if "layers" in str(path) else 1, -1)
        assert bool((per_layer != 0).any(1).all()), path


def test_mixed_precision_holds_no_wide_copy_of_the_stacked_weights():
    """On the CPU, with XLA's loop-invariant code motion off, temporary memory does not grow with the stack."""

    def temporary_bytes(num_layers):
        config = GemmaConfig(**{**SMALL, "num_layers": num_layers, "embed_dim": 128, "mlp_dim": 2048})
        model = eqx.filter_eval_shape(Gemma.init, config, key=jax.random.key(0), dtype=jnp.bfloat16)
        step = jax.grad(lambda model: loss_fn(model, dtype=jnp.float32, remat=REMAT)[0])
        options = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion", "xla_backend_optimization_level": 0}
        compiled = jax.jit(step).lower(model).compile(compiler_options=options)
        stack = sum(leaf.size for leaf in jax.tree.leaves(model.layers))
        return compiled.memory_analysis().temp_size_in_bytes, stack

    (few, small), (many, large) = temporary_bytes(2), temporary_bytes(10)
    assert many - few < 0.25 * (large - small)  # a float32 copy would be 4 bytes per element


def test_the_head_reads_the_embedding_and_is_stored_once(models):
    model = models["gemma_mqa"]
    assert sum(leaf.size == 97 * 48 for leaf in jax.tree.leaves(model)) == 1
    doubled = eqx.tree_at(lambda m: m.embed, model, 2 * model.embed)
    hidden = jnp.ones((1, 48))
    np.testing.assert_allclose(doubled.logits(hidden), 2 * model.logits(hidden), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_and_keep_leading_dimensions(dtype, models):
    logits = models["gemma2_gqa"].logits(jnp.ones((2, 3, 48), dtype))
    assert logits.dtype == jnp.float32 and logits.shape == (2, 3, 97)
    assert models["gemma2_gqa"].logits(jnp.ones(48, dtype)).shape == (97,)


# --- token ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "where"), [(97, (0, 3)), (-1, (1, 10)), (2**31 - 1, (0, 0))])
def test_token_ids_outside_the_vocabulary_are_one_clear_error(bad, where, models):
    tokens = TOKENS.at[where].set(bad)
    words = rf"token id {bad} at \[{where[0]}, {where[1]}\] is outside the vocabulary of 97; 1 of 22 ids"
    with pytest.raises(ValueError, match=words):
        models["gemma_mqa"](tokens)


@pytest.mark.parametrize("bad", [97, -1])
def test_a_traced_id_outside_makes_what_sees_it_nan(bad, models):
    logits = jax.jit(lambda model, tokens: model(tokens))(models["gemma_mqa"], TOKENS.at[0, 3].set(bad))
    np.testing.assert_array_equal(jnp.isnan(logits).all(-1), jnp.isnan(logits).any(-1))
    assert bool(jnp.isnan(logits[0, 3:]).all()) and not bool(jnp.isnan(logits[1]).any())


def test_unsigned_token_ids_are_accepted(models):
    model, unsigned = models["gemma_mqa"], TOKENS.astype(jnp.uint16)
    assert jax.eval_shape(model, unsigned).shape == (2, 11, 97)
    np.testing.assert_array_equal(lookup(model.embed, unsigned, jnp.float32), model.embed[TOKENS])
