"""Functions with scans, loops, branches, checkpointed blocks and derivative rules, all of (x [T D], w [L D D])."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transforms import tile

T, D, L = 10, 3, 4  # tiles of 3, 3, 3, 1 along T for n = 4
BATCH = (0, None)


def draw(*shape, scale=1.0):
    return scale * np.random.default_rng(sum(shape)).normal(size=shape)


ARGS = draw(T, D), draw(L, D, D, scale=0.6)
FUNCTIONS = {}


def function(fn):
    FUNCTIONS[fn.__name__] = fn
    return fn


# ---------------------------------------------------------------------------------------------------------------- scan


@function
def layers(x, w):
    def body(h, w):
        return jnp.tanh(h @ w), h.sum(-1)

    h, sums = lax.scan(body, x, w)
    return h.mean(), sums


@function
def layers_in_reverse_unrolled(x, w):
    h, norms = lax.scan(lambda h, w: (jnp.tanh(h @ w), (h * h).sum()), x, w, reverse=True, unroll=2)
    return h, norms


@function
def checkpointed_layers(x, w):
    h, _ = lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, w)
    return (h**2).mean()


@function
def layers_checkpointed_by_policy(x, w):
    policy = jax.checkpoint_policies.dots_saveable
    body = jax.checkpoint(lambda h, w: (jnp.tanh(jnp.tanh(h @ w) @ w.T), None), policy=policy, prevent_cse=False)
    return lax.scan(body, x, w)[0].sum(0)


@function
def shared_weights(x, w):  # their gradient is a partial sum that the backward scan carries
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w[0]), None), x, None, length=L)
    return (h**2).mean()


@function
def sum_carried_from_zero(x, w):
    total, _ = lax.scan(lambda total, w: (total + jnp.sum((x @ w) ** 2), None), 0.0, w)
    return jnp.log(total)


@function
def sum_carried_from_elsewhere(x, w):  # which counts once, not once for each tile
    total, steps = lax.scan(lambda total, w: (0.5 * total + (x @ w).sum(0), total), w[0, 0], w)
    return total, steps


@function
def auxiliary_loss_carried(x, w):
    def body(carry, w):
        h, aux = carry
        h = jnp.tanh(h @ w)
        return (h, aux + (h**2).mean()), h.max(0)

    (h, aux), top = lax.scan(body, (x, 0.0), w)
    return h.sum() + aux**2, top


@function
def counters_flags_and_trees(x, w):
    def body(carry, i):
        h = jnp.tanh(carry["h"] @ w[i])
        some = {"h": h, "positive": carry["positive"] + (h > 0).sum(), "high": carry["high"] | (h > 0.9).any(0)}
        return some, (h > 0).sum(1)

    carry, counts = lax.scan(body, {"h": x, "positive": 0, "high": jnp.zeros(D, bool)}, jnp.arange(L))
    return carry, counts


@function
def results_that_no_tile_changes(x, w):
    def body(carry, w):
        h, i, angle = carry
        return (jnp.tanh(h @ w) * jnp.cos(angle), i + 1, angle * 0.5), (h.sum(), i * 2.0, angle)

    (h, i, angle), (sums, steps, angles) = lax.scan(body, (x, 0, 1.0), w)
    return h.sum() * steps.sum() + sums.sum() * i, angle * angles


@function
def nested_scans(x, w):
    def outer(h, w):
        inner = lambda h, s: (jnp.tanh(h @ w * s), h.sum())
        h, sums = lax.scan(inner, h, jnp.arange(1.0, 3.0))
        return h, sums.sum()

    h, sums = lax.scan(jax.checkpoint(outer), x, w)
    return h.mean() + (sums**2).mean()


@function
def recurrent_off_the_axis(x, w):
    def step(h, x):
        h = jnp.tanh(h + x)
        return h, h

    h, hs = lax.scan(step, jnp.zeros(x.shape[0]), x[:, :2].T)
    return hs.mean() * h.sum()


@function
def iterated_statistics(x, w):  # all tiles together, at every step
    def step(c, _):
        p = jax.nn.softmax(x @ c, -1)
        return (x.T @ p) / p.sum(0), None

    return lax.scan(step, w[0], None, length=3)[0]


# ------------------------------------------------------------------------------------------- fori, while, cond, switch


@function
def counted_loop(x, w):
    return lax.fori_loop(0, L, lambda i, h: jnp.tanh(h @ w[i]) * i, x).sum()


@function
def branch_by_an_argument(x, w):
    return lax.cond(w[0, 0, 0] > 0, lambda x: jnp.sin(x @ w[0]), lambda x: 2 * x, x).sum(0)


@function
def branch_by_a_statistic(x, w):
    return lax.cond(x.mean() > 0, lambda x: (x @ w[0]).sum(), lambda x: 0.5 * (x**2).sum(), x)


@function
def branches_that_stand_differently(x, w):
    branches = [lambda x: jnp.sin(x @ w[0]).sum(0), lambda x: x.sum(0), lambda x: w[0, 0]]
    return [lax.switch(i + jnp.argmax(w) * 0, branches, x) for i in range(3)]


@function
def branches_of_a_sum_and_a_maximum(x, w):
    return lax.cond(w[0, 0, 0] > 0, lambda x: x.sum(0), lambda x: x.max(0), x)


@function
def branch_for_each_layer(x, w):
    def body(h, i):
        return lax.cond(i % 2 == 0, lambda h: jnp.tanh(h @ w[i]), lambda h: 2 * h - 1, h), None

    return lax.scan(body, x, jnp.arange(L))[0].mean(0)


@function
def branch_for_each_row(x, w):
    chosen = jnp.arange(x.shape[0]) % 3
    branches = [lambda x: x.sum(), lambda x: (x**2).sum(), lambda x: x[0]]
    return jax.vmap(lambda x, i: lax.switch(i, branches, x))(x, chosen)


@function
def branch_by_platform(x, w):
    return lax.platform_dependent(x, cpu=lambda x: jnp.sin(x).sum(0), default=lambda x: jnp.sin(x).sum(0))


@function
def diagonal_of_all_pairs(x, w):
    pairs = x @ (x @ w[0]).T
    return (jax.nn.logsumexp(pairs, 1) - jnp.diagonal(pairs)).mean()


# ----------------------------------------------------------------------------------- derivative rules, remat and tile


@jax.custom_jvp
def doubled(x):
    return jnp.sin(x)


@doubled.defjvp
def _(primals, tangents):
    return doubled(*primals), 2 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@function
def derivative_rules_inside(x, w):
    h, _ = lax.scan(lambda h, w: (clipped(doubled(h @ w)), None), x, w)
    return (h**2).sum()


@function
def checkpoint_inside_checkpoint(x, w):
    inner = jax.checkpoint(lambda h, w: jnp.sin(jnp.cos(h @ w)), policy=jax.checkpoint_policies.nothing_saveable)
    return jax.checkpoint(lambda x: inner(inner(x, w[0]), w[1]))(x).mean(0)


@function
def tiled_along_the_same_axis(x, w):
    return (tile(lambda x, w: jnp.tanh(x @ w[0]).sum(-1), BATCH, 3)(x, w) ** 2).mean()


@function
def tiled_along_another_axis(x, w):
    return (tile(lambda x, w: jnp.tanh(x @ w[0]).sum(0), (None, 2), 2)(x, w) ** 2).mean()
