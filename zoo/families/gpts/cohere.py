"""Command R (https://cohere.com/blog/command-r): attention and MLP side by side behind one LayerNorm without bias, and
neighbouring dimensions of each head turn together; Command R7B and A (https://arxiv.org/abs/2504.00698), whose global
layers do not turn. Free of JAX."""

from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.config import Rope, RopeScaling, not_positive, scaling_problems, window_problems, windows
from zoo.dialect import ACTIVATION, BIAS, Dialect, activation_problems, sizes
from zoo.families.gpts.gpt import GPTLike
from zoo.parameters import ATTENTION, BIASES, ENDS, HEAD, LAYER, MLP, Row

_NORMS = (
    Row("layers.q_norm", LAYER + "self_attn.q_norm.weight", "N H -> N H"),
    Row("layers.k_norm", LAYER + "self_attn.k_norm.weight", "K H -> K H"),
)


@dataclass(frozen=True, kw_only=True)
class CohereConfig(GPTLike):
    """Command R, R+ and Aya.

    Attributes:
        logit_scaling: multiplies the logits.
        attention_bias: biases after the four projections of attention.
        qk_norm: queries and keys are normalised, each head with weights of its own, as in Command R+.
        rope_scaling: how the rotary frequencies are stretched to longer texts.
    """

    dialects: ClassVar = {
        "cohere": Dialect(
            architecture="CohereForCausalLM",
            sizes=sizes(8192),
            numbers={"layer_norm_eps": ("norm_eps", 1e-5), "logit_scale": ("logit_scaling", 0.0625)},
            flags=BIAS | {"tie_word_embeddings": ("tied", True), "use_qk_norm": ("qk_norm", False)},
            choices=ACTIVATION,
            theta=500_000.0,
            written={"pad_token_id": None},
        )
    }

    activation: str = "silu"
    rope_theta: float = 500_000.0
    logit_scaling: float = 0.0625
    attention_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = not_positive(self, ("logit_scaling",)) + scaling_problems(self, self.rope_scaling)
        return own + activation_problems(self.activation)

    @property
    def parallel(self) -> bool:
        """Whether the MLP reads what attention read, and not what attention made of it."""
        return True

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together, in place of those of its halves."""
        return True

    @property
    def logit_scale(self) -> float | None:
        """What logits are multiplied by."""
        return None if self.logit_scaling == 1 else self.logit_scaling

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        biases = (tuple(BIASES.values()) if self.attention_bias else ()) + (_NORMS if self.qk_norm else ())
        ends = (replace(ENDS[0], gain=0.3), ENDS[1]) + (() if self.tied else (HEAD,))
        return self.started((*ends, *ATTENTION, *biases, *MLP))


# What other programs read of how the model is made, which it always is.
_ALWAYS = {
    "use_gated_activation": (True, None),
    "use_parallel_block": (True, None),
    "position_embedding_type": ("rope_gptj", None),
    "order_of_interleaved_layers": ("local_attn_first", None),
    "rotary_pct": (1.0, None),
}


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(CohereConfig):
    """Command R7B and A: three layers of four are local, and the positions of the fourth do not turn.

    Attributes:
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
    """

    dialects: ClassVar = {
        "cohere2": Dialect(
            architecture="Cohere2ForCausalLM",
            sizes=sizes(8192),
            numbers={"layer_norm_eps": ("norm_eps", 1e-5), "logit_scale": ("logit_scaling", 0.0625)},
            flags=BIAS | {"tie_word_embeddings": ("tied", True)},
            choices=ACTIVATION,
            windows="types",
            every=("sliding_window_pattern", 4),
            rope="local",
            theta=10_000.0,
            harmless=_ALWAYS,
            ignored=("layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
            written={"pad_token_id": None},
        )
    }

    rope_theta: float = 10_000.0
    window: int | None = 4096
    attention_pattern: str = "LLLG"

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = window_problems(self.window, self.attention_pattern, needed=True)
        if self.qk_norm:
            own.append("qk_norm=True is Command R+'s, which has no local layers")
        return super().problems() + own

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """How each layer's positions turn; None where they do not: on global layers."""
        kinds = windows(self.num_layers, 1, self.attention_pattern)
        return tuple(None if kind is None else (self.rope_theta, self.rope_scaling) for kind in kinds)
