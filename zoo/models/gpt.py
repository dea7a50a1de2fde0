"""GPT-2 (https://cdn.openai.com/better-language-models/language_models.pdf), GPT-NeoX and Pythia
(https://arxiv.org/abs/2204.06745), OPT (https://arxiv.org/abs/2205.01068): LayerNorm, biases, an MLP without a gate.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `F` mlp hidden `N` query heads `K` kv heads `H` head size
`L` layers `M` learned positions.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from zoo.families.gpts.gpt import GPTLike
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.layers import ACTIVATIONS, layer_norm, lookup
from zoo.models.llama import attention, attention_out
from zoo.quantised import AbstractMatrix


class Block(eqx.Module):
    """Every layer's weights, stacked over a leading `L`; inside the scan, one layer's.

    Where attention and MLP read the same, normalised once, there is no norm of the MLP's own; a parameter that a family
    lacks is None.
    """

    q: Float[Array, "*L D N H"] | AbstractMatrix
    k: Float[Array, "*L D K H"] | AbstractMatrix
    v: Float[Array, "*L D K H"] | AbstractMatrix
    o: Float[Array, "*L N H D"] | AbstractMatrix
    up: Float[Array, "*L D F"] | AbstractMatrix
    down: Float[Array, "*L F D"] | AbstractMatrix
    gate: Float[Array, "*L D F"] | AbstractMatrix | None = None
    attn_norm: Float[Array, "*L D"] | None = None
    mlp_norm: Float[Array, "*L D"] | None = None
    attn_norm_bias: Float[Array, "*L D"] | None = None
    mlp_norm_bias: Float[Array, "*L D"] | None = None
    q_bias: Float[Array, "*L N H"] | None = None
    k_bias: Float[Array, "*L K H"] | None = None
    v_bias: Float[Array, "*L K H"] | None = None
    o_bias: Float[Array, "*L D"] | None = None
    gate_bias: Float[Array, "*L F"] | None = None
    up_bias: Float[Array, "*L F"] | None = None
    down_bias: Float[Array, "*L D"] | None = None
    q_norm: Float[Array, "*L N H"] | None = None
    k_norm: Float[Array, "*L K H"] | None = None

    def __call__(self, x: Float[Array, "B S D"], config: GPTLike, told: LayerPass) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        cast: Any = lambda weight: None if weight is None else weight.astype(x.dtype)

        norm = lambda x, *parts: layer_norm(x, *parts, config.norm_eps, offset=config.norm_offset)

        def first(x):
            return x if self.attn_norm is None else norm(x, self.attn_norm, self.attn_norm_bias)

        seen, aux = attention(self, first, x, config, told)
        biases = None if self.up_bias is None else tuple(map(cast, (self.gate_bias, self.up_bias, self.down_bias)))
        how = {"activation": ACTIVATIONS[config.activation]} | ({} if biases is None else {"biases": biases})

        def rest(x, seen):
            added = x + checkpoint_name(attention_out(self, seen), "attn_out")
            if self.mlp_norm is None:
                read = first(x)
            else:
                behind = x if config.parallel else added
                read = norm(behind, self.mlp_norm, self.mlp_norm_bias)
            h = told.ops.mlp(read, cast(self.gate), cast(self.up), cast(self.down), **how)
            return added + checkpoint_name(h, "mlp_out")

        return told.behind(rest, x, seen), aux


class GPT(Decoder):
    """A GPT; `positions` are those of families that learn a vector for each."""

    blocks: ClassVar = {"layers": Block}
    embed: Float[Array, "V D"]
    positions: Float[Array, "M D"] | None
    layers: Block
    final_norm: Float[Array, " D"]
    final_norm_bias: Float[Array, " D"] | None
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: GPTLike = eqx.field(static=True)

    def check_length(self, length: int) -> None:
        """Raise ValueError if the model has learned fewer positions than a text of so many tokens has."""
        if self.positions is not None and length > self.config.context_length:
            raise ValueError(
                f"cannot read {length} tokens: this model has learned {self.config.context_length} positions. "
                "Give it shorter texts."
            )

    def embedded(
        self, tokens: Integer[Array, "B S"], dtype: DTypeLike, positions: Integer[Array, "#B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Return what the first layer reads; a position that was not learned makes NaN of it."""
        x = super().embedded(tokens, dtype)
        if self.positions is None:
            return x
        if positions is None:
            self.check_length(tokens.shape[1])
        at = jnp.arange(tokens.shape[1], dtype=tokens.dtype) if positions is None else positions
        at = jnp.zeros_like(tokens) + at + self.config.position_offset
        return x + lookup(self.positions, at, dtype)

    def normalised(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """Return what the head reads of what the last layer made."""
        config = self.config
        return layer_norm(x, self.final_norm, self.final_norm_bias, config.norm_eps, offset=config.norm_offset)
