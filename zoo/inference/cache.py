"""The keys and values of what a model has read, so that each further token costs one pass over itself alone.

Layers that see the same number of keys share a `Group`. One with a window of W keeps W places and overwrites the
oldest; the others keep every position. A pass reads the cache as it was and its own new keys beside it, and only then
are these written, so that chunks of any length are exact.

Dimensions: `B` batch `S` new tokens `C` places `L` layers of a group `K` kv heads `H` head size `D` embed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from zoo.models.forward import ForwardPass
from zoo.models.layers import Ops

_NOWHERE = 2**30  # the position of a place that holds nothing: after every query


class Group(eqx.Module):
    """The layers that see the same number of keys, stacked. Position p is kept at place `p % C`."""

    k: Float[Array, "L B C K H"]
    v: Float[Array, "L B C K H"]
    window: int | None = eqx.field(static=True)
    layers: tuple[int, ...] = eqx.field(static=True)

    def positions(self, lengths: Int[Array, " B"]) -> Int[Array, "B C"]:
        """Return which position each place holds, of texts of some lengths."""
        places, count = jnp.arange(self.k.shape[2]), self.k.shape[2]
        last = lengths[:, None] - 1
        latest = places + (last - places) // count * count
        return jnp.where(latest >= 0, latest, _NOWHERE)

    def write(
        self, k: Float[Array, "L B S K H"], v: Float[Array, "L B S K H"], start: Int[Array, " B"], end: Int[Array, " B"]
    ) -> "Group":
        """Return the group with new keys and values, of the positions from `start`; those from `end` on are padding."""
        count = self.k.shape[2]
        position = start[:, None] + jnp.arange(k.shape[2])
        kept = (position < end[:, None]) & (position >= end[:, None] - count)  # each place is written once
        place = jnp.where(kept, position % count, count)
        row = jnp.arange(k.shape[1])[:, None]
        put = lambda old, new: old.at[:, row, place].set(new.astype(old.dtype), mode="drop")
        return dataclasses.replace(self, k=put(self.k, k), v=put(self.v, v))


class Cache(eqx.Module):
    """What a model remembers of a batch of texts, and how long each of them is."""

    groups: tuple[Group, ...]
    lengths: Int[Array, " B"]

    @classmethod
    def empty(cls, config: Any, batch: int, capacity: int, dtype: DTypeLike) -> "Cache":
        """Return a cache for texts of up to `capacity` tokens.

        Args:
            config: a model's, with `layer_windows`, `num_kv_heads` and `head_dim`.
            batch: how many texts.
            capacity: tokens of the longest text, generated ones included.
            dtype: what keys and values are kept in.
        """
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(config.layer_windows):
            kinds.setdefault(None if window is None or window >= capacity else window, []).append(layer)
        groups = []
        for window, layers in kinds.items():
            shape = (len(layers), batch, window or capacity, config.num_kv_heads, config.head_dim)
            groups.append(Group(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), window, tuple(layers)))
        return cls(tuple(groups), jnp.zeros(batch, jnp.int32))


class Past(eqx.Module):
    """A cache as one pass reads it: the pass is over `positions`, of which those before `end` are no padding."""

    cache: Cache
    positions: Int[Array, "B S"]
    end: Int[Array, " B"]
    fresh: bool = eqx.field(static=True)  # nothing was read before: only the pass's own keys count
    whole: Int[Array, ""] | int = 0  # tokens of the longest text, where it is read in several passes
    pool: None = None  # keys and values leave each layer by themselves

    @property
    def length(self) -> Int[Array, ""]:
        """One more than the last position, of what is read in this pass and those that belong to it."""
        return jnp.maximum(self.end.max(), self.whole)

    @property
    def places(self) -> tuple[Int[Array, " layers"], Int[Array, " layers"]]:
        """Return each layer's group, and its index there; a model scans them beside its layers."""
        found = sorted(
            (layer, number, index)
            for number, group in enumerate(self.cache.groups)
            for index, layer in enumerate(group.layers)
        )
        return jnp.array([number for _, number, _ in found]), jnp.array([index for *_, index in found])

    def attention(self, attend: Callable, place: tuple, pool: None, q, k, v, **how):
        """Return what queries attend to among what is cached and their own keys."""
        if self.fresh:
            return attend(q, k, v, **how), None
        number, index = place

        def read(group: Group):
            old = [jax.lax.dynamic_index_in_dim(kept, index, keepdims=False) for kept in (group.k, group.v)]
            if group.window is None or k.shape[1] == 1:  # what a token overwrites, no query of the pass still sees
                start = self.cache.lengths
                own = Group(old[0][None], old[1][None], group.window, (0,)).write(k[None], v[None], start, self.end)
                keys, values, stood = own.k[0], own.v[0], group.positions(self.end)
            else:
                keys, values = (jnp.concatenate([kept, new], axis=1) for kept, new in zip(old, (k, v), strict=True))
                stood = jnp.concatenate([group.positions(self.cache.lengths), self.positions], axis=1)
            told = {**how, "window": group.window}
            return attend(q, keys, values, q_positions=self.positions, k_positions=stood, **told)

        branches = [lambda group=group: read(group) for group in self.cache.groups]
        return branches[0]() if len(branches) == 1 else jax.lax.switch(number, branches), None


def advance(
    model: Any,
    tokens: Integer[Array, "B S"],
    counts: Int[Array, " B"],
    cache: Cache,
    *,
    dtype: DTypeLike | None = None,
    ops: Ops | None = None,
    fresh: bool = False,
    whole: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, "B S D"], Cache]:
    """Read on: return the hidden states of new tokens, as if all had been read at once, and the cache with them in it.

    Args:
        model: any model of the zoo.
        tokens: what follows in each text, padded at the end.
        counts: how many of each row are no padding. Hidden states of padding mean nothing.
        cache: what was read before.
        dtype: what to compute in.
        ops: how attention and MLP run.
        fresh: the cache is empty, which saves looking into it.
        whole: tokens of the longest text, of which this is a part; rotary frequencies that grow with the text are
            those of the whole, as if it were read at once.
    """
    start = cache.lengths
    end = start + counts
    past = Past(cache, start[:, None] + jnp.arange(tokens.shape[1]), end, fresh, whole)
    out = model.forward(tokens, ForwardPass(dtype=dtype, ops=ops, past=past))
    pick = lambda new, group: new if len(cache.groups) == 1 else new[jnp.array(group.layers)]
    groups = tuple(group.write(pick(out.k, group), pick(out.v, group), start, end) for group in cache.groups)
    return out.hidden, Cache(groups, end)
