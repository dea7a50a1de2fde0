"""A plan says what a call does, before and without running it."""

import gc

import jax
import jax.numpy as jnp
import optax
import pytest

from transforms import TileError, tile
from transforms.tiling.ir.placement import Partial, Tiled
from transforms.tiling.report.table import WIDTH, short

S = jax.ShapeDtypeStruct
SHAPES = (S((2048, 64), jnp.float32), S((64, 4096), jnp.float32), S((2048,), jnp.int32))
UNIT = 2 * 2048 * 64 * 4096


def loss(h, w, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean()


def normalised(h, w, y):
    return (lambda z: jnp.tanh(z / z.max(0)))(h @ w).sum()


def smallest(h, w, y):
    return jnp.sort((h @ w).sum(-1))[:5].sum()


def per_token(h, w, y):
    return jnp.tanh(h @ w)


def test_plan_counts_tiles_products_and_bytes():
    plan = tile(loss, (0, None, 0), 6).plan(*SHAPES)
    assert (plan.length, plan.tiles, plan.size) == (2048, 6, 342)
    assert (plan.value.flops, plan.value.untiled_flops) == (UNIT, UNIT)
    assert plan.gradient is not None
    assert (plan.gradient.flops, plan.gradient.untiled_flops) == (3 * UNIT, 3 * UNIT)
    assert plan.gradient.untiled_largest == 4 * 2048 * 4096
    assert plan.gradient.largest == 4 * 342 * 4096
    assert plan.gradient.carried == 4 * (64 * 4096 + 2048 * 64 + 1)


def test_plan_knows_what_loops_carry():
    plan = tile(loss, (0, None, 0), 8).plan(*SHAPES)
    assert plan.gradient is not None
    (loop,) = plan.gradient.loops
    carries = {c.array: (c.placement, c.nbytes) for c in loop.carries}
    assert carries["float32[64,4096]"] == (Partial("sum"), 1 << 20)
    assert carries["float32[2048,64]"] == (Tiled(0), 1 << 19)


def test_plan_estimates_the_temporary_memory():
    plan = tile(loss, (0, None, 0), 8).plan(*SHAPES)
    assert plan.gradient is not None
    tile_bytes, whole = 4 * 256 * 4096, 4 * 2048 * 4096
    assert tile_bytes <= plan.value.temp < 1.1 * tile_bytes
    assert 2 * tile_bytes <= plan.gradient.temp < 2.2 * tile_bytes  # labels take no third
    assert whole <= plan.value.untiled_temp < 1.1 * whole
    assert 3 * whole <= plan.gradient.untiled_temp < 3.2 * whole


def test_plan_tells_what_is_recomputed():
    first, second = tile(normalised, (0, None, None), 4).plan(*SHAPES).value.loops
    assert first.recomputed == ()
    (again,) = (r for r in second.recomputed if r.primitive == "dot_general")
    assert (again.array, again.flops, again.nbytes) == ("float32[2048,4096]", UNIT, 4 * 2048 * 4096)
    assert "test_plan.py" in again.where and "(normalised)" in again.where


def test_the_backward_of_many_outputs_recomputes_the_forward():
    plan = tile(per_token, (0, None, None), 4).plan(*SHAPES)
    assert plan.gradient is not None
    forward, backward = plan.gradient.loops
    assert (forward.flops, backward.flops) == (UNIT, 3 * UNIT)
    assert (plan.gradient.flops, plan.gradient.untiled_flops) == (4 * UNIT, 3 * UNIT)
    assert {r.primitive for r in backward.recomputed if r.flops} == {"dot_general"}


def test_plan_lists_what_was_completed_with_its_line():
    (completed,) = tile(smallest, (0, None, None), 4).plan(*SHAPES).value.completed
    assert (completed.array, completed.nbytes, completed.primitive) == ("float32[2048]", 8192, "sort")
    assert (completed.placement, completed.reason) == (Tiled(0), "runs along the cut axis")
    assert "test_plan.py" in completed.where
    assert str(completed).startswith("float32[2048] Tiled(dim=0) for `sort` at ")


def test_a_function_without_derivatives_has_no_gradient():
    plan = tile(lambda h, y: (h.shape[0] * y).sum(), (None, 0), 4).plan(SHAPES[0], SHAPES[2])
    assert plan.gradient is None
    assert "gradient" not in str(plan)


@pytest.mark.parametrize("n", [1, 4])
def test_a_function_that_jax_cannot_differentiate_has_no_gradient(n):
    kinds = jax.ShapeDtypeStruct(SHAPES[0].shape[:1], jnp.int32)
    products = tile(lambda h, kinds: jnp.ones((3, h.shape[1])).at[kinds].multiply(h), (0, 0), n)
    same = lambda h: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(h.shape, h.dtype), h, vmap_method="sequential")
    for plan in (products.plan(SHAPES[0], kinds), tile(lambda h: same(h).sum(), 0, n).plan(SHAPES[0])):
        assert plan.gradient is None
        assert "gradient" not in str(plan)


def test_plan_prints_as_a_table():
    lines = str(tile(loss, (0, None, 0), 6).plan(*SHAPES)).splitlines()
    assert lines[0] == "2048 steps in 6 tiles of 342, the last 338"
    assert lines[2].split() == ["value", "value", "and", "gradient"]
    assert lines[5].split() == "largest array inside 5.344 MiB 32 MiB 5.344 MiB 32 MiB".split()
    assert lines[6].split() == "matrix products 1.074 GFLOP 1.074 GFLOP 3.221 GFLOP 3.221 GFLOP".split()
    assert any(line.split() == "float32[64,4096] 1 MiB sum over the tiles".split() for line in lines)


@pytest.mark.parametrize("fn", [loss, normalised, smallest, per_token])
def test_no_line_is_too_long(fn):
    lines = str(tile(fn, (0, None, 0), 6).plan(*SHAPES)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert not any(line != line.rstrip() for line in lines)


def test_prints_why_something_is_whole_and_what_is_recomputed():
    text = str(tile(smallest, (0, None, None), 4).plan(*SHAPES))
    assert "for `sort` at transforms/test_plan.py:" in text and "it runs along the cut axis" in text
    text = str(tile(normalised, (0, None, None), 4).plan(*SHAPES))
    assert "recomputes  dot_general float32[2048,4096]" in text


@pytest.mark.parametrize(
    ("where", "expected"),
    [("/a/b/c.py:3:4 (f)", "b/c.py:3:4 (f)"), ("c.py:3 (f)", "c.py:3 (f)"), ("<string>:1 (f)", "<string>:1 (f)")],
)
def test_lines_are_named_by_file_and_folder(where, expected):
    assert short(where) == expected


def test_plan_runs_nothing_and_needs_no_arrays():
    huge = (S((1 << 20, 4096), jnp.bfloat16), S((4096, 256000), jnp.bfloat16), S((1 << 20,), jnp.int32))
    assert tile(loss, (0, None, 0), size=1024).plan(*huge).tiles == 1024


def test_a_notebook_shows_the_table():
    plan = tile(loss, (0, None, 0), 8).plan(*SHAPES)
    assert repr(plan) == str(plan) and "temporary memory" in repr(plan)
    assert plan._repr_html_().startswith("<pre>2048 steps in 8 tiles of 256")
    assert "<lambda>" not in tile(lambda h, w, y: loss(h, w, y), (0, None, 0), 8).plan(*SHAPES)._repr_html_()


@pytest.mark.parametrize("enabled", [True, False])
def test_planning_leaves_the_garbage_collector_as_it_was(enabled):
    """It is paused meanwhile, where the call is refused too."""
    seen = []

    def watched(h):
        seen.append(gc.isenabled())
        return jnp.tanh(h).sum()

    (gc.enable if enabled else gc.disable)()
    try:
        tile(watched, 0, 2).plan(S((8, 4), jnp.float32))
        assert gc.isenabled() == enabled and seen
        with pytest.raises(TileError):
            tile(lambda h: jnp.sort(h, 0), 0, 2, gather="none").plan(S((8, 4), jnp.float32))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
