"""`tile` on meshes with Explicit axes: every layout, its values, and what devices send each other."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from experiments.planning.hlo import collectives, dot_flops
from tests import quick
from tests.helpers import FLOAT32, assert_same
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic

# The mesh, and how hidden states [B, S, D] and weights [D, V] lie on it.
LAYOUTS = {
    "dp": ({"d": 8}, P("d", None, None), P(None, None)),
    "fsdp_d": ({"d": 8}, P("d", None, None), P("d", None)),
    "fsdp_v": ({"d": 8}, P("d", None, None), P(None, "d")),
    "tp": ({"m": 8}, P(None, None, None), P(None, "m")),
    "cp": ({"c": 8}, P(None, "c", None), P(None, None)),
    "fsdp_tp": ({"d": 4, "m": 2}, P("d", None, None), P("d", "m")),
    "fsdp_cp": ({"d": 4, "c": 2}, P("d", "c", None), P("d", None)),
}
B, S, D, V = 16, 24, 32, 64


def mesh_of(name, kind=AxisType.Explicit):
    sizes = LAYOUTS[name][0]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def arguments(dtype=np.float32):
    """Of NumPy, which draws and spreads them without a program."""
    rng = np.random.default_rng(0)
    weights = (0.3 * rng.normal(size=(D, V))).astype(dtype)
    hidden = rng.normal(size=(B, S, D)).astype(dtype)
    labels = rng.integers(V, size=(B, S), dtype=np.int32)
    mask = (rng.random((B, S)) > 0.3).astype(np.float32)
    return weights, hidden, labels, mask


def specs_of(name):
    _, hidden, weights = LAYOUTS[name]
    return weights, hidden, P(*hidden[:2]), P(*hidden[:2])


def spread(mesh, name, args):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs_of(name), strict=True)]


def picked(logits, labels):
    return jnp.where(jnp.arange(V) == labels[..., None], logits, 0).sum(-1)


def cross_entropy(weights, hidden, labels, mask):
    logits = 30 * jnp.tanh(hidden @ weights / 30)
    return ((jax.nn.logsumexp(logits, -1) - picked(logits, labels)) * mask).sum() / mask.sum()


def preference(weights, hidden, labels, mask):
    logits = hidden @ weights
    scores = ((picked(logits, labels) - jax.nn.logsumexp(logits, -1)) * mask).sum(-1)
    return -jax.nn.log_sigmoid(scores[: B // 2] - scores[B // 2 :]).mean()


def perplexity(weights, hidden, labels, mask):
    return jnp.exp(cross_entropy(weights, hidden, labels, mask) / 8)


def per_token(weights, hidden, labels, mask):
    return jax.nn.logsumexp(hidden @ weights, -1) * mask


def worst(weights, hidden, labels, mask):
    return jax.nn.logsumexp(jnp.max(hidden @ weights, -1) * mask)


def gathering(name, fn):
    """The one line that a vocabulary spread over the tokens' axis needs, tiled or not."""
    if name != "fsdp_v":
        return fn
    return lambda weights, *rest: fn(reshard(weights, P(None, None)), *rest)


def with_gradients(fn):
    def total(weights, hidden, labels, mask):
        return jnp.sum(fn(weights, hidden, labels, mask) ** 2)

    return jax.value_and_grad(total, argnums=(0, 1))


def looped(text):
    """The bytes that each device sends with each collective in a loop, every time."""
    return [c.bytes for c in collectives(text, 8) if c.looped]


FUNCTIONS = [cross_entropy, preference, perplexity, per_token, worst]


@pytest.mark.crossed("name", "number")
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_value_and_gradients_of_one_device(name, number):
    fn, args = FUNCTIONS[number], arguments()
    axis, n = (number + len(name)) % 2, 3 + number
    expected = quick.jit(with_gradients(fn))(*args)
    mesh = mesh_of(name)
    with jax.set_mesh(mesh):
        tiled = tile(gathering(name, fn), axis=(None, axis, axis, axis), n=n)
        step = quick.jit(with_gradients(tiled)).lower(*spread(mesh, name, args)).compile()
        found = step(*spread(mesh, name, args))
        types = jax.tree.map(jax.typeof, found[1])
        weights, hidden = (jax.typeof(x) for x in spread(mesh, name, args)[:2])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    assert types == (weights, hidden)
    tokens = -(-(B, S)[axis] // n) * (S, B)[axis]
    assert max(looped(step.as_text()), default=0) <= 16 * tokens


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_mesh_sends_what_the_untiled_program_sends_and_computes_no_more(name):
    mesh, args = mesh_of(name), arguments()
    with jax.set_mesh(mesh):
        plain = gathering(name, cross_entropy)
        tiled = tile(plain, axis=(None, 1, 1, 1), n=3)
        before, after = (
            quick.jit(with_gradients(fn)).lower(*spread(mesh, name, args)).compile().as_text() for fn in (plain, tiled)
        )
    assert dot_flops(after) == dot_flops(before)
    sent = [sum(c.bytes * c.times for c in collectives(text, 8)) for text in (before, after)]
    assert sent[1] <= 1.01 * sent[0]


@pytest.mark.parametrize("pieces", [False, True])
def test_a_second_cut_sends_no_more_sums_than_untiled(pieces, monkeypatch):
    """Of words that are spread over the devices, each walks its own."""
    if pieces:
        monkeypatch.setattr("transforms.tiling.autodiff.program.SMALLEST", 4)
        monkeypatch.setattr("transforms.tiling.autodiff.program.PIECE", 1)

    def fn(weights, hidden, labels, mask):
        logits = jnp.einsum("bsd,dv->bsv", hidden, weights, out_sharding=P("d", None, None))
        return ((jax.nn.logsumexp(logits, -1) - picked(logits, labels)) * mask).sum() / mask.sum()

    args, mesh = arguments(), mesh_of("fsdp_v")
    with jax.set_mesh(mesh):
        args = spread(mesh, "fsdp_v", args)
        before, after = (
            quick.jit(with_gradients(one)).lower(*args).compile()
            for one in (fn, tile(fn, axis=(None, 1, 1, 1), n=3, lowmem=True))
        )
    for a, b in zip(jax.tree.leaves(after(*args)), jax.tree.leaves(before(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    sums = ("all-reduce", "reduce-scatter", "all-to-all")
    sent = [
        sum(c.bytes * c.times for c in collectives(program.as_text(), 8) if c.op in sums) for program in (before, after)
    ]
    assert sent[1] <= 1.01 * sent[0] + 64


def head(x, w):
    logits = x @ w
    return (jax.nn.logsumexp(logits, -1) - (logits * (jnp.arange(64) == 0)).sum(-1)).sum()


def mlp(x, up, down):
    return ((jax.nn.gelu(x @ up) @ down) ** 2).sum()


@pytest.mark.parametrize(
    ("fn", "specs"),
    [
        (head, (P("d", "m"), P(None, None))),
        (head, (P(None, "d"), P(None, None))),
        (head, (P(None, "m"), P(None, "m"))),
        (head, (P(None, ("d", "m")), P(None, "d"))),
        (mlp, (P(None, "d"), P(None, None), P(None, None))),
        (mlp, (P(None, "m"), P(None, "m"), P(None, None))),
        (mlp, (P(None, None), P("d", "m"), P(None, None))),
    ],
)
def test_features_that_are_spread_where_weights_are_not_are_gathered_once(fn, specs):
    """Products of them, and their gradients, read what was gathered: the compiler would sum logits of every tile."""
    shapes, random = ((64, 32), (32, 64), (64, 32)), np.random.default_rng(0)
    args = [random.standard_normal(shape, dtype=np.float32) / 8 for shape, _ in zip(shapes, specs, strict=False)]
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    own = tuple(range(len(specs)))
    with jax.set_mesh(mesh):
        there = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        tiled = tile(fn, (0, *(None for _ in own[1:])), 4)
        before, after = (quick.jit(jax.value_and_grad(f, own)).lower(*there).compile() for f in (fn, tiled))
        found = after(*there)
    for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves(quick.jit(jax.value_and_grad(fn, own))(*args)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    sent = [sum(c.bytes * c.times for c in collectives(program.as_text(), 8)) for program in (before, after)]
    assert sent[1] <= 1.01 * sent[0] + 64


@pytest.mark.parametrize(
    ("name", "axis", "options"),
    [
        ("fsdp_d", (1, None, None, None), {}),
        ("tp", (1, None, None, None), {}),
        ("fsdp_tp", (None, 1, 1, 1), {"lowmem": True}),
        ("fsdp_cp", (None, 0, 0, 0), {"policy": jax.checkpoint_policies.dots_saveable}),
    ],
)
def test_every_cut_runs_on_a_mesh(name, axis, options):
    def loss(weights, hidden, labels, mask):
        logits = hidden @ weights
        return ((jax.nn.logsumexp(logits, -1) - picked(logits, labels)) * mask).sum() / mask.sum()

    args, mesh = arguments(), mesh_of(name)
    expected = quick.jit(with_gradients(loss))(*args)
    with jax.set_mesh(mesh):
        found = quick.jit(with_gradients(tile(loss, axis=axis, n=4, **options)))(*spread(mesh, name, args))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("name", "lowmem"), [("fsdp_cp", False), ("fsdp_d", True), ("dp", True)])
def test_labels_may_be_gathered_where_the_vocabulary_is_whole(name, lowmem):
    def loss(weights, hidden, labels, mask):
        logits = hidden @ weights
        return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * mask).sum() / mask.sum()

    args, mesh = arguments(), mesh_of(name)
    expected = quick.jit(with_gradients(loss))(*args)
    with jax.set_mesh(mesh):
        tiled = quick.jit(with_gradients(tile(loss, axis=(None, 1, 1, 1), n=4, lowmem=lowmem)))
        found = tiled(*spread(mesh, name, args))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.crossed("table", "tied")
@pytest.mark.parametrize("table", [P("d"), P(None, "d"), P("c"), P("d", "c"), P(("d", "c")), P()])
@pytest.mark.parametrize("tied", [False, True])
def test_a_table_gains_from_tokens_that_several_axes_spread(table, tied):
    mesh = jax.make_mesh((4, 2), ("d", "c"), axis_types=(AxisType.Explicit,) * 2)
    rows, _, labels, mask = arguments()
    rows = 3 * rows.T

    def loss(rows, labels, mask):
        hidden = rows.at[labels].get(out_sharding=P("d", "c"))
        logits = hidden @ reshard(rows, P()).T if tied else hidden
        return (jax.nn.logsumexp(logits, -1) * mask).sum()

    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((rows, table), (labels, P("d", "c")))]
        args.append(jax.device_put(mask, NamedSharding(mesh, P("d", "c"))))
        expected, found = (quick.jit(jax.grad(fn))(*args) for fn in (loss, tile(loss, axis=(None, 0, 0), n=2)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_sync_tile_exchanges_with_every_tile():
    args, mesh = arguments(), mesh_of("fsdp_d")
    expected = quick.jit(with_gradients(cross_entropy))(*args)
    with jax.set_mesh(mesh):
        tiled = tile(cross_entropy, axis=(None, 1, 1, 1), n=4, sync="tile")
        step = quick.jit(with_gradients(tiled)).lower(*spread(mesh, "fsdp_d", args)).compile()
        found = step(*spread(mesh, "fsdp_d", args))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    assert max(looped(step.as_text())) >= 4 * D * V // 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("axis", "how"), [(1, {"size": 7}), (1, {"n": 2}), (0, {"n": 2})])
def test_sums_that_a_tile_within_leaves_to_its_end_are_made_before_parts_are_read(axis, how, dtype):
    """An MLP that is cut within cut layers, its width spread."""

    def mlp(up, down, x):
        return jnp.einsum("bsf,fd->bsd", jnp.tanh(x @ up), down, out_sharding=P("d"))

    rng, mesh = np.random.default_rng(0), mesh_of("fsdp_tp")
    shapes, specs = ((D, V), (V, D), (B, S, D)), (P(None, "m"), P("m"), P("d"))
    within = tile(mlp, axis=(None, None, 1), n=2)
    layers = tile(lambda up, down, x: x + within(up, down, x), axis=(None, None, axis), **how)
    with jax.set_mesh(mesh):
        both = zip(shapes, specs, strict=True)
        args = [
            jax.device_put((rng.normal(size=one) / 4).astype(dtype), NamedSharding(mesh, spec)) for one, spec in both
        ]
        found, expected = (
            quick.jit(jax.value_and_grad(lambda *args, fn=fn: jnp.sum(fn(*args).astype("float32") ** 2), (0, 1, 2)))(
                *args
            )
            for fn in (layers, lambda up, down, x: x + mlp(up, down, x))
        )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=(1e-5 if dtype == "float32" else 0.03) * np.abs(b).max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_gradients_of_one_device_in_bfloat16(name):
    fn, args, mesh = per_token, arguments(ml_dtypes.bfloat16), mesh_of(name)
    expected = jax.jit(with_gradients(fn))(*(x.astype(np.float32) for x in args[:2]), *args[2:])
    with jax.set_mesh(mesh):
        tiled = tile(gathering(name, fn), axis=(None, 1, 1, 1), n=3)
        found = jax.jit(with_gradients(tiled))(*spread(mesh, name, args))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b, atol=0.03 * np.abs(b).max())


@pytest.mark.parametrize(("dtype", "sums"), [(None, "bf16"), (jnp.float32, "f32")])
def test_the_sum_over_devices_is_made_in_the_dtype_asked_for(dtype, sums):
    args, mesh = arguments(ml_dtypes.bfloat16), mesh_of("dp")
    with jax.set_mesh(mesh):
        tiled = tile(cross_entropy, axis=(None, 1, 1, 1), n=3, reduce_dtype=dtype)
        text = quick.jit(jax.grad(tiled)).lower(*spread(mesh, "dp", args)).as_text()
    constraints = re.findall(r"(%\d+) = sdy.sharding_constraint (%\d+) (.*)> : tensor<(\S+)>", text)
    parts = {name for name, _, how, _ in constraints if "unreduced" in how}
    made = [kind for _, source, how, kind in constraints if source in parts and "unreduced" not in how]
    assert f"{D}x{V}x{sums}" in made


@pytest.mark.parametrize("name", ["fsdp_d", "fsdp_cp", "cp"])
def test_an_auto_mesh_is_told_how_arguments_are_spread(name):
    args, mesh = arguments(), mesh_of(name, AxisType.Auto)
    expected = quick.jit(with_gradients(cross_entropy))(*args)
    with jax.set_mesh(mesh):
        tiled = tile(cross_entropy, axis=(None, 1, 1, 1), n=3, in_sharding=specs_of(name))
        found = quick.jit(with_gradients(tiled))(*spread(mesh, name, args))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_an_auto_mesh_without_a_word_is_refused():
    args, mesh = arguments(), mesh_of("dp", AxisType.Auto)
    with jax.set_mesh(mesh), pytest.raises(TileError, match=r"d: Auto.*\n.*Explicit.*\n.*in_sharding=.*\n.*shard_map"):
        tile(cross_entropy, axis=(None, 1, 1, 1), n=3)(*spread(mesh, "dp", args))


def test_parts_that_come_to_a_mesh_made_auto_are_summed_there_and_not_again():
    """As the gradient of `jnp.repeat` does, of keys that several query heads share: its sum was as often too large."""
    mesh = jax.make_mesh((4, 2), ("c", "m"), axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    queries, keys = (rng.normal(size=size).astype(np.float32) for size in ((32, 8, 3), (16, 1, 3)))

    def loss(move, queries, keys):
        heads = move(jnp.repeat(keys, 8, axis=1), P(None, "m", None))
        return jnp.sin(jnp.einsum("snh,tnh->nst", queries, heads)).sum()

    expected = jax.grad(lambda *args: loss(lambda x, spec: x, *args), argnums=(0, 1))(queries, keys)
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((queries, P("c", "m")), (keys, P()))]
        tiled = tile(lambda *args: loss(reshard, *args), axis=(0, None), n=4)
        found = quick.jit(jax.grad(tiled, argnums=(0, 1)))(*args)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_a_mixed_mesh_is_refused():
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh), pytest.raises(TileError, match="d: Explicit, m: Auto"):
        tile(cross_entropy, axis=(None, 1, 1, 1), n=3)(*arguments())


def test_in_sharding_is_refused_where_it_does_not_belong():
    args = arguments()
    tiled = tile(cross_entropy, axis=(None, 1, 1, 1), n=3, in_sharding=(None, P("d"), P("d"), P("d")))
    with pytest.raises(ValueError, match="needs a mesh"):
        tiled(*args)
    with jax.set_mesh(mesh_of("dp")), pytest.raises(ValueError, match=r"d: Explicit.*Leave in_sharding out"):
        tiled(*args)
    few = tile(cross_entropy, axis=(None, 1, 1, 1), n=3, in_sharding=(None, P("d")))
    with (
        jax.set_mesh(mesh_of("dp", AxisType.Auto)),
        pytest.raises(ValueError, match=r"has 2 entries.* has 4 positional"),
    ):
        few(*args)


def test_what_jax_refuses_to_type_is_told_with_the_line_to_write():
    mesh, args = mesh_of("fsdp_v"), arguments()
    with jax.set_mesh(mesh), pytest.raises(TileError, match=r"test_spread.py:\d+ \(cross_entropy\)(.|\n)*reshard\(w"):
        tile(cross_entropy, axis=(None, 1, 1, 1), n=3)(*spread(mesh, "fsdp_v", args))

    def gathered(weights, hidden, labels, mask):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ weights, labels).mean()

    mesh = mesh_of("tp")
    with jax.set_mesh(mesh), pytest.raises(TileError, match=r"labels\[\.\.\., None\]"):
        tile(gathered, axis=(None, 1, 1, 1), n=3)(*spread(mesh, "tp", args))


def test_what_auto_axes_allow_and_types_do_not_is_told_with_the_line_to_write():
    mesh, h, g = mesh_of("dp", AxisType.Auto), jnp.ones((B, S, D)), jnp.ones(D)

    def constrained(h):
        return jnp.sin(jax.lax.with_sharding_constraint(h, jax.NamedSharding(mesh, P("d")))).sum()

    def recurrent(h, g):
        step = lambda c, row: (c := jnp.tanh(c + row * g), c)
        return jax.lax.scan(step, jnp.zeros((B, D)), h.swapaxes(0, 1))[1].sum()

    with jax.set_mesh(mesh):
        with pytest.raises(TileError, match=r"test_spread.py:\d+ \(constrained\)(.|\n)*leave the constraint out"):
            tile(constrained, 1, 3, in_sharding=P())(h)
        with pytest.raises(TileError, match=r"test_spread.py:\d+ \(recurrent\)(.|\n)*reshard\(init"):
            tile(recurrent, (1, None), 3, in_sharding=(P("d"), P()))(h, g)


@pytest.mark.parametrize("sync", ["once", "tile"])
@pytest.mark.parametrize("number", [0, 1, (0, 1)])
def test_arrays_made_before_the_mesh_are_whole_on_every_device(sync, number):
    """Their types name no mesh, and what the function spreads is spread from there."""
    w, h = jnp.cos(jnp.arange(1.0 * D * V)).reshape(D, V), jnp.sin(jnp.arange(1.0 * B * S * D)).reshape(B, S, D)
    spread = lambda w, h: jnp.tanh(reshard(h, P("d")) @ w).sum()
    product = lambda w, h: jnp.tanh(jnp.einsum("bsd,dv->bsv", h, w, out_sharding=P("d"))).sum()
    wanted = jax.grad(lambda w, h: jnp.tanh(h @ w).sum(), number)(w, h)
    with jax.set_mesh(mesh_of("dp")):
        for fn in (spread, product):
            found = quick.jit(jax.grad(tile(fn, (None, 1), 3, sync=sync), number))(w, h)
            for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_arguments_may_bring_their_mesh():
    mesh, args = mesh_of("fsdp_d"), arguments()
    step = quick.jit(jax.value_and_grad(tile(cross_entropy, axis=(None, 1, 1, 1), n=3)))
    value, gradient = step(*spread(mesh, "fsdp_d", args))
    np.testing.assert_allclose(value, cross_entropy(*args), rtol=1e-5)
    assert jax.typeof(gradient).sharding.spec == P("d", None)


def test_sync_is_checked():
    with pytest.raises(ValueError, match="sync='never' is none of 'once', 'tile'"):
        tile(cross_entropy, axis=0, n=2, sync="never")


def test_cotangents_need_not_know_the_mesh():
    """JAX takes one that was made of NumPy's numbers; tiles of it are spread as the result is."""
    mesh, (weights, hidden, _, _) = mesh_of("dp"), arguments()
    scaled = lambda w, h: ((s := h @ w) - s.min(0)) / (s.max(0) - s.min(0))
    rows, cotangent = hidden[:, 0], np.random.default_rng(0).normal(size=(B, V)).astype(np.float16)
    pull = lambda fn: lambda *args: jax.vjp(fn, *args)[1](jnp.asarray(cotangent).astype(jnp.float32))
    expected = pull(scaled)(weights, rows)
    with jax.set_mesh(mesh):
        args = [reshard(weights, P()), reshard(rows, P("d", None))]
        for got, want in zip(quick.jit(pull(tile(scaled, (None, 0), 2)))(*args), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_gradients_of_a_weight_that_devices_share_may_be_as_large_as_all_of_it():
    """Until they are exchanged, once: an embedding cut over its features, of which a device has an eighth."""
    words, features = 4000, 32
    draw = np.random.default_rng(0)
    table = draw.normal(size=(words, features)).astype(np.float32)
    ids = draw.integers(0, words, (16, 8), dtype=np.int32)

    def loss(table, ids):
        return jnp.sin(reshard(table, P()).at[ids].get(out_sharding=P("d"))).sum()

    mesh = mesh_of("dp")
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((table, P(None, "d")), (ids, P("d")))]
        found, expected = (quick.jit(jax.grad(fn))(*args) for fn in (tile(loss, (None, 0), 2), loss))
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert jax.typeof(found).sharding.spec == P(None, "d")


def mixture(x, routes, experts):
    return jnp.einsum("te,tef->tf", jax.nn.softmax(x @ routes), jnp.einsum("td,edf->tef", x, experts))


# A function, cut over the rows of its first argument, the shapes of the others, and how all are spread.
ROWS = {
    "features": (lambda x, w: jnp.sin(x @ w), [(8, 24)], [P("d", "m"), P()]),
    "features alone": (lambda x, w: jnp.sin(x @ w), [(8, 24)], [P(None, "d"), P()]),
    "features, some of whose axes the result takes": (
        lambda x, w: jnp.sin(x @ w),
        [(8, 24)],
        [P(None, ("d", "m")), P(None, "d")],
    ),
    "weights read twice": (lambda x, w: jax.nn.softmax((x @ w) @ w.T) @ w, [(8, 8)], [P(None, "d"), P()]),
    "experts": (mixture, [(8, 4), (4, 8, 24)], [P("d", "m"), P(), P("m")]),
    "a cumulative sum": (lambda x, w: jnp.cumsum(jnp.sin(x @ w), 0), [(8, 24)], [P(), P(None, ("d", "m"))]),
    "maxima": (lambda x, w: jnp.sin(x @ w).max(0), [(8, 24)], [P(), P("d", "m")]),
    "places": (lambda x, w: (jnp.argmax(h := x @ w, 0), h.max(0)), [(8, 24)], [P(), P(None, "d")]),
}


@pytest.mark.parametrize("n", [3, 16])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_computed_is_spread_as_in_the_untiled_program(name, n):
    fn, shapes, specs = ROWS[name]
    draw = np.random.default_rng(0)
    args = [draw.normal(size=shape).astype(np.float32) for shape in ((16, 8), *shapes)]
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)

    def run(fn, *args):
        outs = fn(*args)
        size = lambda *args: sum(jnp.sin(x).sum() for x in jax.tree.leaves(fn(*args)) if x.dtype == np.float32)
        return outs, jax.grad(size, argnums=tuple(range(len(args))))(*args)

    tiled = tile(fn, (0, *(None,) * len(shapes)), n)
    expected = quick.jit(run, static_argnums=0)(fn, *args)
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        untiled, found = (quick.jit(run, static_argnums=0)(one, *args) for one in (fn, tiled))
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, untiled)
    assert_same(found, expected, FLOAT32)
