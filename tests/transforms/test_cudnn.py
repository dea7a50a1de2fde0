"""cuDNN's attention in a tiled function: batch and heads are cut, forward and backward.

Where cuDNN is not, primitives of the same names compute what its kernels do; where its files are, they are compiled.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tests import quick
from tests.helpers import equations
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic

B, S, N, K, H = 4, 16, 4, 2, 8


def attend(layout, q, k, v):
    """Causal attention and the logarithms of its sums of exponentials `[B, N, S]`."""
    if layout:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k)
    scores = jnp.where(jnp.tri(*scores.shape[2:], dtype=bool), scores, -1e30)
    out = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, -1), v)
    return out.swapaxes(1, 2) if layout else out, jax.nn.logsumexp(scores, -1)


def primitive(name, outs, run):
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(run)
    made.def_abstract_eval(lambda *avals, **params: [a.update(weak_type=False) for a in outs(*avals, **params)])
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=True))
    return made


def _of_forward(q, *rest, layout, **_):
    heads, length = (q.shape[1], q.shape[2]) if layout else (q.shape[2], q.shape[1])
    return [q, q.update(shape=(q.shape[0], heads, length))]


def _backward(q, k, v, *rest, layout, **_):
    return list(jax.vjp(lambda *x: attend(layout, *x)[0], q, k, v)[1](rest[-1]))


FORWARD = primitive(
    "dot_product_attention_fwd_wrapper", _of_forward, lambda q, k, v, *_, layout, **__: list(attend(layout, q, k, v))
)
BACKWARD = primitive("dot_product_attention_bwd_wrapper", lambda q, k, v, *_, **__: [q, k, v], _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel(layout, q, k, v):
    return forward(layout, q, k, v)[0]


def forward(layout, q, k, v, lengths=None):
    empty = jnp.zeros(0)
    out, sums = FORWARD.bind(q, k, v, *(empty,) * 7, layout=layout, variadic_args=(False, False))
    return out, (q, k, v, sums, out)


def backward(layout, kept, given):
    q, k, v, sums, out = kept
    empty = jnp.zeros(0)
    return tuple(BACKWARD.bind(q, k, v, *(empty,) * 7, sums, out, given, layout=layout, variadic_args=(False, False)))


kernel.defvjp(forward, backward)


def drawn(kv_heads):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, S, kv_heads, N // kv_heads, H), (B, S, kv_heads, H), (B, S, kv_heads, H)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def loss(run, layout, q, k, v):
    """Groups of heads are a dimension of their own, as where they are cut; the kernel has them joined."""
    q = q.reshape(*q.shape[:2], -1, H)
    if layout:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jnp.sin(run(layout, q, k, v)).sum()


@pytest.mark.redundant("layout")
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(
    ("kv_heads", "axis", "n", "shape"),
    [
        (K, (0, 0, 0), 2, (B // 2, S, N, H)),  # the batch
        (K, (2, 2, 2), 2, (B, S, N // K, H)),  # kv heads, each with its query heads
        (1, (3, None, None), 4, (B, S, 1, H)),  # query heads of the one kv head: its gradients are sums
        (N, (2, 2, 2), 2, (B, S, 2, H)),  # as many of both
    ],
)
def test_kernels_run_a_tile_of_the_batch_or_of_heads_at_a_time(kv_heads, axis, n, shape, layout):
    args = drawn(kv_heads)
    plain = functools.partial(loss, lambda layout, *x: attend(layout, *x)[0], layout)
    tiled = tile(functools.partial(loss, kernel, layout), axis=axis, n=n)
    wanted = quick.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(*args)
    found = quick.jit(jax.value_and_grad(tiled, argnums=(0, 1, 2)))
    for one, other in zip(jax.tree.leaves(found(*args)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    calls = [e for e in equations(found.trace(*args).jaxpr) if e.primitive.name.startswith("dot_product_attention")]
    shape = shape if not layout else (shape[0], shape[2], shape[1], shape[3])
    # The value alone, of arrays no larger than the inputs, is not worth a loop.
    looped = [e for e in calls if e.invars[0].aval.shape == shape]
    assert {e.primitive.name[22:25] for e in looped} == {"fwd", "bwd"}
    assert not any("bwd" in e.primitive.name for e in calls if e not in looped)
    assert len(tiled.plan(*args).gradient.loops) == 1  # the kernel's own rule is linear: one loop makes both


def test_query_heads_of_one_kv_head_stay_together():
    q, k, v = drawn(K)
    q = q.reshape(B, S, N, H)
    run = lambda q, k, v: jnp.sin(kernel(0, q, k, v)).sum()
    tiled = tile(run, axis=(2, None, None), n=2)  # tiles of two query heads, which read one kv head: it is sliced
    found, wanted = (quick.jit(jax.grad(fn, argnums=(0, 1, 2)))(q, k, v) for fn in (tiled, run))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("axis", "reason"),
    [
        ((1, None, None), "attends along the cut axis"),
        ((2, None, None), "reads one kv head for several query heads, some of which are in other tiles"),
        ((3, None, None), "is a kernel that was written for whole arrays"),
    ],
)
def test_other_dimensions_are_whole(axis, reason):
    q, k, v = drawn(K)
    run = lambda q, k, v: jnp.sin(kernel(0, jnp.sin(q), k, v)).sum()
    with pytest.raises(TileError, match=rf"cannot tile `dot_product_attention_fwd_wrapper` at .*it {reason}"):
        tile(run, axis=axis, n=4, gather="none").plan(q.reshape(B, S, N, H), k, v)


def test_sums_are_finished_before_it():
    q, k, v = drawn(K)
    run = lambda q, k, v: kernel(0, q.sum(0, keepdims=True), k[:1], v[:1])
    args = q.reshape(B, S, N, H), k, v
    np.testing.assert_allclose(tile(run, axis=(0, None, None), n=4)(*args), run(*args), rtol=2e-5, atol=2e-5)


def clipped():
    run = jax.custom_vjp(lambda x: x)
    run.defvjp(lambda x: (x, None), lambda _, given: (jnp.clip(given, -1, 1),))
    return run


def scaled():
    run = jax.custom_vjp(jnp.sin)
    run.defvjp(lambda x: (jnp.sin(x), x), lambda x, given: (given * jnp.cos(x),))
    return run


@pytest.mark.parametrize(("own", "loops"), [(scaled, 1), (clipped, 2)])
def test_rules_inside_a_scan_that_are_linear_need_no_second_loop(own, loops):
    run = own()

    def loss(x, w):
        body = jax.checkpoint(lambda x, w: (run(x @ w), None))
        return jnp.sin(jax.lax.scan(body, x, w)[0]).sum()

    args = jnp.linspace(0, 3, 64 * 8).reshape(64, 8), jnp.full((3, 8, 8), 0.3)
    tiled = tile(loss, axis=(0, None), n=4)
    assert len(tiled.plan(*args).gradient.loops) == loops
    found, wanted = (quick.jit(jax.grad(fn, (0, 1)))(*args) for fn in (tiled, loss))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
