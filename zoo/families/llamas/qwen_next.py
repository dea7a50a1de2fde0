"""Qwen 3 Next (https://qwenlm.github.io/blog/qwen3_next), Qwen 3.5 and 3.6: of whose layers most have the gated delta
rule in place of attention (https://arxiv.org/abs/2412.06464), and the others a gate behind it. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import not_positive, pattern_of, rotary_problems
from zoo.dialect import BIAS, SILU, TIED, Dialect, eps, sizes
from zoo.families.hybrid import ATTEND, HybridLike
from zoo.families.llamas.llama import LlamaLike
from zoo.families.mixture import BALANCE, EXPERTS, SHARED, MixtureLike
from zoo.parameters import ATTENTION, BIASES, LAYER, MLP, MLP_NORM, QK_NORMS, Row, stacked

DELTA = "D"
USUAL = "DDDA"
_TYPES = {DELTA: "linear_attention", ATTEND: "full_attention"}
_RULE = LAYER + "linear_attn."
_BY_HEAD = (  # projections, of which each key head has its part
    Row("delta.qkvz", _RULE + "in_proj_qkvz.weight", "(Q Y) D -> D Q Y", "D"),
    Row("delta.ba", _RULE + "in_proj_ba.weight", "(Q Z) D -> D Q Z", "D"),
)
_BY_PART = (  # the same, one after the other
    Row("delta.qkv", _RULE + "in_proj_qkv.weight", "C D -> D C", "D"),
    Row("delta.z", _RULE + "in_proj_z.weight", "(M W) D -> D M W", "D"),
    Row("delta.b", _RULE + "in_proj_b.weight", "M D -> D M", "D"),
    Row("delta.a", _RULE + "in_proj_a.weight", "M D -> D M", "D"),
)
_DELTA = (
    Row("delta.conv", _RULE + "conv1d.weight", "C G I -> C G I", start=0.5),
    Row("delta.decay", _RULE + "A_log", "M -> M", start=1.0),
    Row("delta.step", _RULE + "dt_bias", "M -> M", start=1.0),
    Row("delta.scale", _RULE + "norm.weight", "W -> W", start=1.0),
    Row("delta.o", _RULE + "out_proj.weight", "D (M W) -> M W D", "MW"),
)


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers have the delta rule: as listed, or all but every fourth."""
    every = read.count("full_attention_interval", 4)
    usual = "".join(DELTA if (layer + 1) % every else ATTEND for layer in range(num_layers))
    return {"layer_pattern": pattern_of(read.types(_TYPES, usual), USUAL)}


def _write(config: Any) -> dict[str, Any]:
    return {"layer_types": [_TYPES[DELTA if stack == "delta" else ATTEND] for stack in config.layer_stacks]}


_SIZES = {
    "linear_num_key_heads": ("delta_key_heads", 16),
    "linear_num_value_heads": ("delta_value_heads", 32),
    "linear_key_head_dim": ("delta_key_dim", 128),
    "linear_value_head_dim": ("delta_value_dim", 128),
    "linear_conv_kernel_dim": ("conv_taps", 4),
}
_EXPERTS = {
    "moe_intermediate_size": ("mlp_dim", 512),
    "shared_expert_intermediate_size": ("shared_mlp_dim", 512),
    "num_experts": ("num_experts", 512),
    "num_experts_per_tok": ("experts_per_token", 10),
}
_READ: dict[str, Any] = {
    "partial": ("partial_rotary_factor", 0.25),
    "keys": ("layer_types", "full_attention_interval"),
    "read": _read,
    "write": _write,
}


@dataclass(frozen=True, kw_only=True)
class DeltaLike(HybridLike, LlamaLike):
    """What Qwen 3 Next and what was made after it share.

    Attributes:
        attention_bias: biases after the four projections of attention.
        rotary_fraction: the share of each head that turns by its position.
        layer_pattern: layers of the delta rule (D) and of attention (A), repeated over the depth.
        delta_key_heads: heads of the delta rule's queries and keys.
        delta_value_heads: of its values, a multiple.
        delta_key_dim: width of the former,
        delta_value_dim: and of the latter.
    """

    letter, kind, stack = DELTA, "the delta rule", "delta"
    projections: ClassVar[tuple[Row, ...]] = _BY_PART
    mlp: ClassVar[tuple[Row, ...]] = MLP

    norm_eps: float = 1e-6
    attention_bias: bool = False
    rotary_fraction: float = 0.25
    layer_pattern: str = USUAL
    delta_key_heads: int = 16
    delta_value_heads: int = 32
    delta_key_dim: int = 128
    delta_value_dim: int = 128

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        names = ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "conv_taps")
        own = not_positive(self, names) + rotary_problems(self)
        if self.delta_key_heads > 0 and self.delta_value_heads % self.delta_key_heads:
            own.append(
                f"delta_value_heads={self.delta_value_heads} must be a multiple of "
                f"delta_key_heads={self.delta_key_heads}"
            )
        return super().problems() + own + self.pattern_problems()

    @property
    def beside(self) -> tuple[str, ...]:
        """The beginning of the names of a model that guesses several tokens at once."""
        return ("mtp.",)

    @property
    def recurrent_state(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what each of them hands on: what the convolution sees of the last tokens, and the matrices."""
        matrices = self.delta_value_heads, self.delta_key_dim, self.delta_value_dim
        return {"inputs": (self.conv_taps - 1, self.dims["C"]), "matrices": matrices}

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of norms: they are stored less one."""
        return 1.0

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return True

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        keys, values = self.delta_key_heads, self.delta_value_heads
        width, shared = self.delta_value_dim, values // keys
        own = {"G": 1, "I": self.conv_taps, "Q": keys, "M": values, "W": width, "Z": 2 * shared}
        own |= {"Y": 2 * (self.delta_key_dim + shared * width), "C": 2 * keys * self.delta_key_dim + values * width}
        return super().dims | own

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        norms = (ATTENTION[0], MLP_NORM)
        queries = (ATTENTION[1], *(BIASES["q"],) * self.attention_bias)  # each head's queries, and behind them its gate
        gated = [replace(row, fused="HH") for row in queries]
        gated += [replace(row, leaf=row.leaf.replace(".q", ".q_gate"), fused="HH", part=1) for row in queries]
        rest = (*ATTENTION[2:], *QK_NORMS, *(BIASES[one] for one in self.biases[1:]))
        behind = (*norms, *self.mlp)
        own = {"layers": (*behind, *gated, *rest), "delta": (*self.projections, *_DELTA, *behind)}
        return self.with_ends(stacked(own, self.layer_stacks))


@dataclass(frozen=True, kw_only=True)
class _Sparse(MixtureLike, DeltaLike):
    """Those of them that are mixtures of experts.

    Attributes:
        mlp_dim: hidden width of one expert.
        shared_mlp_dim: hidden width of the expert that all tokens meet, which has a gate of its own.
    """

    mlp: ClassVar = (*EXPERTS, *SHARED)
    model: ClassVar[str] = "zoo.models.hybrids.delta.Qwen3Next"
    layer_stacks = DeltaLike.layer_stacks

    num_experts: int = 512
    experts_per_token: int = 10
    shared_mlp_dim: int = 512

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems() + not_positive(self, ("shared_mlp_dim",))

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"U": self.shared_mlp_dim}


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(_Sparse):
    """Qwen 3 Next.

    Attributes:
        dense_mlp_dim: hidden width of layers without experts; there are none, and it is read and written.
        normalise_weights: the weights of the chosen experts sum to one.
    """

    projections: ClassVar = _BY_HEAD
    dialects: ClassVar = {
        "qwen3_next": Dialect(
            architecture="Qwen3NextForCausalLM",
            sizes=sizes(32_768, 2, 256, **_SIZES, **_EXPERTS) | {"intermediate_size": ("dense_mlp_dim", 5632)},
            aliases={"num_experts": "num_local_experts"},
            numbers=eps(1e-6) | BALANCE,
            flags=TIED | BIAS | {"norm_topk_prob": ("normalise_weights", True)},
            only=SILU | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
            **_READ,
        )
    }

    dense_mlp_dim: int = 5632
    normalise_weights: bool = True


# What the files of Qwen 3.5 and 3.6 hold beside: they are of models that see, whose texts' positions are plain numbers.
_SEEING: dict[str, Any] = _READ | {
    "rope_ignored": ("mrope_section", "mrope_interleaved"),
    "ignored": ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    "outer_keys": ("video_token_id", "vision_start_token_id", "vision_end_token_id", "language_model_only"),
    "only": SILU | {"attn_output_gate": (True, None), "mlp_only_layers": ([], None)},
    "harmless": {
        "output_gate_type": ("swish", "silu", None),  # Qwen 3.6; of the delta rule's
        "norm_topk_prob": (True, None),
        "decoder_sparse_step": (1, None),
    },
}


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(DeltaLike):
    """Qwen 3.5 and 3.6."""

    dialects: ClassVar = {
        "qwen3_5_text": Dialect(
            architecture="Qwen3_5ForCausalLM",
            sizes=sizes(32_768, 4, 256, **_SIZES),
            flags=TIED | BIAS,
            outer="qwen3_5",
            **_SEEING,
        )
    }
    model: ClassVar[str] = "zoo.models.hybrids.delta.Qwen35"


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(_Sparse):
    """Qwen 3.5 and 3.6 that are mixtures of experts."""

    dialects: ClassVar = {
        "qwen3_5_moe_text": Dialect(
            architecture="Qwen3_5MoeForCausalLM",
            sizes={key: size for key, size in sizes(32_768, 2, 256).items() if key != "intermediate_size"}
            | _SIZES
            | _EXPERTS
            | {"num_experts": ("num_experts", 256), "num_experts_per_tok": ("experts_per_token", 8)},
            aliases={"num_experts": "num_local_experts"},
            numbers=eps(1e-6) | BALANCE,
            flags=TIED | BIAS,
            outer="qwen3_5_moe",
            **_SEEING,
        )
    }

    num_experts: int = 256
    experts_per_token: int = 8
