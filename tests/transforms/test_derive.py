"""Every derivative of a tiled function, of either mode and any order, is the untiled one's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.ode import odeint

from tests import quick
from tests.helpers import equations
from transforms import tile

pytestmark = pytest.mark.symbolic

RNG = np.random.default_rng(1)
H, W, Y = RNG.normal(size=(10, 3)), RNG.normal(size=(3, 5)), RNG.integers(0, 5, 10)


def scalar(h, w):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, Y).mean() + 0.1 * (w**3).sum()


def perplexity(h, w):
    return jnp.exp(scalar(h, w))


def per_token(h, w):
    return jnp.tanh(h @ w) ** 3


def several(h, w):
    return {"tokens": jnp.sin(h @ w).sum(-1), "sum": jnp.cos(h).sum(), "gram": h.T @ jnp.tanh(h)}


def total(fn):
    """A scalar of all outputs, so that one gradient sees every one of them."""
    return lambda h, w: sum((jnp.arange(x.size).reshape(x.shape) * x).sum() for x in jax.tree.leaves(fn(h, w)))


def hvp(fn, h, w):
    return jax.jvp(jax.grad(total(fn), (0, 1)), (h, w), (jnp.cos(h), jnp.sin(w)))[1]


DERIVATIVES = {
    "grad": lambda fn, h, w: jax.grad(total(fn), (0, 1))(h, w),
    "grad under jit": lambda fn, h, w: jax.jit(jax.grad(total(fn), (0, 1)))(h, w),
    "jvp": lambda fn, h, w: jax.jvp(fn, (h, w), (jnp.cos(h), jnp.sin(w))),
    "jvp in one argument": lambda fn, h, w: jax.jvp(lambda w: fn(h, w), (w,), (jnp.sin(w),)),
    "linearize": lambda fn, h, w: jax.linearize(fn, h, w)[1](jnp.cos(h), jnp.sin(w)),
    "jacrev": lambda fn, h, w: jax.jacrev(fn, 1)(h, w),
    "jacfwd": lambda fn, h, w: jax.jacfwd(fn, 1)(h, w),
    "forward over reverse": hvp,
    "reverse over forward": lambda fn, h, w: jax.grad(
        lambda h: jax.jvp(lambda h: total(fn)(h, w), (h,), (jnp.cos(h),))[1]
    )(h),
    "grad of grad": lambda fn, h, w: jax.grad(lambda h: (jax.grad(total(fn))(h, w) ** 2).sum())(h),
    "hessian": lambda fn, h, w: jax.hessian(total(fn), 1)(h, w),
    "vmap of grad": lambda fn, h, w: jax.vmap(jax.grad(total(fn), 1), (0, None))(jnp.stack([h, 2 * h]), w),
    "grad of vmap": lambda fn, h, w: jax.grad(
        lambda w: jax.vmap(lambda h: total(fn)(h, w))(jnp.stack([h, 2 * h])).sum()
    )(w),
    "inside checkpoint": lambda fn, h, w: jax.grad(jax.checkpoint(total(fn)), (0, 1))(h, w),
    "inside scan": lambda fn, h, w: jax.grad(
        lambda w: jax.lax.scan(lambda c, k: (c + total(fn)(k * h, w), None), 0.0, jnp.arange(1.0, 3))[0]
    )(w),
}


@pytest.mark.crossed("name", "fn")
@pytest.mark.parametrize("fn", [scalar, perplexity, per_token, several], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative_equals_untiled(name, fn):
    with jax.enable_x64(True):
        run = DERIVATIVES[name]
        want = quick.jit(run, static_argnums=0)(fn, H, W)
        got = (run if name == "grad" else quick.jit(run, static_argnums=0))(tile(fn, (0, None), 4), H, W)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def test_grad_scales_with_the_cotangent():
    tiled = tile(scalar, (0, None), 4)
    for scale in (0.0, 1e-4, 3.0):
        got = jax.grad(lambda w, scale=scale: scale * tiled(H, w))(W)
        np.testing.assert_allclose(got, scale * jax.grad(scalar, 1)(H, W), rtol=1e-4, atol=1e-9)


def test_integers_and_unused_arguments_have_no_gradient():
    tiled = tile(lambda h, k, u: (h * k).sum(), (0, None, None), 4)
    out, vjp = jax.vjp(lambda h, u: tiled(h, 3, u), jnp.asarray(H), jnp.ones(2))
    grads = vjp(jnp.ones_like(out))
    assert (grads[0] == 3).all() and (grads[1] == 0).all()


def half_loss(x, w):
    return jnp.tanh(x @ w).astype(jnp.float32).mean()


def half_square(x, w):
    return ((x * jnp.float16(100)).astype(jnp.float32) ** 2).sum() + 0 * w.sum()


@pytest.mark.redundant("wrap")
@pytest.mark.parametrize(("fn", "scale"), [(half_loss, 2.0**15), (half_loss, 3.0), (half_square, 1e-6)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_float16_gradients_are_formed_at_the_scale_of_the_caller(fn, scale, wrap):
    """At a cotangent of 1 they would vanish, or overflow."""
    narrow = [jnp.asarray(RNG.normal(size=s), jnp.float16) for s in ((4096, 8), (8, 16))]
    if fn is half_square:
        narrow[0] = jnp.full((64, 4), 300, jnp.float16)
    wide = [a.astype(jnp.float32) for a in narrow]
    grad = lambda fn, args: jax.grad(lambda *args: wrap(fn)(*args) * scale, (0, 1))(*args)
    for got, near, exact in zip(grad(tile(fn, (0, None), 4), narrow), grad(fn, narrow), grad(fn, wide), strict=True):
        error = lambda a, exact=exact: float(jnp.abs(a.astype(jnp.float32) - exact).max())
        assert got.dtype == near.dtype and bool(jnp.isfinite(got).all())
        assert error(got) <= 4 * error(near) + 1e-3 * float(jnp.abs(exact).max())


NARROW = {
    "cross-entropy": lambda x, w: -jnp.diagonal(jax.nn.log_softmax(x @ w)).sum(),
    "linear": lambda x, w: (x @ w).sum(),
    "an argument that is a number": lambda x, w: (x * w[0, 0]).mean() ** 2,
}
POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NARROW)
def test_derivative_of_a_gradient_in_a_narrow_dtype(name, policy):
    """Gradients are formed wide: whatever is kept for the next derivative, they come out as without one."""
    x, w = (jnp.asarray(RNG.normal(size=s), jnp.bfloat16) for s in ((16, 6), (6, 20)))

    def second(fn, x, w):
        def size(w):
            grads = jax.grad(lambda *args: fn(*args).astype(jnp.float32), (0, 1))(x, w)
            return sum((g.astype(jnp.float32) ** 2).sum() for g in grads)

        return jax.value_and_grad(size)(w)

    exact = second(NARROW[name], x.astype(jnp.float32), w.astype(jnp.float32))
    near = quick.jit(second, static_argnums=0)(NARROW[name], x, w)
    got = quick.jit(second, static_argnums=0)(tile(NARROW[name], (0, None), 3, policy=POLICIES[policy]), x, w)
    for a, b, e in zip(got, near, exact, strict=True):
        error = lambda a, e=e: float(jnp.abs(a.astype(jnp.float32) - e).max())
        assert a.dtype == b.dtype
        assert error(a) <= 2 * error(b) + 1e-2 * float(jnp.abs(e).max())


def loops(fn, *args):
    found = list(equations(jax.make_jaxpr(fn)(*args)))
    return sum(e.primitive.name == "scan" for e in found)


@pytest.mark.parametrize(
    ("dtype", "passes"), [(jnp.float32, 1), (jnp.bfloat16, 1), (jnp.float16, 2), (jnp.float8_e5m2, 2)]
)
def test_one_pass_where_the_exponent_is_wide_enough(dtype, passes):
    loss = lambda x: jnp.square(x.astype(dtype).astype(jnp.float32) @ jnp.ones((4, 3))).sum()
    assert loops(jax.grad(tile(loss, 0, 4)), jnp.ones((32, 4))) == passes


def test_forward_mode_of_a_scalar_with_a_loop_of_unknown_length():
    fn = lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))[1].sum()
    assert jax.jvp(tile(fn, 0, 2), (jnp.ones(8),), (jnp.ones(8),)) == jax.jvp(fn, (jnp.ones(8),), (jnp.ones(8),))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(tile(fn, 0, 2))(jnp.ones(8))


@pytest.mark.parametrize("rule", [lambda g: g + 0.5, lambda g: jnp.where(jnp.arange(8) > 3, g, 0.5), jnp.negative])
def test_a_cotangent_to_which_a_rule_adds_is_not_scaled_afterwards(rule):
    """What a `jax.custom_vjp` adds of its own is no multiple of the cotangent."""
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (rule(g),))
    fn, x = lambda x: own(x).sum(), jnp.ones((6, 8))
    scaled = lambda fn: jax.grad(lambda x: 3 * fn(x))(x)
    assert jnp.allclose(scaled(tile(fn, 0, 2)), scaled(fn))


@pytest.mark.parametrize("scale", [2.517, 1 / 3])
def test_a_cotangent_that_is_rounded_on_its_way_is_not_scaled_afterwards(scale):
    """The derivative of `lax.reduce_precision` rounds as it does."""
    fn = lambda x: jax.lax.reduce_precision(jnp.sin(x), 8, 7).sum()
    scaled = lambda fn: jax.grad(lambda x: scale * fn(x))(jnp.arange(12.0).reshape(6, 2))
    np.testing.assert_allclose(scaled(tile(fn, 0, 3)), scaled(fn), rtol=1e-6)


def straight_through(x):
    return jnp.round(4 * x) / 4


def by_vjp(forward, backward):
    rule = jax.custom_vjp(forward)
    rule.defvjp(lambda x: (forward(x), None), lambda _, g: (backward(g),))
    return rule


def by_jvp(forward, moved):
    rule = jax.custom_jvp(forward)
    rule.defjvp(lambda primals, tangents: (forward(*primals), moved(*tangents)))
    return rule


def doubled_forward(x):
    """Its rule's own result is another than the function's."""
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (2 * jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    return rule(x)


RULES = {
    "rounding, straight through": by_vjp(straight_through, lambda g: g),
    "rounding, straight through, forward": by_jvp(straight_through, lambda t: t),
    "reversed": by_vjp(lambda x: 1.0 * x, lambda g: -0.3 * g),
    "scaled": by_jvp(lambda x: 1.0 * x, lambda t: 0.7 * t),
    "another value": doubled_forward,
    "true": by_jvp(jnp.sin, lambda t: t),
}
SHAPES = {
    "rows": lambda rows: rows.sum(-1),
    "rows and a sum": lambda rows: (rows.sum(-1), rows.sum()),
    "scalar": lambda rows: jnp.square(rows).mean(),
}
ORDERS = {
    "value and gradient": lambda fn, w: jax.value_and_grad(fn)(w),
    "reverse over reverse": lambda fn, w: jax.grad(lambda w: (jax.grad(fn)(w) * jnp.cos(w)).sum())(w),
    "forward over reverse": lambda fn, w: jax.jvp(jax.grad(fn), (w,), (jnp.cos(w),)),
}


@pytest.mark.crossed("rule", "shape", "order")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
def test_second_derivatives_of_values_are_those_of_what_a_rule_computes(rule, shape, order):
    """JAX differentiates a rule's own result where a function's value is differentiated again, not the function."""
    fn = lambda h, w: SHAPES[shape](jnp.tanh(RULES[rule](h @ w)))
    outside = lambda fn: lambda w: sum(jnp.exp(-x).sum() for x in jax.tree.leaves(fn(H, w)))
    run = quick.jit(lambda w, fn: ORDERS[order](outside(fn), w), static_argnums=1)
    with jax.enable_x64(True):
        for ours, theirs in zip(
            jax.tree.leaves(run(W, tile(fn, (0, None), 4))), jax.tree.leaves(run(W, fn)), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


# Where their argument is 0 the second result has an infinite slope.
ROOTS = {
    "rows": lambda x: (x**2, jnp.sqrt(x)),
    "sums": lambda x: ((x**2).sum(), jnp.sqrt(x).sum()),
    "rows and a sum": lambda x: (x**2, jnp.sqrt(x).sum()),
}


@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("order", ["value and gradient", "reverse over reverse"])
def test_a_result_that_nobody_reads_has_no_cotangent(name, order):
    x = jnp.array([0.0, 1.0, 4.0, 0.0, 2.0])
    run = lambda fn: ORDERS[order](lambda x: fn(x)[0].sum(), x)
    for ours, theirs in zip(run(tile(ROOTS[name], 0, 2)), run(ROOTS[name]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


LINEAR = {
    "rows": lambda h: h @ W,
    "rows and a sum": lambda h: {"rows": 2 * h, "sum": (h @ W).sum(0)},
    "scalar": lambda h: (h @ W).sum(),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_transposed_by_itself(name, mapped):
    def transposed(fn):
        fn, h = (jax.vmap(fn), jnp.stack([H, H])) if mapped else (fn, H)
        return jax.linear_transpose(fn, h)(jax.tree.map(jnp.cos, fn(h)))

    with jax.enable_x64(True):
        got, want = transposed(tile(LINEAR[name], 0, 4)), transposed(LINEAR[name])
    np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.parametrize("mapped", [False, True])
def test_solvers_transpose_a_tiled_product(mapped):
    """Some results and arguments of the product are not linear in what is solved for, and nobody reads them there."""
    product = lambda h, key, v: (h.T @ (h @ v) + v, h * jax.random.normal(key, h.shape))

    def solved(fn, w):
        matvec = lambda v: fn(w, jax.random.key(0), v)[0]
        return jax.scipy.sparse.linalg.gmres(matvec, w.sum(0), tol=1e-12)[0].sum()

    run = lambda fn: (lambda one: jax.vmap(one)(jnp.stack([H, 2 * H])) if mapped else one(H))(
        jax.grad(functools.partial(solved, fn))
    )
    with jax.enable_x64(True):
        found, wanted = (jax.jit(run, static_argnums=0)(fn) for fn in (tile(product, (0, None, None), 4), product))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)


def flow(h, w):
    """The end of an ordinary differential equation: its solver's rule closes over constants."""
    return odeint(lambda state, t, w: jnp.tanh(w @ state) - t, h, jnp.linspace(0.0, 0.5, 2), w)[-1]


@pytest.mark.parametrize("name", ["value and gradient", "reverse over reverse"])
def test_what_a_rule_closes_over_is_not_differentiated(name):
    fn = lambda h, w: jnp.square(jax.vmap(flow, (0, None))(h, w)).sum()
    run = lambda fn: ORDERS[name](functools.partial(fn, H), jnp.sin(W @ W.T))
    with jax.enable_x64(True):
        got, want = run(tile(fn, (0, None), 4, gather="any")), run(fn)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8)


def test_a_rule_of_what_is_not_differentiated_does_not_matter():
    """Frozen features, whose cotangents are clipped, forbid neither the forward mode nor the gradient in one loop."""
    clip = by_vjp(jnp.sin, lambda g: jnp.clip(g, -0.1, 0.1))
    fn = lambda h, w: jnp.square(clip(h) @ w).sum()
    tiled = tile(fn, (0, None), 4)
    with jax.enable_x64(True):
        moved, wanted = (DERIVATIVES["jvp in one argument"](one, H, W) for one in (tiled, fn))
    np.testing.assert_allclose(moved, wanted, rtol=1e-8)
    loops = [e for e in equations(jax.make_jaxpr(jax.grad(tiled, 1))(H, W).jaxpr) if e.primitive.name == "scan"]
    assert len(loops) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum(),
        lambda x: jnp.where(x > 0, x * jnp.log(x), 0.0).mean(),
        lambda x: jnp.log(jnp.where(x > 0, jnp.sqrt(x), 1.0).sum()),
    ],
)
def test_a_tangent_is_guarded_where_the_untiled_one_is(fn):
    """A gradient there is not a number: what is not taken is infinite."""
    x = jnp.array([0.0, 1.0, 4.0, 0.0, 2.0, 3.0, 0.0])
    for tangent in (x, jnp.ones_like(x)):
        moved = jax.jvp(fn, (x,), (tangent,))[1]
        assert np.isfinite(moved)
        np.testing.assert_allclose(jax.jvp(tile(fn, 0, 3), (x,), (tangent,))[1], moved, rtol=1e-6)


@pytest.mark.parametrize("inner", [lambda x: 2 * jnp.sin(x), lambda x: x * jnp.sin(x).sum()], ids=["rows", "sum"])
@pytest.mark.parametrize(
    "name", ["jvp in one argument", "forward over reverse", "reverse over forward", "grad of grad"]
)
def test_a_tile_within_a_tile_is_differentiated_in_either_mode(name, inner):
    within = lambda fn: lambda h, w: jnp.tanh(jax.vmap(fn)(h)) @ w
    with jax.enable_x64(True):
        want, got = (
            DERIVATIVES[name](fn, H, W) for fn in (within(inner), tile(within(tile(inner, 0, 2)), (0, None), 4))
        )
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


@jax.custom_vjp
def squared(x):
    """Its rule is not linear in the cotangent."""
    return x


squared.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.abs(g),))


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_a_rule_in_a_tile_within_a_tile_sees_the_cotangent(scale):
    inner = lambda h, w: jax.nn.logsumexp(squared(h @ w), axis=1)
    loss = lambda inner: lambda h, w: (inner(h, w) ** 2).mean()
    outer = tile(loss(tile(inner, (None, 1), 2)), (0, None), 3)
    found, right = (jax.grad(lambda w, f=f: scale * f(H, w))(W) for f in (outer, loss(inner)))
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-7)


def test_second_derivatives_of_a_rule_whose_loops_hand_on_what_they_end_in():
    loss = lambda h, w: jax.nn.logsumexp(squared(jnp.tanh(h @ w)), 0).sum()
    slope = lambda f: jax.jvp(jax.grad(lambda w: f(H, w)), (W,), (jnp.cos(W),))[1]
    np.testing.assert_allclose(slope(tile(loss, (0, None), 3)), slope(loss), rtol=1e-4, atol=1e-6)
