"""Mixtures of experts: Mixtral (https://arxiv.org/abs/2401.04088), Qwen 2's and 3's (https://arxiv.org/abs/2505.09388),
OLMoE (https://arxiv.org/abs/2409.02060), gpt-oss (https://arxiv.org/abs/2508.10925).

Dimensions: `B` batch `S` sequence `T` tokens (B*S) `D` embed `V` vocab `F` mlp hidden of an expert `N` query heads
`K` kv heads `H` head size `L` layers `E` experts `C` chosen experts of a token `U` hidden of a shared
expert `G` its gate.
"""

import functools
import itertools
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.families.gptoss import GptOssConfig
from zoo.families.mistral import MixtralConfig
from zoo.families.olmo import OlmoeConfig
from zoo.families.qwen import Qwen2MoeConfig, Qwen3MoeConfig
from zoo.models import llama
from zoo.models.decoder import Decoder
from zoo.models.experts import clamped, experts
from zoo.models.forward import Aux, LayerPass, PerLayer
from zoo.models.head import Head
from zoo.models.layers import linear
from zoo.quantised import AbstractMatrix

AnyMixture = MixtralConfig | Qwen2MoeConfig | Qwen3MoeConfig | OlmoeConfig | GptOssConfig


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
        cast: Any = lambda weight: weight.astype(x.dtype)
        seen, aux = llama.attention(self, lambda x: llama.normalised(x, self.attn_norm, config), x, config, told)

        def between(x, seen):
            x = x + checkpoint_name(llama.attention_out(self, seen), "attn_out")
            return x, llama.normalised(x, self.mlp_norm, config)

        x, h = told.ops.tokens(between, (1, 1))(x, seen)
        weights = map(cast, (self.router, self.gate, self.up, self.down))
        run = experts if told.ops.experts is None else told.ops.experts
        how: dict[str, Any] = {"normalise": config.normalise_weights}
        if self.router_bias is not None:
            how["biases"] = tuple(map(cast, (self.router_bias, self.gate_bias, self.up_bias, self.down_bias)))
        if config.gate_limit is not None:
            how["combine"] = functools.partial(clamped, slope=config.gate_slope, limit=config.gate_limit)
        out, routed = run(h, *weights, config.experts_per_token, **how)
        if self.shared_router is not None:  # which has all four

            def beside(h):
                share = jax.nn.sigmoid(linear("bsd,dg->bsg", h, cast(self.shared_router)))
                shared = map(cast, (self.shared_gate, self.shared_up, self.shared_down))
                return share * told.ops.mlp(h, *shared, activation=jax.nn.silu)

            out = out + told.ops.tokens(beside, (1,))(h)
        return x + checkpoint_name(out, "mlp_out"), replace(aux, routed=routed)


class Mixture(Decoder):
    """A mixture of experts. Routing drops no token.

    Layers with one MLP in place of experts are `dense`: Llama's blocks, stacked apart; most models have none.
    """

    blocks: ClassVar = {"layers": Block, "dense": llama.Block}
    embed: Float[Array, "V D"]
    layers: Block
    dense: llama.Block | None
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: AnyMixture = eqx.field(static=True)

    def output(self) -> Head:
        """Return what makes logits: a matrix of its own, or the table again."""
        return Head(self.embed if self.head is None else self.head)

    def balance(self, routed: list[Float[Array, "2 E"]], tokens: int) -> Float[Array, ""]:
        """Return the balance loss (https://arxiv.org/abs/2101.03961), not yet weighted.

        That is `E * sum over experts of (share of the tokens) * (mean probability)`, over all sparse layers together:
        `experts_per_token` where all experts get the same, more where some get more.
        """
        counts_E, probs_E = sum(routed[1:], routed[0]) / (tokens * self.layers.router.shape[0])
        return self.config.num_experts * jnp.sum(jax.lax.stop_gradient(counts_E) * probs_E)

    def runs(self, per_layer: PerLayer) -> list[tuple[Any, PerLayer]]:
        """Return the layers in order, as runs of one kind, each with its part of what differs between layers."""
        if self.dense is None:
            return [(self.layers, per_layer)]
        is_dense = [layer in self.config.dense_layers for layer in range(self.config.num_layers)]
        taken, runs, start = {True: 0, False: 0}, [], 0
        for kind, run in itertools.groupby(is_dense):
            count = len(list(run))
            cut = lambda tree, first, count=count: jax.tree.map(lambda leaf: leaf[first : first + count], tree)
            runs.append((cut(self.dense if kind else self.layers, taken[kind]), cut(per_layer, start)))
            taken[kind], start = taken[kind] + count, start + count
        return runs
