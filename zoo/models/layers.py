"""The layers' mathematics as pure functions of arrays.

Dimensions: `B` batch `S` query position `T` key position `D` embed `V` vocab `F` mlp hidden `N` query heads
`K` kv heads `G` query heads per kv head `H` head size `E` experts `C` chosen experts of a token.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from transforms import tile
from transforms.products import pulled_back_in_bfloat16
from transforms.sharding import axes_of, constrain, einsum, explicit, partitions, place, reshape, uncut
from zoo.config import Chunk
from zoo.quantised import AbstractMatrix, product


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Return what sums over values of a dtype are computed in: float32, or the dtype itself where that is wider."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)


def rms_norm(
    x: Float[Array, "*b D"], weight: Float[Array, " D"], eps: float, *, offset: float = 1.0
) -> Float[Array, "*b D"]:
    """Return `x / rms(x) * (offset + weight)`, computed in float32 whatever the dtypes, in the dtype of `x`.

    Gemma stores weights less one; where they are stored as they are, `offset` is 0. Multiplying before the cast back
    rounds once (https://github.com/huggingface/transformers/pull/29402).
    """
    wide = x.astype(accumulator(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * (offset + weight.astype(wide.dtype))).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*b D"],
    weight: Float[Array, "*own D"],
    bias: Float[Array, " D"] | None,
    eps: float,
    *,
    offset: float = 0.0,
) -> Float[Array, "*b D"]:
    """Return `(x - mean(x)) / std(x) * (offset + weight) + bias` (https://arxiv.org/abs/1607.06450), in float32.

    Nemotron stores weights less one.
    """
    wide = x.astype(accumulator(x.dtype))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    out = centred * scale * (weight.astype(wide.dtype) + offset if offset else weight.astype(wide.dtype))
    return (out if bias is None else out + bias.astype(wide.dtype)).astype(x.dtype)


def softcap(x: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return `cap * tanh(x / cap)`, which is close to `x` when small and never beyond `cap`; None returns `x`."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rope(
    x: Float[Array, "B S heads H"],
    frequency: Float[Array, " half"] | Float[np.ndarray, " half"] | Float[Array, "B S half"],
    positions: Integer[Array, "#B S"] | None = None,
    temperature: Float[Array, ""] | None = None,
) -> Float[Array, "B S heads H"]:
    """Rotate each head by its position (https://arxiv.org/abs/2104.09864), in float32, in the dtype of `x`.

    Dimension i turns together with dimension i + H/2 (the layout of Hugging Face's weights). Where there are
    frequencies for a part of the head alone, the rest stays as it is.

    Args:
        x: queries or keys.
        frequency: radians per position, from `zoo.models.attention.rotary.frequencies`; those of all tokens, or of
            each.
        positions: of every token; None counts from 0.
        temperature: multiplies what comes out; None leaves it.
    """
    half = frequency.shape[-1]
    wide, rest = x[..., : 2 * half].astype(accumulator(x.dtype)), x[..., 2 * half :]
    steps = jnp.arange(x.shape[1])[None] if positions is None else positions
    frequency = frequency[:, :, None] if frequency.ndim == 3 else frequency
    angle = _angle(steps[:, :, None, None], frequency, x.shape[1])
    cos, sin = jnp.cos(jnp.asarray(angle, wide.dtype)), jnp.sin(jnp.asarray(angle, wide.dtype))
    if temperature is not None:
        cos, sin = cos * temperature, sin * temperature
    first, second = wide[..., :half], wide[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + ([rest] if rest.shape[-1] else []), axis=-1)


def _angle(steps, frequency, length):
    """Return positions times frequencies, in float32; where that cannot count so many, without whole turns."""
    if length <= COUNTED:
        return steps.astype(jnp.float32) * frequency.astype(np.float32)
    exact = frequency.astype(np.float64) if isinstance(frequency, np.ndarray) else frequency
    coarse = jnp.asarray((4096 * exact) % (2 * np.pi), jnp.float32)
    high, low = (part.astype(jnp.float32) for part in (steps // 4096, steps % 4096))
    return high * coarse + low * frequency.astype(np.float32)


def attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    cap: float | None = None,
    window: Int[Array, ""] | int | None = None,
    q_positions: Integer[Array, "#B S"] | None = None,
    k_positions: Integer[Array, "#B T"] | None = None,
    q_segments: Integer[Array, "B S"] | None = None,
    k_segments: Integer[Array, "B T"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    causal: bool = True,
) -> Float[Array, "B S N H"]:
    """Return causal attention in which query head n reads kv head `n // (N/K)`. Memory is O(B N S T).

    Scores and softmax are float32 or wider. In order: scale, soft cap, mask, softmax.

    Args:
        q: queries, already rotated; likewise `k`.
        k: keys.
        v: values.
        scale: multiplies the scores.
        cap: soft cap of the scores.
        window: how many keys a query sees, itself included. May be traced. None is all.
        q_positions: where each query stands; None counts from 0.
        k_positions: where each key stands; None counts from 0. A key that stands after every query is never seen, so
            a cache marks its empty slots by a large position.
        q_segments: the number of each query's document, where rows hold several; it sees the keys of its own alone.
        k_segments: the number of each key's document.
        sinks: a score for each head of what is no key, and takes its share of the softmax
            (https://arxiv.org/abs/2309.17453).
        causal: no query sees keys behind it; without, a window reaches as far behind a query as before it.
    """
    k, v = beside(q, k), beside(q, v)
    batch, seq, heads, size = q.shape
    kv_heads = k.shape[2]
    q_BSKGH = reshape(q, batch, seq, kv_heads, heads // kv_heads, size)
    wide = accumulator(q.dtype)
    scores_BKGST = einsum("bskgh,btkh->bkgst", q_BSKGH, k, wide)
    scores_BKGST = softcap(scores_BKGST * scale, cap)
    visible = _visible(seq, k.shape[1], window, q_positions, k_positions, causal)
    if q_segments is not None and k_segments is not None:
        k_segments = uncut(k_segments, 1)
        visible = visible & (q_segments[:, None, None, :, None] == k_segments[:, None, None, None, :])
    scores_BKGST = jnp.where(visible, scores_BKGST, jnp.finfo(wide).min)
    probs_BKGST = _softmax(scores_BKGST, sinks)
    return reshape(einsum("bkgst,btkh->bskgh", probs_BKGST.astype(v.dtype), v), *q.shape)


def _softmax(scores_BKGST, sinks):
    """Return the softmax of scores; where there are sinks beside one more, whose own share is left out."""
    if sinks is None:
        return jax.nn.softmax(scores_BKGST, axis=-1)
    sink = sinks.astype(scores_BKGST.dtype).reshape(scores_BKGST.shape[1], -1, 1, 1)
    most = jax.lax.stop_gradient(jnp.maximum(scores_BKGST.max(axis=-1, keepdims=True), sink))
    exps = jnp.exp(scores_BKGST - most)
    return exps / (exps.sum(axis=-1, keepdims=True) + jnp.exp(sink - most))


def beside(q: Float[Array, "B S N H"], kv: Float[Array, "B T K H"]) -> Float[Array, "B T heads H"]:
    """Return keys or values of all positions where queries are; one per query head where those are cut finer."""
    kv = uncut(kv, 1)
    heads = partitions(q)[2]
    if heads is None or partitions(kv)[2] == heads:
        return kv
    kv, (batch, length, kv_heads, size) = uncut(kv, 2), kv.shape
    # As `jnp.repeat` does it, but with types: `tile` then sums gradients over devices once, not for every tile.
    times = jnp.broadcast_to(kv[:, :, :, None], (batch, length, kv_heads, q.shape[2] // kv_heads, size))
    spread = reshape(times, batch, length, -1, size)
    return place(spread, PartitionSpec(*partitions(kv)[:2], heads))


def _visible(queries, keys, window, q_positions, k_positions, causal):
    """Return which key each query sees: `[S, T]`, or `[B, 1, 1, S, T]` where positions differ between sequences."""
    q_positions = jnp.arange(queries) if q_positions is None else q_positions[:, None, None]
    k_positions = jnp.arange(keys) if k_positions is None else k_positions[:, None, None]
    distance = q_positions[..., :, None] - k_positions[..., None, :]
    distance = distance if causal else jnp.abs(distance)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def scanned_windows(windows: tuple[int | None, ...], seq: int) -> Int[Array, " L"] | None:
    """Return one window per layer to scan over, or None where none is shorter than the sequence."""
    widths = [seq if window is None else min(seq, window) for window in windows]
    return None if min(widths) == seq else jnp.asarray(widths, jnp.int32)


def scanned_chunks(windows: tuple[int | None, ...], seq: int) -> Int[Array, " L"] | None:
    """Return how many tokens are a chunk in each layer to scan over, or None where none has several."""
    sizes = [window if isinstance(window, Chunk) else seq for window in windows]
    return None if min(sizes) >= seq else jnp.asarray(sizes, jnp.int32)


def few_windows(windows: tuple[int | None, ...], seq: int) -> tuple[tuple[int | None, ...], Int[Array, " L"] | None]:
    """Return the windows that there are (None: all keys), and which of them each layer has; None where all have one."""
    own = [None if window is None or window >= seq else window for window in windows]
    few = tuple(dict.fromkeys(own))
    return few, None if len(few) == 1 else jnp.asarray([few.index(window) for window in own], jnp.int32)


class Widened(AbstractMatrix):
    """A matrix of 16 bits, held in float32 for devices that multiply nothing narrower: products need no conversion.

    They are what they would be of the 16 bits: computed in float32, and rounded, where the compiler does not leave the
    rounding between two products out (XLA allows itself excess precision). A cast to another dtype changes what
    products are rounded to, and nothing else.
    """

    array: Float[Array, "..."]
    dtype: jnp.dtype = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return self.array.shape

    def astype(self, dtype: DTypeLike) -> "Widened":
        """Return the matrix as one of another dtype."""
        return Widened(self.array, jnp.dtype(dtype))

    def einsum(self, pattern: str, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `jnp.einsum(pattern, x, matrix)` in a dtype; None is that of `x`."""
        return einsum(pattern, x.astype(self.array.dtype), self.array).astype(x.dtype if dtype is None else dtype)


def linear(
    pattern: str, x: Float[Array, "..."], weight: Float[Array, "..."] | AbstractMatrix, *, wide: bool = False
) -> Float[Array, "..."]:
    """Return `jnp.einsum(pattern, x, weight)`, if `wide` in float32 at least; adapted weights add their low rank.

    Of bfloat16 a wide result's cotangent is rounded to bfloat16, as that of any other result is.
    """
    found = product(pattern, x, weight, accumulator(x.dtype) if wide else None)
    narrow = x.dtype == jnp.bfloat16 and (isinstance(weight, AbstractMatrix) or weight.dtype == jnp.bfloat16)
    return pulled_back_in_bfloat16(found) if wide and narrow else found


def gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the tanh form of gelu."""
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": gelu,
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu_10": lambda x: jnp.clip(jax.nn.gelu(x, approximate=False), -10, 10),  # for 8 bits
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "laplace": lambda x: 0.5 * (1 + jax.lax.erf((x - 0.707107) / (0.282095 * 2**0.5))),  # of MEGA
    "leaky_relu": jax.nn.leaky_relu,
    "linear": lambda x: x,
    "mish": jax.nn.mish,
    "relu6": jax.nn.relu6,
    "hard_silu": jax.nn.hard_silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def gated_mlp(
    x: Float[Array, "*b D"],
    gate: Float[Array, "D F"] | AbstractMatrix | None,
    up: Float[Array, "D F"] | AbstractMatrix,
    down: Float[Array, "F D"] | AbstractMatrix,
    *,
    activation: Callable = gelu,
    biases: tuple[Float[Array, " F"] | None, Float[Array, " F"], Float[Array, " D"]] | None = None,
) -> Float[Array, "*b D"]:
    """Return `(activation(x gate) * x up) down` (https://arxiv.org/abs/2002.05202), with biases if there are some.

    Without a gate it is the MLP of the first transformers, `activation(x up) down`.
    """
    of_gate, of_up, of_down = (None, None, None) if biases is None else biases
    biased = lambda x, bias: x if bias is None else x + bias
    hidden = biased(linear("...d,df->...f", x, up), of_up)
    if gate is None:
        hidden = activation(hidden)
    else:
        hidden = activation(biased(linear("...d,df->...f", x, gate), of_gate)) * hidden
    return biased(linear("...f,fd->...d", hidden, down), of_down)


@dataclass(frozen=True)
class Ops:
    """How a model's heavy parts run: plain by default. A caller passes tiled or kernel versions.

    Attributes:
        attention: like `attention`; called as `attention(q, k, v, scale=, cap=, window=)`, of rows with several
            documents, and of layers with chunks, also with `q_segments=, k_segments=`, of families that have them also
            with `sinks=`.
        mlp: like `gated_mlp`; called as `mlp(x, gate, up, down, activation=)`, of families that have them also with
            `biases=`; the gate of families without one is None.
        experts: like `zoo.models.mixtures.experts.experts`, which None stands for.
        static_windows: whether attention takes windows as numbers alone. Layers then run the one of the few calls that
            is theirs (`jax.lax.switch`); otherwise a window is scanned over with the layer's weights.
        keeps: whether attention takes `keep=True`, for which it returns the logarithms of its sums `[B N S]` too, and
            has no gradients; and `kept=(logs, own)`, for which it returns the queries, with the gradients of what they
            see: made with these and with how the gradient of what is seen points to what is seen, `own` `[B N S]`.
        heads: makes of a function of some heads one of all, a group of them at a time: called as
            `heads(part, axes, groups)`, where `axes` reads like `jax.vmap`'s `in_axes`; see
            `zoo.models.attention.groups`. None takes all heads at once.
        tokens: makes of a function of tokens one that takes some of them at a time: called as `tokens(part, axes)`,
            where `axes` are 1 for arrays `[B, S, ...]`, of which the first is one; by default all are taken at once.
        ulysses: whether devices that share sequences exchange heads for positions around attention, which then has
            whole sequences (`zoo.models.attention.ulysses`); otherwise it is called with the sequences as they lie.
    """

    attention: Callable = attention
    mlp: Callable = gated_mlp
    experts: Callable | None = None
    static_windows: bool = False
    keeps: bool = False
    heads: Callable | None = None
    tokens: Callable = lambda part, axes: part
    ulysses: bool = False


PLAIN = Ops()
COUNTED = 2**24  # integers that float32 tells apart
SPREAD_BYTES = 2**30  # of float32 rows of a table that are there at a time, where they are summed in float32


class Fetched(eqx.Module):
    """A table of which a batch's rows `[B S D]` were looked up before: what `lookup` returns, whatever the ids."""

    rows: Float[Array, "B S D"]

    @property
    def dtype(self) -> jnp.dtype:
        """Return what the rows are."""
        return self.rows.dtype


def lookup(
    table: Float[Array, "V D"] | Widened | Fetched, ids: Integer[Array, "B S"], dtype: DTypeLike
) -> Float[Array, "B S D"]:
    """Return the table's rows in `dtype`; an id outside it gives a row of NaN, so that it cannot pass unnoticed.

    The gradient of a 16-bit table would lose most of what a frequent token contributes if each occurrence were added in
    16 bits: such a table's rows are fetched once per sequence and spread in float32, whose transpose sums a sequence's
    occurrences in float32 before the table is touched, a slice of `D` at a time where there are many. That costs one
    sort of `S` ids per sequence. Where devices share sequences or experts, no table is gathered: each looks up the ids
    of all in what it has of the table, and they trade columns for rows.
    """
    if isinstance(table, Fetched):
        return constrain(table.rows.astype(dtype), "B S D")
    table = table.array if isinstance(table, Widened) else table
    if not explicit():
        return constrain(_looked_up(dtype, table, ids), "B S D")
    lies = PartitionSpec(*partitions(ids))
    where = PartitionSpec(*partitions(ids), None)
    over_B, over_S = (set(axes_of([part])) for part in partitions(ids))
    over_D = axes_of(partitions(table)[1:])
    if over_S or (over_D and over_B.difference(over_D)) or jax.sharding.get_abstract_mesh().size == 1:
        table = table if over_B.issuperset(over_D) else uncut(table, 1)
        table = uncut(table, 0) if (over_B | over_S).intersection(axes_of(partitions(table)[:1])) else table
        own = functools.partial(_own_columns, dtype, *(axes_of([part]) for part in partitions(table)))
        rows = jax.shard_map(own, in_specs=(PartitionSpec(*partitions(table)), lies), out_specs=where)(table, ids)
    elif accumulator(table.dtype) == table.dtype:
        rows = _rows(table, ids, where)
    else:
        rows = jax.sharding.auto_axes(_spread, out_sharding=where)(table, ids)
    return constrain(rows.astype(dtype), "B S D")


def _own_columns(dtype, over_V, over_D, table, ids):
    """Return the rows of a device's ids, given the axes that cut the table: those of `D` cut `B` too, of `V` no ids."""
    words = len(table)
    if over_D:
        ids = jax.lax.all_gather(ids, over_D)  # in a dimension of their own: `B` may be cut into tiles
    if not over_V:
        rows = _looked_up(dtype, table, ids)
    else:
        first, most = jax.lax.axis_index(over_V) * words, jax.lax.axis_size(over_V) * words
        elsewhere = (ids >= 0) & (ids < most) & ((ids < first) | (ids >= first + words))
        rows = jnp.where(elsewhere[..., None], 0, _looked_up(dtype, table, ids - first))
        rows = jax.lax.psum(rows, over_V)
    return jax.lax.all_to_all(rows, over_D, 0, 3, tiled=True)[0] if over_D else rows


def _looked_up(dtype, table, ids):
    """Return the rows of ids that are all here in a dtype, of a table that is, too."""
    if accumulator(table.dtype) == table.dtype:
        return _rows(table, ids).astype(dtype)
    slices = -(-4 * ids.size * table.shape[1] // SPREAD_BYTES)
    spread = lambda table, ids: _spread(table, ids).astype(dtype)
    return tile(spread, axis=(1, None), n=min(slices, table.shape[1]))(table, ids)


def _rows(table, ids, where=None):
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False, out_sharding=where)


def _spread(table, ids):
    words = table.shape[0]  # which is the number of no row, and gives a row of NaN
    ids = jnp.where((ids >= 0) & (ids < words), ids, words)

    def spread(ids_S):
        distinct, position = jnp.unique(ids_S, size=min(ids_S.shape[0], words + 1), return_inverse=True)
        return _rows(table, distinct).astype(jnp.float32)[position]

    for _ in ids.shape[1:]:
        spread = jax.vmap(spread)
    return spread(ids)


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
