"""Llama 2 (https://arxiv.org/abs/2307.09288), Llama 3 (https://arxiv.org/abs/2407.21783), Mistral
(https://arxiv.org/abs/2310.06825), Qwen 2 (https://arxiv.org/abs/2407.10671), Qwen 3 (https://arxiv.org/abs/2505.09388),
SmolLM 3, OLMo 2 (https://arxiv.org/abs/2501.00656), Phi 3 (https://arxiv.org/abs/2404.14219), Granite, GLM 4.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `F` mlp hidden `N` query heads `K` kv heads `H` head size
`L` layers.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.config import Config
from zoo.families.llamas.llama import LlamaLike
from zoo.models.attention.groups import Seen
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.layers import ACTIVATIONS, layer_norm, linear, rms_norm
from zoo.quantised import AbstractMatrix


def turned(
    q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], config: Config, told: LayerPass
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"]]:
    """Return queries and keys, turned by their positions."""
    if any(rope is not None for rope in config.layer_ropes):
        q, k = told.rotate(q), told.rotate(k)
    return (q if config.query_growth is None else told.grown(q, *config.query_growth)), k


class Block(eqx.Module):
    """Every layer's weights, stacked over a leading `L`; inside the scan, one layer's.

    Biases are Qwen 2's, norms of each head's queries and keys Qwen 3's, those over all heads and behind attention and
    MLP OLMo 2's; a parameter that a family lacks is None, as the gate of Arcee's MLP.
    """

    q: Float[Array, "*L D N H"] | AbstractMatrix
    k: Float[Array, "*L D K H"] | AbstractMatrix
    v: Float[Array, "*L D K H"] | AbstractMatrix
    o: Float[Array, "*L N H D"] | AbstractMatrix
    gate: Float[Array, "*L D F"] | AbstractMatrix | None = eqx.field(default=None, kw_only=True)
    up: Float[Array, "*L D F"] | AbstractMatrix
    down: Float[Array, "*L F D"] | AbstractMatrix
    attn_norm: Float[Array, "*L D"] | None = None
    mlp_norm: Float[Array, "*L D"] | None = None
    post_attn_norm: Float[Array, "*L D"] | None = None
    post_mlp_norm: Float[Array, "*L D"] | None = None
    q_bias: Float[Array, "*L N H"] | None = None
    k_bias: Float[Array, "*L K H"] | None = None
    v_bias: Float[Array, "*L K H"] | None = None
    o_bias: Float[Array, "*L D"] | None = None
    q_norm: Float[Array, "*L H"] | Float[Array, "*L N H"] | None = None
    k_norm: Float[Array, "*L H"] | Float[Array, "*L K H"] | None = None
    gate_bias: Float[Array, "*L F"] | None = None
    up_bias: Float[Array, "*L F"] | None = None
    down_bias: Float[Array, "*L D"] | None = None
    turned: ClassVar[Any] = staticmethod(turned)

    def __call__(
        self, x: Float[Array, "B S D"], config: LlamaLike, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        cast: Any = lambda weight: None if weight is None else weight.astype(x.dtype)
        seen, aux = attention(self, lambda x: normalised(x, self.attn_norm, config), x, config, told, self.turned)
        how: dict[str, Any] = {"activation": ACTIVATIONS[config.activation]}
        if self.up_bias is not None and self.down_bias is not None:
            how["biases"] = (cast(self.gate_bias), cast(self.up_bias), cast(self.down_bias))

        def rest(x, seen):
            h = attention_out(self, seen)
            x = x + checkpoint_name(scaled(normalised(h, self.post_attn_norm, config), config), "attn_out")
            h = normalised(x, self.mlp_norm, config)
            h = told.ops.mlp(h, cast(self.gate), cast(self.up), cast(self.down), **how)
            return x + checkpoint_name(scaled(normalised(h, self.post_mlp_norm, config), config), "mlp_out")

        return told.behind(rest, x, seen), aux


def normalised(x: Float[Array, "B S D"], weight: Float[Array, " D"] | None, config: Config) -> Float[Array, "B S D"]:
    """Return `x` over its root mean square, times a weight; as it is where there is none."""
    return x if weight is None else rms_norm(x, weight, config.norm_eps, offset=config.norm_offset)


def scaled(h: Float[Array, "B S D"], config: Config) -> Float[Array, "B S D"]:
    """Return what attention or an MLP puts out, as it is added to the residual stream."""
    return h if config.residual_scale == 1 else h * config.residual_scale


def attention(
    block: Any,
    normed: Callable[..., Any],
    x: Float[Array, "B S D"],
    config: Config,
    told: LayerPass,
    turned: Callable[..., Any] = turned,
) -> tuple[Float[Array, "B S N H"] | Seen, Aux]:
    """Return what heads see, and what the block returns beside its output.

    Args:
        block: of which attention's parameters are read; other families' have the same.
        normed: normalises the residual stream.
        x: the residual stream.
        config: the model's.
        told: how the layer runs.
        turned: what positions make of queries and keys, called like `turned`.
    """
    names = "q", "k", "v", "q_bias", "k_bias", "v_bias"
    weights = {name: getattr(block, name) for name in names} | {"q_norm": None, "k_norm": None}
    of_each = block.q_norm is not None and block.q_norm.ndim > 1  # each head has weights of its own
    together = of_each and not config.centred_norms  # a norm over all heads
    if of_each:
        weights |= {"q_norm": block.q_norm, "k_norm": block.k_norm}

    def project(x, weights):
        h = normed(x)
        cast = lambda weight: weight.astype(h.dtype)
        q, k, v = (
            linear("bsd,dnh->bsnh", h, cast(weights[name])) + (0 if bias is None else cast(bias))
            for name, bias in (("q", weights["q_bias"]), ("k", weights["k_bias"]), ("v", weights["v_bias"]))
        )

        def of_heads(q, k):
            if block.q_norm is None:
                return q, k
            q = _heads_normalised(q, weights["q_norm"] if of_each else block.q_norm, config)
            return q, _heads_normalised(k, weights["k_norm"] if of_each else block.k_norm, config)

        q, k = (q, k) if config.turned_first else of_heads(q, k)
        if config.clip is not None:
            q, k, v = (jnp.clip(part, -config.clip, config.clip) for part in (q, k, v))
        q, k = turned(q, k, config, told)
        return *(of_heads(q, k) if config.turned_first else (q, k)), v

    sinks = getattr(block, "sinks", None)
    return told.attend(project, x, weights, scale=config.query_scale, sinks=sinks, apart=not together)


def attention_out(block: Any, seen: Float[Array, "B S N H"]) -> Float[Array, "B S D"]:
    """Return what attention adds to the residual stream, of what heads have seen."""
    # Einsum sums over letters in the alphabet's order: in another than the weights' it would transpose these first.
    out = linear("bsnw,nwd->bsd", seen, block.o.astype(seen.dtype))
    return out if block.o_bias is None else out + block.o_bias.astype(seen.dtype)


def _heads_normalised(x, weight, config):
    """Normalise each head, or all of them together where each has weights of its own and the mean stays."""
    if config.centred_norms:
        return layer_norm(x, weight, None, config.norm_eps)
    if weight.ndim == 1:
        return rms_norm(x, weight, config.norm_eps, offset=config.norm_offset)
    flat = rms_norm(x.reshape(*x.shape[:2], -1), weight.reshape(-1), config.norm_eps, offset=config.norm_offset)
    return flat.reshape(x.shape)


class Llama(Decoder):
    """A Llama, or what grew out of it."""

    blocks: ClassVar = {"layers": Block}
    embed: Float[Array, "V D"]
    layers: Block
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: LlamaLike = eqx.field(static=True)
