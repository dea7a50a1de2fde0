"""Every named policy gives the same gradients, and they keep as much as they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from experiments import configs
from experiments.configs.compute import REMAT
from transforms.remat import CHOICES, POLICIES, remat, scan_layers


def loss(wrap, weights, x):
    """Eight layers of two matrix products, scanned."""

    def body(x, w):
        inner = checkpoint_name(jnp.sin(x @ w), "inner")
        return jnp.tanh(inner @ w.T), inner[0, 0]

    x, made = scan_layers(body, x, weights, wrap)
    return x.sum() + (made * jnp.arange(8)).sum()


def temporary_bytes(name, weights, x):
    compiled = jax.jit(jax.grad(lambda w: loss(remat(name, ["inner"]), w, x))).lower(weights).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0))
    return 0.1 * jax.random.normal(keys[0], (8, 64, 64)), jax.random.normal(keys[1], (256, 64))


CYCLES = ["full,none", "full*2,dots,names", "none*5,full*3", "full*3,none*9"]


@pytest.mark.parametrize("name", [*(name for name in POLICIES if name != "offload"), "names", *CYCLES])
def test_gradients_do_not_depend_on_the_policy(name, arrays):
    weights, x = arrays
    expected = jax.grad(lambda w: loss(None, w, x))(weights)
    actual = jax.grad(lambda w: loss(remat(name, ["inner"]), w, x))(weights)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_policies_keep_what_they_say(arrays):
    kept = {name: temporary_bytes(name, *arrays) for name in ("none", "dots", "full", "names", "block")}
    assert kept["block"] == kept["full"] < kept["names"] < kept["dots"] < kept["none"]


def test_policies_that_take_turns_keep_their_shares(arrays):
    kept = [temporary_bytes(name, *arrays) for name in ("full", "full*3,none", "full,none", "none")]
    assert kept == sorted(set(kept))


def test_layers_take_turns_from_the_first_on(arrays):
    """Every second layer, in two runs of layers of which the second begins in the middle of a turn."""
    weights, x = arrays
    seen = []

    def body(x, w):
        return x @ w, None

    def scanned(weights, first):
        jaxpr = jax.make_jaxpr(lambda x: scan_layers(body, x, weights, remat("full,none"), first))(x)
        return str(jaxpr).count("checkpoint") or str(jaxpr).count("remat")

    seen = [scanned(weights[:1], first) > 0 for first in range(4)]
    assert seen == [True, False, True, False]


def test_a_name_that_no_value_has_is_refused(arrays):
    with pytest.raises(ValueError, match=r"cannot remat by 'names': no value is named 'outer'. The layer has inner."):
        loss(remat("names", ["inner", "outer"]), *arrays)
    with pytest.raises(ValueError, match="cannot remat by 'names' without names"):
        remat("names")


def test_the_command_line_knows_every_policy():
    assert sorted(REMAT) == sorted(CHOICES)
    assert configs.Remat(policy="full*3,none").policy == "full*3,none"
    for bad in ("full*0", "full*x", "some", "full,some", "auto,full", ""):
        with pytest.raises(ValueError, match=r"bad value remat\.policy="):
            configs.Remat(policy=bad)


def test_none_wraps_nothing():
    assert remat("none") is None


def test_unknown_policy():
    with pytest.raises(ValueError, match=r"cannot remat by 'some'.*Choose one of none, full, block, dots"):
        remat("some")
