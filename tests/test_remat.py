"""Every named policy gives the same gradients, and they keep as much as they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transforms.remat import POLICIES, remat


def loss(wrap, weights, x):
    """Eight layers of two matrix products, scanned."""

    def body(x, w):
        return jnp.tanh(jnp.sin(x @ w) @ w.T), None

    body = body if wrap is None else wrap(body)
    return jax.lax.scan(body, x, weights)[0].sum()


def temporary_bytes(name, weights, x):
    compiled = jax.jit(jax.grad(lambda w: loss(remat(name), w, x))).lower(weights).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0))
    return 0.1 * jax.random.normal(keys[0], (8, 64, 64)), jax.random.normal(keys[1], (256, 64))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "offload"])
def test_gradients_do_not_depend_on_the_policy(name, arrays):
    weights, x = arrays
    expected = jax.grad(lambda w: loss(None, w, x))(weights)
    np.testing.assert_allclose(jax.grad(lambda w: loss(remat(name), w, x))(weights), expected, rtol=1e-5, atol=1e-6)


def test_policies_keep_what_they_say(arrays):
    kept = {name: temporary_bytes(name, *arrays) for name in ("none", "dots", "full")}
    assert kept["full"] < kept["dots"] < kept["none"]


def test_none_wraps_nothing():
    assert remat("none") is None


def test_unknown_policy():
    with pytest.raises(ValueError, match=r"cannot remat by 'some'.*Choose one of none, full, dots"):
        remat("some")
