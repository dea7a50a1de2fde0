"""Llama 2 (https://arxiv.org/abs/2307.09288), 3, 3.1 and 3.2 (https://arxiv.org/abs/2407.21783), Arcee's foundation
models (https://huggingface.co/arcee-ai/AFM-4.5B), and what the families made after Llama share. Free of JAX.

What a family always has is a property of its class; what its checkpoints choose is a field.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.config import Config, RopeScaling, scaling_problems
from zoo.dialect import ACTIVATION, ACTIVATIONS, BIAS, TIED, Dialect, activation_problems, eps, sizes
from zoo.parameters import ATTENTION, BIASES, ENDS, HEAD, MLP, MLP_BIASES, MLP_NORM, QK_NORMS, Row

_FLAGS = TIED | BIAS | {"mlp_bias": ("mlp_bias", False)}


@dataclass(frozen=True, kw_only=True)
class LlamaLike(Config):
    """What Llama and the families made after it share.

    Attributes:
        tied: the embedding table is also the head.
        rope_scaling: how the rotary frequencies are stretched to longer texts.
    """

    model: ClassVar[str] = "zoo.models.llama.Llama"

    norm_eps: float = 1e-5
    tied: bool = False
    rope_scaling: RopeScaling | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return scaling_problems(self, self.rope_scaling)

    @property
    def attention_bias(self) -> bool:  # a field of the families that have it
        """Whether projections of attention have a bias."""
        return False

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkvo" if self.attention_bias else ""

    @property
    def activation(self) -> str:
        """What the MLP's gate goes through."""
        return "silu"

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return False

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + MLP)

    def attention_rows(self) -> tuple[Row, ...]:
        """Return the rows of attention and of the norms."""
        norms = QK_NORMS if self.qk_norm else ()
        return (*ATTENTION, MLP_NORM, *norms, *(BIASES[projection] for projection in self.biases))

    def with_ends(self, layers: tuple[Row, ...]) -> tuple[Row, ...]:
        """Add embedding, norm and head; norms start where they multiply by one."""
        embed, norm = ENDS  # not scaled up where it is looked up, so its rows must stand well above the norm's epsilon
        ends = (replace(embed, gain=0.3), norm) if self.tied else (replace(embed, gain=1.0), norm, HEAD)
        return tuple(
            replace(row, start=1.0 - self.norm_offset) if row.leaf.endswith("norm") else row for row in ends + layers
        )


@dataclass(frozen=True, kw_only=True)
class Activated(LlamaLike):
    """Those of them whose files choose the activation.

    Attributes:
        activation: of the MLP's gate, or of every expert's: `silu`, `gelu`, `gelu_tanh`, `relu` or others
            (`zoo.dialect.ACTIVATIONS`).
    """

    activation: str = "silu"

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + activation_problems(self.activation)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Activated):
    """Llama 2, 3, 3.1 and 3.2.

    Attributes:
        attention_bias: biases after the four projections of attention.
        mlp_bias: biases after the projections of the MLP.
    """

    dialects: ClassVar = {
        "llama": Dialect(
            architecture="LlamaForCausalLM",
            sizes=sizes(2048),
            flags=_FLAGS,
            choices=ACTIVATION,
        )
    }

    attention_bias: bool = False
    mlp_bias: bool = False

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + MLP + (MLP_BIASES if self.mlp_bias else ()))


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(LlamaConfig):
    """Arcee's foundation models: a Llama whose MLP squares its relu and has no gate.

    Attributes:
        activation: of the MLP: `relu_squared` or others (`zoo.dialect.ACTIVATIONS`).
    """

    dialects: ClassVar = {
        "arcee": Dialect(
            architecture="ArceeForCausalLM",
            sizes=sizes(4096),
            numbers=eps(1e-5),
            flags=_FLAGS,
            choices={"hidden_act": ("activation", {"relu2": "relu_squared", **ACTIVATIONS})},
        )
    }

    activation: str = "relu_squared"

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + MLP[1:] + MLP_BIASES[1:] * self.mlp_bias)
