"""ModernBERT (https://arxiv.org/abs/2412.13663): blocks of LayerNorm, the first of which has none before attention.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab.
"""

from typing import ClassVar

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from zoo.families.gpts.bert import ModernBertConfig
from zoo.models.decoder import Decoder
from zoo.models.gpt import Block
from zoo.models.head import Head
from zoo.models.layers import layer_norm


class ModernBert(Decoder):
    """A ModernBERT: it reads whole texts, and has no head."""

    blocks: ClassVar = {"first": Block, "layers": Block}
    embed: Float[Array, "V D"]
    embed_norm: Float[Array, " D"]
    embed_norm_bias: Float[Array, " D"] | None
    first: Block
    layers: Block | None
    final_norm: Float[Array, " D"]
    final_norm_bias: Float[Array, " D"] | None
    config: ModernBertConfig = eqx.field(static=True)

    def embedded(
        self, tokens: Integer[Array, "B S"], dtype: DTypeLike, positions: Integer[Array, "#B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Return what the first layer reads."""
        x = super().embedded(tokens, dtype, positions)
        return layer_norm(x, self.embed_norm, self.embed_norm_bias, self.config.norm_eps)

    def normalised(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """Return what comes behind the last layer."""
        return layer_norm(x, self.final_norm, self.final_norm_bias, self.config.norm_eps)

    def output(self) -> Head:
        """Raise ValueError: there is no head."""
        raise ValueError(
            f"cannot make logits: a {type(self.config).__name__} reads texts and has no head. Take its hidden states, "
            "or vectors from zoo.Embedder."
        )
