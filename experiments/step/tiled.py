"""The parts of a run that are cut: the head, each MLP, attention, and the batch of the whole loss.

The tokens of a step are its batch of `B` sequences of `S`; a micro-batch is a tile of the batch. Every part equals the
one that is not cut, gradients too, whatever the mask.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx

from experiments import configs
from experiments.step import tiles
from transforms import tile
from transforms.tiling.report.plan import TilePlan
from zoo import Gemma
from zoo.families.mixture import MixtureLike
from zoo.models.experts import experts_by_sequence
from zoo.models.layers import Ops, attention, gated_mlp


def head(config: configs.Resolved, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return an objective `loss(models, hiddens, targets, mask)` as `tiling.n`, `.size` and `.lowmem` cut it.

    It is cut along the tokens of a step [T], or along the sequences of [B, S] and of pairs [P, 2, S].
    """
    if config.tiling.n == "none":
        return loss
    cut = tile(loss, axis=_head_axes(config), size=tiles.head_size(config), has_aux=True, **_head_options(config))
    return lambda models, *args: cut(tuple(map(_read_by_head, models)), *args)


def fewest(config: configs.Resolved, loss: Callable[..., Any], models: tuple, args: tuple[Any, ...]) -> int:
    """Return the number of tiles with which the head keeps within `tiling.budget`; `args` may be abstract.

    Raises:
        ValueError: no number does, or the budget is no number of bytes.
    """
    options = _head_options(config)
    cut = tile(loss, axis=_head_axes(config), n="auto", budget=config.tiling.budget, has_aux=True, **options)
    return cut.plan(tuple(map(_read_by_head, models)), *args).tiles


def plan(config: configs.Resolved, loss: Callable[..., Any], models: tuple, args: tuple[Any, ...]) -> TilePlan:
    """Return how the head is cut and what it takes, tiled and untiled; `args` may be abstract. Nothing is compiled.

    Raises:
        TileError: the loss cannot be cut.
    """
    how = _head_options(config)
    cut = tile(loss, axis=_head_axes(config), size=tiles.head_size(config), has_aux=True, **how)
    return cut.plan(tuple(map(_read_by_head, models)), *args)


def _head_options(config: configs.Resolved) -> dict[str, Any]:
    return {"lowmem": config.tiling.lowmem, "sync": config.tiling.sync}


def _head_axes(config: configs.Resolved) -> tuple[int | None, ...]:
    axis = 0 if tiles.flat(config) else 2 if config.paired else 1
    return None, axis, axis, axis


def _read_by_head(model: Any) -> Any:
    """Return a model without the largest parts that its head does not read: they would have gradients of zeros."""
    untied = not isinstance(model, Gemma) and model.head is not None
    return eqx.tree_at(lambda m: (m.layers, m.embed) if untied else (m.layers,), model, replace_fn=lambda _: None)


def ops(config: configs.Resolved) -> Ops | None:
    """Return how the heavy parts of each layer run: plainly, or as `tiling.mlp` and `tiling.attention` cut them.

    Where the batch is cut, a mixture's tokens are sorted by expert sequence by sequence.
    """
    pieces: dict[str, Any] = {}
    if config.tiling.mlp is not None:
        pieces["mlp"] = functools.partial(_tiled_mlp, config.tiling.mlp)
    if config.tiling.attention is not None:
        pieces["attention"] = functools.partial(_tiled_attention, config.tiling.attention)
    if config.tiling.batch is not None and isinstance(config.model.config, MixtureLike):
        pieces["experts"] = experts_by_sequence
    return Ops(**pieces) if pieces else None


def _tiled_mlp(n, x, gate, up, down, *, activation):
    plain = functools.partial(gated_mlp, activation=activation)
    return tile(plain, axis=(1, None, None, None), n=n)(x, gate, up, down)


def _tiled_attention(n, q, k, v, *, scale, cap=None, window=None, q_segments=None, k_segments=None):
    def plain(q, q_segments, k, v, window, k_segments):
        segments = {"q_segments": q_segments, "k_segments": k_segments}
        return attention(q, k, v, scale=scale, cap=cap, window=window, **segments)

    return tile(plain, axis=(1, 1, None, None, None, None), n=n)(q, q_segments, k, v, window, k_segments)


def batch(config: configs.Resolved, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return `loss(model, frozen, arrays)` a micro-batch at a time, which is gradient accumulation, or as it is."""
    n, sync = config.tiling.batch, config.tiling.sync
    return loss if n is None else tile(loss, axis=(None, None, 0), n=n, sync=sync, has_aux=True)
