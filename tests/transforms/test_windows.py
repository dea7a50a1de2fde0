"""Windows at known places, `h.at[5:11].set(v)`: of an array that may not be whole, in pieces of the cut axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_tiles, equations
from transforms import tile

pytestmark = pytest.mark.symbolic
# Of `h`, a product [23, 20] that is larger than inputs and outputs, and `v` [5, 20].
PUT = {
    "a number": lambda h, v: h.at[5:11].set(2.0),
    "nearly all": lambda h, v: h.at[:21].set(0.0),
    "a factor": lambda h, v: h.at[:-4].multiply(0.5),
    "a term": lambda h, v: h.at[1:].add(1.0),
    "the same row": lambda h, v: h.at[5:11].set(v[0]),
    "rows": lambda h, v: h.at[5:10].set(v),
    "rows added": lambda h, v: h.at[-5:].add(v),
    "rows multiplied": lambda h, v: h.at[:5].multiply(v),
    "the larger": lambda h, v: h.at[9:14].max(v),
    "the smaller": lambda h, v: h.at[9:14].min(0.0),
    "a box": lambda h, v: h.at[5:19, 3:12].set(1.0),
    "a box of rows": lambda h, v: h.at[5:10, 3:12].add(v[:, 3:12]),
    "a column": lambda h, v: h.at[2:, 3].add(1.0),
    "one row": lambda h, v: h.at[7].set(v[2]),
    "the last row": lambda h, v: h.at[-1].add(1.0),
    "one row before": lambda h, v: h.at[1:].set(h[:-1]),
    "rows on both sides": lambda h, v: h.at[1:-1].set((h[2:] + h[:-2]) / 2),
    "more rows than there are": lambda h, v: h.at[20:30].set(0.0),
}


def draw():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for shape in ((23, 4), (4, 20), (5, 20))]


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [4, 7])
@pytest.mark.parametrize("name", PUT)
def test_values_and_gradients_are_the_untiled_ones(name, n):
    for result in (lambda h: (h**2).sum(), lambda h: (h**2).sum(1)):
        fn = lambda x, w, v, result=result: result(PUT[name](x @ w, v))
        assert assert_tiles(fn, (0, None, None), n, draw(), modes=("grad", "jvp"), fast=True)


@pytest.mark.optimised
@pytest.mark.parametrize("name", ["a number", "nearly all", "a factor", "the same row", "rows", "the last row"])
def test_its_maximum_is_found_again(name):
    """Rows that are chosen from a product hold copies of it, and so does their maximum, which agrees with both."""
    assert assert_tiles(lambda x, w, v: PUT[name](x @ w, v).max(0).sum(), (0, None, None), 4, draw())


def test_a_window_of_one_number_is_chosen_and_not_written():
    x, w, _ = (jnp.asarray(array, jnp.float32) for array in draw())
    tiled = tile(lambda x, w: (x @ w).at[5:11].set(2.0).sum(), (0, None), 4)
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(tiled)(x, w))}
    assert not names & {"scatter", "dynamic_update_slice", "gather"}, names


def test_a_window_that_leaves_the_array_is_left_out_as_jax_does():
    """Of such a window nothing is put; where it is known, as the others are, half of it would be."""
    x, w, _ = draw()
    numbers = jax.lax.ScatterDimensionNumbers((0, 1), (), (0,))
    beyond = lambda h: jax.lax.scatter(h, jnp.array([21]), jnp.ones((4, 20), h.dtype), numbers)
    for axis in ((0, None), (None, 1)):
        assert_tiles(lambda x, w: beyond(x @ w).sum(), axis, 4, (x, w), fast=True, may_refuse=True)


def test_columns_of_rows_that_devices_share():
    """Types say how such arrays are spread: their windows stay as JAX writes them."""
    x, w, _ = (jnp.asarray(array, jnp.float32) for array in draw())
    loss = lambda x, w: ((x @ w).at[:, 3:9].set(0.0) ** 2).sum()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x[:22], jax.P("data"))
        got, want = (jax.jit(jax.grad(fn, 1))(rows, w) for fn in (tile(loss, (0, None), 4), loss))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))


def test_flags_are_set():
    x, w, _ = draw()
    for put in (lambda flags: flags.at[3:9].set(True), lambda flags: flags.at[3:9].min(False)):
        assert assert_tiles(lambda x, w, put=put: put((x @ w) > 0).sum(), (0, None), 4, (x, w), fast=True)
