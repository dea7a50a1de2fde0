"""Attention of all heads from that of some at a time: queries, keys and values of one group are all that there is.

Dimensions: `B` batch `S` sequence `D` embed `N` query heads `K` kv heads `G` query heads per kv head `H` head size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transforms.layout import like
from transforms.sharding import partitions, reshape, shares
from zoo.models.attention import ulysses
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

    Where devices share or exchange heads (`Ops.ulysses`) that is for each of them: of one kv head, or where each has
    only one of those, of one query head.

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
    devices = ulysses.devices(q) if ops.ulysses else shares(jax.typeof(q), 2)  # all of them have heads in every turn
    times = ulysses.repeats(q.shape[2], k.shape[2], devices)
    groups, (count, by_kv) = k.shape[2] * times, turns(q.shape[2], k.shape[2], devices)
    of_q, of_kv = (0, 0) if by_kv else (1, None)  # which of [groups, each] is cut, and of [groups]
    of_heads = _OfHeads(jax.lax.stop_gradient(weights) if apart else {})
    made = lambda x, q, k, v, own: project(x, of_heads.joined(own)) if apart else (_joined(q, 2), k, v)
    leaves, axes = of_heads.divided(groups, of_q, of_kv)
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


class _OfHeads:
    """Weights of heads, which those of queries have by groups while they are cut."""

    def __init__(self, weights: dict[str, Any]):
        paths, self._form = jax.tree.flatten_with_path(weights)
        self._leaves = [leaf for _, leaf in paths]
        self._is_q = [path[0].key[0] == "q" for path, _ in paths]
        low = [getattr(path[-1], "name", None) == "a" for path, _ in paths]  # it has no heads
        self._dims = [None if a else leaf.ndim - 2 for leaf, a in zip(self._leaves, low, strict=True)]

    def divided(self, groups: int, of_q: int, of_kv: int | None) -> tuple[list[Array], list[int | None]]:
        """Return the arrays, and which dimension of each is cut where `of_q` or `of_kv` of its heads' is."""
        cuts = [of_q if is_q else of_kv for is_q in self._is_q]
        axes = [None if dim is None or cut is None else dim + cut for dim, cut in zip(self._dims, cuts, strict=True)]
        return self._of_queries(lambda leaf, dim: _divided(leaf, dim, groups), self._leaves), axes

    def joined(self, leaves: list[Array]) -> dict[str, Any]:
        """Return the weights of some groups' heads from their arrays."""
        return jax.tree.unflatten(self._form, self._of_queries(_joined, leaves))

    def _of_queries(self, change: Callable[[Array, int], Array], leaves: list[Array]) -> list[Array]:
        every = zip(leaves, self._dims, self._is_q, strict=True)
        return [change(leaf, dim) if is_q and dim is not None else leaf for leaf, dim, is_q in every]


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


def _with(sinks):
    return {} if sinks is None else {"sinks": _joined(sinks, 0)}


def _divided(x, dim, groups):
    return reshape(x, *x.shape[:dim], groups, -1, *x.shape[dim + 1 :])


def _joined(x, dim):
    return reshape(x, *x.shape[:dim], -1, *x.shape[dim + 2 :])


@jax.custom_jvp
def _as_if(value, source):
    """Return a value, of which the derivatives are those of what it was made like: that one need not be kept."""
    del source
    return value


@_as_if.defjvp
def _as_if_jvp(primals, tangents):
    return _as_if(*primals), tangents[1]
