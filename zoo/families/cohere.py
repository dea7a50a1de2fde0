"""Command R (https://cohere.com/blog/command-r): attention and MLP side by side behind one LayerNorm without bias, and
neighbouring dimensions of each head turn together. Free of JAX."""

from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.config import RopeScaling, not_positive, scaling_problems
from zoo.dialect import ACTIVATION, BIAS, Dialect, activation_problems, sizes
from zoo.families.gpt import GPTLike
from zoo.parameters import ATTENTION, BIASES, ENDS, HEAD, MLP, Row


@dataclass(frozen=True, kw_only=True)
class CohereConfig(GPTLike):
    """Command R and Aya, but for those that normalise queries and keys.

    Attributes:
        logit_scaling: multiplies the logits.
        attention_bias: biases after the four projections of attention.
        rope_scaling: how the rotary frequencies are stretched to longer texts.
    """

    dialects: ClassVar = {
        "cohere": Dialect(
            architecture="CohereForCausalLM",
            sizes=sizes(8192),
            numbers={"layer_norm_eps": ("norm_eps", 1e-5), "logit_scale": ("logit_scaling", 0.0625)},
            flags=BIAS | {"tie_word_embeddings": ("tied", True)},
            choices=ACTIVATION,
            theta=500_000.0,
            written={"pad_token_id": None, "use_qk_norm": False},
        )
    }

    activation: str = "silu"
    rope_theta: float = 500_000.0
    logit_scaling: float = 0.0625
    attention_bias: bool = False
    rope_scaling: RopeScaling | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = not_positive(self, ("logit_scaling",)) + scaling_problems(self, self.rope_scaling)
        return own + activation_problems(self.activation)

    @property
    def parallel(self) -> bool:
        """Whether the MLP reads what attention read, and not what attention made of it."""
        return True

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together, in place of those of its halves."""
        return True

    @property
    def logit_scale(self) -> float | None:
        """What logits are multiplied by."""
        return None if self.logit_scaling == 1 else self.logit_scaling

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        biases = tuple(BIASES.values()) if self.attention_bias else ()
        ends = (replace(ENDS[0], gain=0.3), ENDS[1]) + (() if self.tied else (HEAD,))
        return self.started((*ends, *ATTENTION, *biases, *MLP))
