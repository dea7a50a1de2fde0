"""The tiny configurations of the parity tests, as `config.json` files: every family, and what its checkpoints vary."""

import copy
from typing import Any

_BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_GEMMA = _BASE | {"model_type": "gemma", "hidden_act": "gelu"}
_GEMMA_2 = _BASE | {
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "sliding_window": 4,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA_3 = _BASE | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "sliding_window": 4,
    "query_pre_attn_scalar": 24,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_LLAMA = _BASE | {"model_type": "llama", "rms_norm_eps": 1e-5}
_MISTRAL = _BASE | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 4}
_QWEN_2 = _BASE | {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True}
_QWEN_3 = _BASE | {"model_type": "qwen3", "rope_theta": 1e6}
_MIXTRAL = _BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
_QWEN_MOE = _BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_SMOLLM_3 = _BASE | {
    "model_type": "smollm3",
    "num_hidden_layers": 4,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "no_rope_layers": [1, 0, 1, 0],
}
_OLMO_2 = _BASE | {"model_type": "olmo2", "rope_theta": 5e5, "pad_token_id": None}
_SEED = _BASE | {"model_type": "seed_oss", "rope_theta": 1e7, "pad_token_id": None, "attention_dropout": 0.0}
_GPT_2 = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WIDE = {key: value for key, value in _BASE.items() if key not in ("num_key_value_heads", "head_dim")}
_NEOX = _WIDE | {"model_type": "gpt_neox", "hidden_size": 64, "rotary_pct": 0.25}
_OPT = {key: value for key, value in _WIDE.items() if key != "intermediate_size"}
_OPT |= {"model_type": "opt", "ffn_dim": 80, "pad_token_id": None, "word_embed_proj_dim": 48}
_PHI_3 = _WIDE | {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": None, "rope_theta": 1e4}
_GRANITE = _WIDE | {"model_type": "granite", "num_key_value_heads": 2, "rope_theta": 1e4}
_OLMOE = _WIDE | {
    "model_type": "olmoe",
    "num_key_value_heads": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "rope_theta": 1e4,
}
_QWEN_2_MOE = _WIDE | {
    "model_type": "qwen2_moe",
    "num_key_value_heads": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "rope_theta": 1e6,
}
_GPT_OSS = _BASE | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "swiglu_limit": 0.75,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
_ARCEE = _BASE | {"model_type": "arcee", "rope_theta": 1e4, "tie_word_embeddings": False}
_HELIUM = _BASE | {"model_type": "helium", "pad_token_id": None, "num_key_value_heads": 4, "head_dim": 12}
_GLM = _BASE | {"model_type": "glm4", "pad_token_id": None, "rope_theta": 1e4, "rms_norm_eps": 1.5625e-7}
_ERNIE = _BASE | {"model_type": "ernie4_5", "pad_token_id": None, "rope_theta": 1e4, "tie_word_embeddings": False}
_COHERE = _WIDE | {"model_type": "cohere", "num_key_value_heads": 2, "pad_token_id": None, "rope_theta": 1e4}
_OLMO_3 = _OLMO_2 | {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 4}
_COHERE_2 = _COHERE | {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 4}
_GRANITE_4 = {key: value for key, value in _GRANITE.items() if key != "intermediate_size"}
_GRANITE_4 |= {
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "layer_types": ["attention"] * 3,
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
}
_GRANITE_HYBRID = _GRANITE_4 | {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "position_embedding_type": "nope",
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_GRANITE_MOE = _GRANITE_HYBRID | {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2}
_DEEPSEEK = _BASE | {
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": None,
}
_DEEPSEEK = {key: value for key, value in _DEEPSEEK.items() if key != "head_dim"}
_DEEPSEEK_2 = _DEEPSEEK | {"model_type": "deepseek_v2", "n_shared_experts": 2, "first_k_dense_replace": 1}
_DEEPSEEK_3 = _DEEPSEEK | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
# The text of 11 tokens is longer than those trained on (8), and waves fall into all three branches.
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def _rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_scaling": scaling, "rope_theta": 1e4}


CASES: dict[str, dict[str, Any]] = {
    "gemma_mqa": _GEMMA | {"num_key_value_heads": 1},
    "gemma_mha": _GEMMA | {"num_key_value_heads": 4, "rope_theta": 500.0, "rms_norm_eps": 1e-3},
    "gemma2_gqa": _GEMMA_2,
    "gemma2_odd": _GEMMA_2 | {"num_hidden_layers": 3, "head_dim": 6, "vocab_size": 101, "tie_word_embeddings": False},
    "gemma2_full": _GEMMA_2
    | {"sliding_window": 64, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    | _rope(**_YARN),
    "gemma3": _GEMMA_3,
    "gemma3_stretched": _GEMMA_3
    | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "num_key_value_heads": 1,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_yarn": _GEMMA_3 | {"rope_scaling": _YARN, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "llama2": {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {"num_key_value_heads": 4},
    "llama32": _LLAMA | {"tie_word_embeddings": True, "rope_theta": 5e5, "rope_scaling": _LLAMA_3_ROPE},
    "llama_bias": _LLAMA | {"attention_bias": True, "vocab_size": 101, "num_key_value_heads": 1},
    "llama_mlp_bias": _LLAMA | {"mlp_bias": True, "hidden_act": "gelu"},
    "arcee": _ARCEE | _rope(**_YARN, mscale=1.0),
    "arcee_biases": _ARCEE
    | {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-3,
    }
    | {"num_key_value_heads": 1},
    "llama_relu": _LLAMA | {"hidden_act": "relu", "num_key_value_heads": 1},
    "llama_linear": _LLAMA | _rope(type="linear", factor=2.5),
    "llama_dynamic": _LLAMA | _rope(rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 8},
    "llama_yarn": _LLAMA | _rope(**_YARN),
    "llama_yarn_more": _LLAMA
    | _rope(**_YARN, beta_fast=2.0, beta_slow=0.25, truncate=False, mscale=0.7, mscale_all_dim=0.3),
    "mistral": _MISTRAL,
    "mistral_full": _MISTRAL | {"sliding_window": None, "head_dim": 6, "rope_theta": 1e6},
    "qwen2": _QWEN_2,
    "qwen2_windows": _QWEN_2
    | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "tie_word_embeddings": False},
    "qwen3": _QWEN_3,
    "qwen3_tied": _QWEN_3
    | {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_yarn": _QWEN_3 | {"rope_scaling": _YARN | {"attention_factor": 0.8}},
    "mixtral": _MIXTRAL,
    "mixtral_windows": _MIXTRAL
    | {"sliding_window": 4, "num_local_experts": 6, "num_experts_per_tok": 3, "hidden_act": "gelu"},
    "qwen3_moe": _QWEN_MOE,
    "qwen3_moe_raw": _QWEN_MOE | {"norm_topk_prob": False, "tie_word_embeddings": True, "num_experts_per_tok": 1},
    "qwen3_moe_mixed": _QWEN_MOE
    | {"mlp_only_layers": [1], "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 4},
    "smollm3": _SMOLLM_3,
    "smollm3_yarn": _SMOLLM_3
    | {
        "rope_scaling": _YARN,
        "no_rope_layers": None,
        "no_rope_layer_interval": 3,
        "use_sliding_window": True,
        "sliding_window": 4,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "olmo2": _OLMO_2,
    "olmo2_tied": _OLMO_2
    | {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4, "rope_scaling": _YARN},
    "gpt2": _GPT_2,
    "gpt2_untied": _GPT_2 | {"n_inner": 80, "n_embd": 36, "activation_function": "gelu", "tie_word_embeddings": False},
    "neox": _NEOX,
    "neox_serial": _NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500},
    "opt": _OPT,
    "opt_bare": _OPT | {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
    "phi3": _PHI_3,
    "phi3_long": _PHI_3
    | {
        "hidden_size": 64,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 8,
        "sliding_window": 4,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0],
        },
    },
    "granite": _GRANITE
    | {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "olmoe": _OLMOE | {"clip_qkv": 0.8},
    "qwen2_moe": _QWEN_2_MOE | {"mlp_only_layers": [1]},
    "qwen2_moe_other": _QWEN_2_MOE
    | {"qkv_bias": False, "hidden_act": "relu", "use_sliding_window": True, "sliding_window": 4}
    | {"max_window_layers": 2},
    "gpt_oss": _GPT_OSS,
    "seed": _SEED | {"residual_dropout": 0.1},
    "seed_out": _SEED
    | {"attention_out_bias": True, "attention_bias": False, "mlp_bias": True, "tie_word_embeddings": True},
    "glm4": _GLM,
    "glm": _GLM | {"model_type": "glm", "attention_bias": False, "tie_word_embeddings": True},
    "helium": _HELIUM,
    "helium_tied": _HELIUM
    | {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "rope_theta": 500.0},
    "ernie": _ERNIE | {"use_bias": True},
    "ernie_tied": _ERNIE
    | {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "hidden_act": "gelu",
        "rope_scaling": _YARN,
    },
    "cohere": _COHERE | {"logit_scale": 0.5},
    "cohere_bias": _COHERE | {"attention_bias": True, "tie_word_embeddings": False},
    "cohere_norms": _COHERE | {"use_qk_norm": True, "rope_scaling": _YARN},
}
CASES |= {
    "olmo3": _OLMO_3 | {"rope_scaling": _YARN | {"attention_factor": 1.3}},
    "olmo3_other": _OLMO_3
    | {"layer_types": ["full_attention", "sliding_attention"] * 2, "tie_word_embeddings": True}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }
    },
    "cohere2": _COHERE_2 | {"logit_scale": 0.5},
    "cohere2_yarn": _COHERE_2 | {"sliding_window_pattern": 3, "tie_word_embeddings": False, "rope_scaling": _YARN},
    "granite4": _GRANITE_4
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    "granite4_unrotated": _GRANITE_4 | {"position_embedding_type": "nope", "tie_word_embeddings": True},
    "granite4_hybrid": _GRANITE_HYBRID,
    "granite4_hybrid_other": _GRANITE_HYBRID
    | {"mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_n_groups": 1, "tie_word_embeddings": True}
    | {"layer_types": ["attention", "mamba"] * 2, "attention_bias": True, "position_embedding_type": "rope"}
    | {"hidden_act": "gelu"},
    "granite_moe": _GRANITE
    | {"model_type": "granitemoe", "num_local_experts": 5, "num_experts_per_tok": 2, "residual_multiplier": 0.4}
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "granite_moe_shared": _GRANITE
    | {"model_type": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": True}
    | {"shared_intermediate_size": 40, "tie_word_embeddings": True},
    "granite4_moe": _GRANITE_MOE,
    "granite4_moe_other": _GRANITE_MOE | {"num_experts_per_tok": 1, "layer_types": ["attention"] * 4},
}
CASES |= {
    "deepseek_v2": _DEEPSEEK_2 | _rope(**_YARN, mscale=0.7, mscale_all_dim=0.7) | {"topk_method": "greedy"},
    "deepseek_v2_groups": _DEEPSEEK_2
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None}
    | {"hidden_act": "gelu"},
    "deepseek_v3": _DEEPSEEK_3 | _rope(**_YARN, mscale=1.0, mscale_all_dim=0.5),
    "deepseek_v3_halves": _DEEPSEEK_3
    | {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True, "v_head_dim": 32}
    | {"first_k_dense_replace": 0, "n_shared_experts": 2},
}
CASES |= {
    "exaone4": _BASE
    | {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 4, "sliding_window_pattern": 2}
    | {"rope_scaling": _LLAMA_3_ROPE, "rope_theta": 1e4, "pad_token_id": None},
    "minimax_m2": _BASE
    | {"model_type": "minimax_m2", "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8}
    | {"rope_theta": 1e4, "pad_token_id": None},
}
_GLM_MOE = _BASE | {
    "model_type": "glm4_moe",
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "attention_bias": True,
    "routed_scaling_factor": 2.5,
    "rope_theta": 1e4,
    "pad_token_id": None,
}
CASES |= {
    "glm4_flash": _DEEPSEEK
    | {"model_type": "glm4_moe_lite", "rope_theta": 1e4, "n_group": 2, "mlp_layer_types": [*["dense"] * 2, "sparse"]},
    "glm4_flash_bare": _DEEPSEEK
    | {"model_type": "glm4_moe_lite", "q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True}
    | {"norm_topk_prob": False, "n_shared_experts": 2, "num_hidden_layers": 2, "qk_nope_head_dim": 9},
    "glm4_moe": _GLM_MOE,
    "glm4_moe_other": _GLM_MOE
    | {"use_qk_norm": True, "attention_bias": False, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
    | {"first_k_dense_replace": 0, "norm_topk_prob": False, "partial_rotary_factor": 1.0},
}
CASES |= {
    "ministral": _BASE
    | {"model_type": "ministral", "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 4}
    | {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
    "ministral_local": _BASE | {"model_type": "ministral", "rope_theta": 1e4, "sliding_window": 5},
    "cwm": _BASE | {"model_type": "cwm", "num_hidden_layers": 5, "sliding_window": 4, "eos_token_id": 2},
    "dots1": _GLM_MOE
    | {"model_type": "dots1", "attention_bias": False, "n_shared_experts": 2, "norm_topk_prob": True}
    | {"sliding_window": None},
    "ernie4_5_moe": _BASE
    | {"model_type": "ernie4_5_moe", "moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 3}
    | {"rope_theta": 1e4, "pad_token_id": None},
    "ernie4_5_moe_bare": _BASE
    | {"model_type": "ernie4_5_moe", "moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2}
    | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "tie_word_embeddings": False}
    | {"rope_theta": 1e4, "pad_token_id": None},
}
_QWEN_NEXT = _BASE | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-2,  # or the norm behind the delta rule magnifies the roundings of first tokens
}
CASES |= {
    "qwen3_next": _QWEN_NEXT,
    "qwen3_next_other": _QWEN_NEXT
    | {"attention_bias": True, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "norm_topk_prob": False}
    | {"layer_types": ["full_attention", "linear_attention"] * 2},
}
_LEFT_OUT = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "rope_theta",
)
_QWEN_35 = {key: value for key, value in _QWEN_NEXT.items() if key not in _LEFT_OUT} | {
    "model_type": "qwen3_5_text",
    "mlp_only_layers": [],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
}
CASES |= {
    "qwen3_5": _QWEN_35,
    "qwen3_5_other": _QWEN_35
    | {"attention_bias": True, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
    | {"layer_types": ["full_attention", "linear_attention"] * 2},
    "qwen3_5_moe": {key: value for key, value in _QWEN_NEXT.items() if key != "intermediate_size"}
    | {"model_type": "qwen3_5_moe_text"},
}
_LFM_2 = _WIDE | {
    "model_type": "lfm2",
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
    "pad_token_id": None,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
}
_LFM_MOE = _LFM_2 | {
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 24,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
}
CASES |= {
    "lfm2": _LFM_2 | {"intermediate_size": 96, "block_multiple_of": 16},
    "lfm2_other": _LFM_2
    | {"conv_L_cache": 4, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-3},
    "lfm2_moe": _LFM_MOE,
    "lfm2_moe_other": _LFM_MOE
    | {"num_dense_layers": 3, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
}
_GEMMA_3N = _BASE | {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "sliding_window": 4,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 12,
    "altup_num_inputs": 3,
    "num_kv_shared_layers": 3,
    "laurel_rank": 5,
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.7, 0.0],
}
CASES |= {
    "gemma3n": _GEMMA_3N,
    "gemma3n_other": _GEMMA_3N
    | {"altup_active_idx": 1, "altup_num_inputs": 4, "num_kv_shared_layers": 0, "final_logit_softcapping": 5.0}
    | {"vocab_size_per_layer_input": 50, "pad_token_id": None, "activation_sparsity_pattern": [0.0] * 4}
    | {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
    | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "num_key_value_heads": 1},
}
_GEMMA_4 = _BASE | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 6,
    "global_head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
    "pad_token_id": None,
}
CASES |= {
    "gemma4": _GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_small": _GEMMA_4
    | {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2}
    | {"use_double_wide_mlp": True, "num_key_value_heads": 1, "final_logit_softcapping": None},
    "gemma4_moe": _GEMMA_4
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_other": _GEMMA_4
    | {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2}
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    | {"use_double_wide_mlp": True, "global_head_dim": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        }
    },
}
_MINISTRAL_3 = _BASE | {
    "model_type": "ministral3",
    "pad_token_id": None,
    "rope_parameters": {"rope_theta": 1e4, **_YARN, "original_max_position_embeddings": 4, "mscale": 1.0}
    | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4, "type": "yarn", "max_position_embeddings": 64},
}
_MISTRAL_4 = _DEEPSEEK | {"model_type": "mistral4", "rope_parameters": _MINISTRAL_3["rope_parameters"]}
CASES |= {
    "ministral3": _MINISTRAL_3,
    "mistral4": _MISTRAL_4,
    "mistral4_other": _MISTRAL_4
    | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5}
    | {"first_k_dense_replace": 1, "n_shared_experts": 2, "tie_word_embeddings": True, "attention_bias": True}
    | {"rope_parameters": _MISTRAL_4["rope_parameters"] | {"mscale_all_dim": 0.5, "partial_rotary_factor": 0.4}},
    "ministral3_tied": _MINISTRAL_3 | {"sliding_window": 4, "tie_word_embeddings": True, "num_key_value_heads": 1},
}
_LLAMA_4 = _BASE | {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 4,
    "floor_scale": 4,
    "attn_scale": 0.5,
    "rope_theta": 1e4,
}
CASES |= {
    "llama4": _LLAMA_4 | {"rope_scaling": _LLAMA_3_ROPE | {"high_freq_factor": 1.0}, "attn_temperature_tuning": True},
    "llama4_dense": _LLAMA_4
    | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": True}
    | {"no_rope_layers": [1, 0, 1, 1], "num_experts_per_tok": 2, "hidden_act": "gelu"},
    "llama4_other": _LLAMA_4
    | {"layer_types": ["full_attention", "chunked_attention"] * 2, "attn_temperature_tuning": False}
    | {"moe_layers": [0, 3], "no_rope_layer_interval": 2, "rope_scaling": _YARN},
}
CASES["mobilellm_r1"] = _LLAMA_4 | {
    "moe_layers": [],
    "interleave_moe_layer_step": 0,
    "num_local_experts": 0,
    "no_rope_layers": [1, 1, 0, 1, 0],  # of one layer more than there are
    "layer_types": ["chunked_attention", "full_attention"] * 2,
}
_STARCODER_2 = _WIDE | {"model_type": "starcoder2", "num_key_value_heads": 2, "sliding_window": 4, "rope_theta": 1e4}
CASES |= {
    "starcoder2": _STARCODER_2,
    "starcoder2_bare": _STARCODER_2
    | {"use_bias": False, "tie_word_embeddings": False, "sliding_window": None, "hidden_act": "gelu"}
    | {"rope_scaling": _YARN, "norm_epsilon": 1e-3},
}
_NEMOTRON = _BASE | {"model_type": "nemotron", "rope_theta": 1e4}
CASES |= {
    "nemotron": _NEMOTRON,
    "nemotron_biases": _NEMOTRON
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu", "norm_eps": 1e-3}
    | {"partial_rotary_factor": 0.25, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "num_key_value_heads": 1},
}
_HUNYUAN = _BASE | {"model_type": "hunyuan_v1_dense", "pad_token_id": None, "rope_theta": 1e4}
CASES |= {
    "hunyuan": _HUNYUAN | {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32}},
    "hunyuan_bias": _HUNYUAN
    | {"attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu", "rms_norm_eps": 1e-3}
    | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "num_key_value_heads": 1},
}
_STABLELM = _WIDE | {"model_type": "stablelm", "hidden_size": 64, "num_key_value_heads": 2, "rope_theta": 1e4}
CASES |= {
    "stablelm": _STABLELM | {"use_qkv_bias": True},
    "stablelm_parallel": _STABLELM
    | {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5, "hidden_act": "gelu"}
    | {"tie_word_embeddings": True, "layer_norm_eps": 1e-3, "rope_scaling": _YARN},
}
_BERT = {key: value for key, value in _WIDE.items() if key != "num_key_value_heads"}
_BERT |= {"model_type": "modernbert", "num_hidden_layers": 5, "local_attention": 6, "pad_token_id": None}
ENCODERS: dict[str, dict[str, Any]] = {  # which read, and make no logits
    "modernbert": _BERT,
    "modernbert_biases": _BERT
    | {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "local_attention": 3}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
}
# A part that several share is each one's own: transformers writes into what it is given.
CASES = {name: copy.deepcopy(case) for name, case in CASES.items()}
