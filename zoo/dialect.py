"""What the `config.json` of an architecture holds: families give one `Dialect` for each `model_type`. Free of JAX.

Every key is known or refused: those of `sizes`, `numbers`, `flags`, `windows` and rotary embedding are read, `only` may
hold nothing but what this zoo computes, `IGNORED` changes no logit. Anything else may be a feature that would silently
be left out. Defaults are what transformers takes where a key is absent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

REQUIRED = object()  # a size without a default
HEADS = "num_attention_heads"  # as a default: as many as there are query heads
SHARE = "hidden_size / num_attention_heads"  # as a default: a head's share of the width


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """An architecture's keys.

    Attributes:
        architecture: the class of transformers that it is saved for.
        sizes: integers; our field, and the default or REQUIRED, HEADS, SHARE, or a function of the fields before.
        derived: returns the fields of sizes that the file does not tell, given those that it does.
        aliases: another name that a size may have in the file.
        numbers: real numbers; our field, and the default; None also allows null.
        flags: true or false; our field, and the default.
        choices: words; our field, and what each word is for us. The first of those that mean the same is written.
        windows: how windows are told: `none`, for `all` layers, by `types` of layers, a `switch` of the last layers, or
            a `flag` of all.
        window: the default of `sliding_window`.
        every: of `types` where layers are not listed, the key (or None) and the default of how many layers have one
            that is global.
        last_global: whether the last layer is global, whatever the file lists.
        rope: which layers' rotary frequencies may be stretched: `all`, or the `global` ones, the local ones
            having frequencies of their own (`nested` where only `rope_parameters` tells of them), or the `local` ones,
            the others not turning; `absent` where nothing turns.
        theta: the default base of rotary embedding.
        theta_key: what it is called outside of `rope_parameters`.
        local_theta: of `global` ones, the default base of the local layers.
        rope_names: other names of ways to stretch.
        rope_default: how they are stretched where the file does not say.
        original: the default length of texts first trained on, of families that tell it beside the stretch.
        partial: the key, and its default, of the share of a head that turns (`rotary_fraction`); None is all of it.
        rope_ignored: what is told beside a stretch, and says nothing of texts.
        where: values by which its files are told from those of another family with this `model_type`, of which a file
            has one each; the first is what is written.
        only: keys that may hold nothing but these values; the first is what is written.
        harmless: keys of some checkpoints that mean nothing at these values, and are not written; see `HARMLESS`.
        fixed: fields that the architecture decides.
        written: keys that are always written so.
        ignored: keys that this architecture has and nothing reads.
        keys: keys that `read` reads.
        read: returns further fields, given a reader of values (`zoo.huggingface.reader`) and the number of layers.
        write: returns what those fields are in the file.
        refuse: says why a config cannot be described so.
        outer: the `model_type` of files that hold a vision model too, of which this is the text part.
        outer_keys: what such files hold of their other parts, beside what is known of all.
    """

    architecture: str
    sizes: Mapping[str, tuple[str, Any]]
    derived: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, float | None]] = field(default_factory=lambda: eps(1e-6))
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    windows: str = "none"
    window: int | None = 4096
    every: tuple[str | None, int] = (None, 2)
    last_global: bool = False
    rope: str = "all"
    theta: float = 10000.0
    theta_key: str = "rope_theta"
    local_theta: float = 10000.0
    rope_names: Mapping[str, str] = field(default_factory=dict)
    rope_default: Mapping[str, Any] = field(default_factory=dict)
    original: int | None = None
    partial: tuple[str, float] | None = None
    rope_ignored: tuple[str, ...] = ()
    where: Mapping[str, tuple] = field(default_factory=dict)
    only: Mapping[str, tuple] = field(default_factory=dict)
    harmless: Mapping[str, tuple] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    read: Callable[[Any, int], dict[str, Any]] | None = None
    write: Callable[[Any], dict[str, Any]] | None = None
    refuse: Callable[[Any], str | None] | None = None
    outer: str | None = None
    outer_keys: tuple[str, ...] = ()


SIZES = {
    "vocab_size": ("vocab_size", REQUIRED),
    "num_hidden_layers": ("num_layers", REQUIRED),
    "hidden_size": ("embed_dim", REQUIRED),
    "intermediate_size": ("mlp_dim", REQUIRED),
    "num_attention_heads": ("num_heads", REQUIRED),
    "num_key_value_heads": ("num_kv_heads", REQUIRED),
    "head_dim": ("head_dim", REQUIRED),
    "max_position_embeddings": ("context_length", 8192),
}


def sizes(
    context: int, heads: Any = HEADS, head_dim: Any = SHARE, **own: tuple[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return the sizes of an architecture, given its default context, key and value heads, and what else it has."""
    usual = {"num_key_value_heads": ("num_kv_heads", heads), "head_dim": ("head_dim", head_dim)}
    return SIZES | usual | {"max_position_embeddings": ("context_length", context)} | own


def eps(default: float) -> dict[str, tuple[str, float | None]]:
    """Return the number that norms have."""
    return {"rms_norm_eps": ("norm_eps", default)}


TIED = {"tie_word_embeddings": ("tied", False)}
BIAS = {"attention_bias": ("attention_bias", False)}
SILU = {"hidden_act": ("silu",)}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_10": "gelu_10",
    "quick_gelu": "gelu_sigmoid",
    "laplace": "laplace",
    "leaky_relu": "leaky_relu",
    "linear": "linear",
    "mish": "mish",
    "relu6": "relu6",
    "hardswish": "hard_silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
ACTIVATION = {"hidden_act": ("activation", ACTIVATIONS)}


def activation_problems(name: str) -> list[str]:
    """Say why an MLP cannot have an activation."""
    known = sorted(set(ACTIVATIONS.values()))
    return [] if name in known else [f"activation={name!r} must be one of {', '.join(known)}"]


# Everywhere: what would change what is computed, and what this zoo does not compute.
ONLY_ALL: Mapping[str, tuple] = MappingProxyType(
    {
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({}, None),
        "partial_rotary_factor": (1.0, None),
    }
)
# Everywhere: what transformers does not read, or what it would do at another value than these, which checkpoints have.
HARMLESS: Mapping[str, tuple] = MappingProxyType(
    {
        "use_mrope": (False, None),  # Qwen 2.5's base models
        "rope_interleaved": (False, None),  # SmolLM 2
        "qkv_bias": (False, None),  # Qwen 3 Coder; Qwen 2 says true, and always has them
        "shared_expert_intermediate_size": (0, None),
        "num_shared_experts": (0, None),
        "mlp_bias": (False, None),
        "attention_bias": (False, None),
        "lm_head_bias": (False, None),
        "use_qk_norm": (False, None),
        "use_sliding_window": (False, True, None),  # which those do not read that have a `sliding_window`
        "sliding_window": (None,),
        "attention_chunk_size": (None,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
        "is_causal": (True, None),
        "use_parallel_residual": (False, None),
        "logit_scale": (1, None),
        "attention_multiplier": (None,),
        "embedding_multiplier": (1, None),
        "residual_multiplier": (1, None),
        "logits_scaling": (1, None),
        "num_nextn_predict_layers": (0, None),
        "quantization": (None,),
    }
)
IGNORED = frozenset(
    """
    model_type architectures quantization_config
    transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash auto_map
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    initializer_range use_cache cache_implementation sliding_window_size _sliding_window_pattern
    _attn_implementation attn_implementation _attn_implementation_autoset _experts_implementation experts_implementation
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript use_bfloat16
    chunk_size_feed_forward cross_attention_hidden_size is_decoder tie_encoder_decoder tf_legacy_loss problem_type
    finetuning_task task_specific_params tokenizer_class prefix id2label label2id num_labels _num_labels pretraining_tp
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    unsloth_fixed unsloth_version model_name output_router_logits
    is_llama_config transformers.js_config internal_version neftune_noise_alpha model_max_length max_sequence_length
    max_seq_len seq_length _flash_attn_2_enabled use_flash_attention use_flash_attn use_flash_attention_2
    gradient_checkpointing bos_token eos_token pad_token unk_token_id mask_token_id router_z_loss_coef
    attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout resid_dropout embd_dropout max_window_layers
    attention_probs_dropout_prob hidden_dropout_prob output_past custom_pipeline custom_pipelines xla_device
    eos_token_ids tokenizer_model_max_length tokenizer_padding_side dual_chunk_attention_config
    """.split()
)
