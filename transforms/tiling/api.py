"""`tile`: run any function a slice at a time along one axis. Start reading here.

arguments.py   which arrays are cut                 schedule.py  placements -> loops (planner.py: their steps)
names.py       the same, from annotations           lower.py     loops -> lax.scan
tracing.py     a call becomes a program             derive.py    derivatives, again tiled
graph.py       a jaxpr as a flat graph              separate.py  losses nonlinear in sums, in one loop
propagate.py   a placement for every value          lowmem.py    a second cut; keep.py: policies
rules/         what each primitive does to one      plan.py      what was done, in bytes and FLOPs
online.py      sums under a running maximum         estimate.py  temporary memory, before compiling
prefix.py      states, tile to tile (states.py)     budget.py    the fewest tiles that fit
spread.py      arrays over a mesh, by their types   apart.py     sums over devices, after the loop
gather.py      weights gathered before a loop       auto.py      meshes whose axes are Auto
analysis.py    what is known of a cut graph         finish.py    what is computed outside the loops
refused.py     what no function may do             printing.py  a plan as a table
early.py       what waits for a loop's end (follow.py: through each equation; linear.py), and ends.py, what is handed on
divide.py      arrays not quite as long as the axis (pieces.py, across.py)
align.py       neighbours along the axis, as shifts; beside.py: rows beside the tile
rounding.py    no comparison sees what is computed again beside copies of it; equal.py: equal values, computed once
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from transforms.tiling.call import Tracer
from transforms.tiling.inputs import meshes
from transforms.tiling.ir.errors import tracing
from transforms.tiling.report import budget as budgets
from transforms.tiling.report.plan import TilePlan, explain

GATHER = ("small", "any", "none")
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()  # `fn` may be left out, `axis` not
SYNC = ("once", "tile")

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
Count = int | Literal["auto"] | None


class TiledFunction(Generic[P, R]):
    """A function as `tile` returns it: called like the one that it was made of, which is its `__wrapped__`.

    In a class it is a method: the object that it is called on is whole.
    """

    __wrapped__: Callable[P, R]
    __name__: str

    def __init__(self, fn: Callable[P, R], tracer: Tracer) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._tracer = tracer

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with tracing(self.__wrapped__):
            return meshes.call(self._tracer.run, self._tracer.in_sharding, args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> TilePlan:
        """Tell how the call with these arguments (arrays or `jax.ShapeDtypeStruct`s) is tiled, without running it."""
        with tracing(self.__wrapped__):
            return explain(self._tracer.trace(args, kwargs).program)

    def __reduce__(self) -> Any:
        """A decorated function is pickled by its name, as Python's functions are."""
        found: Any = sys.modules.get(self.__module__)
        qualified = getattr(self, "__qualname__", "")
        for name in qualified.split("."):
            found = getattr(found, name, None)
        return qualified if found is self else super().__reduce__()

    @overload
    def __get__(self, instance: None, owner: Any = None) -> TiledFunction[P, R]: ...
    @overload
    def __get__(self: Callable[Concatenate[Any, Q], R], instance: object, owner: Any = None) -> TiledMethod[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else TiledMethod(self, instance)

    def __repr__(self) -> str:
        t = self._tracer
        size = f"n={t.n!r}" if t.size is None else f"size={t.size}"
        return f"tile({getattr(self, '__qualname__', t.fn)}, axis={t.axis!r}, {size})"


class TiledMethod(eqx.Module, Generic[Q, R]):
    """A tiled method and its object, which is whole. A pytree, as Equinox's methods are."""

    _function: Any = eqx.field(static=True)
    __self__: Any

    def __init__(self, function: TiledFunction[..., Any], instance: Any) -> None:
        self._function, self.__self__ = function, instance

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        tracer = self._function._tracer
        run = functools.partial(tracer.run, whole=1)
        specs = None if tracer.in_sharding is None else (None, *meshes.entries(tracer.in_sharding, args))
        with tracing(self._function.__wrapped__):
            return meshes.call(run, specs, (self.__self__, *args), kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> TilePlan:
        """Tell how the call with these arguments is tiled, without running it."""
        with tracing(self._function.__wrapped__):
            return explain(self._function._tracer.trace((self.__self__, *args), kwargs, whole=1).program)

    @property
    def __wrapped__(self) -> Callable[Q, R]:
        return types.MethodType(self._function.__wrapped__, self.__self__)

    @property
    def __name__(self) -> str:
        return self._function.__name__


@overload
def tile(
    fn: Callable[P, R],
    axis: Any,
    n: Count = None,
    *,
    size: int | None = None,
    budget: int | str | None = None,
    has_aux: bool = False,
    gather: str = "small",
    policy: Callable[..., Any] | None = None,
    lowmem: bool = False,
    accumulate: DTypeLike = jnp.float32,
    sync: str = "once",
    in_sharding: Any = None,
    reduce_dtype: DTypeLike | None = None,
) -> TiledFunction[P, R]: ...
@overload
def tile(
    fn: None = None,
    *,
    axis: Any,
    n: Count = None,
    size: int | None = None,
    budget: int | str | None = None,
    has_aux: bool = False,
    gather: str = "small",
    policy: Callable[..., Any] | None = None,
    lowmem: bool = False,
    accumulate: DTypeLike = jnp.float32,
    sync: str = "once",
    in_sharding: Any = None,
    reduce_dtype: DTypeLike | None = None,
) -> Callable[[Callable[P, R]], TiledFunction[P, R]]: ...
def tile(
    fn: Any = None,
    axis: Any = REQUIRED,
    n: Any = None,
    *,
    size: Any = None,
    budget: Any = None,
    has_aux: bool = False,
    gather: str = "small",
    policy: Callable[..., Any] | None = None,
    lowmem: bool = False,
    accumulate: DTypeLike = jnp.float32,
    sync: str = "once",
    in_sharding: Any = None,
    reduce_dtype: DTypeLike | None = None,
) -> Any:
    """Return `fn` with everything that it computes along `axis` computed one tile at a time.

    The result has `fn`'s signature, value, dtypes, pytree structure and gradients, exactly: what would need an array
    larger than `fn`'s inputs and outputs to be whole is refused. A function with one differentiated scalar output runs
    its forward and backward in one pass over the tiles and recomputes nothing; other functions recompute each tile once
    in the backward. The gradient of a recurrence whose states are too many to keep stores one for each tile and takes
    the tiles from the last to the first, recomputing each. Evaluation without gradients pays the forward alone.
    Derivatives of both modes and of any order are tiled too; `jax.jvp` of a scalar function costs its gradient.

    Exactly means: but for the order in which sums are formed. Two loops that compute a value need not agree on its last
    bit, so a comparison with a copy of it (a maximum, a sorted or looked up element) reads what the first loop stored,
    or is told where the copy came from, or is refused. Terms are pulled out of an exponential only relative to the
    running maximum of its own exponent.

    Like `jax.jit`, and inside one, it traces `fn` once for each set of shapes: what `fn` closes over is read then.

        tiled = tile(loss, axis=(None, 0, 0), n=8)      # loss(weights, hidden, labels), cut along tokens
        jax.value_and_grad(tiled)(weights, hidden, labels)

        @tile(axis="tokens", n="auto", budget="2GiB")   # where the annotations say "tokens"; as few tiles as fit
        def loss(weights: Float[Array, "embed vocab"], hidden: Float[Array, "tokens embed"]): ...

    Args:
        fn: any function of arrays, pytrees and `eqx.Module`s. Leaves that are not arrays are static; floats and complex
            numbers only where `fn` needs their values. Left out, `tile` is a decorator, of methods too.
        axis: reads like `jax.vmap`'s `in_axes`: an int, negative too, or a tuple with an entry for each positional
            argument: an int, None for what every tile sees whole, or a pytree prefix of those. A bare int cuts every
            positional array that has that dimension, but no `eqx.Module`, random key or keyword argument. A dict names
            arguments, keyword ones too; those that it leaves out are whole. A string names a dimension of `fn`'s
            jaxtyping annotations, those of fields inside the arguments too: each array is cut where it has that name.
            A method's object is whole and has no entry.
        n: number of tiles. A tile is `ceil(length / n)` long and the last may be shorter, so there may be fewer, and
            no more than the axis is long. One tile, or an axis of length 0, is `fn` as it is, with JAX's derivatives.
            "auto" takes the fewest that fit `budget`.
        size: a tile's length, instead of `n`; a shorter axis is one tile.
        budget: with `n="auto"`, the temporary memory that the function with its gradients may take, in bytes or as
            text, "2GiB". It is estimated as XLA compiles for CPU, and a tile keeps at least 64 rows.
        has_aux: `fn` returns `(out, aux)`, and `aux` is not differentiated.
        gather: which cut arrays may be made whole where an operation needs that: "small" those no larger than the
            largest input or output, or, where there is no other way, than all cut inputs together in the dtype of
            sums; "any" all, "none" none.
        policy: a `jax.checkpoint` policy: what the backward loops find stored by the forward ones, whole, instead of
            computing it again (`jax.checkpoint_policies.save_only_these_names("hidden")`). By default, nothing.
        lowmem: cut the largest whole argument that is differentiated too, along its largest dimension (the vocabulary
            of a head), so that no accumulator is as large as its gradient. A cross-entropy pays 8NDV instead of 6NDV.
        accumulate: sums across tiles are formed in this dtype, promoted with their own.
        sync: on a mesh, when devices exchange: "once" gathers sharded weights before a loop and sums gradients over the
            devices after it, which takes whole weights and gradients on every device; "tile" does both for each tile.
        in_sharding: on a mesh whose axes are Auto, a `jax.sharding.PartitionSpec` for each positional argument (None:
            whole on every device), or a pytree prefix of those. On a mesh with Explicit axes the types tell.
        reduce_dtype: sums over devices are formed in this dtype, promoted with the gradient's own. By default, in the
            gradient's own.

    Returns:
        The tiled function. Its `plan(*args, **kwargs)` tells, without running anything, what happens.

    Raises:
        TypeError: an argument of `tile` is missing or has the wrong type.
        ValueError: a bad `n`, `size`, `budget`, `gather` or `sync`; when called, one of these, `axis` or `in_sharding`
            does not fit the call.
        TileError: when called, `fn` cannot be tiled along `axis`, or cannot run on the mesh.
    """
    settings = {"size": size, "budget": budget, "has_aux": has_aux, "gather": gather}
    settings |= {"policy": policy, "lowmem": lowmem, "accumulate": accumulate}
    settings |= {"sync": sync, "in_sharding": in_sharding, "reduce_dtype": reduce_dtype}
    if axis is REQUIRED or axis is None:
        raise TypeError("tile: give axis, the dimension to cut: an int, a tuple or dict of them, or a name.")
    if fn is not None and not callable(fn):
        raise TypeError(f"tile: the first argument must be a function, not {fn!r}.")
    allowed = _check_count(n, size, budget)
    if gather not in GATHER:
        raise ValueError(f"tile: gather={gather!r} is none of {', '.join(map(repr, GATHER))}.")
    if sync not in SYNC:
        raise ValueError(f"tile: sync={sync!r} is none of {', '.join(map(repr, SYNC))}.")
    if fn is None:
        return functools.partial(tile, axis=axis, n=n, **settings)
    options = {"gather": gather, "accumulate": jnp.dtype(accumulate), "policy": policy, "lowmem": lowmem}
    options |= {"sync": sync, "reduce_dtype": None if reduce_dtype is None else jnp.dtype(reduce_dtype)}
    count = int(n) if isinstance(n, np.integer) else n
    return TiledFunction(fn, Tracer(fn, axis, count, size, allowed, has_aux, in_sharding, options))


def _needed(function: Callable[..., Any], *names: str) -> inspect.Signature:
    """Return a function's signature for people, who must give what is named, though a decorator is given it later."""
    found = inspect.signature(function)
    bare = lambda one: one.replace(default=one.empty) if one.name in names else one
    return found.replace(parameters=[bare(one) for one in found.parameters.values()])


setattr(tile, "__signature__", _needed(tile, "fn", "axis"))  # noqa: B010 (type checkers know no such attribute)


def _check_count(n: Any, size: Any, budget: Any) -> int | None:
    """Check how many tiles are asked for; return the budget in bytes."""
    if (n is None) == (size is None):
        raise ValueError(f"tile: give either n, the number of tiles, or size, their length; got n={n}, size={size}.")
    if n == "auto" and budget is None:
        raise ValueError('tile: n="auto" takes as few tiles as fit; say into what, such as budget="2GiB".')
    if n != "auto" and budget is not None:
        raise ValueError(f'tile: budget={budget!r} goes with n="auto"; n={n}, size={size} are obeyed as they are.')
    for name, value in (("n", n), ("size", size)):
        if value is None or (name == "n" and value == "auto"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            other = ' or "auto"' if name == "n" else ""
            raise TypeError(f"tile: {name} must be an int{other}, not {value!r}.")
        if value < 1:
            raise ValueError(f"tile: {name}={value}, but it must be at least 1.")
    return None if budget is None else budgets.read(budget)
