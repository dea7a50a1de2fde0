"""Collectives and shardings on tiles: `tile` inside `jax.shard_map`, and under a mesh whose axes are Auto."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests import quick
from tests.helpers import assert_same
from tests.transforms.test_primitives import node
from transforms import TileError, tile
from transforms.tiling.ir.graph import Value
from transforms.tiling.ir.placement import Partial, Tiled
from transforms.tiling.rules import RULES

pytestmark = pytest.mark.symbolic

L, D = 10, 4
MESH = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
SPEC = PartitionSpec(None, "d")


def on_devices(fn, check=False):
    """`fn` of each device's block `[L, 2]` of an array `[L, 8]`, as one program."""
    return quick.jit(jax.shard_map(fn, mesh=MESH, in_specs=SPEC, out_specs=SPEC, check_vma=check))


COLLECTIVES = {
    "psum": lambda x: lax.psum(jnp.sin(x), "d"),
    "pmax": lambda x: lax.pmax(x, "d"),
    "pmin": lambda x: lax.pmin(x, "d"),
    "ppermute": lambda x: lax.ppermute(x, "d", [(0, 1), (1, 2), (2, 3), (3, 0)]),
    "pvary": lambda x: lax.pcast(x, "d", to="varying"),
    "all_gather": lambda x: (lax.all_gather(x, "d").sum(0), lax.all_gather(x, "d", axis=1, tiled=True)),
    "reduce_scatter": lambda x: (
        lax.psum_scatter(x @ jnp.ones((2, 4)), "d", scatter_dimension=1)[:, None],
        lax.psum_scatter(x @ jnp.ones((2, 8)), "d", scatter_dimension=1, tiled=True),
    ),
    "all_to_all": lambda x: (
        lax.all_to_all(x @ jnp.ones((2, 4)), "d", 1, 1, tiled=True),
        lax.all_to_all(x @ jnp.ones((2, 4)), "d", 1, 0).sum(0)[:, None],
    ),
    "axis_index": lambda x: x * lax.axis_index("d"),
    "sums": lambda x: lax.psum(jnp.exp(x).sum(0), "d")[None],
    "maxima": lambda x: lax.pmax(jnp.exp(x).max(0), "d")[None],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_tile_inside_shard_map(name):
    x = np.random.default_rng(0).normal(size=(L, 8)).astype(np.float32)
    fn = COLLECTIVES[name]

    def loss(fn, x):
        return jax.tree.map(lambda out: jnp.sin(out).sum(keepdims=True), fn(x))

    assert_same(on_devices(tile(fn, 0, 3))(x), on_devices(fn)(x), 1e-6)
    if name in ("psum", "all_gather", "reduce_scatter", "ppermute"):
        total = lambda fn: on_devices(lambda x: jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(loss(fn, x)))))(x))
        assert_same(total(tile(fn, 0, 3))(x), total(fn)(x), 1e-6)


@pytest.mark.parametrize("name", ["ppermute", "all_gather", "reduce_scatter"])
def test_tile_where_devices_are_known_to_differ(name):
    x = np.random.default_rng(0).normal(size=(L, 8)).astype(np.float32)
    total = lambda fn: on_devices(lambda x: jax.grad(lambda x: sum(jnp.sin(y).sum() for y in fn(x)))(x), check=True)
    fn = lambda x: jax.tree.leaves(COLLECTIVES[name](x))
    assert_same(total(tile(fn, 0, 3))(x), total(fn)(x), 1e-6)


def test_partial_sums_of_all_devices_are_joined():
    for name in ("all_gather", "reduce_scatter"):
        rule, whole = RULES[name], node(name)
        whole.outputs = [Value(jax.typeof(jnp.ones((1, 3))))]
        assert rule.push(whole, (Partial("sum"),)).outs == (Partial("sum"),)
        whole.outputs = [Value(jax.typeof(jnp.ones((8, 3))))]
        asked = rule.push(whole, (Partial("sum"),))
        assert asked.reason == "makes several copies of it"
        assert asked.otherwise.outs == (Partial("sum"),)


@pytest.mark.parametrize("name", ["pbroadcast"])  # XLA:CPU does not run these
def test_collective_that_is_placed_like_the_others(name):
    for placement in (Tiled(0), Partial("sum")):
        assert RULES[name].push(node(name), (placement,)).outs == (placement,)


SHIFT = [(0, 1), (1, 2), (2, 3), (3, 0)]
SUMS = {
    "permuted": lambda x, w: jnp.exp(lax.ppermute(x, "d", SHIFT)).sum(),
    "gathered": lambda x, w: jnp.exp(lax.all_gather(x, "d") * (1 + lax.axis_index("d"))).sum(),
    "summed": lambda x, w: jnp.exp(lax.psum(x, "d") * (1 + lax.axis_index("d"))).sum(),
    "of the same weight": lambda x, w: jnp.exp(x * w).sum(),
    "apart": lambda x, w: jnp.exp(x).sum(),
}


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", SUMS)
def test_slopes_of_each_devices_sum_meet_its_own_derivatives(name, typed):
    """Where devices add up derivatives on the way to an input, a slope that each knows late comes before that."""
    rng = np.random.default_rng(0)
    args = rng.standard_normal((4 * L, 3)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    spread, same = PartitionSpec("d"), PartitionSpec()

    def learn(wrap):
        fn = wrap(lambda x, w: lax.psum(jnp.log(SUMS[name](x, w)), "d"))
        mapped = jax.shard_map(fn, mesh=MESH, in_specs=(spread, same), out_specs=same, check_vma=typed)
        return quick.jit(jax.value_and_grad(mapped, (0, 1)))(*args)

    assert_same(learn(lambda fn: tile(fn, (0, None), 5)), learn(lambda fn: fn), 1e-5)


MOVED = "moves parts of the cut axis between devices"
REFUSED = {
    "all_gather": lambda x: lax.all_gather(x, "d", axis=0, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "d", scatter_dimension=0),
    "all_to_all": lambda x: lax.all_to_all(x, "d", 0, 1, tiled=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_collective_along_the_cut_axis_is_refused(name):
    tiled = tile(lambda x: REFUSED[name](jnp.sin(x)), 0, 2, gather="none")
    with pytest.raises(TileError, match=re.escape(f"it {MOVED}, so its operand would have to be whole")):
        on_devices(tiled)(jnp.ones((4, 8)))


def test_sum_of_maxima_over_the_devices_is_completed():
    assert RULES["psum"].push(node("psum"), (Partial("max"),)).reason == "combines it otherwise over the devices"


def test_sharding_constraint_on_tiles():
    def fn(x, w):
        hidden = lax.with_sharding_constraint(jnp.sin(x), NamedSharding(MESH, PartitionSpec("d", None)))
        out = lax.with_sharding_constraint(hidden @ w, NamedSharding(MESH, PartitionSpec(None, "d")))
        return out, lax.with_sharding_constraint(out.sum(0), NamedSharding(MESH, PartitionSpec("d")))

    rng = np.random.default_rng(0)
    args = rng.normal(size=(L, D)).astype(np.float32), rng.normal(size=(D, 8)).astype(np.float32)
    assert_same(quick.jit(tile(fn, (0, None), 3))(*args), quick.jit(fn)(*args), 1e-6)
    text = str(jax.make_jaxpr(tile(fn, (0, None), 3))(*args))
    assert "P(UNCONSTRAINED, None)" in text  # the cut axis, whose tiles the devices need not divide


def test_array_that_is_put_on_several_devices_is_completed():
    target = NamedSharding(MESH, PartitionSpec("d"))
    with pytest.raises(TileError, match="it spreads the cut axis over devices"):
        tile(lambda x: jax.device_put(jnp.sin(x), target), 0, 2, gather="none")(jnp.ones((8, D)))
    put = node("device_put")
    put.params["devices"] = [target]
    assert RULES["device_put"].push(put, (Partial("sum"),)).reason == "puts it somewhere"
    assert RULES["device_put"].push(put, (Tiled(1),)).outs == (Tiled(1),)


def test_a_tile_is_spread_over_devices_as_the_whole_is():
    mesh = jax.make_mesh((4,), ("d",))

    def fn(x):
        return jax.reshard(x * 2, NamedSharding(mesh, PartitionSpec(None, "d")))

    with jax.set_mesh(mesh):
        x = jnp.arange(40.0).reshape(L, 4)
        for axis in (0, 1):
            tiled = tile(fn, axis=axis, n=2)(x)
            np.testing.assert_array_equal(tiled, fn(x))
            assert jax.typeof(tiled) == jax.typeof(fn(x))
