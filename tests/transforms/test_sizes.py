"""What may be whole: values that loops read, rows that are picked, sums. Larger ones are made in tiles or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from tests.helpers import assert_no_large, assert_tiles
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic

L, D, F = 48, 4, 40  # rows, features, hidden


def hops(x, w):
    h = jnp.tanh(x @ w)
    step = lambda c, _: (jnp.tanh(h.T @ nn.softmax(h @ c)), None)
    return lax.scan(step, jnp.ones(F), None, 3)[0].sum()


def power(x, w):
    h = x @ w

    def step(_, v):
        v = h.T @ (h @ v)
        return v / jnp.linalg.norm(v)

    return lax.fori_loop(0, 3, step, jnp.ones(F)).sum()


def transport(x, w):
    cost = ((x[:, None] - w.T[None]) ** 2).sum(-1)

    def step(both, _):
        f = -nn.logsumexp(both[1][None] - cost, axis=1)
        return (f, -nn.logsumexp(f[:, None] - cost, axis=0)), None

    f, g = lax.scan(step, (jnp.zeros(L), jnp.zeros(F)), None, 3)[0]
    return f.mean() + g.mean()


def draw():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((L, D), (D, F))]


@pytest.mark.parametrize("fn", [hops, power, transport])
def test_a_loop_makes_what_it_reads(fn):
    """The body of a scan computes a cut intermediate again, tile by tile, in each step."""
    args = draw()
    frozen = lambda *args: lax.stop_gradient(fn(*args))
    assert_tiles(frozen, (0, None), 5, args, fast=True)
    assert_no_large(jax.make_jaxpr(tile(fn, (0, None), 12))(*args), L * F)


def means(x, w):
    """Soft k-means, of other rows' centers."""
    h = jnp.tanh(x @ w)

    def step(c, _):
        near = nn.softmax(-((h[:, None] - c[None]) ** 2).sum(-1), axis=1)
        return (near.T @ h) / near.sum(0)[:, None], None

    return (lax.scan(step, jnp.stack([h[0], h[7], h[30]]), None, 3)[0] ** 2).sum()


def means_of_plans(x, w):
    """Loops within a loop: centers of what is transported to them."""

    def step(centers, _):
        cost = ((x[:, None] - centers[None]) ** 2).sum(-1)

        def inner(both, _):
            f = -nn.logsumexp(both[1][None] - cost, axis=1)
            return (f, -nn.logsumexp(f[:, None] - cost, axis=0)), None

        f, g = lax.scan(inner, (jnp.zeros(L), jnp.zeros(16)), None, 2)[0]
        plan = jnp.exp(f[:, None] + g[None] - cost)
        return plan.T @ x / plan.sum(0)[:, None], None

    return (lax.scan(step, w.T[:16], None, 2)[0] ** 2).sum()


def transport_kept(x, w):
    return jax.checkpoint(transport)(x, w)


@pytest.mark.parametrize("fn", [hops, transport, means, means_of_plans, transport_kept])
@pytest.mark.parametrize("outputs", ["one", "two"])
def test_derivatives_compute_the_steps_of_a_loop_again(fn, outputs):
    """Untiled they keep cut arrays of each step, and add up the cotangents of what all steps read."""
    made = fn if outputs == "one" else lambda x, w: (fn(x, w), jnp.tanh(x @ w).sum(1))
    assert_tiles(made, (0, None), 5, draw(), fast=True)
    total = lambda x, w: sum(a.sum() for a in jax.tree.leaves(tile(made, (0, None), 12)(x, w)))
    assert_no_large(jax.make_jaxpr(jax.grad(total, (0, 1)))(*draw()), L * F)


def test_what_steps_compute_again_has_its_own_derivative_rule():
    """The body of a loop, put into `jax.checkpoint`, keeps the rules of the functions that it calls."""

    @jax.custom_jvp
    def doubled(x):
        return x

    doubled.defjvps(lambda t, _, x: 2 * t)

    def fn(x, w):
        h = doubled(jnp.tanh(x @ w))
        step = lambda c, _: (jnp.tanh(h.T @ nn.softmax(doubled(h) @ c)), None)
        return lax.scan(step, jnp.ones(F), None, 3)[0].sum()

    assert_tiles(fn, (0, None), 5, draw(), fast=True)


@pytest.mark.parametrize("clipped", [0.01, 1e9])
@pytest.mark.parametrize("within", [False, True])
def test_a_rule_is_of_the_sum_of_all_steps(clipped, within):
    """What is made in each step has its cotangent in each step: the rule would be applied to parts of it."""

    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -clipped, clipped),))

    def fn(x, w):
        made = lambda x, w: clip(jnp.tanh(x @ w))
        h = (tile(made, (None, 1), 2) if within else made)(x, w)
        return (lax.scan(lambda c, _: (jnp.tanh(h.T @ nn.softmax(h @ c)), None), jnp.ones(F), None, 3)[0] ** 2).sum()

    with pytest.raises(TileError, match="adds up a cut array"):
        jax.grad(tile(fn, (0, None), 5), 1)(*draw())


def test_a_loop_keeps_no_cut_array_of_its_steps():
    """What the loop itself returns of every step, and is no output, is refused."""

    def fn(x, w):
        h = jnp.tanh(x @ w)
        step = lambda c, _: (jnp.tanh(h.T @ nn.softmax(h @ c)), h * c)
        return jnp.sort(lax.scan(step, jnp.ones(F), None, 3)[1], axis=0).sum()

    with pytest.raises(TileError, match="keeps a cut array of each step"):
        jax.make_jaxpr(tile(fn, (0, None), 12))(*draw())


def test_a_policy_says_what_is_computed_again():
    fn = lambda x, w: checkpoint_name(hops(x, w), "kept") ** 2
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    with pytest.raises(TileError, match="adds up a cut array"):
        jax.make_jaxpr(jax.grad(tile(fn, (0, None), 12, policy=policy), (0, 1)))(*draw())


PICKS = {
    "the first half": lambda h: h[: L // 2],
    "the middle": lambda h: h[10:40],
    "every second": lambda h: h[::2],
}


@pytest.mark.parametrize("name", PICKS)
@pytest.mark.parametrize("gather", ["small", "none"])
def test_a_range_of_rows_stays_cut(name, gather):
    x, w = draw()
    fn = lambda x, w: (PICKS[name](jnp.tanh(x @ w)) ** 2).mean(0)
    assert_tiles(fn, (0, None), 5, (x, w), fast=True)
    loss = lambda x, w: tile(fn, (0, None), 12, gather=gather)(x, w).sum()
    assert_no_large(jax.make_jaxpr(jax.grad(loss))(x, w), L * F // 2)


@pytest.mark.parametrize("gather", ["small", "none"])
def test_rows_that_are_larger_than_a_tile_are_not_summed_up(gather):
    x, w = draw()
    ids = jnp.arange(L // 2) * 5 % L
    picked = lambda x, w: (jnp.tanh(x @ w)[ids] ** 2).mean()
    with pytest.raises(TileError, match="rows of the cut axis that are together larger than a tile"):
        tile(picked, (0, None), 12, gather=gather)(x, w)
    assert jnp.allclose(tile(picked, (0, None), 12, gather="any")(x, w), picked(x, w))


def test_a_sum_is_no_larger_than_a_tile():
    x, w = draw()
    segments = jnp.arange(L) // 2
    fn = lambda x, w: (jax.ops.segment_sum(jnp.tanh(x @ w), segments, L // 2) ** 2).mean()
    with pytest.raises(TileError, match="the tiles add up to an array that is larger than they are"):
        tile(fn, (0, None), 12)(x, w)
    assert jnp.allclose(tile(fn, (0, None), 12, gather="any")(x, w), fn(x, w))


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_the_gradient_of_a_narrow_weight_may_be_summed_up_wider(compute):
    """Of a large vocabulary in bfloat16 the sum in float32 is larger than all else, with few rows to a tile."""
    x, w = jnp.ones((L, D), compute), jnp.ones((D, 100 * F), jnp.bfloat16)
    loss = lambda x, w: nn.logsumexp(x @ w.astype(x.dtype), axis=-1).mean()
    made = jax.eval_shape(jax.grad(tile(loss, (0, None), L), (0, 1)), x, w)
    assert [g.dtype for g in made] == [compute, jnp.bfloat16]


def test_rows_that_labels_look_up_count_as_an_input():
    """Keys and values of a sequence may be as large as the tokens' embeddings, larger than their table."""
    ids, table, w = jnp.arange(L) % 7, jnp.ones((7, D)), jnp.ones((3, D, D))

    def attend(ids, table, w):
        x = table[ids]
        return (nn.softmax((x @ w[0]) @ (x @ w[1]).T) @ (x @ w[2])).sum()

    grad = jax.grad(tile(attend, (0, None, None), 12), (1, 2))
    assert_no_large(jax.make_jaxpr(grad)(ids, table, w), L * L)
