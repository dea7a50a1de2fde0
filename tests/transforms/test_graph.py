"""A jaxpr as a flat graph: what is inlined, dropped, turned around and remembered."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from transforms.tiling.frontend.flatten import evaluate, flatten
from transforms.tiling.ir.graph import nbytes
from transforms.tiling.ir.walks import constant, depends, flops

X = jnp.arange(12.0).reshape(4, 3)


def graph_of(fn, *args, **options):
    return flatten(jax.make_jaxpr(fn)(*args), **options)


def names(graph):
    return [node.name for node in graph.nodes]


def run(graph, *args):
    return evaluate(dict(zip(graph.inputs, args, strict=True)), graph.outputs)


def line_of(text):
    """The number of the line of this file that ends with a comment."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return number


# ------------------------------------------------------------------------------------------------------------- flatten


def test_nested_jits_are_inlined():
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    graph = graph_of(jax.jit(lambda x: inner(inner(x)) + 1), X)
    assert names(graph) == ["sin", "mul", "sin", "mul", "add"]
    np.testing.assert_allclose(run(graph, X)[0], 2 * np.sin(2 * np.sin(X)) + 1, rtol=1e-6)


def test_custom_derivatives_are_inlined_or_kept():
    @jax.custom_jvp
    def own(x):
        return jnp.sin(x)

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))
    assert names(graph_of(own, X)) == ["sin"]
    assert names(graph_of(own, X, custom=False)) == ["custom_jvp_call"]


def test_checkpoints_are_kept_unless_asked():
    closed = jax.make_jaxpr(jax.checkpoint(lambda x: jnp.sin(x) * x))(X)
    (node,) = flatten(closed).nodes
    assert node.name == "remat2" or "checkpoint" in node.name
    assert names(flatten(closed, remat=True)) == ["sin", "mul"]


def test_dead_code_is_dropped_and_effects_are_kept():
    def fn(x):
        jnp.cos(x) @ x.T
        jax.debug.callback(lambda v: None, x * 2)
        return jnp.sin(x)

    graph = graph_of(fn, X)
    assert sorted(names(graph)) == ["debug_callback", "mul", "sin"]


def test_dead_results_of_a_node_do_not_keep_others():
    assert names(graph_of(lambda x: lax.top_k(jnp.sin(x), 2)[0] + jnp.cos(x)[:, :2] * 0 + 1, X)).count("top_k") == 1
    assert "sort" not in names(graph_of(lambda x: (jnp.sort(x), jnp.sin(x))[1], X))


def test_inputs_and_constants_may_be_outputs():
    table = np.arange(3)
    graph = graph_of(lambda x: (x, table, 7.0 * jnp.ones(())), X)
    assert graph.outputs[0] is graph.inputs[0]
    x, got, _ = run(graph, X)
    assert x is X
    np.testing.assert_array_equal(got, table)


# ---------------------------------------------------------------------------------------------------------------- dots


@pytest.mark.parametrize("spec", ["ab,bc->ca", "zab,zbc->zca", "ab,cb->ca", "abc,cd->dab"])
def test_transposed_product_is_one_product(spec):
    ranks = {letter: size for size, letter in enumerate("abcdz", 2)}
    left, right = spec.split("->")[0].split(",")
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=[ranks[x] for x in side]).astype(np.float32) for side in (left, right))
    plain = {"ab,bc->ca": (1, 0), "zab,zbc->zca": (0, 2, 1), "ab,cb->ca": (1, 0), "abc,cd->dab": (2, 0, 1)}[spec]
    product = spec.split("->")[0] + "->" + "".join(np.array(list(spec.split("->")[1]))[np.argsort(plain)])
    graph = graph_of(lambda a, b: jnp.einsum(product, a, b, precision=("high", "highest")).transpose(plain), a, b)
    assert names(graph) == ["dot_general"]
    np.testing.assert_allclose(run(graph, a, b)[0], np.einsum(spec, a, b), rtol=1e-5)


def test_product_is_not_turned_where_it_is_read_as_it_is():
    def both(x):
        product = x @ x.T
        return product, product.T

    assert names(graph_of(both, X)) == ["dot_general", "transpose"]
    assert names(graph_of(lambda x: (lambda p, q: jnp.sin(p) + q)(*both(x)), X)).count("transpose") == 1
    np.testing.assert_allclose(run(graph_of(both, X), X)[1], X @ X.T)


@pytest.mark.parametrize("spec", ["ij,kj->ik", "bij,bkj->bik", "ijk,lmk->ijlm", "bji,bjk->bik"])
def test_product_reads_operands_as_they_lie(spec):
    """A transpose of what a product reads becomes part of it, unless it turns what is not contracted around."""
    rng = np.random.default_rng(0)
    left, right = (rng.normal(size=[{"b": 2}.get(c, 3) for c in part]) for part in spec.split("->")[0].split(","))
    turned = lambda a, b: jnp.einsum(spec, jnp.swapaxes(jnp.swapaxes(a, -1, -2), -1, -2), b)
    graph = graph_of(turned, left, right)
    assert names(graph).count("dot_general") == 1
    np.testing.assert_allclose(run(graph, left, right)[0], np.einsum(spec, left, right), rtol=1e-5)


def test_gradient_of_a_matrix_is_one_product():
    graph = graph_of(jax.grad(lambda w, h: jnp.sin(h @ w).sum()), jnp.ones((3, 5)), X)
    assert "transpose" not in names(graph)


# -------------------------------------------------------------------------------------------------------- source lines


@jax.jit
def cached(x):
    return jnp.exp(x)


def test_node_knows_its_line():
    graph = graph_of(lambda x: jnp.sin(x), X)  # the line
    assert f"test_graph.py:{line_of('the line')}" in graph.nodes[0].where


def test_equation_of_a_cached_library_jit_reports_the_callers_line():
    def once(x):
        return jnp.where(x > 1, x, 0.0)

    def again(x):
        return jnp.where(x > 1, x, 0.0)  # the second call

    graph_of(once, X)
    (node,) = [n for n in graph_of(again, X).nodes if n.name == "select_n"]
    assert "test_graph.py" in node.where
    assert f":{line_of('the second call')}" in node.where


# ----------------------------------------------------------------------------------------------- constants, dependence


def test_constant_is_followed_through_copies():
    def fn(x):
        return x + jnp.zeros((4, 3)), x * jnp.full((4, 3), 2, jnp.int32).astype(x.dtype), x + jnp.arange(3.0)

    graph = graph_of(fn, X)
    zero, two, none = (constant(v.producer.inputs[1]) for v in graph.outputs)
    assert (zero, two, none) == (0, 2, None)
    assert constant(graph.inputs[0]) is None


def test_literals_have_the_dtype_of_their_place():
    graph = graph_of(lambda x: x * 2, jnp.ones(3, jnp.bfloat16))
    (literal,) = [v for v in graph.nodes[0].inputs if v.const is not None]
    assert (literal.const.dtype, literal.dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_evaluate_runs_nothing_but_what_is_wanted():
    seen = []

    def fn(x):
        y = jnp.sin(x)
        z = jax.pure_callback(lambda v: seen.append(1) or v, jax.ShapeDtypeStruct(x.shape, x.dtype), y)
        return y * 2, z

    graph = graph_of(fn, X)
    env = dict(zip(graph.inputs, [X], strict=True))
    np.testing.assert_allclose(evaluate(env, graph.outputs[:1])[0], 2 * np.sin(X), rtol=1e-6)
    assert not seen
    known = graph.outputs[0].producer.inputs[0]
    np.testing.assert_allclose(evaluate({known: X}, graph.outputs[:1])[0], 2 * X)
    with pytest.raises(AssertionError, match="neither known nor computed"):
        evaluate({}, graph.outputs[:1])


def test_depends_may_leave_out_what_is_not_differentiable():
    def fn(x):
        return jnp.sin(x), lax.stop_gradient(x) * 2, (x > 1).astype(x.dtype), jnp.ones(3)

    graph = graph_of(fn, X)
    everything, differentiable = (
        depends(graph, set(graph.inputs)),
        depends(graph, set(graph.inputs), differentiably=True),
    )
    assert [v in everything for v in graph.outputs] == [True, True, True, False]
    assert [v in differentiable for v in graph.outputs] == [True, False, False, False]


def test_sizes_are_in_bytes_and_products_in_flops():
    graph = graph_of(lambda a, b: jnp.einsum("zab,zbc->zac", a, b), jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5)))
    assert (graph.outputs[0].nbytes, str(graph.outputs[0])) == (4 * 2 * 3 * 5, "float32[2,3,5]")
    assert nbytes(jax.typeof(jnp.ones(3, jnp.bfloat16))) == 6
    assert [flops(n) for n in graph.nodes if n.name == "dot_general"] == [2 * 2 * 3 * 4 * 5]
