"""Policies: what the backward loops find stored instead of computing it again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from experiments.planning.hlo import dot_flops
from transforms import tile

pytestmark = pytest.mark.symbolic
POLICIES = jax.checkpoint_policies
UNIT = 2 * 64 * 8 * 32
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["up"],
    names_which_can_be_offloaded=[],
    offload_src="device",
    offload_dst="pinned_host",
)


def mlp(x, up, down):
    hidden = checkpoint_name(x @ up, "up")
    return checkpoint_name(jax.nn.gelu(hidden), "active") @ down


def arrays():
    rng = np.random.default_rng(0)
    shapes = ((64, 8), (8, 32), (32, 8))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def square(fn):
    return jax.value_and_grad(lambda *args: (fn(*args) ** 2).sum(), (0, 1, 2))


@pytest.mark.measured
@pytest.mark.parametrize(
    ("policy", "products"),
    [
        (None, 7),
        (POLICIES.nothing_saveable, 7),
        (POLICIES.save_only_these_names("up"), 6),
        (POLICIES.save_only_these_names("other"), 7),
        (POLICIES.dots_saveable, 6),
        (POLICIES.everything_saveable, 6),
        (OFFLOAD, 6),
    ],
)
def test_what_is_kept_is_not_computed_again(policy, products):
    args = arrays()
    compiled = jax.jit(square(tile(mlp, (0, None, None), 4, policy=policy))).lower(*args).compile()
    assert dot_flops(compiled.as_text()) == products * UNIT
    for a, b in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(square(mlp)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.measured
def test_between_the_loops_of_one_program():
    def variance(x, w):
        hidden = checkpoint_name(x @ w, "hidden")
        return jnp.square(hidden - hidden.mean()).mean()

    x, w, _ = arrays()
    value = lambda **options: jax.jit(tile(variance, (0, None), 4, **options)).lower(x, w).compile()
    kept = value(policy=POLICIES.save_only_these_names("hidden"))
    assert dot_flops(kept.as_text()) == UNIT
    assert dot_flops(value().as_text()) == 2 * UNIT
    np.testing.assert_allclose(kept(x, w), variance(x, w), rtol=1e-5)


def deep(x, weights):
    """Layers of attention, whose keys are all tokens': each takes loops of its own, which need what is before it."""
    for query, key, out in weights:
        x = x + checkpoint_name(jax.nn.softmax(jnp.sin(x @ query) @ (x @ key).T) @ x @ out, "branch")
        x = checkpoint_name(x, "layer")
    return (x**2).mean()


def test_products_grow_with_the_layers_that_are_named_and_not_with_their_square():
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((24, 6), (5, 3, 6, 6)))
    keep = tile(deep, (0, None), 4, policy=POLICIES.save_only_these_names("layer"))
    assert "computes more products again" in str(tile(deep, (0, None), 4).plan(x, list(weights[:4])))
    plans = [keep.plan(x, list(weights[:layers] / 6)).gradient for layers in (2, 3, 4, 5)]
    assert len(set(np.diff([plan.flops for plan in plans]))) == 1 and plans[-1].flops < 2.2 * plans[-1].untiled_flops
    for wrap in (jax.grad, lambda fn: jax.jacfwd(jax.grad(fn))):
        got, want = (jax.jit(wrap(fn))(x, list(weights[:3] / 6)) for fn in (keep, deep))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


def outside(fn):
    return jax.checkpoint(tile(fn, (0, None, None), 4))


def inside(fn):
    return tile(jax.checkpoint(fn), (0, None, None), 4)


@pytest.mark.measured
@pytest.mark.parametrize("wrap", [outside, inside])
def test_checkpoints_do_not_pay_the_forward_three_times(wrap):
    compiled = jax.jit(square(wrap(mlp))).lower(*arrays()).compile()
    assert dot_flops(compiled.as_text()) == 7 * UNIT
