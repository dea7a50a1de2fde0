"""`jax.shard_map` in a tiled function: its body on the share that each device has of a tile, its gradient too."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import quick
from tests.helpers import FLOAT32, assert_same, equations
from transforms import TileError, tile
from transforms.cotangents import linear_rules
from transforms.tiling.autodiff.custom_rules import ruled
from transforms.tiling.frontend.flatten import flatten
from transforms.tiling.ir.walks import flops

T, D = 48, 8
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
MESH = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("d", "m"), axis_types=(kind,) * 2)


def on_devices(local, ins, outs, **options):
    return lambda *args: jax.shard_map(local, in_specs=ins, out_specs=outs, **options)(*args)


def rows(x, w):
    h = jnp.sin(x @ w)
    return h, lax.psum(h.sum(0), "d"), lax.psum(jnp.exp(h).sum(), "d"), w * 2


def columns(x, w):
    h = jnp.sin(lax.psum(x @ w, "m"))
    return h, h.sum(0), (h**2).sum()


def gathered(x, w):
    w = lax.all_gather(w, "d", tiled=True)
    h = jnp.sin(x @ w)
    return h, lax.axis_index("d") + h.sum(0)[None]


def scanned(x, w):
    def step(total, row):
        row = jnp.tanh(row @ w)
        return total + row.sum(), row

    total, h = lax.scan(step, lax.pcast(0.0, "d", to="varying"), x)
    h, _ = lax.scan(lambda h, w: (jnp.sin(h @ w.T @ w), h.sum()), h, w[None])
    return h, lax.psum(total, "d")


def exchanged(x, w):
    h = jax.checkpoint(lambda x: jnp.sin(x @ w))(x)
    h = lax.ppermute(h, "m", [(0, 1), (1, 0)])
    return lax.psum_scatter(h, "m", scatter_dimension=1, tiled=True)


def mixed(x, w):
    def step(state, _):
        h, v = state
        v = jnp.tanh(v @ w)
        return (jnp.sin(h @ v), v), (v.sum(), h.sum())

    (h, v), (of_v, of_h) = lax.scan(step, (x, w), None, length=2)
    return lax.cond(w[0, 0] > 0, jnp.sin, lambda h: h @ w, h), v, of_v, lax.psum(of_h, "d")


# A function, and how its arguments are spread; the mesh is the one around it.
CASES = {
    "the cut axis spread": (on_devices(rows, (P("d"), P()), (P("d"), P(), P(), P())), P("d"), P()),
    "another axis spread": (on_devices(columns, (P(None, "m"), P("m")), (P(), P(), P())), P(None, "m"), P("m")),
    "weights gathered inside": (on_devices(gathered, (P("d"), P("d")), (P("d"), P("d"))), P("d"), P("d")),
    "scans": (on_devices(scanned, (P("d"), P()), (P("d"), P())), P("d"), P()),
    "exchanges": (on_devices(exchanged, (P(None, "m"), P("m")), P(None, "m")), P(None, "m"), P("m")),
    "some axes": (on_devices(columns, (P(None, "m"), P("m")), (P(), P(), P()), axis_names={"m"}), P("d", "m"), P("m")),
    "results apart": (on_devices(mixed, (P("d"), P()), (P("d"), P(), P(), P())), P("d"), P()),
    "layers": (
        lambda x, w: lax.scan(
            jax.checkpoint(lambda h, w: (on_devices(lambda x, w: jnp.sin(x @ w), (P("d"), P()), P("d"))(h, w), None)),
            x,
            jnp.stack([w, w * 2]),
        )[0],
        P("d"),
        P(),
    ),
}


def arguments():
    random = np.random.default_rng(0)
    return random.normal(size=(T, D)).astype(np.float32), 0.3 * random.normal(size=(D, D)).astype(np.float32)


def with_gradients(fn):
    def total(x, w):
        outs = fn(x, w)
        return sum(jnp.sin(out / 10).sum() for out in jax.tree.leaves(outs)), outs

    return jax.value_and_grad(total, (0, 1), has_aux=True)


@pytest.mark.redundant("kind", "n")
@pytest.mark.parametrize(("kind", "n"), [(EXPLICIT, 4), (AUTO, 5)])
@pytest.mark.parametrize("name", CASES)
def test_tiles_are_shared_by_the_devices(name, kind, n):
    fn, *specs = CASES[name]
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments(), specs, strict=True)]
        options = {} if kind == EXPLICIT else {"in_sharding": tuple(specs)}
        tiled = tile(fn, (0, None), n, **options)
        expected = quick.jit(with_gradients(fn))(*args)
        assert_same(quick.jit(with_gradients(tiled))(*args), expected, FLOAT32)
        scalar = tile(lambda *args: with_gradients(fn)(*args)[0][0], (0, None), n, **options)
        assert_same(quick.jit(jax.grad(scalar, (0, 1)))(*args), expected[1], FLOAT32)


@pytest.mark.crossed("check", "spec")
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")])
def test_the_mesh_may_be_known_to_the_shard_map_alone(spec, check):
    weights, out = (P(), P("d")) if spec == P("d") else (P("d"), P())
    local = lambda x, w: jnp.sin(x) @ w if spec == P("d") else lax.psum(jnp.sin(x) @ w, "d")
    fn = on_devices(local, (spec, weights), out, mesh=MESH, check_vma=check)
    assert_same(
        quick.jit(with_gradients(tile(fn, (0, None), 4)))(*arguments()),
        quick.jit(with_gradients(fn))(*arguments()),
        FLOAT32,
    )
    shares = tile(fn, (0, None), 4).plan(*arguments()).shares
    assert shares == (8 if spec == P("d") else 1)


def test_the_body_holds_one_tile():
    fn = on_devices(lambda x, w: jnp.sin(x @ w), (P("d"), P()), P("d"), mesh=MESH)
    tiled = jax.make_jaxpr(jax.grad(lambda *args: tile(fn, (0, None), 3)(*args).sum(), (0, 1)))(*arguments())
    bodies = [e.params["jaxpr"] for e in equations(tiled) if e.primitive.name == "shard_map"]
    lengths = {v.aval.shape[0] for body in bodies for e in equations(body) for v in e.outvars if v.aval.shape}
    assert bodies
    assert lengths == {D, T // 8 // 3}


def test_it_runs_inside_another():
    inner = on_devices(columns, (P(None, "m"), P("m")), (P(), P(), P()))
    outer = lambda fn: on_devices(lambda x, w: fn(x, w)[0], (P("d"), P()), P("d"), axis_names={"d"})
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        x, w = arguments()
        args = jax.device_put(x, NamedSharding(mesh, P("d", "m"))), jax.device_put(w, NamedSharding(mesh, P("m")))
        assert_same(quick.jit(outer(tile(inner, (0, None), 3)))(*args), quick.jit(outer(inner))(*args), FLOAT32)


@pytest.mark.parametrize("mode", ["jvp", "vmap"])
def test_forward_mode_and_batches(mode):
    fn, *specs = CASES["the cut axis spread"]
    x, w = arguments()
    with jax.set_mesh(mesh_of(AUTO)):
        tiled = tile(fn, (0, None), 4, in_sharding=tuple(specs))
        if mode == "jvp":
            run = lambda f: quick.jit(lambda *args: jax.jvp(f, args, args))(x, w)
        else:
            run = lambda f: quick.jit(jax.vmap(f, (None, 0)))(x, jnp.stack([w, 2 * w]))
        assert_same(run(tiled), run(fn), FLOAT32)


REFUSED = {
    "a sort": (lambda x, w: jnp.sort(x @ jnp.tile(w, (1, 50)), 0).sum(1), P("d"), r"for `sort` at .*test_shard.py"),
    "a mean": (
        lambda x, w: (h := x @ jnp.tile(w, (1, 50)), jnp.sin(h - h.max(0)).sum(1))[1],
        P("d"),
        r"for `sub` at .*test_shard.py",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_body_that_needs_all_tiles_is_refused(name):
    local, spec, why = REFUSED[name]
    fn = on_devices(local, (spec, P()), spec, mesh=MESH)
    with pytest.raises(TileError, match=rf"cannot tile `shard_map` at .*test_shard.py(.|\n)*{why}"):
        tile(fn, (0, None), 2)(*arguments())


def test_products_of_all_devices_are_counted():
    fn = on_devices(lambda x, w: x @ w, (P("d"), P()), P("d"), mesh=MESH)
    (node,) = flatten(jax.make_jaxpr(fn)(*arguments())).nodes
    assert flops(node) == 2 * T * D * D


@pytest.mark.parametrize("check", [True, False])
def test_each_device_of_a_shard_map_has_a_scalar_of_its_own(check):
    """A weight that all devices share gathers what each is asked for: cotangents differ from device to device."""

    def scaled(fn):
        def local(x, w):
            scale = 1.0 + lax.axis_index("d")
            value, (of_x, of_w) = jax.value_and_grad(lambda x, w: scale * fn(x, w), (0, 1))(x, w)
            return value[None], of_x, of_w if check else lax.psum(of_w, "d")

        return on_devices(local, (P("d"), P()), (P("d"), P("d"), P()), mesh=MESH, check_vma=check)

    fn = lambda x, w: jnp.log(jnp.exp(jnp.sin(x @ w)).sum())
    args = [jnp.asarray(a) for a in arguments()]
    assert_same(quick.jit(scaled(tile(fn, (0, None), 2)))(*args), quick.jit(scaled(fn))(*args), FLOAT32)


@jax.custom_vjp
def summed_back(x):
    """What tensor parallelism begins a layer with: each device's own share of a sum is computed of it."""
    return x


summed_back.defvjp(lambda x: (x, None), lambda _, slope: (lax.psum(slope, "d"),))


@jax.custom_jvp
def averaged(x):
    """Itself, but that its derivative is the mean of the devices'."""
    return x


averaged.defjvp(lambda primals, tangents: (primals[0], lax.pmean(tangents[0], "d")))

MIXED = {
    "mean": lambda x, w: (jnp.sin(x @ w) * jnp.tanh(lax.pmean(x, "d"))).sum(),
    "sum": lambda x, w: lax.psum((jnp.sin(x @ w) * jnp.tanh(lax.pmean(x, "d"))).sum(), "d"),
    "neighbour": lambda x, w: (jnp.sin(x @ w) * lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)])).sum(),
    "rule": lambda x, w: jnp.sin(summed_back(x) @ w).sum(),
    "rule that is promised to be linear": lambda x, w: jnp.sin(linear_rules(summed_back)(x) @ w).sum(),
    "rule of both modes": lambda x, w: jnp.sin(averaged(x) @ w).sum(),
}


@pytest.mark.symbolic
@pytest.mark.parametrize(
    ("name", "check"), [*((name, True) for name in [*MIXED][:3]), *((name, False) for name in MIXED)]
)
def test_scalars_of_what_devices_exchange_have_cotangents_of_their_own(name, check):
    """Of `sum` the scalar is the same on all, and yet untyped its cotangents are added up, that may differ."""

    def scaled(fn):
        local = lambda x, w, scale: (scale[0] * fn(x, w))[None]
        run = on_devices(local, (P("d"), P(), P("d")), P("d"), mesh=MESH, check_vma=check)
        total = lambda x, w: run(x, w, jnp.arange(1.0, 9.0)).sum()
        return lambda x, w: (jax.grad(total)(x, w), jax.value_and_grad(total, (0, 1))(x, w))  # w is of all devices

    args = [jnp.asarray(arguments()[0]), jnp.asarray(np.random.default_rng(3).normal(size=(D, D)) / 3)]
    found, expected = (quick.jit(scaled(fn))(*args) for fn in (tile(MIXED[name], (0, None), 3), MIXED[name]))
    assert_same(found, expected, FLOAT32)


@pytest.mark.symbolic
@pytest.mark.parametrize(("name", "times"), [("sum", 2), ("mean", 3)])
def test_a_scalar_that_is_the_same_on_all_devices_has_its_gradients_with_it(name, times):
    """Types say so; one of each device's own is computed again, where its cotangent is known."""
    local = lambda x, w: jax.grad(tile(MIXED[name], (0, None), 3), 1)(x, w)
    run = on_devices(local, (P("d"), P()), P(), mesh=MESH)
    closed = jax.make_jaxpr(run)(*(jnp.asarray(a) for a in arguments()))
    products = sum(flops(node) for node in flatten(closed).nodes)
    assert products == pytest.approx(times * 2 * T * D * D, rel=0.01)


@jax.custom_vjp
def sine(x, w):
    return jnp.sin(x @ w)


sine.defvjp(
    lambda x, w: (sine(x, w), (x, w)),
    lambda kept, slope: jax.vjp(lambda x, w: jnp.sin(x @ w), *kept)[1](slope),
)


@jax.custom_vjp
def clipped(x, w):
    return jnp.sin(x @ w)


clipped.defvjp(
    lambda x, w: (clipped(x, w), (x, w)),
    lambda kept, slope: jax.vjp(lambda x, w: jnp.sin(x @ w), *kept)[1](jnp.clip(slope, -0.2, 0.1)),
)


@pytest.mark.parametrize(("rule", "loops"), [(sine, 1), (clipped, 2)])
@pytest.mark.parametrize("where", ["explicit", "auto", "known to it alone", "unchecked"])
def test_a_rule_of_its_own_in_the_body(where, rule, loops):
    """Where cotangents enter linearly, gradients are formed in the loop of the values, as outside of a `shard_map`."""
    named = {"mesh": MESH} if where in ("known to it alone", "unchecked") else {}
    share = lambda w: w if where == "unchecked" else lax.pcast(w, "d", to="varying")
    local = lambda x, w: lax.psum(rule(x, share(w)).sum(), "d")
    fn = on_devices(local, (P("d"), P()), P(), check_vma=where != "unchecked", **named)
    x, w = arguments()
    with (
        contextlib.nullcontext() if named else jax.set_mesh(mesh := mesh_of(EXPLICIT if where == "explicit" else AUTO))
    ):
        args = (x, w) if named else (jax.device_put(x, NamedSharding(mesh, P("d"))), w)
        tiled = tile(fn, (0, None), 3, **({"in_sharding": (P("d"), P())} if where == "auto" else {}))
        gradient = lambda fn: quick.jit(jax.value_and_grad(lambda *args: fn(*args) / 7, (0, 1)))
        assert_same(gradient(tiled)(*args), gradient(fn)(*args), FLOAT32)
        found = list(equations(gradient(tiled).trace(*args).jaxpr))
        assert sum(e.primitive.name == "scan" for e in found) == loops


@jax.custom_vjp
def rounded(x):
    return jnp.round(4 * x) / 4


rounded.defvjp(lambda x: (rounded(x), None), lambda _, slope: (slope,))


@jax.custom_jvp
def scaled(x):
    return 1.0 * x


scaled.defjvp(lambda primals, tangents: (1.0 * primals[0], 0.7 * tangents[0]))


@pytest.mark.symbolic
@pytest.mark.crossed("rule", "check")
@pytest.mark.parametrize("rule", [rounded, scaled])
@pytest.mark.parametrize(
    ("check", "depth"), [(True, 1), (False, 1), (False, 2)]
)  # JAX differentiates no two that are checked
def test_second_derivatives_are_those_of_what_a_rule_in_the_body_computes(rule, check, depth):
    local = lambda x, w: jnp.tanh(rule(lax.psum(x @ w, "m") if depth == 2 else x @ w)).sum(-1)
    if depth == 2:
        local = on_devices(local, (P(None, "m"), P("m")), P(), axis_names={"m"}, check_vma=check)
    fn = on_devices(local, (P("d"), P()), P("d"), mesh=mesh_of(AUTO), axis_names={"d"}, check_vma=check)
    with jax.enable_x64(True):
        x, w = (a.astype(np.float64) for a in arguments())
        slope = lambda fn: jax.grad(lambda w: jnp.exp(-fn(x, w)).sum())
        second = lambda fn: quick.jit(jax.grad(lambda w: (slope(fn)(w) * jnp.cos(w)).sum()))(w)
        assert_same(second(tile(fn, (0, None), 3)), second(fn), 1e-9)


@pytest.mark.parametrize("check", [True, False])
def test_a_rule_in_the_body_that_calls_its_function_again_is_known(check):
    fn = on_devices(lambda x, w: jax.nn.relu(x @ w), (P("d"), P()), P("d"), mesh=MESH, check_vma=check)
    assert not ruled(jax.make_jaxpr(fn)(*arguments()).jaxpr, (0, 1))


@pytest.mark.symbolic
@pytest.mark.parametrize("within", [True, False])
def test_devices_draw_each_its_own_numbers(within):
    def local(x):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("d"))
        return x * jax.random.normal(key, (x.shape[0], 1))

    fn = lambda local: on_devices(local, P("d"), P("d"), mesh=MESH)
    x, _ = arguments()
    found = fn(tile(local, 0, 3)) if within else tile(fn(local), 0, 3)
    assert_same(quick.jit(found)(x), quick.jit(fn(local))(x), FLOAT32)


@pytest.mark.symbolic
@pytest.mark.parametrize("within", [True, False])
def test_whole_numbers_that_differ_from_device_to_device_have_no_gradient(within):
    fn = lambda local: on_devices(local, (P(), P(None, "d")), (P("d"), P("d")), mesh=MESH)
    local = lambda x, w: (jnp.argmax(h := x @ w, 0), jnp.sin(h.sum(0)))
    run = lambda fn: quick.jit(jax.grad(lambda *args: fn(*args)[1].sum(), (0, 1)))(*arguments())
    axis = (0, None)
    assert_same(run(fn(tile(local, axis, 3)) if within else tile(fn(local), axis, 3)), run(fn(local)), FLOAT32)
