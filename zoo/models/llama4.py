"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence), the text part: layers of experts, or of one MLP,
of which some turn queries and keys, and divide them by their size, and others let queries grow.

Dimensions: `B` batch `S` sequence `T` tokens (B*S) `D` embed `V` vocab `N` query heads `K` kv heads `H` head size
`L` layers `E` experts `C` chosen experts of a token.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from zoo.config import Config
from zoo.families.mixtures.llama4 import Llama4Config, Llama4Like
from zoo.models import llama, mixture
from zoo.models.forward import Aux, LayerPass
from zoo.models.layers import rms_norm
from zoo.quantised import AbstractMatrix


def turned(
    q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], config: Llama4Like, told: LayerPass
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"]]:
    """Return queries and keys, turned and divided by their size, or else queries that grow, as the layer is one."""
    turns: Bool[Array, ""] = told.own
    q, k = told.rotate(q), told.rotate(k)
    if config.unit_heads:
        unit = lambda x: rms_norm(x, jnp.zeros(x.shape[-1], x.dtype), config.norm_eps)
        q, k = (jnp.where(turns, unit(x), x) for x in (q, k))
    if config.growth is not None:
        q = told.grown(q, jnp.where(turns, 0.0, config.growth), config.growth_length, first=1)
    return q, k


def best(
    scores: Float[Array, "T E"], bias: None, *, chosen: int, normalise: bool
) -> tuple[Float[Array, "T C"], Int[Array, "T C"], Float[Array, "T E"]]:
    """Return what `zoo.models.mixtures.experts.route` does: of the highest scores, each one's own probability."""
    del bias, normalise
    scores_TC, experts_TC = jax.lax.top_k(scores, chosen)
    probs_TE = jax.nn.sigmoid(scores)
    return jax.nn.sigmoid(scores_TC), experts_TC, probs_TE / probs_TE.sum(-1, keepdims=True)


class Sparse(mixture.Block):
    """A layer of experts."""

    def __call__(self, x: Float[Array, "B S D"], config: Any, told: LayerPass) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        norm = lambda x: llama.normalised(x, self.attn_norm, config)
        seen, aux = llama.attention(self, norm, x, config, told, turned=turned)
        return mixture.feed_forward(self, x, seen, config, told, aux, select=best, before=True)


class Dense(llama.Block):
    """A layer of one MLP."""

    turned: ClassVar[Any] = staticmethod(turned)


def _turning(config: Config) -> Bool[Array, " L"]:
    """Return whether each layer turns."""
    return jnp.array([rope is not None for rope in config.layer_ropes])


class MobileLLMR1(llama.Llama):
    """A MobileLLM-R1: Llama 4's text part without experts."""

    blocks: ClassVar = {"layers": Dense}

    def beside(self, tokens: Integer[Array, "B S"], x: Float[Array, "B S ..."]) -> tuple[Any, Any]:
        """Return whether each layer turns."""
        del tokens, x
        return _turning(self.config), None


class Llama4(mixture.AbstractMixture):
    """A Llama 4, its text part."""

    blocks: ClassVar = {"layers": Sparse, "dense": Dense}
    embed: Float[Array, "V D"]
    layers: Sparse
    dense: Dense | None
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: Llama4Config = eqx.field(static=True)

    def beside(self, tokens: Integer[Array, "B S"], x: Float[Array, "B S ..."]) -> tuple[Any, Any]:
        """Return whether each layer turns."""
        del tokens, x
        return _turning(self.config), None
