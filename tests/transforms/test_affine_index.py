"""Indices that are positions along the cut axis, however they are written: a lookup at them stays within the tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.helpers import assert_tiles
from transforms import TileError, tile

T, D, V = 10, 3, 6  # tokens, embed, vocabulary
LAST = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
BOTH = np.stack([np.arange(T), np.arange(T) % V], 1)
POSITIONS = {
    "of JAX": lambda x, y: x[jnp.arange(T), y],
    "of NumPy": lambda x, y: x[np.arange(T), y],
    "of NumPy, and places": lambda x, y: x[np.arange(T), np.arange(T) % V],
    "in a column": lambda x, y: lax.gather(x, BOTH, LAST, (1, 1)),
    "clamped": lambda x, y: x[lax.clamp(0, jnp.arange(T), T - 1), y],
    "in two ranks": lambda x, y: x[jnp.arange(T)[:, None], y[:, None]],
}
OTHERS = {
    "another order": lambda x, y: x[np.arange(T)[::-1], y],
    "others, clamped": lambda x, y: x[lax.clamp(0, jnp.arange(T), T - 2), y],
    "in pairs": lambda x, y: x[jnp.arange(T).reshape(2, -1).reshape(-1), y],
}
HIDDEN, WEIGHTS = np.random.default_rng(0).normal(size=(T, D)), np.random.default_rng(1).normal(size=(D, V))
LABELS = (np.arange(T) * 7 % V).astype(np.int32)


def loss(pick):
    return lambda h, w, y: jnp.log(-pick(jax.nn.log_softmax(h @ w), y).mean())


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_looked_up_within_the_tile(name):
    fn = loss(POSITIONS[name])
    assert_tiles(fn, (0, None, 0), 4, (HIDDEN, WEIGHTS, LABELS))
    plan = tile(fn, (0, None, 0), 4, gather="none").plan(HIDDEN, WEIGHTS, LABELS)
    assert len(plan.value.loops) == 1 and plan.gradient is not None and len(plan.gradient.loops) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_places_are_not(name):
    with pytest.raises(TileError, match=r"looks up places that are cut themselves|larger than a tile"):
        tile(loss(OTHERS[name]), (0, None, 0), 4, gather="none").plan(HIDDEN, WEIGHTS, LABELS)
