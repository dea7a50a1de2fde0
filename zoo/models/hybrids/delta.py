"""Qwen 3 Next (https://qwenlm.github.io/blog/qwen3_next), Qwen 3.5 and 3.6: the gated delta rule
(https://arxiv.org/abs/2412.06464), and attention with a gate behind it; each before an MLP, or a mixture of experts.

A head's state is a matrix that keys look values up in. Each token lets it decay, and corrects what is found under its
key by a part of what is missing there. Chunks of tokens are made of matrix products, and hand on the state.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `N` query heads `K` kv heads `H` head size `Q` key heads of the
rule `M` value heads `W` their size `Y` and `Z` what a key head's projections make `C` channels of the convolution `I`
its taps `G` one `F` mlp hidden, or that of an expert `E` experts `U` hidden of the shared expert.
"""

from dataclasses import KW_ONLY
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from transforms.sharding import partitions, place, uncut
from zoo.families.llamas.qwen_next import DeltaLike, Qwen3NextConfig, Qwen35Config, Qwen35MoeConfig
from zoo.models import llama, mixture
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.hybrids.shared import Layer, by_chunks, convolved, convolved_one, decays, of_whole_texts
from zoo.models.layers import accumulator, linear, rms_norm
from zoo.quantised import AbstractMatrix

CHUNK = 64  # tokens between which the state is handed on
_EPS = 1e-6  # of the lengths of queries and keys


class Gated(Layer):
    """Layers of attention, whose heads have a gate."""

    q: Float[Array, "*L D N H"] | AbstractMatrix
    q_gate: Float[Array, "*L D N H"] | AbstractMatrix
    k: Float[Array, "*L D K H"] | AbstractMatrix
    v: Float[Array, "*L D K H"] | AbstractMatrix
    o: Float[Array, "*L N H D"] | AbstractMatrix
    q_norm: Float[Array, "*L H"]
    k_norm: Float[Array, "*L H"]
    q_bias: Float[Array, "*L N H"] | None = None
    q_gate_bias: Float[Array, "*L N H"] | None = None
    k_bias: Float[Array, "*L K H"] | None = None
    v_bias: Float[Array, "*L K H"] | None = None
    o_bias: Float[Array, "*L D"] | None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: DeltaLike, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        first = lambda x: llama.normalised(x, self.attn_norm, config)
        seen, aux = llama.attention(self, first, x, config, told)

        def gated(x, seen):
            gate = linear("bsd,dnh->bsnh", first(x), self.q_gate.astype(x.dtype))
            gate = gate if self.q_gate_bias is None else gate + self.q_gate_bias.astype(x.dtype)
            return seen * jax.nn.sigmoid(gate)

        seen = told.behind(gated, x, seen)
        return self.feed_forward(x, seen, config, told, aux)


class Delta(Layer):
    """Layers of the delta rule, whose projections have a part for each key head, or come one after the other."""

    conv: Float[Array, "*L C G I"]
    decay: Float[Array, "*L M"]
    step: Float[Array, "*L M"]
    scale: Float[Array, "*L W"]
    o: Float[Array, "*L M W D"] | AbstractMatrix
    _: KW_ONLY
    qkvz: Float[Array, "*L D Q Y"] | AbstractMatrix | None = None
    ba: Float[Array, "*L D Q Z"] | AbstractMatrix | None = None
    qkv: Float[Array, "*L D C"] | AbstractMatrix | None = None
    z: Float[Array, "*L D M W"] | AbstractMatrix | None = None
    b: Float[Array, "*L D M"] | AbstractMatrix | None = None
    a: Float[Array, "*L D M"] | AbstractMatrix | None = None
    o_bias: None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: DeltaLike, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        batch, seq, _ = x.shape
        channels, z, b, a = self._projected(x, config, told)
        wide = accumulator(x.dtype)
        log_decay = -jnp.exp(self.decay.astype(wide)) * jax.nn.softplus(a.astype(wide) + self.step.astype(wide))
        read = self._whole if told.past is None else self._further
        seen, pool = read(channels, log_decay, jax.nn.sigmoid(b), config, told)
        seen = rms_norm(seen.astype(x.dtype), self.scale, config.norm_eps, offset=0.0)
        z = z.reshape(batch, seq, -1).reshape(seen.shape)  # both at once no mesh can follow
        seen = (seen * jax.nn.silu(z.astype(wide))).astype(x.dtype)
        seen = place(seen, PartitionSpec(*partitions(x)[:2]))
        return self.feed_forward(x, seen, config, told, Aux(pool))

    def _projected(self, x, config, told):
        """Return queries, keys and values `[B S C]`, what gates them `[B S ...]`, and rates and decays `[B S M]`."""
        pairs: list[tuple[str, Any]] = [("bsd,dqy->bsqy", self.qkvz), ("bsd,dqz->bsqz", self.ba)]
        if self.qkvz is None:
            pairs = [
                ("bsd,dc->bsc", self.qkv),
                ("bsd,dmw->bsmw", self.z),
                ("bsd,dm->bsm", self.b),
                ("bsd,dm->bsm", self.a),
            ]

        def project(x):
            h = llama.normalised(x, self.attn_norm, config)
            return tuple(linear(pattern, h, weight.astype(x.dtype)) for pattern, weight in pairs)

        parts = [uncut(part, 1) for part in told.ops.tokens(project, (1,))(x)]  # a state goes through all tokens
        if self.qkvz is None:
            return parts
        size, flat = config.delta_key_dim, lambda part: part.reshape(*x.shape[:2], -1)
        width = config.delta_value_heads // config.delta_key_heads * config.delta_value_dim
        *qkv, z = jnp.split(parts[0], [size, 2 * size, 2 * size + width], -1)
        return jnp.concatenate([flat(part) for part in qkv], -1), z, *map(flat, jnp.split(parts[1], 2, -1))

    def _whole(self, channels, log_decay, rate, config, told):
        """Return what the rule finds in whole texts, and no pool."""
        mixed = jax.nn.silu(convolved(channels, self.conv[:, 0].astype(channels.dtype), told.positions))
        q, k, v = _heads(mixed, config)
        return of_whole_texts(delta_rule, (q, k, v, log_decay, rate), told, v), None

    def _further(self, channels, log_decay, rate, config, told):
        """Return what the rule finds in texts that were read before, and the pool."""
        taps = self.conv[:, 0].astype(channels.dtype)

        def token(state, own):
            channels_C, *rates = own
            inputs, mixed_C = convolved_one(state["inputs"], channels_C, taps)
            matrices, found = corrected(state["matrices"], *_heads(jax.nn.silu(mixed_C), config), *rates)
            return {"inputs": inputs, "matrices": matrices}, found

        return told.recurrence(token, (channels, log_decay, rate))


def _heads(mixed, config):
    """Return queries, keys and values of channels."""
    keys, size, width = config.delta_key_heads, config.delta_key_dim, config.delta_value_dim
    parts = jnp.split(mixed, [keys * size, 2 * keys * size], -1)
    return [part.reshape(*mixed.shape[:-1], -1, last) for part, last in zip(parts, (size, size, width), strict=True)]


def delta_rule(
    q: Float[Array, "B S Q H"],
    k: Float[Array, "B S Q H"],
    v: Float[Array, "B S M W"],
    log_decay: Float[Array, "B S M"],
    rate: Float[Array, "B S M"],
    begins: Bool[Array, "B S"] | None = None,
) -> Float[Array, "B S M W"]:
    """Return what queries find, in float32 or wider.

    A state, zeros at first, becomes `decay * state + rate * k (v - k decay * state)`; then `q state` is found. Queries
    and keys are brought to length one, and queries over the root of their size. 6 S M H W FLOPs and more in a chunk.

    Args:
        q: queries; each head is that of so many neighbouring heads of values.
        k: keys, likewise.
        v: values.
        log_decay: of each head's state, at most 0.
        rate: how much of what is missing is learned, from 0 to 1.
        begins: where another text begins, with a state of zeros; None is one text.
    """
    batch, seq, _, size = q.shape
    heads, wide = v.shape[2], accumulator(v.dtype)
    q, k = _unit(q, heads), _unit(k, heads)
    begins = jnp.zeros((batch, seq), bool) if begins is None else begins
    parts = (q * size**-0.5, k, v.astype(wide), log_decay.astype(wide), rate.astype(wide), begins)
    return by_chunks(_chunk, jnp.zeros((batch, heads, size, v.shape[-1]), wide), parts, CHUNK)


def corrected(
    state: Float[Array, "M H W"],
    q: Float[Array, "Q H"],
    k: Float[Array, "Q H"],
    v: Float[Array, "M W"],
    log_decay: Float[Array, " M"],
    rate: Float[Array, " M"],
) -> tuple[Float[Array, "M H W"], Float[Array, "M W"]]:
    """Return the state behind one token, and what its queries find there: `delta_rule` by its definition."""
    heads, size, _ = state.shape
    wide = state.dtype
    q, k = _unit(q, heads)[..., None], _unit(k, heads)[..., None]
    state = state * jnp.exp(log_decay.astype(wide))[:, None, None]
    missing = (v.astype(wide) - (k * state).sum(1)) * rate.astype(wide)[:, None]
    state = state + k * missing[:, None]
    return state, (q * size**-0.5 * state).sum(1)


def _unit(x: Float[Array, "*b Q H"], heads: int) -> Float[Array, "*b M H"]:
    """Return queries or keys of length one, for so many heads of values."""
    x = x.astype(accumulator(x.dtype))
    x = x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + _EPS)
    return jnp.repeat(x, heads // x.shape[-2], axis=-2)


def _chunk(state, parts):
    """Return the state after a chunk, and what its queries find `[B, T, M, W]`.

    What each token corrects depends on what those before it in the chunk did: a triangular system of equations.
    """
    q, k, v, log_decay, rate, begins = parts
    pair, first, last = decays(log_decay, begins)
    overlap = jnp.einsum("btmh,bumh->bmtu", k, k) * pair * rate.transpose(0, 2, 1)[..., None]
    expected = jnp.einsum("btmh,bmhw->bmtw", k, state) * first[..., None]
    wanted = (v.transpose(0, 2, 1, 3) - expected) * rate.transpose(0, 2, 1)[..., None]
    made = jax.lax.linalg.triangular_solve(overlap, wanted, left_side=True, lower=True, unit_diagonal=True)
    found = jnp.einsum("btmh,bmhw->bmtw", q, state) * first[..., None]
    found = found + jnp.einsum("bmtu,bmuw->bmtw", jnp.einsum("btmh,bumh->bmtu", q, k) * pair, made)
    state = state * first[..., -1:, None] + jnp.einsum("bumh,bmu,bmuw->bmhw", k, last, made)
    return state, found.transpose(0, 2, 1, 3)


class Qwen35(Decoder):
    """A Qwen 3.5: layers of attention, and those of the delta rule."""

    blocks: ClassVar = {"layers": Gated, "delta": Delta}
    embed: Float[Array, "V D"]
    layers: Gated
    delta: Delta
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: Qwen35Config = eqx.field(static=True)


class Qwen3Next(mixture.AbstractMixture):
    """A Qwen 3 Next, or a Qwen 3.5 that is a mixture: likewise. Routing drops no token."""

    blocks: ClassVar = {"layers": Gated, "delta": Delta}
    embed: Float[Array, "V D"]
    layers: Gated
    delta: Delta
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: Qwen3NextConfig | Qwen35MoeConfig = eqx.field(static=True)
