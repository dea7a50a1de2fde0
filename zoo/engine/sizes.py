"""The sizes of an engine: what it is told, and what follows of that for a model and where the model lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from transforms.bits import IN_PLACE
from zoo.engine.attention import HEADS, Kinds, Store
from zoo.engine.states import empty
from zoo.engine.step import State

_WHOLE = 3  # arrays as large as the logits: one more than picking has at once, for what else a step needs
_LEAST = 24 * 2**20  # bytes of logits for which the head is not read twice, however small the pool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes of an engine.

    Attributes:
        length: tokens of the longest text, what is generated included.
        rows: texts that run at once, a row of a pass for each; a pass costs `rows * width` tokens, idle or busy.
        width: tokens of one text in a row; 1 fits CPUs, 8 accelerators, which read weights for that many anyway.
        budget: tokens of a step. Its first pass writes a token of every text; while prompts wait to be read, further
            passes read them and nothing else, up to so many tokens in all.
        page: tokens on a page.
        tokens: tokens that are kept, of texts that run and of those that may come again; None is twice what `rows`
            texts of a quarter of `length` have, and at least one text.
        queue: texts that may wait.
        flights: steps that are handed to the device before the first one's results are read.
        share: whether texts that begin alike share their beginning; never where layers hand on a state.
        likeliest: how many of the likeliest ids can be asked for.
        logits: slots of a pass whose logits exist at a time, for each of which the head is read once; None is one of
            each row, or as many as take a hundredth of the pages' memory, and 24 MiB of any.
        kv_dtype: what keys and values are kept in; None is what is computed in, `int8` rounds them to 8 bits, with a
            scale for each token and head.
        exact: let no text's bits depend on others; otherwise a pass in which no text has more than a token runs in rows
            of one slot, and the products of a mixture's experts are XLA's where that is not a CPU.
    """

    length: int = 2048
    rows: int = 16
    width: int = 1
    budget: int = 256
    page: int = 16
    tokens: int | None = None
    queue: int = 1024
    flights: int = 2
    share: bool = True
    likeliest: int = 20
    logits: int | None = None
    kv_dtype: str | None = None
    exact: bool = True

    def __post_init__(self):
        sizes = {
            name: value for name, value in vars(self).items() if name not in ("share", "likeliest", "kv_dtype", "exact")
        }
        if wrong := [f"{name}={value}" for name, value in sizes.items() if value is not None and value < 1]:
            raise ValueError(f"an engine cannot have {', '.join(wrong)}: each must be at least 1.")
        if self.kv_dtype not in (None, "int8"):
            raise ValueError(f"an engine cannot keep keys and values in kv_dtype={self.kv_dtype}: give int8, or None.")

    @property
    def passes(self) -> int:
        """How many times a step may run the program."""
        return max(1, self.budget // (self.rows * self.width))

    def pages(self, windows: Sequence[int | None]) -> tuple[int, ...]:
        """Return how many pages each window kind has: behind a window fewer are needed."""
        least = math.ceil(self.length / self.page)
        tokens = max(self.length, self.rows * self.length // 2) if self.tokens is None else self.tokens
        whole = max(1, math.ceil(tokens / self.page))
        of = lambda window: 2 * self.rows * (math.ceil((window + self.width) / self.page) + 2) + least
        return tuple(whole if window is None else min(whole, of(window)) for window in windows)


@dataclass(frozen=True)
class Plan:
    """What follows of the sizes for a model.

    Attributes:
        kinds: which pages each layer's keys are on.
        pages: how many pages each window kind has.
        block: slots whose logits exist at a time.
        words: of 32 bits, that have one for every id.
        most: pages of the longest text.
        dtype: what is computed in.
        platform: of the devices.
        mesh: that the model lies on, if there are several.
        unroll: whether the program has each layer apart. XLA copies what a loop takes out of a stack of layers, and
            reads all weights three times. Parts of a stack that are known beforehand its products read where they are
            on GPUs, and on one CPU arrays that are apart themselves (`zoo.models.decoder.apart`). Of what has 8 bits or
            fewer it would make numbers of all layers at once: these it is left to copy.
        state: the shapes of what stays on the devices, and where they lie.
    """

    kinds: Kinds
    pages: tuple[int, ...]
    block: int
    words: int
    most: int
    dtype: jnp.dtype
    platform: str
    mesh: Mesh | None
    unroll: bool
    state: State

    @classmethod
    def of(cls, model: Any, settings: Settings, dtype: DTypeLike | None) -> "Plan":
        """Return the plan for a model, whose arrays may be mere shapes.

        Raises:
            ValueError: the model lies over an axis that is not `model`.
        """
        config, lies = model.config, jax.tree.leaves(model.embed)[0].sharding
        mesh = lies.mesh if isinstance(lies, NamedSharding) and lies.mesh.size > 1 else None
        if mesh is not None and (other := [f"{name}={size}" for name, size in mesh.shape.items() if name != "model"]):
            raise ValueError(
                f"cannot serve a model that lies over {', '.join(other)}: texts share a step, which all devices "
                "compute. Cut heads and MLPs alone: make_mesh(data=1, model=-1)."
            )
        kinds = Kinds.of(config, settings.length, 1 if mesh is None else mesh.size)
        platform = next(iter(lies.device_set)).platform
        unroll = _unrolls(model, platform, mesh is None)
        dtype = jnp.dtype(model.embed.dtype if dtype is None else dtype)
        pages = settings.pages(kinds.windows)
        by_bits = dtype == jnp.bfloat16 and platform == "cpu" and not IN_PLACE  # see `transforms.bits`
        kept = jnp.uint16 if by_bits else dtype

        def state() -> State:
            of_kinds = zip(kinds.counts(), pages, kinds.heads, kinds.cached, strict=True)
            pool = tuple(
                _store(settings, layers, count, (heads, *cached[1:]), kept, platform == "cpu")
                for layers, count, heads, cached in of_kinds
            )
            states = empty(config, settings.rows, dtype)
            return State((*pool, states) if states else pool, jnp.zeros(settings.rows, jnp.int32))

        shapes = _laid(jax.eval_shape(state), lies, mesh, config.num_heads)
        size = sum(
            math.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize
            for each in jax.tree.leaves(shapes.pool)
        )
        room = max(size // 100, _LEAST)
        block = settings.logits or min(settings.rows, max(1, room // (_WHOLE * 4 * config.vocab_size)))
        return cls(
            kinds, pages, min(block, settings.rows * settings.width), math.ceil(config.vocab_size / 32),
            math.ceil(settings.length / settings.page), dtype, platform, mesh, unroll, shapes,
        )  # fmt: skip

    def empty(self) -> State:
        """Return what stays on the devices, before anything was read."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), self.state)


def _laid(state: State, alone: Sharding, mesh: Mesh | None, num_heads: int) -> State:
    """Return the shapes of a state with where they lie: on a mesh heads of pages apart, all else on every device."""
    cut = mesh is not None and num_heads % mesh.size == 0

    def of_part(part: Any) -> Any:
        heads = cut and isinstance(part, Store)

        def of_leaf(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec(*HEADS, *(None,) * (leaf.ndim - 3)) if heads else PartitionSpec()
            where = alone if mesh is None else NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree.map(of_leaf, part)

    return jax.tree.map(of_part, state, is_leaf=lambda part: isinstance(part, Store))


def _store(
    settings: Settings, layers: int, pages: int, cached: tuple[int, int, int], dtype: DTypeLike, cpu: bool
) -> Store:
    """Return the empty pages of a kind of layers, and one more."""
    heads, parts, width = cached
    page, scale = settings.page, None
    if settings.kv_dtype is not None:
        dtype, scale = jnp.int8, jnp.zeros((layers, pages + 1, heads * page * parts))
    slots = (page * parts, width) if cpu else (page, parts * width)
    return Store(jnp.zeros((layers, pages + 1, heads, *slots), dtype), scale, page=page)


def _unrolls(model: Any, platform: str, alone: bool) -> bool:
    """Return whether the program is to have each layer apart (`Plan.unroll`)."""
    narrow = any(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(model))
    return (platform in ("gpu", "cuda", "rocm") or (platform == "cpu" and alone)) and not narrow
