"""OLMo 2 (https://arxiv.org/abs/2501.00656).

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `F` mlp hidden `N` query heads `K` kv heads `H` head size
`L` layers.
"""

from typing import ClassVar

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.adapters.lora import LowRank
from zoo.families.olmo import Olmo2Config
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass, PerLayer
from zoo.models.head import Head
from zoo.models.layers import linear, rms_norm


class Block(eqx.Module):
    """Every layer's weights, stacked over a leading `L`; inside the scan, one layer's."""

    q: Float[Array, "*L D N H"] | LowRank
    k: Float[Array, "*L D K H"] | LowRank
    v: Float[Array, "*L D K H"] | LowRank
    o: Float[Array, "*L N H D"] | LowRank
    q_norm: Float[Array, "*L N H"]
    k_norm: Float[Array, "*L K H"]
    post_attn_norm: Float[Array, "*L D"]
    gate: Float[Array, "*L D F"] | LowRank
    up: Float[Array, "*L D F"] | LowRank
    down: Float[Array, "*L F D"] | LowRank
    post_mlp_norm: Float[Array, "*L D"]
    q_bias: Float[Array, "*L N H"] | None = None
    k_bias: Float[Array, "*L K H"] | None = None
    v_bias: Float[Array, "*L K H"] | None = None
    o_bias: Float[Array, "*L D"] | None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: Olmo2Config, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        cast = lambda weight: weight.astype(x.dtype)
        norm = lambda x, weight: rms_norm(x, weight, config.norm_eps, offset=0.0)
        over_heads = lambda x, weight: norm(x.reshape(*x.shape[:2], -1), weight.reshape(-1)).reshape(x.shape)
        q, k, v = (
            linear("bsd,dnh->bsnh", x, cast(weight)) + (0 if bias is None else cast(bias))
            for weight, bias in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
        )
        q, k = told.rotate(over_heads(q, self.q_norm)), told.rotate(over_heads(k, self.k_norm))
        h = linear("bsnh,nhd->bsd", told.attention(q, k, v, scale=config.query_scale), cast(self.o))
        h = h if self.o_bias is None else h + cast(self.o_bias)
        x = x + checkpoint_name(norm(h, self.post_attn_norm), "attn_out")

        h = told.ops.mlp(x, cast(self.gate), cast(self.up), cast(self.down), activation=jax.nn.silu)
        return x + checkpoint_name(norm(h, self.post_mlp_norm), "mlp_out"), Aux(k, v)


class Olmo(Decoder):
    """An OLMo."""

    blocks: ClassVar = {"layers": Block}
    embed: Float[Array, "V D"]
    layers: Block
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | LowRank | None
    config: Olmo2Config = eqx.field(static=True)

    def output(self) -> Head:
        """Return what makes logits: a matrix of its own, or the table again."""
        return Head(self.embed if self.head is None else self.head)

    def runs(self, per_layer: PerLayer) -> list[tuple[Block, PerLayer]]:
        """Return the layers, all of one kind."""
        return [(self.layers, per_layer)]
