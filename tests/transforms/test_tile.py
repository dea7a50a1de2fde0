"""What `tile` promises as a whole: exactness is judged by `test_tile_cases`, memory and products here."""

import inspect

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive

from experiments.bench.head import compile_gradient, loss, scanned, temp_bytes
from experiments.planning.hlo import dot_flops
from tests import quick
from transforms import TileError, tile

RNG = np.random.default_rng(0)
H, W = jnp.asarray(RNG.normal(size=(26, 5)), jnp.float32), jnp.asarray(RNG.normal(size=(5, 11)), jnp.float32)
Y, M = jnp.asarray(RNG.integers(0, 11, 26)), jnp.asarray(RNG.random(26) < 0.7, jnp.float32)


def mean_loss(h, w, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean()


# ------------------------------------------------------------------------------------------------ memory and products

TOKENS, EMBED, VOCAB = 1024, 64, 16384


def measure(fn):
    compiled = compile_gradient(fn, TOKENS, EMBED, VOCAB, "float32")
    return temp_bytes(compiled), dot_flops(compiled.as_text()) / (2 * TOKENS * EMBED * VOCAB)


@pytest.mark.measured
def test_head_takes_a_seventh_of_the_memory_and_recomputes_nothing():
    untiled, products = measure(loss)
    tiled, tiled_products = measure(tile(loss, (0, None, 0, 0), 8))
    assert (products, tiled_products) == (3.0, 3.0)
    assert tiled <= untiled / 7
    assert measure(scanned(8))[1] == 4.0  # the count can tell: this one runs the forward twice


@pytest.mark.measured
def test_memory_falls_with_the_number_of_tiles():
    sizes = [measure(tile(loss, (0, None, 0, 0), n))[0] for n in (2, 8, 32)]
    assert sizes[1] < sizes[0] / 3
    assert sizes[2] < sizes[1] / 2


@pytest.mark.measured
def test_evaluation_pays_the_forward_alone():
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((1024, 64), "float32"), ((64, 16384), "float32"))]
    shapes += [jax.ShapeDtypeStruct((1024,), jnp.int32), jax.ShapeDtypeStruct((1024,), jnp.float32)]
    compiled = jax.jit(tile(loss, (0, None, 0, 0), 8)).lower(*shapes).compile()
    assert dot_flops(compiled.as_text()) == 2 * TOKENS * EMBED * VOCAB
    assert temp_bytes(compiled) <= 3 * 4 * TOKENS // 8 * VOCAB


NONLINEAR = {
    "perplexity": lambda h, w, y, m: jnp.exp(loss(h, w, y, m)),
    "log of a sum": lambda h, w, y, m: jnp.log((loss(h, w, y, m) * m.sum()) + 1),
    "ratio of sums": lambda h, w, y, m: (lambda total: total / (1 + total))(loss(h, w, y, m)),
}


@pytest.mark.measured
@pytest.mark.parametrize("name", NONLINEAR)
def test_losses_nonlinear_in_a_sum_recompute_nothing(name):
    untiled, tiled = measure(NONLINEAR[name]), measure(tile(NONLINEAR[name], (0, None, 0, 0), 8))
    assert tiled[1] == untiled[1]
    assert tiled[0] <= untiled[0] / 5


@pytest.mark.measured
def test_frozen_weights_cost_no_gradient():
    def of_hidden(fn):
        return jax.grad(lambda h: fn(h, jnp.ones((EMBED, VOCAB)), jnp.zeros(TOKENS, int), jnp.ones(TOKENS)))

    compiled = jax.jit(of_hidden(tile(loss, (0, None, 0, 0), 8))).lower(jnp.ones((TOKENS, EMBED))).compile()
    assert dot_flops(compiled.as_text()) == 2 * 2 * TOKENS * EMBED * VOCAB


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_bfloat16_error_does_not_grow_with_the_tiles(scale):
    """Beside that of the function as it is written, which rounds what is bfloat16.

    Where XLA multiplies nothing narrower than float32 it leaves such roundings out, unless it is told not to.
    """
    h = jnp.asarray(RNG.normal(size=(256, 32)), jnp.bfloat16)
    w = jnp.asarray(RNG.normal(size=(32, 512)) / 3, jnp.bfloat16)
    y, m = jnp.asarray(RNG.integers(0, 512, 256)), jnp.ones(256)
    with jax.enable_x64(True):
        exact = quick.jit(jax.grad(loss, (0, 1)))(*(np.asarray(x, np.float64) for x in (h, w)), y, np.ones(256))

    def error(fn):
        scaled = jax.grad(lambda h, w: scale * fn(h, w, y, m), (0, 1))
        grads = jax.jit(scaled, compiler_options={"xla_allow_excess_precision": False})(h, w)
        pairs = [(np.asarray(g, np.float64), scale * np.asarray(e)) for g, e in zip(grads, exact, strict=True)]
        return np.array([np.linalg.norm(g - e) / np.linalg.norm(e) for g, e in pairs])

    untiled = error(loss)
    for n in (8, 32, 128):
        assert (error(tile(loss, (0, None, 0, 0), n)) <= 1.1 * untiled).all()


# -------------------------------------------------------------------------------------------------------- the contract


def test_keeps_name_documentation_and_signature():
    tiled = tile(mean_loss, (0, None, 0), 4)
    assert (tiled.__name__, tiled.__wrapped__, tiled.__doc__) == ("mean_loss", mean_loss, mean_loss.__doc__)
    assert inspect.signature(tiled) == inspect.signature(mean_loss)


def test_keyword_arguments_are_whole_unless_named():
    want = mean_loss(H, W, Y)
    assert jnp.allclose(tile(mean_loss, (0,), 4)(H, w=W, y=Y), want, rtol=1e-6)
    assert jnp.allclose(tile(mean_loss, {"h": 0, "y": 0}, 4)(H, y=Y, w=W), want, rtol=1e-6)


def test_results_keep_structure_dtypes_and_static_leaves():
    def fn(h, scale=2.0):
        return {
            "rows": h * scale,
            "name": "rows",
            "none": None,
            "count": (h > 0).sum(),
            "half": h.sum().astype("bfloat16"),
        }

    got, want = tile(fn, 0, 4)(H), fn(H)
    assert (got["name"], got["none"]) == ("rows", None)
    assert [x.dtype for x in jax.tree.leaves(eqx.filter(got, eqx.is_array))] == [
        x.dtype for x in jax.tree.leaves(eqx.filter(want, eqx.is_array))
    ]


def test_aux_has_no_gradient():
    def fn(h, w):
        nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, Y)
        return nll.mean(), {"nll": nll, "worst": nll.max(), "right": ((h @ w).argmax(-1) == Y).sum()}

    got, aux = jax.grad(tile(fn, (0, None), 4, has_aux=True), has_aux=True)(H, W)
    want, aux_want = jax.grad(fn, has_aux=True)(H, W)
    assert jnp.allclose(got, want, atol=1e-6)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-5), aux, aux_want)))
    leak = jax.grad(lambda w: tile(fn, (0, None), 4, has_aux=True)(H, w)[1]["worst"])(W)
    assert not leak.any()


def test_aux_must_come_in_a_pair():
    with pytest.raises(TypeError, match=r"must return a pair \(out, aux\), not float32\[\]"):
        tile(mean_loss, (0, None, 0), 4, has_aux=True)(H, W, Y)


def test_closed_over_tracers_are_differentiated():
    got = jax.jit(jax.grad(lambda w: tile(lambda h, y: mean_loss(h, w, y), 0, 4)(H, Y)))(W)
    assert jnp.allclose(got, jax.grad(mean_loss, 1)(H, W, Y), atol=1e-6)


def test_un_jitted_calls_trace_once():
    traces = []

    def fn(h, w):
        traces.append(1)
        return (h @ w).sum()

    tiled = tile(fn, (0, None), 4)
    for _ in range(3):
        tiled(H, W)
        jax.grad(tiled)(H, W)
    assert len(traces) == 1
    tiled(H[:8], W)
    assert len(traces) == 2


def test_size_is_the_length_of_a_tile():
    assert tile(mean_loss, (0, None, 0), size=8).plan(H, W, Y).tiles == 4
    assert tile(mean_loss, (0, None, 0), size=100).plan(H, W, Y).tiles == 1


def test_side_effects_run_once_for_each_tile(capfd):
    def fn(h):
        jax.debug.print("tile {}", h.shape[0])
        jax.debug.callback(lambda x: print("rows", x.shape[0]), h)
        return jnp.exp(h).sum()

    jax.block_until_ready(tile(fn, 0, 4)(H))
    jax.effects_barrier()
    assert capfd.readouterr().out.split().count("rows") == 4


def test_ordered_side_effects_are_refused():
    with pytest.raises(TileError, match=r"`debug_\w+` at .*test_tile\.py.*ordered"):
        tile(lambda h: jax.debug.print("{}", h, ordered=True) or h.sum(), 0, 4)(H)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_sort_of_logits_along_the_cut_axis_is_refused_with_its_line():
    wide = jnp.ones((5, 1000))
    message = (
        r"cannot tile `sort` at .*test_tile\.py:\d+.*: it runs along the cut axis[^\n]*\n"
        r"  operand: float32\[26,1000\] Tiled\(dim=0\), 101\.6 KiB, made by `dot_general` at .*test_tile\.py:\d+"
        r".*largest input or output is 19\.53 KiB\.\n  To go on: .*gather=\"any\""
    )
    with pytest.raises(TileError, match=message):
        tile(lambda h, w: jnp.sort(h @ w, axis=0).sum(), (0, None), 4)(H, wide)


def test_gather_any_allows_it():
    fn = lambda h, w: (jnp.sort(h @ w, axis=0) * jnp.arange(26.0)[:, None]).sum()
    got = tile(fn, (0, None), 4, gather="any")(H, jnp.ones((5, 1000)))
    assert jnp.allclose(got, fn(H, jnp.ones((5, 1000))), rtol=1e-5)


def test_gather_none_allows_no_completed_array():
    fn = lambda h, w: jnp.sort((h @ w).sum(-1))[:3].sum()
    assert jnp.allclose(tile(fn, (0, None), 4)(H, W), fn(H, W), rtol=1e-5)
    with pytest.raises(TileError, match='gather="none" allows no completed array'):
        tile(fn, (0, None), 4, gather="none")(H, W)


def test_what_grows_from_a_completed_value_is_tiled_again():
    """A sort of small things is completed; the logits made of them are not."""
    fn = lambda h, w: jax.nn.logsumexp(jnp.sort(h * 2, axis=0) @ w, -1).sum()
    wide = jnp.asarray(RNG.normal(size=(5, 1000)), jnp.float32)
    tiled = tile(fn, (0, None), 4)
    plan = tiled.plan(H, wide)
    assert plan.gradient is not None and len(plan.gradient.completed) >= 1
    assert max(plan.value.largest, plan.gradient.largest) == 4 * 7 * 1000
    for got, want in zip(jax.grad(tiled, (0, 1))(H, wide), jax.grad(fn, (0, 1))(H, wide), strict=True):
        assert jnp.allclose(got, want, atol=2e-5)


def test_what_is_closed_over_is_cut_where_it_meets_what_is_cut():
    wide = jnp.asarray(RNG.normal(size=(5, 1000)), jnp.float32)
    tiled = tile(lambda y: optax.softmax_cross_entropy_with_integer_labels(H @ wide, y).mean(), 0, 4)
    assert jnp.allclose(tiled(Y), mean_loss(H, wide, Y), rtol=1e-6)
    assert tiled.plan(Y).value.largest == 4 * 7 * 1000
    labels = tile(lambda h: optax.softmax_cross_entropy_with_integer_labels(h @ wide, Y).mean(), 0, 4)
    assert jnp.allclose(jax.grad(labels)(H), jax.grad(mean_loss)(H, wide, Y), atol=1e-6)
    gradient = labels.plan(H).gradient
    assert gradient is not None and gradient.largest == 4 * 7 * 1000


def test_noise_as_large_as_the_logits_is_made_tile_by_tile():
    fn = lambda h, w, key: jnp.max(h @ w + jax.random.gumbel(key, (26, 1000)), -1).sum()
    args = H, jnp.ones((5, 1000)), jax.random.key(0)
    np.testing.assert_allclose(tile(fn, (0, None, None), 4)(*args), fn(*args), rtol=1e-6)
    assert tile(fn, (0, None, None), 4).plan(*args).value.largest <= 4 * 7 * 1000


def test_a_primitive_without_a_rule_is_refused_not_completed():
    unheard = Primitive("unheard_of")
    unheard.def_abstract_eval(lambda x: x)
    with pytest.raises(TileError, match=r"`unheard_of` at .*test_tile\.py.*there is no rule for this primitive yet"):
        jax.eval_shape(tile(lambda h: unheard.bind(h).sum(), 0, 4), H)


def test_forward_mode_through_a_custom_vjp_is_refused_as_jax_does():
    clip = jax.custom_vjp(lambda x: x)
    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    tiled = tile(lambda h: clip(h**2).sum(), 0, 4)
    assert jnp.allclose(jax.grad(tiled)(H), 2 * H * 0.1, atol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(tiled, (H,), (H,))


def test_a_callback_whose_result_is_used_runs_once():
    calls = []

    def host(x):
        calls.append(1)
        return np.asarray(x)

    fn = lambda h, scale: h * jax.experimental.io_callback(host, jax.ShapeDtypeStruct((), jnp.float32), scale)
    assert jnp.allclose(tile(fn, (0, None), 4)(H, jnp.float32(2)), 2 * H)
    assert len(calls) == 1


def test_works_under_strict_promotion():
    fn = lambda h, w: jax.nn.logsumexp(jnp.matmul(h, w, preferred_element_type=jnp.float32), axis=-1).mean()
    narrow = H.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = jax.grad(tile(fn, (0, None), 4), (0, 1))(*narrow)
        want = jax.grad(fn, (0, 1))(*narrow)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        assert jnp.allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=2e-3)


def test_works_without_jit():
    with jax.disable_jit():
        assert jnp.allclose(
            jax.grad(tile(mean_loss, (0, None, 0), 4))(H, W, Y), jax.grad(mean_loss)(H, W, Y), atol=1e-6
        )
