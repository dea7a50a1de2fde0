"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers
(https://arxiv.org/abs/2203.03466). Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.config import not_positive
from zoo.dialect import ACTIVATION, BIAS, TIED, Dialect, eps, sizes
from zoo.families.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Granite 3, its dense models.

    Attributes:
        embedding_multiplier: multiplies the embedding's rows where they are looked up.
        attention_multiplier: multiplies attention's scores, in place of one over the root of the head's size.
        residual_multiplier: multiplies what attention and MLP put out, before it is added.
        logits_scaling: divides the logits.
    """

    dialects: ClassVar = {
        "granite": Dialect(
            architecture="GraniteForCausalLM",
            sizes=sizes(2048),
            numbers=eps(1e-6)
            | {
                name: (name, 1.0)
                for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
            },
            flags=TIED | BIAS | {"mlp_bias": ("mlp_bias", False)},
            choices=ACTIVATION,
            only={"attention_dropout": (0.0, 0.1, None)},
            written={"pad_token_id": None},
        )
    }

    norm_eps: float = 1e-6
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        return super().problems() + not_positive(self, own)

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.attention_multiplier * (self.rope_temperature or 1.0) ** 2

    @property
    def embed_scale(self) -> float | None:
        """What the rows of the table are multiplied by where they are looked up."""
        return None if self.embedding_multiplier == 1 else self.embedding_multiplier

    @property
    def residual_scale(self) -> float:
        """What attention and MLP put out is multiplied by before it is added."""
        return self.residual_multiplier

    @property
    def logit_scale(self) -> float | None:
        """What logits are multiplied by."""
        return None if self.logits_scaling == 1 else 1 / self.logits_scaling
