"""One step of the engine: a fixed number of token places through the model, whatever they belong to.

The places stand in rows, and a row holds consecutive tokens of one text: a chunk of a prompt, a token that is written
and its drafts, a text that is scored. They are one batch `[rows, width]` to the model. There is one program, compiled
once, and in a program of fixed shape the bits of a row of a product depend on that row alone. Keys and values go to
pages before they are looked up, and the pages of a text are walked in order of position, one by one, with the online
softmax (what `tile` makes of attention cut over its keys). So a token's bits depend on its text and nothing else: not
on company, place, chunks, pages, nor on who computed the beginning.

The pool is carried by the scan over layers and written in place; as its inputs and outputs it would be copied.

Dimensions: `R` rows `W` places of a row `P` pages `K` kv heads `G` query heads per kv head `N` query heads `H` head
size `L` layers of a kind `D` embed `V` vocab `C` most pages of a text.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from transforms.bits import bits, numbers
from transforms.sharding import einsum
from zoo.engine.sampling import Either, Picked, Rules, pick
from zoo.models.forward import ForwardPass
from zoo.models.layers import accumulator, softcap

Pool = tuple[Shaped[Array, "_ _ page _"], ...]  # [L, P, page, 2 K H] of each window kind; padding is on the last page
_NEVER = -1e30  # a score that is not: finite, so that a text without any is no NaN


@dataclass(frozen=True)
class Kinds:
    """The layers that see the same number of keys, of each number there is.

    Attributes:
        windows: how many keys the layers of each kind see; None is all.
        layers: the kind of each layer, and its index there.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, windows: tuple[int | None, ...], length: int) -> "Kinds":
        """Return the kinds of layers with these windows, for texts of up to `length` tokens."""
        seen = [None if window is None or window >= length else window for window in windows]
        kinds = list(dict.fromkeys(seen))
        layers = tuple((kinds.index(window), seen[:i].count(window)) for i, window in enumerate(seen))
        return cls(tuple(kinds), layers)

    def counts(self) -> tuple[int, ...]:
        """How many layers each kind has."""
        return tuple(sum(kind == each for kind, _ in self.layers) for each in range(len(self.windows)))

    def pool(self, config: Any, pages: tuple[int, ...], size: int, dtype: DTypeLike, *, on_cpu: bool) -> Pool:
        """Return empty pages of each kind, and one more; 16-bit numbers lie as bits on CPUs (`transforms.bits`)."""
        width = 2 * config.num_kv_heads * config.head_dim  # as one dimension: tiled memory pads two small ones
        sizes = zip(self.counts(), pages, strict=True)
        empty = tuple(jnp.zeros((layers, count + 1, size, width), dtype) for layers, count in sizes)
        return tuple(map(bits, empty)) if on_cpu else empty


class Work(eqx.Module):
    """What a step computes, as the scheduler says.

    Attributes:
        tokens: ids, -1 for the one that the text's slot picked last. What is padding has position -1.
        positions: of every token in its text.
        targets: ids whose probabilities after each token are asked for, or 0.
        slots: of each row.
        tables: the pages of each row's text, of each window kind; those that it has no more are the last page.
        lengths: how many tokens of each row's text were given: rotary frequencies that grow with a text are of these.
        keeps: whether a row's last token picks what its slot goes on with.
        asked: the places that pick or are scored, `row * W + place`, so many at a time; `R * W` stands for none.
        rules: how ids are picked.
    """

    tokens: Int[Either, "R W"]
    positions: Int[Either, "R W"]
    targets: Int[Either, "R W"]
    slots: Int[Either, " R"]
    tables: tuple[Int[Either, "R C"], ...]
    lengths: Int[Either, " R"]
    keeps: Bool[Either, " R"]
    asked: Int[Either, "blocks block"]
    rules: Rules


class State(eqx.Module):
    """What stays on the device from step to step: the pages, and the id that each slot picked last."""

    pool: Pool
    last: Int[Array, " slots"]


class Paged(eqx.Module):
    """The past as the places of a step see it (`ForwardPass.past`)."""

    pool: Pool
    positions: Int[Either, "R W"]
    tables: tuple[Int[Either, "R C"], ...]
    lengths: Int[Either, " R"]
    kinds: Kinds = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @property
    def length(self) -> Int[Array, "R W"]:
        """Of each token, the length of the text that rotary frequencies are for: what was given, or what is there."""
        return jnp.maximum(self.lengths[:, None], self.positions + 1)

    @property
    def places(self) -> tuple[Int[Array, " layers"], Int[Array, " layers"]]:
        """Each layer's kind, and its index there; the model scans them beside its layers."""
        kinds, indices = zip(*self.kinds.layers, strict=True)
        return jnp.array(kinds), jnp.array(indices)

    def attention(
        self,
        attend: Callable,
        place: tuple,
        pool: Pool,
        q: Float[Array, "R W N H"],
        k: Float[Array, "R W K H"],
        v: Float[Array, "R W K H"],
        *,
        scale: float,
        cap: float | None,
        window: Any,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "R W N H"], Pool]:
        """Return what queries attend to, and the pool with their keys and values; `attend` and `window` are not read.

        All kinds' pages are written, but those of other layers on the last page; all are walked, but theirs in no step.
        """
        kind, index = place
        alone = len(pool) == 1
        rows, width, heads, size = q.shape
        wide, groups = accumulator(q.dtype), heads // k.shape[2]
        q_RKGWH = q.reshape(rows, width, k.shape[2], groups, size).transpose(0, 2, 3, 1, 4)
        shape = q_RKGWH.shape
        most, total = jnp.full(shape[:-1], _NEVER, wide), jnp.zeros(shape[:-1], wide)
        carry, new = (most, total, jnp.zeros(shape, wide)), []
        for number, pages in enumerate(pool):
            mine = True if alone else kind == number
            layer = index if alone else jnp.minimum(index, pages.shape[0] - 1)
            pages = self._write(number, pages, layer, mine, k, v)
            carry = self._walk(number, pages, layer, mine, carry, q_RKGWH, scale, cap)
            new.append(pages)
        most, total, out = carry
        if sinks is not None:  # one key more of each head, that has no value
            sink = sinks.astype(wide).reshape(shape[1], groups, 1)
            higher = jnp.maximum(most, sink)
            shrink = jnp.exp(most - higher)
            total, out = total * shrink + jnp.exp(sink - higher), out * shrink[..., None]
        out = out / jnp.where(total > 0, total, 1)[..., None]
        return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype), tuple(new)

    def _write(self, number, pages, layer, mine, k, v):
        """Put keys and values where their positions are; those of padding, or of another kind, on the last page."""
        size, last = pages.shape[2], pages.shape[1] - 1
        where = jnp.maximum(self.positions, 0)
        page = jnp.take_along_axis(self.tables[number], where // size, axis=1)
        page = jnp.where((self.positions >= 0) & mine, page, last)
        both = jnp.stack([k, v], axis=2).astype(self.dtype).reshape(*k.shape[:2], -1)
        both = both if pages.dtype == self.dtype else bits(both)
        return pages.at[layer, page, where % size].set(both)

    def _walk(self, number, pages, layer, mine, carry, q_RKGWH, scale, cap):
        """Go through the pages that any row sees, from the first on; others' change no bit of a row."""
        size, window = pages.shape[2], self.kinds.windows[number]
        live = self.positions >= 0
        first = jnp.zeros_like(self.positions) if window is None else jnp.maximum(self.positions - window + 1, 0)
        begin = jnp.where(live, first // size, jnp.iinfo(first.dtype).max).min()
        end = jnp.where(live & mine, self.positions // size + 1, 0).max()
        newest = self.positions.max(axis=1)

        def page(i, carry):
            most, total, out = carry
            table = jax.lax.dynamic_index_in_dim(self.tables[number], i, axis=1, keepdims=False)
            kv = numbers(pages[layer, table], self.dtype).reshape(len(table), size, 2, q_RKGWH.shape[1], -1)
            at = i * size + jnp.arange(size)
            # What a page holds beyond its text was another's, and may be no number: 0 times that would not be 0.
            there = (at <= newest[:, None])[:, :, None, None]
            k, v = jnp.where(there, kv[:, :, 0], 0), jnp.where(there, kv[:, :, 1], 0)
            scores = softcap(einsum("rkgwh,rpkh->rkgwp", q_RKGWH, k, most.dtype) * scale, cap)
            seen = (at <= self.positions[..., None]) & live[..., None]  # [R, W, page]
            seen = seen if window is None else seen & (at > self.positions[..., None] - window)
            seen = seen[:, None, None]
            higher = jnp.maximum(most, jnp.where(seen, scores, _NEVER).max(-1))
            probs = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
            shrink = jnp.exp(most - higher)
            more = einsum("rkgwp,rpkh->rkgwh", probs.astype(v.dtype), v, out.dtype)
            return higher, total * shrink + probs.sum(-1), out * shrink[..., None] + more

        return jax.lax.fori_loop(begin, end, page, carry)


def advance(
    model: Any, state: State, work: Work, *, kinds: Kinds, dtype: Any, most: int
) -> tuple[State, Picked, Array]:
    """Run a step; return the state after it, what each place that is asked picked, and all hidden states `[R W, D]`.

    Logits exist for one block of these places at a time, and for none where nothing is asked.

    Args:
        model: any of the zoo.
        state: donate it.
        work: what to compute.
        kinds: which pages each layer's keys are on.
        dtype: what to compute and to keep keys and values in.
        most: how many of the likeliest ids are told, where any are asked for.
    """
    tokens = jnp.where(work.tokens < 0, state.last[work.slots][:, None], work.tokens)
    past = Paged(state.pool, work.positions, work.tables, work.lengths, kinds, dtype)
    out = model.forward(tokens, ForwardPass(dtype=dtype, past=past))
    rows, width = tokens.shape
    newest = jnp.arange(rows) * width + jnp.argmax(work.positions, axis=1)
    positions, targets, asked = map(jnp.asarray, (work.positions, work.targets, work.asked))

    def picked(places: Int[Array, " block"]) -> Picked:
        row, at = jnp.minimum(places // width, rows - 1), places % width
        rules, target = work.rules.of(row), targets[row, at]
        return pick(model.logits(out.hidden[row, at]), rules, positions[row], tokens[row], at, target, most)

    def block(i, found: Picked) -> Picked:
        return jax.tree.map(lambda all, new: all.at[asked[i]].set(new, mode="drop"), found, picked(asked[i]))

    told = jax.eval_shape(picked, asked[0])
    empty = jax.tree.map(lambda leaf: jnp.zeros((rows * width, *leaf.shape[1:]), leaf.dtype), told)
    found = jax.lax.fori_loop(0, (asked[:, 0] < rows * width).sum(), block, empty)
    slots = jnp.where(work.keeps, work.slots, state.last.shape[0])
    return (
        State(out.pool, state.last.at[slots].set(found.ids[newest], mode="drop")),
        found,
        out.hidden.reshape(rows * width, -1),
    )


@functools.cache
def program(kinds: Kinds, dtype: Any, most: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return `advance`, to be compiled with XLA's options and for donated states; engines alike share it."""
    run = functools.partial(advance, kinds=kinds, dtype=dtype, most=most)
    return jax.jit(run, donate_argnums=1, compiler_options=dict(options) or None)


def table_width(length: int, size: int) -> int:
    """How many pages of a size a text of a length has at most."""
    return math.ceil(length / size)


def table(held: list[int | None], width: int, last: int) -> np.ndarray:
    """Return a text's pages as a row of a table; those that it does not have are the last page."""
    row = np.full(width, last, np.int32)
    row[: len(held)] = [last if page is None else page for page in held]
    return row
