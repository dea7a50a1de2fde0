"""Where a tile lies: taking, writing, numbering and finding its elements are inverse to one another on any shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from transforms.tiling.ir.placement import COMBINE, WHOLE, Partial, Span, Tiled, identity

pytestmark = pytest.mark.symbolic

PROFILE = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@st.composite
def cut_arrays(draw):
    """An array, how it is cut, and where its tiles start and end."""
    total, size = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    rank = draw(st.integers(1, 3))
    dim, major, minor = draw(st.integers(0, rank - 1)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 3)) for _ in range(rank)]
    shape[dim] = major * total * minor
    bounds = [(start, min(start + size, total)) for start in range(0, total, size)]
    return np.arange(np.prod(shape)).reshape(shape), Tiled(dim, major, minor), total, bounds


def slice_of(array, cut, total, start, stop):
    """This tile, by NumPy."""
    split = array.reshape(*array.shape[: cut.dim], cut.major, total, cut.minor, *array.shape[cut.dim + 1 :])
    part = np.take(split, range(start, stop), cut.dim + 1)
    return part.reshape(*array.shape[: cut.dim], -1, *array.shape[cut.dim + 1 :])


@PROFILE
@given(cut_arrays())
def test_tiles_are_slices_of_the_cut_axis(case):
    array, cut, total, bounds = case
    for start, stop in bounds:
        span = Span(start, stop - start, total)
        part = np.asarray(span.take(jnp.asarray(array), cut))
        np.testing.assert_array_equal(part, slice_of(array, cut, total, start, stop))
        assert part.shape == span.local_shape(array.shape, cut)


@PROFILE
@given(cut_arrays())
def test_writing_all_tiles_restores_the_array(case):
    array, cut, total, bounds = case
    result = jnp.full(array.shape, -1)
    for start, stop in bounds:
        span = Span(start, stop - start, total)
        part = span.take(jnp.asarray(array), cut)
        result = span.put(result, part, cut)
        np.testing.assert_array_equal(span.take(result, cut), part)
    np.testing.assert_array_equal(result, array)


@PROFILE
@given(cut_arrays())
def test_positions_are_where_a_tile_is_in_the_whole(case):
    array, cut, total, bounds = case
    for start, stop in bounds:
        span = Span(start, stop - start, total)
        positions = span.positions(cut, jnp.int32)
        np.testing.assert_array_equal(np.take(array, positions, cut.dim), slice_of(array, cut, total, start, stop))
        np.testing.assert_array_equal(span.localise(positions, cut), np.arange(positions.size))
        assert positions.dtype == jnp.int32


def test_start_may_be_traced():
    array, cut = jnp.arange(24.0).reshape(2, 12), Tiled(1, 2, 2)

    def step(result, start):
        span = Span(start, 1, 3)
        local = span.localise(span.positions(cut, jnp.int32), cut)
        return span.put(result, span.take(array, cut) + local - jnp.arange(4), cut), None

    np.testing.assert_array_equal(jax.jit(lax.scan, static_argnums=0)(step, 0 * array, jnp.arange(3))[0], array)


def test_whole_and_partial_values_keep_their_shape():
    span = Span(0, 2, 10)
    assert span.local_shape((10, 3), WHOLE) == span.local_shape((10, 3), Partial("sum")) == (10, 3)


def test_sums_are_formed_in_the_wider_dtype():
    assert Span(0, 1, 1).wide(jnp.bfloat16) == jnp.float32
    assert Span(0, 1, 1, jnp.bfloat16).wide(jnp.float32) == jnp.float32
    assert Span(0, 1, 1).wide(jnp.complex64) == jnp.complex64
    assert Span(0, 1, 1).wide(jnp.int8) == jnp.int8
    assert Span(0, 1, 1).wide(jnp.bool_) == jnp.bool_
    with jax.enable_x64(True):
        assert Span(0, 1, 1, jnp.float64).wide(jnp.float32) == jnp.float64


FLOATS = "float16 bfloat16 float32 float64".split()
INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
DTYPES = {
    "sum": [*FLOATS, *INTEGERS, "complex64", "complex128"],
    "prod": [*FLOATS, *INTEGERS, "complex64", "complex128"],
    "max": [*FLOATS, *INTEGERS, "bool"],
    "min": [*FLOATS, *INTEGERS, "bool"],
    "and": [*INTEGERS, "bool"],
    "or": [*INTEGERS, "bool"],
    "logaddexp": FLOATS,
}


@pytest.mark.parametrize("op", [op for op in COMBINE if op != "last"])
def test_identity_changes_nothing(op):
    with jax.enable_x64(True):
        for dtype in map(jnp.dtype, DTYPES[op]):
            values = jnp.asarray([0, 1, 2, 100]).astype(dtype)
            if jnp.issubdtype(dtype, jnp.floating):
                values = jnp.concatenate([values, jnp.array([-jnp.inf, jnp.inf, -1.5], dtype)])
            if jnp.issubdtype(dtype, jnp.integer):
                values = jnp.concatenate([values, jnp.array([jnp.iinfo(dtype).min, jnp.iinfo(dtype).max], dtype)])
            start = identity(op, dtype)
            assert (start.dtype, start.shape) == (dtype, ())
            got = COMBINE[op](jnp.full(values.shape, start), values)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, values)


def test_placements_print_as_they_are_read():
    assert str(Tiled(1)) == "Tiled(dim=1)"
    assert str(Tiled(0, 2, 3)) == "Tiled(dim=0, 2*L*3)"
    assert (str(WHOLE), str(Partial("max"))) == ("Whole", "Partial(max)")
