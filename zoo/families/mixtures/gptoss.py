"""gpt-oss (https://arxiv.org/abs/2508.10925): a mixture with biases, whose attention may look at nothing. Free of
JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.config import not_positive, window_problems
from zoo.dialect import SILU, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import LlamaLike
from zoo.families.mixture import BALANCE, MixtureLike
from zoo.parameters import LAYER, Row

_EXPERTS = LAYER + "mlp.experts."
_ROWS = (
    Row("layers.sinks", LAYER + "self_attn.sinks", "N -> N"),
    Row("layers.router", LAYER + "mlp.router.weight", "E D -> D E", "D"),
    Row("layers.router_bias", LAYER + "mlp.router.bias", "E -> E"),
    # Every expert's gate and up take turns.
    Row("layers.gate", _EXPERTS + "gate_up_proj", "E D F -> E D F", "D", fused="FF", part=0, alternate=True),
    Row("layers.up", _EXPERTS + "gate_up_proj", "E D F -> E D F", "D", fused="FF", part=1, alternate=True),
    Row("layers.gate_bias", _EXPERTS + "gate_up_proj_bias", "E F -> E F", fused="FF", part=0, alternate=True),
    Row("layers.up_bias", _EXPERTS + "gate_up_proj_bias", "E F -> E F", fused="FF", part=1, alternate=True),
    Row("layers.down", _EXPERTS + "down_proj", "E F D -> E F D", "F"),
    Row("layers.down_bias", _EXPERTS + "down_proj_bias", "E D -> E D"),
)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MixtureLike, LlamaLike):
    """gpt-oss.

    Attributes:
        mlp_dim: hidden width of one expert.
        attention_bias: biases after the four projections of attention.
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
        gate_slope: of the experts' activation `gate * sigmoid(slope * gate)`.
        gate_limit: gates are at most, and what they multiply at most and at least, this large.
    """

    dialects: ClassVar = {
        "gpt_oss": Dialect(
            architecture="GptOssForCausalLM",
            sizes=sizes(
                131_072, 8, 64, num_local_experts=("num_experts", 128), num_experts_per_tok=("experts_per_token", 4)
            ),
            aliases={"num_experts_per_tok": "experts_per_token"},
            numbers=eps(1e-5) | BALANCE | {"swiglu_alpha": ("gate_slope", 1.702), "swiglu_limit": ("gate_limit", 7.0)},
            flags=TIED | {"attention_bias": ("attention_bias", True)},
            windows="types",
            window=128,
            theta=150_000.0,
            rope_default=_YARN,
            only=SILU,
            ignored=("initial_context_length", "experts_per_token"),
        )
    }

    rope_theta: float = 150_000.0
    balance_weight: float = 0.001
    attention_bias: bool = True
    window: int | None = 128
    attention_pattern: str = "LG"
    gate_slope: float = 1.702
    gate_limit: float = 7.0

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = not_positive(self, ("gate_slope", "gate_limit")) + window_problems(self.window, self.attention_pattern)
        return super().problems() + self.router_problems() + own

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + _ROWS)
