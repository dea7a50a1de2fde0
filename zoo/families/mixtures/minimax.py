"""MiniMax M2 (https://github.com/MiniMax-AI/MiniMax-M2): a mixture of experts whose queries and keys are normalised
over all heads at once and turn in part; each expert's probability is its own, and a bias takes part in choosing. Free
of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import rotary_problems
from zoo.dialect import ACTIVATION, TIED, Dialect, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.llamas.mistral import EXPERTS
from zoo.families.llamas.olmo import NORMS
from zoo.families.mixture import CHOICE, MixtureLike
from zoo.parameters import LAYER, Row

_CHOICE = replace(CHOICE, tensor=LAYER + "block_sparse_moe.e_score_correction_bias")


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return the share of a head that turns, of which published files tell how many dimensions it has."""
    kinds = read.raw.get("attn_type_list") or [1]
    if kinds not in ([1] * num_layers, [1]):
        read.problems.append(f"`attn_type_list`={kinds!r} is not supported, only attention to all on every layer: 1")
    told = {**(read.raw.get("rope_scaling") or {}), **(read.raw.get("rope_parameters") or {}), **read.raw}
    if "rotary_dim" not in read.raw or "partial_rotary_factor" in told:
        return {}
    head_dim = read.size("head_dim", 128, {})
    return {"rotary_fraction": read.size("rotary_dim", head_dim, {}) / head_dim}


@dataclass(frozen=True, kw_only=True)
class MiniMaxConfig(MixtureLike, Activated):
    """MiniMax M2, M2.1 and M2.5.

    Attributes:
        mlp_dim: hidden width of one expert.
        rotary_fraction: the share of each head that turns by its position.
    """

    dialects: ClassVar = {
        "minimax_m2": Dialect(
            architecture="MiniMaxM2ForCausalLM",
            sizes=sizes(
                *(196_608, 8, 128),
                num_local_experts=("num_experts", 256),
                num_experts_per_tok=("experts_per_token", 8),
            ),
            aliases={"num_local_experts": "num_experts"},
            flags=TIED,
            theta=5_000_000.0,
            partial=("partial_rotary_factor", 1.0),
            choices=ACTIVATION,
            only={"router_jitter_noise": (0.0,)},
            harmless={
                "scoring_func": ("sigmoid", None),
                "use_routing_bias": (True, None),
                "use_qk_norm": (True, None),
                "qk_norm_type": ("per_layer", None),
                "shared_intermediate_size": (0, None),
            },
            # Of guessing several tokens at once, of MiniMax M1, of training.
            ignored=(
                *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "router_aux_loss_coef"),
                *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
            ),
            keys=("rotary_dim", "attn_type_list"),
            read=_read,
        )
    }

    norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    num_experts: int = 256
    experts_per_token: int = 8
    balance_weight: float = 0.0
    rotary_fraction: float = 0.5

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems() + rotary_problems(self)

    @property
    def sigmoid_router(self) -> bool:
        """Whether each expert's probability is its own, and a bias takes part in choosing."""
        return True

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends((*self.attention_rows(), *NORMS, *EXPERTS, _CHOICE))
