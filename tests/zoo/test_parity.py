"""The models against transformers and its recorded numbers; and every convention, flipped, against ours."""

import collections
import dataclasses
import functools
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.zoo import hf_tiny
from tests.zoo.hf_tiny import evaluate, evaluated, jit, loaded
from zoo import AbstractMixture, ForwardPass, Ops, load
from zoo.config import rows
from zoo.models.forward import LayerPass, layer_passes
from zoo.models.hybrids.delta import delta_rule
from zoo.models.hybrids.mamba import state_space
from zoo.models.hybrids.shared import convolved
from zoo.models.layers import attention, rms_norm, rope
from zoo.models.mixtures.experts import experts, route, weighed

TOKENS = jnp.asarray(hf_tiny.tokens(), jnp.int32)
CASES = list(hf_tiny.CASES)


@functools.cache
def _of_transformers(case):
    return hf_tiny.run(hf_tiny.reference(case))


@pytest.fixture
def reference(case):
    """What transformers makes of the case, in float32; in each process of those cases alone that it runs."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return _of_transformers(case)


def norm(grads):
    return math.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(grads)))


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(case, reference):
    model, expected = loaded(case), reference
    loss, logits, grads = evaluated(case)
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-5, rtol=0)
    assert float(loss) == pytest.approx(expected["loss"], abs=5e-6)
    assert norm(grads) == pytest.approx(expected["grad_norm"], rel=5e-6)
    for row in rows(model.config):
        leaf = np.asarray(functools.reduce(getattr, row.leaf.split("."), grads))
        for name, place in row.tensors(model.config.dims):
            theirs = row.turned(expected["grads"][name], model.config.dims)
            np.testing.assert_allclose(leaf[place], theirs, atol=2e-5, rtol=0, err_msg=name)


def _layers(model, own):
    """Yield each layer's weights, and window, chunk, frequencies and temperature, in order."""
    config, taken = model.config, collections.Counter()
    per_layer, told = layer_passes(config, ForwardPass(), TOKENS.shape[1])
    per_layer = dataclasses.replace(per_layer, own=own)
    model = jax.tree.map(np.asarray, eqx.filter(model, eqx.is_array))
    for i, name in enumerate(config.layer_stacks):
        place, stack = taken[name], getattr(model, name)
        taken[name] += 1
        own = told(jax.tree.map(lambda leaf, i=i: leaf[i], per_layer))
        told_of = own.window, own.chunk, own.frequency, own.temperature, own.own
        yield jax.tree.map(lambda leaf, place=place: leaf[place], stack), told_of


@jit
def _begun(model):
    x = model.embedded(TOKENS, jnp.float32)
    return x, *model.beside(TOKENS, x)


@jit
def _normalised(model, x):
    return model.normalised(x)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_every_layer_are_those_of_transformers(case, reference):
    model, expected = loaded(case), reference["hidden"]
    x, own, handed = _begun(model)
    streams = lambda x: np.moveaxis(x, 2, 0) if x.ndim == 4 else x  # there, those of Gemma 3n come first
    np.testing.assert_allclose(streams(x), expected[0], atol=2e-5)

    @jit
    def run(layer, x, window, chunk, frequency, temperature, own, handed):
        how = {"frequency": frequency, "temperature": temperature, "window": window, "own": own, "handed": handed}
        how["chunk"] = chunk
        out, aux = layer(x, model.config, LayerPass(pairs=model.config.rotary_pairs, **how))
        return out, aux.handed

    for i, (layer, (window, *told)) in enumerate(_layers(model, own)):
        x, handed = run(layer, x, np.asarray(99 if window is None else window), *told, handed)
        last = i == model.config.num_layers - 1 and x.ndim == 3  # of streams, the last are told as they are
        found = _normalised(model, x) if last else streams(x)
        # As the logits': streams grow with the layers, and float32 has no more digits for the larger.
        size = max(1, np.sqrt(np.mean(np.square(expected[i + 1]))))
        np.testing.assert_allclose(found, expected[i + 1], atol=2e-5 * size, err_msg=f"layer {i}")


@pytest.mark.parametrize(
    "case",
    [
        "gemma_mqa",
        "gemma2_gqa",
        "gemma3",
        "llama32",
        "mistral",
        "qwen2",
        "qwen3",
        "mixtral",
        "qwen3_moe",
        "smollm3",
        "olmo2",
        "gpt2",
        "neox",
        "opt",
        "phi3_long",
        "granite",
        "olmoe",
        "qwen2_moe",
        "gpt_oss",
        "glm4",
        "ernie",
        "cohere",
        "olmo3",
        "cohere2",
        "granite4",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_flash_bare",
        "qwen3_next",
        "gemma3n",
        "ministral3",
        "mistral4_other",
        "exaone4",
        "minimax_m2",
        "starcoder2",
        "stablelm",
        "llama4",
        "nemotron",
        "hunyuan",
        "lfm2",
        "granite4_hybrid",
    ],
)
def test_bfloat16_agrees_to_its_precision(case, tmp_path, reference):
    model = load(hf_tiny.write(case, tmp_path, ml_dtypes.bfloat16))
    exact = reference["logits"]
    theirs = hf_tiny.logits(hf_tiny.reference(case, "bfloat16"))
    logits = jit(model)(TOKENS)
    errors = lambda logits: np.sqrt(np.mean((np.asarray(logits) - exact) ** 2, axis=-1))  # of each token
    whole = lambda logits: np.sqrt(np.mean(errors(logits) ** 2))
    assert logits.dtype == jnp.float32
    # Rounding alone, in the weights too, moves the logits (about 1 in size) by some 2 ** -7. It also sends a token of a
    # mixture that stands between two experts to the other one.
    typical = (lambda logits: np.median(errors(logits))) if isinstance(model, AbstractMixture) else whole
    # Of Qwen 3 Next one token here does, and the norm behind the delta rule magnifies what is small; so do the bounds
    # at which Gemma 3n cuts gates off. Between LFM's gates three rounded numbers are multiplied.
    if case in ("qwen3_next", "gemma3n", "lfm2"):
        assert typical(logits) < min(0.04 if case == "lfm2" else 0.03, 1.3 * typical(theirs))
    else:
        assert typical(logits) < 0.02
        assert whole(logits) < 1.2 * whole(theirs)


@pytest.mark.parametrize("case", CASES)
def test_golden_numbers_are_those_of_transformers(case, reference):
    actual, expected = hf_tiny.summary(reference), json.loads(hf_tiny.GOLDEN.read_text())[case]
    largest = np.abs(expected["logits"]).max()  # transformers' own differ by 2.1e-6 from one CPU to another, of 2.3
    np.testing.assert_allclose(actual["logits"], expected["logits"], atol=2e-6 * max(1, largest))
    assert actual["loss"] == pytest.approx(expected["loss"], abs=2e-6)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradient_norm_are_the_recorded_ones(case):
    expected = json.loads(hf_tiny.GOLDEN.read_text())[case]
    loss, logits, grads = evaluated(case)
    np.testing.assert_allclose(logits[:, -1, :8], expected["logits"], atol=2e-5, rtol=0)
    assert float(loss) == pytest.approx(expected["loss"], abs=5e-6)
    assert norm(grads) == pytest.approx(expected["grad_norm"], rel=5e-6)


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


def _interleaved(x, frequency, positions=None, temperature=None):
    angle = jnp.arange(x.shape[1])[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def _without_temperature(x, frequency, positions=None, temperature=None):
    return rope(x, frequency, positions)


def _tile_heads(q):
    """Give query head n the kv head n % K instead of n // (N/K)."""
    return q.reshape(*q.shape[:2], 2, 2, q.shape[-1]).swapaxes(2, 3).reshape(q.shape)


def _exact_gelu(x, approximate):
    return jax.scipy.stats.norm.cdf(x) * x


def _stretch(**fields):
    """Change how rotary frequencies are stretched."""
    return lambda model, patch: _flip(rope_scaling=dataclasses.replace(model.config.rope_scaling, **fields))(
        model, patch
    )


def _without(*names):
    """Leave parameters of the layers out."""

    def change(model, _):
        where = lambda m: tuple(getattr(m.layers, name) for name in names)
        return eqx.tree_at(where, model, (None,) * len(names))

    return change


def _zero(*names):
    """Leave out what is added: its parameters, or those it is multiplied by last, are 0."""

    def change(model, _):
        where = lambda m: tuple(getattr(m.layers, name) for name in names)
        return eqx.tree_at(where, model, tuple(jax.device_put(np.zeros_like(leaf)) for leaf in where(model)))

    return change


def _tie(model, _):
    return dataclasses.replace(model, head=None)


def _untie(model, _):
    return dataclasses.replace(model, head=2 * model.embed)


def _norm_after_rope(q, frequency, positions=None, temperature=None):
    """Rotate first, and normalise after: as if the weights of the norm stood behind."""
    return rms_norm(rope(q, frequency, positions), jnp.ones(q.shape[-1]), 1e-6, offset=0.0)


def _norm_of_each_head(x, weight, eps, *, offset):
    """Normalise heads of 16 apart, where what is normalised is all heads together."""
    if x.shape[-1] == 48:  # the residual stream
        return rms_norm(x, weight, eps, offset=offset)
    heads = x.reshape(*x.shape[:-1], -1, 16)
    return rms_norm(heads, jnp.ones(16), eps, offset=offset).reshape(x.shape) * weight


def _stale_weights(x, router, chosen, *, normalise):
    """Choose by probability, and weigh all alike."""
    weights, experts, probs = route(x, router, chosen, normalise=normalise)
    return jnp.ones_like(weights) / chosen, experts, probs


def _uncentred(x, weight, bias, eps, offset=0.0):
    """Leave the mean where it is."""
    return rms_norm(x, weight, eps, offset=0.0) + bias


def _all_multiplied(x, frequency, positions=None, temperature=None):
    """Multiply what does not turn too."""
    return rope(x, frequency, positions) * (1.0 if temperature is None else temperature)


def _serial(model, monkeypatch):
    """Give the MLP what attention made, normalised by the same weights."""
    monkeypatch.setattr("zoo.families.gpts.cohere.CohereConfig.parallel", False)
    return eqx.tree_at(lambda m: m.layers.mlp_norm, model, model.layers.attn_norm, is_leaf=lambda x: x is None)


def _one_after_the_other(model, _):
    """Give the MLP of StableLM what attention made, normalised by the same weights and biases."""
    model = with_config(model, dataclasses.replace(model.config, parallel_residual=False))
    where, own = lambda m: (m.layers.mlp_norm, m.layers.mlp_norm_bias), model.layers
    return eqx.tree_at(where, model, (own.attn_norm, own.attn_norm_bias), is_leaf=lambda x: x is None)


def _delta_rule(change):
    """Change what the delta rule is given."""
    return _patch("zoo.models.hybrids.delta.delta_rule", lambda *parts: delta_rule(*change(*parts)))


def _state_space(change):
    """Change what a state space is given."""
    return _patch("zoo.models.hybrids.mamba.state_space", lambda *parts: state_space(*change(*parts)))


def _rms_only(x, weight, bias, eps, offset=0.0):
    """Leave the mean where it is, of norms without a bias."""
    return rms_norm(x, weight, eps, offset=0.0)


GRANITE = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
LLAMA_3 = {"low_freq": 0.5, "high_freq": 8.0, "factor": 2.0, "original_length": 64}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "factor": 2.0, "attention_factor": 1.0}
MUTANTS = {
    "norm multiplies by w": ("gemma_mqa", _patch("zoo.models.gemmas.gemma.rms_norm", _norm)),
    "norm eps": ("gemma_mha", _flip(norm_eps=1e-6)),
    "gelu exact": ("gemma_mqa", _patch("jax.nn.gelu", _exact_gelu)),
    "gate and up swapped": ("gemma_mqa", _swap("gate", "up")),
    "k and v swapped": ("gemma_mqa", _swap("k", "v")),
    "norms swapped": ("gemma_mqa", _swap("attn_norm", "mlp_norm")),
    "no embedding scale": ("gemma_mqa", _patch("zoo.families.gemmas.gemma.GemmaLike.embed_scale", None)),
    "rope theta": ("gemma_mqa", _flip(rope_theta=500.0)),
    "rope interleaved": ("gemma_mqa", _patch("zoo.models.forward.rope", _interleaved)),
    "scale from head size": ("gemma2_gqa", _flip(query_scalar=None)),
    "no attention soft cap": ("gemma2_gqa", _flip(attn_softcap=None)),
    "no final soft cap": ("gemma2_gqa", _flip(final_softcap=None)),
    "window too long": ("gemma2_gqa", _flip(window=5)),
    "window too short": ("gemma2_gqa", _flip(window=3)),
    "no window": ("gemma2_gqa", _flip(window=None)),
    "window on odd layers": ("gemma2_gqa", _flip(attention_pattern="GL")),
    "pre and post norms swapped": ("gemma2_gqa", _swap("post_attn_norm", "mlp_norm")),
    "post norms swapped": ("gemma2_gqa", _swap("post_attn_norm", "post_mlp_norm")),
    "no post norms": ("gemma2_gqa", _without("post_attn_norm", "post_mlp_norm")),
    "gemma 3: no norms of q and k": ("gemma3", _without("q_norm", "k_norm")),
    "gemma 3: norms of q and k swapped": ("gemma3", _swap("q_norm", "k_norm")),
    "gemma 3: one base": ("gemma3", _flip(local_rope_theta=1e6)),
    "gemma 3: bases swapped": ("gemma3", _flip(local_rope_theta=1e6, rope_theta=1e4)),
    "gemma 3: window too long": ("gemma3", _flip(window=5)),
    "gemma 3: another pattern": ("gemma3", _flip(attention_pattern="LLLLG")),
    "gemma 3: scale from head size": ("gemma3", _flip(query_scalar=None)),
    "gemma 3: not stretched": ("gemma3_stretched", _flip(rope_scaling=None)),
    "gemma 3: no temperature": ("gemma3_yarn", _patch("zoo.models.forward.rope", _without_temperature)),
    "gemma 3: no final soft cap": ("gemma3_stretched", _flip(final_softcap=None)),
    "llama: norms multiply by 1 + w": (
        "llama2",
        _patch("zoo.models.llama.rms_norm", lambda *how, offset, **more: rms_norm(*how, **more)),
    ),
    "llama: gelu": ("llama2", _flip(activation="gelu")),
    "llama: rope interleaved": ("llama2", _patch("zoo.models.forward.rope", _interleaved)),
    "llama: embedding as head": ("llama2", _tie),
    "llama: another head": ("llama32", _untie),
    "llama: not stretched": ("llama32", _flip(rope_scaling=None)),
    **{f"llama: {name}": ("llama32", _stretch(**{name: value})) for name, value in LLAMA_3.items()},
    "llama: no biases": ("llama_bias", _zero("q_bias", "k_bias", "v_bias", "o_bias")),
    "llama: no bias after attention": ("llama_bias", _zero("o_bias")),
    "llama: no biases of the MLP": ("llama_mlp_bias", _zero("gate_bias", "up_bias", "down_bias")),
    "llama: gelu of the tanh form": ("llama_mlp_bias", _flip(activation="gelu_tanh")),
    "llama: relu squared": ("llama_relu", _flip(activation="relu_squared")),
    "llama: linear not stretched": ("llama_linear", _flip(rope_scaling=None)),
    "llama: dynamic not stretched": ("llama_dynamic", _flip(rope_scaling=None)),
    "llama: dynamic from a longer text": ("llama_dynamic", _stretch(original_length=9)),
    **{f"llama: yarn's {name}": ("llama_yarn_more", _stretch(**{name: value})) for name, value in YARN.items()},
    "mistral: window too long": ("mistral", _flip(window=5)),
    "mistral: window too short": ("mistral", _flip(window=3)),
    "qwen 2: no bias of q": ("qwen2", _zero("q_bias")),
    "qwen 2: no bias of k": ("qwen2", _zero("k_bias")),
    "qwen 2: no bias of v": ("qwen2", _zero("v_bias")),
    "qwen 2: windows on all layers": ("qwen2_windows", _flip(attention_pattern="L")),
    "qwen 3: norms of q and k swapped": ("qwen3", _swap("q_norm", "k_norm")),
    "qwen 3: norms after rope too": ("qwen3", _patch("zoo.models.forward.rope", _norm_after_rope)),
    "qwen 3: no attention factor": ("qwen3_yarn", _stretch(attention_factor=None)),
    "mixtral: one expert": ("mixtral", _flip(experts_per_token=1)),
    "mixtral: weights as they are": (
        "mixtral",
        _patch("zoo.families.llamas.mistral.MixtralConfig.normalise_weights", False),
    ),
    "mixtral: equal weights": ("mixtral", _patch("zoo.models.mixtures.experts.route", _stale_weights)),
    "mixtral: gate and up swapped": ("mixtral", _swap("gate", "up")),
    "qwen 3 moe: weights as they are": ("qwen3_moe", _flip(normalise_weights=False)),
    "qwen 3 moe: weights normalised": ("qwen3_moe_raw", _flip(normalise_weights=True)),
    "qwen 3 moe: no windows": ("qwen3_moe_mixed", _flip(window=None)),
    "smollm 3: all layers turn": ("smollm3", _flip(rope_pattern="R")),
    "smollm 3: other layers turn": ("smollm3", _flip(rope_pattern="NR")),
    "smollm 3: temperature everywhere": (
        "smollm3_yarn",
        _patch("zoo.families.llamas.smollm.SmolLM3Config.rope_temperature", 1.0 + math.log(4) / 10),
    ),
    "smollm 3: windows where positions turn": ("smollm3_yarn", _flip(attention_pattern="LLG")),
    "olmo 2: norms behind swapped": ("olmo2", _swap("post_attn_norm", "post_mlp_norm")),
    "olmo 2: each head's own norm": ("olmo2", _patch("zoo.models.llama.rms_norm", _norm_of_each_head)),
    "seed: no bias of q": ("seed", _zero("q_bias")),
    "seed: no bias after attention": ("seed_out", _zero("o_bias")),
    "glm: no bias of q": ("glm4", _zero("q_bias")),
    "ernie: halves turn together": ("ernie", _patch("zoo.families.llamas.ernie.ErnieConfig.rotary_pairs", False)),
    "ernie: no bias of o": ("ernie", _zero("o_bias")),
    "ernie: no bias of down": ("ernie", _zero("down_bias")),
    "ernie: not stretched": ("ernie_tied", _flip(rope_scaling=None)),
    "glm: whole heads turn": ("glm4", _flip(rotary_fraction=1.0)),
    "glm: halves turn together": ("glm4", _patch("zoo.families.llamas.glm.GLMConfig.rotary_pairs", False)),
    "glm: gate and up swapped": ("glm", _swap("gate", "up")),
    "glm: norms behind swapped": ("glm4", _swap("post_attn_norm", "post_mlp_norm")),
    "cohere: logits as they are": ("cohere", _flip(logit_scaling=1.0)),
    "cohere: one after the other": ("cohere", _serial),
    "cohere: halves turn together": ("cohere", _patch("zoo.families.gpts.cohere.CohereConfig.rotary_pairs", False)),
    "cohere: norms of the root mean square": ("cohere", _patch("zoo.models.gpt.layer_norm", _rms_only)),
    "olmo 3: global layers not stretched": ("olmo3", _flip(rope_scaling=None)),
    "olmo 3: local layers as global ones": ("olmo3_other", _flip(local_rope_theta=1e4)),
    "olmo 3: windows on all layers": ("olmo3", _flip(attention_pattern="L")),
    "olmo 3: each head's own norm": ("olmo3", _patch("zoo.models.llama.rms_norm", _norm_of_each_head)),
    "cohere 2: global layers turn": (
        "cohere2",
        _patch("zoo.families.gpts.cohere.Cohere2Config.layer_ropes", ((1e4, None),) * 4),
    ),
    "cohere 2: window too long": ("cohere2", _flip(window=5)),
    "cohere 2: temperature everywhere": (
        "cohere2_yarn",
        _patch("zoo.families.gpts.cohere.Cohere2Config.rope_temperature", 1.0 + math.log(4) / 10),
    ),
    "granite 4: gate and up swapped": ("granite4", _swap("gate", "up")),
    "granite 4: nothing turns": ("granite4", _flip(rotated=False)),
    "granite 4: all turns": ("granite4_unrotated", _flip(rotated=True)),
    "gpt 2: no biases": ("gpt2", _zero("q_bias", "k_bias", "v_bias", "o_bias", "up_bias", "down_bias")),
    "gpt 2: no biases of norms": ("gpt2", _zero("attn_norm_bias", "mlp_norm_bias")),
    "gpt 2: norms of the root mean square": ("gpt2", _patch("zoo.models.gpt.layer_norm", _uncentred)),
    "gpt 2: no positions": ("gpt2", lambda model, _: dataclasses.replace(model, positions=None)),
    "gpt 2: side by side": ("gpt2", _patch("zoo.families.gpts.gpt.GPTLike.parallel", True)),
    "gpt 2: exact gelu": ("gpt2", _flip(activation="gelu")),
    "gpt 2: queries and keys swapped": ("gpt2", _swap("q", "v")),
    "gpt neox: one after the other": ("neox", _flip(parallel_residual=False)),
    "gpt neox: whole heads turn": ("neox", _flip(rotary_fraction=1.0)),
    "gpt neox: another base": ("neox_serial", _flip(rope_theta=1e4)),
    "opt: positions from the first row": ("opt", _patch("zoo.families.gpts.opt.OPTConfig.position_offset", 0)),
    "opt: gelu": ("opt", _flip(activation="gelu")),
    "starcoder 2: exact gelu": ("starcoder2", _flip(activation="gelu")),
    "starcoder 2: window too long": ("starcoder2", _flip(window=5)),
    "starcoder 2: no bias after attention": ("starcoder2", _zero("o_bias")),
    "starcoder 2: no biases of norms": ("starcoder2", _zero("attn_norm_bias", "mlp_norm_bias")),
    "starcoder 2: norms of the root mean square": ("starcoder2", _patch("zoo.models.gpt.layer_norm", _uncentred)),
    "starcoder 2: not stretched": ("starcoder2_bare", _flip(rope_scaling=None)),
    "stablelm: whole heads turn": ("stablelm", _flip(rotary_fraction=1.0)),
    "stablelm: no bias of q": ("stablelm", _zero("q_bias")),
    "stablelm: gate and up swapped": ("stablelm", _swap("gate", "up")),
    "stablelm: one after the other": ("stablelm_parallel", _one_after_the_other),
    "stablelm: no norms of q and k": ("stablelm_parallel", _without("q_norm", "k_norm")),
    "stablelm: not stretched": ("stablelm_parallel", _flip(rope_scaling=None)),
    "nemotron: norms as they are": ("nemotron", _patch("zoo.families.gpts.nemotron.NemotronConfig.norm_offset", 0.0)),
    "nemotron: relu": ("nemotron", _flip(activation="relu")),
    "nemotron: whole heads turn": ("nemotron", _flip(rotary_fraction=1.0)),
    "nemotron: no biases of the MLP": ("nemotron_biases", _zero("up_bias", "down_bias")),
    "nemotron: not stretched": ("nemotron_biases", _flip(rope_scaling=None)),
    "hunyuan: norms before turning": (
        "hunyuan",
        _patch("zoo.families.llamas.hunyuan.HunyuanConfig.turned_first", False),
    ),
    "hunyuan: the base as it is": ("hunyuan", _flip(rope_theta=1e4)),
    "hunyuan: no norms of q and k": ("hunyuan", _without("q_norm", "k_norm")),
    "hunyuan: no bias of o": ("hunyuan_bias", _zero("o_bias")),
    "hunyuan: not stretched": ("hunyuan_bias", _flip(rope_scaling=None)),
    "phi 3: gate and up swapped": ("phi3", _swap("gate", "up")),
    "phi 3: whole heads turn": ("phi3_long", _flip(rotary_fraction=1.0, rope_scaling=None)),
    "phi 3: factors of short texts": ("phi3_long", _stretch(original_length=11)),
    "phi 3: no temperature": ("phi3_long", _stretch(attention_factor=1.0)),
    "phi 3: whole heads are multiplied": ("phi3_long", _patch("zoo.models.forward.rope", _all_multiplied)),
    "phi 3: window too long": ("phi3_long", _flip(window=5)),
    **{f"granite: no {name}": ("granite", _flip(**{name: 1.0})) for name in GRANITE},
    "olmoe: not clipped": ("olmoe", _flip(clip=None)),
    "olmoe: weights normalised": ("olmoe", _flip(normalise_weights=True)),
    "olmoe: no norms of q and k": ("olmoe", _without("q_norm", "k_norm")),
    "qwen 2 moe: no shared expert": (
        "qwen2_moe",
        _zero("shared_down"),
    ),
    "qwen 2 moe: another dense layer": ("qwen2_moe", _flip(dense_layers=(2,))),
    "gpt-oss: no sinks": ("gpt_oss", _without("sinks")),
    "gpt-oss: gate and up swapped": ("gpt_oss", _swap("gate", "up")),
    "gpt-oss: not clamped": ("gpt_oss", _flip(gate_limit=7.0)),
    "gpt-oss: silu": ("gpt_oss", _flip(gate_slope=1.0)),
    "gpt-oss: biases swapped": ("gpt_oss", _swap("gate_bias", "up_bias")),
    "gpt-oss: windows on odd layers": ("gpt_oss", _flip(attention_pattern="GL")),
    "gpt-oss: yarn rounds": ("gpt_oss", _stretch(truncate=True)),
    "deepseek 2: weights normalised": (
        "deepseek_v2",
        _patch("zoo.families.mixtures.deepseek.DeepSeekV2Config.normalise_weights", True),
    ),
    "deepseek 2: halves turn together": (
        "deepseek_v2",
        _patch("zoo.families.mixtures.deepseek.DeepSeekV2Config.rotary_pairs", False),
    ),
    "deepseek 2: no groups": ("deepseek_v2_groups", _flip(router_groups=1, groups_per_token=1)),
    "deepseek 3: no groups": ("deepseek_v3", _flip(router_groups=1, groups_per_token=1)),
    "deepseek 3: no bias in choosing": ("deepseek_v3", _zero("router_bias")),
    "deepseek 3: one softmax": (
        "deepseek_v3",
        _patch("zoo.families.mixtures.deepseek.DeepSeekV3Config.sigmoid_router", False),
    ),
    "deepseek 3: weights as they are": ("deepseek_v3", _flip(normalise_weights=False)),
    "deepseek 3: weights not scaled": ("deepseek_v3", _flip(weight_scale=1.0)),
    "deepseek 3: no shared expert": ("deepseek_v3", _zero("shared_down")),
    "deepseek 3: halves turn together": ("deepseek_v3", _flip(rotary_pairs=False)),
    "deepseek 3: no temperature of whole heads": ("deepseek_v3", _stretch(mscale=None)),
    "deepseek 3: no temperature where heads turn": ("deepseek_v3", _stretch(attention_factor=1.0)),
    "deepseek 3: no biases of latents": ("deepseek_v3_halves", _zero("q_down_bias", "kv_down_bias")),
    "glm 4.7 flash: no shared expert": ("glm4_flash", _zero("shared_down")),
    "glm 4.7 flash: halves turn together": ("glm4_flash", _flip(rotary_pairs=False)),
    "glm 4.7 flash: weights not scaled": ("glm4_flash", _flip(weight_scale=1.0)),
    "glm 4.5: no bias in choosing": ("glm4_moe", _zero("router_bias")),
    "glm 4.5: weights not scaled": ("glm4_moe", _flip(weight_scale=1.0)),
    "glm 4.5: weights as they are": ("glm4_moe", _flip(normalise_weights=False)),
    "glm 4.5: whole heads turn": ("glm4_moe", _flip(rotary_fraction=1.0)),
    "glm 4.5: neighbours turn together": (
        "glm4_moe",
        _patch("zoo.families.llamas.glm.GLMMoeConfig.rotary_pairs", True),
    ),
    "arcee: frequencies as they are": ("arcee", _flip(rope_scaling=None)),
    "arcee: relu is not squared": ("arcee", _flip(activation="relu")),
    "arcee: no bias of o": ("arcee_biases", _zero("o_bias")),
    "arcee: no biases of the MLP": ("arcee_biases", _zero("up_bias", "down_bias")),
    "helium: halves turn together": ("helium", _patch("zoo.families.llamas.ernie.HeliumConfig.rotary_pairs", False)),
    "helium: the usual epsilon": ("helium_tied", _flip(norm_eps=1e-6)),
    "ministral: all layers see all": ("ministral", _flip(window=None)),
    "ministral: the last layer is global": ("ministral", _flip(attention_pattern="LLLG")),
    "cwm: frequencies as they are": ("cwm", _flip(rope_scaling=None)),
    "cwm: the last layer is local": ("cwm", _flip(attention_pattern="GLLLL")),
    "dots: weights not scaled": ("dots1", _flip(weight_scale=1.0)),
    "dots: queries and keys as they are": ("dots1", _without("q_norm", "k_norm")),
    "ernie 4.5: no bias in choosing": ("ernie4_5_moe", _zero("router_bias")),
    "ernie 4.5: weights as they are": (
        "ernie4_5_moe",
        _patch("zoo.families.llamas.ernie.ErnieMoeConfig.normalise_weights", False),
    ),
    "ernie 4.5: each expert's probability its own": (
        "ernie4_5_moe",
        _patch("zoo.families.llamas.ernie.ErnieMoeConfig.sigmoid_router", True),
    ),
    "ernie 4.5: no shared expert": ("ernie4_5_moe", _zero("shared_down")),
    "glm 4.5: no groups": ("glm4_moe_other", _flip(router_groups=1, groups_per_token=1)),
    "glm 4.5: no shared expert": ("glm4_moe", _zero("shared_down")),
    "exaone: all layers turn": (
        "exaone4",
        _patch("zoo.families.llamas.exaone.ExaoneConfig.layer_ropes", property(lambda c: ((1e4, c.rope_scaling),) * 4)),
    ),
    "exaone: other layers are local": ("exaone4", _flip(attention_pattern="GL")),
    "exaone: not stretched": ("exaone4", _flip(rope_scaling=None)),
    "minimax: no bias in choosing": ("minimax_m2", _zero("router_bias")),
    "minimax: one softmax": ("minimax_m2", _patch("zoo.families.mixtures.minimax.MiniMaxConfig.sigmoid_router", False)),
    "minimax: weights as they are": (
        "minimax_m2",
        _patch("zoo.families.mixtures.minimax.MiniMaxConfig.normalise_weights", False),
    ),
    "minimax: whole heads turn": ("minimax_m2", _flip(rotary_fraction=1.0)),
    "minimax: each head's own norm": ("minimax_m2", _patch("zoo.models.llama.rms_norm", _norm_of_each_head)),
    "llama 4: windows in place of chunks": ("llama4", _patch("zoo.families.mixtures.llama4.Chunk", int)),
    "llama 4: larger chunks": ("llama4", _flip(chunk=5)),
    "llama 4: other layers have chunks": ("llama4", _flip(attention_pattern="GL")),
    "llama 4: all layers turn": ("llama4", _flip(rope_pattern="R")),
    "llama 4: heads as they are": ("llama4", _flip(unit_heads=False)),
    "llama 4: queries do not grow": ("llama4", _flip(growth=None)),
    "llama 4: queries grow a token later": (
        "llama4",
        _patch(
            "zoo.models.forward.LayerPass.grown", lambda told, q, *how, first, of=LayerPass.grown: of(told, q, *how)
        ),
    ),
    "llama 4: weighed behind experts": (
        "llama4",
        _patch("zoo.models.mixture.experts", lambda *of, before, **how: experts(*of, **how)),
    ),
    "llama 4: one softmax": (
        "llama4",
        _patch(
            "zoo.models.llama4.best", lambda scores, bias, **how: weighed(scores, None, **how | {"normalise": False})
        ),
    ),
    "llama 4: halves turn together": (
        "llama4",
        _patch("zoo.families.mixtures.llama4.Llama4Config.rotary_pairs", False),
    ),
    "llama 4: gate and up swapped": ("llama4", _swap("gate", "up")),
    "llama 4: no shared expert": ("llama4", _zero("shared_down")),
    "llama 4: not stretched": ("llama4", _flip(rope_scaling=None)),
    "llama 4: one expert": ("llama4_dense", _flip(experts_per_token=1)),
    "qwen 3 next: no gates behind attention": (
        "qwen3_next",
        _patch("zoo.models.hybrids.delta.jax.nn.sigmoid", jnp.ones_like),
    ),
    "qwen 3 next: norms not less one": (
        "qwen3_next",
        _patch("zoo.families.llamas.qwen_next.Qwen3NextConfig.norm_offset", 0.0),
    ),
    "qwen 3 next: whole heads turn": ("qwen3_next", _flip(rotary_fraction=1.0)),
    "qwen 3 next: no decay": ("qwen3_next", _delta_rule(lambda q, k, v, decay, *rest: (q, k, v, 0 * decay, *rest))),
    "qwen 3 next: all is learned": (
        "qwen3_next",
        _delta_rule(lambda q, k, v, decay, rate, *rest: (q, k, v, decay, jnp.ones_like(rate), *rest)),
    ),
    "qwen 3 next: queries and keys swapped": ("qwen3_next", _delta_rule(lambda q, k, *rest: (k, q, *rest))),
    "qwen 3 next: a convolution the other way round": (
        "qwen3_next",
        _patch("zoo.models.hybrids.delta.convolved", lambda x, taps, *rest: convolved(x, taps[:, ::-1], *rest)),
    ),
    "qwen 3 next: weights as they are": ("qwen3_next", _flip(normalise_weights=False)),
    "granite 4: no decay": ("granite4_hybrid", _state_space(lambda x, b, c, decay, *rest: (x, b, c, 0 * decay, *rest))),
    "granite 4: directions swapped": ("granite4_hybrid", _state_space(lambda x, b, c, *rest: (x, c, b, *rest))),
    "granite 4: steps all as long": (
        "granite4_hybrid",
        lambda model, _: eqx.tree_at(lambda m: m.mamba.step, model, jnp.ones_like(model.mamba.step)),
    ),
    "granite 4: nothing skips": (
        "granite4_hybrid",
        lambda model, _: eqx.tree_at(lambda m: m.mamba.skip, model, jnp.zeros_like(model.mamba.skip)),
    ),
    "granite 4: the convolution reversed": (
        "granite4_hybrid",
        _patch("zoo.models.hybrids.mamba.convolved", lambda x, taps, *rest: convolved(x, taps[:, ::-1], *rest)),
    ),
    "granite 4: no bias of the convolution": (
        "granite4_hybrid",
        lambda model, _: eqx.tree_at(lambda m: m.mamba.conv_bias, model, jnp.zeros_like(model.mamba.conv_bias)),
    ),
    "granite 4: groups swapped": ("granite4_hybrid", _state_space(lambda x, b, *rest: (x, b[:, :, ::-1], *rest))),
    "granite 4: not scaled behind experts": ("granite4_moe", _flip(residual_multiplier=1.0)),
    "granite 3: not scaled behind experts": ("granite_moe", _flip(residual_multiplier=1.0)),
    "granite 3: no shared expert": ("granite_moe_shared", _zero("shared_down")),
    "granite 4: no shared expert": ("granite4_moe", _zero("shared_down")),
    "lfm 2: gates swapped": (
        "lfm2",
        lambda model, _: eqx.tree_at(
            lambda m: (m.conv.before, m.conv.behind), model, (model.conv.behind, model.conv.before)
        ),
    ),
    "lfm 2: the convolution reversed": (
        "lfm2",
        _patch("zoo.models.hybrids.lfm.convolved", lambda x, taps, *rest: convolved(x, taps[:, ::-1], *rest)),
    ),
    "lfm 2: norm eps": ("lfm2", _flip(norm_eps=1e-3)),
    "lfm 2: weights not normalised": ("lfm2_moe", _flip(normalise_weights=False)),
    "lfm 2: weights not scaled": ("lfm2_moe_other", _flip(weight_scale=1.0)),
    "lfm 2: chosen without the bias": ("lfm2_moe", _zero("router_bias")),
    "qwen 3.5: no gates behind attention": (
        "qwen3_5",
        _patch("zoo.models.hybrids.delta.jax.nn.sigmoid", jnp.ones_like),
    ),
    "qwen 3.5: whole heads turn": ("qwen3_5", _flip(rotary_fraction=1.0)),
    "qwen 3.5: norms not less one": ("qwen3_5", _patch("zoo.families.llamas.qwen_next.Qwen35Config.norm_offset", 0.0)),
    "qwen 3.5: rates and decays swapped": (
        "qwen3_5",
        lambda model, _: eqx.tree_at(lambda m: (m.delta.b, m.delta.a), model, (model.delta.a, model.delta.b)),
    ),
    "qwen 3.5: no decay": ("qwen3_5", _delta_rule(lambda q, k, v, decay, *rest: (q, k, v, 0 * decay, *rest))),
    "qwen 3.5: no shared expert": ("qwen3_5_moe", _zero("shared_down")),
    "ministral 3: queries do not grow": ("ministral3", _stretch(query_growth=None)),
    "ministral 3: queries grow faster": ("ministral3", _stretch(query_growth=0.5)),
    "mistral 4: queries do not grow": ("mistral4", _stretch(query_growth=None)),
    "mistral 4: weights as they are": ("mistral4", _flip(normalise_weights=False)),
    "mistral 4: weights not scaled": ("mistral4_other", _flip(weight_scale=1.0)),
    "mistral 4: no temperature of whole heads": ("mistral4_other", _stretch(mscale=None)),
    "mistral 4: neighbours turn together": ("mistral4_other", _flip(rotary_pairs=True)),
    "gemma 3n: another stream is computed": ("gemma3n_other", _flip(active_stream=0)),
    "gemma 3n: the correction is not scaled": ("gemma3n", _flip(scaled_correction=False)),
    "gemma 3n: gates are not cut off": ("gemma3n", _flip(sparsity=())),
    "gemma 3n: another share is cut off": ("gemma3n", _flip(sparsity=(0.9, 0.6, 0.0, 0.0, 0.7, 0.0))),
    "gemma 3n: later ids have the first inputs": ("gemma3n", _flip(inputs_vocab_size=50)),
    "gemma 3n: one base": ("gemma3n", _flip(local_rope_theta=1e6)),
    "gemma 3n: global layers not stretched": ("gemma3n_other", _flip(rope_scaling=None)),
    "gemma 3n: other layers are local": ("gemma3n", _flip(attention_pattern="LGL")),
    "gemma 3n: scores over the root of the head": (
        "gemma3n",
        _patch("zoo.families.gemmas.gemma3n.Gemma3nConfig.query_scale", 0.25),
    ),
    "gemma 3n: keys and values are the first ones": (
        "gemma3n",
        _patch("zoo.models.gemmas.gemma3n.Handed.of", lambda handed, is_local: handed.whole),
    ),
    "gemma 3n: streams as they are": ("gemma3n", _patch("zoo.models.gemmas.gemma3n._as_large", lambda x, model: x)),
    "gemma 3n: matrices of streams swapped": (
        "gemma3n",
        lambda model, _: eqx.tree_at(
            lambda m: (m.streams.into, m.streams.out), model, (model.streams.out, model.streams.into)
        ),
    ),
    "gemma 3n: no path around attention": (
        "gemma3n",
        lambda model, _: eqx.tree_at(lambda m: m.layers.laurel_norm, model, 0 * model.layers.laurel_norm),
    ),
    "gemma 4: all of global layers' heads turn": ("gemma4", _flip(rope_scaling=None)),
    "gemma 4: one base": ("gemma4", _flip(local_rope_theta=1e6)),
    "gemma 4: another window": ("gemma4", _flip(window=5)),
    "gemma 4: logits not capped": ("gemma4", _flip(final_softcap=None)),
    "gemma 4: scores over the root of the head": (
        "gemma4",
        _patch("zoo.families.gemmas.gemma4.Gemma4Config.query_scale", 0.25),
    ),
    "gemma 4: values as they are": (
        "gemma4",
        _patch(
            "zoo.models.gemmas.gemma4._norm", lambda x, w, c: x if w is None else rms_norm(x, w, c.norm_eps, offset=0.0)
        ),
    ),
    "gemma 4: outputs of layers not scaled": (
        "gemma4",
        lambda model, _: eqx.tree_at(lambda m: m.layers.scale, model, jnp.ones_like(model.layers.scale)),
    ),
    "gemma 4: norms not as they are": (
        "gemma4",
        _patch("zoo.models.gemmas.gemma4.rms_norm", lambda x, w, eps, offset: rms_norm(x, w, eps)),
    ),
    "gemma 4: keys and values are not handed on": (
        "gemma4_small",
        _patch("zoo.models.gemmas.gemma4.Handed.after", lambda handed, of_all, kv: handed),
    ),
    "gemma 4: no inputs of layers": (
        "gemma4_small",
        lambda model, _: eqx.tree_at(lambda m: m.sharing.input_up, model, 0 * model.sharing.input_up),
    ),
    "gemma 4: experts' weights as they are": (
        "gemma4_moe",
        lambda model, _: eqx.tree_at(lambda m: m.whole.expert_scale, model, jnp.ones_like(model.whole.expert_scale)),
    ),
    "gemma 4: the router reads what is not scaled": (
        "gemma4_moe",
        lambda model, _: eqx.tree_at(lambda m: m.layers.router_scale, model, jnp.ones_like(model.layers.router_scale)),
    ),
    "gemma 4: the router reads what experts do": (
        "gemma4_moe",
        _patch("zoo.models.gemmas.gemma4.experts", lambda x, *weights, routed_by, **how: experts(x, *weights, **how)),
    ),
    "qwen 3 moe: another dense layer": ("qwen3_moe_mixed", _flip(dense_layers=(2,))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_flipped_convention_is_seen(name, monkeypatch):
    case, flip = MUTANTS[name]
    model, expected = loaded(case), evaluated(case)[1]  # before anything is patched
    mutant = flip(model, monkeypatch)
    if mutant is not model and jax.tree.structure(mutant) == jax.tree.structure(model):
        logits = evaluate(mutant)[1]  # other numbers alone, in the program that is there
    else:
        logits = jit(lambda model: model(TOKENS))(mutant)  # a fresh function, so that it is traced with the patch
    # Parity holds to 2e-5. The faintest flip, that of gelu, moves logits by 9e-4.
    assert np.abs(np.subtract(logits, expected)).max() > 5e-4


def test_kv_heads_shared_in_the_wrong_order_are_seen():
    shuffled = lambda q, k, v, **how: _tile_heads(attention(_tile_heads(q), k, v, **how))
    logits = jit(lambda m: m.logits(m.hidden(TOKENS, ops=Ops(attention=shuffled))))(loaded("gemma2_gqa"))
    assert float(jnp.abs(logits - evaluated("gemma2_gqa")[1]).max()) > 1e-2
