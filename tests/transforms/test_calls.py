"""Calls of tiled functions: what is traced and planned again, and what a call gives beside arrays."""

import copy
import io
import math
import operator
import pickle

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from tests.helpers import FLOAT64, assert_same
from transforms import TileError, tile
from transforms.tiling import schedule
from transforms.tiling.analysis import propagate
from transforms.tiling.autodiff import program

pytestmark = pytest.mark.symbolic
X = jnp.asarray(np.random.default_rng(0).normal(size=(21, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)


@pytest.fixture
def plans(monkeypatch):
    """How many programs were planned, as a list that grows."""
    made, planned = [], program.planned
    monkeypatch.setattr(program, "planned", lambda *args: made.append(1) or planned(*args))
    return made


def head(x, w):
    return jnp.sum(jax.nn.logsumexp(x @ w, -1))


# --------------------------------------------------------------------------------------------- what JAX's cache knows


def test_calls_alike_are_planned_once(plans):
    tiled = tile(head, (0, None), 4)
    gradient = jax.grad(tiled)
    for _ in range(3):
        tiled(X, W)
        gradient(X, W)
    assert len(plans) == 2
    tiled(X[:20], W)
    assert len(plans) == 3


def test_surroundings_of_a_trace_are_part_of_it():
    centred = lambda x: x - lax.pmean(x, "i")
    tiled, over = tile(centred, 0, 2), lambda fn: jax.vmap(fn, axis_name="i")
    for size in (2, 4):
        x = jnp.arange(4.0 * size).reshape(size, 4)
        np.testing.assert_array_equal(over(tiled)(x), over(centred)(x))
    tiled = tile(lambda x, w: x @ w, (0, None), 4)
    tiled(X, W)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(jax.make_jaxpr(tiled)(X, W))
    noise = lambda key, x: x + jax.random.normal(key, x.shape)
    tiled, key = tile(noise, (None, 0), 4), jax.random.key(0)
    tiled(key, X)
    with jax.threefry_partitionable(False):
        np.testing.assert_allclose(tiled(key, X), noise(key, X), rtol=1e-5, atol=1e-6)


def test_python_numbers_are_traced(plans):
    tiled = tile(lambda x, s: jnp.sum(x * s), (0, None), 4)
    for s in (0.5, 0.25, float("nan"), float("nan"), -0.5):
        np.testing.assert_allclose(tiled(X, s), jnp.sum(X * s), rtol=1e-5)
    assert len(plans) == 1
    assert tile(lambda x, s: (x * s)[:1], (0, None), 3)(X.astype(jnp.bfloat16), 0.5).dtype == jnp.bfloat16
    sign = tile(lambda x, s: jnp.sum(x * 0 + jnp.copysign(1.0, s)), (0, None), 4)
    assert (sign(X, 0.0), sign(X, -0.0)) == (84, -84)
    tiny = tile(lambda x, s: jnp.sum(x * (s * 1e300)), (0, None), 4)  # no float32 holds the number
    np.testing.assert_allclose(tiny(X, 1e-300), jnp.sum(X), rtol=1e-5)
    assert tile(lambda x, z: jnp.sum(x) * z, (0, None), 4)(X, 1j).dtype == jnp.complex64


NEEDED = {
    "if": lambda x, s, u: jnp.sum(x * u) * (s if s > 0 else 1.0),
    "float": lambda x, s, u: jnp.sum(x) * u ** float(s),
    "shape": lambda x, s, u: jnp.sum(x * u) + jnp.ones(int(2 * s)).sum(),
    "numpy": lambda x, s, u: jnp.sum(x * np.sqrt(s) * u),
    "dictionary": lambda x, s, u: jnp.sum(x * {0.5: 2.0, 1.5: 3.0}[s] * u),
    "text": lambda x, s, u: (jnp.sum(x * u), f"{s}"),
    "result": lambda x, s, u: (jnp.sum(x * u), s * 2),
    "given back": lambda x, s, u: (jnp.sum(x * u * s), s, {"u": u}),
}


@pytest.mark.parametrize("name", NEEDED)
def test_python_numbers_are_static_where_their_value_is_needed(name):
    fn = NEEDED[name]
    tiled = tile(fn, (0, None, None), 3)
    for s, u in ((0.5, 2.0), (1.5, 2.0), (0.5, 3.0)):
        found, expected = tiled(X, s, u), fn(X, s, u)
        assert list(map(type, jax.tree.leaves(found))) == [type(y) for y in jax.tree.leaves(expected)]
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a == b if isinstance(b, str) else np.allclose(a, b, rtol=1e-5)


def test_only_the_number_that_is_needed_is_static(plans):
    tiled = tile(lambda x, s, u: jnp.sum(x * u) if s > 0 else jnp.sum(x), (0, None, None), 3)
    for u in (1.0, 2.0, 3.0):
        tiled(X, 0.5, u)
    assert len(plans) == 1
    tiled(X, 1.5, 1.0)
    assert len(plans) == 2


def test_an_error_of_the_function_is_its_own():
    def fn(x, s):
        raise KeyError(f"no {s}")

    with pytest.raises(KeyError, match=r"no 0\.5"):
        tile(fn, (0, None), 3)(X, 0.5)


def test_what_is_closed_over_stays_differentiable(plans):
    held = {}

    def fn(x):
        return jnp.sum(jnp.tanh(x @ held["w"]))

    tiled = tile(fn, 0, 4)

    def outer(fn, w):
        held["w"] = w
        return fn(X)

    for w in (W, 2 * W):
        expected = jax.grad(lambda w: outer(fn, w))(w)
        np.testing.assert_allclose(jax.grad(lambda w: outer(tiled, w))(w), expected, rtol=1e-5, atol=1e-6)
    twice = lambda fn: jax.grad(lambda w: jnp.sum(jax.grad(lambda w: fn(w))(w) ** 2))(W)
    made = lambda w: tile(lambda x: jnp.sum(jnp.tanh(x @ w)), 0, 4)(X)
    np.testing.assert_allclose(twice(made), twice(lambda w: jnp.sum(jnp.tanh(X @ w))), rtol=1e-4, atol=1e-5)


def test_calls_inside_other_contexts():
    with jax.disable_jit():
        np.testing.assert_allclose(tile(head, (0, None), 3)(X, W), head(X, W), rtol=1e-5)
    with jax.ensure_compile_time_eval():
        assert not isinstance(tile(head, (0, None), 3)(X, W), jax.core.Tracer)

    class Unhashable:
        __hash__ = None

    assert tile(lambda x, s: jnp.sum(x), (0, None), 3)(X, Unhashable()) == pytest.approx(float(jnp.sum(X)), rel=1e-5)


# ----------------------------------------------------------------------------------------------------- types of results


def test_weak_types_are_those_of_the_function():
    for fn in (lambda x: jnp.where(x > 0, 1.0, 0.0), lambda x: jnp.asarray(2.0), lambda x: x.sum()):
        found, expected = tile(fn, 0, 4)(X), fn(X)
        assert found.weak_type == expected.weak_type
        assert (found * jnp.ones((), jnp.bfloat16)).dtype == (expected * jnp.ones((), jnp.bfloat16)).dtype
    fn, s = lambda x, s: jnp.sum(jnp.sin(x) * s), jnp.asarray(2.0)
    assert s.weak_type
    assert jax.grad(tile(fn, (0, None), 4), 1)(X, s).weak_type == jax.grad(fn, 1)(X, s).weak_type


@pytest.mark.optimised
def test_a_reduction_begins_with_a_number_among_the_arguments():
    """A pooling layer's is a field of it, and JAX has derivatives where it knows that number."""

    def pooled(x, start):
        return (lax.reduce_window(jnp.tanh(x), start, lax.max, (1, 2), (1, 2), "VALID") ** 2).mean()

    found = jax.grad(tile(pooled, (0, None), 4))(X, -math.inf)
    np.testing.assert_allclose(found, jax.grad(pooled)(X, -math.inf), rtol=1e-6)


def test_strict_promotion_of_bfloat16_gradients():
    fn = lambda x, w: jax.nn.logsumexp(x @ w, -1).mean() + (x**2).mean()
    args = (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    with jax.numpy_dtype_promotion("strict"):
        found = jax.grad(tile(fn, (0, None), 4), (0, 1))(*args)
    for a, b in zip(found, jax.grad(fn, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=1e-2)


# ------------------------------------------------------------------------------------------------------- copies, export


class Layer(eqx.Module):
    w: jax.Array
    activation: object

    @tile(axis=0, n=4)
    def __call__(self, x):
        return self.activation(x @ self.w)


def test_what_holds_a_called_function_is_copied_pickled_and_saved():
    layer = Layer(W, tile(operator.neg, 0, 3))
    expected = layer(X)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(other(X), expected)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    np.testing.assert_array_equal(eqx.tree_deserialise_leaves(file, layer)(X), expected)


def test_other_dimensions_may_be_symbolic():
    b, c = export.symbolic_shape("b,c")
    typed = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    fn = jax.value_and_grad(tile(head, (0, None), 4), (0, 1))
    exported = export.export(jax.jit(fn))(typed(21, b), typed(b, c))
    found, expected = exported.call(X, W), jax.value_and_grad(head, (0, 1))(X, W)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"whose length is left open \(b\), .* Export one function for each length"):
        export.export(jax.jit(tile(head, (0, None), 4)))(typed(b, 4), typed(4, 3))


def test_a_weight_of_any_width_has_a_gradient():
    (v,) = export.symbolic_shape("v")
    typed = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    loss = lambda x, w: jax.nn.logsumexp(x @ w, -1).sum()
    fn = jax.value_and_grad(tile(loss, (0, None), 4), (0, 1))
    exported = export.export(jax.jit(fn))(typed(*X.shape), typed(len(W), v))
    found, expected = exported.call(X, W), jax.value_and_grad(loss, (0, 1))(X, W)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- how many tiles


def test_one_tile_is_the_function_itself():
    def fn(x, w):
        out = head(x, w)
        return out, {"out": out * 2, "name": "x"}

    for options in ({"n": 1}, {"size": 21}, {"size": 50}):
        tiled = tile(fn, (0, None), has_aux=True, **options)
        assert tiled(X, W)[1]["name"] == "x"
        assert not jax.grad(lambda x, fn=tiled: fn(x, W)[1]["out"])(X).any()
        assert "one tile: the function as it is" in str(tiled.plan(X, W))
    plain = lambda x, w: head(x, w)
    assert str(jax.make_jaxpr(tile(plain, (0, None), 1))(X, W)) == str(jax.make_jaxpr(plain)(X, W))
    assert "loop 1" in str(tile(plain, (0, None), 1, lowmem=True).plan(X, W))
    with pytest.raises(ValueError, match="out of range"):
        tile(plain, (2, None), 1)(X, W)


def test_more_tiles_than_steps_are_one_for_each():
    for n in (21, 22, 100):
        tiled = tile(head, (0, None), n)
        np.testing.assert_allclose(tiled(X, W), head(X, W), rtol=1e-5)
        assert str(tiled.plan(X, W)).startswith("21 steps in 21 tiles of 1")


def test_an_empty_axis_is_as_untiled():
    for fn in (lambda x: x.sum(), lambda x: x.mean(), lambda x: jnp.sin(x), lambda x: x.sum(0)):
        empty = jnp.zeros((0, 4))
        np.testing.assert_array_equal(tile(fn, 0, 3)(empty), fn(empty))
    with pytest.raises(ValueError, match="zero-size array"):
        tile(lambda x: x.max(), 0, 3)(jnp.zeros((0, 4)))
    assert jax.grad(tile(lambda x: x.sum(), 0, 2))(jnp.zeros((0, 4))).shape == (0, 4)


def test_pieces_of_nothing():
    padded = lambda x: jnp.pad(x, ((1, 1), (0, 0)), mode="edge")
    for fn in (lambda x: padded(x)[2:], lambda x: padded(x)[:-2], lambda x: jnp.concatenate([x[:0], x * 2, x[21:]])):
        np.testing.assert_array_equal(tile(fn, 0, 3)(X), fn(X))


def test_method_on_an_auto_mesh():
    class Head(eqx.Module):
        w: jax.Array

        @tile(axis=0, n=2, in_sharding=jax.P("d"))
        def __call__(self, x):
            return jnp.tanh(x @ self.w)

    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(
            jax.jit(lambda head, x: head(x))(Head(W), X[:8]), jnp.tanh(X[:8] @ W), rtol=1e-5, atol=1e-6
        )


# ------------------------------------------------------------------------------------------------- planning is linear


def layers(count):
    def fn(weights, h, x):
        for q, k, v, up, down in weights:
            h = h + jax.nn.softmax((h @ q) @ (x @ k).T) @ (x @ v)
            h = h + jnp.tanh(h @ up) @ down
        return (h**2).mean()

    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return fn, ([(square,) * 5] * count, square, jax.ShapeDtypeStruct((24, 4), jnp.float32))


@pytest.mark.parametrize("axis", [(None, None, 0), (None, 0, None)])
def test_analyses_and_steps_grow_with_the_program_alone(axis, monkeypatch):
    counts = {"analyses": 0, "operands": 0}

    def counted(module, name, key):
        inner = getattr(module, name)

        def run(*args, **kwargs):
            counts[key] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(module, name, run)

    counted(propagate, "_walk", "analyses")
    counted(schedule.Planner, "expand", "operands")
    found = []
    for count in (2, 4, 8):
        fn, args = layers(count)
        counts.update(analyses=0, operands=0)
        jax.make_jaxpr(jax.value_and_grad(tile(fn, axis, 3)))(*args)
        found.append(dict(counts))
    assert found[2]["analyses"] == found[1]["analyses"]
    if axis[1] == 0:  # one loop; with the keys cut, the first guess at a schedule computes much again
        assert found[2]["operands"] <= 2.2 * found[1]["operands"]


def test_a_schedule_that_goes_on_changing_settles(monkeypatch):
    def fn(x, w):
        h = x @ w
        h = (h - h.mean(0)) / h.std(0)
        return jnp.sum(jax.nn.softmax(h, 0) * jnp.tanh(h)) + h.max()

    expected = jax.value_and_grad(fn, (0, 1))(X, W)
    monkeypatch.setattr(schedule, "ROUNDS", 0)
    found = jax.value_and_grad(tile(fn, (0, None), 3, gather="any"), (0, 1))(X, W)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_refusals_name_the_user_s_line():
    with pytest.raises(TileError, match=r"cannot tile `sort` at .*test_calls.py"):
        tile(lambda x: jnp.sort(jnp.sin(x @ W), 0), 0, 3, gather="none")(X)


def buffered(x, w, kind):
    """States of a loop that Equinox differentiates, written where it lets no copies be made."""
    step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w), c[2].at[c[0]].set(c[1]))
    begin = (0, x, jnp.zeros((4, *x.shape)))
    return eqxi.while_loop(lambda c: c[0] < 4, step, begin, max_steps=4, kind=kind, buffers=lambda c: c[2])[2]


@pytest.mark.parametrize("kind", ["bounded", "checkpointed"])
@pytest.mark.parametrize("mapped", [False, True])
def test_loops_of_equinox_are_opened(kind, mapped, float64):
    """As diffrax and lineax have them: primitives of their own, of which JAX's rules know what they compute."""
    every = jax.vmap(buffered, (0, None, None), 1) if mapped else buffered
    loss = lambda x, w: jnp.sin(every(x, w, kind)).sum()
    args = jnp.sin(jnp.arange(72.0)).reshape(12, 6), jnp.cos(jnp.arange(36.0)).reshape(6, 6)
    found, expected = (jax.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (tile(loss, (0, None), 4), loss))
    assert_same(found, expected, FLOAT64)


def test_a_jaxpr_is_printed_without_the_programs_that_it_knows():
    for fn in (tile(head, (0, None), 3), jax.grad(tile(head, (0, None), 3))):
        text = str(jax.make_jaxpr(lambda x, w, fn=fn: jax.jvp(fn, (x, w), (x, w)))(X, W))
        assert "Program(" not in text and "placements" not in text
