"""The layers' mathematics as pure functions of arrays.

Dimensions: `B` batch `S` query position `T` key position `D` embed `V` vocab `F` mlp hidden `N` query heads
`K` kv heads `G` query heads per kv head `H` head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Return what sums over values of a dtype are computed in: float32, or the dtype itself where that is wider."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)


def rms_norm(x: Float[Array, "*b D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*b D"]:
    """Return `x / rms(x) * (1 + weight)`, computed in float32 whatever the dtypes, in the dtype of `x`.

    Multiplying before the cast back is what Gemma does (https://github.com/huggingface/transformers/pull/29402).
    """
    wide = x.astype(accumulator(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * (1 + weight.astype(wide.dtype))).astype(x.dtype)


def softcap(x: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return `cap * tanh(x / cap)`, which is close to `x` when small and never beyond `cap`; None returns `x`."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rope(x: Float[Array, "B S heads H"], theta: float) -> Float[Array, "B S heads H"]:
    """Rotate each head by its position (https://arxiv.org/abs/2104.09864), in float32, in the dtype of `x`.

    Dimension i turns together with dimension i + H/2 (the layout of Hugging Face's weights), at `theta ** (-2i / H)`
    radians per position. Positions count from 0.
    """
    seq, half = x.shape[1], x.shape[-1] // 2
    wide = x.astype(accumulator(x.dtype))
    frequency = 1 / theta ** (np.arange(half, dtype=np.float32) / np.float32(half))
    angle = np.arange(seq, dtype=np.float32)[:, None, None] * frequency.astype(np.float32)
    cos, sin = jnp.cos(jnp.asarray(angle, wide.dtype)), jnp.sin(jnp.asarray(angle, wide.dtype))
    first, second = wide[..., :half], wide[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    cap: float | None = None,
    window: Int[Array, ""] | int | None = None,
) -> Float[Array, "B S N H"]:
    """Return causal attention in which query head n reads kv head `n // (N/K)`. Memory is O(B N S^2).

    Scores and softmax are float32 or wider. In order: scale, soft cap, mask, softmax.

    Args:
        q: queries, already rotated; likewise `k`.
        k: keys.
        v: values.
        scale: multiplies the scores.
        cap: soft cap of the scores.
        window: how many keys a query sees, itself included. May be traced. None is all.
    """
    batch, seq, heads, size = q.shape
    kv_heads = k.shape[2]
    q_BSKGH = q.reshape(batch, seq, kv_heads, heads // kv_heads, size)
    wide = accumulator(q.dtype)
    scores_BKGST = jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k, preferred_element_type=wide)
    scores_BKGST = softcap(scores_BKGST * scale, cap)
    distance_ST = jnp.arange(seq)[:, None] - jnp.arange(seq)[None, :]
    visible_ST = distance_ST >= 0
    if window is not None:
        visible_ST &= distance_ST < window
    probs_BKGST = jax.nn.softmax(jnp.where(visible_ST, scores_BKGST, jnp.finfo(wide).min), axis=-1)
    return jnp.einsum("bkgst,btkh->bskgh", probs_BKGST.astype(v.dtype), v).reshape(q.shape)


def gated_mlp(
    x: Float[Array, "*b D"], gate: Float[Array, "D F"], up: Float[Array, "D F"], down: Float[Array, "F D"]
) -> Float[Array, "*b D"]:
    """Return `(gelu(x gate) * x up) down` (https://arxiv.org/abs/2002.05202), with the tanh form of gelu."""
    return (jax.nn.gelu(x @ gate, approximate=True) * (x @ up)) @ down


@dataclass(frozen=True)
class Ops:
    """How a model's heavy parts run: plain by default. A caller passes tiled or kernel versions.

    Attributes:
        attention: like `attention`; called as `attention(q, k, v, scale=, cap=, window=)`.
        mlp: like `gated_mlp`; called as `mlp(x, gate, up, down)`.
    """

    attention: Callable = attention
    mlp: Callable = gated_mlp


def lookup(table: Float[Array, "V D"], ids: Integer[Array, "B S"], dtype: DTypeLike) -> Float[Array, "B S D"]:
    """Return the table's rows in `dtype`; an id outside it gives a row of NaN, so that it cannot pass unnoticed.

    The gradient of a 16-bit table would lose most of what a frequent token contributes if each occurrence were added in
    16 bits: such a table's rows are fetched once per sequence and spread in float32, whose transpose sums a sequence's
    occurrences in float32 before the table is touched. That costs one sort of `S` ids per sequence.
    """
    if accumulator(table.dtype) == table.dtype:
        return _rows(table, ids).astype(dtype)

    def spread(ids_S):
        distinct, position = jnp.unique(ids_S, size=ids_S.shape[0], return_inverse=True)
        return _rows(table, distinct).astype(jnp.float32)[position]

    return jax.vmap(spread)(ids).astype(dtype)


def _rows(table, ids):
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
