"""Collectives over a name of `jax.vmap` inside the tiled function: they take a dimension, or the cut axis, away."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.transforms.test_rounding import assert_right, untiled
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic

X = np.random.default_rng(0).normal(size=(21, 4)).astype(np.float32)
over = lambda fn, **options: lambda x: jax.vmap(fn, axis_name="b", **options)(x)

CASES = {
    "psum": over(lambda r: lax.psum(jnp.sin(r), "b"), out_axes=None),
    "pmax": over(lambda r: lax.pmax(r * r, "b"), out_axes=None),
    "pmin": over(lambda r: lax.pmin(r, "b"), out_axes=None),
    "pmean": over(lambda r: r - lax.pmean(r, "b")),
    "columns": over(lambda c: c - lax.psum(c, "b"), in_axes=1, out_axes=1),
    "columns_max": over(lambda c: c * lax.pmax(c, "b"), in_axes=1),
    "variance": over(lambda r: (r - lax.pmean(r, "b")) / jnp.sqrt(lax.pmean(r**2, "b") + 0.1)),
    "several": over(lambda r: jnp.stack(lax.psum((r, r * r), "b")), out_axes=None),
    "both": lambda x: jax.vmap(jax.vmap(lambda e: e * lax.psum(e, ("b", "c")), axis_name="c"), axis_name="b")(x),
    "inner": lambda x: jax.vmap(jax.vmap(lambda e: e * lax.psum(e, "c"), axis_name="c"), axis_name="b")(x),
    "outer": lambda x: jax.vmap(jax.vmap(lambda e: e * lax.pmean(e, "b"), axis_name="c"), axis_name="b")(x),
}


@pytest.mark.parametrize("name", CASES)
def test_collective_over_a_vmapped_name(name):
    fn = CASES[name]
    for n in (2, 3, 7):
        np.testing.assert_allclose(tile(fn, 0, n)(X), fn(X), rtol=2e-5, atol=2e-5)
    if name in ("pmax", "pmin", "columns_max"):
        return  # JAX has no derivative of these
    loss = lambda fn: lambda x: jnp.sum(jnp.sin(fn(x)))
    found, expected = jax.grad(tile(loss(fn), 0, 3))(X), jax.grad(loss(fn))(X)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


Y = np.random.default_rng(1).normal(size=(3, 12, 4))
W = np.random.default_rng(2).normal(size=(4, 9))


def normed(h):
    mean = lax.pmean(h.mean(0), "b")
    return (h - mean) / jnp.sqrt(lax.pmean(((h - mean) ** 2).mean(0), "b") + 0.1)


INSIDE = {
    "sum": lambda h: h * jnp.tanh(lax.psum(h, "b")),
    "scalar": lambda h: (h * jnp.tanh(lax.pmean(h, "b"))).sum(),
    "scalar_of_all": lambda h: lax.psum(jnp.sin(h * lax.pmean(h, "b")).sum(), "b"),
    "norm": lambda h: jax.nn.logsumexp(normed(h) @ W, -1).mean(),
    "attention": lambda h: jax.nn.softmax(h @ h.T + lax.psum(h, "b").sum()) @ h,
    "scan": lambda h: lax.scan(lambda c, r: (jnp.tanh(c + lax.pmean(r, "b")), c), jnp.zeros(4), h)[1],
    "gather": lambda h: (h.sum(0) * lax.axis_index("b") * jnp.tanh(lax.all_gather(h, "b").sum((0, 1)))).sum(),
    "neighbour": lambda h: h * lax.ppermute(h, "b", [(0, 1), (1, 2), (2, 0)]),
    "checkpoint": lambda h: jax.checkpoint(lambda h: jnp.sin(h * lax.pmean(h, "b")))(h).sum(),
}
OUTSIDE = {
    "grad": lambda loss: jax.grad(loss)(Y),
    "grad of jit": lambda loss: jax.jit(jax.grad(jax.jit(loss)))(Y),
    "jvp": lambda loss: jax.jvp(loss, (Y,), (jnp.cos(Y),))[1],
    "forward over reverse": lambda loss: jax.jvp(jax.grad(loss), (Y,), (jnp.cos(Y),))[1],
    "reverse over reverse": lambda loss: jax.grad(lambda y: (jax.grad(loss)(y) ** 2).sum())(Y),
    "batched": lambda loss: jax.vmap(jax.grad(loss))(jnp.stack([Y, 2 * Y])),
}


@pytest.mark.crossed("way", "name")
@pytest.mark.parametrize("way", OUTSIDE)
@pytest.mark.parametrize("name", INSIDE)
def test_derivatives_outside_of_the_vmap_that_has_the_name(name, way, float64):
    """JAX applies rules of derivatives where no axis has a name; and each element has a cotangent of its own."""
    loss = lambda fn: lambda y: jnp.sin(jax.vmap(fn, axis_name="b")(y)).sum()
    found, expected = (OUTSIDE[way](loss(fn)) for fn in (tile(INSIDE[name], 0, 3), INSIDE[name]))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


# Of rows x[b] and what all elements share, w: a result of both, and one of w alone.
SHARED = {
    "rows": lambda x, w: (x * w, jnp.sin(w)),
    "scalars": lambda x, w: ((x * w).sum(), (w**2).sum()),
    "sums and rows": lambda x, w: (jnp.cumsum(x * w), jnp.exp(w - w.max())),
    "alone": lambda x, w: (x, (w**2).sum()),
}
LATER = {
    "grad": lambda loss: jax.grad(loss, (0, 1))(Y[:, :, 0], Y[0, :, 1]),
    "grad of what is shared": lambda loss: jax.jit(jax.grad(loss, 1))(Y[:, :, 0], Y[0, :, 1]),
    "jvp": lambda loss: jax.jvp(loss, (Y[:, :, 0], Y[0, :, 1]), (Y[:, :, 2], Y[0, :, 3]))[1],
    "grad of grad": lambda loss: jax.grad(lambda w: (jax.grad(loss, 1)(Y[:, :, 0], w) ** 2).sum())(Y[0, :, 1]),
}


@pytest.mark.crossed("name", "way")
@pytest.mark.parametrize("outs", [0, (0, None), "used within"])
@pytest.mark.parametrize("way", LATER)
@pytest.mark.parametrize("name", SHARED)
def test_derivatives_outside_of_a_vmap_of_what_its_elements_share(name, way, outs, float64):
    """Results that depend on nothing mapped are not mapped, and neither are their tangents."""

    def loss(fn):
        if outs == "used within":
            return lambda x, w: jax.vmap(lambda x, w: sum(jnp.sin(o).sum() for o in fn(x, w)), (0, None))(x, w).sum()
        return lambda x, w: sum(jnp.sin(o).sum() for o in jax.vmap(fn, (0, None), outs)(x, w))

    found, expected = (LATER[way](loss(fn)) for fn in (tile(SHARED[name], (0, 0), 3), SHARED[name]))
    for got, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


# What is the same for all elements, as sums over them are, is not mapped: the state of a batch norm.
UNITED = {
    "mean": lambda x, w: (x - lax.pmean(x, "b"), lax.pmean(x * w, "b")),
    "maximum": lambda x, w: (x * w, lax.pmax(lax.stop_gradient(x), "b")),
    "all": lambda x, w: (x, lax.all_gather(jnp.sin(x * w), "b")),
    "in a loop": lambda x, w: (x, lax.scan(lambda c, r: (c + lax.pmean(r, "b"), lax.psum(c * r, "b")), 0.0, x * w)[1]),
    "scalar": lambda x, w: ((x * w).sum(), lax.pmean(jnp.tanh(x).sum(), "b")),
}


@pytest.mark.crossed("name", "way")
@pytest.mark.parametrize("way", LATER)
@pytest.mark.parametrize("name", UNITED)
def test_what_a_collective_makes_the_same_for_all_is_not_mapped(name, way, float64):
    def loss(fn):
        run = jax.vmap(fn, (0, None), (0, None), axis_name="b")
        return lambda x, w: sum(jnp.sin(o).sum() for o in run(x, w))

    found, expected = (LATER[way](loss(fn)) for fn in (tile(UNITED[name], (0, 0), 3), UNITED[name]))
    for got, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@jax.custom_jvp
def averaged(x):
    return x


averaged.defjvp(lambda primals, tangents: (primals[0], lax.pmean(tangents[0], "b")))


def test_an_axis_that_a_rule_alone_names_is_known_within_its_map():
    loss = lambda fn: lambda x, scale: scale * fn(lambda x: jnp.sin(averaged(x)).sum())(x)
    x, scale = jnp.asarray(Y[:, :, 0]), jnp.arange(1.0, 4.0)
    each = lambda fn: jax.vmap(jax.grad(loss(fn)), axis_name="b")(x, scale)
    np.testing.assert_allclose(each(lambda f: tile(f, 0, 3)), each(lambda f: f), rtol=1e-5)
    with pytest.raises(TileError, match=r"the rule of a derivative names it. Take the derivative within the map"):
        jax.grad(lambda x: jax.vmap(loss(lambda f: tile(f, 0, 3)), axis_name="b")(x, scale).sum())(x)


@pytest.mark.parametrize("outer", ["b", "c", None])
def test_of_two_maps_of_one_name_the_inner_one_has_it(outer, float64):
    fn = lambda x: (x * 2, lax.psum(jnp.sin(x), "b"))
    inner = lambda fn: jax.vmap(fn, out_axes=(0, None), axis_name="b")
    twice = lambda fn: jax.vmap(inner(fn), **({"axis_name": outer} if outer else {}))
    loss = lambda fn: lambda x: sum(jnp.sin(o).sum() for o in twice(fn)(x))
    x = jnp.asarray(Y.transpose(2, 0, 1))
    for got, want in zip(twice(tile(fn, 0, 3))(x), twice(fn)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)
    for way in (jax.grad, lambda loss: lambda x: jax.jvp(loss, (x,), (jnp.cos(x),))[1]):
        np.testing.assert_allclose(way(loss(tile(fn, 0, 3)))(x), way(loss(fn))(x), rtol=1e-9)


@pytest.mark.parametrize("where", ["alone", "in a loop", "in a branch"])
def test_what_depends_on_the_place_of_an_element_is_mapped(where, float64):
    """Though no argument that it is made of is."""
    here = lambda w: w * lax.axis_index("b")
    places = {
        "alone": here,
        "in a loop": lambda w: lax.scan(lambda c, r: (c, here(r)), 0.0, w)[1],
        "in a branch": lambda w: lax.cond(w[0] > 9, jnp.sin, here, w),
    }
    fn = lambda x, w: (x, places[where](w))
    loss = lambda fn: lambda w: sum(jnp.sin(o).sum() for o in jax.vmap(fn, (0, None), axis_name="b")(Y[:, :, 0], w))
    w = jnp.asarray(Y[0, :, 1])
    found, expected = (jax.value_and_grad(loss(f))(w) for f in (tile(fn, (0, 0), 3), fn))
    for got, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@jax.custom_vjp
def clipped(w):
    return w


clipped.defvjp(lambda w: (w, None), lambda _, slope: (jnp.clip(slope, -1, 1),))


@jax.custom_jvp
def second(x, w):
    return w


second.defjvp(lambda primals, tangents: (primals[1] + 0 * primals[0].sum(), tangents[1]))


@pytest.mark.parametrize("lowmem", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_results_are_mapped_as_those_of_the_function_whatever_derivatives_compute(lowmem, reduced, float64):
    """A rule may make a result of more than the function does."""
    last = lambda w: jnp.sin(w).sum() if reduced else jnp.sin(w)
    fn = lambda x, w, v: (x @ v, last(second(x, w)))
    loss = lambda fn: lambda w, v: sum(jnp.sin(o).sum() for o in jax.vmap(fn, (0, None, None))(jnp.asarray(Y), w, v))
    args = jnp.arange(12.0) / 3, jnp.cos(jnp.arange(8.0)).reshape(4, 2)
    tiled = tile(fn, (0, 0, None), 3, lowmem=lowmem)
    both = (jax.grad(loss(f), (0, 1))(*args) for f in (tiled, fn))
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)


surrogate = jax.custom_jvp(lambda x, w: jnp.sign(w))
surrogate.defjvp(lambda primals, tangents: (jnp.sign(primals[1]), tangents[1] * jnp.cos(primals[0]).sum()))


summed = jax.custom_vjp(lambda x: lax.psum(x, "b"))
summed.defvjp(lambda x: (lax.psum(x, "b"), None), lambda _, slope: (slope,))


def test_a_rule_with_the_name_of_a_map_is_refused_outside_of_it():
    """What tensor parallelism ends a layer with: JAX hands the rule one cotangent of the sum, not one of each."""
    fn = lambda x: jnp.sin(summed(x)).sum()
    x = jnp.asarray(Y[:, :, 0])
    with pytest.raises(TileError, match=r"outside of a `jax.vmap` whose axis it names"):
        jax.grad(lambda x: jax.vmap(tile(fn, 0, 3), axis_name="b")(x).sum())(x)
    inside = (jax.vmap(jax.grad(f), axis_name="b")(x) for f in (tile(fn, 0, 3), fn))
    np.testing.assert_allclose(*inside, rtol=1e-5)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer versions of JAX refuse it untiled too")
def test_a_map_may_have_the_name_of_a_mesh_axis(float64):
    fn = lambda x: (x * jnp.tanh(lax.pmean(x, "d"))).sum()
    loss = lambda fn: lambda x: jnp.sin(jax.vmap(fn, axis_name="d")(x)).sum()
    with jax.set_mesh(jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        x = jnp.asarray(Y[:, :, 0])
        np.testing.assert_allclose(jax.grad(loss(tile(fn, 0, 3)))(x), jax.grad(loss(fn))(x), rtol=1e-9)


def test_of_no_elements_what_they_share_is_what_it_is(float64):
    fn, w = lambda x, w: (x * w, jnp.sin(w)), jnp.arange(1.0, 13.0)
    loss = lambda fn: lambda w: sum(o.sum() for o in jax.vmap(fn, (0, None), (0, None))(jnp.zeros((0, 12)), w))
    found, expected = (jax.value_and_grad(loss(f))(w) for f in (tile(fn, (0, 0), 3), fn))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-9)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-9)


@pytest.mark.parametrize("results", [2, 3])
def test_tangents_may_depend_on_what_values_do_not(results, float64):
    """Straight-through estimators, surrogate gradients."""
    several = lambda x, w: (surrogate(x, w), surrogate(x, w).astype(int), jnp.sin(surrogate(x, w)).sum())
    fn = several if results == 3 else lambda x, w: several(x, w)[1:]  # one that is differentiated: with its gradients
    loss = lambda fn: lambda w: sum(jnp.sin(o * 1.0).sum() for o in jax.vmap(fn, (0, None))(jnp.asarray(Y), w))
    w = jnp.arange(1.0, 13.0) / 3
    for way in (jax.value_and_grad, lambda loss: jax.jit(jax.value_and_grad(loss)), jax.jacrev):
        for got, want in zip(*(jax.tree.leaves(way(loss(f))(w)) for f in (tile(fn, 0, 3), fn)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9)
    found, expected = (jax.jvp(loss(f), (w,), (jnp.cos(w),))[1] for f in (tile(fn, 0, 3), fn))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


through = jax.custom_vjp(lambda x, w: w)
through.defvjp(lambda x, w: (w, x.sum()), lambda total, slope: (None, slope * total))


def test_a_rule_of_what_elements_share_is_refused_outside_of_their_vmap():
    """JAX clips the sum of their cotangents once; within, each has its own."""
    fn = tile(lambda x, w: (x[:, None] * clipped(w)).sum(), (0, None), 3)
    x, w = Y[:, :, 0], jnp.arange(3.0)
    reads = tile(lambda x, w: (x[:, None] * through(x, w)).sum(), (0, None), 3)
    beside = lambda x, w: (lambda x, w: x[:, None] * clipped(w))(*lax.optimization_barrier((x, w))).sum()
    for one in (fn, reads, tile(beside, (0, None), 3)):
        with pytest.raises(TileError, match=r"a `jax.custom_vjp` rule, of which elements share the cotangents"):
            jax.grad(lambda w, one=one: jax.vmap(one, (0, None))(x, w).sum())(w)
    each = jax.vmap(jax.grad(fn, 1), (0, None))(x, w)
    np.testing.assert_allclose(each, np.clip(np.outer(x.sum(1), np.ones(3)), -1, 1), rtol=1e-6)
    apart = tile(lambda x, w: ((x * w.sum()).sum(), clipped(w) * 2), (0, None), 3)  # of elements' own, and of none
    found = jax.grad(lambda w: sum(o.sum() for o in jax.vmap(apart, (0, None), (0, None))(x, w)))(w)
    np.testing.assert_allclose(found, x.sum() + 1, rtol=1e-5)
    rows = lambda fn: jax.grad(lambda x: jax.vmap(fn, (0, None))(x, w).sum())(x)  # a rule of what is mapped is its own
    np.testing.assert_allclose(rows(tile(lambda x, w: (clipped(x) * w.sum()).sum(), (0, None), 3)), np.ones_like(x))


# Of rows [3, 12, 4]: each element's scalar, what all of them share, and what is the same for all.
IN_FLOAT32 = {
    "norm": lambda fn: lambda y: jnp.sin(jax.vmap(fn(lambda h: nll(normed(h))), axis_name="b")(y)).sum(),
    "shared": lambda fn: lambda y: jnp.sin(jax.vmap(fn(lambda x, h: (h**2).sum()), (0, None))(y, y[0])).sum(),
    "mean": lambda fn: (
        lambda y: sum(
            jnp.sin(o).sum()
            for o in jax.vmap(fn(lambda h: (normed(h), lax.pmean(jnp.tanh(h), "b"))), 0, (0, None), axis_name="b")(y)
        )
    ),
}


def nll(h):
    return jax.nn.logsumexp(h @ jnp.asarray(W, h.dtype), -1).mean()


@pytest.mark.optimised
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_float32_is_as_close_to_float64_as_untiled(name):
    """At the compiler's own flags, as people run it."""
    tiled, fn = (IN_FLOAT32[name](each) for each in (lambda fn: tile(fn, 0, 3), lambda fn: fn))
    args = (jnp.asarray(Y, jnp.float32),)
    assert_right(tiled, args, untiled(fn, args))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_batch_norm_of_equinox(mode):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="b", mode=mode)
    fn = lambda x: jax.vmap(norm, axis_name="b", in_axes=(0, None), out_axes=(0, None))(x, state)[0]
    np.testing.assert_allclose(tile(fn, 0, 4)(X), fn(X), rtol=2e-5, atol=2e-5)
    loss = lambda fn: lambda x: jnp.sum(jnp.sin(fn(x)) ** 2)
    np.testing.assert_allclose(jax.grad(tile(loss(fn), 0, 4))(X), jax.grad(loss(fn))(X), rtol=2e-5, atol=2e-5)


def test_name_of_a_mesh_stays_beside_one_of_vmap():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = lambda x: jax.vmap(lambda r: r * lax.psum(r, ("b", "d")), axis_name="b")(x)
    spec = jax.P("d")
    run = lambda fn: jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(X[:20])
    np.testing.assert_allclose(run(tile(fn, 0, 3)), run(fn), rtol=2e-5, atol=2e-5)
