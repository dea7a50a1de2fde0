"""Grouped products: those of `jax.lax.ragged_dot`, with the FLOPs and the memory of one product of each row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from experiments.planning.hlo import dot_flops
from zoo.models.grouped import grouped_dot

pytestmark = pytest.mark.optimised
INSIDE, WIDTH = 24, 40


def drawn(sizes, left, dtype):
    """Rows of groups of these sizes, and some that are of none."""
    rng, rows = np.random.default_rng(0), sum(sizes) + left
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return draw(rows, INSIDE), draw(len(sizes), INSIDE, WIDTH), jnp.asarray(sizes, jnp.int32), draw(rows, WIDTH)


def found(product, x, weight, counts, slope):
    """The products and their gradients."""
    out, back = jax.vjp(lambda x, weight: product(x, weight, counts), x, weight)
    return out, *back(slope)


SIZES = {
    "equal": [64] * 8,
    "one": [0, 0, 512, 0, 0, 0, 0, 0],
    "last": [0, 0, 0, 0, 0, 0, 0, 512],
    "few and many": [1, 400, 0, 17, 0, 15, 16, 63],
    "none": [0] * 8,
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("left", [0, 130])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_and_gradients_are_those_of_ragged_dot(sizes, left, dtype):
    args = drawn(SIZES[sizes], max(left, 512 - sum(SIZES[sizes])), dtype)
    for ours, theirs in zip(found(grouped_dot, *args), found(jax.lax.ragged_dot, *args), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        ours, theirs = (np.asarray(one, np.float32) for one in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=jnp.finfo(dtype).eps * 8 * max(1, abs(theirs).max()))


@pytest.mark.parametrize("which", ["row", "slope"])
def test_rows_that_are_not_finite_stay_among_themselves(which):
    """The first row of a group, which the last block of the group before reads on into."""
    x, weight, counts, slope = drawn(SIZES["few and many"], 0, jnp.float32)
    weight = weight.at[4].set(jnp.inf)  # of no row
    first = int(counts[0])  # of the second group: the first one has a row
    broken = lambda array: array.at[first].set(jnp.nan)
    x, slope = (broken(x), slope) if which == "row" else (x, broken(slope))
    out, of_x, of_weight = (np.isnan(array) for array in found(grouped_dot, x, weight, counts, slope))
    assert np.flatnonzero(out.any(1)).tolist() == ([first] if which == "row" else [])
    assert np.flatnonzero(of_x.any(1)).tolist() == ([] if which == "row" else [first])
    assert np.flatnonzero(of_weight.any((1, 2))).tolist() == [1]


def shapes(rows, groups):
    """The shapes of what products of so many rows, and their gradients, are given."""
    array = jax.ShapeDtypeStruct
    x, weight = array((rows, INSIDE), jnp.float32), array((groups, INSIDE, WIDTH), jnp.float32)
    return x, weight, array((groups,), jnp.int32), array((rows, WIDTH), jnp.float32)


@pytest.mark.parametrize(("rows", "groups"), [(8192, 8), (8192, 64), (4096, 32)])
def test_each_row_meets_one_matrix(rows, groups):
    compiled = lambda product: jax.jit(functools.partial(found, product)).lower(*shapes(rows, groups)).compile()
    ours, theirs = compiled(grouped_dot), compiled(jax.lax.ragged_dot)
    assert 1 <= dot_flops(ours.as_text()) / (6 * rows * INSIDE * WIDTH) <= 1.26
    temporary = lambda program: program.memory_analysis().temp_size_in_bytes
    assert temporary(ours) < temporary(theirs) * 3 / groups


def test_few_rows_are_left_to_the_library():
    assert "ragged_dot" in str(jax.make_jaxpr(grouped_dot)(*shapes(16, 8)[:3]))


def test_devices_have_rows_of_their_own():
    """Where they share the matrices, the gradients of these are summed over devices."""
    args = drawn(SIZES["few and many"], 0, jnp.float32)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    x, weight, counts, slope = args
    both = lambda array: jnp.concatenate([array, 2 * array])
    spec = PartitionSpec("data")
    with jax.set_mesh(mesh):
        spread = jax.shard_map(grouped_dot, in_specs=(spec, PartitionSpec(), PartitionSpec()), out_specs=spec)
        put = lambda array: jax.device_put(both(array), jax.NamedSharding(mesh, spec))
        out, of_x, of_weight = jax.jit(functools.partial(found, spread))(put(x), weight, counts, put(slope))
    one = found(grouped_dot, *args)
    np.testing.assert_allclose(out, both(one[0]), atol=1e-5)
    np.testing.assert_allclose(of_x, both(one[1]), atol=1e-5)
    np.testing.assert_allclose(of_weight, 5 * one[2], atol=1e-3)
