"""`tile`: run any function a slice at a time along one axis. Start reading here.

arguments.py   which arrays are cut                 schedule.py  placements -> loops
graph.py       a jaxpr as a flat graph              lower.py     loops -> lax.scan
propagate.py   a placement for every value          derive.py    derivatives, again tiled
rules/         what each primitive does to one      plan.py      what was done, in bytes and FLOPs
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jaxtyping import DTypeLike

from transforms.arguments import is_array, place
from transforms.derive import call
from transforms.placement import WHOLE, Placement
from transforms.plan import TilePlan, explain
from transforms.program import Options, Program

GATHER = ("small", "any", "none")


def tile(
    fn: Callable[..., Any],
    axis: Any,
    n: int | None = None,
    *,
    size: int | None = None,
    has_aux: bool = False,
    gather: str = "small",
    accumulate: DTypeLike = jnp.float32,
) -> Callable[..., Any]:
    """Return `fn` with everything that it computes along `axis` computed one tile at a time.

    The result has `fn`'s signature, value, dtypes, pytree structure and gradients, exactly: what would need an array
    larger than `fn`'s inputs and outputs to be whole is refused. A function with one differentiated scalar output runs
    its forward and backward in one pass over the tiles and recomputes nothing; other functions recompute each tile once
    in the backward. Evaluation without gradients pays the forward alone. Derivatives of both modes and of any order are
    tiled too; `jax.jvp` of a scalar function costs its gradient.

    Like `jax.jit`, it traces `fn` once for each set of shapes: what `fn` closes over is read then.

        tiled = tile(loss, axis=(None, 0, 0), n=8)      # loss(weights, hidden, labels), cut along tokens
        jax.value_and_grad(tiled)(weights, hidden, labels)

    Args:
        fn: any function of arrays, pytrees and `eqx.Module`s. Leaves that are not arrays are static.
        axis: reads like `jax.vmap`'s `in_axes`: an int, negative too, or a tuple with an entry for each positional
            argument: an int, None for what every tile sees whole, or a pytree prefix of those. A bare int cuts every
            positional array that has that dimension, but no `eqx.Module`, random key or keyword argument. A dict names
            arguments, keyword ones too; those that it leaves out are whole.
        n: number of tiles. A tile is `ceil(length / n)` long and the last may be shorter, so there may be fewer.
        size: a tile's length, instead of `n`; a shorter axis is one tile.
        has_aux: `fn` returns `(out, aux)`, and `aux` is not differentiated.
        gather: which cut arrays may be made whole where an operation needs that: "small" those no larger than the
            largest input or output, "any" all, "none" none.
        accumulate: sums across tiles are formed in this dtype, promoted with their own.

    Returns:
        The tiled function. Its `plan(*args, **kwargs)` tells, without running anything, what happens.

    Raises:
        TypeError: an argument of `tile` has the wrong type.
        ValueError: bad `n`, `size` or `gather`; when called, `axis` or `n` do not fit the arguments.
        TileError: when called, `fn` cannot be tiled along `axis`.
    """
    if not callable(fn):
        raise TypeError(f"tile: the first argument must be a function, not {fn!r}.")
    _check_count(n, size)
    if gather not in GATHER:
        raise ValueError(f"tile: gather={gather!r} is none of {', '.join(map(repr, GATHER))}.")
    tracer = _Tracer(fn, axis, n, size, has_aux, gather, jnp.dtype(accumulate))

    @functools.wraps(fn)
    def tiled(*args: Any, **kwargs: Any) -> Any:
        traced, arrays = tracer.trace(args, kwargs)
        return traced.unflatten(call(traced.program, *traced.consts, *arrays))

    def plan(*args: Any, **kwargs: Any) -> TilePlan:
        """Tell how the call with these arguments (arrays or `jax.ShapeDtypeStruct`s) is tiled, without running it."""
        return explain(tracer.trace(args, kwargs)[0].program)

    tiled.plan = plan  # ty: ignore[missing-attribute]
    return tiled


def _check_count(n: Any, size: Any) -> None:
    if (n is None) == (size is None):
        raise ValueError(f"tile: give either n, the number of tiles, or size, their length; got n={n}, size={size}.")
    for name, value in (("n", n), ("size", size)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"tile: {name} must be an int, not {value!r}.")
        if value < 1:
            raise ValueError(f"tile: {name}={value}, but it must be at least 1.")


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function at certain shapes: its program, what it closes over, and how its results are put together."""

    program: Program
    consts: Sequence[Any]
    structure: Any
    static: Any

    def unflatten(self, results: Sequence[Any]) -> Any:
        return eqx.combine(jax.tree.unflatten(self.structure, results), self.static)


@dataclasses.dataclass(frozen=True)
class _Tracer:
    fn: Callable[..., Any]
    axis: Any
    n: int | None
    size: int | None
    has_aux: bool
    gather: str
    accumulate: Any
    cache: dict[Any, _Traced] = dataclasses.field(default_factory=dict)

    def trace(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[_Traced, list[Any]]:
        """Trace and plan the call, or find that it was before; and the arrays among its arguments."""
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        arrays = [x for x in leaves if is_array(x)]
        static = [None if is_array(x) else (type(x), x) for x in leaves]
        placements, total = place(self.fn, self.axis, args, kwargs)
        key = (tree, tuple(static), tuple(map(_aval, arrays)), tuple(placements), jax.dtypes.canonicalize_dtype(float))
        try:
            if (known := self.cache.get(key)) is not None:
                return known, arrays
        except TypeError:  # a static leaf cannot be hashed
            return self._trace(leaves, tree, placements, total), arrays
        traced = self._trace(leaves, tree, placements, total)
        if not any(isinstance(c, Tracer) for c in traced.consts):
            self.cache[key] = traced
        return traced, arrays

    def _trace(self, leaves: Sequence[Any], tree: Any, placements: Sequence[Placement], total: int) -> _Traced:
        tiles = self._tiles(total)
        size = -(-total // tiles) if self.size is None else min(total, self.size)
        found: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            args, kwargs = jax.tree.unflatten(tree, [next(given) if is_array(x) else x for x in leaves])
            result = self.fn(*args, **kwargs)
            dynamic, found["static"] = eqx.partition(result, is_array)
            if self.has_aux:
                dynamic = self._stop_aux(result, dynamic)
            outs, found["tree"] = jax.tree.flatten(dynamic)
            return outs

        closed = jax.make_jaxpr(flat)(*(x for x in leaves if is_array(x)))
        jaxpr = closed.jaxpr
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        options = Options(total, size, self.gather, self.accumulate)
        program = Program(ClosedJaxpr(jaxpr, ()), (*(WHOLE,) * len(closed.consts), *placements), options)
        return _Traced(program, closed.consts, found["tree"], found["static"])

    def _tiles(self, total: int) -> int:
        if total == 0:
            raise ValueError("tile: the axis to cut is 0 long, so it has no tiles. Pass arrays that are not empty.")
        if self.n is not None and self.n > total:
            raise ValueError(
                f"tile: n={self.n} tiles of an axis that is {total} long. Pass n <= {total}, or size=, a tile's length."
            )
        return self.n or 1

    def _stop_aux(self, result: Any, dynamic: Any) -> Any:
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"tile: with has_aux=True the function must return a pair (out, aux), not {type(result)}.")
        return dynamic[0], jax.tree.map(jax.lax.stop_gradient, dynamic[1])


def _aval(array: Any) -> Any:
    """What a trace depends on: shape, dtype, weak type and sharding type."""
    return array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
