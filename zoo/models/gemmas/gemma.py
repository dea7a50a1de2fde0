"""Gemma 1 (https://arxiv.org/abs/2403.08295), 2 (https://arxiv.org/abs/2408.00118) and 3
(https://arxiv.org/abs/2503.19786), text.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `F` mlp hidden `N` query heads `K` kv heads `H` head size
`L` layers.
"""

from typing import ClassVar

import equinox as eqx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.families.gemmas.gemma import Gemma3Config, GemmaConfig
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.layers import gelu, linear, rms_norm
from zoo.quantised import AbstractMatrix

AnyGemma = GemmaConfig | Gemma3Config


class Block(eqx.Module):
    """Every layer's weights, stacked over a leading `L`; inside the scan, one layer's.

    The post norms are those of Gemma 2 and 3, the norms of queries and keys Gemma 3's.
    """

    attn_norm: Float[Array, "*L D"]
    q: Float[Array, "*L D N H"] | AbstractMatrix
    k: Float[Array, "*L D K H"] | AbstractMatrix
    v: Float[Array, "*L D K H"] | AbstractMatrix
    o: Float[Array, "*L N H D"] | AbstractMatrix
    mlp_norm: Float[Array, "*L D"]
    gate: Float[Array, "*L D F"] | AbstractMatrix
    up: Float[Array, "*L D F"] | AbstractMatrix
    down: Float[Array, "*L F D"] | AbstractMatrix
    post_attn_norm: Float[Array, "*L D"] | None = None
    post_mlp_norm: Float[Array, "*L D"] | None = None
    q_norm: Float[Array, "*L H"] | None = None
    k_norm: Float[Array, "*L H"] | None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: AnyGemma, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        cast = lambda weight: weight.astype(x.dtype)
        norm = lambda x, weight: x if weight is None else rms_norm(x, weight, config.norm_eps)
        weights = {"q": self.q, "k": self.k, "v": self.v}

        def project(x, weights):
            h = norm(x, self.attn_norm)
            q, k, v = (linear("bsd,dnh->bsnh", h, cast(weights[name])) for name in "qkv")
            return told.rotate(norm(q, self.q_norm)), told.rotate(norm(k, self.k_norm)), v

        def rest(x, seen):
            # Letters as in `llama.attention_out`, for einsum to transpose no weights.
            h = norm(linear("bsnw,nwd->bsd", seen, cast(self.o)), self.post_attn_norm)
            x = x + checkpoint_name(h, "attn_out")
            h = norm(x, self.mlp_norm)
            h = told.ops.mlp(h, cast(self.gate), cast(self.up), cast(self.down), activation=gelu)
            return x + checkpoint_name(norm(h, self.post_mlp_norm), "mlp_out")

        seen, aux = told.attend(project, x, weights, scale=config.query_scale, cap=config.attn_softcap)
        return told.behind(rest, x, seen), aux


class Gemma(Decoder):
    """A Gemma, whose table is also the head, unless it has one of its own."""

    blocks: ClassVar = {"layers": Block}
    embed: Float[Array, "V D"]
    layers: Block
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: AnyGemma = eqx.field(static=True)
