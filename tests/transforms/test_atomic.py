"""A run of a tiled program is one equation: nothing of its loops is kept for a backward pass, whoever splits it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval as pe

from tests import quick
from tests.helpers import assert_no_large, assert_same, equations, subjaxprs
from transforms import tile
from zoo.models.layers import attention

LENGTH, TILES = 64, 4
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(1, LENGTH, 2, 4)), jnp.float32)
WS = jnp.asarray(RNG.normal(size=(2, 4, 12)), jnp.float32)


def plain(q, k, v):
    return attention(q, k, v, scale=0.5)


tiled = tile(plain, (1, None, None), TILES)


def layer(attend, x, w):
    return x + attend(*jnp.split(x @ w, 3, axis=-1))


def scanned(attend, x, ws, wrap=lambda body: body):
    return lax.scan(wrap(lambda x, w: (layer(attend, x, w), None)), x, ws)[0]


def looped(attend, x, ws):
    return layer(attend, layer(attend, x, ws[0]), ws[1])


def loss(forward):
    return lambda attend, x, ws: (forward(attend, x, ws) ** 2).sum()


def gradient(forward):
    return lambda attend: jax.grad(lambda x, ws: loss(forward)(attend, x, ws), (0, 1))


STEPS = {
    "plain": gradient(looped),
    "jit": lambda attend: jax.jit(
        gradient(lambda attend, x, ws: jax.jit(looped, static_argnums=0)(attend, x, ws))(attend)
    ),
    "scan": gradient(scanned),
    "scan of checkpoint": gradient(lambda attend, x, ws: scanned(attend, x, ws, jax.checkpoint)),
    "checkpoint of scan": gradient(lambda attend, x, ws: jax.checkpoint(lambda x, ws: scanned(attend, x, ws))(x, ws)),
    "vmap": gradient(lambda attend, x, ws: jax.vmap(lambda ws: scanned(attend, x, ws))(jnp.stack([ws, ws / 2]))),
    "linearize": lambda attend: lambda x, ws: jax.linearize(lambda x: scanned(attend, x, ws), x)[1](x),
    "linear transpose": lambda attend: (
        lambda x, ws: jax.linear_transpose(jax.linearize(lambda x: scanned(attend, x, ws, jax.checkpoint), x)[1], x)(x)
    ),
    "hessian-vector product": lambda attend: (
        lambda x, ws: jax.jvp(lambda x: gradient(scanned)(attend)(x, ws)[0], (x,), (x,))[1]
    ),
}


def outside(jaxpr):
    """The equations that are not inside of a tiled run."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for param in eqn.params.values() if eqn.primitive.name != "tiled" else ():
            for inner in subjaxprs(param):
                yield from outside(inner)


@pytest.mark.parametrize("name", STEPS)
def test_no_residual_of_a_tile_loop_outlives_it(name):
    jaxpr = jax.make_jaxpr(STEPS[name](tiled))(X, WS)
    masks = LENGTH * LENGTH  # of all tiles
    assert_no_large(jaxpr, 2 * masks if name != "vmap" else 4 * masks)
    kept = [v.aval for eqn in outside(jaxpr) for v in eqn.outvars if hasattr(v.aval, "shape")]
    assert not [a.str_short() for a in kept if a.size >= masks]


@pytest.mark.parametrize(
    ("name", "tolerance"),  # second derivatives are rounded twice
    [("scan", 3e-5), ("scan of checkpoint", 3e-5), ("vmap", 3e-5), ("hessian-vector product", 2e-4)],
)
def test_steps_equal_untiled(name, tolerance):
    assert_same(quick.jit(STEPS[name](tiled))(X, WS), quick.jit(STEPS[name](plain))(X, WS), tolerance)


def test_what_nobody_reads_is_not_computed():
    two = tile(lambda x, w: (x @ w, jnp.tanh(x @ (2 * w))), (0, None), 2)
    closed = jax.make_jaxpr(two)(X[0, :, 0], WS[0])
    used, _ = pe.dce_jaxpr(closed.jaxpr, [True, False])
    products = lambda jaxpr: sum(e.primitive.name == "dot_general" for e in equations(jaxpr))
    assert (products(closed), products(used)) == (2, 1)


def test_vmap_maps_only_what_depends_on_what_is_mapped():
    fn = tile(lambda x, w: (x @ w, (w * w).sum()), (0, None), 2)
    outs = jax.eval_shape(jax.vmap(fn, (0, None), out_axes=(0, None)), jnp.ones((3, 4, 2)), jnp.ones((2, 2)))
    assert [o.shape for o in outs] == [(3, 4, 2), ()]


def test_what_is_left_of_a_call_is_mapped_as_it_was():
    three = tile(lambda x, w: (x @ w, (w * w).sum(), x.sum(1)), (0, None), 2)
    x, w = jnp.arange(24.0).reshape(3, 4, 2), jnp.arange(4.0).reshape(2, 2)
    closed = jax.make_jaxpr(three)(x[0], w)
    used, _ = pe.dce_jaxpr(closed.jaxpr, [False, True, True], instantiate=True)
    squares, sums = jax.vmap(jaxpr_as_fun(ClosedJaxpr(used, closed.consts)), (0, None), [None, 0])(x, w)
    np.testing.assert_allclose(squares, 14.0)
    np.testing.assert_allclose(sums, x.sum(2))


def test_what_jax_writes_in_simpler_equations_when_it_lowers_runs():
    """`searchsorted` is such a one in newer versions, where a program that holds it is lowered in two steps."""
    fn = lambda x: jnp.searchsorted(jnp.sort(x), x).astype(x.dtype) * x
    x = jnp.asarray([0.3, -1.0, 2.0, 0.5, 0.1])
    tiled = tile(fn, 0, 2)
    for through in (lambda f: f(x), jax.jit(lambda f: f(x), static_argnums=0), lambda f: jax.vmap(f)(x[None])[0]):
        assert (through(tiled) == fn(x)).all()
    assert (jax.grad(lambda x: tiled(x).sum())(x) == jax.grad(lambda x: fn(x).sum())(x)).all()
