"""ERNIE 4.5 (https://github.com/PaddlePaddle/ERNIE), its dense models: Llama, of whose heads neighbouring dimensions
turn together. Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.dialect import ACTIVATION, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.parameters import MLP, MLP_BIASES, Row


@dataclass(frozen=True, kw_only=True)
class ErnieConfig(Activated):
    """ERNIE 4.5 without experts.

    Attributes:
        attention_bias: biases after all projections, of attention and of the MLP.
    """

    dialects: ClassVar = {
        "ernie4_5": Dialect(
            architecture="Ernie4_5ForCausalLM",
            sizes=sizes(131_072, 2, 128),
            numbers=eps(1e-5),
            flags={"tie_word_embeddings": ("tied", True), "use_bias": ("attention_bias", False)},
            theta=500_000.0,
            choices=ACTIVATION,
            written={"pad_token_id": None},  # or transformers takes one, which small vocabularies do not have
        )
    }

    rope_theta: float = 500_000.0
    tied: bool = True
    attention_bias: bool = False

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together, in place of those of its halves."""
        return True

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + MLP + (MLP_BIASES if self.attention_bias else ()))
