"""The grammar of random programs: steps over a growing pool of values, each of some kind.

Kinds are `N D` per-token vectors, `N` per-token scalars, `D` and scalar statistics over the tokens. Steps that reduce
over the cut axis and steps that use the result per token alternate freely, which is what makes staging hard.
Dimension key: `N` tokens, `D` embed, `V` vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

KEY = jax.random.key(11)
D, V = 3, 5
WIDE, NARROW, SCORE, STAT, SCALAR = "ND", "NV", "N", "D", ""  # kinds of value by their shape
Step = tuple[str, tuple[str, ...], str]

# name: (kinds of operand, kind of result, function of the operands and (w [D V], y [N], m [N]))
STEPS: dict[str, tuple[tuple[str, ...], str, Callable]] = {
    # per token
    "tanh": ((WIDE,), WIDE, lambda x, c: jnp.tanh(x)),
    "square": ((SCORE,), SCORE, lambda x, c: x**2 / (1 + x**2)),
    "sigmoid": ((NARROW,), NARROW, lambda x, c: jax.nn.sigmoid(x)),
    "gelu": ((WIDE,), WIDE, lambda x, c: jax.nn.gelu(x)),
    "mask": ((WIDE,), WIDE, lambda x, c: jnp.where(c.m[:, None], x, 0.0)),
    "mask score": ((SCORE,), SCORE, lambda x, c: x * c.m),
    "position": ((SCORE,), SCORE, lambda x, c: x * (1 + jnp.arange(x.shape[0])) / x.shape[0]),
    "add": ((WIDE, WIDE), WIDE, lambda x, y, c: x + y),
    "multiply": ((SCORE, SCORE), SCORE, lambda x, y, c: jnp.tanh(x * y)),
    "scale rows": ((WIDE, SCORE), WIDE, lambda x, s, c: x * s[:, None]),
    "stop gradient": ((WIDE,), WIDE, lambda x, c: jax.lax.stop_gradient(x) * x),
    # along the dims that are not cut
    "head": ((WIDE,), NARROW, lambda x, c: x @ c.w),
    "back": ((NARROW,), WIDE, lambda x, c: jnp.einsum("nv,dv->nd", x, c.w)),
    "log softmax": ((NARROW,), NARROW, lambda x, c: jax.nn.log_softmax(x)),
    "softmax": ((NARROW,), NARROW, lambda x, c: jax.nn.softmax(x, axis=1)),
    "pick": ((NARROW,), SCORE, lambda x, c: jnp.take_along_axis(x, c.y[:, None], 1)[:, 0]),
    "index": ((NARROW,), SCORE, lambda x, c: x[jnp.arange(x.shape[0]), c.y]),
    "one hot": ((NARROW,), SCORE, lambda x, c: (x * jax.nn.one_hot(c.y, V)).sum(-1)),
    "embed": ((NARROW,), WIDE, lambda x, c: c.w.T[c.y] * x[:, :1]),
    "logsumexp": ((NARROW,), SCORE, lambda x, c: jax.nn.logsumexp(x, axis=-1)),
    "row max": ((WIDE,), SCORE, lambda x, c: x.max(-1)),
    "row norm": ((WIDE,), SCORE, lambda x, c: jnp.sqrt((x**2).sum(-1) + 0.1)),
    "rms norm": ((WIDE,), WIDE, lambda x, c: x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 0.1)),
    "sort row": ((NARROW,), NARROW, lambda x, c: jnp.sort(x, axis=-1)),
    "cumsum row": ((NARROW,), NARROW, lambda x, c: jnp.cumsum(x, axis=-1)),
    "flip pad": ((WIDE,), WIDE, lambda x, c: jnp.pad(x[:, ::-1], ((0, 0), (1, 0)))[:, :-1]),
    "transpose": ((WIDE,), WIDE, lambda x, c: (x.T * jnp.arange(1.0, D + 1)[:, None]).T),
    "reshape": ((WIDE,), WIDE, lambda x, c: jnp.sin(x.reshape(-1)).reshape(-1, D)),
    "checkpoint": ((WIDE,), NARROW, lambda x, c: jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, c.w)),
    "jit": ((WIDE,), WIDE, lambda x, c: jax.jit(lambda x: x * jnp.cos(x))(x)),
    "vmap": ((WIDE,), SCORE, lambda x, c: jax.vmap(lambda x: jnp.vdot(x, x) / (1 + jnp.abs(x).sum()))(x)),
    # over the cut axis
    "sum": ((SCORE,), SCALAR, lambda x, c: x.sum() / 4),
    "mean": ((SCORE,), SCALAR, lambda x, c: x.mean()),
    "masked mean": ((SCORE,), SCALAR, lambda x, c: (x * c.m).sum() / jnp.maximum(c.m.sum(), 1)),
    "max": ((SCORE,), SCALAR, lambda x, c: x.max()),
    "soft max": ((SCORE,), SCALAR, lambda x, c: jax.nn.logsumexp(x)),
    "std": ((SCORE,), SCALAR, lambda x, c: jnp.sqrt(x.var() + 0.1)),
    "median": ((SCORE,), SCALAR, lambda x, c: jnp.median(x)),
    "column mean": ((WIDE,), STAT, lambda x, c: x.mean(axis=0)),
    "column min": ((WIDE,), STAT, lambda x, c: x.min(axis=0)),
    "pool": ((WIDE, SCORE), STAT, lambda x, s, c: jnp.einsum("nd,n->d", x, s) / x.shape[0]),
    "covariance": ((WIDE, WIDE), STAT, lambda x, y, c: jnp.tanh(x.T @ y / x.shape[0]).sum(0)),
    "segment": ((SCORE,), STAT, lambda x, c: jax.ops.segment_sum(x, c.y % D, num_segments=D) / x.shape[0]),
    "softmax over tokens": ((SCORE,), SCORE, lambda x, c: jax.nn.softmax(x)),
    "sort tokens": ((SCORE,), SCORE, lambda x, c: jnp.sort(x)),
    "sort vectors": ((WIDE,), WIDE, lambda x, c: jnp.sort(x, axis=0)),
    "cumsum tokens": ((SCORE,), SCORE, lambda x, c: jnp.cumsum(x) / x.shape[0]),
    "shift tokens": ((WIDE,), WIDE, lambda x, c: jnp.roll(x, 1, axis=0)),
    "all pairs": ((WIDE, WIDE), SCORE, lambda x, y, c: jnp.tanh(x @ y.T).mean(1)),
    # from statistics back to tokens
    "centre": ((WIDE, STAT), WIDE, lambda x, s, c: x - s),
    "project": ((WIDE, STAT), SCORE, lambda x, s, c: x @ s),
    "shift by": ((SCORE, SCALAR), SCORE, lambda x, s, c: x - s),
    "divide by": ((WIDE, SCALAR), WIDE, lambda x, s, c: x / (1 + s**2)),
    "above": ((SCORE, SCALAR), SCORE, lambda x, s, c: jnp.where(x > s, x, 0.1 * x)),
    # among statistics
    "stat sum": ((STAT,), SCALAR, lambda s, c: jnp.sin(s).sum()),
    "stat mix": ((STAT, SCALAR), STAT, lambda s, t, c: s * jnp.tanh(t) + s[::-1]),
    "scalar mix": ((SCALAR, SCALAR), SCALAR, lambda s, t, c: jnp.log1p(s**2) + s * jnp.tanh(t)),
    "weights": ((SCALAR,), SCALAR, lambda s, c: s * jnp.exp(-(c.w**2).mean())),
    # slices, joins and lookups along the cut axis
    "last token": ((WIDE,), STAT, lambda x, c: x[-1]),
    "first tokens": ((WIDE,), STAT, lambda x, c: x[:2].mean(0)),
    "every other": ((SCORE,), SCALAR, lambda x, c: x[::2].sum() / 4),
    "token at": ((WIDE, SCALAR), STAT, lambda x, s, c: x[(jnp.abs(s) * 7).astype(int) % x.shape[0]]),
    "some tokens": ((WIDE,), STAT, lambda x, c: x[jnp.array([1, 0, -1])].sum(0)),
    "write token": ((WIDE, STAT), WIDE, lambda x, s, c: x.at[1].set(s)),
    "add to tokens": ((SCORE,), SCORE, lambda x, c: x.at[jnp.array([0, 1, 0])].add(0.5)),
    "pad tokens": ((WIDE,), WIDE, lambda x, c: jnp.pad(x[1:], ((0, 1), (0, 0)), constant_values=0.5)),
    "join tokens": ((WIDE, WIDE), WIDE, lambda x, y, c: jnp.concatenate([x[1:], y[:1]])),
    "difference": ((SCORE,), SCORE, lambda x, c: jnp.diff(x, prepend=0.0)),
    "reverse tokens": ((WIDE,), WIDE, lambda x, c: x[::-1]),
    "neighbours": ((WIDE,), STAT, lambda x, c: (x[1:] * x[:-1]).sum(0) / 4),
    "permute tokens": ((WIDE, SCORE), WIDE, lambda x, s, c: x[jnp.argsort(s)]),
    "take along tokens": ((WIDE,), WIDE, lambda x, c: jnp.take_along_axis(x, jnp.argsort(x, 0), 0)),
    "take along row": ((NARROW,), NARROW, lambda x, c: jnp.take_along_axis(x, jnp.argsort(-x, 1), 1)),
    "embed position": ((WIDE,), WIDE, lambda x, c: x + jnp.sin(jnp.arange(x.shape[0]))[:, None]),
    # the best, and what accumulates
    "argmax row": ((NARROW,), SCORE, lambda x, c: x.argmax(1) / V),
    "argmax tokens": ((WIDE,), STAT, lambda x, c: x.argmax(0) / x.shape[0]),
    "argmin tokens": ((SCORE,), SCALAR, lambda x, c: x.argmin() / x.shape[0]),
    "best tokens": ((WIDE, SCORE), STAT, lambda x, s, c: x[jax.lax.top_k(s, 2)[1]].sum(0)),
    "top scores": ((SCORE,), SCALAR, lambda x, c: jax.lax.top_k(x, 2)[0].sum()),
    "top of row": ((NARROW,), SCORE, lambda x, c: jax.lax.top_k(x, 2)[0].sum(1)),
    "cumsum vectors": ((WIDE,), WIDE, lambda x, c: jnp.cumsum(x, 0) / x.shape[0]),
    "cummax tokens": ((SCORE,), SCORE, lambda x, c: jax.lax.cummax(x)),
    "cumsum backwards": ((SCORE,), SCORE, lambda x, c: jax.lax.cumsum(x, reverse=True) / x.shape[0]),
    "cumlogsumexp": ((SCORE,), SCORE, lambda x, c: jax.lax.cumlogsumexp(x)),
    # normalised along the cut axis, attention, products
    "recurrence": ((WIDE,), WIDE, lambda x, c: _recurrence(x)),
    "recurrence backwards": ((WIDE,), WIDE, lambda x, c: _recurrence(x, reverse=True)),
    "causal convolution": ((WIDE,), WIDE, lambda x, c: x - 0.5 * jnp.pad(x, ((2, 0), (0, 0)))[: x.shape[0]]),
    "moving average": ((SCORE,), SCORE, lambda x, c: jnp.convolve(x, jnp.ones(3) / 3, mode="same")),
    "label of columns": ((WIDE,), STAT, lambda x, c: jax.nn.log_softmax(x, 0)[jnp.arange(D) % 2, jnp.arange(D)] / 4),
    "weighted columns": (
        (WIDE, SCORE),
        STAT,
        lambda x, s, c: (jax.nn.log_softmax(x, 0) * jnp.tanh(s)[:, None]).mean(0),
    ),
    "softmax of columns": ((WIDE,), WIDE, lambda x, c: jax.nn.softmax(x, axis=0)),
    "log softmax of columns": ((WIDE,), WIDE, lambda x, c: jax.nn.log_softmax(x, axis=0) / 4),
    "logsumexp of columns": ((WIDE,), STAT, lambda x, c: jax.nn.logsumexp(x, axis=0)),
    "masked softmax": ((SCORE,), SCORE, lambda x, c: jax.nn.softmax(jnp.where(c.some, x, -jnp.inf))),
    "pooled attention": ((WIDE, STAT), STAT, lambda x, s, c: jax.nn.softmax(x @ s) @ x),
    "attention": ((WIDE, WIDE), WIDE, lambda x, y, c: jax.nn.softmax(x @ y.T / 2) @ y),
    "causal attention": ((WIDE,), WIDE, lambda x, c: jax.nn.softmax(jnp.where(causal(x), x @ x.T, -jnp.inf)) @ x),
    "gram": ((WIDE, WIDE), WIDE, lambda x, y, c: x @ (y.T @ x) / x.shape[0]),
    "low rank": ((WIDE,), WIDE, lambda x, c: jnp.tanh(x @ (c.w @ c.w.T))),
    "batch norm": ((WIDE,), WIDE, lambda x, c: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.1)),
    # random bits, windows, solves, control flow
    "dropout": ((WIDE,), WIDE, lambda x, c: x * jax.random.bernoulli(KEY, 0.7, x.shape)),
    "noise": ((SCORE,), SCORE, lambda x, c: x + jax.random.normal(KEY, x.shape, x.dtype)),
    "gumbel": ((NARROW,), SCORE, lambda x, c: jax.random.categorical(KEY, x) / V),
    "pool row": ((WIDE,), WIDE, lambda x, c: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2), (1, 1), "SAME")),
    "fourier row": ((WIDE,), WIDE, lambda x, c: jnp.fft.fft(x).real / 2),
    "solve": (
        (WIDE,),
        WIDE,
        lambda x, c: jnp.linalg.solve(2 * jnp.eye(D) + jnp.tanh(outer(x, x)), x[..., None])[..., 0],
    ),
    "scan row": ((WIDE,), SCORE, lambda x, c: jax.lax.scan(lambda s, r: (jnp.tanh(s + r), s), x[:, 0], x.T)[0]),
    "choose": ((WIDE, SCALAR), WIDE, lambda x, s, c: jax.lax.cond(s > 0, jnp.tanh, lambda x: x / 2, x)),
    "loop": ((SCORE,), SCORE, lambda x, c: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + 0.1 * i, x)),
}


def _recurrence(x, reverse=False):
    """A state of all pairs of features, larger than a row."""

    def step(state, row):
        state = 0.5 * state + row[:, None] * row / 4
        return state, jnp.tanh(row @ state)

    return jax.lax.scan(step, jnp.zeros((D, D), x.dtype), x, reverse=reverse)[1]


def causal(x):
    """Which tokens each token sees."""
    return jnp.tri(x.shape[0], dtype=bool)


def outer(x, y):
    return x[:, :, None] * y[:, None, :]


class Context:
    """What every step may read besides its operands."""

    def __init__(self, w, y, m):
        self.w, self.y, self.m = w, y, m
        self.some = m | (jnp.arange(m.shape[0]) == 0)  # never none


@st.composite
def programs(draw) -> tuple[list[tuple[str, tuple[int, ...]]], list[int]]:
    """Return steps as (name, positions of the operands in the pool), and the positions of the outputs."""
    kinds = [WIDE, SCORE]
    steps = []
    for _ in range(draw(st.integers(2, 6))):
        possible = sorted(name for name, (operands, _, _) in STEPS.items() if set(operands) <= set(kinds))
        name = draw(st.sampled_from(possible))
        # recent values are likelier, so that programs are deep rather than wide
        where = {kind: [i for i, k in enumerate(kinds) if k == kind][-3:] for kind in set(kinds)}
        steps.append((name, tuple(draw(st.sampled_from(where[kind])) for kind in STEPS[name][0])))
        kinds.append(STEPS[name][1])
    last = len(kinds) - 1
    return steps, sorted({last, *draw(st.lists(st.integers(2, last), max_size=2))})


def run_program(steps: list, outputs: list[int], total: bool) -> Callable:
    """Return the user function of a program; its outputs as they are, or all in one scalar."""

    def function(w, x, s, y, m):
        pool, context = [x, s], Context(w, y, m)
        for name, operands in steps:
            pool.append(STEPS[name][2](*(pool[i] for i in operands), context))
        results = [pool[i] for i in outputs]
        return sum(jnp.sum(jnp.sin(r)) for r in results) if total else results

    return function


def arguments(length: int, seed: int) -> tuple:
    rng = np.random.default_rng(seed)
    w, x, s = rng.standard_normal((D, V)), rng.standard_normal((length, D)), rng.standard_normal(length)
    return w, x, s, rng.integers(V, size=length, dtype=np.int32), rng.random(length) < 0.7
