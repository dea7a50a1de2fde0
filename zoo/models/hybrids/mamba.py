"""Mamba 2 (https://arxiv.org/abs/2405.21060) beside attention, each before an MLP, or a mixture of experts: Granite 4.

A head's state is a matrix of its channels and of state dimensions. Each token lets it decay, and adds its channels
along a direction; what it finds is the state along another direction. Chunks of tokens are made of matrix products.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `M` heads of a state `W` their channels `Z` all of them `N` state
dimensions `Q` groups of heads, which share directions `C` channels of the convolution `I` its taps `G` one.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from transforms.sharding import partitions, place, uncut
from zoo.families.llamas.granite import Granite4Config, Granite4MoeConfig
from zoo.models import llama, mixture
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.hybrids.shared import Attention, Layer, by_chunks, convolved, convolved_one, decays, of_whole_texts
from zoo.models.layers import ACTIVATIONS, accumulator, linear
from zoo.quantised import AbstractMatrix

CHUNK = 64  # tokens between which the state is handed on


class Mamba(Layer):
    """Layers that have a state space in place of attention."""

    z: Float[Array, "*L D Z"] | AbstractMatrix
    xbc: Float[Array, "*L D C"] | AbstractMatrix
    dt: Float[Array, "*L D M"] | AbstractMatrix
    conv: Float[Array, "*L C G I"]
    decay: Float[Array, "*L M"]
    step: Float[Array, "*L M"]
    skip: Float[Array, "*L M"]
    scale: Float[Array, "*L Z"]
    o: Float[Array, "*L M W D"] | AbstractMatrix
    conv_bias: Float[Array, "*L C"] | None = None
    o_bias: None = None

    def __call__(self, x: Float[Array, "B S D"], config: Any, told: LayerPass) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        pairs = ("bsd,dz->bsz", self.z), ("bsd,dc->bsc", self.xbc), ("bsd,dm->bsm", self.dt)

        def project(x):
            h = llama.normalised(x, self.attn_norm, config)
            return tuple(linear(pattern, h, weight.astype(x.dtype)) for pattern, weight in pairs)

        # A state goes through all tokens.
        z, channels, dt = (uncut(part, 1) for part in told.ops.tokens(project, (1,))(x))
        wide = accumulator(x.dtype)
        step = jax.nn.softplus(dt.astype(wide) + self.step.astype(wide))
        log_decay = -jnp.exp(self.decay.astype(wide)) * step
        read = self._whole if told.past is None else self._further
        seen, pool = read(channels, step, log_decay, config, told)
        seen = place(self._gated(seen, z, config).astype(x.dtype), PartitionSpec(*partitions(x)[:2]))
        return self.feed_forward(x, seen, config, told, Aux(pool))

    def _gated(self, seen, z, config):
        """Return what is seen `[B S M W]`, gated, and over the root mean square of each group of heads."""
        wide = seen.dtype
        gated = seen * jax.nn.silu(z.astype(wide)).reshape(seen.shape)
        groups = gated.reshape(*seen.shape[:2], config.mamba_groups, -1, seen.shape[-1])
        groups = groups * jax.lax.rsqrt((groups * groups).mean((-2, -1), keepdims=True) + config.norm_eps)
        return groups.reshape(seen.shape) * self.scale.astype(wide).reshape(seen.shape[2:])

    def _whole(self, channels, step, log_decay, config, told):
        """Return what is seen in whole texts, and no pool."""
        bias = None if self.conv_bias is None else self.conv_bias.astype(channels.dtype)
        mixed = convolved(channels, self.conv[:, 0].astype(channels.dtype), told.positions, bias)
        x, b, c = _parts(mixed, step.dtype, config)
        found = of_whole_texts(state_space, (x * step[..., None], b, c, log_decay), told, x)
        return found + self.skip.astype(step.dtype)[:, None] * x, None

    def _further(self, channels, step, log_decay, config, told):
        """Return what is seen in texts that were read before, and the pool."""
        taps, bias = self.conv[:, 0].astype(channels.dtype), self.conv_bias
        bias, skip = None if bias is None else bias.astype(channels.dtype), self.skip.astype(step.dtype)[:, None]

        def token(state, own):
            channels_C, step_M, log_decay_M = own
            inputs, mixed_C = convolved_one(state["inputs"], channels_C, taps, bias)
            x, b, c = _parts(mixed_C, step_M.dtype, config)
            matrices, found = added(state["matrices"], x * step_M[:, None], b, c, log_decay_M)
            return {"inputs": inputs, "matrices": matrices}, found + skip * x

        return told.recurrence(token, (channels, step, log_decay))


def _parts(mixed, dtype, config):
    """Return the heads' channels, and the groups' two directions, of the channels behind the convolution."""
    mixed = ACTIVATIONS[config.activation](mixed).astype(dtype)
    inner, size = config.mamba_heads * config.mamba_head_dim, config.mamba_groups * config.mamba_state_dim
    parts = zip(
        jnp.split(mixed, [inner, inner + size], -1), (config.mamba_heads, *(config.mamba_groups,) * 2), strict=True
    )
    return [part.reshape(*mixed.shape[:-1], count, -1) for part, count in parts]


def state_space(
    x: Float[Array, "B S M W"],
    b: Float[Array, "B S Q N"],
    c: Float[Array, "B S Q N"],
    log_decay: Float[Array, "B S M"],
    begins: Bool[Array, "B S"] | None = None,
) -> Float[Array, "B S M W"]:
    """Return what tokens find, in the dtype of `x`.

    A state, zeros at first, becomes `decay * state + x b'`; then `state c` is found. 4 S M W N FLOPs, and more within
    chunks.

    Args:
        x: channels, times the length of each token's step.
        b: along which direction they are added; each group is that of so many neighbouring heads.
        c: along which direction a token looks.
        log_decay: of each head's state, at most 0.
        begins: where another text begins, with a state of zeros; None is one text.
    """
    batch, seq, heads, width = x.shape
    begins = jnp.zeros((batch, seq), bool) if begins is None else begins
    return by_chunks(
        _chunk, jnp.zeros((batch, heads, width, b.shape[-1]), x.dtype), (x, b, c, log_decay, begins), CHUNK
    )


def added(
    state: Float[Array, "M W N"],
    x: Float[Array, "M W"],
    b: Float[Array, "Q N"],
    c: Float[Array, "Q N"],
    log_decay: Float[Array, " M"],
) -> tuple[Float[Array, "M W N"], Float[Array, "M W"]]:
    """Return the state behind one token, and what it finds there: `state_space` by its definition."""
    each = len(x) // len(b)
    b, c = jnp.repeat(b, each, 0)[:, None], jnp.repeat(c, each, 0)[:, None]
    state = state * jnp.exp(log_decay)[:, None, None] + x[:, :, None] * b
    return state, (state * c).sum(-1)


def _chunk(state, parts):
    """Return the state after a chunk, and what its tokens find `[B, T, M, W]`."""
    x, b, c, log_decay, begins = parts
    grouped = lambda array, dim: array.reshape(*array.shape[:dim], b.shape[2], -1, *array.shape[dim + 1 :])
    x_, state_ = grouped(x, 2), grouped(state, 1)  # heads `r` of each group `q`
    pairs, first, last = (grouped(part, 1) for part in decays(log_decay, begins))
    found = jnp.einsum("btqn,bqrwn->btqrw", c, state_) * first.transpose(0, 3, 1, 2)[..., None]
    scores = jnp.einsum("btqn,buqn->bqtu", c, b)[:, :, None] * pairs
    found = found + jnp.einsum("bqrtu,buqrw->btqrw", scores, x_)
    made = jnp.einsum("buqrw,buqn->bqrwn", x_ * last.transpose(0, 3, 1, 2)[..., None], b)
    return (state_ * first[..., -1:, None] + made).reshape(state.shape), found.reshape(x.shape)


class Granite4(Decoder):
    """A Granite 4: layers of attention, and of state spaces."""

    blocks: ClassVar = {"layers": Attention, "mamba": Mamba}
    embed: Float[Array, "V D"]
    layers: Attention
    mamba: Mamba | None
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: Granite4Config = eqx.field(static=True)


class Granite4Moe(mixture.AbstractMixture):
    """A Granite 4 that is a mixture of experts: likewise. Routing drops no token."""

    blocks: ClassVar = {"layers": Attention, "mamba": Mamba}
    embed: Float[Array, "V D"]
    layers: Attention
    mamba: Mamba | None
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: Granite4MoeConfig = eqx.field(static=True)
