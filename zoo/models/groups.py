"""Attention of all heads from that of some at a time: queries, keys and values of one group are all that there is.

Dimensions: `B` batch `S` sequence `D` embed `N` query heads `K` kv heads `G` query heads per kv head `H` head size.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from zoo.models import ulysses
from zoo.models.layers import Ops
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
) -> Float[Array, "B S N H"]:
    """Return what queries see, by turns: those of one kv head, or one query head where all share a kv head.

    Where devices exchange heads (`Ops.ulysses`) that is for each of them: of one kv head, or where each has only one of
    those, of one query head.

    A group's queries, keys and values are made in its turn, in the backward pass again. Their gradients are collected
    and led through `project` once, for all heads together: its sums are those of attention that is not cut.

    Args:
        ops: whose `heads` and `tokens` say how functions of some heads, and of tokens, run.
        project: returns queries, keys and values, token by token, of the heads whose weights it is given.
        attention: called as `attention(q, k, v)`, or with `sinks=`.
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

    def part(x, q, k, v, leaves, sinks):
        q, sinks = _joined(q, 2), None if sinks is None else _joined(sinks, 0)
        if apart:
            whole = [
                _joined(leaf, dims[path]) if is_q[path] and dims[path] is not None else leaf
                for (path, _), leaf in zip(paths, leaves, strict=True)
            ]
            made = project(x, jax.tree.unflatten(form, whole))
            q, k, v = (_as_if(value, source) for value, source in zip(made, (q, k, v), strict=True))
        seen = attention(q, k, v) if sinks is None else attention(q, k, v, sinks=sinks)
        return _divided(seen, 2, k.shape[2] * times)

    leaves, axes = [], []
    for path, leaf in paths:
        dim = dims[path]
        leaves.append(_divided(leaf, dim, groups) if is_q[path] and dim is not None else leaf)
        cut = of_q if is_q[path] else of_kv
        axes.append(None if dim is None or cut is None else dim + cut)
    kv = None if of_kv is None else 2
    by_turns = (lambda part, axes, groups: part) if ops.heads is None else ops.heads
    by_turn = by_turns(part, (None, 2 + of_q, kv, kv, axes, None if sinks is None else of_q), count)
    sinks = None if sinks is None else _divided(sinks, 0, groups)
    seen = by_turn(jax.lax.stop_gradient(x), _divided(q, 2, groups), k, v, leaves, sinks)
    return _joined(seen, 2)


def turns(heads: int, kv_heads: int, devices: int = 1) -> tuple[int, bool]:
    """Return in how many turns heads are taken among so many devices, and whether by kv heads: else by query heads."""
    groups = kv_heads * ulysses.repeats(heads, kv_heads, devices)
    by_kv = devices < groups == kv_heads
    return (groups // devices if by_kv else heads // groups), by_kv


def _heads(path: tuple[Any, ...], leaf: Array) -> int | None:
    """Return which dimension of a weight has heads; None is none."""
    return None if getattr(path[-1], "name", None) == "a" else leaf.ndim - 2


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
