"""What the models promise: how they start, how a pass is run, and which token ids they take. Parity: test_parity.py."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo import hf_tiny
from tests.zoo.hf_tiny import evaluate, evaluated, jit, loaded, loss_fn
from tests.zoo.test_configs import SMALL, read
from zoo import Gemma, GemmaConfig, Ops
from zoo.config import rows
from zoo.models.init import _normal
from zoo.models.layers import attention, gated_mlp, lookup

TOKENS = jnp.asarray(hf_tiny.tokens(), jnp.int32)
NAMES = jax.checkpoint_policies.save_only_these_names("attn_out", "mlp_out")
REMAT = functools.partial(jax.checkpoint, prevent_cse=False)
GEMMA_2 = GemmaConfig(**SMALL, post_norms=True, query_scalar=24.0, window=4, attn_softcap=5.0, final_softcap=3.0)


@pytest.fixture(scope="module")
def fresh():
    """A tiny bfloat16 Gemma 2, not yet trained."""
    return Gemma.init(GEMMA_2, key=jax.random.key(0), dtype=jnp.bfloat16)


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
    monkeypatch.setattr("zoo.models.init._SLAB", 1000)
    table = np.asarray(_normal(jax.random.key(7), 0.1, (97, 50), jnp.dtype(jnp.float32)))
    assert len(np.unique(table, axis=0)) == 97
    assert table.std() == pytest.approx(0.1, rel=0.05)


def test_init_works_with_fast_keys_and_abstractly(fresh):
    fast = Gemma.init(GEMMA_2, key=jax.random.key(0, impl="rbg"), dtype=jnp.bfloat16)
    abstract = eqx.filter_eval_shape(Gemma.init, GEMMA_2, key=jax.random.key(0), dtype=jnp.bfloat16)
    assert jax.tree.structure(fast) == jax.tree.structure(abstract) == jax.tree.structure(fresh)
    assert [leaf.dtype for leaf in jax.tree.leaves(fast)] == [leaf.dtype for leaf in jax.tree.leaves(abstract)]


# --- how a pass is run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, NAMES])
def test_remat_changes_neither_loss_nor_gradients(policy):
    loss, _, grads = evaluated("gemma2_gqa")
    again, _, again_grads = evaluate(loaded("gemma2_gqa"), remat=functools.partial(REMAT, policy=policy))
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(again_grads), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_remat_policies_find_the_names_of_the_branches():
    saved = []
    for policy in (None, NAMES):
        step = jax.grad(lambda model, policy=policy: loss_fn(model, remat=functools.partial(REMAT, policy=policy))[0])
        text = str(jax.make_jaxpr(step)(loaded("gemma_mqa")))
        saved.append(text.count("f32[3,2,11,48]"))  # one stack over layers per kept activation
    assert saved[1] > saved[0]


@pytest.mark.parametrize("field", ["attention", "mlp"])
def test_ops_decide_how_attention_and_mlp_run(field):
    calls = []
    plain = {"attention": attention, "mlp": gated_mlp}[field]

    def spy(*args, **how):
        calls.append(how)
        return 2 * plain(*args, **how)

    model = loaded("gemma2_gqa")
    out = model.hidden(TOKENS, ops=Ops(**{field: spy}))
    assert len(calls) == 1  # the scanned body is traced once
    if field == "attention":
        assert calls[0]["scale"] == 24**-0.5 and calls[0]["cap"] == 5.0 and calls[0]["window"] is not None
    assert bool((out != model.hidden(TOKENS)).any())


def test_windows_longer_than_the_sequence_are_not_traced():
    seen = []
    ops = Ops(attention=lambda *args, **how: seen.append(how["window"]) or attention(*args, **how))
    jax.eval_shape(lambda model: model.hidden(TOKENS[:, :4], ops=ops), loaded("gemma2_gqa"))
    jax.eval_shape(lambda model: model.hidden(TOKENS[:, :5], ops=ops), loaded("gemma2_gqa"))
    assert seen[0] is None and seen[1].shape == ()


def test_no_position_sees_a_later_token():
    logits = jit(loaded("gemma2_gqa"))
    before, after = logits(TOKENS), logits(TOKENS.at[:, 6].add(1))
    np.testing.assert_array_equal(after[:, :6], before[:, :6])
    assert bool((after[:, 6] != before[:, 6]).any())


def test_bfloat16_weights_computed_in_float32_lose_only_the_weights_rounding():
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loaded("gemma2_gqa"))
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    (_, logits, grads), (_, exact_logits, exact_grads) = evaluate(narrow, dtype=jnp.float32), evaluate(exact)
    np.testing.assert_allclose(logits, exact_logits, atol=2e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True):
        assert one.dtype == jnp.bfloat16
        error = jnp.linalg.norm((one.astype(jnp.float32) - other).ravel()) / jnp.linalg.norm(other.ravel())
        assert float(error) < 2**-8


@pytest.mark.parametrize("case", ["gemma_mqa", "gemma2_gqa"])
def test_every_parameter_of_every_layer_gets_a_gradient(case):
    for path, grad in jax.tree_util.tree_leaves_with_path(evaluated(case)[2]):
        per_layer = grad.reshape(len(grad) if "layers" in str(path) else 1, -1)
        assert bool((per_layer != 0).any(1).all()), path


def test_mixed_precision_holds_no_wide_copy_of_the_stacked_weights():
    """On the CPU, with XLA's loop-invariant code motion off, temporary memory does not grow with the stack."""

    def temporary_bytes(num_layers):
        config = GemmaConfig(**{**SMALL, "num_layers": num_layers, "embed_dim": 128, "mlp_dim": 2048})
        model = eqx.filter_eval_shape(Gemma.init, config, key=jax.random.key(0), dtype=jnp.bfloat16)
        step = jax.grad(lambda model: loss_fn(model, dtype=jnp.float32, remat=REMAT)[0])
        options: dict[str, str | bool] = {
            "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
            "xla_backend_optimization_level": "0",
        }
        compiled = jax.jit(step).lower(model).compile(compiler_options=options)
        stack = sum(leaf.size for leaf in jax.tree.leaves(model.layers))
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes, stack

    (few, small), (many, large) = temporary_bytes(2), temporary_bytes(10)
    assert many - few < 0.25 * (large - small)  # a float32 copy would be 4 bytes per element


def test_the_head_reads_the_embedding_and_is_stored_once():
    model = loaded("gemma_mqa")
    assert sum(leaf.size == 97 * 48 for leaf in jax.tree.leaves(model)) == 1
    doubled = eqx.tree_at(lambda m: m.embed, model, 2 * model.embed)
    hidden = jnp.ones((1, 48))
    np.testing.assert_allclose(doubled.logits(hidden), 2 * model.logits(hidden), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_and_keep_leading_dimensions(dtype):
    logits = loaded("gemma2_gqa").logits(jnp.ones((2, 3, 48), dtype))
    assert logits.dtype == jnp.float32 and logits.shape == (2, 3, 97)
    assert loaded("gemma2_gqa").logits(jnp.ones(48, dtype)).shape == (97,)


# --- token ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "where"), [(97, (0, 3)), (-1, (1, 10)), (2**31 - 1, (0, 0))])
def test_token_ids_outside_the_vocabulary_are_one_clear_error(bad, where):
    tokens = TOKENS.at[where].set(bad)
    words = rf"token id {bad} at \[{where[0]}, {where[1]}\] is outside the vocabulary of 97; 1 of 22 ids"
    with pytest.raises(ValueError, match=words):
        loaded("gemma_mqa")(tokens)


@pytest.mark.parametrize("bad", [97, -1])
def test_a_traced_id_outside_makes_what_sees_it_nan(bad):
    logits = jax.jit(lambda model, tokens: model(tokens))(loaded("gemma_mqa"), TOKENS.at[0, 3].set(bad))
    np.testing.assert_array_equal(jnp.isnan(logits).all(-1), jnp.isnan(logits).any(-1))
    assert bool(jnp.isnan(logits[0, 3:]).all()) and not bool(jnp.isnan(logits[1]).any())


def test_unsigned_token_ids_are_accepted():
    model, unsigned = loaded("gemma_mqa"), TOKENS.astype(jnp.uint16)
    assert jax.eval_shape(model, unsigned).shape == (2, 11, 97)
    np.testing.assert_array_equal(lookup(model.embed, unsigned, jnp.float32), model.embed[TOKENS])
