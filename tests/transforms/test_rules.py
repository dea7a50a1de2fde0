"""Every rule by a table: each primitive on cut arrays, on whole ones read tile by tile, and on parts of sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from tests.helpers import assert_same, assert_tiles
from tests.transforms.rows.arrays import AXES, PRIMITIVES, Arrays, D, L, arrays
from tests.transforms.rows.sums import MAXIMA, MINIMA, SUMS
from tests.transforms.rule_table import APART, GROUPS
from transforms import tile
from transforms.tiling.ir.placement import Partial, Tiled, Whole
from transforms.tiling.lower import scan
from transforms.tiling.rules import RULES, Move

WHOLES = Arrays(*(None for _ in AXES))
KEPT = np.arange(L) % 3 != 1
ELEMENTWISE = ("float", "special", "bits")  # one rule for many primitives, and long to compile


@pytest.fixture
def used(monkeypatch):
    """The parts of rules that are used while a tiled function runs: (primitive, "push" | "pull" | "sum" ...)."""
    found = set()

    def recorder(name, rule):
        def push(node, placements):
            move = rule.push(node, placements)
            if not isinstance(move, Move):
                return move
            found.update((name, p.op) for p in move.ins if isinstance(p, Partial) and p in move.outs)
            if any(isinstance(p, Tiled) for p in move.ins):
                found.add((name, "push"))
            return move

        return dataclasses.replace(rule, push=push)

    for name, rule in list(RULES.items()):
        monkeypatch.setitem(RULES, name, recorder(name, rule))
    run = scan.run

    def watched(plan, *args, **kwargs):
        for step in (step for loop in plan.loops for step in loop.steps):
            whole = all(isinstance(plan.analysis.fact(v).placement, Whole) for v in step.node.inputs)
            if whole and any(isinstance(p, Tiled) for p in step.move.outs):
                found.add((step.node.name, "pull"))
        return run(plan, *args, **kwargs)

    monkeypatch.setattr(scan, "run", watched)
    return found


def check(fn, axis, args, n):
    """Value and vjp, untiled and in so many tiles; 3 leaves a shorter tile and 4 leaves one of 1."""
    with jax.enable_x64(True):
        assert_tiles(fn, axis, n, args, dtype=jnp.float64, fast=True)


def existing(rows):
    return {name: fn for name, fn in rows.items() if name in PRIMITIVES}


@pytest.mark.redundant("n")
@pytest.mark.parametrize(("group", "n"), [(g, n) for g in GROUPS for n in ((3,) if g in ELEMENTWISE else (2, 4))])
def test_primitive_on_cut_arrays(group, n, used):
    rows = existing(GROUPS[group])
    with jax.enable_x64(True):
        given = arrays()
    check(lambda a: {name: fn(a) for name, fn in rows.items()}, (AXES,), (given,), n)
    assert set(rows) <= {name for name, part in used if part == "push"}


def read(out, kept):
    """`out`, masked by a cut array along each dimension in turn that is as long as the cut axis."""
    dim = out.shape.index(L)
    return lax.select_n(lax.broadcast_in_dim(kept, out.shape, (dim,)), jnp.zeros_like(out), out)


@pytest.mark.parametrize("group", GROUPS)
def test_primitive_on_whole_arrays_read_tile_by_tile(group, used):
    rows = {name: fn for name, fn in existing(GROUPS[group]).items() if RULES[name].pull is not None}
    for name in ("threefry2x32", "threefry4x32", "philox2x32", "philox4x32"):
        rows.pop(name, None)  # has several results: such values are made whole
    with jax.enable_x64(True):
        given = arrays()

    def masked(a, kept):
        if group in ELEMENTWISE:
            a = jax.tree.map(lax.stop_gradient, a)
        outs = {name: jax.tree.leaves(fn(a)) for name, fn in rows.items()}
        return {name: [read(o, kept) for o in out if L in o.shape] for name, out in outs.items()}

    check(masked, (WHOLES, 0), (given, KEPT), 3)
    heavy = {name for name in rows if RULES[name].heavy}
    assert set(rows) - heavy <= {name for name, part in used if part == "pull"}


def test_product_of_whole_arrays_is_pulled_where_it_is_large(used):
    def fn(a, b, kept):
        products = (a @ b, (b.T @ a.T).T, jnp.einsum("ld,dv->vl", a, b).T, jnp.einsum("ld,le->lde", a @ b[:, :30], a))
        return [(jnp.tanh(p.reshape(L, -1)) * kept[:, None]).sum(0) for p in products]

    rng = np.random.default_rng(0)
    check(fn, (None, None, 0), (rng.normal(size=(L, 2)), rng.normal(size=(2, 40)), KEPT.astype(float)), 4)
    assert ("dot_general", "pull") in used


@pytest.mark.redundant("n")
@pytest.mark.parametrize(("op", "n"), [("sum", 2), ("sum", 4), ("max", 4), ("min", 4)])
def test_primitive_on_parts_of_a_reduction(op, n, used):
    rows = existing({"sum": SUMS, "max": MAXIMA, "min": MINIMA}[op])
    reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op]
    join = {"sum": lambda a, b: a + 2 * b, "max": jnp.maximum, "min": jnp.minimum}[op]

    def fn(x, y, w):
        s, r = (reduce(jnp.sin(v[:, None] * w), 0) for v in (x, y))  # larger than the input, so not in one piece
        first, second = ({name: fn(v, w) for name, fn in rows.items()} for v in (s, r))
        return first, jax.tree.map(join, first, second)  # alone after the loop; joined, inside it

    rng = np.random.default_rng(0)
    args = (rng.normal(size=(L, D)), rng.normal(size=(L, D)), rng.uniform(0.5, 2, (4, D)))
    check(fn, (0, 0, None), args, n)
    assert set(rows) <= {name for name, part in used if part == op}


def test_every_rule_has_a_case():
    rows = set().union(*GROUPS.values(), SUMS, MAXIMA, MINIMA, APART)
    written = {name for name, rule in RULES.items() if not rule.reason or rule.outline or rule.resume}
    assert rows >= written & set(PRIMITIVES)
    assert rows <= written


EDGES = {
    "sums of products of bytes": lambda x, w: (
        lax.dot((20 * x.T).astype(jnp.int8), (20 * x).astype(jnp.int8), preferred_element_type=jnp.int32) * w.sum()
    ),
    "a pad of nothing": lambda x, w: x * jnp.pad(jnp.zeros((0, D)), ((L, 0), (0, 0)), constant_values=2.0),
    "one update": lambda x, w: jnp.cumsum(jnp.ones(L)).at[4].set(w.sum()) * x[:, 0],
    "sums into zeros at clipped places": lambda x, w: (
        jnp.zeros((L, D)).at[jnp.arange(L), jnp.arange(L) % 5].add(x[:, 0], mode="clip") * w.mean()
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_rules(name):
    rng = np.random.default_rng(0)
    check(EDGES[name], (0, None), (rng.normal(size=(L, D)), rng.normal(size=(D, 4))), 4)


def own_jvp():
    own = jax.custom_jvp(jnp.sin)
    own.defjvp(lambda primals, tangents: (own(*primals), 3 * tangents[0]))
    return own


def own_vjp(**flags):
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(lambda x: (own(x), x), lambda x, g: (3 * g * x,), **flags)
    return own


def own_vmap():
    own = jax.custom_batching.custom_vmap(jnp.sin)
    own.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))
    return lambda x: own(lax.stop_gradient(x)) * x  # it has no reverse mode


OWN = {
    "custom_jvp_call": own_jvp(),
    "custom_vjp_call": own_vjp(),
    "remat_opt": own_vjp(optimize_remat=True),
    "custom_vmap_call": own_vmap(),
    "linear_call": lambda x: jax.custom_derivatives.linear_call(
        lambda r, x: r * x, lambda r, t: r * t, lax.stop_gradient(x), x
    ),
    "custom_linear_solve": lambda x: jnp.linalg.solve(x[:, :2, None] * x[:, None, :2] + jnp.eye(2), x[:, :2, None]),
}


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", OWN)
def test_function_with_its_own_derivative(name, n, used):
    own = OWN[name]
    rng = np.random.default_rng(0)
    args = rng.normal(size=(L, D)), rng.normal(size=(D, 4))
    check(lambda x, w: jnp.log(4 + own(x @ w).sum()), (0, None), args, n)
    assert (name, "push") in used or name == "remat_opt"  # which JAX makes while it differentiates


@pytest.mark.parametrize("name", ["debug_callback", "debug_print", "io_callback"])
def test_callback_runs_on_every_tile(name, used, capfd):
    seen = []
    call = {
        "debug_callback": lambda x: jax.debug.callback(seen.append, x),
        "debug_print": lambda x: jax.debug.print("{}", x),
        "io_callback": lambda x: io_callback(seen.append, None, x),
    }[name]

    def fn(x):
        call(2 * x)
        return jnp.sin(x)

    out = tile(fn, 0, 3)(jnp.arange(10))
    jax.effects_barrier()
    np.testing.assert_allclose(out, np.sin(np.arange(10)), rtol=1e-6)
    if name == "debug_print":
        seen = [np.fromstring(line.strip("[]"), sep=" ") for line in capfd.readouterr().out.splitlines()]
    assert sorted(map(len, seen)) == [2, 4, 4]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), 2 * np.arange(10))
    assert (name, "push") in used


# ------------------------------------------------------------------------------- a cut axis that shares its dimension


def positions(t, w, ids):
    return (t.reshape(-1, D) * jnp.arange(2 * L)[:, None]).reshape(2, L, D)


def looked_up(t, w, ids):
    return (t @ w).reshape(2 * L, -1)[jnp.arange(2 * L), ids.reshape(-1)].reshape(2, L)


def one_hot(t, w, ids):
    return (jax.nn.one_hot(ids.reshape(-1), 4) * (t @ w).reshape(2 * L, 4)).sum(-1).reshape(2, L)


def embedded(t, w, ids):
    return (w.T[ids.reshape(-1)] * t.reshape(-1, D)).reshape(2, L, D)


def written(t, w, ids):
    rows = t.reshape(-1, D).at[jnp.arange(2 * L), ids.reshape(-1) % D].set(7.0)
    return rows.at[jnp.arange(2 * L), 1].add(2.0).reshape(2, L, D)


def reduced(t, w, ids):
    rows = t.reshape(2 * L, D)
    return rows.sum(0), rows.max(0), (rows @ w).T @ rows, rows.max(1).reshape(2, L)


def joined(t, w, ids):
    rows = jnp.concatenate([t.reshape(2 * L, D), t.reshape(2 * L, D)[:, :1]], 1)
    return jnp.sort(rows, 1).reshape(2, L, D + 1), jnp.cumsum(rows, 1).reshape(2, L, -1)


def minor(t, w, ids):
    columns = jnp.sin(t.reshape(2, L * D))
    return columns.reshape(2, L, D), columns.sum(1), (columns * jnp.arange(L * D)).reshape(2, L, D)


def segments(t, w, ids):
    return jax.ops.segment_sum(t.reshape(-1, D), ids.reshape(-1), num_segments=4)


def copied(t, w, ids):
    return jnp.tile(t, (2, 2, 1)).reshape(4, 2, L, D) * jnp.arange(2)[:, None, None], t.transpose(1, 0, 2).reshape(
        -1, D
    )


@pytest.mark.redundant("n")
@pytest.mark.parametrize(("cut", "n"), [(0, 2), (1, 2), (1, 4)])
def test_cut_axis_survives_reshapes(cut, n, used):
    fns = (positions, looked_up, one_hot, embedded, written, reduced, joined, minor, segments, copied)
    rng = np.random.default_rng(0)
    args = (rng.normal(size=(2, L, D)), rng.normal(size=(D, 4)), rng.integers(0, 4, (2, L)))
    check(lambda *a: {fn.__name__: fn(*a) for fn in fns}, (cut, None, cut), args, n)
    assert ("iota", "pull") in used


# ------------------------------------------------------------------------------------- what used to come out wrong


def wide(x):
    """`x`, computed by way of something larger, so that it is not summed in one piece."""
    return (x[..., None] + jnp.zeros(7, x.dtype)).max(-1)


def narrow(x):
    return x[50, 0].astype(jnp.uint8)


def picked(x, place):
    return lax.dynamic_slice_in_dim(x, place, 2)


ONCE_WRONG = {
    "an axis of length 1 is broadcast": (lambda x: jnp.broadcast_to(jnp.sin(x), (5, D)), np.ones((1, D))),
    "a sum is written into a maximum": (
        lambda x: lax.dynamic_update_slice(wide(x).max(0), wide(x).sum(0)[:1], (0,)),
        np.arange(3 * L).reshape(L, D) / 7,
    ),
    "places out of bounds of a sum": (
        lambda x: wide(x).sum(0).at[jnp.array([9, 1])].get(mode="fill", fill_value=1.0),
        np.arange(3 * L).reshape(L, D) / 7,
    ),
    "places out of bounds of a product": (
        lambda x: wide(x).prod(0).at[jnp.array([9, 1])].get(mode="fill", fill_value=2.0),
        np.full((L, D), 2.0),
    ),
    "a position that wraps around": (
        lambda x: x[jnp.arange(300).astype(jnp.uint8), 0],
        np.arange(600.0).reshape(300, 2),
    ),
    "a sum of integers that wraps around": (
        lambda x: wide(x).sum(0, dtype=jnp.int8).astype(jnp.int32) + (1000 * wide(x).astype(jnp.int32)).sum(0),
        np.ones((200, 2), np.int8),
    ),
    "a difference of unsigned sums": (
        lambda x: (wide(x[:, 0]).sum() - wide(x[:, 1]).sum()).astype(jnp.float32) + jnp.sin(wide(x)).sum(),
        np.array([[1, 3]] * 5 + [[5, 1]] * 5, np.uint32),
    ),
    "positions in a narrow float": (lambda x: x * jnp.arange(1000, dtype=jnp.bfloat16), np.ones(1000)),
    "the real part of a complex sum": (lambda x: (wide(x) + 0j).sum(0).real, np.ones((L, D))),
    "the sign of a zero that is picked": (
        lambda x: [1 / rows for rows in ((-wide(x))[3:4], (-wide(x))[jnp.array([3, 1])], picked(-wide(x), 3))],
        np.where(np.arange(L)[:, None] == 3, 0.0, np.ones((L, D))),
    ),
    "a narrow place in a long axis": (  # a constant one, or outside of `jax.jit`, XLA itself clamps to its own dtype
        jax.jit(lambda x: [picked(wide(x), narrow(x)), lax.dynamic_update_slice_in_dim(wide(x), x[:2], narrow(x), 0)]),
        np.arange(1200.0).reshape(600, 2),
    ),
    "a part of a sum is 0 where a product of the sum is infinite": (
        lambda x: [x.sum(0) @ np.full((D, 2), np.inf, np.float32), (x.T @ x) @ np.full((D, 1), np.inf, np.float32)],
        np.where(np.arange(L)[:, None] < L // 2, 0.0, np.ones((L, D))),
    ),
    "rows are added to minus zero": (
        lambda x: 1 / jnp.full(4, -0.0).at[jnp.arange(len(x)) % 2].add(wide(x)[:, 0]),
        np.ones((L, D)),
    ),
    "no rows are added to zero": (  # which begins as a minus zero where nothing else is added up
        lambda x: [1 / jnp.zeros(4).at[jnp.arange(len(x)) % 2].add(wide(x)[:, 0]), wide(x).max()],
        np.ones((L, D)),
    ),
    "signals of one axis are convolved with each other": (  # planning did not end
        lambda x: [jnp.correlate(x[:, 0], x[:, 1], mode="full"), jnp.convolve(wide(x)[:, 1], wide(x)[:, 0], "same")],
        np.arange(3 * L).reshape(L, D) / 7,
    ),
    "an empty array is reshaped": (lambda x: 2 * x.T.reshape(10, 0), np.ones((L, 0))),
}


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_once_wrong(name):
    fn, x = ONCE_WRONG[name]
    for n in {1, min(4, len(x))}:
        got = tile(fn, 0, n, gather="any")(jnp.asarray(x))
        assert_same(got, fn(jnp.asarray(x)), 1e-6)
