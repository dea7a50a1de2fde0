"""What the `config.json` of each architecture holds: one `Kind` per `model_type`. Free of JAX.

Every key is known or refused: those of `sizes`, `numbers`, `flags`, `windows` and rotary embedding are read, `only` may
hold nothing but what this zoo computes, `IGNORED` changes no logit. Anything else may be a feature that would silently
be left out. Defaults are what transformers takes where a key is absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from zoo.config import Config
from zoo.families import (
    Gemma3Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

REQUIRED = object()  # a size without a default
HEADS = "num_attention_heads"  # as a default: as many as there are query heads
SHARE = "hidden_size / num_attention_heads"  # as a default: a head's share of the width


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An architecture's keys.

    Attributes:
        config: what it is read as.
        architecture: the class of transformers that it is saved for.
        sizes: integers; our field, and the default or REQUIRED, HEADS or SHARE.
        numbers: real numbers; our field, and the default; None also allows null.
        flags: true or false; our field, and the default.
        windows: how windows are told: `none`, for `all` layers, by `types` of layers, a `switch`, or as `experts` do.
        theta: the default base of rotary embedding.
        only: keys that may hold nothing but these values; the first is what is written.
        fixed: fields that the architecture decides.
        written: keys that are always written so.
    """

    config: type[Config]
    architecture: str
    sizes: Mapping[str, tuple[str, Any]]
    numbers: Mapping[str, tuple[str, float | None]]
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    windows: str = "none"
    theta: float = 10000.0
    only: Mapping[str, tuple] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)


_SIZES = {
    "vocab_size": ("vocab_size", REQUIRED),
    "num_hidden_layers": ("num_layers", REQUIRED),
    "hidden_size": ("embed_dim", REQUIRED),
    "intermediate_size": ("mlp_dim", REQUIRED),
    "num_attention_heads": ("num_heads", REQUIRED),
    "num_key_value_heads": ("num_kv_heads", REQUIRED),
    "head_dim": ("head_dim", REQUIRED),
    "max_position_embeddings": ("context_length", 8192),
}
_GEMMA_3_SIZES = {
    "vocab_size": ("vocab_size", 262_208),
    "num_hidden_layers": ("num_layers", 26),
    "hidden_size": ("embed_dim", 2304),
    "intermediate_size": ("mlp_dim", 9216),
    "num_attention_heads": ("num_heads", 8),
    "num_key_value_heads": ("num_kv_heads", 4),
    "head_dim": ("head_dim", 256),
    "max_position_embeddings": ("context_length", 131_072),
}


def _sizes(context: int, heads: Any = HEADS, head_dim: Any = SHARE, **experts: tuple[str, int]) -> dict[str, Any]:
    own = {"num_key_value_heads": ("num_kv_heads", heads), "head_dim": ("head_dim", head_dim)}
    return _SIZES | own | {"max_position_embeddings": ("context_length", context)} | experts


def _eps(default: float) -> dict[str, tuple[str, float | None]]:
    return {"rms_norm_eps": ("norm_eps", default)}


_BALANCE: dict[str, tuple[str, float | None]] = {"router_aux_loss_coef": ("balance_weight", 0.001)}
_QUERY: dict[str, tuple[str, float | None]] = {"query_pre_attn_scalar": ("query_scalar", 256.0)}
_TIED = {"tie_word_embeddings": ("tied", False)}
_BIAS = {"attention_bias": ("attention_bias", False)}
# Gemma 1's "gelu" has always meant the tanh form; the `hidden_act` of 2 and 3 is not read by anything.
_TANH = ("gelu_pytorch_tanh",)
_GEMMA_ONLY = {
    "hidden_activation": _TANH,
    "hidden_act": (*_TANH, "gelu", None),
    "attention_bias": (False, None),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (False, None),
}
_SILU = {"hidden_act": ("silu",)}
_GEMMA_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
# Everywhere: what would change what is computed, and what this zoo does not compute.
ONLY_ALL: Mapping[str, tuple] = MappingProxyType(
    {
        "attention_dropout": (0.0, None),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({}, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
)
KINDS = {
    "gemma": Kind(
        config=GemmaConfig,
        architecture="GemmaForCausalLM",
        sizes=_SIZES,
        numbers=_eps(1e-6),
        only=_GEMMA_ONLY | {"hidden_activation": (*_TANH, None)},
        fixed={"post_norms": False},
        written=_GEMMA_IDS,
    ),
    "gemma2": Kind(
        config=GemmaConfig,
        architecture="Gemma2ForCausalLM",
        sizes=_SIZES,
        numbers={
            **_eps(1e-6),
            **_QUERY,
            "attn_logit_softcapping": ("attn_softcap", 50.0),
            "final_logit_softcapping": ("final_softcap", 30.0),
        },
        windows="types",
        only=_GEMMA_ONLY,
        fixed={"post_norms": True},
        written=_GEMMA_IDS,
    ),
    "gemma3_text": Kind(
        config=Gemma3Config,
        architecture="Gemma3ForCausalLM",
        sizes=_GEMMA_3_SIZES,
        numbers={**_eps(1e-6), **_QUERY, "final_logit_softcapping": ("final_softcap", None)},
        windows="types",
        theta=1_000_000.0,
        only=_GEMMA_ONLY,
        written=_GEMMA_IDS,
    ),
    "llama": Kind(
        config=LlamaConfig,
        architecture="LlamaForCausalLM",
        sizes=_sizes(2048),
        numbers=_eps(1e-6),
        flags=_TIED | _BIAS,
        only=_SILU | {"mlp_bias": (False, None)},
    ),
    "mistral": Kind(
        config=MistralConfig,
        architecture="MistralForCausalLM",
        sizes=_sizes(131_072, 8),
        numbers=_eps(1e-6),
        flags=_TIED,
        windows="all",
        only=_SILU,
    ),
    "mixtral": Kind(
        config=MixtralConfig,
        architecture="MixtralForCausalLM",
        sizes=_sizes(131_072, 8, num_local_experts=("num_experts", 8), num_experts_per_tok=("experts_per_token", 2)),
        numbers=_eps(1e-5) | _BALANCE,
        flags=_TIED,
        windows="all",
        theta=1_000_000.0,
        only=_SILU | {"router_jitter_noise": (0.0,)},
    ),
    "qwen2": Kind(
        config=Qwen2Config,
        architecture="Qwen2ForCausalLM",
        sizes=_sizes(32_768, 32),
        numbers=_eps(1e-6),
        flags=_TIED,
        windows="switch",
        only=_SILU,
    ),
    "qwen3": Kind(
        config=Qwen3Config,
        architecture="Qwen3ForCausalLM",
        sizes=_sizes(32_768, 32, 128),
        numbers=_eps(1e-6),
        flags=_TIED | _BIAS,
        windows="switch",
        only=_SILU,
    ),
    "qwen3_moe": Kind(
        config=Qwen3MoeConfig,
        architecture="Qwen3MoeForCausalLM",
        sizes=_sizes(
            32_768,
            4,
            intermediate_size=("dense_mlp_dim", 6144),
            moe_intermediate_size=("mlp_dim", 768),
            num_experts=("num_experts", 128),
            num_experts_per_tok=("experts_per_token", 8),
        ),
        numbers=_eps(1e-6) | _BALANCE,
        flags=_TIED | _BIAS | {"norm_topk_prob": ("normalise_weights", False)},
        windows="experts",
        only=_SILU,
    ),
}
IGNORED = frozenset(
    """
    model_type architectures transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash auto_map
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    initializer_range use_cache cache_implementation sliding_window_size _sliding_window_pattern
    _attn_implementation attn_implementation _attn_implementation_autoset _experts_implementation experts_implementation
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript use_bfloat16
    chunk_size_feed_forward cross_attention_hidden_size is_decoder tie_encoder_decoder tf_legacy_loss problem_type
    finetuning_task task_specific_params tokenizer_class prefix id2label label2id num_labels pretraining_tp
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    unsloth_fixed unsloth_version output_router_logits
    """.split()
)
