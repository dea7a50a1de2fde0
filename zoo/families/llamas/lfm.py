"""LFM 2 and 2.5 (https://arxiv.org/abs/2511.23404): of whose layers most have a short convolution between two gates in
place of attention; the others are Qwen 3's under other names. Some are mixtures of experts. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import not_positive, pattern_of
from zoo.dialect import Dialect, sizes
from zoo.families.hybrid import ATTEND, HybridLike
from zoo.families.llamas.llama import LlamaLike
from zoo.families.mixture import EXPERTS, DenseFirst, dense_row
from zoo.parameters import ATTENTION, HEAD, LAYER, MLP, MLP_NORM, QK_NORMS, Row, stacked

CONV = "C"
USUAL = "CCA"
_TYPES = {CONV: "conv", ATTEND: "full_attention"}
_NAMES = {  # theirs for what Llama has too
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "feed_forward.gate",
    "mlp.experts.{}.gate_proj": "feed_forward.experts.{}.w1",
    "mlp.experts.{}.up_proj": "feed_forward.experts.{}.w3",
    "mlp.experts.{}.down_proj": "feed_forward.experts.{}.w2",
}
_INTO = LAYER + "conv.in_proj.weight"
_CONV = (
    Row("conv.before", _INTO, "c D -> D c", "D", fused="ccc", part=0),
    Row("conv.behind", _INTO, "c D -> D c", "D", fused="ccc", part=1),
    Row("conv.value", _INTO, "c D -> D c", "D", fused="ccc", part=2),
    Row("conv.taps", LAYER + "conv.conv.weight", "c G I -> c G I", start=0.5),
    Row("conv.o", LAYER + "conv.out_proj.weight", "D (G c) -> G c D", "Gc"),
)
_CHOICE = Row("layers.router_bias", LAYER + "feed_forward.expert_bias", "E -> E", wide=True)
_ENDS = (
    Row("embed", "model.embed_tokens.weight", "V D -> V D", "D", gain=0.3),
    Row("final_norm", "model.embedding_norm.weight", "D -> D"),
)


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers have a convolution, as listed by their kinds or by the numbers of those that attend."""
    found = read.raw.get("full_attn_idxs")
    attending = range(num_layers) if found is None else read.layers("full_attn_idxs", num_layers)
    usual = "".join(ATTEND if layer in attending else CONV for layer in range(num_layers))
    return {"layer_pattern": pattern_of(read.types(_TYPES, usual), USUAL)}


def _write(config: Any) -> dict[str, Any]:
    attending = [layer not in config.recurrent_layers for layer in range(config.num_layers)]
    return {"layer_types": [_TYPES[ATTEND if attends else CONV] for attends in attending]}


def _width(read: Any) -> dict[str, Any]:
    """Return the width of the MLP, of which files hold what it is made from."""
    width = read.size("block_ff_dim" if "block_ff_dim" in read.raw else "intermediate_size", 12_288, {})
    if not read.flag("block_auto_adjust_ff_dim", True):
        return {"mlp_dim": width}
    width = int(2 * width / 3)
    if read.raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return {"mlp_dim": width}
    times, each = read.number("block_ffn_dim_multiplier", 1.0), read.size("block_multiple_of", 256, {})
    if each < 1:
        read.problems.append(f"`block_multiple_of`={each} is not positive")
    return {"mlp_dim": 0 if times is None or each < 1 else -(-int(times * width) // each) * each}


_EPS: dict[str, tuple[str, float | None]] = {"norm_eps": ("norm_eps", 1e-5)}
_SHARED: dict[str, Any] = {
    "theta": 1_000_000.0,
    "only": {"conv_bias": (False,)},
    "harmless": {"tie_embedding": (True,), "block_use_swiglu": (True,), "use_pos_enc": (True,)},
    "ignored": (
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class ConvLike(HybridLike, LlamaLike):
    """What LFM 2 and its mixtures share.

    Attributes:
        layer_pattern: layers of convolutions (C) and of attention (A), repeated over the depth.
    """

    letter, kind, stack = CONV, "convolution", "conv"

    tied: bool = True
    rope_theta: float = 1_000_000.0
    layer_pattern: str = USUAL
    conv_taps: int = 3

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + not_positive(self, ("conv_taps",)) + self.pattern_problems()

    @property
    def recurrent_state(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what each of them hands on: what the convolution sees of the last tokens."""
        return {"inputs": (self.conv_taps - 1, self.embed_dim)}

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return True

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"c": self.embed_dim, "G": 1, "I": self.conv_taps}

    def mlp(self, stack: str) -> tuple[Row, ...]:
        """Return the rows of what stands behind the heads, or the convolution, of a stack of layers."""
        del stack
        return MLP

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        tables = {
            stack: (
                *((ATTENTION[0], *_CONV) if stack.endswith("conv") else (*ATTENTION, *QK_NORMS)),
                *(MLP_NORM, *self.mlp(stack)),
            )
            for stack in self.layer_stacks
        }
        rows = (replace(row, tensor=_named(row.tensor)) for row in stacked(tables, self.layer_stacks))
        rows = (*_ENDS, *(() if self.tied else (HEAD,)), *rows)
        return tuple(replace(row, start=1.0) if row.leaf.endswith("norm") else row for row in rows)


def _named(tensor: str) -> str:
    name = tensor.removeprefix(LAYER).removesuffix(".weight")
    return f"{LAYER}{_NAMES[name]}.weight" if name in _NAMES else tensor


@dataclass(frozen=True, kw_only=True)
class LfmConfig(ConvLike):
    """LFM 2 and 2.5."""

    model: ClassVar[str] = "zoo.models.hybrids.lfm.Lfm"
    dialects: ClassVar = {
        "lfm2": Dialect(
            architecture="Lfm2ForCausalLM",
            sizes={key: size for key, size in sizes(128_000, 8).items() if key != "intermediate_size"}
            | {"conv_L_cache": ("conv_taps", 3)},
            numbers=_EPS,
            flags={"tie_word_embeddings": ("tied", True)},
            keys=(
                *("layer_types", "full_attn_idxs", "intermediate_size", "block_ff_dim"),
                *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
            ),
            read=lambda read, num_layers: _read(read, num_layers) | _width(read),
            write=lambda config: (
                _write(config) | {"intermediate_size": config.mlp_dim, "block_auto_adjust_ff_dim": False}
            ),
            **_SHARED,
        )
    }


@dataclass(frozen=True, kw_only=True)
class LfmMoeConfig(DenseFirst, ConvLike):
    """LFM 2 and 2.5 that are mixtures of experts.

    Attributes:
        mlp_dim: hidden width of one expert.
        normalise_weights: the weights of the chosen experts sum to one before they are scaled.
        chosen_by_bias: a bias takes part in choosing experts, and not in weighing them.
    """

    model: ClassVar[str] = "zoo.models.hybrids.lfm.LfmMoe"
    dialects: ClassVar = {
        "lfm2_moe": Dialect(
            architecture="Lfm2MoeForCausalLM",
            sizes=sizes(128_000, 8)
            | {
                "intermediate_size": ("dense_mlp_dim", 7168),
                "moe_intermediate_size": ("mlp_dim", 1792),
                "num_experts": ("num_experts", 32),
                "num_experts_per_tok": ("experts_per_token", 4),
                "num_dense_layers": ("first_dense", 2),
                "conv_L_cache": ("conv_taps", 3),
            },
            numbers=_EPS | {"routed_scaling_factor": ("weight_scale", 1.0)},
            flags={
                "tie_word_embeddings": ("tied", True),
                "norm_topk_prob": ("normalise_weights", True),
                "use_expert_bias": ("chosen_by_bias", True),
            },
            keys=("layer_types",),
            read=_read,
            write=_write,
            **_SHARED,
        )
    }

    num_experts: int = 32
    experts_per_token: int = 4
    dense_mlp_dim: int = 7168
    first_dense: int = 2
    normalise_weights: bool = True
    chosen_by_bias: bool = True

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems()

    @property
    def weight_floor(self) -> float:
        """What is added to the sum of a token's weights before they are divided by it."""
        return 1e-6

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in."""
        kinds = {(False, False): "layers", (False, True): "conv", (True, False): "dense", (True, True): "dense_conv"}
        return tuple(kinds[i < self.first_dense, i in self.recurrent_layers] for i in range(self.num_layers))

    def mlp(self, stack: str) -> tuple[Row, ...]:
        """Return the rows of what stands behind the heads, or the convolution, of a stack of layers."""
        if stack.startswith("dense"):
            return tuple(dense_row(row, self.dense_layers) for row in MLP)
        return (*EXPERTS, *((_CHOICE,) if self.chosen_by_bias else ()))
