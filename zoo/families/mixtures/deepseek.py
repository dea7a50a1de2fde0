"""DeepSeek V2 (https://arxiv.org/abs/2405.04434), V3 and R1 (https://arxiv.org/abs/2412.19437), Kimi K2, whose files
say they are V3, GLM 4.7 Flash and Mistral Small 4: keys and values are made of a latent that all heads share, experts
are chosen in groups. Free of JAX."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.config import not_positive, not_yarn
from zoo.dialect import ACTIVATION, BIAS, HEADS, REQUIRED, SIZES, TIED, Dialect
from zoo.families.llamas.llama import Activated
from zoo.families.mixture import EXPERTS, SIGMOID, TOGETHER, GroupedLike
from zoo.parameters import ATTENTION, BIASES, LAYER, MLP_NORM, Row

_ATTN = LAYER + "self_attn."
_DOWN_Q = (
    Row("layers.q_down", _ATTN + "q_a_proj.weight", "A D -> D A", "D"),
    Row("layers.q_norm", _ATTN + "q_a_layernorm.weight", "A -> A"),
    Row("layers.q", _ATTN + "q_b_proj.weight", "(N H) A -> A N H", "A"),
)
_LATENT = (
    Row("layers.kv_down", _ATTN + "kv_a_proj_with_mqa.weight", "J D -> D J", "D"),
    Row("layers.kv_norm", _ATTN + "kv_a_layernorm.weight", "C -> C"),
    Row("layers.kv", _ATTN + "kv_b_proj.weight", "(N X) C -> C N X", "C"),
    Row("layers.o", _ATTN + "o_proj.weight", "D (N W) -> N W D", "NW"),
)
_BIASES = (
    Row("layers.q_down_bias", _ATTN + "q_a_proj.bias", "A -> A"),
    Row("layers.kv_down_bias", _ATTN + "kv_a_proj_with_mqa.bias", "J -> J"),
)


def _queries(read: Any, default: int = 1536) -> dict[str, Any]:
    """Return the width of the latent of queries, which may be null."""
    return {"q_rank": None if read.raw.get("q_lora_rank", default) is None else read.size("q_lora_rank", default, {})}


def _sizes(context: int, dense: int, expert: int, **own: tuple[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the sizes that both versions have, given the default context and hidden widths."""
    usual = {key: SIZES[key] for key in ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads")}
    return usual | {
        "num_key_value_heads": ("num_kv_heads", HEADS),
        "max_position_embeddings": ("context_length", context),
        "intermediate_size": ("dense_mlp_dim", dense),
        "moe_intermediate_size": ("mlp_dim", expert),
        "kv_lora_rank": ("kv_rank", 512),
        "qk_nope_head_dim": ("nope_head_dim", 128),
        "qk_rope_head_dim": ("rope_head_dim", 64),
        "v_head_dim": ("v_head_dim", 128),
    } | own  # fmt: skip


_KEYS: dict[str, Any] = {
    "keys": ("q_lora_rank",),
    "read": lambda read, num_layers: _queries(read),
    "write": lambda config: {"q_lora_rank": config.q_rank},
    "derived": lambda fields: {"head_dim": fields["nope_head_dim"] + fields["rope_head_dim"]},
    # What other programs read, what is for training, and `head_dim`, which newer files have, of the part that turns.
    "ignored": (
        *("head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers"),
        "num_mtp_layers",
    ),
}


@dataclass(frozen=True, kw_only=True)
class DeepSeekLike(GroupedLike, Activated):
    """What DeepSeek V2 and V3 share.

    Attributes:
        mlp_dim: hidden width of one expert.
        head_dim: width of a head's queries and keys: a part that does not turn by its position, and one that does.
        nope_head_dim: of the first part.
        rope_head_dim: of the second, whose keys all heads share.
        v_head_dim: width of a head's values.
        kv_rank: width of the latent that keys and values are made of.
        q_rank: width of the latent that queries are made of; None makes them of the residual stream.
        attention_bias: biases after the projections to latents and after attention.
    """

    model: ClassVar[str] = "zoo.models.deepseek.DeepSeek"
    experts: ClassVar[tuple[Row, ...]] = EXPERTS

    norm_eps: float = 1e-6
    nope_head_dim: int = 128
    rope_head_dim: int = 64
    v_head_dim: int = 128
    kv_rank: int = 512
    q_rank: int | None = 1536
    attention_bias: bool = False

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        names = ("nope_head_dim", "rope_head_dim", "v_head_dim", "kv_rank", "q_rank")
        problems = super().problems() + self.router_problems() + not_positive(self, names)
        if self.nope_head_dim + self.rope_head_dim != self.head_dim or self.rope_head_dim % 2:
            problems.append(
                f"head_dim={self.head_dim} must be nope_head_dim={self.nope_head_dim} and an even "
                f"rope_head_dim={self.rope_head_dim} together"
            )
        if self.num_kv_heads != self.num_heads:
            problems.append(f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads}")
        return problems

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        own = {"C": self.kv_rank, "J": self.kv_rank + self.rope_head_dim, "W": self.v_head_dim}
        own |= {"A": self.q_rank or 1, "X": self.nope_head_dim + self.v_head_dim}
        return super().dims | own

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head turn by its position."""
        return self.rope_head_dim

    @property
    def value_dim(self) -> int:
        """The width of a head's values."""
        return self.v_head_dim

    @property
    def layer_cached(self) -> tuple[tuple[int, int, int], ...]:
        """What each layer keeps of a token that was read, once for all heads: the latent, and the part that turns."""
        return ((1, 1, self.kv_rank + self.rope_head_dim),) * self.num_layers

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by; what the part that turns has more, rotation multiplies by."""
        scaling = self.rope_scaling
        if scaling is None or scaling.mscale is None or scaling.factor <= 1:
            return self.head_dim**-0.5
        return self.head_dim**-0.5 * (0.1 * scaling.mscale * math.log(scaling.factor) + 1) ** 2

    @property
    def rope_temperature(self) -> float | None:
        """None: rotation multiplies the part that turns."""
        return 1.0 if self.rope_scaling is None else None

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        queries = (ATTENTION[1],) if self.q_rank is None else _DOWN_Q
        biases = (*_BIASES[self.q_rank is None :], BIASES["o"]) if self.attention_bias else ()
        attention = (ATTENTION[0], *queries, *_LATENT, MLP_NORM, *biases)
        return self.with_ends(self.grouped_rows(attention, self.experts))


_V2_GROUPS = {"n_group": ("router_groups", 1), "topk_group": ("groups_per_token", 1)}


def _read_v2(read: Any, num_layers: int) -> dict[str, Any]:
    """Return what V2 says otherwise: groups only where the method of choosing has them."""
    del num_layers
    method = read.raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        read.problems.append(f"`topk_method`={method!r} is not supported, only 'greedy' or 'group_limited_greedy'")
    grouped = method != "greedy"
    sizes = {field: read.size(key, 1, {}) if grouped else 1 for key, (field, _) in _V2_GROUPS.items()}
    return _queries(read) | sizes


def _write_v2(config: Any) -> dict[str, Any]:
    method = "group_limited_greedy" if config.router_groups > 1 else "greedy"
    groups = {key: getattr(config, field) for key, (field, _) in _V2_GROUPS.items()}
    return {"q_lora_rank": config.q_rank, "topk_method": method} | groups


_V2_KEYS: dict[str, Any] = _KEYS | {
    "keys": (*_KEYS["keys"], "topk_method", *_V2_GROUPS),
    "read": _read_v2,
    "write": _write_v2,
}


@dataclass(frozen=True, kw_only=True)
class DeepSeekV2Config(DeepSeekLike):
    """DeepSeek V2, V2 Lite and V2.5: probabilities of all experts together, of which the chosen are not normalised."""

    dialects: ClassVar = {
        "deepseek_v2": Dialect(
            architecture="DeepseekV2ForCausalLM",
            sizes=_sizes(
                *(2048, 11_008, 1407),
                n_routed_experts=("num_experts", 64),
                num_experts_per_tok=("experts_per_token", REQUIRED),
                n_shared_experts=("shared_experts", 2),
                first_k_dense_replace=("first_dense", 0),
            ),
            numbers={"rms_norm_eps": ("norm_eps", 1e-6), "routed_scaling_factor": ("weight_scale", 1.0)},
            flags=TIED | BIAS,
            choices=ACTIVATION,
            only={"norm_topk_prob": (False, None), "moe_layer_freq": (1, None), "mlp_bias": (False, None)},
            harmless={"scoring_func": ("softmax", None)},
            **_V2_KEYS,
        )
    }

    @property
    def normalise_weights(self) -> bool:
        """Whether the weights of the chosen experts sum to one."""
        return False

    @property
    def sigmoid_router(self) -> bool:
        """Whether each expert's probability is its own."""
        return False

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together."""
        return True


_V3_FLAGS = TIED | BIAS
_V3_FLAGS |= {"norm_topk_prob": ("normalise_weights", True), "rope_interleave": ("rotary_pairs", True)}


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(DeepSeekLike):
    """DeepSeek V3 and R1, Kimi K2, text of K2.5: each expert's probability is its own, a bias takes part in choosing.

    Attributes:
        normalise_weights: the weights of the chosen experts sum to one before they are scaled.
        rotary_pairs: neighbouring dimensions of a head turn together, in place of those of its halves.
    """

    dialects: ClassVar = {
        name: Dialect(
            architecture="DeepseekV3ForCausalLM",
            sizes=_sizes(
                *(4096, 18_432, 2048),
                n_routed_experts=("num_experts", 256),
                num_experts_per_tok=("experts_per_token", 8),
                n_shared_experts=("shared_experts", 1),
                first_k_dense_replace=("first_dense", 3),
                n_group=("router_groups", 8),
                topk_group=("groups_per_token", 4),
            ),
            numbers={"rms_norm_eps": ("norm_eps", 1e-6), "routed_scaling_factor": ("weight_scale", 2.5)},
            flags=_V3_FLAGS,
            choices=ACTIVATION,
            only={"moe_layer_freq": (1, None)},
            harmless=SIGMOID,
            outer="kimi_k25",
            outer_keys=("ignore_index", "media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder"),
            **_KEYS,
        )
        for name in ("deepseek_v3", "kimi_k2")
    }

    normalise_weights: bool = True
    rotary_pairs: bool = True


def _read_flash(read: Any, num_layers: int) -> dict[str, Any]:
    """Return how many layers are dense, which are the first ones, and the width of the latent of queries."""
    listed, told = read.raw.get("mlp_layer_types"), read.raw.get("first_k_dense_replace")
    first = listed.count("dense") if isinstance(listed, list) else 1
    if listed not in (None, ["dense"] * first + ["sparse"] * (num_layers - first)):
        read.problems.append(f"`mlp_layer_types`={listed!r} is not supported, only first 'dense' and then 'sparse'")
    if told not in (first, None):
        read.problems.append(f"`first_k_dense_replace`={told!r} is not supported, only {first}, as the layers are")
    return {"first_dense": first} | _queries(read, 768)


def _write_flash(config: Any) -> dict[str, Any]:
    kinds = ["dense"] * config.first_dense + ["sparse"] * (config.num_layers - config.first_dense)
    return {"q_lora_rank": config.q_rank, "mlp_layer_types": kinds, "first_k_dense_replace": config.first_dense}


_FLASH_KEYS: dict[str, Any] = _KEYS | {
    "keys": (*_KEYS["keys"], "mlp_layer_types", "first_k_dense_replace"),
    "read": _read_flash,
    "write": _write_flash,
}


@dataclass(frozen=True, kw_only=True)
class GLMFlashConfig(DeepSeekV3Config):
    """GLM 4.7 Flash: what DeepSeek V3 computes, of files of its own."""

    dialects: ClassVar = {
        "glm4_moe_lite": Dialect(
            architecture="Glm4MoeLiteForCausalLM",
            sizes=_sizes(
                *(202_752, 10_240, 1536),
                qk_nope_head_dim=("nope_head_dim", 192),
                v_head_dim=("v_head_dim", 256),
                n_routed_experts=("num_experts", 64),
                num_experts_per_tok=("experts_per_token", 4),
                n_shared_experts=("shared_experts", 1),
                n_group=("router_groups", 1),
                topk_group=("groups_per_token", 1),
            ),
            numbers={"rms_norm_eps": ("norm_eps", 1e-5), "routed_scaling_factor": ("weight_scale", 1.8)},
            flags=_V3_FLAGS,
            choices=ACTIVATION,
            harmless=SIGMOID | {"moe_layer_freq": (1, None)},
            **_FLASH_KEYS,
        )
    }

    norm_eps: float = 1e-5
    nope_head_dim: int = 192
    v_head_dim: int = 256
    q_rank: int | None = 768


_STRETCH = {  # of files that do not say
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MISTRAL_KEYS: dict[str, Any] = _KEYS | {"read": lambda read, num_layers: _queries(read, 1024)}


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(DeepSeekLike):
    """Mistral Small 4: DeepSeek's latents, probabilities of all experts together, queries that grow as Ministral 3's.

    Attributes:
        normalise_weights: the weights of the chosen experts sum to one before they are scaled.
        rotary_pairs: neighbouring dimensions of a head turn together, in place of those of its halves.
    """

    dialects: ClassVar = {
        "mistral4": Dialect(
            architecture="Mistral4ForCausalLM",
            outer="mistral3",
            sizes=_sizes(
                *(1_048_576, 12_288, 2048),
                kv_lora_rank=("kv_rank", 256),
                qk_nope_head_dim=("nope_head_dim", 64),
                n_routed_experts=("num_experts", 128),
                num_experts_per_tok=("experts_per_token", 4),
                n_shared_experts=("shared_experts", 1),
                first_k_dense_replace=("first_dense", 0),
            ),
            aliases={"n_routed_experts": "num_local_experts"},
            numbers={"rms_norm_eps": ("norm_eps", 1e-6), "routed_scaling_factor": ("weight_scale", 1.0)},
            flags=_V3_FLAGS,
            choices=ACTIVATION,
            only={"n_group": (1, None), "topk_group": (1, None)},
            harmless={"moe_layer_freq": (1, None)},
            rope_default=_STRETCH,
            rope_ignored=("partial_rotary_factor",),  # which says what the widths of heads say
            **_MISTRAL_KEYS,
        )
    }
    experts: ClassVar[tuple[Row, ...]] = TOGETHER

    kv_rank: int = 256
    nope_head_dim: int = 64
    q_rank: int | None = 1024
    normalise_weights: bool = True
    rotary_pairs: bool = True

    @property
    def sigmoid_router(self) -> bool:
        """Whether each expert's probability is its own."""
        return False

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + not_yarn(self)

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """How much queries grow with the logarithm of how many times so many tokens they are behind."""
        return None if self.rope_scaling is None else self.rope_scaling.growth
