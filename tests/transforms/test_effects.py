"""Side effects run once for each tile in the forward pass, or once in all where no tile changes what they see."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

from tests.helpers import assert_same
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic

RNG = np.random.default_rng(3)
X, W = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((12, 4), (4, 4)))
WS = jnp.stack([W, W / 2, W.T])
N = 4
CALLS = collections.Counter()


def seen(name="tile"):
    """What a callback reports to."""
    return lambda *_: CALLS.update([name])


def note(x, name="tile"):
    jax.debug.callback(seen(name), x)


def counts(thunk):
    """What `thunk` returns, and how often each callback was called."""
    CALLS.clear()
    out = jax.block_until_ready(thunk())
    jax.effects_barrier()
    return out, dict(CALLS)


def plain(x, w):
    h = jnp.tanh(x @ w)
    note(h)
    return (h**2).sum()


def nonlinear(x, w):
    return jnp.log(plain(x, w))


def rows(x, w):
    h = jnp.tanh(x @ w)
    note(h)
    return h


def printed(x, w):
    h = jnp.tanh(x @ w)
    jax.debug.print("{}", h[0, 0])
    io_callback(seen(), None, lax.stop_gradient(h), ordered=False)
    return (h**2).sum()


def two_loops(x, w):
    h = jnp.tanh(x @ w)
    note(h)
    return ((h - h.mean(0)) ** 2).sum()


def whole(x, w):
    note(w, "once")
    return (x @ w).sum()


def of_a_sum(x, w):
    h = x @ w
    note(h.sum(0), "once")
    return (h**2).sum()


def with_a_sum(x, w):
    h = jnp.tanh(x @ w)
    jax.debug.callback(seen(), h, h.sum(0))
    return (h**2).sum()


def layers(x, ws):
    def layer(h, w):
        note(h)
        note(w, "once")
        return jnp.tanh(h @ w), None

    return (lax.scan(layer, x, ws)[0] ** 2).sum()


def layers_twice(x, ws):
    h = lax.scan(lambda h, w: (note(h), (jnp.tanh(h @ w), None))[1], x, ws)[0]
    return ((h - h.mean(0)) ** 2).sum()


def mixing(x, ws):
    def layer(h, w):
        note(h)
        return h + jnp.tanh(h - h.mean(0)) @ w, None

    return (lax.scan(layer, x, ws)[0] ** 2).sum()


def rematted(x, w):
    @jax.checkpoint
    def layer(x):
        h = jnp.tanh(x @ w)
        note(h)
        return jnp.sin(h)

    return (layer(layer(x)) ** 2).sum()


def rematted_rows(x, w):
    @jax.checkpoint
    def layer(x):
        h = jnp.tanh(x @ w)
        note(h)
        jax.debug.print("{}", h[0, 0])
        return jnp.sin(h)

    return layer(layer(x))


def scanned_remat(x, ws):
    @jax.checkpoint
    def layer(h, w):
        h = jnp.tanh(h @ w)
        note(h)
        return h, None

    return (lax.scan(layer, x, ws)[0] ** 2).sum()


def branches(x, w):
    h = jnp.tanh(x @ w)

    def loud(h):
        note(h)
        return 2 * h

    return (lax.cond(w[0, 0] > -100, loud, lambda h: h, h) ** 2).sum()


def only_in_a_branch(x, w):
    h = jnp.tanh(x @ w)
    lax.cond(w[0, 0] > -100, note, lambda h: None, h)
    return (h**2).sum()


def branches_in_layers(x, ws):
    def layer(h, w):
        h = jnp.tanh(h @ w)
        lax.cond(w[0, 0] > -100, note, lambda h: None, h)
        return h, None

    return (lax.scan(layer, x, ws)[0] ** 2).sum()


def repeated(x, w):
    def body(i, h):
        note(h)
        return jnp.tanh(h @ w)

    return (lax.fori_loop(0, 3, body, x) ** 2).sum()


def until(x, w):
    def body(state):
        i, h = state
        note(h)
        return i + 1, jnp.tanh(h @ w)

    return lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1]


def mapped(x, w):
    return (lax.map(lambda r: (note(r), jnp.tanh(r @ w))[1], x) ** 2).sum()


def recurrence(x, w):
    def step(c, r):
        c = jnp.tanh(c / 2 + r @ w)
        note(c)
        return c, c

    return (lax.scan(step, jnp.zeros(4), x)[1] ** 2).sum()


def nested(x, w):
    def inner(h):
        h = jnp.tanh(h @ w)
        note(h)
        return (h**2).sum()

    return tile(inner, 0, 1)(x)


def custom(x, w):
    @jax.custom_vjp
    def f(h):
        note(h)
        return jnp.sin(h)

    def forward(h):
        return f(h), h

    def backward(h, g):
        note(g, "backward")
        return (g * jnp.cos(h),)

    f.defvjp(forward, backward)
    return (f(x @ w) ** 2).sum()


# The function, its second argument, and how often each callback is called with n tiles.
CASES = {
    "plain": (plain, W, lambda n: {"tile": n}),
    "a loss nonlinear in its sum": (nonlinear, W, lambda n: {"tile": n}),
    "a result for each row": (rows, W, lambda n: {"tile": n}),
    "io_callback": (printed, W, lambda n: {"tile": n}),
    "two loops": (two_loops, W, lambda n: {"tile": n}),
    "a weight": (whole, W, lambda n: {"once": 1}),
    "a sum over the tiles": (of_a_sum, W, lambda n: {"once": 1}),
    "a tile and a sum": (with_a_sum, W, lambda n: {"tile": n}),
    "scanned layers": (layers, WS, lambda n: {"tile": 3 * n, "once": 3}),
    "scanned layers, two loops": (layers_twice, WS, lambda n: {"tile": 3 * n}),
    "scanned layers that mix rows": (mixing, WS, lambda n: {"tile": 3 * n}),
    "checkpoint": (rematted, W, lambda n: {"tile": 2 * n}),
    "checkpoint, a result for each row": (rematted_rows, W, lambda n: {"tile": 2 * n}),
    "checkpoint in a scan": (scanned_remat, WS, lambda n: {"tile": 3 * n}),
    "cond": (branches, W, lambda n: {"tile": n}),
    "cond without results": (only_in_a_branch, W, lambda n: {"tile": n}),
    "cond without results in a scan": (branches_in_layers, WS, lambda n: {"tile": 3 * n}),
    "fori": (repeated, W, lambda n: {"tile": 3 * n}),
    "while": (until, W, lambda n: {"tile": 3 * n}),
    "lax.map over rows": (mapped, W, lambda n: {"tile": 12}),
    "a recurrence over rows": (recurrence, W, lambda n: {"tile": 12}),
    "a nested tile": (nested, W, lambda n: {"tile": n}),
}
RUNS = {
    "value": lambda fn, w: fn(X, w),
    "jit": lambda fn, w: jax.jit(fn)(X, w),
    "grad": lambda fn, w: jax.grad(lambda x, w: fn(x, w).sum() * 2, (0, 1))(X, w),
    "grad under jit": lambda fn, w: jax.jit(jax.grad(lambda x, w: fn(x, w).sum() * 2, (0, 1)))(X, w),
    # Nonlinear in the sum, with a derivative that no sum makes ill-conditioned, as 1 - tanh(sum)^2 is.
    "grad in a checkpoint": lambda fn, w: jax.grad(jax.checkpoint(lambda x, w: jnp.log1p(fn(x, w).sum() ** 2)), (0, 1))(
        X, w
    ),
    "jvp": lambda fn, w: jax.jvp(fn, (X, w), (X, w)),
}


@pytest.mark.redundant("run")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", CASES)
def test_effects_run_once_for_each_tile(name, run):
    fn, w, expected = CASES[name]
    if (fn is until and run.startswith("grad")) or (fn is printed and run == "grad in a checkpoint"):
        pytest.skip("JAX has no such derivative")
    got, calls = counts(lambda: RUNS[run](tile(fn, (0, None), N), w))
    assert calls == expected(N)
    want, _ = counts(lambda: RUNS[run](fn, w))
    assert_same(got, want, 3e-5)


def test_the_plan_tells_of_effects():
    plan = tile(layers, (0, None), N).plan(X, WS)
    assert {(e.primitive, e.tiles) for e in plan.value.effects} == {("debug_callback", True)}
    assert "test_effects.py" in plan.value.effects[0].where and "once for each tile" in str(plan)
    assert [e.tiles for e in tile(whole, (0, None), N).plan(X, W).value.effects] == [False]
    assert tile(lambda x: x.sum(), 0, N).plan(X).value.effects == ()


@pytest.mark.crossed("name", "n")
@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("name", ["plain", "scanned layers", "lax.map over rows"])
def test_effects_under_vmap_in_scans_and_for_any_number_of_tiles(name, n):
    fn, w, expected = CASES[name]
    tiles = -(-12 // -(-12 // n))
    once = expected(tiles)
    tiled = tile(fn, (0, None), n)
    _, calls = counts(lambda: jax.grad(lambda w: tiled(X, w) ** 2)(w))
    assert calls == once
    _, calls = counts(lambda: lax.scan(lambda c, s: (c + tiled(s * X, w), None), 0.0, jnp.ones(2))[0])
    assert calls == {key: 2 * k for key, k in once.items()}
    _, calls = counts(lambda: jax.vmap(tiled, (0, None))(jnp.stack([X, X]), w))
    assert calls == {key: k if key == "once" else 2 * k for key, k in once.items()}


OPTIONS = {"lowmem": {"lowmem": True}, "policy": {"policy": jax.checkpoint_policies.everything_saveable}}


@pytest.mark.parametrize("options", OPTIONS)
def test_effects_with_options(options):
    for fn in (plain, rows):
        tiled = tile(fn, (0, None), N, **OPTIONS[options])
        assert counts(lambda tiled=tiled: jax.grad(lambda w: tiled(X, w).sum() ** 2)(W))[1] == {"tile": N}


@pytest.mark.parametrize("run", ["value", "grad", "grad under jit"])
def test_a_derivative_rule_has_its_own_effects(run):
    calls = counts(lambda: RUNS[run](tile(custom, (0, None), N), W))[1]
    assert calls == ({"tile": N} if run == "value" else {"tile": N, "backward": N})


def called(x, w):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    factor = io_callback(lambda _: (CALLS.update(["io"]), np.float32(2))[1], shape, lax.stop_gradient(w), ordered=False)
    return jnp.tanh(x @ w) * factor


def test_what_a_callback_returned_is_not_asked_for_twice():
    got, calls = counts(lambda: jax.grad(lambda w: (tile(called, (0, None), N)(X, w) ** 2).sum())(W))
    assert calls == {"io": 1}
    assert_same(got, jax.grad(lambda w: (called(X, w) ** 2).sum())(W), 3e-5)
    with pytest.raises(TileError, match=r"`io_callback` at .*test_effects.py.*its result is needed again"):
        jax.jvp(lambda w: tile(called, (0, None), N)(X, w), (W,), (W,))


def test_ordered_effects_are_refused_anywhere():
    def layer(h, w):
        jax.debug.print("{}", h, ordered=True)
        return h @ w, None

    with pytest.raises(TileError, match="its side effect is ordered"):
        tile(lambda x, ws: lax.scan(layer, x, ws)[0], (0, None), N)(X, WS)


@pytest.mark.parametrize("bound", [5.0, 0.5])
def test_errors_of_equinox_are_raised_from_any_tile(bound):
    def fn(x, ws):
        def layer(h, w):
            h = jnp.tanh(h @ w)
            return eqx.error_if(h, (h > bound).any(), "too large"), None

        return (lax.scan(layer, x, ws)[0] ** 2).sum()

    run = eqx.filter_jit(jax.value_and_grad(tile(fn, (0, None), N)))
    if bound > 1:
        assert_same(run(X, WS), jax.value_and_grad(fn)(X, WS), 3e-5)
    else:
        with pytest.raises(Exception, match="too large"):
            run(X, WS)


def test_checkify_sees_what_is_inside():
    error, _ = checkify.checkify(jax.grad(tile(lambda x: jnp.log(x).sum(), 0, N)), checkify.float_checks)(-X * X)
    assert "nan generated by primitive: log" in (error.get() or "")
