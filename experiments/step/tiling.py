"""The parts of a run that are cut: the head, each MLP, attention, and the batch of the whole loss.

The tokens of a step are its batch of `B` sequences of `S`; a micro-batch is a tile of the batch. Every part equals the
one that is not cut, gradients too, whatever the mask.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from experiments import configs
from transforms import TileError, tile
from transforms.sharding import explicit, partitions, shares
from zoo import kernels
from zoo.families.mixture import MixtureLike
from zoo.kernels.attention import Asked
from zoo.models.attention import groups
from zoo.models.layers import Ops, gated_mlp
from zoo.models.mixtures.experts import experts


def head(loss: Callable[..., Any], tiling: configs.Tiling, how: configs.HeadTiling) -> Callable[..., Any]:
    """Return an objective `loss(models, hiddens, targets, mask)` as `tiling.n`, `.size` and `.lowmem` cut it.

    It is cut along the tokens of a step [T], or along the sequences of [B, S] and of pairs [P, 2, S].
    """
    if tiling.n == "none":
        return loss

    def cut(models, hiddens, targets, mask):
        read = tuple(map(_read_by_head, models))
        try:
            return _cut(loss, tiling, targets.ndim - 1, size=how.size)(read, hiddens, targets, mask)
        except TileError as error:
            told = re.search(r'pass gather="(\w+)"', str(error))
            other = f"tiling.gather={told[1]}, or " if told and told[1] != tiling.gather else ""
            remedy = f"  In a run: {other}tiling.n=none, which leaves the head and its loss uncut."
            raise TileError(f"{error}\n{remedy}") from None

    return cut


def fewest(loss: Callable[..., Any], tiling: configs.Tiling, models: tuple, args: tuple[Any, ...]) -> int:
    """Return the number of tiles with which the head keeps within `tiling.budget`; `args` may be abstract.

    Raises:
        ValueError: no number does, or the budget is no number of bytes.
    """
    budget = configs.chosen(tiling.budget)
    cut = _cut(loss, tiling, args[1].ndim - 1, n="auto", budget=int(budget) if budget.isdecimal() else budget)
    return cut.plan(tuple(map(_read_by_head, models)), *args).tiles


def head_bytes(
    loss: Callable[..., Any], tiling: configs.Tiling, how: configs.HeadTiling, models: tuple, args: tuple[Any, ...]
) -> tuple[int, int]:
    """Return the temporary memory that the head's loss and gradients take at most, and untiled: `tile`'s estimates.

    `args` may be abstract, and nothing is compiled. Zero where the objective cannot be cut, and so cannot be told apart
    from the rest.
    """
    cut = _cut(loss, tiling, args[1].ndim - 1, size=how.size)
    try:
        found = cut.plan(tuple(map(_read_by_head, models)), *args).gradient
    except TileError:
        return 0, 0
    return (0, 0) if found is None else (found.temp, found.untiled_temp)


def _cut(loss: Callable[..., Any], tiling: configs.Tiling, axis: int, **how: Any) -> Any:
    """Return an objective cut along the last axis of its targets: tokens, or the sequences of a batch or of pairs."""
    axes = None, axis, axis, axis
    how |= {"lowmem": tiling.lowmem, "sync": tiling.sync, "gather": tiling.gather}
    return tile(loss, axis=axes, has_aux=True, **how)


def _read_by_head(model: Any) -> Any:
    """Return a model without the largest parts that its head does not read: they would have gradients of zeros."""
    unread = [*model.stacks] + ["embed"] * (getattr(model, "head", None) is not None)
    return eqx.tree_at(lambda m: [getattr(m, name) for name in unread], model, replace_fn=lambda _: None)


def ops(config: configs.Resolved, model: Any) -> Ops | None:
    """Return how the heavy parts of each layer run: plainly, or as `attention` and `tiling` say.

    Where the batch is cut, a mixture's tokens are sorted by expert sequence by sequence. A model beside the one that
    learns has plain attention where its own cannot be what the run's is, and where it alone is a mixture, the products
    that suit the platform.
    """
    kernel, pieces = kernels.attention.KERNELS[config.attention], slices(config.tiling, model)
    if config.mesh.exchanges:
        pieces["ulysses"] = True
    if kernel.name != "plain" and kernel.refusal(asked(config, model)) is None:
        pieces |= kernel.ops(config.tiling.attention)
    if isinstance(model, MixtureLike):
        platform = config.hardware.platform.value
        name = kernels.experts.choose(platform)[0] if config.experts == "auto" else config.experts
        chosen = kernels.experts.KERNELS[name]
        how = {"product": chosen.product, "typed": chosen.typed}
        pieces["experts"] = functools.partial(pieces.get("experts", experts), **how)
    return Ops(**pieces) if pieces else None


def slices(tiling: configs.Tiling, model: Any) -> dict[str, Any]:
    """Return the fields of `Ops` by which all but attention itself is cut."""
    pieces: dict[str, Any] = {}
    if tiling.mlp is not None:
        pieces["mlp"] = functools.partial(_tiled_mlp, tiling.mlp)
    if tiling.heads:
        pieces["heads"] = lambda part, axes, groups: tile(part, axis=axes, n=groups, sync=tiling.sync)
    if tiling.tokens is not None:
        pieces["tokens"] = functools.partial(_by_tokens, tiling)
    if isinstance(model, MixtureLike) and (tiling.batch is not None or tiling.tokens is not None):
        cut = {"by_sequence": True} if tiling.tokens is None else {"at_once": tiling.tokens}
        pieces["experts"] = functools.partial(experts, **cut)
    return pieces


def turns(config: configs.Run) -> int:
    """Return in how many turns `tiling.heads` takes a model's heads: of layers that differ, the fewest."""
    model, mesh = config.model.config, config.mesh
    devices = mesh.model * (mesh.context if mesh.exchanges else 1)
    devices = 1 if model.num_heads % devices else devices  # then each has all heads
    return min(groups.turns(model.num_heads, kv_heads, devices)[0] for kv_heads, _, _ in {*model.layer_heads})


def asked(config: configs.Run, model: Any) -> Asked:
    """Return what a model asks of attention in a run whose platform, lengths and mesh are known."""
    return Asked.of(
        model,
        platform=config.hardware.platform.value,
        dtype=configs.chosen(config.hardware.compute_dtype).value,
        length=configs.chosen(config.seq_len),
        packed=config.data.packed,
        spread=1 if config.mesh.exchanges else config.mesh.context,
    )


def _by_tokens(tiling, part, axes):
    def in_order(*args):
        return part(*(_in_order(arg) if axis == 1 else arg for arg, axis in zip(args, axes, strict=True)))

    def cut(x, *others):
        return tile(in_order, axis=axes, size=_tokens_of_a_row(tiling, x), sync=tiling.sync)(x, *others)

    return cut


def _tokens_of_a_row(tiling, x):
    """Return how many tokens of each sequence are computed at a time."""
    return max(1, tiling.tokens * shares(jax.typeof(x), 0) * shares(jax.typeof(x), 1) // x.shape[0])


def _in_order(x):
    """Return activations whose memory is in the order of their dimensions, and so is that of their gradients.

    XLA would lay the gradients of all tokens out as one product of a tile likes it best, and then copy what they meet.
    """
    ordered = lambda x: with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
    if not explicit():
        return ordered(x)
    lies = PartitionSpec(*partitions(x))
    return jax.shard_map(ordered, in_specs=lies, out_specs=lies)(x)  # XLA gathers what is constrained on a mesh


def _tiled_mlp(n, x, gate, up, down, *, activation, biases=None):
    def plain(x, gate, up, down, biases):
        return gated_mlp(x, gate, up, down, activation=activation, biases=biases)

    return tile(plain, axis=(1, None, None, None, None), n=n)(x, gate, up, down, biases)


def batch(loss: Callable[..., Any], tiling: configs.Tiling) -> Callable[..., Any]:
    """Return `loss(model, frozen, arrays)` a micro-batch at a time, which is gradient accumulation, or as it is."""
    n, sync = tiling.batch, tiling.sync
    return loss if n is None else tile(loss, axis=(None, None, 0), n=n, sync=sync, has_aux=True)


def describe(config: configs.Resolved) -> list[tuple[str, str]]:
    """Return (part, how it is cut) for each part that is, in words; more tiles than there are steps are as many."""
    tiling, how, seq = config.tiling, config.head, config.seq_len
    parts = []
    asked = lambda n, count: f", not {n}: there is no more to cut" if isinstance(n, int) and n > count else ""
    if tiling.batch is not None:
        count = -(-config.batch_size // how.rows)
        most = asked(tiling.batch, config.batch_size // 2 if config.paired else config.batch_size)
        parts.append(("batch", f"{count} micro-batches of {how.rows} x {seq:,} tokens{most}"))
    if tiling.n != "none":
        vocabulary = "; also vocabulary" if tiling.lowmem else ""
        most = asked(tiling.n, how.length)
        parts.append(("head", f"{how.tiles} tiles of {how.tokens:,} tokens{vocabulary}{most}"))
    if tiling.heads:
        parts.append(("heads", f"{turns(config)} groups, one at a time"))
    if tiling.tokens is not None:
        length = min(seq, max(1, tiling.tokens * config.mesh.sharing_tokens // how.rows))
        parts.append(("each layer", f"{-(-seq // length)} tiles of {how.rows} x {length:,} tokens"))
    if tiling.mlp is not None:
        length = -(-seq // tiling.mlp)
        parts.append(
            ("each MLP", f"{-(-seq // length)} tiles of {how.rows} x {length:,} tokens{asked(tiling.mlp, seq)}")
        )
    if tiling.attention is not None:
        whole = config.mesh.context == 1 or config.mesh.exchanges  # then keys are cut, and tiles are even
        length = -(-seq // (tiling.attention + tiling.attention % 2 if whole else tiling.attention))
        what = f"queries{', and of keys' if whole else ''}{asked(tiling.attention, seq)}"
        parts.append(("attention", f"{-(-seq // length)} tiles of {how.rows} x {length:,} {what}"))
    return parts
