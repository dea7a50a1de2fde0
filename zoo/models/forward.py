"""How a forward pass runs, as values: what a caller asks of a model, what each block is told, and what they return.

Dimensions: `B` batch `S` sequence `D` embed `N` query heads `K` kv heads `H` head size `L` layers `E` experts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from transforms.remat import Remat
from transforms.sharding import uncut
from zoo.config import Config, temperature_of
from zoo.models.attention import groups, packing, ulysses
from zoo.models.attention.rotary import frequencies
from zoo.models.layers import PLAIN, Ops, few_windows, rope, scanned_chunks, scanned_windows


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """What a caller asks of a model beside its tokens; the defaults are plain.

    Attributes:
        dtype: what to compute in; None is the parameters' own.
        remat: what the backward pass keeps of each layer (`transforms.remat`), or any wrapper of its body. The names
            `attn_out` and `mlp_out` mark what a policy may keep.
        ops: how attention, MLP and experts run; None runs them plainly.
        segments: the number of each token's document `[B, S]`, where a row holds several
            (`zoo.models.attention.packing`).
        past: what was read before (`zoo.engine.attention.Paged`).
        unroll: whether the program has each layer apart, in place of a loop over them.
    """

    dtype: DTypeLike | None = None
    remat: Remat | None = None
    ops: Ops | None = None
    segments: Integer[Array, "B S"] | None = None
    past: Any = None
    unroll: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerPass:
    """What a block is told beside its input and its config.

    Attributes:
        frequency: radians per position of each pair of a head's dimensions `[H/2]`.
        temperature: what rotation multiplies by, where that differs between layers; elsewhere `query_scale` holds it.
        window: how many keys a query sees; None is all. Where there are a `few`, which of them.
        few: the windows that layers have, where attention takes them as numbers alone.
        chunk: how many tokens are a chunk, no further than whose first a query sees; None where no layer has chunks.
        pairs: whether neighbouring dimensions of a head turn together, in place of those of its halves.
        causal: whether no token sees those behind it.
        ops: how attention, MLP and experts run.
        positions: of every token; None counts from 0.
        past: what was read before, and `pool_index` where in it this layer stands.
        pool_index: the layer's of `past.pool_indices`.
        pool: what all layers' keys and values are kept in, where the scan over layers carries it.
        own: what the layer has of what differs between those of its family (`Decoder.beside`).
        handed: what the layer before has handed on beside its output.
    """

    frequency: Float[Array, " half"] | Float[np.ndarray, " half"] | Float[Array, "B S half"]
    temperature: Float[Array, ""] | None = None
    window: Int[Array, ""] | int | None = None
    few: tuple[int | None, ...] = ()
    chunk: Int[Array, ""] | None = None
    pairs: bool = False
    causal: bool = True
    ops: Ops = PLAIN
    positions: Integer[Array, "#B S"] | None = None
    past: Any = None
    pool_index: Any = None
    pool: Any = None
    own: Any = None
    handed: Any = None

    def rotate(self, x: Float[Array, "B S heads H"]) -> Float[Array, "B S heads H"]:
        """Return queries or keys, turned by their positions.

        Of families whose neighbouring dimensions turn together, in another order, which is that of both: what queries
        and keys make of each other does not depend on it.
        """
        if self.pairs:
            turned = 2 * self.frequency.shape[-1]
            x = jnp.concatenate([x[..., :turned:2], x[..., 1:turned:2], x[..., turned:]], axis=-1)
        frequency = self.frequency[..., : x.shape[-1] // 2]  # where other layers' heads are wider, those have more
        return rope(x, frequency, self.positions, self.temperature)

    def grown(
        self, q: Float[Array, "B S N H"], share: float | Float[Array, ""], length: int, first: int = 0
    ) -> Float[Array, "B S N H"]:
        """Return queries that grow with a share of the logarithm of how many times `length` tokens they are behind.

        Positions are counted from `first`.
        """
        steps = jnp.arange(q.shape[1])[None] if self.positions is None else self.positions
        growth = 1 + share * jnp.log1p(((steps + first) // length).astype(jnp.float32))
        return q * growth[..., None, None].astype(q.dtype)

    def attention(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K W"],
        *,
        scale: float,
        cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
        keep: bool = False,
        kept: tuple[Float[Array, "B N S"], Float[Array, "B N S"]] | None = None,
    ) -> tuple[Any, Any]:
        """Return what queries attend to, among these keys and those that were read before; and the pool.

        Values that are narrower than keys, or wider, are padded to one size: kernels know no other. `keep` and
        `kept` are what attention takes that can keep (`Ops.keeps`).
        """
        how: dict[str, Any] = {"scale": scale, "cap": cap}
        if (width := v.shape[-1]) != q.shape[-1]:
            q, k, v = (_padded(x, max(width, q.shape[-1])) for x in (q, k, v))
            seen, pool = self.attention(q, k, v, sinks=sinks, keep=keep, kept=kept, **how)
            return jax.tree.map(lambda x: x[..., :width] if x.ndim == 4 else x, seen), pool
        if self.ops.ulysses:
            whole = replace(self, ops=replace(self.ops, ulysses=False))

            def one(q, k, v, sinks, kept):
                return whole.attention(q, k, v, sinks=sinks, keep=keep, kept=kept, **how)[0]

            return ulysses.attend(one, q, k, v, sinks, kept), None
        if self.chunk is not None:
            ops = packing.within(self.ops, packing.chunks(q, self.positions, self.chunk))
            return replace(self, ops=ops, chunk=None).attention(q, k, v, sinks=sinks, keep=keep, kept=kept, **how)
        how |= {"keep": True} if keep else {} if kept is None else {"kept": kept}
        how |= {} if sinks is None else {"sinks": sinks}
        how |= {} if self.causal else {"causal": False}
        if self.few:
            calls = [functools.partial(self.ops.attention, window=window, **how) for window in self.few]
            return calls[0](q, k, v) if self.window is None else jax.lax.switch(self.window, calls, q, k, v), None
        how["window"] = self.window
        if self.past is None:
            return self.ops.attention(q, k, v, **how), None
        return self.past.attention(self.ops.attention, self.pool_index, self.pool, q, k, v, **how)

    def latent_attention(
        self, q: Float[Array, "B S N H"], latents: Float[Array, "B S 1 H"], *, scale: float
    ) -> tuple[Float[Array, "B S N H"], Any]:
        """Return what queries make of latents, those of texts that were read before among them; and the pool.

        All heads share them, as keys and as values: pages hold them once.
        """
        return self.past.attention(self.ops.attention, self.pool_index, self.pool, q, latents, None, scale=scale)

    def recurrence(self, step: Callable[[Any, Any], tuple[Any, Any]], parts: Any) -> tuple[Any, Any]:
        """Return what a recurrence finds at each token, with what it was handed by those before; and the pool.

        Of texts that were read before: a layer that reads whole ones has faster ways.

        Args:
            step: of a state (`Config.recurrent_state`) and one token's parts, the state behind it and what is found.
            parts: what the layer made of each token, arrays `[B S ...]`.
        """
        return self.past.recurrence(step, self.pool_index, self.pool, parts)

    def attend(
        self,
        project: groups.Project,
        x: Float[Array, "B S D"],
        weights: dict[str, Any],
        *,
        scale: float,
        cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
        apart: bool = True,
    ) -> tuple[Float[Array, "B S N W"] | groups.Seen, "Aux"]:
        """Return what the queries that `project` makes attend to, and what the block returns beside its output.

        Its arguments are those of `zoo.models.attention.groups.attend`, by which it goes where a caller wants heads by
        turns.
        """
        how: dict[str, Any] = {"scale": scale, "cap": cap}
        if self.ops.heads is None or self.past is not None:
            q, k, v = project(x, weights)
            seen, pool = self.attention(q, k, v, sinks=sinks, **how)
            return seen, Aux(pool)
        one = lambda q, k, v, **more: self.attention(q, k, v, **more, **how)[0]
        return groups.attend(self.ops, project, one, x, weights, sinks, apart=apart), Aux()

    def behind(
        self,
        part: Callable[..., Any],
        x: Float[Array, "B S D"],
        seen: Float[Array, "B S N W"] | groups.Seen,
        *more: Float[Array, "B S ..."],
    ) -> Any:
        """Return `part(x, seen, *more)`, a function of tokens, of what `attend` returned."""
        own = (1,) * len(more)
        if isinstance(seen, groups.Seen):
            read = lambda x, seen, zeros, *more: part(x, groups.Seen(seen, zeros).read(), *more)
            return self.ops.tokens(read, (1, 1, 1, *own))(x, *seen, *more)
        return self.ops.tokens(part, (1, 1, *own))(x, seen, *more)


def _padded(x, size):
    more = size - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, more),)) if more else x


class Aux(eqx.Module):
    """What a block returns beside its output.

    Attributes:
        pool: what all layers' keys and values are kept in, with its own.
        routed: of a mixture, each expert's number of tokens and sum of probabilities.
        handed: what the next layer is handed (`LayerPass.handed`).
    """

    pool: Any = None
    routed: Float[Array, "2 E"] | None = None
    handed: Any = None


class Output(eqx.Module):
    """What a forward pass returns.

    Attributes:
        hidden: what the head reads: the last layer's output, normalised.
        pool: what a past keeps keys and values in, if there is one.
        balance: of a mixture, the balance loss, not yet weighted (see `zoo.models.mixture`).
    """

    hidden: Float[Array, "B S D"]
    balance: Float[Array, ""] | None
    pool: Any = None


class PerLayer(eqx.Module):
    """What differs between layers, stacked over them; None where nothing does."""

    window: Int[Array, " L"] | None
    chunk: Int[Array, " L"] | None
    frequency: Float[Array, "L *b half"] | None
    temperature: Float[Array, " L"] | None
    pool_index: tuple[Int[Array, " L"], Int[Array, " L"]] | None
    own: Any = None


def layer_passes(config: Config, asked: ForwardPass, seq: int) -> tuple[PerLayer, Callable[..., LayerPass]]:
    """Return what differs between layers, and what makes of one layer's part of it what its block is told."""
    ops, past, positions = asked.ops or PLAIN, asked.past, positions_of(asked)
    if past is not None:
        check_past(config)
    length, pool_indices = (seq, None) if past is None else (past.length, past.pool_indices)
    if asked.segments is not None and positions is not None:
        segments = uncut(asked.segments, 1) if ops.ulysses else asked.segments
        ops, length = packing.within(ops, segments), positions.max() + 1
    turns = tuple(zip(config.layer_ropes, config.layer_rotary_dims, strict=True))
    waves = {turn: _waves(*turn, length) for turn in turns}
    temperatures = [temperature_of(rope) for rope in config.layer_ropes] if config.rope_temperature is None else None
    if ops.static_windows and past is None:
        few, window = few_windows(config.layer_windows, seq)
    else:
        few, window = (), scanned_windows(config.layer_windows, seq)
    per_layer = PerLayer(
        window=window,
        chunk=None if past is not None else scanned_chunks(config.layer_windows, seq),
        frequency=_stacked([waves[turn] for turn in turns]) if len(waves) > 1 else None,
        temperature=None if temperatures is None else jnp.asarray(temperatures, jnp.float32),
        pool_index=pool_indices,
    )
    frequency = waves[turns[0]]
    how: dict[str, Any] = {"pairs": config.rotary_pairs, "causal": not config.bidirectional}
    common = LayerPass(frequency=frequency, few=few, ops=ops, positions=positions, past=past, **how)

    def told(layer: PerLayer, pool: Any = None, handed: Any = None) -> LayerPass:
        frequency = common.frequency if layer.frequency is None else layer.frequency
        own = {
            "window": layer.window,
            "chunk": layer.chunk,
            "temperature": layer.temperature,
            "pool_index": layer.pool_index,
            "own": layer.own,
        }
        return replace(common, frequency=frequency, pool=pool, handed=handed, **own)

    return per_layer, told


def check_past(config: Config) -> None:
    """Raise ValueError if a model cannot go on with a text that was read before."""
    if config.bidirectional:
        raise ValueError(
            f"cannot go on with a text: every token of this {type(config).__name__} sees those behind it "
            "(bidirectional=True), so it only reads whole texts. Use zoo.Embedder, or a model that writes."
        )


def positions_of(asked: ForwardPass) -> Integer[Array, "#B S"] | None:
    """Return where each token of a pass stands in its text; None counts from 0."""
    if asked.segments is not None:
        return packing.positions(asked.segments)
    return None if asked.past is None else asked.past.positions


def _stacked(waves):
    most = max(wave.shape[-1] for wave in waves)
    wide = [jnp.pad(wave, ((0, 0),) * (wave.ndim - 1) + ((0, most - wave.shape[-1]),)) for wave in waves]
    return jnp.stack(jnp.broadcast_arrays(*wide))


def _waves(rope, size, length):
    """Return a layer's frequencies; where nothing turns, zeros, by which rotation changes no bit."""
    return np.zeros(size // 2, np.float32) if rope is None else frequencies(size, *rope, length)
