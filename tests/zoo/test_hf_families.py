"""`config.json` of the families after Gemma 2: the files on the hub, defaults, rotary dialects, and what is refused."""

import json
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo.hf_cases import CASES, ENCODERS
from tests.zoo.test_configs import read
from zoo import dialect
from zoo.config import RopeScaling, RopeType
from zoo.families import Gemma3Config
from zoo.huggingface.config import from_hf, to_hf
from zoo.models.layers import ACTIVATIONS

# Written down from the hub, key by key.
LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN_2_5_32B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 27648,
    "max_position_embeddings": 131072,
    "max_window_layers": 64,
    "model_type": "qwen2",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
QWEN_3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
HUB = {
    "llama3_2_1b": LLAMA_3_2_1B,
    "qwen2_5_32b": QWEN_2_5_32B,
    "gemma3_4b": GEMMA_3_4B,
    "qwen3_30b_a3b": QWEN_3_30B,
    "mixtral_8x7b": MIXTRAL_8X7B,
}


@pytest.mark.parametrize("name", HUB)
def test_hub_files_give_the_config_of_the_yaml(name):
    assert from_hf(HUB[name]) == read(name)[0]


@pytest.mark.parametrize("case", CASES)
def test_from_hf_inverts_to_hf(case):
    config = from_hf(CASES[case])
    written = to_hf(config, "float32")
    assert from_hf(written) == config
    assert from_hf(json.loads(json.dumps(written))) == config


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_makes_of_a_file_and_writes_again_is_read_alike(case):
    transformers = pytest.importorskip("transformers")
    kind = CASES[case]["model_type"]
    theirs = transformers.AutoConfig.for_model(**CASES[case])
    for raw in (theirs.to_dict(), json.loads(theirs.to_json_string())):
        assert raw["model_type"] == kind
        assert from_hf(raw) == from_hf(CASES[case])


def test_gemma_4_s_layers_have_the_heads_that_transformers_writes_of_them():
    """As transformers writes them: of twelve layers 05 and 11."""
    raw = CASES["gemma4"] | {"num_hidden_layers": 12, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2}
    config, own = from_hf(raw), {"head_dim": 8, "num_key_value_heads": 1}
    del raw["global_head_dim"], raw["num_global_key_value_heads"]
    assert from_hf(raw | {"per_layer_config": {"05": own, "11": own}}) == config
    assert from_hf(raw | {"per_layer_config": {"5": own, "11": own}}) == config
    alike = from_hf(raw | {"per_layer_config": {}})  # a layer that is left out has the heads that the file begins with
    assert alike == from_hf(raw | {"global_head_dim": 6}) and alike.layer_heads[5] == alike.layer_heads[4]
    assert from_hf(raw | {"per_layer_config": {"04": {"head_dim": 6}, "05": {}}}) == alike
    for other in ({"05": own}, {"05": own, "10": own}, {"5": own, "05": own}, {"05": own, "11": own, "12": own}):
        with pytest.raises(ValueError, match=r"`per_layer_config`=.* is not supported"):
            from_hf(raw | {"per_layer_config": other})
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**to_hf(config, "float32"))
    assert from_hf(json.loads(theirs.to_json_string())) == config


def test_of_two_keys_that_say_one_thing_the_one_counts_that_transformers_hears():
    neox = from_hf(CASES["neox"] | {"rotary_pct": 0.5, "partial_rotary_factor": 1.0, "rope_theta": 300.0})
    assert (neox.rotary_fraction, neox.rope_theta) == (0.5, 10_000.0)
    bert = ENCODERS["modernbert"] | {"local_attention": 128}
    assert (from_hf(bert).window, from_hf(bert | {"sliding_window": 3}).window) == (128, 6)
    long = CASES["phi3_long"]
    inside = long | {"rope_scaling": long["rope_scaling"] | {"original_max_position_embeddings": 32}}
    assert from_hf(inside).rope_scaling.original_length == 8
    del inside["original_max_position_embeddings"]
    assert from_hf(inside).rope_scaling.original_length == 4096


def test_a_list_of_layers_that_are_all_alike_may_say_so():
    raw = CASES["mixtral"] | {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
    assert from_hf(raw) == from_hf(CASES["mixtral"] | {"sliding_window": 4})
    with pytest.raises(ValueError, match=r"`layer_types`=.* is not supported, only \['sliding_attention'"):
        from_hf(raw | {"layer_types": ["full_attention"] * 3})
    assert from_hf(raw | {"sliding_window": None, "layer_types": ["full_attention"] * 3}).window is None


def test_heads_of_command_r7b_may_be_wider_than_their_share_of_the_width():
    config = from_hf(CASES["cohere2"] | {"head_dim": 20})
    assert (config.head_dim, config.num_heads, config.embed_dim) == (20, 4, 48)
    assert from_hf(to_hf(config, "float32")) == config


def test_gpt_oss_is_stretched_where_its_file_does_not_say():
    """As transformers takes it; a file that says that nothing is stretched is believed, and written so."""
    raw = {key: value for key, value in CASES["gpt_oss"].items() if key != "rope_scaling"}
    config = from_hf(raw)
    assert config == from_hf(raw | {"rope_scaling": None})
    assert (config.rope_scaling.rope_type, config.rope_scaling.factor, config.rope_scaling.truncate) == (
        "yarn",
        32,
        False,
    )
    plain = from_hf(raw | {"rope_scaling": {"rope_type": "default"}})
    assert plain.rope_scaling is None and from_hf(to_hf(plain, "float32")) == plain
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**raw).to_dict()
    assert from_hf(theirs) == config
    assert transformers.AutoConfig.for_model(**to_hf(plain, "float32")).rope_parameters["rope_type"] == "default"


def test_absent_keys_take_what_transformers_takes():
    transformers = pytest.importorskip("transformers")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for kind in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"):
        raw = {key: CASES["llama2"][key] for key in sizes} | {"model_type": kind, "num_key_value_heads": 4}
        theirs = transformers.AutoConfig.for_model(**raw).to_dict()
        config = from_hf(raw)
        assert config.norm_eps == theirs["rms_norm_eps"]
        assert config.rope_theta == theirs["rope_parameters"]["rope_theta"]
        assert config.context_length == theirs["max_position_embeddings"]
        windowed = theirs.get("use_sliding_window", True)
        assert config.layer_windows[0] == (theirs.get("sliding_window") if windowed else None)
        assert config.tied is theirs["tie_word_embeddings"]
    assert from_hf({"model_type": "gemma3_text"}) == Gemma3Config(
        vocab_size=262_208,
        num_layers=26,
        embed_dim=2304,
        mlp_dim=9216,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        context_length=131_072,
    )


def test_a_head_is_a_share_of_the_width_where_nothing_is_said():
    raw = {key: value for key, value in LLAMA_3_2_1B.items() if key not in ("head_dim", "num_key_value_heads")}
    config = from_hf(raw)
    assert (config.head_dim, config.num_kv_heads) == (64, 32)
    assert from_hf(raw | {"head_dim": None, "num_key_value_heads": None}) == config


def test_rope_scaling_is_heard_before_rope_parameters():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 77.0}
    config = from_hf(LLAMA_3_2_1B | {"rope_scaling": None, "rope_parameters": rope})
    assert (config.rope_theta, config.rope_scaling) == (77.0, RopeScaling(rope_type=RopeType.linear, factor=4.0))
    assert from_hf(LLAMA_3_2_1B | {"rope_parameters": rope}) == from_hf(LLAMA_3_2_1B)


def test_the_length_trained_on_is_the_longest_where_nothing_is_said():
    rope = {"type": "yarn", "factor": 4.0}
    config = from_hf(QWEN_2_5_32B | {"rope_scaling": rope})
    assert config.rope_scaling.original_length == 131072
    assert config.query_scale == pytest.approx(128**-0.5 * 1.1386294361119891**2)


def test_gemma_3_has_a_rope_for_each_kind_of_layer():
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    }
    config = from_hf({"model_type": "gemma3_text", "rope_parameters": nested})
    assert (config.rope_theta, config.local_rope_theta) == (5.0, 7.0)
    assert config.layer_ropes[4:6] == ((7.0, None), (5.0, config.rope_scaling))


def test_sparse_steps_and_lists_of_dense_layers_are_one_thing():
    config = from_hf(CASES["qwen3_moe"] | {"decoder_sparse_step": 2, "mlp_only_layers": []})
    assert config.dense_layers == (0, 2)
    with pytest.raises(ValueError, match="leave one out"):
        from_hf(CASES["qwen3_moe"] | {"mlp_only_layers": [0, 1, 2]})


def test_experts_are_counted_under_either_name():
    raw = {key: value for key, value in QWEN_3_30B.items() if key != "num_experts"}
    assert from_hf(raw | {"num_local_experts": 128}) == from_hf(QWEN_3_30B)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "biases of the mlp": (LLAMA_3_2_1B, {"mlp_bias": "all"}, "`mlp_bias`='all' is neither true nor false"),
    "another activation": (
        LLAMA_3_2_1B,
        {"hidden_act": "prelu"},
        "`hidden_act`='prelu' is not supported, only 'silu' or",
    ),
    "a window of Mistral's": (LLAMA_3_2_1B, {"sliding_window": 4}, "`sliding_window`=4 is not supported, only None"),
    "no factors": (
        LLAMA_3_2_1B,
        {"rope_scaling": {"type": "longrope"}},
        "`rope_scaling.long_factor`=None is not a list",
    ),
    "too few factors": (
        LLAMA_3_2_1B,
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 32}},
        "rope_scaling.short_factors has 1 numbers, and must have 32",
    ),
    "another way to stretch": (
        LLAMA_3_2_1B,
        {"rope_scaling": {"type": "ntk"}},
        "only rope_type 'default' or 'linear' or 'dynamic' or 'llama3' or 'yarn' or 'longrope'",
    ),
    "no factor": (
        LLAMA_3_2_1B,
        {"rope_scaling": {"type": "linear"}},
        "has no `factor`, which rope_type 'linear' needs",
    ),
    "an unknown stretch": (
        LLAMA_3_2_1B,
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}},
        "only rope_type 'linear' with factor",
    ),
    "no object": (LLAMA_3_2_1B, {"rope_scaling": [1]}, "`rope_scaling`=[1] is not an object"),
    "half a head": (LLAMA_3_2_1B, {"partial_rotary_factor": 0.5}, "`partial_rotary_factor`=0.5 is not supported"),
    "a flag that is none": (LLAMA_3_2_1B, {"tie_word_embeddings": "no"}, "='no' is neither true nor false"),
    "a huge number": (LLAMA_3_2_1B, {"rms_norm_eps": 10**400}, "is not a number"),
    "too large": (LLAMA_3_2_1B, {"vocab_size": 2**40}, "vocab_size=1099511627776 is too large"),
    "too deep": (LLAMA_3_2_1B, {"num_hidden_layers": 10**9}, "num_layers=1000000000 must be at most 4096"),
    "jitter": (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "`router_jitter_noise`=0.1 is not supported"),
    "too many chosen": (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "experts_per_token=9 must be from 1 to 8"),
    "layers that are none": (QWEN_3_30B, {"mlp_only_layers": [48]}, "`mlp_only_layers`=[48] is not a list of layers"),
    "no text part": (GEMMA_3_4B, {"text_config": None}, "`text_config` must be an object of model_type='gemma3_text'"),
    "MLPs of several widths": (
        CASES["gemma3n"],
        {"intermediate_size": [80] * 5 + [40]},
        "`intermediate_size`=[80, 80, 80, 80, 80, 40] is not supported, only one integer for all layers",
    ),
    "a share for too few layers": (
        CASES["gemma3n"],
        {"activation_sparsity_pattern": [0.5]},
        "sparsity=(0.5,) must be 6 numbers, from 0 to less than 1",
    ),
    "a share that is a word": (
        CASES["gemma3n"],
        {"activation_sparsity_pattern": ["all"] * 6},
        "is not a list of numbers, one for each layer",
    ),
    "no global layer to share": (
        CASES["gemma3n"],
        {"num_kv_shared_layers": 4},
        "sharing_layers=4 leaves no global layer whose keys the others could share",
    ),
    "no layer to share": (CASES["gemma3n"], {"num_kv_shared_layers": 6}, "sharing_layers=6 must be from 0 to 5"),
    "no such stream": (CASES["gemma3n"], {"altup_active_idx": 3}, "active_stream=3 must be from 0 to 2"),
    "a Ministral 3 without yarn": (
        CASES["ministral3"],
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_scaling.rope_type=None must be yarn",
    ),
    "a Mistral 4 without yarn": (
        CASES["mistral4"],
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_scaling.rope_type=None must be yarn",
    ),
    "groups of a Mistral 4": (CASES["mistral4"], {"n_group": 2}, "`n_group`=2 is not supported, only 1 or None"),
    "another part of Mistral 3": (
        {"model_type": "mistral3", "text_config": {"model_type": "llama"}},
        {},
        "`text_config` must be an object of model_type='mistral' or 'ministral3' or 'mistral4', and is 'llama'",
    ),
    "an unknown outer key": (GEMMA_3_4B, {"audio_config": {}}, "`audio_config` is not known"),
    "a stretch by its older name": (
        CASES["olmo3"],
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "says `type`, which versions of transformers read differently: say `rope_type`",
    ),
    "a list for a type": (LLAMA_3_2_1B, {"model_type": ["llama"]}, "model_type=['llama'], and this zoo loads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name):
    raw, change, words = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        from_hf(raw | change)


@pytest.mark.parametrize("last", ["sliding_attention", "full_attention"])
def test_a_mistral_that_lists_its_layers_is_a_ministral(last):
    """As transformers 5 opens it, whichever they are."""
    raw = CASES["mistral"] | {"layer_types": ["full_attention", "sliding_attention", last]}
    assert from_hf(raw) == from_hf(raw | {"model_type": "ministral"})
    assert to_hf(from_hf(raw), "float32")["layer_types"] == raw["layer_types"]


def test_a_window_that_no_layer_has_is_written_as_a_number():
    """transformers makes its mask."""
    config = from_hf(CASES["gemma2_gqa"] | {"layer_types": ["full_attention"] * 4})
    written = to_hf(config, "float32")
    assert config.window is None and written["sliding_window"] == config.context_length
    assert from_hf(written) == config


@pytest.mark.parametrize("word", dialect.ACTIVATIONS)
def test_activations_are_those_of_transformers(word):
    torch, activations = pytest.importorskip("torch"), pytest.importorskip("transformers.activations")
    x = np.linspace(-12, 12, 4801, dtype=np.float32)
    expected = activations.ACT2FN[word](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(ACTIVATIONS[dialect.ACTIVATIONS[word]](jnp.asarray(x)), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("word", ["gelu_pytorch_tanh", "gelu_new", "gelu_fast"])
def test_of_several_words_for_an_activation_that_of_the_source_is_kept(word):
    config = from_hf(LLAMA_3_2_1B | {"hidden_act": word})
    assert to_hf(config, "float32", {"hidden_act": word})["hidden_act"] == word
    assert to_hf(config, "float32", {"hidden_act": "silu"})["hidden_act"] == "gelu_pytorch_tanh"
