"""What the forward loops end in is handed to the backward pass, and sums are read off products that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import quick
from tests.transforms.test_online import draw, exact, loops
from transforms import tile
from transforms.tiling.analysis.rounding import decides
from transforms.tiling.autodiff.program import Options, Program
from transforms.tiling.frontend.flatten import evaluate, flatten
from transforms.tiling.ir.numbering import Numbering
from transforms.tiling.ir.placement import WHOLE, Tiled
from transforms.tiling.passes.reassociate import Product, reassociate

pytestmark = pytest.mark.symbolic

KEYS = (None, 0, 0)
Q, K, D, E = 6, 11, 4, 3


def graph(fn, *args):
    return flatten(jax.make_jaxpr(fn)(*args))


def operands():
    return draw(Q, D), draw(K, D), draw(K, E)


# -------------------------------------------------------------------------------------------------- equal computations


def test_equal_computations_have_equal_numbers_across_programs():
    x, y = jnp.ones((3, 4)), jnp.ones((4,))
    one = graph(lambda x, y: jnp.exp(x - y).sum(0), x, y)
    other = graph(lambda x, y, z: (z * 2, jnp.exp(x - y).sum(0) * 3), x, y, x)
    numbering = Numbering()
    first, second = numbering(one), numbering(other)
    assert first[one.outputs[0]] in set(second.values())
    assert second[other.outputs[0]] not in set(first.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: jnp.exp(x - y).sum(1),  # another parameter
        lambda x, y: jnp.exp(y - x).sum(0),  # another order of operands
        lambda x, y: jnp.exp(x - 2 * y).sum(0),
        lambda x, y: jnp.exp(x - x).sum(0),
    ],
)
def test_other_computations_have_other_numbers(change):
    x, y = jnp.ones((4, 4)), jnp.ones((4,))
    one, other = graph(lambda x, y: jnp.exp(x - y).sum(0), x, y), graph(change, x, y)
    numbering = Numbering()
    assert numbering(one)[one.outputs[0]] != numbering(other)[other.outputs[0]]


def test_constants_are_told_apart_by_what_they_hold():
    x, large = jnp.ones(40), np.arange(40.0, dtype=np.float32)
    make = lambda c: graph(lambda x: x * c, x)
    numbering = Numbering()
    last = lambda g: numbering(g)[g.outputs[0]]
    assert last(make(2.0)) == last(make(2.0)) != last(make(3.0))
    assert last(make(jnp.asarray(large))) != last(make(jnp.asarray(large + 1)))


# -------------------------------------------------------------------------------------- sums read off known products


def run(graph, *args):
    return evaluate(dict(zip(graph.inputs, args, strict=True)), graph.outputs)


MASK = np.random.default_rng(0).random((Q, K))
SUMS = {  # of `p * (g @ v.T)` over the keys, beside `p @ v`
    "plain": (lambda p, v, g, s: ((p * (g @ v.T)).sum(1), p @ v), True),
    "scaled along the queries": (lambda p, v, g, s: ((p / s**2 * (g @ v.T)).sum(1), (p / s) @ v), True),
    "negative": (lambda p, v, g, s: ((-p * (g @ v.T)).sum(1), p @ v), True),
    "turned": (lambda p, v, g, s: ((p * (v @ g.T).T).sum(1), (v.T @ p.T).T), True),
    "over the queries too": (lambda p, v, g, s: ((p * (g @ v.T)).sum(), p @ v), True),
    "dropped": (lambda p, v, g, s: ((p * (m := jnp.sign(p)) * (g @ v.T)).sum(1), (p * m) @ v), True),
    "other constants": (lambda p, v, g, s: ((p * MASK * (g @ v.T)).sum(1), (p * (1 - MASK)) @ v), False),
    "other values": (lambda p, v, g, s: ((p * (g @ v.T)).sum(1), p @ (v + 1)), False),
    "other weights": (lambda p, v, g, s: ((p * (g @ v.T)).sum(1), (p + 1) @ v), False),
    "squared weights": (lambda p, v, g, s: ((p**-1 * (g @ v.T)).sum(1), p @ v), False),
    "a factor that varies along the keys": (lambda p, v, g, s: ((p * v[:, 0] * (g @ v.T)).sum(1), p @ v), False),
    "a sum over the queries": (lambda p, v, g, s: ((p * (g @ v.T)).sum(0), p @ v), False),
}


@pytest.mark.parametrize(("fn", "known"), SUMS.values(), ids=SUMS)
def test_sums_are_read_off_products_that_are_known(fn, known):
    with jax.enable_x64():
        args = draw(Q, K), draw(K, E), draw(Q, E), np.linspace(1, 2, Q)[:, None]
        args = [jnp.asarray(a, jnp.float64) for a in args]
        made = graph(fn, *args)
        node = next(n for n in reversed(made.nodes) if n.name == "dot_general")
        wanted = run(made, *args)
        assert reassociate(made, Product(node, node.outputs[0]), Numbering()(made)) == known
        assert any(K in n.outputs[0].shape for n in made.nodes if n.name == "dot_general") != known
        for a, b in zip(run(made, *args), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_heads_that_share_keys_are_read_off_too():
    with jax.enable_x64():
        B, H, G = 2, 3, 2
        p, v, g = (jnp.asarray(a, jnp.float64) for a in (draw(B, H, G, Q, K), draw(B, K, H, E), draw(B, Q, H, G, E)))

        def fn(p, v, g):
            grown = jnp.einsum("bqhge,bkhe->bhgqk", g, v)
            return (p * grown).sum(-1), jnp.einsum("bhgqk,bkhe->bqhge", p, v)

        made = graph(fn, p, v, g)
        node = next(n for n in reversed(made.nodes) if n.name == "dot_general")
        assert reassociate(made, Product(node, node.outputs[0]), Numbering()(made))
        for a, b in zip(run(made, p, v, g), fn(p, v, g), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ the backward pass


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 2) @ v


def dropped(q, k, v):
    scores = q @ k.T
    return (jax.nn.softmax(scores) * jax.random.bernoulli(jax.random.key(0), 0.7, scores.shape)) @ v


def denominator(q, k, v):
    return jax.nn.logsumexp(q @ k.T, -1)[:, None] * v[0]


def projected(q, k, v):
    return jnp.tanh(attention(q, k, v)) @ v[:E]


def moments(q, k, v):
    p = jax.nn.softmax(q @ k.T)
    return p @ v, p @ v**2


def stopped(q, k, v):
    scores = q @ k.T
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return weights @ v / weights.sum(-1, keepdims=True)


ONE_LOOP_BACK = [attention, dropped, projected, stopped]


@pytest.mark.parametrize("fn", ONE_LOOP_BACK)
def test_the_backward_pass_of_attention_over_keys_is_one_loop(fn):
    assert loops(fn, KEYS, operands()) == (1, 2)


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 4, 7])
@pytest.mark.parametrize("fn", [*ONE_LOOP_BACK, moments])
def test_derivatives_are_exact(fn, n):
    exact(fn, KEYS, operands(), n)


@pytest.mark.parametrize("fn", [attention, stopped])
def test_second_derivatives_do_not_take_what_was_handed_on_for_constant(fn):
    with jax.enable_x64():
        args = tuple(jnp.asarray(a, jnp.float64) for a in operands())
        tangents = tuple(jnp.cos(3 * a) for a in args)

        def twice(fn):
            slope = jax.grad(lambda *a: jnp.sin(fn(*a)).sum(), (0, 1, 2))
            return quick.jit(lambda *args: jax.jvp(slope, args, tangents))(*args)

        found, wanted = twice(tile(fn, KEYS, 4)), twice(fn)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        sums = lambda fn, q: (jax.vjp(fn, q, *args[1:])[1](jnp.ones((Q, E)))[1] ** 2).sum()
        through = lambda fn: quick.jit(jax.grad(lambda q: sums(fn, q)))(args[0])
        np.testing.assert_allclose(through(tile(fn, KEYS, 4)), through(fn), rtol=1e-9, atol=1e-12)


def test_a_maximum_that_something_is_compared_with_is_found_by_the_program_that_compares():
    made = graph(lambda x: ((top := x.max(0)), (x == top[None]).sum(0))[1], jnp.ones((4, 3)))
    (top,) = (n.outputs[0] for n in made.nodes if n.name == "reduce_max")
    assert decides(made, top) and not decides(made, made.outputs[0])


def test_what_is_larger_than_inputs_and_outputs_is_not_handed_on():
    args = operands()
    closed = jax.make_jaxpr(attention)(*args)
    program = Program(closed, (WHOLE, Tiled(0), Tiled(0)), Options(K, 4, "small", jnp.float32))
    assert program.residuals.values and all(v.nbytes <= program.limits.largest for v in program.residuals.values)
    assert program.count == 1 and program.forward((0,)).count == 1 + len(program.residuals.values)
