"""What JAX gets wrong of sums that are yet to be made over devices, and `tile` therefore never writes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from transforms import layout, tile

pytestmark = pytest.mark.symbolic

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
def test_a_sum_of_a_constant_stays_apart(mesh):
    x = put(mesh, jnp.ones((8, 4)))
    made = jax.jit(lambda: reshard(jax.lax.reduce_sum(x, (0, 1), out_sharding=P(unreduced={"d"})), P()))()
    assert made == 32


@pytest.mark.parametrize("known", [(2,), (1, 2)], ids=str)
def test_arguments_may_be_constants_of_the_program(mesh, known):
    """Data that a jitted function closes over."""
    rng = np.random.default_rng(0)
    args = [rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8, 16, 8), (8, 16))]
    args = [args[0], *(put(mesh, x) for x in args[1:])]
    loss = lambda w, h, mask: (((h @ w) ** 2).sum(-1) * mask).sum() / mask.sum()
    given = [x for i, x in enumerate(args) if i not in known]

    def of(fn):
        def call(*given):
            rest = iter(given)
            return fn(*(x if i in known else next(rest) for i, x in enumerate(args)))

        return call

    found, wanted = (jax.jit(jax.value_and_grad(of(fn)))(*given) for fn in (tile(loss, (None, 1, 1), 4), loss))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6), found, wanted)


WAYS = {
    "both are differentiated": lambda fn, h: lambda w: sum(x.sum() for x in jax.grad(fn, (0, 1))(w, h)),
    "forwards": lambda fn, h: lambda w: jax.jvp(lambda w: fn(w, h), (w,), (w,))[1],
    "a program within": lambda fn, h: lambda w: jax.jit(fn)(w, h),
    "computed again": lambda fn, h: jax.grad(lambda w: jax.checkpoint(fn)(w, h)),
}


@pytest.mark.parametrize("way", WAYS)
def test_constants_may_come_any_way(mesh, way):
    rng = np.random.default_rng(0)
    w, h = (put(mesh, rng.normal(size=shape).astype(np.float32)) for shape in ((8, 3), (8, 16, 2)))
    loss = lambda w, h: w.mean() * h.mean()
    found, wanted = (jax.jit(WAYS[way](fn, h))(w) for fn in (tile(loss, (None, 1), 4), loss))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


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


@pytest.mark.xfail(jax.__version_info__ < (0, 12), strict=True, reason="JAX adds up what each device holds whole")
def test_what_is_apart_is_a_constant_of_a_loop(mesh):
    """A loop may carry it, and make it."""

    def add(x):
        apart = reshard(x, P(None, unreduced={"d"}))
        step = lambda total, _: (total + apart, None)
        zeros = jnp.zeros_like(apart)
        return reshard(jax.lax.scan(step, zeros, jnp.arange(2))[0], P(None))

    np.testing.assert_array_equal(jax.jit(add)(jnp.arange(8.0)), 2 * np.arange(8))


SPREAD = [[["d", "m"], []], [["m", "d"], []], [[], ["d", "m"]], [["d"], ["m"]]]
UNEVEN = [(4, 2), (2, 4)]


@pytest.fixture
def uneven(request):
    mesh = jax.make_mesh(request.param, ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


@WRONG
@pytest.mark.parametrize("uneven", UNEVEN, indirect=True)
def test_two_axes_of_one_dimension_become_apart(uneven):
    x = jax.device_put(np.arange(8.0), NamedSharding(uneven, P(("d", "m"))))
    apart = lambda x: reshard(x, P(None, unreduced={"d", "m"}))
    both = jax.jit(lambda x: reshard(apart(x) + apart(x), P(None)))
    np.testing.assert_array_equal(both(x), 2 * np.arange(8))


@pytest.mark.parametrize("uneven", UNEVEN, indirect=True)
def test_arrays_move_from_any_place_to_any_other(uneven):
    """Spread over a dimension or two, whole, and apart, one axis or two of different lengths."""
    sets = map(frozenset, ("", "d", "m", "dm"))
    places = {layout.layout(entries, apart) for entries, apart in itertools.product([*SPREAD, [[], []]], sets)}
    x = np.arange(128.0, dtype=np.float32).reshape(8, 16)
    begins = sorted(places, key=str)

    def together(x):
        return layout.together(x, jax.typeof(x))

    def moved(x):
        return [together(layout.move(layout.move(x, there), then)) for there in begins for then in begins]

    whole = jax.device_put(x, NamedSharding(uneven, P(None, None)))
    for found in jax.jit(lambda x: [reshard(one, P(None, None)) for one in moved(x)])(whole):
        np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("uneven", UNEVEN, indirect=True)
@pytest.mark.parametrize("lowmem", [False, True])
@pytest.mark.parametrize("w", [P(("d", "m")), P("d", "m"), P(None, "m"), P()], ids=str)
def test_what_is_added_outside_the_loop_is_counted_once(uneven, w, lowmem):
    """Of two numbers, one of which has a term that the tiles do not make."""

    def two(w, h):
        made = h @ w
        return jnp.tanh(made).mean() + (w**2).sum() + jnp.sin(h).mean(), (made**2).mean()

    rng = np.random.default_rng(0)
    args = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8, 16, 8)))
    args = [jax.device_put(x, NamedSharding(uneven, spec)) for x, spec in zip(args, (w, P("d")), strict=True)]
    found, wanted = (
        jax.jit(jax.grad(lambda w, h, fn=fn: sum(fn(w, h)), (0, 1)))(*args)
        for fn in (tile(two, (None, 1), 3, lowmem=lowmem), two)
    )
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def looked_up(w, h, labels):
    """Rows of a table that is a head too; where tokens are spread, JAX looks them up on a mesh made Auto."""
    rows = w.T.at[labels].get(out_sharding=jax.typeof(h).sharding) if layout.named(jax.typeof(h)) else w.T[labels]
    return (jnp.tanh(h + rows) @ whole(w)).mean() if layout.named(jax.typeof(h)) else (jnp.tanh(h + rows) @ w).mean()


@WRONG
def test_what_leaves_a_mesh_made_auto_is_spread_and_apart():
    """Over the second and third of three axes: in two steps it is right (`mesh.sums.fit`)."""
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)):
        gains = reshard(jnp.ones((4, 2)), P("b"))
        auto = jax.sharding.get_abstract_mesh().update_axis_types(dict.fromkeys("abc", AxisType.Auto))

        def add(gains):
            within = reshard(gains, NamedSharding(auto, P(None, None)))
            with jax.sharding.use_abstract_mesh(auto):
                made = jnp.zeros((4, 2)).at[jnp.array([0, 1, 2, 3])].add(within)
            return reshard(reshard(made, P("c", None, unreduced={"b"})), P(None, None))

        np.testing.assert_array_equal(jax.jit(add)(gains), np.ones((4, 2)))


TABLES = [P("c", None), P(None, "c"), P(None, ("c", "a")), P()]


@pytest.mark.parametrize("axis", [(None, 0, 0), (1, None, None)], ids=str)
@pytest.mark.parametrize("w", TABLES, ids=str)
def test_rows_are_looked_up_on_a_mesh_made_auto(w, axis):
    check_lookup(w, axis, gather="any")


@pytest.mark.parametrize(
    "options", [{"lowmem": True}, {"policy": jax.checkpoint_policies.everything_saveable}], ids=["lowmem", "policy"]
)
def test_what_is_kept_of_a_mesh_made_auto_is_on_the_one_around(options):
    check_lookup(P(None, "c"), (None, 1, 1), **options)


def test_rows_of_a_tile_are_looked_up_on_a_mesh_made_auto():
    """Few, each in the tile that has it."""
    check_lookup(P(), (1, None, None), words=128)


def check_lookup(w, axis, words=16, **options):
    rng = np.random.default_rng(0)
    table, h = (rng.normal(size=shape).astype(np.float32) for shape in ((8, words), (4, 4, 8)))
    args = table, h, rng.integers(words, size=(4, 4)).astype(np.int32)
    fn = looked_up if words == 16 else (lambda w, h, labels: looked_up(jnp.tanh(w), h, labels) + jnp.tanh(w).sum())
    wanted = jax.jit(jax.grad(fn, (0, 1)))(*args)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, (w, P("b"), P("b")), strict=True)]
        found = jax.jit(jax.grad(tile(fn, axis, 2, **options), (0, 1)))(*args)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


OVER = {
    "gradients": lambda fn, w, h: jax.vmap(jax.grad(fn, (0, 1)), (0, None))(jnp.stack([w, 2 * w]), h),
    "gradients of both": lambda fn, w, h: jax.vmap(jax.grad(fn))(jnp.stack([w, w]), jnp.stack([h, jnp.sin(h)])),
    "products with the Hessian": lambda fn, w, h: jax.vmap(lambda v: jax.jvp(jax.grad(fn), (w, h), (v, h))[1])(
        jnp.stack([w, jnp.cos(w)])
    ),
    "jacobian": lambda fn, w, h: jax.jacrev(lambda w: jnp.stack([fn(w, h), fn(2 * w, h) ** 2]))(w),
    "within another": lambda fn, w, h: jax.vmap(jax.vmap(jax.grad(fn), (0, None)), (0, None))(
        jnp.stack([w] * 6).reshape(2, 3, *w.shape), h
    ),
}


@pytest.mark.parametrize("lowmem", [False, True])
@pytest.mark.parametrize("how", OVER)
def test_gradients_are_mapped(mesh, how, lowmem):
    """JAX's `vmap` maps no sum that is yet to be made over devices, of which loops have some."""
    rng = np.random.default_rng(0)
    w, h = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8, 16, 8)))
    w, h = jax.device_put(w, NamedSharding(mesh, P())), put(mesh, h)
    loss = lambda w, h: jnp.tanh(h @ w).mean() + (w**2).sum()
    tiled = tile(loss, (None, 1), 3, lowmem=lowmem)
    found, wanted = (jax.jit(lambda w, h, fn=fn: OVER[how](fn, w, h))(w, h) for fn in (tiled, loss))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5), found, wanted)


def whole(x):
    return reshard(x, P(*[None] * x.ndim))


def windows(w, h):
    before = jnp.pad(h, ((0, 0), (2, 0), (0, 0)))
    return jnp.tanh(sum(before[:, i : i + 16] * (i + 1.0) for i in range(3)) @ w).sum()


def products(w, h):
    return jnp.einsum("bsd,bsv->dv", h, jnp.tanh(h @ w), out_sharding=APART)


def losses(w, h):
    return jax.nn.logsumexp(h @ w, -1).mean()


def squares(w, h):
    return jnp.tanh(h @ w).sum((0, 2)), (h**2).mean()


TYPES = {  # the mesh's axes, what is differentiated, and how it is cut
    "weights that all devices have": (
        (8,), lambda cut: lambda w, h: jax.grad(cut(losses))(reshard(w, P(None, None, reduced={"d"})), h), (None, 1),
    ),
    "a result in parts": ((8,), lambda cut: jax.grad(lambda w, h: (whole(cut(products)(w, h)) ** 2).sum()), (None, 1)),
    "a loop within that begins with zeros": (
        (4, 2),
        lambda cut: jax.grad(lambda w, h: sum(x.sum() for x in cut(tile(squares, (None, 1), 2))(w, h))), (1, None),
    ),
    "windows, twice differentiated": (
        (8,), lambda cut: jax.grad(lambda w, h: (whole(jax.grad(cut(windows), 1)(w, h)) ** 2).sum()), (None, 1),
    ),
    "zeros beside parts": ((4, 2), lambda cut: jax.grad(cut(windows), 1), (1, None)),
    "an axis that is Auto": ((8, 1), lambda cut: jax.grad(cut(losses)), (None, 1)),
}  # fmt: skip


@pytest.mark.optimised
@pytest.mark.parametrize("lowmem", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_types_say_what_devices_hold(name, lowmem):
    shape, of, axis = TYPES[name]
    kinds = (AxisType.Explicit, AxisType.Auto if 1 in shape else AxisType.Explicit)[: len(shape)]
    rng = np.random.default_rng(0)
    w, h = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8, 16, 8)))
    with jax.set_mesh(mesh := jax.make_mesh(shape, ("d", "m")[: len(shape)], axis_types=kinds)):
        args = jax.device_put(w, NamedSharding(mesh, P())), put(mesh, h)
        cuts = (lambda fn: tile(fn, axis, 4, lowmem=lowmem)), (lambda fn: fn)
        found, wanted = (jax.jit(lambda *args, cut=cut: whole(of(cut)(*args)))(*args) for cut in cuts)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def both_spread(w, h):
    """A product whose operands are spread differently where it contracts."""
    spec = None if layout.named(jax.typeof(h)) is None else P(None, None, None)
    return jnp.tanh(jnp.einsum("bsd,dv->bsv", h, w, out_sharding=spec)).sum((0, 1))


def normed(w, h):
    x = h - h.mean((0, 1))
    return jnp.tanh((x / jnp.sqrt((x**2).mean((0, 1)) + 1e-3)) @ whole(w)).sum()


def chosen(w, h):
    logits = h @ w
    return jnp.where(logits == logits.max(-1, keepdims=True), logits, 0.1 * logits).sum() + jnp.argmax(logits, -1)


CUT_AGAIN = {  # what is differentiated, how its arguments are spread, and how it is cut
    "contracted over two axes": (both_spread, (P("d", None), P(None, None, "m")), (0, 2)),
    "a sum that is handed on": (normed, (P("m", None), P("m", "d")), (1, None)),
    "an argmax of what is spread": (chosen, (P(None, "d"), P("m")), (None, 1)),
}


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("name", CUT_AGAIN)
def test_a_second_cut_runs_where_the_first_does(name, pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr("transforms.tiling.autodiff.program.SMALLEST", 2)
        monkeypatch.setattr("transforms.tiling.autodiff.program.PIECE", 1)
    fn, specs, axis = CUT_AGAIN[name]
    rng = np.random.default_rng(0)
    args = [rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8, 16, 8))]
    with jax.set_mesh(mesh := jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        found, wanted = (
            jax.jit(jax.grad(lambda w, h, one=one: one(w, h).sum(), (0, 1)))(*args)
            for one in (tile(fn, axis, 3, lowmem=True, gather="any"), fn)
        )
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_an_argmax_goes_from_tile_to_tile_on_one_device_of_an_axis():
    """By its type what it runs along is spread, over one device."""
    rng = np.random.default_rng(0)
    w, h = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8, 16, 8)))
    with jax.set_mesh(mesh := jax.make_mesh((8, 1), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)):
        args = jax.device_put(w, NamedSharding(mesh, P(None, "m"))), put(mesh, h)
        found, wanted = (jax.jit(fn)(*args) for fn in (tile(chosen, (1, None), 4, gather="any"), chosen))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_parts_of_a_sum_may_be_closed_over(mesh, compiled):
    rng = np.random.default_rng(0)
    w, h = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32), put(mesh, rng.normal(size=(8, 16, 8)).astype("float32"))

    def gradients(w, h, cut):
        parts = products(w, h)
        return jax.grad(cut(lambda w, h: (whole(parts) * w).sum() + jnp.tanh(h @ w).mean()), (0, 1))(w, h)

    run = jax.jit(gradients, static_argnums=2) if compiled else gradients
    found, wanted = (run(w, h, cut) for cut in (lambda fn: tile(fn, (None, 1), 4), lambda fn: fn))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_as_long_as_the_axis_and_spread_is_not_the_axis(mesh):
    """Here by chance: what the function closes over is spread, and what is cut is not."""
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8,)))
    h = put(mesh, rng.normal(size=(8, 16, 8)).astype(np.float32))
    loss = lambda w, x: ((h @ w) ** 2).mean() + x.sum()
    args = [jax.device_put(one, NamedSharding(mesh, P())) for one in (w, x)]
    found, wanted = (jax.jit(fn)(*args) for fn in (tile(loss, (None, 0), 4), loss))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_what_is_as_long_as_the_axis_and_was_spread_is_made_whole(mesh):
    """Labels are as many as features: no tile of them is a part of each device's share."""

    def counted(w, h, labels):
        sums = jnp.zeros((16, 16)).at[whole(labels).reshape(-1)].add(whole(jnp.tanh(h @ w)).reshape(-1, 16))
        return jnp.sin(sums).sum()

    rng = np.random.default_rng(0)
    w, h = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8, 16, 8)))
    labels = rng.integers(16, size=(8, 16)).astype(np.int32)
    args = jax.device_put(w, NamedSharding(mesh, P())), put(mesh, h), put(mesh, labels)
    cut = tile(counted, (0, 2, None), 8)
    found, wanted = (jax.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (cut, counted))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5), found, wanted)
