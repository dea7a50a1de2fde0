"""DeepSeek V2 (https://arxiv.org/abs/2405.04434), V3 (https://arxiv.org/abs/2412.19437), Kimi K2 and Mistral Small 4:
attention over latents, experts in groups.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `N` heads `H` head size of queries and keys `W` of values `A`
latent of queries `C` latent of keys and values `J` that and the part of keys that turns `X` what a head makes of it,
keys and values `F` mlp hidden of an expert `E` experts `U` of the shared expert.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.families.mixtures.deepseek import DeepSeekLike
from zoo.models import mixture
from zoo.models.attention.groups import Seen
from zoo.models.forward import Aux, LayerPass
from zoo.models.layers import ACTIVATIONS, linear, rms_norm
from zoo.models.llama import attention_out, normalised
from zoo.models.mixtures.experts import formed
from zoo.quantised import AbstractMatrix

_EPS = 1e-6  # of the norms of latents, whatever the config says


class Latent(eqx.Module):
    """Weights of attention to latents, stacked over a leading `L`; inside the scan, one layer's."""

    attn_norm: Float[Array, "*L D"]
    q: Float[Array, "*L A N H"] | Float[Array, "*L D N H"] | AbstractMatrix
    kv_down: Float[Array, "*L D J"] | AbstractMatrix
    kv_norm: Float[Array, "*L C"]
    kv: Float[Array, "*L C N X"] | AbstractMatrix
    o: Float[Array, "*L N W D"] | AbstractMatrix
    mlp_norm: Float[Array, "*L D"]
    q_down: Float[Array, "*L D A"] | AbstractMatrix | None = eqx.field(default=None, kw_only=True)
    q_norm: Float[Array, "*L A"] | None = eqx.field(default=None, kw_only=True)
    q_down_bias: Float[Array, "*L A"] | None = eqx.field(default=None, kw_only=True)
    kv_down_bias: Float[Array, "*L J"] | None = eqx.field(default=None, kw_only=True)
    o_bias: Float[Array, "*L D"] | None = eqx.field(default=None, kw_only=True)


class Dense(Latent):
    """Weights of the first layers, which have one MLP."""

    gate: Float[Array, "*L D F"] | AbstractMatrix
    up: Float[Array, "*L D F"] | AbstractMatrix
    down: Float[Array, "*L F D"] | AbstractMatrix

    def __call__(
        self, x: Float[Array, "B S D"], config: DeepSeekLike, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        seen, aux = latent_attention(self, x, config, told)
        weights = [weight.astype(x.dtype) for weight in (self.gate, self.up, self.down)]
        activation = ACTIVATIONS[config.activation]

        def rest(x, seen):
            x = x + checkpoint_name(attention_out(self, seen), "attn_out")
            h = told.ops.mlp(normalised(x, self.mlp_norm, config), *weights, activation=activation)
            return x + checkpoint_name(h, "mlp_out")

        return told.behind(rest, x, seen), aux


class Sparse(Latent):
    """Weights of the layers with experts."""

    router: Float[Array, "*L D E"] | AbstractMatrix
    gate: Float[Array, "*L E D F"] | AbstractMatrix
    up: Float[Array, "*L E D F"] | AbstractMatrix
    down: Float[Array, "*L E F D"] | AbstractMatrix
    shared_gate: Float[Array, "*L D U"] | AbstractMatrix
    shared_up: Float[Array, "*L D U"] | AbstractMatrix
    shared_down: Float[Array, "*L U D"] | AbstractMatrix
    router_bias: Float[Array, "*L E"] | None = None
    shared_router: None = None
    gate_bias: None = None
    up_bias: None = None
    down_bias: None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: DeepSeekLike, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        seen, aux = latent_attention(self, x, config, told)
        return mixture.feed_forward(self, x, seen, config, told, aux)


def latent_attention(
    block: Latent, x: Float[Array, "B S D"], config: DeepSeekLike, told: LayerPass
) -> tuple[Float[Array, "B S N W"] | Seen, Aux]:
    """Return what heads see, and what the block returns beside its output.

    Whole texts have keys and values of every head. Of what was read before there are latents alone: their way to keys
    goes into the queries instead, and that to values comes behind (section 2.1.2 of V2's paper).
    """
    cast: Any = lambda weight: weight.astype(x.dtype)
    biased = lambda x, bias: x if bias is None else x + cast(bias)
    plain, turned = config.nope_head_dim, config.rope_head_dim
    weights = {"q": block.q, "kv": block.kv}

    def down(x):
        """Return the latents, side by side: of queries, of keys and values, and the part of keys that turns."""
        h = q = normalised(x, block.attn_norm, config)
        if block.q_down is not None and block.q_norm is not None:
            q = biased(linear("bsd,da->bsa", h, cast(block.q_down)), block.q_down_bias)
            q = rms_norm(q, block.q_norm, _EPS, offset=0.0)
        kv = biased(linear("bsd,dj->bsj", h, cast(block.kv_down)), block.kv_down_bias)
        latent, key = kv[..., : config.kv_rank], kv[..., config.kv_rank :]
        latent = rms_norm(latent, block.kv_norm, _EPS, offset=0.0)
        return jnp.concatenate([q, latent, told.rotate(key[:, :, None])[:, :, 0]], -1)

    def split(latents):
        width = latents.shape[-1]
        return jnp.split(latents, [width - config.layer_cached[0][-1], width - turned], -1)

    def queries(q, weight):
        q = linear("bsa,anh->bsnh", q, cast(weight))
        q = q if config.query_growth is None else told.grown(q, *config.query_growth)
        return q[..., :plain], told.rotate(q[..., plain:])

    def project(latents, weights):
        q, latent, key = split(latents)
        kv = linear("bsc,cnx->bsnx", latent, cast(weights["kv"]))
        k = kv[..., :plain], key[:, :, None] + jnp.zeros_like(kv[..., :1])  # one for all heads, laid out as theirs
        return jnp.concatenate(queries(q, weights["q"]), -1), jnp.concatenate(k, -1), kv[..., plain:]

    latents = told.ops.tokens(down, (1,))(x)
    if told.past is None:
        return told.attend(project, latents, weights, scale=config.query_scale)
    q, latent, key = split(latents)
    into_CNX = formed(cast(block.kv), config.kv_rank)
    q_plain, q_turned = queries(q, block.q)
    q_latent = jnp.einsum("bsnh,cnh->bsnc", q_plain, into_CNX[..., :plain]).astype(x.dtype)
    kept = jnp.concatenate([latent, key], -1)[:, :, None]
    seen, pool = told.latent_attention(jnp.concatenate([q_latent, q_turned], -1), kept, scale=config.query_scale)
    seen = jnp.einsum("bsnc,cnw->bsnw", seen[..., : config.kv_rank], into_CNX[..., plain:])
    return seen.astype(x.dtype), Aux(pool)


class DeepSeek(mixture.AbstractMixture):
    """A DeepSeek: the first layers are dense. Routing drops no token."""

    blocks: ClassVar = {"layers": Sparse, "dense": Dense}
    embed: Float[Array, "V D"]
    layers: Sparse
    dense: Dense | None
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: DeepSeekLike = eqx.field(static=True)
