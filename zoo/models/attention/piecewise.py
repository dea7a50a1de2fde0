"""Attention of long texts by a fused kernel that is given a piece of queries and a piece of keys at a time.

What a kernel knows beforehand of its blocks grows with the square of what it is given, is made by the processor before
anything is compiled, and lies in a device's small memory for scalars. Pieces are as long in all texts, and few kinds of
them differ: those on the diagonal, those at a window's end, and those of which every query sees every key. So the
program of a million tokens is that of a hundred thousand. What is seen of several pieces of keys is brought together by
the logarithms of its sums, and gradients are summed, in float32.

Dimensions: `S` sequence `P` a piece's tokens `H` head size; `*q` is what queries have before those, and `*k` what keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zoo.models.attention.blockwise import with_backward
from zoo.models.layers import accumulator


class Kernel(NamedTuple):
    """A kernel of pieces; `ids` are the documents of its queries and of its keys [P], or None.

    Attributes:
        forward: `(q, k, v, ids, sinks)`: what is seen [*q P H], and the logarithms of its sums [*q P].
        backward: `(q, k, v, ids, logs, own, given)`: the gradients of queries, keys and values; `own` is as in
            `zoo.models.layers.Ops`.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


class Piecewise:
    """Attention of sequences in an even number of pieces, of `size` tokens.

    Rows of pieces are walked one by one, or where those see all before them the first with the last, the second with
    the last but one, so that each turn of the loop is as long. In a turn come first the pieces that differ, then those
    that are seen whole. Nothing is computed for nothing but at a sequence's ends, where windows reach beyond it.

    Args:
        kernel: of pieces of a size, in which the first query stands so many tokens behind the first key; of None, in
            which all see all.
        length: of a sequence, in tokens.
        piece: as many tokens are in a piece at most.
        block: pieces are multiples of it.
        before: how many keys before its own a query sees, or infinity.
        behind: likewise, behind it.
    """

    def __init__(
        self,
        kernel: Callable[[int, int | None], Kernel],
        length: int,
        piece: int,
        block: int,
        before: int | float,
        behind: int | float,
    ):
        self.tiles = tiles = 2 * -(-length // (2 * piece))
        self.size = size = -(-length // (tiles * block)) * block
        self._filled = tiles * size - length  # tokens that fill up the last pieces
        self._open = self._filled and behind != 0
        apart = range(1 - tiles, tiles)  # a row of pieces from its column
        seen = [d for d in apart if (d - 1) * size < before and (d + 1) * size > -behind]
        whole = [d for d in seen if (d + 1) * size - 1 <= before and (d - 1) * size + 1 >= -behind]
        self._own = {d: kernel(size, None if d in whole else d * size) for d in seen if d == 0 or d not in whole}
        self._whole = [d for d in whole if d != 0]  # sinks are counted on the diagonal
        self._kernel: Any = kernel(size, None) if self._whole else None
        self._folded = self._whole == list(range(1, tiles))

    def __call__(self, q, k, v, ids, sinks, *, keep: bool, kept: tuple[Array, Array] | None) -> tuple[Array, ...]:
        """Return what queries see, and with `keep` the logarithms of its sums.

        Args:
            q: [B *q S H].
            k: [B *k S H].
            v: [B *k S H].
            ids: the document of every token [B S], or None.
            sinks: [*q], or None.
            keep: as in `zoo.models.layers.Ops`.
            kept: likewise, each [B *q S].
        """
        length = q.shape[-2]
        if ids is None and self._open:  # what fills up is behind all, where it would be seen
            ids = jnp.zeros((q.shape[0], length), jnp.int32)
        ids = None if ids is None else self._fill(ids, -1, jnp.iinfo(ids.dtype).min)  # no document's
        q, k, v = (self._fill(x, -2) for x in (q, k, v))
        run, again = with_backward(self.forward, self._pull)
        cut = lambda x, dim: jax.lax.slice_in_dim(x, 0, length, axis=x.ndim + dim)
        if keep:
            seen, logs = self.forward(q, k, v, ids, sinks)
            return cut(seen, -2), cut(logs, -1)
        if kept is None:
            return (cut(run(q, k, v, ids, sinks), -2),)
        # Of queries that fill up sums are endless: nothing, not even a sink, has a share in them.
        logs, own = kept
        endless = float(jnp.finfo(logs.dtype).max) / 2
        return (cut(again(q, k, v, ids, sinks, self._fill(logs, -1, endless), self._fill(own, -1)), -2),)

    def _pull(self, q, k, v, ids, sinks, logs, own, given):
        of_sinks = None
        if sinks is not None:
            shares = jnp.exp(sinks[..., None].astype(logs.dtype) - logs)
            of_sinks = -(shares * own).sum((0, -1)).astype(sinks.dtype)
        return *self.backward(q, k, v, ids, logs, own, given), None, of_sinks

    def _fill(self, x, dim, value=0):
        more = [(0, self._filled if at == x.ndim + dim else 0) for at in range(x.ndim)]
        return jnp.pad(x, more, constant_values=value)

    def forward(self, q, k, v, ids, sinks):
        """Return what queries see [*q S H], and the logarithms of its sums [*q S]."""
        wide = accumulator(q.dtype)

        def joined(state, new, there):
            (seen, logs), (of_new, new_logs) = state, new
            new_logs = jnp.where(there, new_logs, -jnp.inf)
            highest = jnp.maximum(logs, new_logs)
            old, share = jnp.exp(logs - highest), jnp.exp(new_logs - highest)
            of_new = jnp.where(share[..., None] > 0, of_new, 0)  # a query that sees no block has 0 / 0
            seen = (seen * old[..., None] + of_new * share[..., None]) / (old + share)[..., None]
            return seen, highest + jnp.log(old + share)

        def of_row(row):
            rows = *q.shape[:-2], self.size
            state = jnp.zeros((*rows, v.shape[-1]), wide), jnp.full(rows, jnp.finfo(wide).min, wide)
            for d, kernel in self._own.items():
                column, there = self._column(row, d)
                args = self._arguments(row, column, q, k, v, ids)
                state = joined(state, kernel.forward(*args, None if d else sinks), there)
            return state

        def turn(outs, number):
            rows = self._rows(number)
            states = jax.tree.map(lambda *each: jnp.stack(each), *map(of_row, rows))

            def step(states, at):
                which, row, column, there = self._at(number, rows, at)
                args = self._arguments(row, column, q, k, v, ids)
                one = joined(jax.tree.map(lambda x: x[which], states), self._kernel.forward(*args, None), there)
                return jax.tree.map(lambda x, new: x.at[which].set(new), states, one), None

            states = self._steps(step, states)
            for at, row in enumerate(rows):
                outs = tuple(
                    self._write(x, of_rows[at], row, dim)
                    for x, of_rows, dim in zip(outs, states, (-2, -1), strict=True)
                )
            return outs, None

        start = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), jnp.zeros(q.shape[:-1], wide)
        return jax.lax.scan(turn, start, jnp.arange(self._turns))[0]

    def backward(self, q, k, v, ids, logs, own, given):
        """Return the gradients of queries, keys and values, given that of what is seen and how it points to that."""
        wide = accumulator(q.dtype)

        def pulled(kernel, row, column, there, of_kv):
            """Return the gradient of a row's queries, and those of all keys and values with a piece's."""
            rows = *(self._part(x, row, -1) for x in (logs, own)), self._part(given, row)
            new = kernel.backward(*self._arguments(row, column, q, k, v, ids), *rows)
            of_q, *more = (jnp.where(there, x, 0) for x in new)
            sums = (self._part(x, column) + one for x, one in zip(of_kv, more, strict=True))
            return of_q, tuple(self._write(x, one, column) for x, one in zip(of_kv, sums, strict=True))

        def turn(carry, number):
            dq, *of_kv = carry
            rows, of_rows = self._rows(number), []
            for row in rows:
                total = jnp.zeros((*q.shape[:-2], self.size, q.shape[-1]), wide)
                for d, kernel in self._own.items():
                    of_q, of_kv = pulled(kernel, row, *self._column(row, d), of_kv)
                    total += of_q
                of_rows.append(total)

            def step(carry, at):
                of_rows, *of_kv = carry
                which, *there = self._at(number, rows, at)
                of_q, of_kv = pulled(self._kernel, *there, of_kv)
                return (of_rows.at[which].add(of_q), *of_kv), None

            of_rows, *of_kv = self._steps(step, (jnp.stack(of_rows), *of_kv))
            for at, row in enumerate(rows):
                dq = self._write(dq, of_rows[at], row)
            return (dq, *of_kv), None

        start = jnp.zeros_like(q), jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
        dq, dk, dv = jax.lax.scan(turn, start, jnp.arange(self._turns))[0]
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    @property
    def _turns(self):
        return self.tiles // 2 if self._folded else self.tiles

    def _rows(self, turn):
        return [turn, self.tiles - 1 - turn] if self._folded else [turn]

    def _steps(self, step, carry):
        return jax.lax.scan(step, carry, jnp.arange(len(self._whole)))[0] if self._whole else carry

    def _at(self, turn, rows, step):
        """Return which row of a turn a step is of, the row, the column, and whether there is one."""
        if not self._folded:
            return 0, rows[0], *self._column(rows[0], jnp.asarray(self._whole)[step])
        second = step >= turn
        which = second.astype(jnp.int32)
        return which, jnp.where(second, rows[1], rows[0]), jnp.where(second, step - turn, step), True

    def _column(self, row, apart):
        """Return the column so far from a row, and whether there is one."""
        column = row - apart
        return jnp.clip(column, 0, self.tiles - 1), (column >= 0) & (column < self.tiles)

    def _arguments(self, row, column, q, k, v, ids):
        of_both = None if ids is None else tuple(self._part(ids, number, -1) for number in (row, column))
        return self._part(q, row), self._part(k, column), self._part(v, column), of_both

    def _part(self, x, number, dim=-2):
        return jax.lax.dynamic_slice_in_dim(x, number * self.size, self.size, x.ndim + dim)

    def _write(self, x, part, number, dim=-2):
        return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), number * self.size, x.ndim + dim)
