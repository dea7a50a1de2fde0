"""Mistral (https://arxiv.org/abs/2310.06825) and Mixtral (https://arxiv.org/abs/2401.04088). Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.config import window_problems
from zoo.dialect import SILU, TIED, Dialect, eps, sizes
from zoo.families.llama import LlamaLike
from zoo.families.mixture import BALANCE, MixtureLike
from zoo.parameters import LAYER, Row

_EXPERTS = (
    Row("layers.router", LAYER + "block_sparse_moe.gate.weight", "E D -> D E", "D"),
    Row("layers.gate", LAYER + "block_sparse_moe.experts.{}.w1.weight", "F D -> D F", "D"),
    Row("layers.up", LAYER + "block_sparse_moe.experts.{}.w3.weight", "F D -> D F", "D"),
    Row("layers.down", LAYER + "block_sparse_moe.experts.{}.w2.weight", "D F -> F D", "F"),
)


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaLike):
    """Mistral 7B and its like.

    Attributes:
        window: how many keys a query sees, itself included; None is all.
    """

    dialects: ClassVar = {
        "mistral": Dialect(
            architecture="MistralForCausalLM",
            outer="mistral3",
            sizes=sizes(131_072, 8),
            flags=TIED,
            windows="all",
            only=SILU,
        )
    }

    window: int | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + window_problems(self.window, self.attention_pattern)


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MixtureLike, MistralConfig):
    """Mixtral: a router sends each token to a few of many MLPs.

    Attributes:
        mlp_dim: hidden width of one expert.
        rope_theta: base of the rotary frequencies.
        num_experts: MLPs in every layer.
    """

    dialects: ClassVar = {
        "mixtral": Dialect(
            architecture="MixtralForCausalLM",
            sizes=sizes(131_072, 8, num_local_experts=("num_experts", 8), num_experts_per_tok=("experts_per_token", 2)),
            numbers=eps(1e-5) | BALANCE,
            flags=TIED,
            windows="all",
            window=None,
            theta=1_000_000.0,
            only=SILU | {"router_jitter_noise": (0.0,)},
        )
    }

    rope_theta: float = 1_000_000.0
    num_experts: int = 8
    experts_per_token: int = 2

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems()

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"E": self.num_experts}

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + _EXPERTS)
