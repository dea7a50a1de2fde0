"""Recurrences whose state is larger than a row: their gradients run backwards, tile by tile, from stored states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests import quick
from transforms import TileError, tile

pytestmark = pytest.mark.usefixtures("float64")


def linear_attention(q, k, v):
    def step(state, row):
        q, k, v = row
        state = state + k[:, None] * v[None]
        return state, q @ state

    return lax.scan(step, jnp.zeros((3, 3)), (q, k, v))[1]


def gated(q, k, v):
    def step(state, row):
        q, k, v = row
        state = jax.nn.sigmoid(q)[:, None] * state + k[:, None] * v[None]
        return state, q @ state

    state, out = lax.scan(step, jnp.eye(3), (q, k, v))
    return out, state


def delta(w, k, v):
    def step(state, row):
        k, v = row
        state = state + 0.3 * jnp.outer(v - state @ k, k)
        return state, state @ k

    return lax.scan(step, w, (jnp.tanh(k @ w), v))[1]


def mamba(w, x):
    dt = jax.nn.softplus(x @ w)

    def step(state, row):
        decay, grow, read = row
        state = decay * state + grow
        return state, state @ read

    decay = jnp.exp(-dt[:, :, None] * jnp.abs(w))
    return lax.scan(step, jnp.zeros((3, 3)), (decay, dt[:, :, None] * x[:, None], x))[1] + x


def markov(w, e):
    table = jax.nn.log_softmax(w)

    def step(a, x):
        a = jax.nn.logsumexp(a[:, None] + table, 0) + x
        return a, a

    last, all_of_them = lax.scan(step, jnp.zeros(3), jax.nn.log_softmax(e))
    return jax.nn.logsumexp(last), all_of_them


def masked_field(w, e, m):
    def step(a, row):
        x, on = row
        return jnp.where(on > 0, jax.nn.logsumexp(a[:, None] + w, 0) + x, a), None

    return jax.nn.logsumexp(lax.scan(step, jnp.zeros(3), (e, m))[0]) - (e[:, 0] * (m > 0)).sum()


def from_the_second_row(w, e):
    def step(carry, x):
        a, total = carry
        a = jax.nn.logsumexp(a[:, None] + w, 0) + x
        return (a, total + jnp.sin(x) @ w), a.max()

    (a, total), most = lax.scan(step, (e[0], jnp.ones(3)), e[1:])
    return jax.nn.logsumexp(a) + total.sum() + most.mean()


def backwards(x):
    def step(state, row):
        state = 0.9 * state + jnp.outer(row, jnp.sin(row))
        return state, (row @ state, state)

    y, states = lax.scan(step, jnp.ones((3, 3)), jnp.tanh(x), reverse=True)[1]
    return y + states.max((1, 2))[:, None]


def both_ways(x):
    def step(state, row):
        state = 0.9 * state + jnp.outer(row, jnp.sin(row))
        return state, row @ state

    forward = lax.scan(step, jnp.zeros((3, 3)), x)[1]
    return forward + lax.scan(step, jnp.ones((3, 3)), jnp.tanh(x), reverse=True)[1]


def one_after_the_other(w, x):
    @jax.checkpoint
    def block(x, w):
        @jax.checkpoint
        def step(state, row):
            state = jnp.tanh(0.9 * state + jnp.outer(row @ w, row))
            return state, row @ state

        return lax.scan(step, jnp.eye(3), jnp.tanh(x @ w))[1]

    return block(block(x, w) + x, w.T)


def several_states(w, x):
    def step(states, row):
        s, count, last, total = states
        count = count + (row[0] > 0)
        s = jnp.where(row[0] > -0.5, 0.8 * s + jnp.outer(row, row @ w) * last.sum(), s)
        return (s, count, jnp.tanh(row + count / 10), total + jnp.sin(row @ w)), (row @ s, count)

    (s, count, last, total), (y, _) = lax.scan(step, (jnp.ones((3, 3)), 0, jnp.ones(3), jnp.ones(3)), x)
    return y, s, last, total * count


X, Y, Z = np.random.default_rng(0).normal(size=(3, 25, 3))
W = np.random.default_rng(1).normal(size=(3, 3))
ROWS = (X, Y, Z)
CASES = {
    "linear attention": (linear_attention, 0, ROWS),
    "gated linear attention": (gated, 0, ROWS),
    "delta rule": (delta, (None, 0, 0), (W, *ROWS[:2])),
    "selective state space": (mamba, (None, 0), (W, X)),
    "hidden Markov model": (markov, (None, 0), (W, X)),
    "conditional random field": (masked_field, (None, 0, 0), (W, X, X[:, 1])),
    "from the second row": (from_the_second_row, (None, 0), (W, X)),
    "backwards": (backwards, 0, (X,)),
    "both ways": (both_ways, 0, (X,)),
    "checkpointed, one after the other": (one_after_the_other, (None, 0), (W, X)),
    "several states": (several_states, (None, 0), (W, X)),
}


def total(fn):
    return lambda *args: sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(fn(*args)))


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 7])
@pytest.mark.parametrize("name", CASES)
def test_recurrences_are_tiled_with_their_gradients(name, n):
    """Of a function that is tiled, and of one that is tiled with what follows: one program of all."""
    fn, axis, args = CASES[name]
    gradients = lambda total: jax.grad(total, tuple(range(len(args))))
    tiled = tile(fn, axis, 4)
    of_tiled, of_total = gradients(total(tiled)), gradients(tile(total(fn), axis, n))
    want, gradient = quick.jit(lambda *x: (fn(*x), gradients(total(fn))(*x)))(*args)
    found = quick.jit(lambda *x: (tiled(*x), of_tiled(*x), of_total(*x)))(*args)
    assert_close(found, (want, gradient, gradient))


def test_plan_names_the_reversed_loop_and_the_states_that_are_stored():
    plan = tile(total(linear_attention), 0, 4).plan(*ROWS)
    assert [loop.reverse for loop in plan.gradient.loops] == [False, True]
    assert not plan.gradient.completed
    first = {carry.array: carry.nbytes for carry in plan.gradient.loops[0].carries}
    assert first["float64[4,3,3]"] == 4 * 9 * 8
    assert "4 tiles, backwards" in str(plan)
    assert "the state that each tile begins with" in str(plan)
    assert [loop.reverse for loop in tile(backwards, 0, 4).plan(X).value.loops] == [True]


def test_each_result_is_formed_where_no_state_has_to_be_stored_for_it():
    def apart(x):
        step = lambda s, row: ((s := 0.9 * s + jnp.outer(row, row)), row @ s)
        found = [lax.scan(step, jnp.zeros((3, 3)), f(x), reverse=f is jnp.tanh)[1] for f in (jnp.sin, jnp.tanh)]
        return found[0], found[1].sum()

    plan = tile(apart, 0, 4, gather="none").plan(X).value
    assert [loop.reverse for loop in plan.loops] == [False, True]
    assert not any("[4,3,3]" in carry.array for loop in plan.loops for carry in loop.carries)


def test_states_that_are_larger_than_the_inputs_are_refused():
    with pytest.raises(TileError, match=r"states: float64\[25,3,3\].*\n.*take fewer tiles"):
        jax.grad(lambda x: tile(total(backwards), 0, 25)(x))(X)
    whole = tile(total(backwards), 0, 25, gather="any")
    assert_close(quick.jit(jax.grad(whole))(X), quick.jit(jax.grad(total(backwards)))(X))


def test_what_may_be_whole_stays_so():
    step = lambda s, x: ((s := jnp.tanh(s + x)), s)
    plan = tile(lambda x: lax.scan(step, jnp.zeros(3), x, reverse=True)[1].sum(), 0, 4).plan(X).value
    assert not any(loop.reverse for loop in plan.loops)


def test_derivatives_of_derivatives_and_batches():
    x = np.stack([X, Y])
    first = lambda f: jax.grad(lambda x: total(f)(x))
    batched = lambda f: quick.jit(jax.vmap(first(f)))(x)
    assert_close(batched(tile(both_ways, 0, 4)), batched(both_ways))
    twice = lambda f: quick.jit(jax.grad(lambda x: (first(f)(x) ** 2).sum()))
    assert_close(twice(tile(backwards, 0, 4))(X), twice(backwards)(X))


@pytest.mark.parametrize("reverse", [False, True])
def test_sums_that_need_not_be_whole(reverse):
    def fn(x):
        return jnp.tanh(lax.cumsum(x[:, :, None] * x[:, None], 0, reverse=reverse)).sum((1, 2))

    both = lambda value, total: quick.jit(lambda x: (value(x), jax.grad(total)(x)))(X)
    assert_close(both(tile(fn, 0, 4), tile(total(fn), 0, 4)), both(fn, total(fn)))


@pytest.mark.parametrize("op", [lax.cumlogsumexp, lambda x: lax.cumprod(1 + x / 64)], ids=["logsumexp", "product"])
def test_states_between_many_tiles_are_wider_than_bfloat16(op):
    x = jnp.asarray(np.random.default_rng(0).normal(size=1024) + 0.5, jnp.bfloat16)
    exact, near = (op(x.astype(dtype)) for dtype in (jnp.float64, jnp.bfloat16))
    error = lambda y: np.abs(y.astype(jnp.float64) - exact).max() / np.abs(exact).max()
    assert error(tile(op, 0, 128)(x)) <= max(error(near), 2**-7)


@pytest.mark.measured
def test_memory_of_the_gradient_is_that_of_a_tile():
    rows = [jnp.zeros((512, 16), jnp.float32)] * 3

    def attend(q, k, v):
        step = lambda s, row: ((s := 0.9 * s + row[1][:, None] * row[2][None]), row[0] @ s)
        return lax.scan(step, jnp.zeros((16, 16), jnp.float32), (q, k, v))[1].sum()

    def temp(fn):
        return jax.jit(jax.grad(fn, (0, 1, 2))).lower(*rows).compile().memory_analysis().temp_size_in_bytes

    assert temp(tile(attend, 0, 16)) < temp(attend) / 6
