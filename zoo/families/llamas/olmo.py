"""OLMo 2 (https://arxiv.org/abs/2501.00656): Llama with norms behind attention and MLP in place of before them,
and with queries and keys normalised over all heads at once; OLMo 3 (https://arxiv.org/abs/2512.13961), of whose layers
most are local; OLMoE (https://arxiv.org/abs/2409.02060), a mixture of experts with the norms where Llama has them. Free
of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.config import Rope, not_positive, ropes_by_type, window_problems
from zoo.dialect import ACTIVATION, BIAS, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.mixture import EXPERTS, MixtureLike
from zoo.parameters import ATTENTION, BIASES, LAYER, Row

BEHIND = (
    Row("layers.post_attn_norm", LAYER + "post_attention_layernorm.weight", "D -> D"),
    Row("layers.post_mlp_norm", LAYER + "post_feedforward_layernorm.weight", "D -> D"),
)
NORMS = (
    Row("layers.q_norm", LAYER + "self_attn.q_norm.weight", "(N H) -> N H"),
    Row("layers.k_norm", LAYER + "self_attn.k_norm.weight", "(K H) -> K H"),
)


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(Activated):
    """OLMo 2: norms behind attention and MLP, and over all heads' queries and keys at once.

    Attributes:
        attention_bias: biases after the four projections of attention.
    """

    dialects: ClassVar = {
        "olmo2": Dialect(
            architecture="Olmo2ForCausalLM",
            sizes=sizes(2048),
            numbers=eps(1e-5),
            flags=TIED | BIAS,
            choices=ACTIVATION,
            written={"pad_token_id": None},  # or transformers takes one, of which gradients are left out
        )
    }

    rope_theta: float = 500_000.0
    norm_eps: float = 1e-6
    attention_bias: bool = False

    def attention_rows(self) -> tuple[Row, ...]:
        """Return the rows of attention and of the norms."""
        return (*ATTENTION[1:], *BEHIND, *NORMS, *(BIASES[projection] for projection in self.biases))


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """OLMo 3: three layers of four are local.

    Attributes:
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
        local_rope_theta: base of the rotary frequencies of local layers, which nothing stretches.
    """

    dialects: ClassVar = {
        "olmo3": Dialect(
            architecture="Olmo3ForCausalLM",
            sizes=sizes(2048),
            numbers=eps(1e-5),
            flags=TIED | BIAS,
            windows="types",
            every=(None, 4),
            rope="global",
            theta=500_000.0,
            local_theta=500_000.0,
            choices=ACTIVATION,
            written={"pad_token_id": None},
        )
    }

    window: int | None = 4096
    attention_pattern: str = "LLLG"
    local_rope_theta: float = 500_000.0

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = window_problems(self.window, self.attention_pattern, needed=True)
        return super().problems() + own + not_positive(self, ("local_rope_theta",))

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The base of each layer's rotary frequencies, and how they are stretched."""
        return ropes_by_type(self)


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MixtureLike, Activated):
    """OLMoE: a mixture whose queries and keys are normalised over all heads at once.

    Attributes:
        mlp_dim: hidden width of one expert.
        normalise_weights: the weights of the chosen experts sum to one.
        attention_bias: biases after the four projections of attention.
        clip: elements of queries, keys and values are at most this large; None leaves them alone.
    """

    dialects: ClassVar = {
        "olmoe": Dialect(
            architecture="OlmoeForCausalLM",
            sizes=sizes(4096, num_experts=("num_experts", 64), num_experts_per_tok=("experts_per_token", 8)),
            aliases={"num_experts": "num_local_experts"},
            numbers=eps(1e-5) | {"clip_qkv": ("clip", None), "router_aux_loss_coef": ("balance_weight", 0.01)},
            flags=TIED | BIAS | {"norm_topk_prob": ("normalise_weights", False)},
            choices=ACTIVATION,
            written={"pad_token_id": None},
        )
    }

    num_experts: int = 64
    experts_per_token: int = 8
    balance_weight: float = 0.01
    normalise_weights: bool = False
    attention_bias: bool = False
    clip: float | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems() + not_positive(self, ("clip",))

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + NORMS + EXPERTS)
