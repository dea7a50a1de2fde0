"""What models share of whose layers some attend, and others hand on a state from token to token.

Such a layer projects all tokens, runs a short convolution over them, and may go on with a recurrence: in whole texts
chunk by chunk, as matrix products (`by_chunks`), in texts that go on token by token (`LayerPass.recurrence`).

Dimensions: `B` batch `S` sequence `T` tokens of a chunk `D` embed `N` query heads `K` kv heads `H` head size `M` heads
of a recurrence `C` channels of a convolution `I` its taps `F` mlp hidden, or that of an expert `E` experts `U` hidden
of the shared expert `G` its gate.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from transforms.sharding import explicit, partitions
from zoo.families.llamas.llama import LlamaLike
from zoo.models import llama, mixture
from zoo.models.forward import Aux, LayerPass
from zoo.models.layers import ACTIVATIONS, accumulator
from zoo.quantised import AbstractMatrix


class Layer(eqx.Module):
    """What all kinds of layers have, stacked over a leading `L`; inside the scan, one layer's. Without a router there
    is one MLP."""

    attn_norm: Float[Array, "*L D"]
    mlp_norm: Float[Array, "*L D"]
    gate: Float[Array, "*L D F"] | Float[Array, "*L E D F"] | AbstractMatrix
    up: Float[Array, "*L D F"] | Float[Array, "*L E D F"] | AbstractMatrix
    down: Float[Array, "*L F D"] | Float[Array, "*L E F D"] | AbstractMatrix
    _: KW_ONLY
    router: Float[Array, "*L D E"] | AbstractMatrix | None = None
    router_bias: Float[Array, "*L E"] | None = None
    gate_bias: None = None
    up_bias: None = None
    down_bias: None = None
    shared_router: Float[Array, "*L D G"] | AbstractMatrix | None = None
    shared_gate: Float[Array, "*L D U"] | AbstractMatrix | None = None
    shared_up: Float[Array, "*L D U"] | AbstractMatrix | None = None
    shared_down: Float[Array, "*L U D"] | AbstractMatrix | None = None

    def feed_forward(
        self, x: Float[Array, "B S D"], seen: Any, config: LlamaLike, told: LayerPass, aux: Aux
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what a layer makes of what its heads have seen."""
        if self.router is not None:
            return mixture.feed_forward(self, x, seen, config, told, aux)
        weights = [weight.astype(x.dtype) for weight in (self.gate, self.up, self.down)]

        def rest(x, seen):
            x = x + checkpoint_name(llama.scaled(llama.attention_out(self, seen), config), "attn_out")
            h = llama.normalised(x, self.mlp_norm, config)
            h = told.ops.mlp(h, *weights, activation=ACTIVATIONS[config.activation])
            return x + checkpoint_name(llama.scaled(h, config), "mlp_out")

        return told.behind(rest, x, seen), aux


class Attention(Layer):
    """Layers of attention; a parameter that a family lacks is None."""

    q: Float[Array, "*L D N H"] | AbstractMatrix
    k: Float[Array, "*L D K H"] | AbstractMatrix
    v: Float[Array, "*L D K H"] | AbstractMatrix
    o: Float[Array, "*L N H D"] | AbstractMatrix
    q_norm: Float[Array, "*L H"] | None = None
    k_norm: Float[Array, "*L H"] | None = None
    q_bias: Float[Array, "*L N H"] | None = None
    k_bias: Float[Array, "*L K H"] | None = None
    v_bias: Float[Array, "*L K H"] | None = None
    o_bias: Float[Array, "*L D"] | None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: LlamaLike, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        seen, aux = llama.attention(self, lambda x: llama.normalised(x, self.attn_norm, config), x, config, told)
        return self.feed_forward(x, seen, config, told, aux)


def convolved(
    x: Float[Array, "B S C"],
    taps: Float[Array, "C I"],
    positions: Integer[Array, "#B S"] | None,
    bias: Float[Array, " C"] | None = None,
) -> Float[Array, "B S C"]:
    """Return each channel's sum of its last tokens, times its taps, of which the last is this token's.

    Args:
        x: channels.
        taps: of each.
        positions: where each token stands in its text: none sees those of another; None is one text.
        bias: what is added to each channel.
    """
    wide, taps = x.astype(accumulator(x.dtype)), taps.astype(accumulator(x.dtype))
    out = wide * taps[:, -1]
    for back in range(1, min(taps.shape[1], x.shape[1])):
        before = jnp.pad(wide[:, :-back], ((0, 0), (back, 0), (0, 0)))
        before = before if positions is None else jnp.where(positions[..., None] >= back, before, 0)
        out = out + before * taps[:, -1 - back]
    return (out if bias is None else out + bias.astype(out.dtype)).astype(x.dtype)


def convolved_one(
    before: Float[Array, "before C"],
    x: Float[Array, " C"],
    taps: Float[Array, "C I"],
    bias: Float[Array, " C"] | None = None,
) -> tuple[Float[Array, "before C"], Float[Array, " C"]]:
    """Return what the next token is told, and what this one sees: `convolved` for texts that are read token by token.

    Args:
        before: channels of the tokens before, in float32 or wider.
        x: this token's.
        taps: of each.
        bias: what is added to each channel.
    """
    inputs = jnp.concatenate([before, x[None].astype(before.dtype)])
    out = (inputs * taps.T).sum(0)
    return inputs[1:], (out if bias is None else out + bias.astype(out.dtype)).astype(x.dtype)


class Decays(NamedTuple):
    """What is left of a state that decays, within a chunk.

    Attributes:
        pairs: behind each token of what each before it has added; 0 where that is of another text, or comes later.
        first: behind each token of what was there before the chunk; 0 where another text has begun.
        last: behind the chunk of what each token has added.
    """

    pairs: Float[Array, "B M T T"]
    first: Float[Array, "B M T"]
    last: Float[Array, "B M T"]


def decays(log_decay: Float[Array, "B T M"], begins: Bool[Array, "B T"]) -> Decays:
    """Return what is left of states in a chunk.

    Args:
        log_decay: of each head's state at each token, at most 0.
        begins: where another text begins.
    """
    length = log_decay.shape[1]
    text = jnp.cumsum(begins, 1)  # of each token, how many have begun in this chunk
    one = (text[:, :, None] == text[:, None, :])[:, None]
    log_decay = log_decay.transpose(0, 2, 1)
    # Sums from each token on, not differences of sums from the first one on, which may be large and nearly the same.
    later = jnp.tril(jnp.ones((length, length), bool), -1)
    since = jnp.cumsum(jnp.where(later, log_decay[..., None], 0), -2)
    pairs = jnp.exp(jnp.where((later | jnp.eye(length, dtype=bool)) & one, since, -jnp.inf))
    first = jnp.where((text == 0)[:, None], jnp.exp(jnp.cumsum(log_decay, -1)), 0)
    return Decays(pairs, first, pairs[:, :, -1])


def of_whole_texts(rule: Callable[..., Array], parts: tuple[Array, ...], told: LayerPass, values: Array) -> Array:
    """Return what a recurrence finds in whole texts, which lies as `values` do.

    Args:
        rule: of its parts, and where texts begin `[B, S]`; None is one text.
        parts: of every token `[B, S, ...]`.
        told: how the layer runs.
        values: `[B, S, M, ...]`, spread as what is found.
    """
    begins = None if told.positions is None else jnp.broadcast_to(told.positions == 0, values.shape[:2])
    if explicit():  # where not all gradients of such rules have types
        rule = jax.sharding.auto_axes(rule, out_sharding=PartitionSpec(*partitions(values)))
    return rule(*parts, begins)


def by_chunks(
    chunk: Callable[[Any, Any], tuple[Any, Array]], state: Any, parts: tuple[Array, ...], size: int
) -> Float[Array, "B S ..."]:
    """Return what a recurrence finds at each token, chunk by chunk; gradients make a chunk's intermediates again.

    Args:
        chunk: of the state before a chunk and its parts `[B, T, ...]`, that behind it and what is found `[B, T, ...]`.
        state: before the first token.
        parts: of every token `[B, S, ...]`. The last chunk is filled up with zeros, which must change no state.
        size: tokens of a chunk.
    """
    batch, seq = parts[0].shape[:2]
    size = min(size, seq)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, -seq % size), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

    _, found = jax.lax.scan(jax.checkpoint(chunk, prevent_cse=False), state, tuple(map(cut, parts)))
    return jnp.moveaxis(found, 0, 1).reshape(batch, -1, *found.shape[3:])[:, :seq]
