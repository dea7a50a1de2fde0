"""`tile` as a decorator, on methods, and as type checkers see it."""

import functools
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from transforms import tile

pytestmark = pytest.mark.symbolic

H, W = jnp.arange(120.0).reshape(24, 5) / 100, jnp.ones((5, 7))


def loss(hidden: Float[Array, "tokens embed"], weights: Float[Array, "embed vocab"], *, scale: float = 1.0) -> Array:
    """Say what it does."""
    return scale * jax.nn.logsumexp(hidden @ weights, -1).mean()


DECORATORS = {
    "arguments": tile(axis=(0, None), n=4),
    "name": tile(axis="tokens", n=4),
    "size": tile(axis=(0, None), size=7),
    "partial": functools.partial(tile, axis=(0, None), n=4),
    "budget": tile(axis="tokens", n="auto", budget="1 MB"),
}


@pytest.mark.parametrize("name", DECORATORS)
def test_decorates(name):
    tiled = DECORATORS[name](loss)
    assert jnp.allclose(tiled(H, W, scale=2.0), loss(H, W, scale=2.0))
    assert jnp.allclose(jax.grad(tiled)(H, W), jax.grad(loss)(H, W), atol=1e-7)


def test_keeps_name_documentation_and_signature():
    tiled = tile(loss, (0, None), 4)
    assert (tiled.__name__, tiled.__qualname__, tiled.__doc__) == ("loss", "loss", "Say what it does.")
    assert (tiled.__wrapped__, tiled.__module__) == (loss, __name__)
    assert inspect.signature(tiled) == inspect.signature(loss)
    assert repr(tiled) == "tile(loss, axis=(0, None), n=4)"


@pytest.mark.parametrize("wrap", [jax.jit, eqx.filter_jit, jax.checkpoint, functools.partial])
def test_what_takes_functions_takes_it(wrap):
    assert jnp.allclose(wrap(tile(loss, (0, None), 4))(H, W), loss(H, W))


class Head(eqx.Module):
    weights: Float[Array, "embed vocab"]
    tokens: Float[Array, "tokens"]

    @tile(axis=0, n=4)
    def by_position(self, hidden):
        """The loss."""
        return loss(hidden, self.weights)

    @tile(axis="tokens", n=4)
    def by_name(self, hidden: Float[Array, "tokens embed"]) -> Array:
        return loss(hidden, self.weights) + self.tokens.sum()

    @tile(axis=(None, 0), n=4)
    def in_a_tuple(self, weights, hidden):
        return loss(hidden, self.weights + weights)


class Plain:
    def __init__(self, weights):
        self.weights = weights

    @tile(axis={"hidden": 0}, n=4)
    def by_position(self, hidden):
        return loss(hidden, self.weights)


HEAD = Head(W, jnp.ones(3))
METHODS = {
    "position": (HEAD.by_position, (H,), lambda: loss(H, W)),
    "name, where the object has it too": (HEAD.by_name, (H,), lambda: loss(H, W) + 3),
    "tuple without the object": (HEAD.in_a_tuple, (W, H), lambda: loss(H, 2 * W)),
    "of the class": (Head.in_a_tuple.__get__(HEAD), (W, H), lambda: loss(H, 2 * W)),
    "any class": (Plain(W).by_position, (H,), lambda: loss(H, W)),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_see_their_object_whole(name):
    method, args, want = METHODS[name]
    assert jnp.allclose(method(*args), want())
    assert method.plan(*args).tiles == 4


def test_methods_keep_name_and_signature():
    assert (HEAD.by_position.__name__, HEAD.by_position.__wrapped__.__doc__) == ("by_position", "The loss.")
    assert list(inspect.signature(HEAD.by_position).parameters) == ["hidden"]


def test_a_module_s_method_is_differentiated_in_the_module():
    got = eqx.filter_grad(lambda head: head.by_position(H))(HEAD)
    want = eqx.filter_grad(lambda head: loss(H, head.weights))(HEAD)
    assert jnp.allclose(got.weights, want.weights, atol=1e-7)


def test_a_module_s_method_is_a_pytree_and_compiles_once():
    assert [x.shape for x in jax.tree.leaves(HEAD.by_position)] == [(5, 7), (3,)]
    traces = []

    @eqx.filter_jit
    def run(method, hidden):
        traces.append(1)
        return method(hidden)

    for scale in (1.0, 2.0):
        head = Head(scale * W, jnp.ones(3))
        assert jnp.allclose(run(head.by_position, H), loss(H, scale * W))
    assert len(traces) == 1


def test_nested_decorators():
    twice = tile(axis=(0, None), n=2)(jax.jit(loss))
    assert jnp.allclose(twice(H, W), loss(H, W))
    assert twice.__wrapped__.__wrapped__ is loss


# -------------------------------------------------------------------------------------------------------- type checkers

TYPED = """
from functools import partial
from typing import assert_type
import jax
from transforms import TilePlan, tile

Array = jax.Array


def loss(hidden: Array, weights: Array, *, scale: float = 1.0) -> tuple[Array, int]:
    return hidden, 1


x = jax.numpy.ones(3)
tiled = tile(loss, axis=(0, None), n=8)
assert_type(tiled(x, x, scale=2.0), tuple[Array, int])
assert_type(tiled.plan(x, x), TilePlan)
tiled(x)  # wrong: weights is missing
tiled(x, x, scale="big")  # wrong: a str
tile(loss, 0, "autoo")  # wrong: neither a number nor "auto"


@tile(axis="tokens", n="auto", budget="2GiB")
def decorated(hidden: Array) -> Array:
    return hidden


assert_type(decorated(x), Array)
decorated(1)  # wrong: an int


class Head:
    @tile(axis=0, size=128)
    def method(self, hidden: Array) -> int:
        return 1


assert_type(Head().method(x), int)
assert_type(Head().method.plan(x), TilePlan)
Head().method()  # wrong: hidden is missing
"""
WRONG = {i for i, line in enumerate(TYPED.splitlines(), 1) if "# wrong" in line}


@pytest.mark.skipif(not shutil.which("ty", path=str(Path(sys.executable).parent)), reason="ty is not installed")
def test_type_checkers_know_the_signature(tmp_path):
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    root = Path(__file__).parents[2]
    ty = Path(sys.executable).parent / "ty"
    command = [ty, "check", "--python", sys.prefix, "--project", root, "--output-format", "concise", file]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root).stdout
    lines = {int(line.split(":")[1]) for line in found.splitlines() if "error[" in line}
    assert lines == WRONG, found


def test_what_is_needed_reads_as_needed():
    signature = inspect.signature(tile)
    empty = inspect.Parameter.empty
    assert [name for name, one in signature.parameters.items() if one.default is empty] == ["fn", "axis"]
    assert list(signature.parameters) == list(inspect.signature(inspect.unwrap(tile), follow_wrapped=False).parameters)
    for words in ({}, {"axis": None}):
        with pytest.raises(TypeError, match="tile: give axis, the dimension to cut"):
            tile(loss, n=4, **words)


def branches(x):
    return x if x.sum() > 0 else -x


class Scaled(eqx.Module):
    w: Array

    @tile(axis=0, n=2)
    def numbers(self, x):
        return x * float(self.w)


NOT_KNOWN = {
    "if": (tile(branches, 0, 4), "`branches`"),
    "float": (Scaled(jnp.ones(())).numbers, "`Scaled.numbers`"),
    "numpy": (tile(lambda x: np.asarray(x).sum(), 0, 4), "<lambda>`"),
    "indices": (tile(lambda x: x[x > 1], 0, 4), "<lambda>`"),
    "range": (tile(lambda x: sum(range(x.sum().astype(int))) * x, 0, 4), "<lambda>`"),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_jax_errors_say_that_tile_traces_and_what(name):
    tiled, named = NOT_KNOWN[name]
    for call in (tiled, jax.jit(lambda x: tiled(x)), jax.grad(lambda x: tiled(x).sum()), tiled.plan):
        with pytest.raises((TypeError, IndexError)) as caught:
            call(jnp.arange(8.0))
        assert type(caught.value).__module__ == "jax.errors"
        (note,) = [note for note in caught.value.__notes__ if "`tile` traces" in note]
        assert named in note and "test_tile_signature.py" in note and "jnp.where" in note
