"""State spaces against their definition, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transforms import tile
from zoo.models.hybrids.mamba import added, state_space
from zoo.models.hybrids.shared import decays

BATCH, HEADS, WIDTH, GROUPS, SIZE = 2, 4, 5, 2, 6


def operands(seq, decay=1.0):
    """Return channels, both directions, and logarithms of decay of `seq` tokens."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(BATCH, seq, *shape)), jnp.float32)
    return normal(HEADS, WIDTH), normal(GROUPS, SIZE), normal(GROUPS, SIZE), -decay * jnp.exp(normal(HEADS))


def by_definition(x, b, c, log_decay, begins):
    x, b, c, log_decay = (np.asarray(part, np.float64) for part in (x, b, c, log_decay))
    b, c = (np.repeat(part, HEADS // GROUPS, axis=2) for part in (b, c))
    state, found = np.zeros((BATCH, HEADS, WIDTH, SIZE)), []
    for t in range(x.shape[1]):
        state = np.where(begins[:, t, None, None, None], 0, state) * np.exp(log_decay[:, t])[..., None, None]
        state = state + np.einsum("bmw,bmn->bmwn", x[:, t], b[:, t])
        found.append(np.einsum("bmn,bmwn->bmw", c[:, t], state))
    return np.stack(found, 1)


@pytest.mark.parametrize("seq", [1, 7, 64, 150])
def test_chunks_are_the_recurrence(seq):
    parts = operands(seq, 0.1)
    expected = by_definition(*parts, np.zeros((BATCH, seq), bool))
    np.testing.assert_allclose(state_space(*parts), expected, atol=2e-5)


def test_one_token_after_the_other_is_the_recurrence():
    parts = operands(9)
    tokens = jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), parts)
    state = jnp.zeros((BATCH, HEADS, WIDTH, SIZE))
    _, found = jax.lax.scan(lambda state, own: jax.vmap(added)(state, *own), state, tokens)
    expected = by_definition(*parts, np.zeros((BATCH, 9), bool))
    np.testing.assert_allclose(jnp.moveaxis(found, 0, 1), expected, atol=2e-5)


def test_a_text_begins_without_a_state():
    """In the middle of a chunk, at its first token, and twice in one."""
    begins = np.zeros((BATCH, 150), bool)
    begins[0, [0, 30, 64, 128, 140]] = begins[1, [3, 4, 149]] = True
    parts = operands(150, 0.1)
    np.testing.assert_allclose(state_space(*parts, jnp.asarray(begins)), by_definition(*parts, begins), atol=2e-5)


def test_what_is_left_is_as_precise_behind_what_has_decayed():
    """Of tokens side by side, whatever all those before them in the chunk sum to."""
    log_decay = jnp.where(jnp.arange(64) < 60, -300.0, -0.01)[None, :, None]
    left = decays(log_decay, jnp.zeros((1, 64), bool))
    np.testing.assert_allclose(left.pairs[0, 0, 63, 60:], np.exp([-0.03, -0.02, -0.01, 0]), rtol=2e-7)
    np.testing.assert_array_equal(left.last, left.pairs[:, :, -1])


def test_tiles_hand_on_the_state():
    """`tile` cuts tokens between chunks, and its loop carries the state: value and gradients as without."""
    parts = operands(1024, 0.1)
    total = lambda *parts: (state_space(*parts) ** 2).mean()
    tiled = tile(total, axis=1, n=2)
    np.testing.assert_allclose(tiled(*parts), total(*parts), rtol=1e-5)
    for ours, whole in zip(
        jax.grad(tiled, argnums=(0, 1, 2, 3))(*parts), jax.grad(total, argnums=(0, 1, 2, 3))(*parts), strict=True
    ):
        np.testing.assert_allclose(ours, whole, atol=1e-6)
    plan = str(tiled.plan(*parts))
    assert "completed" not in plan, plan
