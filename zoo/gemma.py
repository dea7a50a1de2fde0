"""Gemma 1 (https://arxiv.org/abs/2403.08295) and Gemma 2 (https://arxiv.org/abs/2408.00118).

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `F` mlp hidden `N` query heads `K` kv heads `H` head size
`L` layers.
"""

import functools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from zoo.configs import GemmaConfig
from zoo.nn import Ops, accumulator, lookup, rms_norm, rope, softcap
from zoo.tables import rows


class Block(eqx.Module):
    """Every layer's weights, stacked over a leading `L`; inside the scan, one layer's. The post norms are Gemma 2's."""

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

    def __call__(
        self,
        x: Float[Array, "B S D"],
        config: GemmaConfig,
        *,
        window: Int[Array, ""] | int | None = None,
        ops: Ops | None = None,
    ) -> Float[Array, "B S D"]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        ops = Ops() if ops is None else ops
        cast = lambda weight: weight.astype(x.dtype)
        norm = functools.partial(rms_norm, eps=config.norm_eps)
        turn = functools.partial(rope, theta=config.rope_theta)

        h = norm(x, self.attn_norm)
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", h, cast(weight)) for weight in (self.q, self.k, self.v))
        h = ops.attention(turn(q), turn(k), v, scale=config.query_scale, cap=config.attn_softcap, window=window)
        h = jnp.einsum("bsnh,nhd->bsd", h, cast(self.o))
        h = h if self.post_attn_norm is None else norm(h, self.post_attn_norm)
        x = x + checkpoint_name(h, "attn_out")

        h = ops.mlp(norm(x, self.mlp_norm), cast(self.gate), cast(self.up), cast(self.down))
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
    config: GemmaConfig = eqx.field(static=True)

    @classmethod
    def init(cls, config: GemmaConfig, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> "Gemma":
        """Return a model with random weights, normal with the standard deviations of `zoo.tables`; norms start at zero.

        Each leaf is drawn in slabs of 16 MiB, so nothing larger than the model is ever held. For billions of parameters
        use `jax.random.key(seed, impl="rbg")`, which draws several times faster than the default.
        """
        table = rows(config)
        keys = jax.random.split(key, len(table))
        leaves = {}
        for row, leaf_key in zip(table, keys, strict=True):
            shape, std = row.shape(config.dims), row.std(config.dims)
            leaves[row.leaf] = _draw(leaf_key, std, shape, jnp.dtype(dtype)) if std else jnp.zeros(shape, dtype)
        return cls.build(config, leaves)

    @classmethod
    def build(cls, config: GemmaConfig, leaves: dict) -> "Gemma":
        """Return the model whose parameters are `leaves`, keyed by the dotted paths of `zoo.tables`."""
        layers = {path.removeprefix("layers."): leaf for path, leaf in leaves.items() if path.startswith("layers.")}
        return cls(leaves["embed"], Block(**layers), leaves["final_norm"], config)

    def hidden(
        self,
        tokens: Integer[Array, "B S"],
        *,
        dtype: DTypeLike | None = None,
        remat: Callable | None = None,
        ops: Ops | None = None,
    ) -> Float[Array, "B S D"]:
        """Return what the head reads: the last layer's output, normalised.

        Token ids are checked when they are concrete; under `jit` they cannot be without a device-to-host round trip in
        every step, so there an id outside the vocabulary makes its whole sequence NaN from that position on.

        Args:
            tokens: ids in `[0, vocab_size)`.
            dtype: what to compute in; None is the parameters' own.
            remat: wraps the scanned layer body, for instance `functools.partial(jax.checkpoint, prevent_cse=False)`.
                The names `attn_out` and `mlp_out` mark what a policy may keep.
            ops: how attention and MLP run; None runs them plainly.

        Raises:
            ValueError: a concrete token id is outside the vocabulary.
        """
        check_tokens(tokens, self.config.vocab_size)
        dtype = self.embed.dtype if dtype is None else jnp.dtype(dtype)
        # The scale is rounded to the compute dtype, as where Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        x = lookup(self.embed, tokens, dtype) * jnp.asarray(math.sqrt(self.config.embed_dim), dtype)

        def body(x, layer_and_window):
            layer, window = layer_and_window
            return layer(x, self.config, window=window, ops=ops), None

        body = body if remat is None else remat(body)
        x, _ = jax.lax.scan(body, x, (self.layers, self._windows(tokens.shape[1])))
        return rms_norm(x, self.final_norm, self.config.norm_eps)

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Return the soft-capped logits in float32; the product's operands are in the dtype of `hidden`."""
        wide = accumulator(hidden.dtype)
        table = self.embed.astype(hidden.dtype)
        scores = jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=wide)
        return softcap(scores, self.config.final_softcap)

    def __call__(self, tokens: Integer[Array, "B S"], *, dtype: DTypeLike | None = None) -> Float[Array, "B S V"]:
        """Return the logits of every position. Memory is O(B S V): to train, tile `logits` instead."""
        return self.logits(self.hidden(tokens, dtype=dtype))

    def _windows(self, seq: int) -> Int[Array, " L"] | None:
        """One window per layer to scan over, or None where none is shorter than the sequence."""
        windows = [seq if window is None else min(seq, window) for window in self.config.layer_windows]
        return None if min(windows) == seq else jnp.asarray(windows, jnp.int32)


def check_tokens(tokens, vocab_size: int) -> None:
    """Raise if a token id is outside `[0, vocab_size)`. Reads the array on the host; traced ids are not checked.

    Raises:
        ValueError: naming the first id that is outside, where it is, and how many there are.
    """
    if isinstance(tokens, Tracer):
        return
    ids = np.asarray(tokens)
    outside = np.argwhere((ids < 0) | (ids >= vocab_size))
    if len(outside):
        first = tuple(int(i) for i in outside[0])
        raise ValueError(
            f"token id {ids[first]} at {list(first)} is outside the vocabulary of {vocab_size}; "
            f"{len(outside)} of {ids.size} ids are not in 0 to {vocab_size - 1}. "
            "Use the tokenizer that belongs to the model, or a larger vocab_size."
        )


_SLAB = 2**22  # elements drawn at a time, at most


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key, std, shape, dtype):
    """Normal numbers of any shape, drawn in equal slabs of rows, each rounded as soon as it is drawn."""
    count, width = math.prod(shape[:-1]), shape[-1]
    slabs = next(n for n in range(-(-count * width // _SLAB), count + 1) if count % n == 0)

    def slab(i):
        drawn = jax.random.normal(jax.random.fold_in(key, i), (count // slabs, width), accumulator(dtype))
        return (std * drawn).astype(dtype)

    return jax.lax.map(slab, jnp.arange(slabs)).reshape(shape)
