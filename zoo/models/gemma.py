"""Gemma 1 (https://arxiv.org/abs/2403.08295), 2 (https://arxiv.org/abs/2408.00118) and 3
(https://arxiv.org/abs/2503.19786), text.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `F` mlp hidden `N` query heads `K` kv heads `H` head size
`L` layers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from transforms.remat import Cycle, scan_layers
from zoo.families import Gemma3Config, GemmaConfig
from zoo.inference.cache import Past, remembering
from zoo.models import packing
from zoo.models.head import Head
from zoo.models.init import draw
from zoo.models.layers import Ops, check_tokens, gelu, linear, lookup, rms_norm, rope, scanned_windows
from zoo.models.rotary import frequencies

AnyGemma = GemmaConfig | Gemma3Config
Frequency = Float[Array, " half"] | Float[np.ndarray, " half"]


class Block(eqx.Module):
    """Every layer's weights, stacked over a leading `L`; inside the scan, one layer's.

    The post norms are those of Gemma 2 and 3, the norms of queries and keys Gemma 3's.
    """

    attn_norm: Float[Array, "*L D"]
    q: Float[Array, "*L D N H"]
    k: Float[Array, "*L D K H"]
    v: Float[Array, "*L D K H"]
    o: Float[Array, "*L N H D"]
    mlp_norm: Float[Array, "*L D"]
    gate: Float[Array, "*L D F"]
    up: Float[Array, "*L D F"]
    down: Float[Array, "*L F D"]
    post_attn_norm: Float[Array, "*L D"] | None = None
    post_mlp_norm: Float[Array, "*L D"] | None = None
    q_norm: Float[Array, "*L H"] | None = None
    k_norm: Float[Array, "*L H"] | None = None

    def __call__(
        self,
        x: Float[Array, "B S D"],
        config: AnyGemma,
        *,
        frequency: Frequency,
        window: Int[Array, ""] | int | None = None,
        ops: Ops | None = None,
        positions: Integer[Array, "#B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        ops = Ops() if ops is None else ops
        q, k, v = self.project(x, config, frequency, positions)
        attended = ops.attention(q, k, v, scale=config.query_scale, cap=config.attn_softcap, window=window)
        return self.finish(x, attended, config, ops)

    def project(
        self,
        x: Float[Array, "B S D"],
        config: AnyGemma,
        frequency: Frequency,
        positions: Integer[Array, "#B S"] | None = None,
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Return the layer's queries, keys and values, rotated; None counts positions from 0."""
        norm = functools.partial(rms_norm, eps=config.norm_eps)
        h = norm(x, self.attn_norm)
        q, k, v = (linear("bsd,dnh->bsnh", h, weight.astype(x.dtype)) for weight in (self.q, self.k, self.v))
        q = q if self.q_norm is None else norm(q, self.q_norm)
        k = k if self.k_norm is None else norm(k, self.k_norm)
        return rope(q, frequency, positions), rope(k, frequency, positions), v

    def finish(
        self, x: Float[Array, "B S D"], attended: Float[Array, "B S N H"], config: AnyGemma, ops: Ops
    ) -> Float[Array, "B S D"]:
        """Return the layer's output, given what its queries attended to."""
        cast = lambda weight: weight.astype(x.dtype)
        norm = functools.partial(rms_norm, eps=config.norm_eps)
        h = linear("bsnh,nhd->bsd", attended, cast(self.o))
        h = h if self.post_attn_norm is None else norm(h, self.post_attn_norm)
        x = x + checkpoint_name(h, "attn_out")

        h = ops.mlp(norm(x, self.mlp_norm), cast(self.gate), cast(self.up), cast(self.down), activation=gelu)
        h = h if self.post_mlp_norm is None else norm(h, self.post_mlp_norm)
        return x + checkpoint_name(h, "mlp_out")


class Gemma(eqx.Module):
    """A Gemma in two halves: `hidden(tokens)`, then `logits(hidden)`. The table is also the head, stored once.

    Parameters keep the dtype that they were made with; a pass computes in the `dtype` asked for and casts one layer at
    a time, so that float32 mathematics over bfloat16 parameters never holds a float32 copy of the stack.
    """

    embed: Float[Array, "V D"]
    layers: Block
    final_norm: Float[Array, " D"]
    config: AnyGemma = eqx.field(static=True)

    @classmethod
    def init(cls, config: AnyGemma, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> "Gemma":
        """Return a model with random weights, normal with the deviations of `zoo.parameters`; norms at zero."""
        return cls.build(config, draw(config, key=key, dtype=dtype))

    @classmethod
    def build(cls, config: AnyGemma, leaves: dict) -> "Gemma":
        """Return the model whose parameters are `leaves`, keyed by the dotted paths of `zoo.parameters`."""
        layers = {path.removeprefix("layers."): leaf for path, leaf in leaves.items() if path.startswith("layers.")}
        return cls(leaves["embed"], Block(**layers), leaves["final_norm"], config)

    def hidden(
        self,
        tokens: Integer[Array, "B S"],
        *,
        dtype: DTypeLike | None = None,
        remat: Callable | Cycle | None = None,
        ops: Ops | None = None,
        segments: Integer[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Return what the head reads: the last layer's output, normalised.

        Token ids are checked when they are concrete; under `jit` they cannot be without a device-to-host round trip in
        every step, so there an id outside the vocabulary makes its whole sequence NaN from that position on.

        Args:
            tokens: ids in `[0, vocab_size)`.
            dtype: what to compute in; None is the parameters' own.
            remat: what the backward pass keeps of each layer (`transforms.remat`), or any wrapper of its body. The
                names `attn_out` and `mlp_out` mark what a policy may keep.
            ops: how attention and MLP run; None runs them plainly.
            segments: the number of each token's document, where a row holds several (`zoo.models.packing`).

        Raises:
            ValueError: a concrete token id is outside the vocabulary.
        """
        return self.hidden_and_new(tokens, dtype=dtype, remat=remat, ops=ops, segments=segments)[0]

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
        check_tokens(tokens, self.config.vocab_size)
        dtype = self.embed.dtype if dtype is None else jnp.dtype(dtype)
        # The scale is rounded to the compute dtype, as where Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        x = lookup(self.embed, tokens, dtype) * jnp.asarray(math.sqrt(self.config.embed_dim), dtype)

        seq, ropes = tokens.shape[1], self.config.layer_ropes
        length, positions, places = (seq, None, None) if past is None else (past.length, past.positions, past.places)
        if segments is not None:
            positions, ops = packing.places(segments), packing.within(ops, segments)
            length = positions.max() + 1
        windows = scanned_windows(self.config.layer_windows, seq)
        waves = [frequencies(self.config.head_dim, theta, scaling, length) for theta, scaling in ropes]
        differ = len(set(ropes)) > 1

        def body(x, scanned):
            layer, window, frequency, place = scanned
            frequency = waves[0] if frequency is None else frequency
            how, new = remembering(ops, past, place)
            x = layer(x, self.config, frequency=frequency, window=window, ops=how, positions=positions)
            return x, new()

        stacked = self.layers, windows, jnp.stack(waves) if differ else None, places
        x, new = scan_layers(body, x, stacked, remat)
        return rms_norm(x, self.final_norm, self.config.norm_eps), new

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Return the soft-capped logits in float32; the product's operands are in the dtype of `hidden`."""
        return self.output()(hidden)

    def output(self) -> Head:
        """Return what makes logits: the table again, and the soft cap."""
        return Head(self.embed, self.config.final_softcap)

    def __call__(self, tokens: Integer[Array, "B S"], *, dtype: DTypeLike | None = None) -> Float[Array, "B S V"]:
        """Return the logits of every position. Memory is O(B S V): to train, tile `logits` instead."""
        return self.logits(self.hidden(tokens, dtype=dtype))
