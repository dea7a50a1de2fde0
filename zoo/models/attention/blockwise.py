"""Attention in tiles of queries and keys, without those tiles that no query sees; for devices that have no kernel.

The softmax runs online (https://arxiv.org/abs/2112.05682, https://arxiv.org/abs/2205.14135), and the backward pass
makes each tile of scores again: five products, where the forward pass has two. Memory beside the results is that of a
tile of scores, and of the queries' gradient in float32.

Dimensions: `B` batch `S` queries, `T` keys of a tile `K` kv heads `G` query heads per kv head `H` head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from transforms.cotangents import linear_rules
from transforms.sharding import reshape, vary_alike
from zoo.models.layers import accumulator, softcap


class Tile(NamedTuple):
    """One tile of scores: its row and column, whether the row begins with it, and whether it is one at all."""

    row: Array
    column: Array
    begins: Array
    there: Array | bool = True


class Walk(NamedTuple):
    """Loops over tiles, row by row: turns of the outer, steps of the inner, and the tile of a turn and a step."""

    turns: int
    steps: int
    at: Callable[[Any, Any], Tile]


def walk(tiles: int, before: int, behind: int) -> Walk:
    """Return loops over the tiles of a square, in each row so many before and behind the diagonal.

    Loops have one length, and rows of a triangle do not: its first is walked with its last, its second with the last
    but one, so that an even number of tiles `n` takes `n (n + 1) / 2` steps.
    """
    width = min(tiles, before + 1 + behind)
    if behind or 2 * width <= tiles:

        def band(row, step):
            column = step if width == tiles else row - before + step
            there = (column >= 0) & (column < tiles)
            return Tile(row, jnp.clip(column, 0, tiles - 1), step == 0, there)

        return Walk(tiles, width, band)

    def folded(turn, step):
        first = step <= turn
        column = jnp.where(first, step, step - turn - 1)
        return Tile(jnp.where(first, turn, tiles - 1 - turn), column, column == 0)

    return Walk(tiles // 2, tiles + 1, folded)


@dataclass(frozen=True)
class _Blockwise:
    """What tiles of scores are made with: `length` tokens in an even number of `tiles` of `size`.

    What is seen beside them is `(segments, window)`, arrays or None; a `reach` in tiles is known of windows that are
    numbers.
    """

    scale: float
    cap: float | None
    causal: bool
    length: int
    tiles: int
    size: int
    reach: int

    def walk(self) -> Walk:
        return walk(self.tiles, self.reach, 0 if self.causal else self.reach)

    def part(self, x, number, dim=1):
        return jax.lax.dynamic_slice_in_dim(x, number * self.size, self.size, dim)

    def write(self, x, part, number, dim=1):
        return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), number * self.size, dim)

    def capped(self, q_BSKGH, k_BTKH):
        wide = accumulator(q_BSKGH.dtype)
        scores = jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k_BTKH, preferred_element_type=wide)
        return softcap(scores * self.scale, self.cap)

    def visible(self, row, column, there, masks):
        segments, window = masks
        q, k = (number * self.size + jnp.arange(self.size) for number in (row, column))
        distance = q[:, None] - k
        seen = there & (distance >= 0 if self.causal else k < self.length)
        if window is not None:
            seen &= jnp.abs(distance) < window
        if segments is None:
            return seen
        own = [self.part(segments, number) for number in (row, column)]
        return seen & (own[0][:, None, None, :, None] == own[1][:, None, None, None, :])

    def forward(self, q, k, v, masks, sinks):
        """Return what queries see [B S K G H], and the logarithms of their sums [B K G S]."""
        wide, loops = accumulator(q.dtype), self.walk()
        rows = q.shape[0], q.shape[2], q.shape[3], self.size
        lowest, nothing = jnp.full(rows, jnp.finfo(wide).min, wide), jnp.zeros(rows, wide)
        if sinks is not None:
            lowest, nothing = lowest * 0 + sinks[:, :, None], nothing + 1

        def step(turn, carry, number):
            most, total, seen, out, logs = carry
            row, column, begins, there = loops.at(turn, number)
            most, total = jnp.where(begins, lowest, most), jnp.where(begins, nothing, total)
            seen = jnp.where(begins, 0, seen)
            scores = self.capped(self.part(q, row), self.part(k, column))
            scores = jnp.where(self.visible(row, column, there, masks), scores, jnp.finfo(wide).min)
            highest = jnp.maximum(most, scores.max(-1))
            weights, fade = jnp.exp(scores - highest[..., None]), jnp.exp(most - highest)
            values = self.part(v, column)
            new = jnp.einsum("bkgst,btkh->bkgsh", weights.astype(v.dtype), values, preferred_element_type=wide)
            seen, total = seen * fade[..., None] + new, total * fade + weights.sum(-1)
            out = self.write(out, jnp.moveaxis(seen / total[..., None], 3, 1), row)
            return (highest, total, seen, out, self.write(logs, highest + jnp.log(total), row, 3)), None

        heads = rows[:3]
        seen, logs = jnp.zeros((*rows, q.shape[-1]), wide), jnp.zeros((*heads, q.shape[1]), wide)
        *_, out, logs = _loop(loops, step, (lowest, nothing, seen, jnp.zeros_like(q), logs), q)
        return out, logs

    def backward(self, q, k, v, masks, logs, own, given):
        """Return the gradients of queries, keys and values, given that of what is seen and how it points to that.

        Tiles are walked column by column, which is the same walk from the other end.
        """
        wide, loops, last = accumulator(q.dtype), self.walk(), self.tiles - 1

        def step(turn, carry, number):
            of_k, of_v, dq, dk, dv = carry
            mirrored, other, begins, there = loops.at(turn, number)
            row, column = last - other, last - mirrored
            of_k, of_v = jnp.where(begins, 0, of_k), jnp.where(begins, 0, of_v)
            queries, pulled, keys, values = (
                *(self.part(x, row) for x in (q, given)),
                *(self.part(x, column) for x in (k, v)),
            )
            capped = self.capped(queries, keys)
            seen = jnp.where(self.visible(row, column, there, masks), capped, jnp.finfo(wide).min)
            weights = jnp.exp(seen - self.part(logs, row, 3)[..., None])
            of_weights = jnp.einsum("bskgh,btkh->bkgst", pulled, values, preferred_element_type=wide)
            of_scores = weights * (of_weights - self.part(own, row, 3)[..., None]) * self.scale
            if self.cap is not None:
                of_scores *= 1 - jnp.square(capped / self.cap)
            of_scores, weights = of_scores.astype(q.dtype), weights.astype(v.dtype)
            of_v += jnp.einsum("bkgst,bskgh->btkh", weights, pulled, preferred_element_type=wide)
            of_k += jnp.einsum("bkgst,bskgh->btkh", of_scores, queries, preferred_element_type=wide)
            of_q = jnp.einsum("bkgst,btkh->bskgh", of_scores, keys, preferred_element_type=wide)
            dq = self.write(dq, self.part(dq, row) + of_q, row)
            return (of_k, of_v, dq, self.write(dk, of_k, column), self.write(dv, of_v, column)), None

        none = jnp.zeros((k.shape[0], self.size, *k.shape[2:]), wide)
        start = none, none, jnp.zeros(q.shape, wide), jnp.zeros_like(k), jnp.zeros_like(v)
        *_, dq, dk, dv = _loop(loops, step, start, q)
        return dq.astype(q.dtype), dk, dv

    def gradients(self, q, k, v, masks, sinks, logs, own, given):
        """Return those of the first five, given that of what is seen and how it points to that."""
        of_sinks = None
        if sinks is not None:
            of_sinks = -(jnp.exp(sinks[:, :, None] - logs) * own).sum((0, 3)).astype(sinks.dtype)
        return *self.backward(q, k, v, masks, logs, own, given), (None, None), of_sinks


def _loop(loops: Walk, step: Callable[..., Any], carry: Any, q: Array) -> Any:
    """Take all steps of all turns, which are numbered from what depends on the queries.

    Of a loop over layers JAX takes out what no layer changes. Masks of plain numbers it would make for all tiles, heads
    and texts at once, and keep.
    """
    _, first = jax.lax.optimization_barrier(vary_alike(q, jnp.int32(0)))

    def turn(carry, number):
        return jax.lax.scan(lambda carry, at: step(number, carry, at), carry, first + jnp.arange(loops.steps))

    return jax.lax.scan(turn, carry, first + jnp.arange(loops.turns))[0]


def with_backward(forward, backward, aligned=lambda own: own):
    """Return what is seen as a function with gradients, and another that returns the queries with those.

    Args:
        forward: `(q, ...)`: what is seen, and the logarithms of its sums.
        backward: `(q, ..., logs, own, given)`: the gradients of the arguments of `forward`; `own` is as in
            `zoo.models.layers.Ops`.
        aligned: returns `own`, which has the dimensions of what is seen but the last, as logarithms lie.

    The second is called with `logs` and `own` behind the arguments of `forward`; of the first `tile` is promised that
    its gradients are linear in what is given, which those of the second, whose `own` stays as it is, are not.
    """

    @jax.custom_vjp
    def run(*args):
        return forward(*args)[0]

    def saved(*args):
        out, logs = forward(*args)
        return out, (args, out, logs)

    def pull(kept, given):
        args, out, logs = kept
        return backward(*args, logs, aligned((given.astype(logs.dtype) * out).sum(-1)), given)

    run.defvjp(saved, pull)

    @jax.custom_vjp
    def again(*args):
        return args[0]

    again.defvjp(lambda *args: (again(*args), args), lambda args, given: (*backward(*args, given), None, None))
    return linear_rules(run), again


def blockwise_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    n: int,
    scale: float,
    cap: float | None = None,
    window: Int[Array, ""] | int | None = None,
    segments: Integer[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    causal: bool = True,
    keep: bool = False,
    kept: tuple[Float[Array, "B N S"], Float[Array, "B N S"]] | None = None,
) -> Float[Array, "B S N H"] | tuple[Float[Array, "B S N H"], Float[Array, "B N S"]]:
    """Return `zoo.models.layers.attention` of whole sequences in `n` times `n` tiles; of causal ones, half as many.

    `n` is rounded up to an even number. Products are `1 + 1 / n` times those of the visible half; of windows that are
    numbers, those of the tiles that they reach. Tokens of other `segments` are not seen. It has gradients, and no
    tangents. `keep` and `kept` are as in `zoo.models.layers.Ops`.
    """
    batch, length, heads, width = q.shape
    tiles = 2 * -(-min(n, length) // 2)
    size = -(-length // tiles)
    reach = min(tiles - 1, (window + size - 2) // size) if isinstance(window, int) else tiles - 1
    made = _Blockwise(scale, cap, causal, length, tiles, size, reach)
    run, again = with_backward(made.forward, made.gradients, lambda own: jnp.moveaxis(own, 1, 3))
    filled = lambda x: jnp.pad(x, ((0, 0), (0, tiles * size - length), *((0, 0),) * (x.ndim - 2)))
    q, k, v = filled(q), filled(k), filled(v)
    q = reshape(q, *q.shape[:2], k.shape[2], -1, width)
    sinks = None if sinks is None else sinks.astype(accumulator(q.dtype)).reshape(q.shape[2:4])
    args = q, k, v, (None if segments is None else filled(segments), window), sinks
    restored = lambda seen: reshape(seen, batch, -1, heads, width)[:, :length]
    if keep:
        seen, logs = made.forward(*args)
        return restored(seen), reshape(logs, batch, heads, -1)[..., :length]
    if kept is not None:
        # Of queries that fill up the last tile sums are endless: nothing, not even a sink, has a share in them.
        empty = float(jnp.finfo(kept[0].dtype).max) / 2, 0.0
        more = ((0, 0), (0, 0), (0, tiles * size - length))
        padded = (jnp.pad(x, more, constant_values=fill) for x, fill in zip(kept, empty, strict=True))
        return restored(again(*args, *(reshape(x, batch, *q.shape[2:4], -1) for x in padded)))
    return restored(run(*args))
