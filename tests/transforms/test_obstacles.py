"""What keeps a graph from being tiled is a value that a pass answers: no exception of our own steers the planner."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import transforms
from transforms import TileError, tile
from transforms.tiling.ir import obstacles
from transforms.tiling.ir.obstacles import Obstacle, Refusal
from transforms.tiling.passes import driver
from transforms.tiling.passes.driver import ANSWERS

THROUGH_JIT = {"Needed", "Captured"}  # `jax.jit` is to remember nothing of a call that raises these (`api`)


def test_no_exception_of_our_own_is_caught():
    own, caught = set(), set()
    for path in Path(transforms.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {getattr(base, "id", "") for base in node.bases}
                own |= {node.name} if any(base.endswith(("Error", "Exception")) for base in bases) else set()
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                caught |= {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
    assert "TileError" in own
    assert own & caught == THROUGH_JIT


def test_every_obstacle_but_those_inside_bodies_has_an_answer():
    kinds = {kind for kind in vars(obstacles).values() if isinstance(kind, type) and issubclass(kind, Obstacle)}
    inside = {obstacles.Complete, obstacles.Split}  # the walk that meets these answers them itself
    assert {p.answers for p in ANSWERS} == kinds - inside - {Obstacle}


def refused(x):
    return jnp.sort(jnp.outer(x, x), axis=0)


def test_a_program_says_why_it_has_no_plan_without_raising():
    traced = tile(refused, 0, 4, gather="none")._tracer.trace((jax.ShapeDtypeStruct((400,), "float32"),), {}).program
    assert isinstance(traced.refusal, Refusal)
    with pytest.raises(TileError) as error:
        traced.plan  # noqa: B018
    assert str(error.value) == traced.refusal.message
    assert dataclasses.replace(traced, closed=jax.make_jaxpr(jnp.sin)(jnp.ones(400))).refusal is None


def test_rewrites_that_leave_what_they_look_for_come_to_an_end(monkeypatch):
    unchanging = driver.Pass("unchanging", lambda work, found: True)
    monkeypatch.setattr(driver, "ALWAYS", (unchanging,))
    with pytest.raises(TileError, match=r"leave something to rewrite, the last ones unchanging, .*defect.*report"):
        tile(lambda x: jnp.sin(x).sum(), 0, 2)(jnp.ones(8))


@pytest.mark.parametrize("loop", [lambda fn: jax.lax.map(fn, jnp.arange(3)), lambda fn: jax.checkpoint(fn)(0)])
def test_a_refusal_names_a_line_of_the_user(loop):
    """Also of what JAX's own code writes in the body of a loop."""
    fn = lambda x, w: loop(lambda i: jnp.median(jnp.tanh(x @ w), 0)[i].sum()).sum()
    with pytest.raises(TileError, match=r"cannot tile `sort` at \S*test_obstacles.py:\d+:\d+ \("):
        tile(fn, (0, None), 4)(jnp.ones((64, 4)), jnp.ones((4, 32)))


def test_a_refusal_names_no_line_of_ours():
    """Of what `lowmem` runs again, a loop within a loop, JAX has no line of the user's."""
    logits = lambda x, w: x @ w
    loss = lambda x, w: (jax.nn.logsumexp(logits(x, w), axis=1) - logits(x, w)[:, 0]).mean()
    with pytest.raises(TileError) as error:
        jax.grad(tile(loss, (0, None), 3, lowmem=True), 1)(jnp.ones((61, 16)), jnp.ones((16, 24)))
    assert "tiling/" not in str(error.value)
    assert " at :" not in str(error.value)
