"""One row of the table of user functions, and the decorator that adds a row."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tests import quick

N, D, V = 26, 7, 13  # 26 tokens: tiles of 7, 7, 7, 5 for n = 4 and six of 4 and one of 2 for n = 7


class Draw:
    """Random numpy arguments from one seed; floats are float64 and cast by whoever runs the case."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return scale * self.rng.standard_normal(shape)

    def ids(self, high: int, *shape: int) -> np.ndarray:
        return self.rng.integers(high, size=shape, dtype=np.int32)

    def mask(self, *shape: int) -> np.ndarray:
        return self.rng.random(shape) < 0.7

    def uniform(self, *shape: int, low: float = 0.2, high: float = 1.5) -> np.ndarray:
        return self.rng.uniform(low, high, shape)

    def probs(self, *shape: int) -> np.ndarray:
        return self.rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A user function with its arguments.

    Args:
      fn: the function; returns `(out, aux)` when `has_aux`.
      args, kwargs: draw the arguments.
      axis: as `tile`'s; for the arguments after the first `closed`, which `fn` closes over.
      refused: why it is refused, in the words of the error; `None` where it tiles and is exact.
      head: the untiled function makes arrays larger than any input or output, and the tiled one must not.
      tolerance: of float32 results, relative to the largest magnitude of each leaf.
      oracle: compare float32 with the untiled function in float64, not in float32, where its own tangent is what is
        left of terms that cancel.
      x64: whether the function keeps float64 arguments in float64.
      forward_mode: whether the untiled function has one (`jax.custom_vjp` does not).
      differentiable: whether some gradient is nonzero.
      bitwise: the gradient looks for a maximum among recomputed values; without XLA's optimisation a small product
        rounds differently in two loops, so every n is compiled in full.
      special: it agrees where inputs are infinite, NaN or zero, too. Where not: a slope that is known late and is no
        finite number meets zeros of what no row touches, or an infinite kernel meets padding.
    """

    name: str
    fn: Callable
    args: Callable[[Draw], tuple]
    axis: Any
    kwargs: Callable[[Draw], dict] = lambda draw: {}
    has_aux: bool = False
    closed: int = 0
    refused: str | None = None
    head: bool = False
    tolerance: float = 3e-5
    oracle: bool = False
    x64: bool = True
    forward_mode: bool = True
    differentiable: bool = True
    bitwise: bool = False
    special: bool = True

    @property
    def modes(self) -> tuple[str, ...]:
        """How the tiled function is compared beside its value and gradient in float32, compiled quickly."""
        transformed = ("jvp", "vmap", "checkpoint") if self.differentiable else ()
        exact = (*(("float64",) if self.x64 else ()), *(("special",) if self.special and not self.oracle else ()))
        return ("optimised", *exact, *transformed)

    def draw(self) -> tuple[tuple, dict]:
        """Return the positional and keyword arguments, the same at every call."""
        draw = Draw(zlib.crc32(self.name.encode()))
        with jax.enable_x64(False), quick.by_default():  # random modules differ by precision
            return self.args(draw), self.kwargs(draw)


CASES: dict[str, Case] = {}


def tokens(draw: Draw) -> tuple:
    """Weights [D V], hidden [N D], labels [N]."""
    return draw(D, V, scale=0.6), draw(N, D), draw.ids(V, N)


def masked_tokens(draw: Draw) -> tuple:
    """Weights [D V], hidden [N D], labels [N], mask [N]."""
    return *tokens(draw), draw.mask(N)


TOKENS = {"args": tokens, "axis": (None, 0, 0)}
MASKED_TOKENS = {"args": masked_tokens, "axis": (None, 0, 0, 0)}


def case(**row: Any) -> Callable[[Callable], Callable]:
    """Add the decorated function to the table under its own name; a second one of that name is refused."""

    def add(fn: Callable) -> Callable:
        name = getattr(fn, "__name__", "")
        assert name not in CASES, f"two cases are named {name}"
        CASES[name] = Case(name=name, fn=fn, **row)
        return fn

    return add
