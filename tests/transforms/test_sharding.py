import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from transforms.sharding import (
    AXES,
    constrain,
    einsum,
    make_mesh,
    partitions,
    place,
    sharding_of,
    spec_of,
    uncut,
    uneven,
)


def _random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, {"data": 8}),
        ({"data": 4, "model": 2}, {"data": 4, "model": 2}),
        ({"model": -1, "data": 2}, {"data": 2, "model": 4}),
        ({"context": 2, "expert": 2}, {"data": 2, "expert": 2, "context": 2}),
        ({"data": 1, "context": 8}, {"context": 8}),
    ],
)
def test_a_mesh_has_the_axes_that_cut_something(sizes, shape):
    mesh = make_mesh(**sizes)
    assert dict(mesh.shape) == shape
    assert set(mesh.axis_types) == {AxisType.Explicit}


def test_one_device_is_a_mesh_too():
    assert dict(make_mesh(devices=jax.devices()[:1]).shape) == {"data": 1}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, "data=3 x expert=1 x context=1 x model=1: it takes 3 devices, and there are 8"),
        ({"model": 3}, "it takes a multiple of 3 devices, and there are 8"),
        ({"model": -1}, "only one axis can take the rest. Give model a size"),
        ({"model": 0}, "cannot make a mesh with model=0"),
    ],
)
def test_sizes_that_do_not_make_the_devices_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("letters", "shape", "parts"),
    [
        ("L D N H", (3, 8, 4, 5), (None, "data", "model", None)),
        ("V D", (8, 8), ("model", "data")),
        ("V D", (7, 8), (None, "data")),  # an axis that does not divide leaves the dimension whole
        ("B S D", (8, 6, 8), ("data", None, None)),  # and D is never cut where tokens are
        ("B S D", (7, 6, 8), (None, None, None)),
        ("L D", (3, 8), (None, None)),  # a vector is whole
        ("D", (8,), (None,)),
        ("K H", (4, 6), ("model", None)),
        ("N K", (4, 4), ("model", None)),  # an axis cuts one dimension
    ],
)
def test_letters_say_where_a_value_lies(letters, shape, parts):
    assert spec_of(letters, shape, make_mesh(4, 2)) == PartitionSpec(*parts)


def test_a_dimension_takes_as_many_of_its_axes_as_divide_it():
    mesh = make_mesh(2, expert=4)
    assert spec_of("B S", (8, 4), mesh) == PartitionSpec(("data", "expert"), None)
    assert spec_of("B S", (6, 4), mesh) == PartitionSpec("data", None)
    assert spec_of("V D", (8, 4), mesh, AXES | {"V": ("data",)}) == PartitionSpec("data", None)


def test_dimensions_that_stay_whole_are_told():
    assert uneven({"V": 7, "D": 8, "K": 1}, make_mesh(4, 2).shape) == [
        "V=7 stays whole: model=2 does not divide it",
        "K=1 stays whole: model=2 does not divide it",
    ]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_constraint_holds_on_either_kind_of_mesh(kind):
    x = _random((8, 4, 6))
    mesh = make_mesh(4, context=2, kind=kind)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(2 * x, "B S D"))(x)
    assert y.sharding.is_equivalent_to(sharding_of(mesh, "B S D", x.shape), 3)
    np.testing.assert_array_equal(y, 2 * x)


def test_a_constraint_is_nothing_without_a_mesh_and_on_foreign_ones():
    x = _random((8, 4, 6))
    assert constrain(x, "B S D") is x
    with jax.set_mesh(jax.make_mesh((8,), ("x",), (AxisType.Explicit,))):
        assert constrain(x, "B S D") is x


def test_a_constraint_leaves_manual_axes_alone():
    with jax.set_mesh(make_mesh(4, context=2)):
        x = jax.device_put(_random((8, 4, 6)), PartitionSpec("data", "context"))
        spec = PartitionSpec("data", "context")
        body = lambda x: constrain(x, "B S D")
        np.testing.assert_array_equal(jax.shard_map(body, in_specs=spec, out_specs=spec)(x), x)


# How x and the weight lie, and how the product then does.
PRODUCTS = {
    "weight cut over the summed dimension": ("bsd,df->bsf", ("data",), ("data",), ("data", None, None)),
    "weight cut over its own": ("bsd,df->bsf", ("data",), ("data", "model"), ("data", None, "model")),
    "both cut over the summed dimension": ("bsf,fd->bsd", ("data", None, "model"), ("model", "data"), ("data",)),
    "the axis is taken": ("bsd,vd->bsv", ("data",), ("data",), ("data", None, None)),
    "leading dimensions": ("...d,vd->...v", ("data", "model"), ("model",), ("data", "model", None)),
    "two axes, one of them free": ("bsd,df->bsf", ("data",), (None, ("data", "model")), ("data", None, "model")),
    "nothing cut": ("bsd,df->bsf", (), (), (None, None, None)),
}


@pytest.mark.parametrize(("pattern", "x_parts", "weight_parts", "parts"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_lies_as_its_left_operand(pattern, x_parts, weight_parts, parts):
    x, weight = _random((8, 8, 8)), _random((8, 8), 1)
    with jax.set_mesh(make_mesh(4, 2)):
        y = einsum(pattern, place(x, PartitionSpec(*x_parts)), place(weight, PartitionSpec(*weight_parts)))
        assert partitions(y) == (*parts, None, None)[:3]
    np.testing.assert_allclose(y, jnp.einsum(pattern, x, weight), atol=1e-5)


def test_a_product_without_a_mesh_is_einsum():
    x, weight = _random((8, 8, 8)), _random((8, 8), 1)
    plain = jax.make_jaxpr(lambda x, w: jnp.einsum("...d,df->...f", x, w))(x, weight)
    assert str(jax.make_jaxpr(lambda x, w: einsum("...d,df->...f", x, w))(x, weight)) == str(plain)


def test_a_dimension_can_be_gathered():
    x = _random((8, 4, 6))
    with jax.set_mesh(make_mesh(4, 2)):
        cut = place(x, PartitionSpec("data", "model"))
        assert partitions(uncut(cut, 1)) == ("data", None, None)
        assert partitions(uncut(cut, -3, 1)) == (None, None, None)
        assert uncut(cut, 2) is cut
    assert uncut(x, 0) is x
