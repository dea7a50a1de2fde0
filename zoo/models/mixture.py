"""Mixtures of experts: Mixtral (https://arxiv.org/abs/2401.04088) and Qwen 3's (https://arxiv.org/abs/2505.09388).

Dimensions: `B` batch `S` sequence `T` tokens (B*S) `D` embed `V` vocab `F` mlp hidden of an expert `N` query heads
`K` kv heads `H` head size `L` layers `E` experts `C` chosen experts per token.
"""

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from transforms.remat import Cycle, scan_layers
from zoo.families import MixtralConfig, Qwen3MoeConfig
from zoo.inference.cache import Past, remembering
from zoo.models import llama, packing
from zoo.models.experts import experts
from zoo.models.head import Head
from zoo.models.init import draw
from zoo.models.layers import Ops, check_tokens, lookup, rms_norm, scanned_windows
from zoo.models.llama import Frequency, join, project
from zoo.models.rotary import frequencies

AnyMixture = MixtralConfig | Qwen3MoeConfig


class Block(eqx.Module):
    """Every sparse layer's weights, stacked over a leading `L`; inside the scan, one layer's."""

    attn_norm: Float[Array, "*L D"]
    q: Float[Array, "*L D N H"]
    k: Float[Array, "*L D K H"]
    v: Float[Array, "*L D K H"]
    o: Float[Array, "*L N H D"]
    mlp_norm: Float[Array, "*L D"]
    router: Float[Array, "*L D E"]
    gate: Float[Array, "*L E D F"]
    up: Float[Array, "*L E D F"]
    down: Float[Array, "*L E F D"]
    q_bias: Float[Array, "*L N H"] | None = None
    k_bias: Float[Array, "*L K H"] | None = None
    v_bias: Float[Array, "*L K H"] | None = None
    o_bias: Float[Array, "*L D"] | None = None
    q_norm: Float[Array, "*L H"] | None = None
    k_norm: Float[Array, "*L H"] | None = None

    def __call__(
        self,
        x: Float[Array, "B S D"],
        config: AnyMixture,
        *,
        frequency: Frequency,
        window: Int[Array, ""] | int | None = None,
        ops: Ops | None = None,
        positions: Integer[Array, "#B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "2 E"]]:
        """Return what one layer makes of `x`, and how its tokens were routed (see `experts`)."""
        ops = Ops() if ops is None else ops
        q, k, v = project(self, x, config, frequency, positions)
        attended = ops.attention(q, k, v, scale=config.query_scale, cap=None, window=window)
        return self.finish(x, attended, config, ops)

    def finish(
        self, x: Float[Array, "B S D"], attended: Float[Array, "B S N H"], config: AnyMixture, ops: Ops | None = None
    ) -> tuple[Float[Array, "B S D"], Float[Array, "2 E"]]:
        """Return the layer's output, given what its queries attended to, and how its tokens were routed."""
        x = x + checkpoint_name(join(self, attended), "attn_out")
        h = rms_norm(x, self.mlp_norm, config.norm_eps, offset=0.0)
        h, routed = self.experts(h, config, ops)
        return x + checkpoint_name(h, "mlp_out"), routed

    def experts(
        self, x: Float[Array, "B S D"], config: AnyMixture, ops: Ops | None = None
    ) -> tuple[Float[Array, "B S D"], Float[Array, "2 E"]]:
        """Return what each token's experts make of it; and each expert's number of tokens and sum of probabilities."""
        weights = (weight.astype(x.dtype) for weight in (self.router, self.gate, self.up, self.down))
        run = experts if ops is None or ops.experts is None else ops.experts
        return run(x, *weights, config.experts_per_token, normalise=config.normalise_weights)


class Mixture(eqx.Module):
    """A mixture of experts in two halves: `hidden(tokens)`, then `logits(hidden)`. Routing drops no token.

    Layers with one MLP in place of experts are `dense`: Llama's blocks, stacked apart; most models have none.
    """

    embed: Float[Array, "V D"]
    layers: Block
    dense: llama.Block | None
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | None
    config: AnyMixture = eqx.field(static=True)

    @classmethod
    def init(cls, config: AnyMixture, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> "Mixture":
        """Return a model with random weights, normal with the standard deviations of `zoo.parameters`."""
        return cls.build(config, draw(config, key=key, dtype=dtype))

    @classmethod
    def build(cls, config: AnyMixture, leaves: dict) -> "Mixture":
        """Return the model whose parameters are `leaves`, keyed by the dotted paths of `zoo.parameters`."""
        stack = lambda name: {path.removeprefix(name): leaf for path, leaf in leaves.items() if path.startswith(name)}
        dense = llama.Block(**stack("dense.")) if config.dense_layers else None
        return cls(leaves["embed"], Block(**stack("layers.")), dense, leaves["final_norm"], leaves.get("head"), config)

    def hidden(
        self,
        tokens: Integer[Array, "B S"],
        *,
        dtype: DTypeLike | None = None,
        remat: Callable | Cycle | None = None,
        ops: Ops | None = None,
        segments: Integer[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Return what the head reads: the last layer's output, normalised. Arguments as in `hidden_and_balance`."""
        return self.hidden_and_balance(tokens, dtype=dtype, remat=remat, ops=ops, segments=segments)[0]

    def hidden_and_balance(
        self,
        tokens: Integer[Array, "B S"],
        *,
        dtype: DTypeLike | None = None,
        remat: Callable | Cycle | None = None,
        ops: Ops | None = None,
        segments: Integer[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], Float[Array, ""]]:
        """Return what the head reads, and the balance loss (https://arxiv.org/abs/2101.03961), not yet weighted.

        That is `E * sum over experts of (share of the tokens) * (mean probability)`, over all sparse layers together:
        `experts_per_token` where all experts get the same, more where some get more.

        Args:
            tokens: ids in `[0, vocab_size)`. Traced ids are not checked: one outside makes its sequence NaN.
            dtype: what to compute in; None is the parameters' own.
            remat: what the backward pass keeps of each layer (`transforms.remat`), or any wrapper of its body. The
                names `attn_out` and `mlp_out` mark what a policy may keep.
            ops: how attention and experts run, and the MLP of dense layers; None runs them plainly.
            segments: the number of each token's document, where a row holds several (`zoo.models.packing`).

        Raises:
            ValueError: a concrete token id is outside the vocabulary.
        """
        return self._run(tokens, dtype, remat, ops, None, segments)[:2]

    def hidden_and_new(
        self,
        tokens: Integer[Array, "B S"],
        *,
        dtype: DTypeLike | None = None,
        remat: Callable | Cycle | None = None,
        ops: Ops | None = None,
        past: Past | None = None,
        segments: Integer[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], Any]:
        """Return what the head reads, given what was read before; and the keys and values that each layer made."""
        hidden, _, new = self._run(tokens, dtype, remat, ops, past, segments)
        return hidden, new

    def _run(self, tokens, dtype, remat, ops, past, segments):
        """Return what the head reads, the balance loss, and the keys and values that every layer made."""
        check_tokens(tokens, self.config.vocab_size)
        config, seq = self.config, tokens.shape[1]
        length, positions, places = (seq, None, None) if past is None else (past.length, past.positions, past.places)
        if segments is not None:
            positions, ops = packing.places(segments), packing.within(ops, segments)
            length = positions.max() + 1
        x = lookup(self.embed, tokens, self.embed.dtype if dtype is None else jnp.dtype(dtype))
        frequency = frequencies(config.head_dim, config.rope_theta, config.rope_scaling, length)

        def body(x, scanned):
            layer, (window, place) = scanned
            how, new = remembering(ops, past, place)
            out = layer(x, config, frequency=frequency, window=window, ops=how, positions=positions)
            x, routed = out if isinstance(layer, Block) else (out, None)
            return x, (routed, new())

        routed, made, first = [], [], 0
        for run in self._runs((scanned_windows(config.layer_windows, seq), places)):
            x, (of_layers, new) = scan_layers(body, x, run, remat, first)
            first += run[0].attn_norm.shape[0]
            routed += [] if of_layers is None else [of_layers.sum(0)]
            made.append(new)
        counts_E, probs_E = sum(routed) / (tokens.size * self.layers.router.shape[0])
        balance = config.num_experts * jnp.sum(jax.lax.stop_gradient(counts_E) * probs_E)
        new = jax.tree.map(lambda *parts: jnp.concatenate(parts), *made)
        return rms_norm(x, self.final_norm, config.norm_eps, offset=0.0), balance, new

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Return the logits in float32; the product's operands are in the dtype of `hidden`."""
        return self.output()(hidden)

    def output(self) -> Head:
        """Return what makes logits: a matrix of its own, or the table again."""
        return Head(self.embed if self.head is None else self.head)

    def __call__(self, tokens: Integer[Array, "B S"], *, dtype: DTypeLike | None = None) -> Float[Array, "B S V"]:
        """Return the logits of every position. Memory is O(B S V): to train, tile `logits` instead."""
        return self.logits(self.hidden(tokens, dtype=dtype))

    def _runs(self, per_layer: Any) -> list[tuple[Any, Any]]:
        """Return the layers in order, as runs of one kind, each with its part of what is stacked over all layers."""
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
