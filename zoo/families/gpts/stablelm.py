"""StableLM 3B (https://github.com/Stability-AI/StableLM) and Stable LM 2 (https://arxiv.org/abs/2402.17834): Llama with
LayerNorm, a quarter of whose heads turns; of the 12B attention and MLP stand side by side, and every head's queries and
keys are normalised with weights of its own. Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.dialect import ACTIVATION, Dialect, sizes
from zoo.families.gpts.starcoder import NORM_BEHIND, LlamaNamed
from zoo.parameters import BIASES, LAYER, MLP, Row

_QK_NORMS = (
    Row("layers.q_norm", LAYER + "self_attn.q_layernorm.norms.{}.weight", "H -> H", each="N"),
    Row("layers.k_norm", LAYER + "self_attn.k_layernorm.norms.{}.weight", "H -> H", each="K"),
)


@dataclass(frozen=True, kw_only=True)
class StableLMConfig(LlamaNamed):
    """StableLM 3B, Stable LM 2 and Stable Code.

    Attributes:
        parallel_residual: the MLP reads what attention read, and not what attention made of it.
        attention_bias: biases after the projections of queries, keys and values.
        qk_norm: queries and keys are normalised, each head with weights of its own.
        rotary_fraction: the share of each head that turns by its position.
    """

    dialects: ClassVar = {
        "stablelm": Dialect(
            architecture="StableLmForCausalLM",
            sizes=sizes(4096, 32),
            numbers={"layer_norm_eps": ("norm_eps", 1e-5)},
            flags={
                "tie_word_embeddings": ("tied", False),
                "use_qkv_bias": ("attention_bias", False),
                "qk_layernorm": ("qk_norm", False),
                "use_parallel_residual": ("parallel_residual", False),
            },
            choices=ACTIVATION,
            partial=("partial_rotary_factor", 0.25),
            written={"pad_token_id": None},
        )
    }

    tied: bool = False
    activation: str = "silu"
    parallel_residual: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    rotary_fraction: float = 0.25

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = []
        if self.num_heads * self.head_dim != self.embed_dim:
            own.append(
                f"num_heads={self.num_heads} of head_dim={self.head_dim} must be together embed_dim={self.embed_dim}"
            )
        return super().problems() + own

    @property
    def parallel(self) -> bool:
        """Whether the MLP reads what attention read, and not what attention made of it."""
        return self.parallel_residual

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        behind = () if self.parallel_residual else NORM_BEHIND
        norms, biases = _QK_NORMS if self.qk_norm else (), "qkv" if self.attention_bias else ""
        return self.named(*behind, *norms, *(BIASES[one] for one in biases), *MLP)
