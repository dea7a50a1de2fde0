"""Hugging Face's `config.json` both ways, in the dialects that transformers 4 and 5 write. Free of JAX.

Every key is known or refused: `_SIZES`, `_NUMBERS` and `_GEMMA_2` are read, `_ONLY` may hold nothing but what this zoo
computes, `_IGNORED` changes no logit. Anything else is an error: it may be a feature that would silently be
left out.
"""

import difflib
from typing import Any

from zoo.configs import GemmaConfig

_SIZES = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
# key: (our field, what transformers takes where the key is absent)
_NUMBERS: dict[str, tuple[str, float]] = {"rms_norm_eps": ("norm_eps", 1e-6)}
_GEMMA_2: dict[str, tuple[str, float]] = {
    "query_pre_attn_scalar": ("query_scalar", 256.0),
    "attn_logit_softcapping": ("attn_softcap", 50.0),
    "final_logit_softcapping": ("final_softcap", 30.0),
    "sliding_window": ("window", 4096),
}
_NULLABLE = {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"}
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
# Gemma 1's "gelu" has always meant the tanh form; Gemma 2's `hidden_act` is not read by anything.
_TANH = ("gelu_pytorch_tanh",)
_ONLY: dict[str, dict[str, tuple]] = {
    "gemma": {"hidden_act": (*_TANH, "gelu", None), "hidden_activation": (*_TANH, None)},
    "gemma2": {"hidden_act": (*_TANH, "gelu", None), "hidden_activation": _TANH},
}
_ONLY_ALL: dict[str, tuple] = {
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
_IGNORED = frozenset(
    """
    model_type architectures transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash auto_map
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    max_position_embeddings initializer_range use_cache cache_implementation sliding_window_size _sliding_window_pattern
    _attn_implementation attn_implementation _attn_implementation_autoset _experts_implementation experts_implementation
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript use_bfloat16
    chunk_size_feed_forward cross_attention_hidden_size is_decoder tie_encoder_decoder tf_legacy_loss problem_type
    finetuning_task task_specific_params tokenizer_class prefix id2label label2id num_labels pretraining_tp
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    unsloth_fixed unsloth_version
    """.split()
)


def from_hf(raw: dict[str, Any]) -> GemmaConfig:
    """Return the config that a Gemma 1 or 2 `config.json` describes; dropped are only keys that change no logit.

    Raises:
        ValueError: listing every unknown key (with the closest known one), missing key and unsupported value at once.
    """
    kind = raw.get("model_type")
    if kind not in _ONLY:
        raise ValueError(f"config.json says model_type={kind!r}, and this zoo loads {', '.join(map(repr, _ONLY))}.")
    only = _ONLY_ALL | _ONLY[kind]
    numbers = _NUMBERS | (_GEMMA_2 if kind == "gemma2" else {})
    known = set(_SIZES) | set(numbers) | _ROPE | set(only) | _IGNORED | ({"layer_types"} if kind == "gemma2" else set())
    problems = [_unknown(key, known) for key in raw if key not in known]
    problems += [
        f"`{key}`={raw[key]!r} is not supported, only {' or '.join(repr(value) for value in values)}"
        for key, values in only.items()
        if key in raw and raw[key] not in values
    ]
    fields: dict[str, Any] = {"post_norms": kind == "gemma2"}
    for key, field in _SIZES.items():
        fields[field] = raw.get(key)
        if key not in raw:
            problems.append(f"`{key}` is missing")
        elif type(raw[key]) is not int:
            problems.append(f"`{key}`={raw[key]!r} is not an integer")
    for key, (field, default) in numbers.items():
        value = raw.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            fields[field] = int(value) if field == "window" else float(value)
        elif value is None and key in _NULLABLE:
            fields[field] = None
        else:
            problems.append(f"`{key}`={value!r} is not a number")
    if fields.get("query_scalar") == fields["head_dim"]:
        fields["query_scalar"] = None
    fields["rope_theta"] = _rope_theta(raw, problems)
    if not problems and raw.get("layer_types") is not None:
        fields["window"] = _window(raw["layer_types"], fields["window"], fields["num_layers"], problems)
    if problems:
        raise ValueError("config.json cannot be used:\n" + "\n".join(f"  {problem}." for problem in problems))
    return GemmaConfig(**fields)


def to_hf(config: GemmaConfig, dtype: str) -> dict[str, Any]:
    """Return a `config.json` that transformers 4 and 5 read, for weights stored in `dtype`.

    Raises:
        ValueError: the config mixes Gemma 1 and 2 in a way that no Hugging Face architecture has.
    """
    query_scalar = config.head_dim if config.query_scalar is None else config.query_scalar
    if not config.post_norms:
        extras = {
            "query_scalar": query_scalar != config.head_dim,
            "attn_softcap": config.attn_softcap is not None,
            "final_softcap": config.final_softcap is not None,
            "window": config.window is not None,
        }
        if any(extras.values()):
            raise ValueError(
                f"cannot describe this config to Hugging Face: {', '.join(name for name in extras if extras[name])} "
                "needs Gemma 2, which has post_norms=true. Set it, or leave the others at their defaults."
            )
    raw = {key: getattr(config, field) for key, field in _SIZES.items()}
    raw |= {
        "architectures": ["Gemma2ForCausalLM" if config.post_norms else "GemmaForCausalLM"],
        "model_type": "gemma2" if config.post_norms else "gemma",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "torch_dtype": dtype,
    }
    if config.post_norms:
        raw |= {key: getattr(config, field) for key, (field, _) in _GEMMA_2.items()}
        raw["query_pre_attn_scalar"] = int(query_scalar) if query_scalar == int(query_scalar) else query_scalar
        raw["layer_types"] = [_TYPES[window is not None] for window in config.layer_windows]
    return raw


_TYPES = {True: "sliding_attention", False: "full_attention"}


def _unknown(key: str, known: set[str]) -> str:
    close = difflib.get_close_matches(key, sorted(known), n=1)
    return f"`{key}` is not known" + (f"; did you mean `{close[0]}`?" if close else "")


def _rope_theta(raw: dict[str, Any], problems: list[str]) -> float:
    """Read the base of rotary embedding from either dialect; only the plain kind is supported."""
    theta = raw.get("rope_theta", 10000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        extra = set(rope) - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
        if kind != "default" or extra or rope.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(f"`{key}`={rope!r} is not supported, only rope_type 'default'")
        theta = rope.get("rope_theta", theta)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        problems.append(f"`rope_theta`={theta!r} is not a number")
        return 0.0
    return float(theta)


def _window(types: list[str], window: int | None, num_layers: int, problems: list[str]) -> int | None:
    """Read transformers 5's list of layer types: Gemma 2's alternation, or full attention everywhere."""
    if list(types) == [_TYPES[False]] * num_layers:
        return None
    if list(types) != [_TYPES[layer % 2 == 0] for layer in range(num_layers)]:
        problems.append(
            f"`layer_types`={types!r} is not supported, only {num_layers} that alternate from "
            "'sliding_attention', or are all 'full_attention'"
        )
    return window
