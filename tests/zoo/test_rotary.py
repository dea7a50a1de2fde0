"""Rotary frequencies against formulas written differently, and what stretching is for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import RopeScaling, RopeType
from zoo.models.attention.rotary import frequencies
from zoo.models.layers import rope

LLAMA_3 = RopeScaling(rope_type=RopeType.llama3, factor=8.0, original_length=64)
YARN = RopeScaling(rope_type=RopeType.yarn, factor=4.0, original_length=64, beta_fast=8.0, beta_slow=1.0)


def test_plain_frequencies_are_powers_of_the_base():
    np.testing.assert_allclose(frequencies(16, 1e4), [1e4 ** (-2 * i / 16) for i in range(8)], rtol=1e-6)


def test_linear_stretching_divides_all_by_the_factor():
    scaling = RopeScaling(rope_type=RopeType.linear, factor=2.5)
    np.testing.assert_allclose(frequencies(16, 1e4, scaling), frequencies(16, 1e4) / 2.5, rtol=1e-6)


def test_llama_3_keeps_short_waves_stretches_long_ones_and_blends_between():
    plain, out = frequencies(32, 1e4), frequencies(32, 1e4, LLAMA_3)
    branches = set()
    for before, after in zip(plain, out, strict=True):
        wave = 2 * math.pi / before
        if wave < 64 / 4:
            branches.add("short")
            expected = before
        elif wave > 64:
            branches.add("long")
            expected = before / 8
        else:
            branches.add("between")
            smooth = (64 / wave - 1) / 3
            expected = (1 - smooth) * before / 8 + smooth * before
        assert after == pytest.approx(expected, rel=1e-5)
    assert branches == {"short", "between", "long"}


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones():
    plain, out = frequencies(32, 1e4), frequencies(32, 1e4, YARN)
    turns = 64 * plain / (2 * math.pi)
    np.testing.assert_allclose(out[turns > 12], plain[turns > 12], rtol=1e-6)
    np.testing.assert_allclose(out[turns < 0.5], plain[turns < 0.5] / 4, rtol=1e-6)
    assert ((out <= plain * 1.000001) & (out >= plain / 4.000001)).all()


@pytest.mark.parametrize(
    ("factor", "given", "expected"), [(4.0, None, 1 + math.log(4) / 10), (0.5, None, 1.0), (4.0, 0.7, 0.7)]
)
def test_yarn_has_a_temperature_and_the_others_have_none(factor, given, expected):
    scaling = RopeScaling(rope_type=RopeType.yarn, factor=factor, attention_factor=given)
    assert scaling.temperature == pytest.approx(expected)
    assert RopeScaling(rope_type=RopeType.linear, factor=factor).temperature == 1.0


def test_dynamic_stretching_begins_beyond_the_original_length():
    scaling = RopeScaling(rope_type=RopeType.dynamic, factor=3.0, original_length=8)
    np.testing.assert_array_equal(frequencies(16, 1e4, scaling, 8), frequencies(16, 1e4))
    base = 1e4 * (3.0 * 11 / 8 - 2.0) ** (16 / 14)
    np.testing.assert_allclose(frequencies(16, 1e4, scaling, 11), frequencies(16, base), rtol=1e-6)


@pytest.mark.parametrize("length", [5, 11])
def test_a_traced_length_is_the_same_as_a_static_one(length):
    scaling = RopeScaling(rope_type=RopeType.dynamic, factor=3.0, original_length=8)
    traced = jax.jit(lambda length: frequencies(16, 1e4, scaling, length))(length)
    np.testing.assert_allclose(traced, frequencies(16, 1e4, scaling, length), rtol=2e-6)


def test_positions_given_are_those_counted_from_zero():
    x = jax.random.normal(jax.random.key(0), (2, 9, 3, 16))
    waves = frequencies(16, 1e4)
    np.testing.assert_allclose(rope(x, waves, jnp.arange(9)[None]), rope(x, waves), atol=1e-6)
    shifted = rope(x[:, 4:], waves, jnp.broadcast_to(jnp.arange(4, 9), (2, 5)))
    np.testing.assert_allclose(shifted, rope(x, waves)[:, 4:], atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"factor": 0.0}, "factor=0.0 must be positive"),
        ({"factor": math.inf}, "factor=inf must be positive"),
        (
            {"rope_type": RopeType.llama3, "low_freq": 4.0, "high_freq": 3.0},
            "high_freq=3.0 must be at least low_freq=4.0",
        ),
        ({"original_length": 0}, "original_length=0 must be positive"),
    ],
)
def test_impossible_stretches_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**{"rope_type": RopeType.linear, "factor": 2.0} | fields)
