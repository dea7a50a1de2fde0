"""Configurations of published checkpoints, as public code holds them: each opens by its shape.

`real_configs.json` has what keys and values each of them has, and where that was read: repositories at a commit, or
in a few words. None is from memory.
"""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import pytest

from zoo import count_params, model_class
from zoo.config import rows
from zoo.huggingface.config import ARCHITECTURES, from_hf, to_hf

REAL: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("real_configs.json").read_text())
OUTERS = {
    "gemma3",
    "gemma4",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "kimi_k25",
    "llama4",
}
OURS = {name: one["config"] for name, one in REAL.items() if one["config"]["model_type"] in {*ARCHITECTURES, *OUTERS}}
ONE_OF_EACH = {raw["model_type"]: name for name, raw in OURS.items()}
# Parameters as their makers count them, of the ones that say so (the names in `tests/zoo/test_configs.py`).
COUNTS = {
    "Llama-3.1-8B (citsjtu2020)": 8_030_261_248,
    "Qwen/Qwen2.5-0.5B (zyhnosleep)": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen3-32B": 32_762_123_264,
    "olmo2_7b (mlc-ai)": 7_298_617_344,
    "Qwen3-30B-A3B (citsjtu2020)": 30_532_122_624,
    "Mixtral-8x7B-v0.1 (mlc-ai)": 46_702_792_704,
    "google/gemma-2-9b-it (kevinstephano)": 9_241_705_984,
    "google/gemma-3-27b-it (aws-neuron)": 27_009_346_304,
    "HuggingFaceTB/SmolLM2-135M (satyasundar)": 134_515_008,
    "gpt2 (mlc-ai)": 124_439_808,
    "gpt2_medium (mlc-ai)": 354_823_168,
    "redpajama_3b_v1 (mlc-ai)": 2_775_864_320,
    "qwen2moe (mlc-ai)": 14_315_784_192,
    "gpt_oss_20b_dict (maxtext)": 20_914_757_184,
    "baidu/ERNIE-4.5-0.3B-Base (Hchnr)": 360_748_032,
    "zai-org/GLM-4.5-Air (a log)": 106_852_251_264,
    "deepseek-ai/DeepSeek-V2.5 (a script)": 235_741_434_880,
    "deepseek-ai/DeepSeek-V2-Lite (ktransformers)": 15_706_484_224,
    "Qwen/Qwen3-Next-80B-A3B-Thinking (aiconfigurator)": 79_674_391_296,
    "Alibaba-NLP/gte-modernbert-base (a script)": 149_014_272,
    "bigcode/starcoder2-3b (Rust)": 3_030_371_328,
    # 108,641,793,536 less the vision model and what joins the two, which the notes count.
    "meta-llama/Llama-4-Scout-17B-16E (notes)": 107_769_861_120,
    "bigcode/starcoder2-15b (a blog)": 15_957_889_024,
    "ibm-granite/granite-3.1-3b-a800m-instruct (a planner)": 3_298_793_472,
    "ibm-granite/granite-4.0-h-micro (keys of a test)": 3_191_396_096,
    "ibm-granite/granite-4.0-h-tiny (keys of a test)": 6_939_037_248,
    "ibm-granite/granite-4.0-h-1b (keys of a test)": 1_461_538_368,
    "LiquidAI/LFM2-2.6B (keys of a test)": 2_569_272_320,
    "LiquidAI/LFM2-1.2B (an NPU's container)": 1_170_340_608,
    "LFM2.5-1.2B-Thinking (a fine-tune)": 1_170_340_608,
    "LiquidAI/LFM2-8B-A1B (keys of a test)": 8_339_930_560,
}
# What would change numbers, in keys that are harmless at another value.
HARMFUL = {
    "use_mrope": True,
    "rope_interleaved": True,
    "qkv_bias": True,
    "shared_expert_intermediate_size": 512,
    "use_qk_norm": True,
    "attention_chunk_size": 128,
    "logits_scaling": 8.0,
    "is_causal": False,
    "layer_types": ["sliding_attention"],
}


@pytest.mark.parametrize("name", OURS)
def test_published_configurations_open_and_are_written_alike(name):
    config = from_hf(OURS[name])
    assert count_params(config) == COUNTS.get(name, count_params(config))
    assert from_hf(to_hf(config, "bfloat16")) == config


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_a_model_of_each_architecture_has_their_shape(name):
    config = from_hf(OURS[name])
    model = eqx.filter_eval_shape(model_class(config).init, config, key=jax.random.key(0))
    assert sorted(leaf.shape for leaf in jax.tree.leaves(model)) == sorted(
        row.shape(config.dims) for row in rows(config)
    )


def test_gates_of_the_delta_rule_that_are_not_swish_are_refused():
    """Which Qwen 3.6 says that they are, and transformers always computes."""
    text = OURS["Qwen/Qwen3.5-27B (ome)"]["text_config"]
    assert from_hf(text | {"output_gate_type": "swish"}) == from_hf(text)
    with pytest.raises(ValueError, match="`output_gate_type`='sigmoid' is not supported, only 'swish'"):
        from_hf(text | {"output_gate_type": "sigmoid"})


def test_keys_of_the_text_part_beside_it_say_the_same_or_are_refused():
    """As transformers 4.52 wrote them."""
    raw = OURS["Qwen2.5-VL-3B, a fine-tune (a script)"]
    assert from_hf(raw) == from_hf({key: raw[key] for key in ("model_type", "text_config")})
    with pytest.raises(ValueError, match="`hidden_size` is not known"):
        from_hf(raw | {"hidden_size": 1024})


def test_granites_layers_and_experts_are_what_their_files_say():
    """Of a file that says nothing, transformers makes eight experts."""
    raw = OURS["ibm-granite/granite-4.0-1b (keys of a test)"]
    assert not from_hf(raw).recurrent_layers
    hybrid = from_hf(raw | {"layer_types": ["mamba"] * 36 + ["attention"] * 4})
    assert (hybrid.recurrent_layers, hybrid.mamba_heads) == (tuple(range(36)), 128)
    assert from_hf(raw | {"num_local_experts": 72, "num_experts_per_tok": 10}).num_experts == 72
    assert from_hf({key: raw[key] for key in raw if not key.startswith("num_")} | _layers(raw)).num_experts == 8
    fives = {"mamba": "linear_attention", "attention": "full_attention"}  # how transformers 5 calls them
    assert from_hf(raw | {"layer_types": [fives[one] for one in to_hf(hybrid, "float32")["layer_types"]]}) == hybrid


def _layers(raw):
    return {key: raw[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")}


# Keys that published files have: gpt2-xl, distilgpt2, opt-13b, Galactica, gpt-neox-20b, StarCoder 2, models made from
# Pythia or of language and vision; Qwen 2.5 of a million positions, for programs that attend in chunks, which
# transformers does not.
MEANINGLESS = [
    ("gpt2", {"output_past": True}),
    ("gpt2", {"_num_labels": 1}),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}),
    ("opt", {"output_projection": True}),
    ("gpt_neox", {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "type_vocab_size": 2}),
    ("gpt_neox", {"custom_pipeline": "h2oai_pipeline.py", "custom_pipelines": {"text-generation": {}}}),
    ("llama", {"tokenizer_model_max_length": 4096, "tokenizer_padding_side": "right", "xla_device": True}),
    ("llama", {"attention_dropout": 0.1}),  # what is dropped in training there is dropped in no pass here
    ("starcoder2", {"activation_function": "gelu", "layer_norm_epsilon": 1e-5}),
    ("opt", {"learned_embeddings": True, "scale_embeddings": False}),
]


@pytest.mark.parametrize(("kind", "more"), MEANINGLESS)
def test_keys_that_mean_nothing_change_nothing(kind, more):
    raw = OURS[ONE_OF_EACH[kind]]
    assert from_hf(raw | more) == from_hf(raw)


def test_families_that_are_not_here_are_refused_by_name():
    for name, one in REAL.items():
        if name not in OURS:
            with pytest.raises(ValueError, match=f"model_type='{one['config']['model_type']}', and this zoo loads"):
                from_hf(one["config"])


@pytest.mark.parametrize("key", HARMFUL)
def test_a_key_that_would_change_numbers_is_refused(key):
    with pytest.raises(ValueError, match=f"`{key}`={HARMFUL[key]!r}".replace("[", r"\[").replace("]", r"\]")):
        from_hf(OURS["HuggingFaceTB/SmolLM2-135M (satyasundar)"] | {key: HARMFUL[key]})
