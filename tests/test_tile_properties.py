"""Random programs: whatever the composition, the tiled function equals the untiled one or is refused, never wrong.

A program is a list of steps over a growing pool of values, each of some kind: `N D` per-token vectors, `N` per-token
scalars, `D` and scalar statistics over the tokens. Steps that reduce over the cut axis and steps that use the result
per token alternate freely, which is what makes staging hard. Dimension key: `N` tokens, `D` embed, `V` vocabulary.
"""

import os
from collections.abc import Callable

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.helpers import assert_tiles

hypothesis.settings.register_profile(
    "tile", max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
hypothesis.settings.register_profile(
    "tile-long", max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
PROFILE = hypothesis.settings.get_profile(os.environ.get("TILE_PROFILE", "tile"))

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
}


class Context:
    """What every step may read besides its operands."""

    def __init__(self, w, y, m):
        self.w, self.y, self.m = w, y, m


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


@PROFILE
@given(
    program=programs(),
    length=st.integers(2, 13),
    tiles=st.integers(1, 13),
    total=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_programs_equal_untiled_or_are_refused(program, length, tiles, total, seed):
    with jax.enable_x64(True):
        function = run_program(*program, total)
        assert_tiles(
            function,
            (None, 0, 0, 0, 0),
            min(tiles, length),
            arguments(length, seed),
            dtype=jnp.float64,
            may_refuse=True,
            fast=True,
            floor=1.0,
        )


@pytest.mark.parametrize("name", sorted(STEPS))
def test_each_step_alone_equals_untiled_or_is_refused(name):
    operands, _, apply = STEPS[name]

    def function(w, x, s, y, m):
        pool = {WIDE: x, NARROW: x @ w, SCORE: s, STAT: w.sum(1), SCALAR: w.sum()}
        return apply(*(pool[kind] for kind in operands), Context(w, y, m))

    with jax.enable_x64(True):
        assert_tiles(
            function,
            (None, 0, 0, 0, 0),
            (1, 3, 4),
            arguments(11, 0),
            dtype=jnp.float64,
            may_refuse=True,
            floor=1.0,
            fast=True,
        )
