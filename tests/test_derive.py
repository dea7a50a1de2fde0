"""Every derivative of a tiled function, of either mode and any order, is the untiled one's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transforms import tile

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


def hvp(fn):
    return jax.jvp(jax.grad(total(fn), (0, 1)), (H, W), (jnp.cos(H), jnp.sin(W)))[1]


DERIVATIVES = {
    "grad": lambda fn: jax.grad(total(fn), (0, 1))(H, W),
    "grad under jit": lambda fn: jax.jit(jax.grad(total(fn), (0, 1)))(H, W),
    "jvp": lambda fn: jax.jvp(fn, (H, W), (jnp.cos(H), jnp.sin(W))),
    "jvp in one argument": lambda fn: jax.jvp(lambda w: fn(H, w), (W,), (jnp.sin(W),)),
    "linearize": lambda fn: jax.linearize(fn, H, W)[1](jnp.cos(H), jnp.sin(W)),
    "jacrev": lambda fn: jax.jacrev(fn, 1)(H, W),
    "jacfwd": lambda fn: jax.jacfwd(fn, 1)(H, W),
    "forward over reverse": hvp,
    "reverse over forward": lambda fn: jax.grad(lambda h: jax.jvp(lambda h: total(fn)(h, W), (h,), (jnp.cos(h),))[1])(
        H
    ),
    "grad of grad": lambda fn: jax.grad(lambda h: (jax.grad(total(fn))(h, W) ** 2).sum())(H),
    "hessian": lambda fn: jax.hessian(total(fn), 1)(H, W),
    "vmap of grad": lambda fn: jax.vmap(jax.grad(total(fn), 1), (0, None))(jnp.stack([H, 2 * H]), W),
    "grad of vmap": lambda fn: jax.grad(lambda w: jax.vmap(lambda h: total(fn)(h, w))(jnp.stack([H, 2 * H])).sum())(W),
    "inside checkpoint": lambda fn: jax.grad(jax.checkpoint(total(fn)), (0, 1))(H, W),
    "inside scan": lambda fn: jax.grad(
        lambda w: jax.lax.scan(lambda c, k: (c + total(fn)(k * H, w), None), 0.0, jnp.arange(1.0, 3))[0]
    )(W),
}


@pytest.mark.parametrize("fn", [scalar, perplexity, per_token, several], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative_equals_untiled(name, fn):
    with jax.enable_x64(True):
        want = DERIVATIVES[name](fn)
        got = DERIVATIVES[name](tile(fn, (0, None), 4))
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
