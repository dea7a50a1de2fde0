"""Products with operands that are repeated for the members of groups, cut where the copies would be too large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import quick
from transforms import tile

pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("float64")]

S, D, H, K, N = 48, 16, 4, 6, 2  # sequence, model, head size, query heads, key heads


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def heads(x, w, count):
    return (x @ w).reshape(*x.shape[:-1], count, -1)


def scores(q, k):
    return jnp.einsum("...qhd,...khd->...hqk", q, k)


def seen(weights, v):
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def attention(x, q, k, v, scores=scores, seen=seen):
    """Of queries, wider than the model; keys and values are repeated for the query heads that share them."""
    q, k, v = heads(x, q, K), heads(x, k, N), heads(x, v, N)
    k, v = (jnp.repeat(part, K // N, axis=-2) for part in (k, v))
    mask = jnp.tril(jnp.ones((S, S), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores(q, k), -jnp.inf))
    return (seen(weights, v) ** 2).sum()


CASES = {
    "one sequence": attention,
    "a batch": lambda x, *w: attention(x.reshape(S, 2, D // 2).swapaxes(0, 1), *(part[: D // 2] for part in w)),
    "each sequence": lambda x, *w: jax.vmap(attention, (1, None, None, None))(
        x.reshape(S, 2, D // 2), *(part[: D // 2] for part in w)
    ).sum(),
    "keys first": lambda *args: attention(*args, scores=lambda q, k: jnp.einsum("khd,qhd->hqk", k, q)),
    "values first": lambda *args: attention(*args, seen=lambda p, v: jnp.einsum("khd,hqk->hqd", v, p)),
    "heads first": lambda *args: attention(
        *args,
        scores=lambda q, k: q.transpose(1, 0, 2) @ k.transpose(1, 2, 0),
        seen=lambda p, v: p @ v.transpose(1, 0, 2),
    ),
}
ARGS = draw(0, S, D), draw(1, D, K * H) / 3, draw(2, D, N * H), draw(3, D, N * H)


@pytest.mark.parametrize("name", CASES)
def test_repeated_keys_are_read_once_for_each_group(name):
    tiled, args = tile(CASES[name], (0, None, None, None), 4), tuple(map(jnp.asarray, ARGS))
    both = (quick.jit(jax.value_and_grad(fn, (0, 1, 2, 3)))(*args) for fn in (tiled, CASES[name]))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    assert "grouped products" in tiled.plan(*args).passes
