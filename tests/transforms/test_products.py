"""Products of bfloat16 as bfloat16: the same numbers, without float32 copies of operands."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from transforms import products, tile
from transforms.step import compile_step, make_eval_step

pytestmark = pytest.mark.optimised
HALF, WIDE = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
B = ((), ())
FORMS = {  # shapes, dimension numbers, and whether there is a kernel
    "x @ w": ((64, 128), (128, 96), (((1,), (0,)), B), True),
    "x @ w.T": ((64, 128), (96, 128), (((1,), (1,)), B), True),
    "x.T @ y": ((128, 64), (128, 96), (((0,), (0,)), B), True),
    "x.T @ y.T": ((128, 64), (96, 128), (((0,), (1,)), B), True),
    "of an odd length": ((129, 64), (129, 96), (((0,), (0,)), B), False),
    "of one row": ((1, 128), (128, 96), (((1,), (0,)), B), False),
    "with a vector": ((64, 128), (128,), (((1,), (0,)), B), False),
    "heads": ((4, 16, 64), (64, 8, 12), (((2,), (0,)), B), True),
    "of heads": ((4, 16, 8, 12), (8, 12, 64), (((2, 3), (0, 1)), B), True),
    "gradient of heads": ((4, 16, 64), (4, 16, 8, 12), (((0, 1), (0, 1)), B), True),
    "first dimension": ((128, 4, 16), (128, 96), (((0,), (0,)), B), True),
    "scores": ((2, 16, 8, 64), (2, 24, 8, 64), (((3,), (3,)), ((0, 2), (0, 2))), True),
    "values": ((2, 8, 16, 24), (2, 24, 8, 64), (((3,), (1,)), ((0, 1), (0, 2))), True),
    "of grouped queries": ((2, 4, 2, 16, 24), (2, 16, 4, 2, 64), (((2, 3), (3, 1)), ((0, 1), (0, 2))), True),
    "batch of x.T @ y": ((4, 128, 16), (4, 128, 24), (((1,), (1,)), ((0,), (0,))), True),
    "batch behind": ((128, 16, 4), (128, 24, 4), (((0,), (0,)), ((2,), (2,))), True),
    "odd batch": ((4, 127, 16), (4, 127, 24), (((1,), (1,)), ((0,), (0,))), False),
}


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), HALF) for shape in shapes]


def copies(compiled) -> list[str]:
    """Float32 arrays that a program makes of its parameters."""
    return re.findall(r"convert\S* = (f32\S+) fusion\([^)]*%[xy]\.?\d*\)", compiled.as_text())


@pytest.mark.crossed("name", "dtype")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [HALF, WIDE])
def test_same_numbers_without_copies(name, dtype):
    left, right, dims, expected = FORMS[name]
    x, y = draw(left, right)
    fn = lambda x, y: lax.dot_general(x, y, dims, preferred_element_type=dtype)
    assert products.has_kernel(x, y, dims, dtype) is expected
    compiled = jax.jit(products.narrowed(fn, kernels=True)).lower(x, y).compile()
    wide = lax.dot_general(x.astype(WIDE), y.astype(WIDE), dims, precision="highest")
    found = compiled(x, y)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), wide, rtol=1e-2 if dtype == HALF else 1e-5, atol=1e-4)
    if expected:
        assert not copies(compiled), "made float32 copies of operands"


def test_copies_are_seen():
    """The pattern above finds what XLA makes of a product that has no kernel."""
    x, y = draw((128, 64), (128, 96))
    assert copies(jax.jit(lambda x, y: lax.dot_general(x, y, (((0,), (0,)), B))).lower(x, y).compile())


def test_other_dtypes_and_named_algorithms_are_left_alone():
    for dtype in (jnp.float16, jnp.float32, jnp.int8):
        x, y = jnp.ones((4, 8), dtype), jnp.ones((8, 4), dtype)
        assert not products.has_kernel(x, y, (((1,), (0,)), B), dtype)
    fn = lambda x, y: lax.dot(x.astype(WIDE), y.astype(WIDE), precision=lax.DotAlgorithmPreset.F32_F32_F32)
    text = str(jax.make_jaxpr(products.narrowed(fn))(*draw((4, 8), (8, 4))))
    assert re.search(r"f32\[4,4\] = dot_general", text)
    assert not re.search(r"dot_general\[.*\] a b\b", text)


def dots(fn, *args) -> list[tuple[str, ...]]:
    """The dtypes of operands and result of every product of a program."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append(tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)))
            for param in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(param, "eqns") or hasattr(param, "jaxpr"):
                    walk(getattr(param, "jaxpr", param))

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def test_what_was_made_wide_is_multiplied_as_it_was():
    """Within loops, conditionals and checkpoints too."""
    x, w = draw((6, 8), (8, 8))

    @jax.checkpoint
    def layer(x, _):
        wide = lambda x: x.astype(WIDE) @ w.astype(WIDE)
        return jnp.tanh(jax.lax.cond(x.sum() > 0, wide, lambda x: wide(-x), x)).astype(HALF), None

    fn = lambda x: jax.lax.scan(layer, x, length=3)[0].astype(WIDE).sum()
    before, after = dots(jax.grad(fn), x), dots(products.narrowed(jax.grad(fn)), x)
    assert set(before) == {("float32",) * 3}
    assert len(before) == len(after)
    assert after.count(("bfloat16", "bfloat16", "float32")) >= 4, "both branches, in the forward and the backward pass"
    np.testing.assert_allclose(jax.grad(fn)(x).astype(WIDE), products.narrowed(jax.grad(fn))(x).astype(WIDE), rtol=2e-2)


def test_steps_multiply_bfloat16():
    """`compile_step` of a program on one CPU: no float32 copy of the weights."""
    x, w = draw((128, 64), (128, 4096))
    fn = lambda w, x: (jnp.tanh(jnp.einsum("kn,kv->nv", x, w)).astype(WIDE).sum(), {})
    compiled = compile_step(make_eval_step(fn), x, w).compiled
    assert not re.search(r"f32\[128,4096\]", compiled.as_text())
    assert re.search(r"f32\[128,4096\]", jax.jit(fn).lower(w, x).compile().as_text())


def test_tiles_multiply_bfloat16():
    """A head in bfloat16, the gradients of which are summed in float32: no float32 copy of hidden states or weights."""
    h, w = draw((512, 64), (64, 2048))
    labels = jnp.arange(512)

    def loss(h, w):
        logits = (h @ w).astype(WIDE)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).mean()

    gradient = jax.grad(tile(loss, (0, None), 8), (0, 1))
    compiled = jax.jit(gradient).lower(h, w).compile()
    assert not re.search(r"= f32\[64,2048\]\S* fusion\(%w[.]", compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 1.9e6  # it was 2.2e6 with the copies
    for found, wanted in zip(compiled(h, w), jax.grad(loss, (0, 1))(h, w), strict=True):
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < 5e-3


def test_wide_sums_of_the_zoo_have_gradients_of_bfloat16():
    from zoo.models.layers import linear

    x, w = draw((6, 8), (8, 10))
    fn = lambda x, w: jnp.sin(linear("nd,dv->nv", x, w, wide=True)).sum()
    assert dots(products.narrowed(jax.grad(fn, (0, 1))), x, w) == [("bfloat16", "bfloat16", "float32")] * 3
    wide = lambda x, w: jnp.sin(x.astype(WIDE) @ w.astype(WIDE)).sum()
    for found, wanted in zip(jax.grad(fn, (0, 1))(x, w), jax.grad(wide, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(found.astype(WIDE), wanted.astype(WIDE), rtol=3e-2, atol=3e-2)
    along = jax.jvp(jax.grad(lambda x: fn(x, w)), (x,), (jnp.ones_like(x),))[1]
    assert np.isfinite(along.astype(WIDE)).all(), "differentiable once more, forwards"


def test_bodies_that_are_shared_stay_so():
    x, w = draw((6, 8), (8, 8))
    inner = jax.jit(lambda x: jnp.tanh(x @ w))
    fn = lambda x: inner(inner(inner(x)))
    functions = lambda fn: jax.jit(fn).lower(x).as_text().count("func.func")
    assert functions(products.narrowed(fn, kernels=True)) == functions(fn)
    plain = jax.make_jaxpr(lambda x: inner(x.astype(WIDE)))(x)
    assert products._Narrowing(kernels=False).within(plain) is plain, "nothing is to be narrowed"


def test_nothing_and_open_dimensions():
    x, y = draw((0, 4, 3), (0, 4, 5))
    fn = lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,))))
    assert products.narrowed(fn, kernels=True)(x, y).shape == (0, 3, 5)
    (b,) = export.symbolic_shape("b")
    typed = lambda *shape: jax.ShapeDtypeStruct(shape, HALF)
    tiled = tile(lambda h, w: jnp.sin((h @ w).astype(WIDE)).sum(), (None, 1), 4)
    h, w = draw((5, 8), (8, 16))
    exported = export.export(jax.jit(tiled))(typed(b, 8), typed(8, 16))
    np.testing.assert_allclose(exported.call(h, w), tiled(h, w), rtol=1e-2)
