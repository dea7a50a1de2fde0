"""Qwen 3 Next (https://qwenlm.github.io/blog/qwen3_next): a mixture of experts, of whose layers most have the gated
delta rule in place of attention (https://arxiv.org/abs/2412.06464), and the others a gate behind it. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import not_positive, pattern_of, rotary_problems
from zoo.dialect import BIAS, SILU, TIED, Dialect, eps, sizes
from zoo.families.llama import LlamaLike
from zoo.families.mixture import BALANCE, EXPERTS, SHARED, MixtureLike
from zoo.parameters import ATTENTION, BIASES, LAYER, MLP_NORM, QK_NORMS, Row

DELTA, ATTEND = "DA"
USUAL = "DDDA"
_TYPES = {DELTA: "linear_attention", ATTEND: "full_attention"}
_RULE = LAYER + "linear_attn."
_DELTA = (
    Row("delta.qkvz", _RULE + "in_proj_qkvz.weight", "(Q Y) D -> D Q Y", "D"),
    Row("delta.ba", _RULE + "in_proj_ba.weight", "(Q Z) D -> D Q Z", "D"),
    Row("delta.conv", _RULE + "conv1d.weight", "C G I -> C G I", start=0.5),
    Row("delta.decay", _RULE + "A_log", "M -> M", start=1.0),
    Row("delta.step", _RULE + "dt_bias", "M -> M", start=1.0),
    Row("delta.scale", _RULE + "norm.weight", "W -> W", start=1.0),
    Row("delta.o", _RULE + "out_proj.weight", "D (M W) -> M W D", "MW"),
)


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers have the delta rule: as listed, or all but every fourth."""
    every, listed = read.count("full_attention_interval", 4), read.raw.get("layer_types")
    letters = {name: letter for letter, name in _TYPES.items()}
    if listed is None:
        listed = [_TYPES[DELTA if (layer + 1) % every else ATTEND] for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or not set(map(str, listed)) <= set(letters):
        read.problems.append(f"`layer_types`={listed!r} is not supported, only {num_layers} of {' and '.join(letters)}")
        return {}
    return {"layer_pattern": pattern_of("".join(letters[name] for name in listed), USUAL)}


def _write(config: Any) -> dict[str, Any]:
    return {"layer_types": [_TYPES[DELTA if stack == "delta" else ATTEND] for stack in config.layer_stacks]}


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(MixtureLike, LlamaLike):
    """Qwen 3 Next.

    Attributes:
        mlp_dim: hidden width of one expert.
        shared_mlp_dim: hidden width of the expert that all tokens meet, which has a gate of its own.
        dense_mlp_dim: hidden width of layers without experts; there are none, and it is read and written.
        normalise_weights: the weights of the chosen experts sum to one.
        attention_bias: biases after the four projections of attention.
        rotary_fraction: the share of each head that turns by its position.
        layer_pattern: layers of the delta rule (D) and of attention (A), repeated over the depth.
        delta_key_heads: heads of the delta rule's queries and keys.
        delta_value_heads: of its values, a multiple.
        delta_key_dim: width of the former,
        delta_value_dim: and of the latter.
        conv_taps: tokens that the convolution before the delta rule sees, this one included.
    """

    dialects: ClassVar = {
        "qwen3_next": Dialect(
            architecture="Qwen3NextForCausalLM",
            sizes=sizes(
                32_768,
                2,
                256,
                moe_intermediate_size=("mlp_dim", 512),
                shared_expert_intermediate_size=("shared_mlp_dim", 512),
                num_experts=("num_experts", 512),
                num_experts_per_tok=("experts_per_token", 10),
                linear_num_key_heads=("delta_key_heads", 16),
                linear_num_value_heads=("delta_value_heads", 32),
                linear_key_head_dim=("delta_key_dim", 128),
                linear_value_head_dim=("delta_value_dim", 128),
                linear_conv_kernel_dim=("conv_taps", 4),
            )
            | {"intermediate_size": ("dense_mlp_dim", 5632)},
            aliases={"num_experts": "num_local_experts"},
            numbers=eps(1e-6) | BALANCE,
            flags=TIED | BIAS | {"norm_topk_prob": ("normalise_weights", True)},
            partial=("partial_rotary_factor", 0.25),
            only=SILU | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
            keys=("layer_types", "full_attention_interval"),
            read=_read,
            write=_write,
        )
    }
    model: ClassVar[str] = "zoo.models.delta.Qwen3Next"

    norm_eps: float = 1e-6
    num_experts: int = 512
    experts_per_token: int = 10
    shared_mlp_dim: int = 512
    dense_mlp_dim: int = 5632
    normalise_weights: bool = True
    attention_bias: bool = False
    rotary_fraction: float = 0.25
    layer_pattern: str = USUAL
    delta_key_heads: int = 16
    delta_value_heads: int = 32
    delta_key_dim: int = 128
    delta_value_dim: int = 128
    conv_taps: int = 4

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        names = ("shared_mlp_dim", "delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim")
        own = not_positive(self, (*names, "conv_taps")) + rotary_problems(self)
        if self.delta_key_heads > 0 and self.delta_value_heads % self.delta_key_heads:
            own.append(
                f"delta_value_heads={self.delta_value_heads} must be a multiple of "
                f"delta_key_heads={self.delta_key_heads}"
            )
        if not self.layer_pattern or set(self.layer_pattern) - {DELTA, ATTEND}:
            own.append(f"layer_pattern={self.layer_pattern!r} must be made of D (delta rule) and A (attention)")
        elif len(set(self.layer_stacks)) < 2:
            own.append(f"layer_pattern={self.layer_pattern!r} must give num_layers={self.num_layers} layers of both")
        return super().problems() + self.router_problems() + own

    @property
    def beside(self) -> tuple[str, ...]:
        """The beginning of the names of a model that guesses several tokens at once."""
        return ("mtp.",)

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in."""
        letters = (self.layer_pattern * self.num_layers)[: self.num_layers]
        return tuple("delta" if letter == DELTA else "layers" for letter in letters)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that hand on a state from token to token: those of the delta rule."""
        return tuple(i for i, stack in enumerate(self.layer_stacks) if stack == "delta")

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
    def rotary_dim(self) -> int:
        """How many dimensions of a head turn by its position: the first."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        keys, values = self.delta_key_heads, self.delta_value_heads
        width, shared = self.delta_value_dim, values // keys
        own = {"E": self.num_experts, "U": self.shared_mlp_dim, "G": 1, "I": self.conv_taps}
        own |= {"Q": keys, "M": values, "W": width, "Z": 2 * shared}
        own |= {"Y": 2 * (self.delta_key_dim + shared * width), "C": 2 * keys * self.delta_key_dim + values * width}
        return super().dims | own

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        norms = (ATTENTION[0], MLP_NORM)
        queries = (ATTENTION[1], *(BIASES["q"],) * self.attention_bias)  # each head's queries, and behind them its gate
        gated = [replace(row, fused="HH") for row in queries]
        gated += [replace(row, leaf=row.leaf.replace(".q", ".q_gate"), fused="HH", part=1) for row in queries]
        rest = (*ATTENTION[2:], *QK_NORMS, *(BIASES[one] for one in self.biases[1:]))
        behind = (*norms, *EXPERTS, *SHARED)
        own = {"layers": (*behind, *gated, *rest), "delta": (*_DELTA, *behind)}
        layers = {stack: tuple(i for i, one in enumerate(self.layer_stacks) if one == stack) for stack in own}
        return self.with_ends(
            tuple(
                replace(row, leaf=f"{stack}.{row.leaf.partition('.')[2]}", layers=layers[stack])
                for stack, table in own.items()
                for row in table
            )
        )
