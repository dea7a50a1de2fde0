"""The models against transformers and its recorded numbers; and every convention, flipped, against ours."""

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
from tests.hf_tiny import evaluated, jit, loaded
from zoo import Gemma, Mixture, Ops, load
from zoo.nn import attention, lookup, rms_norm
from zoo.rotary import frequencies
from zoo.tables import rows

TOKENS = jnp.asarray(hf_tiny.tokens(), jnp.int32)
CASES = list(hf_tiny.CASES)


@pytest.fixture(scope="module")
def references():
    """What transformers makes of every case, in float32."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return {case: hf_tiny.run(hf_tiny.reference(case)) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(case, references):
    model, expected = loaded(case), references[case]
    loss, logits, grads = evaluated(case)
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-5, rtol=0)
    assert float(loss) == pytest.approx(expected["loss"], abs=5e-6)
    assert float(optax.tree.norm(grads)) == pytest.approx(expected["grad_norm"], rel=5e-6)
    for row in rows(model.config):
        leaf = np.asarray(functools.reduce(getattr, row.leaf.split("."), grads))
        letters = row.letters[len(row.stack) :]
        for name, place in row.places(model.config.dims):
            theirs = expected["grads"][name]
            turned = leaf[place].transpose([letters.index(letter) for letter in "".join(row.disk)])
            np.testing.assert_allclose(turned.reshape(theirs.shape), theirs, atol=2e-5, rtol=0, err_msg=name)


def _layers(model):
    """Yield each layer's weights, window and frequencies, in order."""
    config, taken = model.config, {True: 0, False: 0}
    dense_layers = config.dense_layers if isinstance(model, Mixture) else ()
    for i, (window, (theta, scaling)) in enumerate(zip(config.layer_windows, config.layer_ropes, strict=True)):
        dense = i in dense_layers
        place, stack = taken[dense], model.dense if dense else model.layers
        taken[dense] += 1
        frequency = frequencies(config.head_dim, theta, scaling, TOKENS.shape[1])
        yield jax.tree.map(lambda leaf, place=place: leaf[place], stack), window, frequency


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_every_layer_are_those_of_transformers(case, references):
    model, expected = loaded(case), references[case]["hidden"]
    is_gemma = isinstance(model, Gemma)
    scale = math.sqrt(model.config.embed_dim) if is_gemma else 1.0
    x = lookup(model.embed, TOKENS, jnp.float32) * scale
    np.testing.assert_allclose(x, expected[0], atol=2e-5)
    run = jax.jit(lambda layer, x, window, frequency: layer(x, model.config, frequency=frequency, window=window))
    for i, (layer, window, frequency) in enumerate(_layers(model)):
        x = run(layer, x, jnp.asarray(99 if window is None else window), frequency)
        x = x[0] if isinstance(x, tuple) else x  # with how its tokens were routed
        last = i == model.config.num_layers - 1
        norm = lambda x: rms_norm(x, model.final_norm, model.config.norm_eps, offset=float(is_gemma))
        np.testing.assert_allclose(norm(x) if last else x, expected[i + 1], atol=2e-5, err_msg=f"layer {i}")


@pytest.mark.parametrize(
    "case", ["gemma_mqa", "gemma2_gqa", "gemma3", "llama32", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
)
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
def test_logits_loss_and_gradient_norm_are_the_recorded_ones(case):
    expected = json.loads(hf_tiny.GOLDEN.read_text())[case]
    loss, logits, grads = evaluated(case)
    np.testing.assert_allclose(logits[:, -1, :8], expected["logits"], atol=2e-5, rtol=0)
    assert float(loss) == pytest.approx(expected["loss"], abs=5e-6)
    assert float(optax.tree.norm(grads)) == pytest.approx(expected["grad_norm"], rel=5e-6)


# --- every convention, flipped on purpose, must be seen -------------------------------------------------------------


def _flip(**fields):
    """Change the config; the weights stay."""
    return lambda model, _: with_config(model, dataclasses.replace(model.config, **fields))


def with_config(model, config):
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return type(model)(**fields | {"config": config})


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


def _norm(x, weight, eps, offset=1.0):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (1 - offset + weight)


def _interleaved(x, frequency, positions=None):
    angle = jnp.arange(x.shape[1])[:, None] * frequency
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
def test_a_flipped_convention_is_seen(name, monkeypatch):
    case, flip = MUTANTS[name]
    mutant = flip(loaded(case), monkeypatch)
    logits = jit(lambda model: model(TOKENS))(mutant)  # a fresh function, so that it is traced with the patch
    # Parity holds to 2e-5. The faintest flip, that of gelu, moves logits by 9e-4.
    assert float(jnp.abs(logits - evaluated(case)[1]).max()) > 5e-4


def test_kv_heads_shared_in_the_wrong_order_are_seen():
    shuffled = lambda q, k, v, **how: _tile_heads(attention(_tile_heads(q), k, v, **how))
    logits = jit(lambda m: m.logits(m.hidden(TOKENS, ops=Ops(attention=shuffled))))(loaded("gemma2_gqa"))
    assert float(jnp.abs(logits - evaluated("gemma2_gqa")[1]).max()) > 1e-2
