"""The gated delta rule against its definition, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transforms import tile
from zoo.models.hybrids.delta import corrected, delta_rule
from zoo.models.hybrids.shared import convolved

BATCH, KEYS, VALUES, SIZE, WIDTH = 2, 2, 4, 6, 5


def operands(seq, seed=0):
    """Return queries, keys, values, logarithms of decay and rates of `seq` tokens."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(BATCH, seq, *shape)), jnp.float32)
    decay, rate = -jnp.exp(normal(VALUES)), jax.nn.sigmoid(normal(VALUES))
    return normal(KEYS, SIZE), normal(KEYS, SIZE), normal(VALUES, WIDTH), decay, rate


def by_definition(q, k, v, log_decay, rate, begins):
    q, k, v, log_decay, rate = (np.asarray(part, np.float64) for part in (q, k, v, log_decay, rate))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    q, k = (np.repeat(part, VALUES // KEYS, axis=2) for part in (q * SIZE**-0.5, k))
    state, found = np.zeros((BATCH, VALUES, SIZE, WIDTH)), []
    for t in range(q.shape[1]):
        state = np.where(begins[:, t, None, None, None], 0, state) * np.exp(log_decay[:, t])[..., None, None]
        missing = v[:, t] - np.einsum("bmh,bmhw->bmw", k[:, t], state)
        state = state + np.einsum("bmh,bmw->bmhw", k[:, t], missing * rate[:, t, :, None])
        found.append(np.einsum("bmh,bmhw->bmw", q[:, t], state))
    return np.stack(found, 1)


@pytest.mark.parametrize("seq", [1, 7, 64, 150])
def test_chunks_are_the_recurrence(seq):
    parts = operands(seq)
    expected = by_definition(*parts, np.zeros((BATCH, seq), bool))
    np.testing.assert_allclose(delta_rule(*parts), expected, atol=2e-5)


def test_one_token_after_the_other_is_the_recurrence():
    parts = operands(9)
    one = jax.vmap(corrected)
    tokens = jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), parts)
    _, found = jax.lax.scan(lambda state, own: one(state, *own), jnp.zeros((BATCH, VALUES, SIZE, WIDTH)), tokens)
    expected = by_definition(*parts, np.zeros((BATCH, 9), bool))
    np.testing.assert_allclose(jnp.moveaxis(found, 0, 1), expected, atol=2e-5)


def test_a_text_begins_without_a_state():
    """In the middle of a chunk, at its first token, and twice in one."""
    begins = np.zeros((BATCH, 150), bool)
    begins[0, [0, 30, 64, 128, 140]] = begins[1, [3, 4, 149]] = True
    parts = operands(150)
    np.testing.assert_allclose(delta_rule(*parts, jnp.asarray(begins)), by_definition(*parts, begins), atol=2e-5)


def test_tiles_hand_on_the_state():
    """`tile` cuts tokens between chunks, and its loop carries the state: value and gradients as without."""
    parts = operands(256)
    total = lambda *parts: (delta_rule(*parts) ** 2).sum()
    tiled = tile(total, axis=1, n=2)
    np.testing.assert_allclose(tiled(*parts), total(*parts), rtol=1e-5)
    for ours, whole in zip(
        jax.grad(tiled, argnums=(0, 1, 2))(*parts), jax.grad(total, argnums=(0, 1, 2))(*parts), strict=True
    ):
        np.testing.assert_allclose(ours, whole, atol=1e-4)
    plan = str(tiled.plan(*parts))
    assert "completed" not in plan, plan


def test_a_convolution_sees_its_own_text_alone():
    x = jnp.arange(1.0, 7.0)[None, :, None]
    taps = jnp.asarray([[100.0, 10.0, 1.0]])
    assert convolved(x, taps, None)[0, :, 0].tolist() == [1, 12, 123, 234, 345, 456]
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2]])
    assert convolved(x, taps, positions)[0, :, 0].tolist() == [1, 12, 123, 4, 45, 456]
