"""`config.json`: the dialects of transformers 4 and 5, the files on the hub, and what is refused."""

import json

import pytest

from tests.zoo.test_configs import SMALL, read
from zoo.families import GemmaConfig
from zoo.huggingface.config import from_hf, to_hf

# Written down from the hub, key by key.
GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_2_27B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "initializer_range": 0.02,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "_attn_implementation": "eager",
    "vocab_size": 256000,
}


def as_transformers_5(raw: dict) -> dict:
    """Rewrite a config the way transformers 5 saves it."""
    raw = dict(raw)
    raw["dtype"] = raw.pop("torch_dtype")
    raw["rope_parameters"] = {"rope_theta": raw.pop("rope_theta"), "rope_type": "default"}
    raw |= {"transformers_version": "5.23.0", "tie_word_embeddings": True, "use_bidirectional_attention": None}
    for key in ("rope_scaling", "cache_implementation", "sliding_window_size", "_attn_implementation"):
        raw.pop(key, None)
    if raw["model_type"] == "gemma2":
        kinds = ["sliding_attention", "full_attention"]
        raw["layer_types"] = [kinds[layer % 2] for layer in range(raw["num_hidden_layers"])]
    return raw


@pytest.mark.parametrize("dialect", [dict, as_transformers_5])
@pytest.mark.parametrize(("raw", "name"), [(GEMMA_2B, "gemma2b"), (GEMMA_2_27B, "gemma2_27b")])
def test_hub_files_give_the_config_of_the_yaml(raw, name, dialect):
    assert from_hf(dialect(raw)) == read(name)[0]


def test_everything_transformers_writes_is_accepted():
    transformers = pytest.importorskip("transformers")
    for cls in (transformers.GemmaConfig, transformers.Gemma2Config):
        config = cls(vocab_size=97, hidden_size=48, num_hidden_layers=3)
        for raw in (config.to_dict(), config.to_diff_dict(), json.loads(config.to_json_string())):
            assert from_hf(raw).embed_dim == 48


def test_rope_theta_is_read_from_either_dialect():
    assert from_hf(GEMMA_2B | {"rope_theta": 500}).rope_theta == 500.0
    rope = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    assert from_hf(GEMMA_2B | rope).rope_theta == 500.0
    without = {key: value for key, value in GEMMA_2B.items() if key != "rope_theta"}
    assert from_hf(without).rope_theta == 10000.0


def test_absent_keys_take_what_transformers_takes():
    keys = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    config = from_hf({key: value for key, value in GEMMA_2_27B.items() if key not in keys})
    assert (config.query_scalar, config.attn_softcap, config.final_softcap, config.window) == (256.0, 50.0, 30.0, 4096)


def test_null_caps_and_windows_are_off():
    nulls = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"))
    config = from_hf(GEMMA_2_27B | nulls)
    assert (config.attn_softcap, config.final_softcap, config.window) == (None, None, None)


def test_full_attention_in_every_layer_has_no_window():
    assert from_hf(GEMMA_2_27B | {"layer_types": ["full_attention"] * 46}).window is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hiden_size": 1}, "`hiden_size` is not known; did you mean `hidden_size`?"),
        ({"qk_norm": True}, "`qk_norm` is not known"),
        ({"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping`=50.0 is not supported, only None"),
        ({"hidden_activation": "silu"}, "`hidden_activation`='silu' is not supported, only 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "`attention_bias`=True is not supported"),
        ({"tie_word_embeddings": "no"}, "`tie_word_embeddings`='no' is neither true nor false"),
        ({"use_bidirectional_attention": True}, "`use_bidirectional_attention`=True is not supported"),
        (
            {"quantization_config": {"bits": 4}},
            "`quantization_config`'s quant_method=None is not supported, only 'fp8'",
        ),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "`rope_scaling`=.* only rope_type 'default' or 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "`rope_parameters` has no `factor`, which rope_type 'yarn' needs"),
        ({"rope_theta": "10000"}, "`rope_theta`='10000' is not a number"),
        ({"vocab_size": 256000.0}, "`vocab_size`=256000.0 is not an integer"),
        ({"rms_norm_eps": None}, "`rms_norm_eps`=None is not a number"),
        ({"num_key_value_heads": 3}, "num_heads=8 must be a multiple of num_kv_heads=3"),
        ({"model_type": "llamma"}, "model_type='llamma', and this zoo loads 'gemma', 'gemma2'"),
    ],
)
def test_what_is_not_understood_is_refused(change, words):
    with pytest.raises(ValueError, match=words.replace("?", r"\?").replace("{", r"\{")):
        from_hf(GEMMA_2B | change)


@pytest.mark.parametrize("types", [["full_attention"] * 45, ["chunked"] * 46, "full_attention", [["x"]] * 46])
def test_lists_of_other_layers_are_refused(types):
    with pytest.raises(ValueError, match=r"`layer_types`=.* only 46 of sliding_attention and full_attention"):
        from_hf(GEMMA_2_27B | {"layer_types": types})


@pytest.mark.parametrize("pattern", ["GL", "LLG", "GGLL", "L", "L" * 45 + "G"])
def test_any_pattern_of_layers_is_read(pattern):
    names = {"L": "sliding_attention", "G": "full_attention"}
    types = [names[pattern[layer % len(pattern)]] for layer in range(46)]
    config = from_hf(GEMMA_2_27B | {"layer_types": types})
    assert config.attention_pattern == pattern
    assert [window is None for window in config.layer_windows] == [name == "full_attention" for name in types]
    assert from_hf(to_hf(config, "float32")) == config


def test_gemma_2_activation_that_transformers_would_compute_exactly_is_refused():
    with pytest.raises(ValueError, match="`hidden_activation`='gelu' is not supported"):
        from_hf(GEMMA_2_27B | {"hidden_activation": "gelu"})


def test_all_problems_are_named_at_once():
    raw = GEMMA_2B | {"vocab_sise": 1, "attention_bias": True, "num_hidden_layers": "18"}
    del raw["head_dim"]
    with pytest.raises(ValueError, match=r"config\.json cannot be used") as error:
        from_hf(raw)
    words = ["`vocab_sise` is not known; did you mean `vocab_size`?", "`attention_bias`=True", "`head_dim` is missing"]
    assert all(word in str(error.value) for word in [*words, "`num_hidden_layers`='18' is not an integer"])


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"rope_theta": 500.0, "norm_eps": 1e-5},
        {"post_norms": True, "query_scalar": 24.0, "window": 4, "attn_softcap": 5.0, "final_softcap": 3.0},
        {"post_norms": True, "query_scalar": 2.5},
    ],
)
def test_from_hf_inverts_to_hf(extra):
    config = GemmaConfig(**SMALL, **extra)
    assert from_hf(to_hf(config, "float32")) == config


def test_a_mixture_of_both_architectures_cannot_be_saved():
    with pytest.raises(ValueError, match="attn_softcap, window needs Gemma 2, which has post_norms=true"):
        to_hf(GemmaConfig(**SMALL, attn_softcap=5.0, window=4), "float32")
