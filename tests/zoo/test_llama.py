"""What Llama, Mistral and Qwen promise beside parity: how they start, how a pass is run, what their halves are."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo import hf_tiny
from tests.zoo.hf_tiny import evaluate, evaluated, jit, loaded, loss_fn
from tests.zoo.test_configs import SMALL
from transforms import tile
from zoo import Llama, LlamaConfig, Ops, Qwen2Config, Qwen3Config
from zoo.config import rows
from zoo.models.layers import attention, gated_mlp

TOKENS = jnp.asarray(hf_tiny.tokens(), jnp.int32)
REMAT = functools.partial(jax.checkpoint, prevent_cse=False)
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL, tied=True),
    "qwen3": Qwen3Config(**SMALL, attention_bias=True),
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_the_first_loss_is_that_of_a_uniform_guess(config):
    model = Llama.init(config, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 32), 0, config.vocab_size)
    assert float(jit(loss_fn)(model, tokens)[0]) == pytest.approx(math.log(config.vocab_size), abs=0.2)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_norms_start_at_one_biases_at_zero_and_matrices_with_their_deviation(config):
    model = Llama.init(config, key=jax.random.key(0), dtype=jnp.bfloat16)
    for row in rows(config):
        leaf = np.asarray(functools.reduce(getattr, row.leaf.split("."), model), np.float64)
        if row.fan_in:
            assert leaf.std() == pytest.approx(row.std(config.dims), rel=0.06)
        else:
            assert (leaf == (1.0 if "norm" in row.leaf else 0.0)).all()


def test_embedding_rows_stand_well_above_the_norms_epsilon():
    for tied in (False, True):
        config = LlamaConfig(**{**SMALL, "embed_dim": 4096, "tied": tied})
        assert rows(config)[0].std(config.dims) ** 2 > 2 * config.norm_eps


def test_an_untied_head_is_a_leaf_of_its_own_and_a_tied_one_is_not():
    assert loaded("qwen2").head is None
    model = loaded("llama2")
    assert model.head.shape == model.embed.shape and bool((model.head != model.embed).any())
    doubled = eqx.tree_at(lambda m: m.head, model, 2 * model.head)
    hidden = jnp.ones((1, 48))
    np.testing.assert_allclose(doubled.logits(hidden), 2 * model.logits(hidden), rtol=1e-6)


@pytest.mark.parametrize("case", ["llama_bias", "qwen2_windows", "qwen3_tied"])
def test_every_parameter_of_every_layer_gets_a_gradient(case):
    for path, grad in jax.tree_util.tree_leaves_with_path(evaluated(case)[2]):
        per_layer = grad.reshape(len(grad) if "layers" in str(path) else 1, -1)
        # A bias that is added to every key alike moves all scores alike, until positions turn it.
        assert bool((per_layer != 0).any(1).all()), path


def test_remat_changes_neither_loss_nor_gradients():
    loss, _, grads = evaluated("qwen3_tied")
    again, _, again_grads = evaluate(loaded("qwen3_tied"), remat=REMAT)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(again_grads), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_ops_decide_how_attention_and_mlp_run():
    seen = {}

    def spy(name, plain):
        def run(*args, **how):
            seen[name] = how
            return 2 * plain(*args, **how)

        return run

    model = loaded("mistral")
    ops = Ops(attention=spy("attention", attention), mlp=spy("mlp", gated_mlp))
    out = jax.eval_shape(lambda model: model.hidden(TOKENS, ops=ops), model)
    assert out.shape == (2, 11, 48)
    assert seen["attention"]["scale"] == 0.25 and seen["attention"]["window"] is not None
    assert seen["mlp"]["activation"] is jax.nn.silu


def test_no_position_sees_a_later_token_or_one_before_the_windows():
    model = loaded("mistral")  # three layers of windows of four: ten positions reach a query
    logits = jit(model)
    before = logits(TOKENS)
    late, early = logits(TOKENS.at[:, 6].add(1)), logits(TOKENS.at[:, 0].add(1))
    np.testing.assert_array_equal(late[:, :6], before[:, :6])
    np.testing.assert_array_equal(early[:, 10:], before[:, 10:])
    assert bool((early[:, 9] != before[:, 9]).any()) and bool((late[:, 6] != before[:, 6]).any())


@pytest.mark.parametrize("bad", [97, -1])
def test_token_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(ValueError, match=rf"token id {bad} at \[0, 3\] is outside the vocabulary of 97"):
        loaded("llama2")(TOKENS.at[0, 3].set(bad))


@pytest.mark.parametrize("case", ["gemma2_gqa", "gemma3_stretched", "llama2", "qwen2", "mistral"])
def test_a_tiled_head_is_the_head(case):
    model = loaded(case)
    hidden = jax.random.normal(jax.random.key(0), (10, 48))
    targets = jnp.arange(10) % model.config.vocab_size

    def loss(model, hidden, targets):
        logits = model.logits(hidden)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0])

    run = lambda loss: jit(eqx.filter_value_and_grad(lambda parts: loss(*parts, targets)))((model, hidden))
    _agree(run(tile(loss, axis=(None, 0, 0), n=3)), run(loss))


@pytest.mark.parametrize("case", ["gemma2_gqa", "llama2"])
def test_a_tiled_mlp_is_the_mlp(case):
    model = loaded(case)
    how = {"activation": jax.nn.silu} if case == "llama2" else {}
    layer = jax.tree.map(lambda leaf: leaf[0], model.layers)
    x = jax.random.normal(jax.random.key(0), (10, 48))
    mlp = lambda x, gate, up, down: gated_mlp(x, gate, up, down, **how)
    weights = (layer.gate, layer.up, layer.down)
    for axis in ((0, None, None, None), (None, 1, 1, 0)):  # tokens, or the hidden width
        run = lambda mlp: jit(jax.value_and_grad(lambda parts: (mlp(*parts) ** 2).sum()))((x, *weights))
        _agree(run(tile(mlp, axis=axis, n=3)), run(mlp))


def _agree(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def test_an_mlp_with_biases_can_be_cut():
    """Over the sequence, as a run's `tiling.mlp` cuts it; biases are whole for every tile."""
    from experiments.step.tiling import _tiled_mlp

    model = loaded("llama_mlp_bias")
    ops = Ops(mlp=functools.partial(_tiled_mlp, 3))
    whole, cut = (jit(lambda model, ops=ops: model.hidden(TOKENS, ops=ops))(model) for ops in (None, ops))
    np.testing.assert_allclose(cut, whole, atol=2e-5)
