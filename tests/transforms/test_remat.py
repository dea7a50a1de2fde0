"""Every named policy gives the same gradients, and they keep as much as they say."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from experiments import configs
from experiments.configs.compute import REMAT
from tests import quick
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
    rng = np.random.default_rng(0)
    return (0.1 * rng.normal(size=(8, 64, 64))).astype(np.float32), rng.normal(size=(256, 64)).astype(np.float32)


def gradient(jit, wrap, weights, x):
    return jit(jax.grad(lambda w: loss(wrap, w, x)))(weights)


def in_float64(wrap, arrays):
    with jax.enable_x64(True):
        return np.asarray(gradient(quick.jit, wrap, *(array.astype(np.float64) for array in arrays)))


@pytest.fixture(scope="module")
def exact(arrays):
    return in_float64(None, arrays)


@pytest.fixture(scope="module")
def error(arrays, exact):
    """How far float32 is from it where nothing is computed again."""
    return rms(gradient(jax.jit, None, *arrays) - exact)


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


CYCLES = ["full,none", "full*2,dots,names", "none*5,full*3", "full*3,none*9"]
NESTED = ["sqrt", "full/1", "full/3", "block/8", "full/20", "offload", "offload/3"]


@pytest.mark.parametrize("name", [*(name for name in POLICIES if name != "offload_dots"), "names", *CYCLES, *NESTED])
def test_gradients_do_not_depend_on_the_policy(name, arrays, exact, error):
    """In float64 the same numbers; in float32 as far from them as without a policy, in whichever order XLA adds."""
    wrap = remat(name, ["inner"])
    np.testing.assert_allclose(in_float64(wrap, arrays), exact, rtol=1e-12, atol=1e-12)
    assert 0 < rms(gradient(jax.jit, wrap, *arrays) - exact) < 1.05 * error


@pytest.mark.measured
def test_policies_keep_what_they_say(arrays):
    kept = {name: temporary_bytes(name, *arrays) for name in ("none", "dots", "full", "names", "block")}
    assert kept["block"] == kept["full"] < kept["names"] < kept["dots"] < kept["none"]


@pytest.mark.measured
def test_policies_that_take_turns_keep_their_shares(arrays):
    kept = [temporary_bytes(name, *arrays) for name in ("full", "full*3,none", "full,none", "none")]
    assert kept == sorted(set(kept))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("full", {"f32[8,256,64]"}),
        ("offload", {"f32<host>[8,256,64]"}),
        ("full/2", {"f32[4,256,64]", "f32[2,256,64]"}),
        ("offload/4", {"f32<host>[2,256,64]", "f32<host>[4,256,64]"}),
        ("sqrt", {"f32[2,256,64]", "f32[3,256,64]"}),
    ],
)
def test_inputs_are_kept_of_so_many_layers_and_no_copy_stays_on_the_device(name, kept, arrays):
    weights, x = arrays
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda w: loss(remat(name), w, x)))(weights))
    assert set(re.findall(r"f32(?:<host>)?\[\d+,256,64\]", jaxpr)) == kept


def test_inputs_that_a_tpu_cannot_move_at_once_are_moved_in_parts(arrays, monkeypatch):
    monkeypatch.setattr(sys.modules["transforms.remat"], "MOVED", 256 * 64)
    for platform, kept in (("tpu", {"64,64"}), ("gpu", {"256,64"})):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        weights, x = arrays
        jaxpr = str(jax.make_jaxpr(jax.grad(lambda w, x=x: loss(remat("offload"), w, x)))(weights))
        assert set(re.findall(r"f32<host>\[8,([\d,]+)\]", jaxpr)) == kept


@pytest.mark.measured
def test_groups_of_layers_keep_less_than_layers():
    weights, x = jnp.ones((16, 64, 64)), jnp.ones((1024, 64))
    grad = lambda name: jax.jit(jax.grad(lambda w: loss_of(remat(name), w, x))).lower(weights).compile()
    loss_of = lambda wrap, w, x: scan_layers(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w.T), None), x, w, wrap)[0].sum()
    full, sqrt = (grad(name).memory_analysis().temp_size_in_bytes for name in ("full", "sqrt"))
    assert full - sqrt >= (16 - 8 - 1) * x.nbytes  # 4 groups of 4, of which one is open


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
    assert [configs.Remat(policy=one).policy for one in ("full/4", "offload/2")] == ["full/4", "offload/2"]
    for bad in (
        "full*0",
        "full*x",
        "some",
        "full,some",
        "auto,full",
        "",
        "full/0",
        "dots/2",
        "sqrt/2",
        "full/2,none",
        "sqrt*2",
    ):
        with pytest.raises(ValueError, match=r"bad value remat\.policy="):
            configs.Remat(policy=bad)


def test_none_wraps_nothing():
    assert remat("none") is None


def test_unknown_policy():
    with pytest.raises(ValueError, match=r"cannot remat by 'some'.*Choose one of none, full, block, dots"):
        remat("some")


@pytest.mark.parametrize("name", ["dots/2", "sqrt/2", "full/0", "full/x", "full/2,none", "sqrt,none"])
def test_what_is_no_group_of_layers_is_refused(name):
    with pytest.raises(ValueError, match="cannot remat by"):
        remat(name)
