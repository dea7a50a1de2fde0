"""Mixtures of experts: routing against an oracle, the balance loss against transformers, layers without experts."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.planning.hlo import collectives
from tests.helpers import equations
from tests.zoo import hf_tiny
from tests.zoo.hf_tiny import evaluate, evaluated, jit, loaded
from transforms import tile
from transforms.sharding import make_mesh
from zoo import ForwardPass, Mixture
from zoo.models.mixtures.experts import expert_mlp, route
from zoo.models.mixtures.experts import experts as every_expert

TOKENS = jnp.asarray(hf_tiny.tokens(), jnp.int32)
T, D, F, E = 13, 8, 12, 5


def normal(seed: int, *shape: int):
    return jax.random.normal(jax.random.key(seed), shape)


def _experts():
    return normal(0, E, D, F), normal(1, E, D, F), normal(2, E, F, D)


def _oracle(x, weights, experts, gate, up, down):
    """Every token through its experts, one at a time."""
    out = np.zeros(x.shape)
    for token, (row, chosen) in enumerate(zip(np.asarray(weights), np.asarray(experts), strict=True)):
        for weight, e in zip(row, chosen, strict=True):
            g = np.asarray(x, np.float64)[token] @ np.asarray(gate, np.float64)[e]
            hidden = g / (1 + np.exp(-g)) * (np.asarray(x, np.float64)[token] @ np.asarray(up, np.float64)[e])
            out[token] += weight * (hidden @ np.asarray(down, np.float64)[e])
    return out


@pytest.mark.parametrize("experts", ["spread", "all to one", "one never"])
def test_no_token_is_dropped_however_they_are_routed(experts):
    x, weights = normal(3, T, D), jax.nn.softmax(normal(4, T, 2))
    chosen = {
        "spread": jax.lax.top_k(normal(5, T, E), 2)[1],
        "all to one": jnp.tile(jnp.asarray([3, 0]), (T, 1)),
        "one never": jax.lax.top_k(normal(5, T, E - 1), 2)[1],
    }[experts]
    out = jax.jit(expert_mlp)(x, weights, chosen, *_experts())
    np.testing.assert_allclose(out, _oracle(x, weights, chosen, *_experts()), atol=1e-4)


def test_no_rows_are_added_where_they_meet():
    """Devices that do so in no fixed order make other bits of three terms each time, in gradients too."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(normal(4, T, E)), 3)

    def plain(x, weights, gate, up, down):
        hidden = jax.nn.silu(jnp.einsum("td,tcdf->tcf", x, gate[chosen])) * jnp.einsum("td,tcdf->tcf", x, up[chosen])
        return jnp.einsum("tc,tcf,tcfd->td", weights, hidden, down[chosen])

    sorted_by_expert = lambda x, weights, *matrices: expert_mlp(x, weights, chosen, *matrices)
    gradients = lambda run: jax.jit(jax.grad(lambda *args: jnp.sin(run(*args)).sum(), argnums=range(5)))
    args = normal(3, T, D), weights, *_experts()
    found = gradients(sorted_by_expert)
    scatters = [e for e in equations(found.trace(*args).jaxpr) if e.primitive.name.startswith("scatter")]
    assert {e.outvars[0].aval.ndim for e in scatters} == {1}  # of counts, and of weights, each of which is read once
    for one, other in zip(found(*args), gradients(plain)(*args), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize("normalise", [True, False])
def test_a_token_goes_to_its_most_probable_experts(normalise):
    x, router = normal(0, T, D), normal(1, D, E)
    weights, experts, probs = route(x, router, 2, normalise=normalise)
    logits = np.asarray(x, np.float64) @ np.asarray(router, np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(probs, expected, atol=1e-6)
    best = np.argsort(-expected)[:, :2]
    np.testing.assert_array_equal(experts, best)
    top = np.take_along_axis(expected, best, 1)
    np.testing.assert_allclose(weights, top / top.sum(-1, keepdims=True) if normalise else top, atol=1e-6)


def test_routing_is_in_float32_whatever_the_tokens():
    weights, _, probs = route(
        normal(0, T, D).astype(jnp.bfloat16), normal(1, D, E).astype(jnp.bfloat16), 2, normalise=True
    )
    assert weights.dtype == probs.dtype == jnp.float32


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe_mixed", "qwen3_next", "qwen3_5_moe", "ernie4_5_moe"])
def test_the_balance_loss_is_that_of_transformers(case):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs = hf_tiny.reference(case)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(hf_tiny.tokens()), output_router_logits=True).aux_loss
    balance = jit(lambda model: model.forward(TOKENS, ForwardPass()).balance)(loaded(case))
    assert float(balance) == pytest.approx(float(expected), abs=1e-5)


def with_routers(model, make):
    """The same model with other routers, whichever stacks of layers have any."""
    stacks = [name for name in model.blocks if getattr(getattr(model, name), "router", None) is not None]
    where = lambda model: [getattr(model, name).router for name in stacks]
    return eqx.tree_at(where, model, [make(router) for router in where(model)])


@pytest.mark.parametrize("case", ["mixtral", "qwen3_next", "deepseek_v3", "glm4_moe", "minimax_m2", "llama4", "dots1"])
def test_the_balance_loss_of_even_routing_is_the_number_of_experts_per_token(case):
    """Whether routers make probabilities of a softmax or of sigmoids, and whatever is added to all scores."""
    even = with_routers(loaded(case), jnp.zeros_like)
    balance = jit(lambda model: model.forward(TOKENS, ForwardPass()).balance)(even)
    assert float(balance) == pytest.approx(even.config.experts_per_token, abs=1e-5)


def test_the_balance_loss_reaches_the_router_only_through_probabilities():
    grads = jit(eqx.filter_grad(lambda model: model.forward(TOKENS, ForwardPass()).balance))(loaded("mixtral"))
    assert bool((grads.layers.router != 0).any())
    assert not bool(grads.layers.down[-1].any())  # what the last layer's experts put out routes nothing


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe_mixed"])
def test_every_parameter_of_every_layer_gets_a_gradient(case):
    for path, grad in jax.tree_util.tree_leaves_with_path(evaluated(case)[2]):
        stacked = "layers" in str(path) or "dense" in str(path)
        assert bool((grad.reshape(len(grad) if stacked else 1, -1) != 0).any(1).all()), path


def test_remat_changes_neither_loss_nor_gradients():
    remat = functools.partial(jax.checkpoint, prevent_cse=False)
    loss, _, grads = evaluated("qwen3_moe_mixed")
    again, _, again_grads = evaluate(loaded("qwen3_moe_mixed"), remat=remat)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(again_grads), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_model_of_sparse_layers_is_one_scan_over_its_own_stack():
    model = loaded("mixtral")
    assert model.dense is None
    jaxpr = jax.make_jaxpr(lambda model: model.hidden(TOKENS))(model).jaxpr
    assert sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns) == 1
    slices = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("slice", "dynamic_slice")]
    assert not any(eqn.outvars[0].aval.shape[1:] == model.layers.gate.shape[1:] for eqn in slices)


def test_norms_start_at_one_and_experts_differ():
    model = Mixture.init(loaded("mixtral").config, key=jax.random.key(0))
    assert bool((model.layers.mlp_norm == 1).all())
    one, other = model.layers.gate[0, 0], model.layers.gate[0, 1]
    assert abs(float(jnp.corrcoef(one.ravel(), other.ravel())[0, 1])) < 0.1


def test_gradients_of_experts_by_tokens_are_summed_over_devices_once():
    """Not for every part of the tokens; and weights are gathered once."""
    mesh, parts = make_mesh(1, context=8), []
    with jax.set_mesh(mesh):
        shape = lambda *size, spec: jax.ShapeDtypeStruct(size, jnp.float32, sharding=jax.NamedSharding(mesh, P(*spec)))
        x, router = shape(1, 256, 48, spec=(None, "context")), shape(48, 8, spec=("context",))
        up, down = shape(8, 48, 24, spec=(None, "context")), shape(8, 24, 48, spec=(None, None, "context"))
        for at_once in (None, 8):
            loss = lambda *args, at_once=at_once: every_expert(*args, 2, normalise=True, at_once=at_once)[0].sum()
            program = jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4))).lower(x, router, up, up, down).compile()
            parts.append(sorted((one.op, one.bytes, one.times) for one in collectives(program.as_text(), 8)))
    assert parts[0] == parts[1] and {times for *_, times in parts[0]} == {1}


def test_tiled_experts_are_the_experts():
    model = loaded("mixtral")
    layer = jax.tree.map(lambda leaf: leaf[0], model.layers)
    chosen = model.config.experts_per_token

    def experts(layer, x):
        return every_expert(x, layer.router, layer.gate, layer.up, layer.down, chosen, normalise=True)[0]

    x = normal(0, 10, 1, 48)
    run = lambda experts: jit(jax.value_and_grad(lambda parts: (experts(*parts) ** 2).sum()))((layer, x))
    whole, tiled = run(experts), run(tile(experts, axis=(None, 0), n=3))
    for one, other in zip(jax.tree.leaves(tiled), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5, rtol=2e-5)
