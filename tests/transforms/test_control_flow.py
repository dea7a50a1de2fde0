"""Scans, loops, branches and checkpointed blocks in a tiled function, and the gradients of a whole training loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests import quick
from tests.helpers import assert_tiles, equations
from tests.transforms.regions import ARGS, BATCH, FUNCTIONS, D, L, draw
from tests.transforms.transformer import draw_tokens, parameters, training_loss
from transforms import tile

pytestmark = pytest.mark.symbolic


def exact(fn, axis=BATCH, args=ARGS, n=4, **options):
    with jax.enable_x64(True):
        assert_tiles(fn, axis, n, args, dtype=jnp.float64, fast=True, **options)


def loops(fn, axis=BATCH, args=ARGS, n=4):
    return len(tile(fn, axis, n).plan(*args).value.loops)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_exact(name):
    exact(FUNCTIONS[name])


@pytest.mark.redundant("mode")
@pytest.mark.parametrize("mode", ["jvp", "vmap"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_exact_in_forward_mode_and_batched(name, mode):
    if (name, mode) == ("derivative_rules_inside", "jvp"):
        pytest.skip("a function with a rule for the reverse mode has no forward mode")
    exact(FUNCTIONS[name], n=3, modes=(mode,))


RUNS = ["layers", "checkpointed_layers", "auxiliary_loss_carried", "branches_that_stand_differently", "counted_loop"]


@pytest.mark.parametrize("name", RUNS)
def test_runs_within_one_loop(name):
    assert loops(FUNCTIONS[name]) == 1


def test_while_ends_on_what_is_the_same_for_every_tile():
    def fn(x, w):
        i, h = lax.while_loop(lambda c: c[0] < L, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w[c[0]])), (0, x))
        return i, h.sum()

    x, w = (jnp.asarray(a, jnp.float32) for a in ARGS)
    for got, want in zip(quick.jit(tile(fn, BATCH, 4))(x, w), fn(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    found = [e for e in equations(jax.make_jaxpr(tile(fn, BATCH, 4))(x, w)) if e.primitive.name == "while"]
    assert {(3, D), (1, D)} == {v.aval.shape for e in found for v in e.outvars if v.aval.shape}, "not at tile size"


def test_while_that_ends_on_the_data_sees_all_of_it():
    def fn(x, w):
        step = lambda c: (c[0] + 1, 0.5 * c[1])
        return lax.while_loop(lambda c: jnp.abs(c[1]).max() > 0.1, step, (0, x))

    x, w = (jnp.asarray(a, jnp.float32) for a in ARGS)
    got, want = quick.jit(tile(fn, BATCH, 4))(x, w), fn(x, w)
    assert got[0] == want[0]
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


def recurrent(x, w):
    def step(h, x):
        h = jnp.tanh(x + h @ w)
        return h, h.sum(-1)

    h, sums = lax.scan(jax.checkpoint(step), jnp.zeros(x.shape[1:]), x)
    return (sums**2).mean() + h.sum()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 4, 7])
def test_recurrence_over_the_cut_axis_and_off_it(axis, n):
    exact(recurrent, (axis, None), (draw(7, 7, D), draw(D, D)), n=n)


def test_accumulates_in_float32_within_a_scan_of_bfloat16():
    x = jnp.ones((512, 2), jnp.bfloat16)

    def fn(x):
        return lax.scan(lambda s, _: (s + x.sum(0), None), jnp.zeros(2, x.dtype), None, length=2)[0]

    np.testing.assert_array_equal(quick.jit(tile(fn, 0, 512))(x).astype(jnp.float32), [1024.0, 1024.0])


def test_checkpoint_keeps_its_policy():
    policy = jax.checkpoint_policies.dots_saveable

    def fn(x, w):
        body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None), policy=policy, prevent_cse=False)
        return lax.scan(body, x, w)[0]

    found = [e for e in equations(jax.make_jaxpr(tile(fn, BATCH, 2))(*ARGS)) if "policy" in e.params]
    assert found and all(e.params["policy"] is policy and not e.params["prevent_cse"] for e in found)


def test_prints_inside_a_scan_are_made_once_for_each_tile(capfd):
    def fn(x, w):
        def body(h, w):
            jax.debug.print("layer {}", h.shape[0])
            jax.debug.print("rows {}", (h > 1e9).any(1))
            return h @ w, None

        return lax.scan(body, x, w)[0].sum()

    jax.block_until_ready(tile(fn, BATCH, 2)(*(jnp.asarray(a, jnp.float32) for a in ARGS)))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert (printed.count("rows ["), printed.count("layer 10")) == (2 * L, L)  # no tile changes the latter


# ------------------------------------------------------------------------------------------------ a whole training loss


@pytest.mark.measured
def test_tiling_the_batch_of_a_training_loss_is_gradient_accumulation():
    kept = np.array([16, 16, 1, 2, 1, 1, 4, 3])
    mask = jnp.asarray(np.arange(16) < kept[:, None], jnp.float32)
    args = (*parameters(), *draw_tokens(8, 16), mask)
    gradient = functools.partial(jax.grad, argnums=(0, 1))
    axis = (None, None, 0, 0, 0)

    def error(got, want):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)

    want = quick.jit(gradient(training_loss))(*args)
    halves = [quick.jit(gradient(training_loss))(*args[:2], *(a[s] for a in args[2:])) for s in (slice(2), slice(2, 8))]
    assert error(jax.tree.map(lambda a, b: (a + b) / 2, *halves), want) > 1e-2, "a mean of means would do"
    memory = [jax.jit(gradient(training_loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes]
    for n in (2, 8):
        program = jax.jit(gradient(tile(training_loss, axis, n))).lower(*args).compile()
        assert error(program(*args), want) < 1e-5
        memory.append(program.memory_analysis().temp_size_in_bytes)
    assert memory[2] < 0.6 * memory[1] < 0.6 * memory[0] * 0.8, memory


def test_checkpoints_within_checkpoints():
    """The innermost has a result that no tile changes, so none of the three can be kept as a block of its own."""

    def fn(h, w):
        @jax.checkpoint
        def outer(h, w):
            scaled = jax.checkpoint(lambda w: 2 * jnp.sin(w))(w)
            return jax.nn.logsumexp(jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, scaled), axis=-1)

        return outer(h, w).mean()

    exact(fn, (0, None), (draw(26, 5), draw(5, 11)))
