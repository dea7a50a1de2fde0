"""A plan says what a call does, before and without running it."""

import jax
import jax.numpy as jnp
import optax

from transforms import tile

S = jax.ShapeDtypeStruct
SHAPES = (S((2048, 64), jnp.float32), S((64, 4096), jnp.float32), S((2048,), jnp.int32))


def loss(h, w, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean()


def test_plan_counts_tiles_products_and_bytes():
    plan = tile(loss, (0, None, 0), 6).plan(*SHAPES)
    unit = 2 * 2048 * 64 * 4096
    assert (plan.length, plan.tiles, plan.size) == (2048, 6, 342)
    assert (plan.value.flops, plan.value.untiled_flops) == (unit, unit)
    assert plan.gradient is not None
    assert (plan.gradient.flops, plan.gradient.untiled_flops) == (3 * unit, 3 * unit)
    assert plan.gradient.untiled_largest == 4 * 2048 * 4096
    assert plan.gradient.largest == 4 * 342 * 4096
    assert plan.gradient.carried == 4 * (64 * 4096 + 2048 * 64 + 1)


def test_plan_tells_what_is_recomputed():
    plan = tile(lambda h, w, y: (lambda z: z / z.max(0))(h @ w).sum(), (0, None, None), 4).plan(*SHAPES)
    assert [loop.recomputed > 0 for loop in plan.value.loops] == [False, True]


def test_plan_lists_what_was_completed_with_its_line():
    plan = tile(lambda h, w, y: jnp.sort((h @ w).sum(-1))[:5].sum(), (0, None, None), 4).plan(*SHAPES)
    (completed,) = plan.value.completed
    assert "float32[2048] Tiled(dim=0) for `sort` at " in completed
    assert "test_plan.py" in completed


def test_plan_prints_as_a_report():
    text = str(tile(loss, (0, None, 0), 6).plan(*SHAPES))
    assert text.startswith("an axis of 2048 in 6 tiles of 342, the last 338\n")
    assert "carries float32[64,4096] Partial(sum), 1 MiB" in text
    assert "value and gradient:" in text


def test_plan_runs_nothing_and_needs_no_arrays():
    huge = (S((1 << 20, 4096), jnp.bfloat16), S((4096, 256000), jnp.bfloat16), S((1 << 20,), jnp.int32))
    assert tile(loss, (0, None, 0), size=1024).plan(*huge).tiles == 1024
