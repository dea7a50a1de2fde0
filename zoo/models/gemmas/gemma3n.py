"""Gemma 3n (https://ai.google.dev/gemma/docs/gemma-3n), text: residual streams of which a layer computes one (AltUp,
https://arxiv.org/abs/2301.13310), a path of low rank around attention (https://arxiv.org/abs/2411.07501), inputs of
each layer's own, and last layers that share keys and values.

Dimensions: `B` batch `S` sequence `D`, `X` embed `V` vocab `F` mlp hidden `N` query heads `K` kv heads `H` head size
`L` layers `M`, `O`, `I` streams `A` rank `W` width of a layer's input `Y` those of all layers `U` rows of their table.
"""

import statistics
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from transforms.sharding import constrain
from zoo.families.gemmas.gemma3n import Gemma3nConfig, SharingLike
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.layers import Widened, accumulator, gelu, linear, lookup, rms_norm
from zoo.quantised import AbstractMatrix

_LEAST = 1e-5  # mean square of a stream that is scaled


class Handed(eqx.Module):
    """The last keys and values of each kind of layers, which those that have none attend to."""

    local: tuple[Float[Array, "B S K H"], ...]
    whole: tuple[Float[Array, "B S K H"], ...]

    def after(self, is_local: Bool[Array, ""], kv: tuple[Array, ...]) -> "Handed":
        """Return what is handed on behind a layer with these keys and values."""
        kept = lambda mine, old: tuple(jnp.where(mine, *both) for both in zip(kv, old, strict=True))
        return Handed(kept(is_local, self.local), kept(~is_local, self.whole))

    def of(self, is_local: Bool[Array, ""]) -> tuple[Array, ...]:
        """Return the keys and values for a layer."""
        return tuple(jnp.where(is_local, *both) for both in zip(self.local, self.whole, strict=True))


class Own(eqx.Module):
    """What a layer has beside its weights.

    Attributes:
        inputs: what it is told of each token.
        local: whether it is a local layer.
        cut: how many standard deviations above their mean gates are cut off, where they are.
    """

    inputs: Float[Array, "*L B S W"]
    local: Bool[Array, "*L"]
    cut: Float[Array, "*L"] | None


class Sharing(eqx.Module):
    """The layers without keys and values of their own, stacked over a leading `L`; inside the scan, one layer's."""

    attn_norm: Float[Array, "*L D"]
    q: Float[Array, "*L D N H"] | AbstractMatrix
    o: Float[Array, "*L N H D"] | AbstractMatrix
    q_norm: Float[Array, "*L H"]
    post_attn_norm: Float[Array, "*L D"]
    mlp_norm: Float[Array, "*L D"]
    gate: Float[Array, "*L D F"] | AbstractMatrix
    up: Float[Array, "*L D F"] | AbstractMatrix
    down: Float[Array, "*L F D"] | AbstractMatrix
    post_mlp_norm: Float[Array, "*L D"]
    router_norm: Float[Array, "*L D"]
    router: Float[Array, "*L D M"] | AbstractMatrix
    predict_router: Float[Array, "*L M O I"] | AbstractMatrix
    correct_router: Float[Array, "*L M O"] | AbstractMatrix
    correct_scale: Float[Array, "*L D"]
    laurel_down: Float[Array, "*L D A"] | AbstractMatrix
    laurel_up: Float[Array, "*L A D"] | AbstractMatrix
    laurel_norm: Float[Array, "*L D"]
    input_gate: Float[Array, "*L D W"] | AbstractMatrix
    input_up: Float[Array, "*L W D"] | AbstractMatrix
    input_norm: Float[Array, "*L D"]

    def keys_and_values(
        self, h: Float[Array, "B S D"], config: Gemma3nConfig, told: LayerPass
    ) -> tuple[Float[Array, "B S K H"], ...]:
        """Return the layer's own keys and values: none."""
        del h, config, told
        return ()

    def __call__(
        self, x: Float[Array, "B S M D"], config: Gemma3nConfig, told: LayerPass
    ) -> tuple[Float[Array, "B S M D"], Aux]:
        """Return what one layer makes of the streams, in their dtype; weights are cast here, and only here."""
        cast: Any = lambda weight: weight.astype(x.dtype)
        norm = lambda x, weight: rms_norm(x, weight, config.norm_eps, offset=0.0)
        own, active = told.own, config.active_stream

        def project(x):
            predicted = self.predicted(x, config)
            h = norm(predicted[:, :, active], self.attn_norm)
            q = norm(linear("bsd,dnh->bsnh", h, cast(self.q)), self.q_norm)
            return predicted, told.rotate(q), *self.keys_and_values(h, config, told)

        predicted, q, *kv = told.ops.tokens(project, (1,))(x)
        handed = told.handed.after(own.local, tuple(kv)) if kv else told.handed
        k, v = kv or handed.of(own.local)
        seen, pool = told.attention(q, k, v, scale=config.query_scale)

        def rest(predicted, seen, inputs):
            x = predicted[:, :, active]
            h = norm(x, self.attn_norm)
            around = linear("bsa,ad->bsd", linear("bsd,da->bsa", h, cast(self.laurel_down)), cast(self.laurel_up))
            around = h + norm(around, self.laurel_norm)
            h = norm(linear("bsnw,nwd->bsd", seen, cast(self.o)), self.post_attn_norm)
            x = (x + checkpoint_name(h, "attn_out") + around) * 2**-0.5
            h, cut = norm(x, self.mlp_norm), lambda gate: gelu(_cut_off(gate, own.cut))
            h = told.ops.mlp(h, cast(self.gate), cast(self.up), cast(self.down), activation=cut)
            x = x + checkpoint_name(norm(h, self.post_mlp_norm), "mlp_out")
            return self.corrected(predicted, x, inputs, config)

        return told.ops.tokens(rest, (1, 1, 1))(predicted, seen, own.inputs), Aux(pool, handed=handed)

    def modalities(self, x: Float[Array, "B S D"], config: Gemma3nConfig) -> Float[Array, "B S M"]:
        """Return what says of a stream how streams are mixed."""
        h = rms_norm(x, self.router_norm, config.norm_eps, offset=0.0) * jnp.asarray(1 / config.embed_dim, x.dtype)
        return jnp.tanh(linear("bsd,dm->bsm", h, self.router.astype(x.dtype)))

    def predicted(self, x: Float[Array, "B S M D"], config: Gemma3nConfig) -> Float[Array, "B S M D"]:
        """Return the streams that the layer expects: each is what it was, and a part of all of them."""
        of = self.modalities(x[:, :, config.active_stream], config)
        parts = linear("bsm,moi->bsoi", of, self.predict_router.astype(x.dtype))
        return x + sum(parts[:, :, :, i, None] * x[:, :, i, None] for i in range(config.num_streams))

    def corrected(
        self,
        predicted: Float[Array, "B S M D"],
        x: Float[Array, "B S D"],
        inputs: Float[Array, "B S W"],
        config: Gemma3nConfig,
    ) -> Float[Array, "B S M D"]:
        """Return the streams, given the one that was computed and what the layer is told of each token."""
        cast: Any = lambda weight: weight.astype(x.dtype)
        parts = linear("bsm,mo->bso", self.modalities(x, config), cast(self.correct_router)) + 1
        streams = predicted + parts[..., None] * (x - predicted[:, :, config.active_stream])[:, :, None]
        h = streams[:, :, config.active_stream]
        h = h * cast(self.correct_scale) if config.scaled_correction else h
        h = gelu(linear("bsd,dw->bsw", h, cast(self.input_gate))) * inputs
        h = linear("bsw,wd->bsd", h, cast(self.input_up))
        h = rms_norm(h, self.input_norm, config.norm_eps, offset=0.0)
        return jnp.concatenate([streams[:, :, :1], streams[:, :, 1:] + h[:, :, None]], axis=2)


class Block(Sharing):
    """The layers with keys and values of their own."""

    k: Float[Array, "*L D K H"] | AbstractMatrix
    v: Float[Array, "*L D K H"] | AbstractMatrix
    k_norm: Float[Array, "*L H"]

    def keys_and_values(
        self, h: Float[Array, "B S D"], config: Gemma3nConfig, told: LayerPass
    ) -> tuple[Float[Array, "B S K H"], ...]:
        """Return the layer's own keys and values; values are normalised too, and have no weights for it."""
        k, v = (linear("bsd,dkh->bskh", h, weight.astype(h.dtype)) for weight in (self.k, self.v))
        norm = lambda x, weight: rms_norm(x, weight, config.norm_eps, offset=0.0)
        k, v = told.rotate(norm(k, self.k_norm)), norm(v, jnp.ones(v.shape[-1], v.dtype))
        return constrain(k, "B S K H"), constrain(v, "B S K H")


def layer_inputs(
    config: SharingLike,
    tokens: Integer[Array, "B S"],
    x: Float[Array, "B S D"],
    table: Float[Array, "U Y"] | Widened,
    down: Float[Array, "Y D"] | AbstractMatrix,
    norm: Float[Array, " W"],
) -> Float[Array, "L B S W"]:
    """Return each layer's own input: rows of a table for tokens, and what is made of their embedding."""
    dtype, (batch, seq) = x.dtype, tokens.shape
    scaled = lambda x, scale: x * jnp.asarray(scale, dtype)
    of_layers = lambda x: x.reshape(batch, seq, config.num_layers, config.inputs_dim)
    made = scaled(linear("bsd,yd->bsy", x, down.astype(dtype)), config.embed_dim**-0.5)
    made = rms_norm(of_layers(made), norm, config.norm_eps, offset=0.0)
    found = of_layers(scaled(lookup(table, tokens, dtype), config.inputs_dim**0.5))
    return jnp.moveaxis(scaled(made + found, 2**-0.5), 2, 0)


class Streams(eqx.Module):
    """What makes the other streams of the embedding, and one of them all behind the last layer."""

    into: Float[Array, "*L D X"] | AbstractMatrix
    out: Float[Array, "*L D X"] | AbstractMatrix


class Gemma3n(Decoder):
    """A Gemma 3n, whose table is also the head."""

    blocks: ClassVar = {"layers": Block, "sharing": Sharing, "streams": Streams}
    embed: Float[Array, "V D"]
    inputs: Float[Array, "U Y"] | Widened
    inputs_down: Float[Array, "Y D"] | AbstractMatrix
    inputs_norm: Float[Array, " W"]
    layers: Block
    sharing: Sharing | None
    streams: Streams
    final_norm: Float[Array, " D"]
    config: Gemma3nConfig = eqx.field(static=True)

    def embedded(
        self, tokens: Integer[Array, "B S"], dtype: DTypeLike, positions: Integer[Array, "#B S"] | None = None
    ) -> Float[Array, "B S M D"]:
        """Return what the first layer reads: the embedding, and streams that are made of it, as large as it is."""
        x = super().embedded(tokens, dtype, positions)
        made = (_as_large(_through(self.streams.into, i, x), x) for i in range(self.config.num_streams - 1))
        return jnp.stack([x, *made], axis=2)

    def beside(self, tokens: Integer[Array, "B S"], x: Float[Array, "B S M D"]) -> tuple[Own, Handed]:
        """Return what each layer has of its own, and the keys and values that are handed on, none yet."""
        config, dtype, (batch, seq) = self.config, x.dtype, tokens.shape
        known = jnp.where(tokens < config.inputs_vocab_size, tokens, 0)
        inputs = layer_inputs(config, known, x[:, :, 0], self.inputs, self.inputs_down, self.inputs_norm)
        normal = statistics.NormalDist()
        cuts = [normal.inv_cdf(share) if share else -jnp.inf for share in config.sparsity]
        own = Own(
            inputs,
            jnp.asarray(config.local),
            jnp.asarray(cuts, accumulator(dtype)) if cuts else None,
        )
        none = constrain(jnp.zeros((batch, seq, config.num_kv_heads, config.head_dim), dtype), "B S K H")
        return own, Handed((none, none), (none, none))

    def normalised(self, x: Float[Array, "*b M D"]) -> Float[Array, "*b D"]:
        """Return what the head reads: the mean of the streams, as large as the first of them, normalised."""
        first = x[..., 0, :]
        others = [_as_large(_through(self.streams.out, i - 1, x[..., i, :]), first) for i in range(1, x.shape[-2])]
        return super().normalised(sum(others, first) / x.shape[-2])


def _through(stack: Any, i: int, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """Return a stream times one of the matrices that are for streams."""
    return linear("...d,dx->...x", x, jax.tree.map(lambda leaf: leaf[i], stack).astype(x.dtype))


def _as_large(x: Float[Array, "*b D"], model: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """Return `x`, scaled until its mean square is that of another."""
    square = lambda x: jnp.mean(jnp.square(x.astype(accumulator(x.dtype))), axis=-1, keepdims=True)
    return (x * jnp.sqrt(square(model)) / jnp.sqrt(jnp.maximum(square(x), _LEAST))).astype(x.dtype)


def _cut_off(gate: Float[Array, "*b F"], cut: Float[Array, ""] | None) -> Float[Array, "*b F"]:
    """Return what gates are above a bound, that many standard deviations over their mean; minus infinity is none."""
    if cut is None:
        return gate
    wide = gate.astype(cut.dtype)
    bound = wide.mean(-1, keepdims=True) + wide.std(-1, keepdims=True) * jnp.where(jnp.isinf(cut), 0, cut)
    return jnp.where(jnp.isinf(cut), gate, jax.nn.relu(wide - bound).astype(gate.dtype))
