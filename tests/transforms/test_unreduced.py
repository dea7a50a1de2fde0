"""What JAX gets wrong of sums that are yet to be made over devices, and `tile` therefore never writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

APART = P(None, None, unreduced={"d"})
WRONG = pytest.mark.xfail(strict=True, reason="JAX adds up what each device holds whole")


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh


def product(a, b):
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), out_sharding=APART)


def put(mesh, x):
    return jax.device_put(x, NamedSharding(mesh, P("d")))


@WRONG
def test_a_product_of_two_constants_stays_apart(mesh):
    a, b = put(mesh, jnp.ones((8, 2))), put(mesh, jnp.ones((8, 4)))
    made = jax.jit(lambda: reshard(product(a, b), P(None, None)))()
    np.testing.assert_array_equal(made, np.full((2, 4), 8))


@WRONG
def test_what_is_apart_is_scattered_into(mesh):
    def add(a, b, places):
        return reshard(product(a, b).at[places].add(b, out_sharding=APART), P(None, None))

    args = put(mesh, jnp.ones((8, 2))), put(mesh, jnp.ones((8, 4))), put(mesh, jnp.zeros(8, int))
    np.testing.assert_array_equal(jax.jit(add)(*args)[:, 0], [16, 8])


def test_a_product_of_arguments_stays_apart(mesh):
    args = put(mesh, jnp.ones((8, 2))), put(mesh, jnp.ones((8, 4)))
    made = jax.jit(lambda a, b: reshard(product(a, b), P(None, None)))(*args)
    np.testing.assert_array_equal(made, np.full((2, 4), 8))
