"""OLMo 2 (https://arxiv.org/abs/2501.00656): Llama with norms behind attention and MLP in place of before them,
and with queries and keys normalised over all heads at once. Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.dialect import BIAS, SILU, TIED, Dialect, eps, sizes
from zoo.families.llama import LlamaLike
from zoo.parameters import ATTENTION, BIASES, LAYER, Row

_NORMS = (
    Row("layers.post_attn_norm", LAYER + "post_attention_layernorm.weight", "D -> D"),
    Row("layers.post_mlp_norm", LAYER + "post_feedforward_layernorm.weight", "D -> D"),
    Row("layers.q_norm", LAYER + "self_attn.q_norm.weight", "(N H) -> N H"),
    Row("layers.k_norm", LAYER + "self_attn.k_norm.weight", "(K H) -> K H"),
)


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaLike):
    """OLMo 2: norms behind attention and MLP, and over all heads' queries and keys at once.

    Attributes:
        attention_bias: biases after the four projections of attention.
    """

    model: ClassVar[str] = "zoo.models.olmo.Olmo"
    dialects: ClassVar = {
        "olmo2": Dialect(
            architecture="Olmo2ForCausalLM",
            sizes=sizes(2048),
            numbers=eps(1e-5),
            flags=TIED | BIAS,
            only=SILU,
            written={"pad_token_id": None},  # or transformers takes one, of which gradients are left out
        )
    }

    rope_theta: float = 500_000.0
    norm_eps: float = 1e-6
    attention_bias: bool = False

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkvo" if self.attention_bias else ""

    def attention_rows(self) -> tuple[Row, ...]:
        """Return the rows of attention and of the norms."""
        return (*ATTENTION[1:], *_NORMS, *(BIASES[projection] for projection in self.biases))
