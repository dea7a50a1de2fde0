"""Keys and values on the device, and attention over them, some pages at a time.

The pages of a text are walked in order of position, as many at a time as hold `KEYS` tokens, with the online softmax
(what `tile` makes of attention cut over its keys), after the step's own keys and values were written to them: so sums
have one order, whatever the chunks. The pool is carried by the scan over layers and written in place; as its inputs and
outputs it would be copied.

On a mesh, kv heads lie where the queries that read them are, and nothing of a page ever leaves its device.

Dimensions: `R` rows `W` slots of a row `P` pages `K` kv heads `G` query heads per kv head `N` query heads `H` head
size `L` layers of a kind `C` most pages of a text.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from transforms.bits import bits, numbers
from transforms.sharding import einsum, partitions, uncut
from transforms.sharding import place as _place
from zoo.config import Chunk
from zoo.engine.sampling import Either
from zoo.engine.states import recurrence
from zoo.models.layers import accumulator, softcap

KEYS = 32  # of a text that are read at once, if its pages are smaller
_NEVER = -1e30  # a score that is not: finite, so that a text without any is no NaN
HEADS = PartitionSpec(None, None, "model")  # how queries, keys, values and their pages lie on a mesh


class Store(eqx.Module):
    """The pages of one window kind, of all its layers; padding is on the last page.

    Heads stand apart: products with a head's keys read them where they are, where XLA's CPU compiler would first copy
    keys of which each token's heads lie together, at a tenth of the speed. A mesh cuts them. A page of a head has keys
    and values of a token beside each other (`[page, 2 H]`: tiled memory pads a last dimension to 128), or on CPUs all
    its keys before all its values (`[2 page, H]`: each is read without the other). Where keys are values too, they are
    there once.

    Attributes:
        values: numbers, of 16 bits on CPUs as bits, or 8-bit integers.
        scale: what integers are multiplied by, of each kv head's tokens `[K 2 page]`; None where they are numbers.
        page: tokens on a page.
    """

    values: Shaped[Array, "L P K slots _"]
    scale: Float[Array, "L P _"] | None = None
    page: int = eqx.field(static=True, kw_only=True)

    @property
    def stacked(self) -> int:
        """How many of a token's parts, its key and its value, have a slot of their own."""
        return self.values.shape[3] // self.page

    def write(
        self,
        layer: Int[Array, ""],
        page: Int[Array, "R W"],
        slot: Int[Array, "R W"],
        both: Float[Array, "R W K parts H"],
    ) -> "Store":
        """Return the pages with keys and values of a layer's tokens, each in a slot of a page."""
        heads, parts = both.shape[2:4]
        page, slot = page[..., None, None], slot[..., None, None]
        where = layer, page, jnp.arange(heads)[:, None], jnp.arange(self.stacked) * self.page + slot
        put = lambda each: self.values.at[where].set(each.reshape(*each.shape[:3], self.stacked, -1))
        if self.scale is None:
            return dataclasses.replace(self, values=put(both if self.values.dtype == both.dtype else bits(both)))
        wide = both.astype(jnp.float32)
        scale = jnp.abs(wide).max(-1) / 127
        whole = jnp.round(wide / jnp.where(scale > 0, scale, 1)[..., None]).astype(jnp.int8)
        of_scale = layer, page, (jnp.arange(heads)[:, None] * parts + jnp.arange(parts)) * self.page + slot
        return dataclasses.replace(self, values=put(whole), scale=self.scale.at[of_scale].set(scale))

    def read(
        self, layer: Int[Array, ""], table: Int[Array, "R C"], size: int, dtype: DTypeLike
    ) -> tuple[Float[Array, "R K keys H"], Float[Array, "R K keys H"], Float[Array, "R K parts keys"] | None]:
        """Return keys and values of each row's pages, and what products with them are multiplied by."""
        (rows, pages), heads = table.shape, self.values.shape[2]
        slots = self.values.reshape(*self.values.shape[:3], self.stacked, self.page, -1)

        def part(number: int) -> Array:
            values = slots[layer, table[:, None], jnp.arange(heads)[:, None], number]
            values = values.astype(dtype) if self.scale is not None else numbers(values, dtype)
            return values.reshape(rows, heads, pages * self.page, -1, size)

        k, v = part(0)[..., 0, :], part(self.stacked - 1)[..., -1, :]
        if self.scale is None:
            return k, v, None
        scale = self.scale[layer, table].reshape(rows, pages, heads, -1, self.page)
        return k, v, scale.transpose(0, 2, 3, 1, 4).reshape(rows, heads, -1, pages * self.page)


Pool = tuple[Any, ...]  # a `Store` of each window kind; then, where layers hand on some, `States`


@dataclasses.dataclass(frozen=True)
class Kinds:
    """The layers that see the same number of keys and keep as much of each, and behind them those that hand on a state.

    Attributes:
        windows: how many keys the layers of each kind see; None is all.
        cached: what they keep of a token: heads, of each a key and a value, or one that is both, and their width.
        heads: how many heads pages have room for.
        layers: the kind of each layer, and its index there; of those that hand on a state the kind is the last.
    """

    windows: tuple[int | None, ...]
    cached: tuple[tuple[int, int, int], ...]
    heads: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: Any, length: int, devices: int = 1) -> "Kinds":
        """Return the kinds of a model's layers, for texts of up to `length` tokens.

        Layers that share another's keys and values have its pages (`Config.layer_sources`). Where heads are cut over
        devices and there are fewer kv heads than those, each is there once for every device whose queries read it.
        """
        windows = [None if window is None or window >= length else window for window in config.layer_windows]
        seen = list(zip(windows, config.layer_cached, strict=True))
        states, sources = config.recurrent_layers, config.layer_sources
        kinds = tuple(dict.fromkeys(kept for i, kept in enumerate(seen) if i not in states))
        kind = [len(kinds) if i in states else kinds.index(kept) for i, kept in enumerate(seen)]
        owners = [[i for i in dict.fromkeys(sources) if kind[i] == one] for one in range(len(kinds) + 1)]
        layers = tuple((own, owners[own].index(source)) for own, source in zip(kind, sources, strict=True))
        of_devices = lambda heads: heads if config.num_heads % devices else math.lcm(heads, devices)
        heads = tuple(of_devices(cached[0]) for _, cached in kinds)
        return cls(tuple(window for window, _ in kinds), tuple(cached for _, cached in kinds), heads, layers)

    def counts(self) -> list[int]:
        """How many layers each kind has."""
        return [len({one for one in self.layers if one[0] == kind}) for kind in range(len(self.windows))]


class Paged(eqx.Module):
    """The past as the slots of a step see it (`ForwardPass.past`), of which layers have pages or states."""

    pool: Pool
    positions: Int[Either, "R W"]
    tables: tuple[Int[Either, "R C"], ...]
    lengths: Int[Either, " R"]
    slots: Int[Either, " R"]
    drafted: Bool[Either, "R W"]
    kinds: Kinds = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @property
    def length(self) -> Int[Array, "R W"]:
        """Of each token, the length of the text that rotary frequencies are for: what was given, or what is there."""
        return jnp.maximum(self.lengths[:, None], self.positions + 1)

    @property
    def pool_indices(self) -> tuple[Int[Array, " layers"], Int[Array, " layers"]]:
        """Each layer's kind, and its index there; the model scans them beside its layers."""
        kinds, indices = zip(*self.kinds.layers, strict=True)
        return jnp.array(kinds), jnp.array(indices)

    def attention(
        self,
        attend: Callable,
        pool_index: tuple,
        pool: Pool,
        q: Float[Array, "R W N H"],
        k: Float[Array, "R W K H"],
        v: Float[Array, "R W K H"] | None,
        *,
        scale: float,
        cap: float | None = None,
        window: Any = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "R W N H"], Pool]:
        """Return what queries attend to, and the pool with their keys and values; `attend` and `window` are not read.

        Without values, keys are values too, and are kept once. On a mesh each device deals with its own heads.
        """
        cached = k.shape[2], 1 if v is None else 2, q.shape[-1]
        numbers = tuple(number for number, kept in enumerate(self.kinds.cached) if kept == cached)
        local = lambda past, *arrays: past._attention(numbers, *arrays, scale=scale, cap=cap)
        own = tuple(pool[number] for number in numbers)
        told = dataclasses.replace(self, pool=()), pool_index, own

        def after(own):
            new = dict(zip(numbers, own, strict=True))
            return tuple(new.get(number, part) for number, part in enumerate(pool))

        if partitions(own[0].values)[2] is None:
            seen, own = local(*told, q, k, v, sinks)
            return seen, after(own)
        apart = partitions(q)[2] is not None  # what a matrix in fewer bits makes is whole on every device
        heads = self.kinds.heads[numbers[0]]
        q, (k, v) = _place(q, HEADS), jax.tree.map(lambda kv: _beside_queries(kv, heads), (k, v))
        whole = PartitionSpec()
        specs = whole, whole, HEADS, HEADS, HEADS, HEADS, PartitionSpec("model")
        run = jax.shard_map(local, in_specs=specs, out_specs=HEADS, check_vma=False)
        seen, own = run(*told, q, k, v, sinks)
        return seen if apart else uncut(seen, 2), after(own)

    def recurrence(
        self, step: Callable[[Any, Any], tuple[Any, Any]], pool_index: tuple, pool: Pool, parts: Any
    ) -> tuple[Any, Pool]:
        """Return what a recurrence finds at each token, and the pool with the states behind them."""
        (_, layer), (*pages, states) = pool_index, pool
        told = {"positions": self.positions, "slots": self.slots, "drafted": self.drafted}
        found, states = recurrence(states, layer, step, parts, **told)
        return found, (*pages, states)

    def _attention(self, numbers, pool_index, pool, q, k, v, sinks, *, scale, cap):
        """Return `attention` of one device's heads, and the pages of the kinds that it could be of, by number.

        All of theirs are written, but those of other layers on the last page; all are walked, but theirs in no step.
        """
        kind, index = pool_index
        alone = len(numbers) == 1
        rows, width, heads, size = q.shape
        wide, groups = accumulator(q.dtype), heads // k.shape[2]
        q_RKGWH = q.reshape(rows, width, k.shape[2], groups, size).transpose(0, 2, 3, 1, 4)
        shape = q_RKGWH.shape
        most, total = jnp.full(shape[:-1], _NEVER, wide), jnp.zeros(shape[:-1], wide)
        carry, new = (most, total, jnp.zeros(shape, wide)), []
        for number, pages in zip(numbers, pool, strict=True):
            mine = True if alone else kind == number
            layer = index if alone else jnp.minimum(index, pages.values.shape[0] - 1)
            pages = self._written(number, pages, layer, mine, k, v)
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

    def _written(self, number, pages, layer, mine, k, v):
        """Put keys and values where their positions are; those of padding, or of another kind, on the last page."""
        last = pages.values.shape[1] - 1
        where = jnp.maximum(self.positions, 0)
        page = jnp.take_along_axis(jnp.asarray(self.tables[number]), where // pages.page, axis=1)
        page = jnp.where((self.positions >= 0) & mine, page, last)
        both = jnp.stack([k] if v is None else [k, v], axis=3)
        return pages.write(layer, page, where % pages.page, both.astype(self.dtype))

    def _walk(self, number, pages, layer, mine, carry, q_RKGWH, scale, cap):
        """Go through the pages that any row sees, from the first on; others' change no bit of a row."""
        window = self.kinds.windows[number]
        at_once = max(1, KEYS // pages.page)
        size = at_once * pages.page
        live = self.positions >= 0
        first = jnp.zeros_like(self.positions) if window is None else jnp.maximum(self.positions - window + 1, 0)
        first = self.positions // window * window if isinstance(window, Chunk) else first
        nearest = jnp.where(live, first, jnp.iinfo(first.dtype).max).min(axis=1)
        begin = nearest.min() // size
        end = jnp.where(live & mine, self.positions // size + 1, 0).max()
        # What is left of the last keys stands for pages that no text has.
        beyond = -self.tables[number].shape[1] % at_once
        tables = jnp.pad(self.tables[number], ((0, 0), (0, beyond)), constant_values=pages.values.shape[1] - 1)

        def keys(i, carry):
            table = jax.lax.dynamic_slice_in_dim(tables, i * at_once, at_once, axis=1)
            at = i * size + jnp.arange(size)
            # Pages hold what was another's beyond a text and behind its window. It may be no number: 0 times that
            # would not be 0.
            there = ((at <= self.positions.max(axis=1)[:, None]) & (at >= nearest[:, None]))[:, None]
            k, v, scales = pages.read(layer, table, q_RKGWH.shape[-1], self.dtype)
            v = jnp.where(there[..., None], v, 0)
            scales = None if scales is None else jnp.where(there[:, :, None], scales, 0)
            seen = (at <= self.positions[..., None]) & live[..., None]  # [R, W, keys]
            seen = seen if window is None else seen & (at >= first[..., None])
            return _seen(carry, q_RKGWH, k, v, scales, seen[:, None, None], scale, cap)

        with jax.named_scope("pages"):
            return jax.lax.fori_loop(begin, end, keys, carry)


def _beside_queries(kv: Float[Array, "R W K H"], heads: int) -> Float[Array, "R W heads H"]:
    """Return keys or values of so many heads, each as often as pages hold it, where the queries are that read them."""
    copies = heads // kv.shape[2]
    return _place(kv if copies == 1 else jnp.repeat(uncut(kv, 2), copies, axis=2), HEADS)


def _seen(
    carry: tuple[Array, Array, Array],
    q: Float[Array, "R K G W H"],
    k: Float[Array, "R K keys H"],
    v: Float[Array, "R K keys H"],
    scales: Float[Array, "R K parts keys"] | None,
    seen: Bool[Array, "R 1 1 W keys"],
    scale: float,
    cap: float | None,
) -> tuple[Array, Array, Array]:
    """Return the largest score, the sum of probabilities and that of values, some keys further."""
    most, total, out = carry
    of = lambda which, x: x if scales is None else x * scales[:, :, which, None, None]
    # XLA's CPU compiler would transpose keys that come second.
    scores = jnp.moveaxis(einsum("rkph,rkgwh->rkpgw", k, q, most.dtype), 2, -1)
    scores = softcap(of(0, scores) * scale, cap)
    higher = jnp.maximum(most, jnp.where(seen, scores, _NEVER).max(-1))
    probs = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
    shrink = jnp.exp(most - higher)
    more = einsum("rkgwp,rkph->rkgwh", of(-1, probs).astype(v.dtype), v, out.dtype)
    return higher, total * shrink + probs.sum(-1), out * shrink[..., None] + more
