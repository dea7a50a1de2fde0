"""Mistral (https://arxiv.org/abs/2310.06825), Ministral (https://mistral.ai/news/ministraux), Ministral 3
(https://mistral.ai/news/mistral-3) and Mixtral (https://arxiv.org/abs/2401.04088); and CWM
(https://arxiv.org/abs/2510.02387), which sees as Ministral does. Free of JAX."""

from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.config import GLOBAL, LOCAL, not_yarn, pattern_of, window_problems
from zoo.dialect import ACTIVATION, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.mixture import BALANCE, MixtureLike
from zoo.parameters import LAYER, Row

EXPERTS = (
    Row("layers.router", LAYER + "block_sparse_moe.gate.weight", "E D -> D E", "D"),
    Row("layers.gate", LAYER + "block_sparse_moe.experts.{}.w1.weight", "F D -> D F", "D"),
    Row("layers.up", LAYER + "block_sparse_moe.experts.{}.w3.weight", "F D -> D F", "D"),
    Row("layers.down", LAYER + "block_sparse_moe.experts.{}.w2.weight", "D F -> F D", "F"),
)
_STRETCH = {  # of files that do not say
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class MistralConfig(Activated):
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
            choices=ACTIVATION,
        )
    }

    window: int | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + window_problems(self.window, self.attention_pattern)


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(MistralConfig):
    """Ministral 3B and 8B of 2024: a Mistral of local and global layers.

    Attributes:
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
    """

    dialects: ClassVar = {
        "ministral": Dialect(
            architecture="MinistralForCausalLM",
            sizes=sizes(131_072, 8),
            flags=TIED,
            windows="types",
            every=(None, 1 << 30),  # where layers are not listed, all are local
            choices=ACTIVATION,
        )
    }

    attention_pattern: str = "GLLL"


def _read_cwm(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers are global where they are not listed: every fourth, from the first on."""
    if read.raw.get("layer_types") is not None or not read.raw.get("sliding_window", 8192):
        return {}
    types = "".join(LOCAL if layer % 4 else GLOBAL for layer in range(num_layers))
    return {"attention_pattern": pattern_of(types, CWMConfig.attention_pattern)}


@dataclass(frozen=True, kw_only=True)
class CWMConfig(MinistralConfig):
    """CWM: Llama 3 of local and global layers."""

    dialects: ClassVar = {
        "cwm": Dialect(
            architecture="CwmForCausalLM",
            sizes=sizes(131_072, 8, 128),
            numbers=eps(1e-5),
            flags=TIED,
            windows="types",
            window=8192,
            rope_default={
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            theta=1_000_000.0,
            choices=ACTIVATION,
            only={"mlp_bias": (False,)},
            read=_read_cwm,
        )
    }

    rope_theta: float = 1_000_000.0


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(MistralConfig):
    """Ministral 3 and Devstral 2: a Mistral stretched by yarn, whose queries grow behind the original length."""

    dialects: ClassVar = {
        "ministral3": Dialect(
            architecture="Ministral3ForCausalLM",
            outer="mistral3",
            sizes=sizes(262_144, 8, 128),
            numbers=eps(1e-5),
            flags=TIED,
            windows="all",
            window=None,
            rope_default=_STRETCH,
            theta=1_000_000.0,
            choices=ACTIVATION,
        )
    }

    rope_theta: float = 1_000_000.0

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + not_yarn(self)

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """How much queries grow with the logarithm of how many times so many tokens they are behind."""
        return None if self.rope_scaling is None else self.rope_scaling.growth


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
            choices=ACTIVATION,
            only={"router_jitter_noise": (0.0,)},
        )
    }

    rope_theta: float = 1_000_000.0
    num_experts: int = 8
    experts_per_token: int = 2

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems()

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + EXPERTS)
