"""Grouped products: those of `jax.lax.ragged_dot`, with the FLOPs and the memory of one product of each row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from experiments.planning.hlo import dot_flops
from tests.helpers import equations
from transforms import tile
from transforms.sharding import make_mesh
from zoo.formats import Format
from zoo.kernels.experts import megablox
from zoo.models.layers import Widened
from zoo.models.mixtures.experts import experts
from zoo.models.mixtures.grouped import FEW, divided, grouped, ragged, stepped
from zoo.quantised import Quantised, encode

INSIDE, WIDTH = 24, 40


def drawn(sizes, left, dtype):
    """Rows of groups of these sizes, and some that are of none."""
    rng, rows = np.random.default_rng(0), sum(sizes) + left
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return draw(rows, INSIDE), draw(len(sizes), INSIDE, WIDTH), jnp.asarray(sizes, jnp.int32), draw(rows, WIDTH)


@functools.partial(jax.jit, static_argnums=0)
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


@pytest.mark.optimised
@pytest.mark.redundant("dtype", "left")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("left", [0, 130])
@pytest.mark.parametrize("product", [grouped, ragged], ids=lambda product: product.__name__)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_and_gradients_are_those_of_ragged_dot(sizes, product, left, dtype):
    args = drawn(SIZES[sizes], max(left, 512 - sum(SIZES[sizes])), dtype)
    for ours, theirs in zip(found(product, *args), found(jax.lax.ragged_dot, *args), strict=True):
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
    out, of_x, of_weight = (np.isnan(array) for array in found(grouped, x, weight, counts, slope))
    assert np.flatnonzero(out.any(1)).tolist() == ([first] if which == "row" else [])
    assert np.flatnonzero(of_x.any(1)).tolist() == ([] if which == "row" else [first])
    assert np.flatnonzero(of_weight.any((1, 2))).tolist() == [1]


def shapes(rows, groups):
    """The shapes of what products of so many rows, and their gradients, are given."""
    array = jax.ShapeDtypeStruct
    x, weight = array((rows, INSIDE), jnp.float32), array((groups, INSIDE, WIDTH), jnp.float32)
    return x, weight, array((groups,), jnp.int32), array((rows, WIDTH), jnp.float32)


@pytest.mark.measured
@pytest.mark.parametrize(("rows", "groups"), [(8192, 8), (8192, 64), (4096, 32)])
def test_each_row_meets_one_matrix(rows, groups):
    compiled = lambda product: jax.jit(functools.partial(found, product)).lower(*shapes(rows, groups)).compile()
    ours, theirs = compiled(grouped), compiled(jax.lax.ragged_dot)
    assert 1 <= dot_flops(ours.as_text()) / (6 * rows * INSIDE * WIDTH) <= 1.26
    temporary = lambda program: program.memory_analysis().temp_size_in_bytes
    assert temporary(ours) < temporary(theirs) * 3 / groups


def test_gradients_of_matrices_are_never_the_products_of_all_rows():
    """Which XLA makes of them, on TPUs too: 64 times the FLOPs of 64 groups."""
    traced = jax.make_jaxpr(functools.partial(found, ragged))(*shapes(8192, 64))
    made = [e.outvars[0].aval.shape for e in equations(traced) if e.primitive.name.startswith("ragged_dot")]
    assert made == [(8192, WIDTH), (8192, INSIDE)]


@pytest.mark.parametrize("product", [grouped, ragged, megablox], ids=lambda product: product.__name__)
def test_a_loss_over_its_batch_runs_forward_once(product):
    """`tile` does not look into loops and kernels of derivative rules: it is promised what it would look for."""

    def loss(weights, x):
        out, _ = experts(x, *weights, 2, normalise=True, by_sequence=True, product=product)
        return jnp.square(out).mean()

    weights = (8, 4), (4, 8, 16), (4, 8, 16), (4, 16, 8)
    shaped = lambda shape: jax.ShapeDtypeStruct(shape, "float32")
    plan = tile(loss, (None, 0), 4).plan(tuple(map(shaped, weights)), shaped((8, 256, 8)))
    assert len(plan.value.loops) == len(plan.gradient.loops) == 1


def test_few_rows_are_left_to_the_library():
    assert "ragged_dot" in str(jax.make_jaxpr(grouped)(*shapes(16, 8)[:3]))


def test_devices_have_rows_of_their_own():
    """Where they share the matrices, the gradients of these are summed over devices."""
    args = drawn(SIZES["few and many"], 0, jnp.float32)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    x, weight, counts, slope = args
    both = lambda array: jnp.concatenate([array, 2 * array])
    spec = PartitionSpec("data")
    with jax.set_mesh(mesh):
        spread = jax.shard_map(grouped, in_specs=(spec, PartitionSpec(), PartitionSpec()), out_specs=spec)
        put = lambda array: jax.device_put(both(array), jax.NamedSharding(mesh, spec))
        out, of_x, of_weight = jax.jit(functools.partial(found, spread))(put(x), weight, counts, put(slope))
    one = found(grouped, *args)
    np.testing.assert_allclose(out, both(one[0]), atol=1e-5)
    np.testing.assert_allclose(of_x, both(one[1]), atol=1e-5)
    np.testing.assert_allclose(of_weight, 5 * one[2], atol=1e-3)


@pytest.fixture
def multiplied(monkeypatch):
    """Start to count the products of blocks that devices execute; of what is traced from then on."""
    made, product = [], jax.lax.dot_general

    def counted(*args, **options):
        jax.debug.callback(lambda: made.append(1))
        return product(*args, **options)

    def start():
        monkeypatch.setattr(jax.lax, "dot_general", counted)
        return made

    return start


OWN = {"even": [16] * 16, "few and many": [1, 400, 0, 33, *[0] * 11, 32], "all": [*[0] * 15, 2048], "none": [0] * 16}


@pytest.mark.parametrize(("devices", "turn"), [(2, 3), (8, 1)])
@pytest.mark.parametrize("product", [grouped, ragged], ids=lambda product: product.__name__)
@pytest.mark.parametrize("own", OWN)
def test_a_device_multiplies_the_blocks_of_its_own_groups_to_the_same_bits(own, product, devices, turn, multiplied):
    args = drawn(OWN[own], 2048 - sum(OWN[own]), jnp.float32)
    expected, made = found(product, *args), multiplied()
    ours = found(divided(product, devices), *args)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    jax.effects_barrier()
    needed = sum(-(-count // 32) for count in OWN[own])
    assert len(made) == (3 if product is grouped else 1) * -(-needed // turn) * turn


def test_only_products_in_blocks_are_told_of_other_devices():
    assert divided(stepped, 4) is stepped


@pytest.mark.parametrize("routing", ["even", "to one device", "one device never"])
def test_devices_that_divide_experts_divide_their_products(routing, multiplied):
    """However tokens are routed; and experts without tokens have gradients of zeros."""
    mesh, draw = make_mesh(2, expert=4), np.random.default_rng(0).normal
    shapes = (16, 128, 16), (16, 32), (32, 16, 24), (32, 16, 24), (32, 24, 16)
    specs = PartitionSpec(("data", "expert")), PartitionSpec(), *[PartitionSpec("expert")] * 3
    args = [jnp.asarray(draw(size=shape), jnp.float32) for shape in shapes]
    bias = jnp.zeros(32)
    bias = {"even": bias, "to one device": bias.at[8:10].set(99), "one device never": bias.at[8:16].set(-99)}[routing]

    def run(*args):
        layer = lambda *args: experts(*args, 2, normalise=True, product=grouped, biases=(bias, None, None, None))[0]
        return jax.jit(jax.value_and_grad(lambda *args: (layer(*args) ** 2).sum(), argnums=range(5)))(*args)

    expected, made = run(*args), multiplied()
    with jax.set_mesh(mesh):
        ours = run(*(jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)))
        jax.effects_barrier()
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6 * np.abs(other).max())
    unused = {"even": [], "to one device": [*range(8), *range(10, 32)], "one device never": [*range(8, 16)]}[routing]
    assert not any(np.asarray(one)[unused].any() for one in ours[1][2:])
    each = 2048 // 64 + 32  # blocks, at most, of the rows of four devices together
    assert 9 * 2 * 2048 // 64 <= len(made) <= 9 * 2 * each


def test_products_that_devices_divide_are_counted_as_of_even_routing():
    """The loop ends where the rows do, and its scope names the turns that are expected."""
    mesh = make_mesh(2, expert=4)
    shapes = (16, 128, 16), (16, 32), (32, 16, 24), (32, 16, 24), (32, 24, 16)
    specs = PartitionSpec(("data", "expert")), PartitionSpec(), *[PartitionSpec("expert")] * 3

    def flops(*args):
        loss = lambda *args: (experts(*args, 2, normalise=True, product=grouped)[0] ** 2).sum()
        return dot_flops(jax.jit(jax.grad(loss, argnums=range(5))).lower(*args).compile().as_text())

    alone = flops(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    with jax.set_mesh(mesh):
        of = lambda shape, spec: jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, spec))
        shared = flops(*map(of, shapes, specs))
    assert alone / 8 < shared < 1.7 * alone / 8


def packed(weight, format):
    """Every group's matrix in fewer bits."""
    group = None if format is Format.int8 else 8
    arrays = encode(weight.transpose(0, 2, 1), format, group, jnp.float32)
    how = {"letters": "DF", "sizes": weight.shape[1:], "inputs": "D", "dtype": weight.dtype}
    return Quantised(*arrays, format=format, **how)


@pytest.mark.redundant("sizes")
@pytest.mark.parametrize("kind", ["float32", "widened", "int8", "int4", "nf4"])
@pytest.mark.parametrize("sizes", SIZES)
def test_steps_are_the_products_of_xla_with_matrices_of_any_kind(sizes, kind):
    x, weight, counts, _ = drawn(SIZES[sizes], max(3, 512 - sum(SIZES[sizes])), jnp.float32)
    if kind == "widened":
        weight = Widened(weight, jnp.dtype("bfloat16"))
    elif kind != "float32":
        weight = packed(weight, Format(kind))
    out, expected = (jax.jit(product)(x, weight, counts) for product in (stepped, ragged))
    np.testing.assert_allclose(out, expected, atol=1e-5 * max(1, abs(expected).max()))


@pytest.mark.optimised
def test_no_bit_of_a_row_depends_on_the_others():
    """A group alone has the bits that it has among the others, wherever its rows are."""
    x, weight, counts, _ = drawn([1, 19, 0, 17, 2, 15, 16, 5], 4, jnp.float32)
    run, begins = jax.jit(stepped), np.cumsum([0, *counts])
    together = run(x, weight, counts)
    for group, count in enumerate(map(int, counts)):
        for row in range(count):
            own = slice(begins[group] + row, begins[group + 1])
            alone = jnp.zeros_like(x).at[: count - row].set(x[own])
            few = jnp.zeros_like(counts).at[group].set(count - row)
            np.testing.assert_array_equal(run(alone, weight, few)[: count - row], together[own])


@pytest.mark.measured
def test_a_step_holds_one_matrix_and_is_taken_where_there_are_rows():
    """Of fewer bits no other is made; and a loop has as many steps as there are blocks."""
    x, weight, counts, _ = shapes(64, 64)
    four_bits = jax.eval_shape(lambda weight: packed(weight, Format.int4), weight)
    program = jax.jit(stepped).lower(x, four_bits, counts).compile()
    assert program.memory_analysis().temp_size_in_bytes < weight.size
    assert dot_flops(program.as_text(), {"experts": 3}) == 3 * 2 * FEW * INSIDE * WIDTH


@pytest.mark.parametrize("product", [ragged, grouped, stepped])
def test_tokens_that_are_not_there_go_to_no_expert(product):
    draw = np.random.default_rng(0).normal
    x, router, gate, up, down = (
        jnp.asarray(draw(size=size), jnp.float32) for size in ((2, 5, 8), (8, 4), (4, 8, 6), (4, 8, 6), (4, 6, 8))
    )
    live = jnp.asarray(draw(size=(2, 5)) > 0)
    every, some = (
        experts(x, router, gate, up, down, 2, normalise=True, product=product, live=live)[0] for live in (None, live)
    )
    assert 0 < live.sum() < live.size
    np.testing.assert_allclose(some, jnp.where(live[..., None], every, 0), atol=1e-6)
