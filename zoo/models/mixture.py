"""Mixtures of experts: Mixtral (https://arxiv.org/abs/2401.04088), Qwen 2's and 3's (https://arxiv.org/abs/2505.09388),
OLMoE (https://arxiv.org/abs/2409.02060), gpt-oss (https://arxiv.org/abs/2508.10925), GLM 4.5
(https://arxiv.org/abs/2508.06471).

Dimensions: `B` batch `S` sequence `T` tokens (B*S) `D` embed `V` vocab `F` mlp hidden of an expert `N` query heads
`K` kv heads `H` head size `L` layers `E` experts `C` chosen experts of a token `U` hidden of a shared
expert `G` its gate.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.families.llamas.ernie import ErnieMoeConfig
from zoo.families.llamas.glm import GLMMoeConfig
from zoo.families.llamas.granite import GraniteMoeConfig
from zoo.families.llamas.mistral import MixtralConfig
from zoo.families.llamas.olmo import OlmoeConfig
from zoo.families.llamas.qwen import Qwen2MoeConfig, Qwen3MoeConfig
from zoo.families.mixture import MixtureLike
from zoo.families.mixtures.gptoss import GptOssConfig
from zoo.families.mixtures.minimax import MiniMaxConfig
from zoo.models import llama
from zoo.models.attention.groups import Seen
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.layers import ACTIVATIONS, accumulator, linear, rms_norm
from zoo.models.mixtures.experts import clamped, experts, formed, group_limited
from zoo.quantised import AbstractMatrix

AnyMixture = (
    MixtralConfig | Qwen2MoeConfig | Qwen3MoeConfig | OlmoeConfig | GptOssConfig | GLMMoeConfig | MiniMaxConfig
    | ErnieMoeConfig | GraniteMoeConfig
)  # fmt: skip


class Block(eqx.Module):
    """Every sparse layer's weights, stacked over a leading `L`; inside the scan, one layer's."""

    attn_norm: Float[Array, "*L D"]
    q: Float[Array, "*L D N H"] | AbstractMatrix
    k: Float[Array, "*L D K H"] | AbstractMatrix
    v: Float[Array, "*L D K H"] | AbstractMatrix
    o: Float[Array, "*L N H D"] | AbstractMatrix
    mlp_norm: Float[Array, "*L D"]
    router: Float[Array, "*L D E"] | AbstractMatrix
    gate: Float[Array, "*L E D F"] | AbstractMatrix
    up: Float[Array, "*L E D F"] | AbstractMatrix
    down: Float[Array, "*L E F D"] | AbstractMatrix
    q_bias: Float[Array, "*L N H"] | None = None
    k_bias: Float[Array, "*L K H"] | None = None
    v_bias: Float[Array, "*L K H"] | None = None
    o_bias: Float[Array, "*L D"] | None = None
    q_norm: Float[Array, "*L H"] | Float[Array, "*L N H"] | None = None
    k_norm: Float[Array, "*L H"] | Float[Array, "*L K H"] | None = None
    sinks: Float[Array, "*L N"] | None = None
    router_bias: Float[Array, "*L E"] | None = None
    gate_bias: Float[Array, "*L E F"] | None = None
    up_bias: Float[Array, "*L E F"] | None = None
    down_bias: Float[Array, "*L E D"] | None = None
    shared_router: Float[Array, "*L D G"] | AbstractMatrix | None = None
    shared_gate: Float[Array, "*L D U"] | AbstractMatrix | None = None
    shared_up: Float[Array, "*L D U"] | AbstractMatrix | None = None
    shared_down: Float[Array, "*L U D"] | AbstractMatrix | None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: AnyMixture, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        seen, aux = llama.attention(self, lambda x: llama.normalised(x, self.attn_norm, config), x, config, told)
        how: dict[str, Any] = {}
        if config.gate_limit is not None:
            how["combine"] = functools.partial(clamped, slope=config.gate_slope, limit=config.gate_limit)
        return feed_forward(self, x, seen, config, told, aux, **how)


def feed_forward(
    block: Any,
    x: Float[Array, "B S D"],
    seen: Float[Array, "B S N H"] | Seen,
    config: Any,
    told: LayerPass,
    aux: Aux,
    **how: Any,
) -> tuple[Float[Array, "B S D"], Aux]:
    """Return what a layer of experts makes of what its attention has seen; a shared expert has a gate or has none.

    Args:
        block: of which the parameters behind attention are read; other families' have the same.
        x: the residual stream.
        seen: what heads have seen.
        config: the model's.
        told: how the layer runs.
        aux: what attention returned beside.
        how: what else `zoo.models.mixtures.experts.experts` is told.
    """
    cast: Any = lambda weight: None if weight is None else weight.astype(x.dtype)
    activation = ACTIVATIONS[config.activation]
    how = {"combine": lambda gate, up: activation(gate) * up} | how
    if config.sigmoid_router or config.chosen_by_bias or config.router_groups > 1 or config.weight_scale != 1:
        how["select"] = _in_groups(config)

    def between(x, seen):
        x = x + checkpoint_name(llama.scaled(llama.attention_out(block, seen), config), "attn_out")
        return x, rms_norm(x, block.mlp_norm, config.norm_eps, offset=config.norm_offset)

    x, h = told.behind(between, x, seen)
    weights = map(cast, (block.router, block.gate, block.up, block.down))
    run = experts if told.ops.experts is None else told.ops.experts
    if block.router_bias is not None:  # which stays as wide as it is
        how["biases"] = (block.router_bias, *map(cast, (block.gate_bias, block.up_bias, block.down_bias)))
    out, routed = run(h, *weights, config.experts_per_token, normalise=config.normalise_weights, **how)
    if block.shared_gate is not None:

        def beside(h):
            shared = map(cast, (block.shared_gate, block.shared_up, block.shared_down))
            made = told.ops.mlp(h, *shared, activation=activation)
            if block.shared_router is None:
                return made
            return jax.nn.sigmoid(_share(h, cast(block.shared_router), told)) * made

        out = out + told.ops.tokens(beside, (1,))(h)
    return x + checkpoint_name(llama.scaled(out, config), "mlp_out"), replace(aux, routed=routed)


def _in_groups(config: MixtureLike) -> Callable:
    """Return how experts are chosen (`zoo.models.mixtures.experts.Select`)."""
    how: dict[str, Any] = {"best": 1, "probability": jax.nn.softmax}
    if config.sigmoid_router:
        how = {"best": 2, "probability": jax.nn.sigmoid}
    how |= {"groups": config.router_groups, "kept": config.groups_per_token, "scale": config.weight_scale}
    how["floor"] = config.weight_floor
    return functools.partial(group_limited, **how)


def _share(h: Float[Array, "B S D"], weight: Any, told: LayerPass) -> Float[Array, "B S 1"]:
    """Return the product with a matrix of one column; where texts go on, as the sum of each token on its own.

    A product with a vector CPUs compute several rows at a time, and round the last ones otherwise: a token's bits would
    depend on its row.
    """
    if told.past is None:
        return linear("bsd,dg->bsg", h, weight)
    column = formed(weight, h.shape[-1])[:, 0]
    return (h.astype(accumulator(h.dtype)) * column).sum(-1, keepdims=True).astype(h.dtype)


def balance_loss(routed: list[Float[Array, "2 E"]], chosen: int) -> Float[Array, ""]:
    """Return the balance loss (https://arxiv.org/abs/2101.03961): `E * sum over experts of (share of the tokens) *
    (mean probability)`, which is `experts_per_token` where all experts get the same, more where some get more.

    Args:
        routed: each run's numbers of tokens and sums of probabilities.
        chosen: how many experts each token goes to.
    """
    counts_E, probs_E = sum(routed[1:], routed[0])
    tokens = jnp.maximum(counts_E.sum() / chosen, 1)  # in all layers together
    counts_E, probs_E = counts_E / tokens, probs_E / tokens
    return len(probs_E) * jnp.sum(jax.lax.stop_gradient(counts_E) * probs_E)


class AbstractMixture(Decoder):
    """What mixtures of experts have in common. Routing drops no token."""

    layers: eqx.AbstractVar[Any]
    head: eqx.AbstractVar[Float[Array, "V D"] | AbstractMatrix | None]

    def balance(self, routed: list[Float[Array, "2 E"]]) -> Float[Array, ""]:
        """Return the balance loss of all sparse layers together, not yet weighted."""
        return balance_loss(routed, self.config.experts_per_token)


class Mixture(AbstractMixture):
    """A mixture of experts.

    Layers with one MLP in place of experts are `dense`: Llama's blocks, stacked apart; most models have none.
    """

    blocks: ClassVar = {"layers": Block, "dense": llama.Block}
    embed: Float[Array, "V D"]
    layers: Block
    dense: llama.Block | None
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: AnyMixture = eqx.field(static=True)
