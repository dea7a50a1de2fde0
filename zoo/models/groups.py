"""Attention of all heads from that of some at a time: queries, keys and values of one group are all that there is.

Dimensions: `B` batch `S` sequence `D` embed `N` query heads `K` kv heads `G` query heads per kv head `H` head size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transforms.sharding import partitions
from transforms.tiling.mesh.layout import like
from zoo.models import ulysses
from zoo.models.layers import Ops, accumulator
from zoo.quantised import Quantised

Projected = tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]
Project = Callable[[Float[Array, "B S D"], dict[str, Any]], Projected]


def attend(
    ops: Ops,
    project: Project,
    attention: Callable[..., Float[Array, "B S N H"]],
    x: Float[Array, "B S D"],
    weights: dict[str, Any],
    sinks: Float[Array, " N"] | None = None,
    *,
    apart: bool = True,
) -> "Float[Array, 'B S N H'] | Seen":
    """Return what queries see, by turns: those of one kv head, or one query head where all share a kv head.

    Where devices exchange heads (`Ops.ulysses`) that is for each of them: of one kv head, or where each has only one of
    those, of one query head.

    A group's queries, keys and values are made in its turn, in the backward pass again. Their gradients are collected
    and led through `project` once, for all heads together: its sums are those of attention that is not cut. Attention
    that can keep what its backward pass needs (`Ops.keeps`) is not computed again there, but where a checkpoint asks.

    Args:
        ops: whose `heads` and `tokens` say how functions of some heads, and of tokens, run.
        project: returns queries, keys and values, token by token, of the heads whose weights it is given.
        attention: called as `attention(q, k, v)`, or with `sinks=`; with `keep=` and `kept=` where it can.
        x: what is projected.
        weights: what `project` reads of each head, by names that begin with q, k or v. Heads are the last dimension
            but one of every array, but of the A of a matrix of low rank, which has none.
        sinks: of every query head.
        apart: whether the heads of a group can be made without the others; if not, those of all are made at once.
    """
    packed = lambda leaf: isinstance(leaf, Quantised)  # several numbers in a byte: not cut by heads
    apart = apart and not any(map(packed, jax.tree.leaves(weights, is_leaf=packed)))
    project = ops.tokens(project, (1, None))
    q, k, v = project(x, weights)
    devices = ulysses.devices(q) if ops.ulysses else 1  # all of them have heads in every turn
    times = ulysses.repeats(q.shape[2], k.shape[2], devices)
    groups, (count, by_kv) = k.shape[2] * times, turns(q.shape[2], k.shape[2], devices)
    of_q, of_kv = (0, 0) if by_kv else (1, None)  # which of [groups, each] is cut, and of [groups]
    paths, form = jax.tree.flatten_with_path(jax.lax.stop_gradient(weights) if apart else {})
    dims = {path: _heads(path, leaf) for path, leaf in paths}
    is_q = {path: path[0].key[0] == "q" for path, _ in paths}

    def made(x, q, k, v, leaves):
        """Return the queries, keys and values of a turn."""
        if not apart:
            return _joined(q, 2), k, v
        whole = [
            _joined(leaf, dims[path]) if is_q[path] and dims[path] is not None else leaf
            for (path, _), leaf in zip(paths, leaves, strict=True)
        ]
        return project(x, jax.tree.unflatten(form, whole))

    leaves, axes = [], []
    for path, leaf in paths:
        dim = dims[path]
        leaves.append(_divided(leaf, dim, groups) if is_q[path] and dim is not None else leaf)
        cut = of_q if is_q[path] else of_kv
        axes.append(None if dim is None or cut is None else dim + cut)
    kv = None if of_kv is None else 2
    cuts = None, 2 + of_q, kv, kv, axes, None if sinks is None else of_q
    by_turns = lambda part, *more: part if ops.heads is None else ops.heads(part, (*cuts, *more), count)
    args = x, _divided(q, 2, groups), k, v, leaves, None if sinks is None else _divided(sinks, 0, groups)
    turn = _Turn(made, attention, times)
    whole_sequences = ops.ulysses or partitions(q)[1] is None
    if ops.keeps and whole_sequences:
        return Seen(*(_joined(value, 2) for value in _once(turn, by_turns, of_q, args)))
    x, *rest = args
    return _joined(by_turns(turn.seen)(jax.lax.stop_gradient(x), *rest), 2)


class _Turn(NamedTuple):
    """What is done in a turn, given what makes its queries, keys and values; each kv head is there so many times.

    Where query heads are, there are the groups and the heads of each.
    """

    made: Callable[..., Projected]
    attention: Callable[..., Any]
    times: int

    def seen(self, x, q, k, v, leaves, sinks):
        """Return what queries see, as a function of queries, keys and values that need not be there."""
        sources = _joined(q, 2), k, v
        q, k, v = (_as_if(*both) for both in zip(self.made(x, q, k, v, leaves), sources, strict=True))
        return _divided(self.attention(q, k, v, **_with(sinks)), 2, k.shape[2] * self.times)

    def kept(self, x, q, k, v, leaves, sinks):
        """Return what queries see, and the logarithms of their sums `[B groups each S]`."""
        q, k, v = self.made(x, q, k, v, leaves)
        seen, logs = self.attention(q, k, v, **_with(sinks), keep=True)
        return tuple(_divided(value, dim, k.shape[2] * self.times) for value, dim in ((seen, 2), (logs, 1)))

    def again(self, x, q, k, v, leaves, sinks, logs, own):
        """Return the queries with the gradients of what they see, as `seen` has them."""
        sources = _joined(q, 2), k, v
        q, k, v = (_as_if(*both) for both in zip(self.made(x, q, k, v, leaves), sources, strict=True))
        kept = _joined(logs, 1), _joined(own, 1)
        return _divided(self.attention(q, k, v, **_with(sinks), kept=kept), 2, k.shape[2] * self.times)


def _once(turn, by_turns, of_q, args):
    """Return what queries see, turn by turn: the backward pass is told what it needs to know of that.

    That is the logarithms of the queries' sums and how their gradients point to what they see (`own`, Delta in
    https://arxiv.org/abs/2307.08691), which who reads what is seen finds out: it need not be there any more.
    """

    def pull(args, logs, own, given):
        x, q, k, v, leaves, sinks = args
        again = by_turns(turn.again, 1 + of_q, 1 + of_q)
        see = lambda q, k, v, sinks: again(x, q, k, v, leaves, sinks, logs, own)
        return jax.vjp(see, q, k, v, sinks)[1](given)

    see: Any = eqx.filter_closure_convert(by_turns(turn.kept), *args)  # what has gradients of its own encloses none
    seen, logs = (like(made.aval) for made in see.jaxpr.outvars)
    both, static = eqx.partition((see, eqx.filter_closure_convert(pull, args, logs, logs, seen)), eqx.is_array)

    def forward(both, args):
        seen, logs = eqx.combine(both, static)[0](*args)
        return Seen(seen, jnp.zeros_like(jnp.moveaxis(logs, -1, 1))), (both, args, logs)

    def backward(kept, given):
        both, args, logs = kept
        own = jnp.moveaxis(given.own, 1, -1)
        of_q, of_k, of_v, of_sinks = eqx.combine(both, static)[1](args, logs, own, given.seen)
        return None, (None, of_q, of_k, of_v, None, of_sinks)

    run = jax.custom_vjp(lambda both, args: forward(both, args)[0])
    run.defvjp(forward, backward)
    return run(both, args)


class Seen(NamedTuple):
    """What heads see `[B S N H]`, and zeros `[B S N]`, whose gradient is how that of what they see points to it."""

    seen: Array
    own: Array

    def read(self):
        """Return what heads see, to a reader from whose gradient both gradients follow."""
        return _read(*self)


@jax.custom_vjp
def _read(seen, own):
    del own
    return seen


def _read_backward(seen, given):
    wide = accumulator(seen.dtype)
    return given, (given.astype(wide) * seen).sum(-1)


_read.defvjp(lambda seen, own: (seen, seen), _read_backward)


def turns(heads: int, kv_heads: int, devices: int = 1) -> tuple[int, bool]:
    """Return in how many turns heads are taken among so many devices, and whether by kv heads: else by query heads."""
    groups = kv_heads * ulysses.repeats(heads, kv_heads, devices)
    by_kv = devices < groups == kv_heads
    return (groups // devices if by_kv else heads // groups), by_kv


def _heads(path: tuple[Any, ...], leaf: Array) -> int | None:
    """Return which dimension of a weight has heads; None is none."""
    return None if getattr(path[-1], "name", None) == "a" else leaf.ndim - 2


def _with(sinks):
    return {} if sinks is None else {"sinks": _joined(sinks, 0)}


def _divided(x, dim, groups):
    return x.reshape(*x.shape[:dim], groups, -1, *x.shape[dim + 1 :])


def _joined(x, dim):
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


@jax.custom_jvp
def _as_if(value, source):
    """Return a value, of which the derivatives are those of what it was made like: that one need not be kept."""
    del source
    return value


@_as_if.defjvp
def _as_if_jvp(primals, tangents):
    return _as_if(*primals), tangents[1]
