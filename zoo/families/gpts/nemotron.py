"""Nemotron 3 and 4 (https://arxiv.org/abs/2402.16819) and Minitron (https://arxiv.org/abs/2407.14679): LayerNorm whose
weights are stored less one, half of each head turning, and an MLP of squared relu without a gate. Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.dialect import ACTIVATIONS, BIAS, Dialect, sizes
from zoo.families.gpts.starcoder import NORM_BEHIND, LlamaNamed
from zoo.parameters import BIASES, MLP, MLP_BIASES, Row


@dataclass(frozen=True, kw_only=True)
class NemotronConfig(LlamaNamed):
    """Nemotron 3 and 4, and Minitron; those of 2025 are Llamas, or hand on states.

    Attributes:
        attention_bias: biases after the four projections of attention.
        mlp_bias: biases after the two projections of the MLP.
        rotary_fraction: the share of each head that turns by its position.
    """

    dialects: ClassVar = {
        "nemotron": Dialect(
            architecture="NemotronForCausalLM",
            sizes=sizes(4096),
            numbers={"norm_eps": ("norm_eps", 1e-5)},
            flags=BIAS | {"tie_word_embeddings": ("tied", False), "mlp_bias": ("mlp_bias", False)},
            choices={"hidden_act": ("activation", {"relu2": "relu_squared", **ACTIVATIONS})},
            partial=("partial_rotary_factor", 0.5),
            ignored=("kv_channels",),
            written={"pad_token_id": None},
        )
    }

    tied: bool = False
    activation: str = "relu_squared"
    attention_bias: bool = False
    mlp_bias: bool = False
    rotary_fraction: float = 0.5

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of norms: 1 where they are stored less one."""
        return 1.0

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        biases = (*BIASES.values(),) * self.attention_bias + MLP_BIASES[1:] * self.mlp_bias
        return self.named(*NORM_BEHIND, *MLP[1:], *biases)
