"""Random programs: the tiled function equals the untiled one whatever the composition; few are refused."""

import os

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.helpers import assert_tiles
from tests.transforms.grammar import NARROW, SCALAR, SCORE, STAT, STEPS, WIDE, Context, arguments, programs, run_program

common = {"deadline": None, "suppress_health_check": list(HealthCheck)}
hypothesis.settings.register_profile("tile", max_examples=40, derandomize=True, database=None, **common)
hypothesis.settings.register_profile("tile-heavy", max_examples=1000, derandomize=True, database=None, **common)
hypothesis.settings.register_profile("tile-long", max_examples=3000, print_blob=True, **common)
PROFILE = hypothesis.settings.get_profile(os.environ.get("TILE_PROFILE", "tile"))
HEAVY = hypothesis.settings.get_profile("tile-heavy")
CASES = {
    "program": programs(),
    "length": st.integers(2, 13),
    "tiles": st.integers(2, 13),
    "total": st.booleans(),
    "seed": st.integers(0, 99),
}


def check(program, length, tiles, total, seed):
    with jax.enable_x64(True):
        return assert_tiles(
            run_program(*program, total),
            (None, 0, 0, 0, 0),
            min(tiles, length),
            arguments(length, seed),
            dtype=jnp.float64,
            may_refuse=True,
            fast=True,
            floor=1.0,
        )


def check_programs(profile):
    tiled = []

    @profile
    @given(**CASES)
    @example(program=([("all pairs", (0, 0))], [2]), length=2, tiles=2, total=False, seed=0)  # was planned for ever
    @example(
        program=([("sum", (1,)), ("column mean", (0,)), ("write token", (0, 3))], [4]),
        length=11,
        tiles=3,
        total=False,
        seed=0,
    )
    def each(**case):
        tiled.append(check(**case))

    each()
    assert sum(tiled) > 0.9 * len(tiled), f"{len(tiled) - sum(tiled)} of {len(tiled)} programs are refused"


def test_random_programs_equal_untiled():
    check_programs(PROFILE)


@pytest.mark.heavy
def test_a_thousand_random_programs_equal_untiled():
    check_programs(HEAVY)


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(STEPS))
def test_each_step_alone_equals_untiled(name, n):
    operands, _, apply = STEPS[name]

    def function(w, x, s, y, m):
        pool = {WIDE: x, NARROW: x @ w, SCORE: s, STAT: w.sum(1), SCALAR: w.sum()}
        return apply(*(pool[kind] for kind in operands), Context(w, y, m))

    with jax.enable_x64(True):
        assert_tiles(function, (None, 0, 0, 0, 0), n, arguments(11, 0), dtype=jnp.float64, floor=1.0, fast=True)
