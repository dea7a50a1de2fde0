"""`tile`: run any function a slice at a time along one axis. The front door.

A call is traced and planned once for each kind of arguments, inside `jax.jit`, and run (`Tracer`). The map of what
lies behind is in `transforms/tiling/__init__.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer as JaxTracer
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AxisType
from jaxtyping import DTypeLike

from transforms.layout import unreduced
from transforms.tiling.autodiff.derive import call
from transforms.tiling.autodiff.program import Options, Program, by_shares, collections_paused, looked_into
from transforms.tiling.inputs import meshes
from transforms.tiling.inputs.axes import is_array, place, rows
from transforms.tiling.ir.dependence import depend
from transforms.tiling.ir.errors import explained, tracing
from transforms.tiling.ir.graph import describe
from transforms.tiling.ir.jaxprs import axis_names, equations
from transforms.tiling.ir.placement import WHOLE, Placement
from transforms.tiling.primitives import has
from transforms.tiling.report.plan import TilePlan, explain, fewest, read_budget

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

    A function with one differentiated scalar output runs its forward and backward in one pass over the tiles and
    recomputes nothing; other functions recompute each tile once in the backward. The gradient of a recurrence whose
    states are too many to keep stores one for each tile and takes the tiles from the last to the first, recomputing
    each. Evaluation without gradients pays the forward alone. Derivatives of both modes and of any order are tiled too;
    `jax.jvp` of a scalar function runs forward twice. Where that is not compiled, it makes the gradient too, and
    `jax.vjp` holds the arguments beside it.

    Values are exact but for the order in which sums are formed. Two loops that compute a value need not agree on its
    last bit, so a comparison with a copy of it (a maximum, a sorted or looked up element) reads what the first loop
    stored, or is told where the copy came from, or is refused. Terms are pulled out of an exponential only relative to
    the running maximum of its own exponent.
    """

    __wrapped__: Callable[P, R]
    __name__: str

    def __init__(self, fn: Callable[P, R], tracer: Tracer) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._tracer = tracer

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> TilePlan:
        """Tell how the call with these arguments (arrays or `jax.ShapeDtypeStruct`s) is tiled, without running it."""
        return self._plan(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: int = 0) -> Any:
        """Run a call whose first `whole` arguments are not cut, whatever `axis` says, and have no specs."""
        run, specs = functools.partial(self._tracer.run, whole=whole), self._tracer.in_sharding
        specs = None if specs is None else (*(None,) * whole, *meshes.entries(specs, args[whole:]))
        with tracing(self.__wrapped__), collections_paused():
            return meshes.call(run, specs, args, kwargs)

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: int = 0) -> TilePlan:
        with tracing(self.__wrapped__), collections_paused():
            return explain(self._tracer.trace(args, kwargs, whole).program)

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
        return self._function._run((self.__self__, *args), kwargs, whole=1)

    def plan(self, *args: Any, **kwargs: Any) -> TilePlan:
        """Tell how the call with these arguments is tiled, without running it."""
        return self._function._plan((self.__self__, *args), kwargs, whole=1)

    @property
    def __wrapped__(self) -> Callable[Q, R]:
        return types.MethodType(self._function.__wrapped__, self.__self__)

    @property
    def __name__(self) -> str:
        return self._function.__name__


class Settings(TypedDict, total=False):
    """The arguments of `tile`; those from `size` on are given by name.

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
            text, "2GiB". It is estimated from what is alive at once, and a tile keeps at least 64 rows.
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
    """

    size: int | None
    budget: int | str | None
    has_aux: bool
    gather: str
    policy: Callable[..., Any] | None
    lowmem: bool
    accumulate: DTypeLike
    sync: str
    in_sharding: Any
    reduce_dtype: DTypeLike | None


@overload
def tile(fn: Callable[P, R], axis: Any, n: Count = None, **settings: Unpack[Settings]) -> TiledFunction[P, R]: ...
@overload
def tile(
    fn: None = None, *, axis: Any, n: Count = None, **settings: Unpack[Settings]
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
    policy: Any = None,
    lowmem: bool = False,
    accumulate: Any = jnp.float32,
    sync: str = "once",
    in_sharding: Any = None,
    reduce_dtype: Any = None,
) -> Any:
    """Return `fn` with everything that it computes along `axis` computed one tile at a time.

    The result has `fn`'s signature, value, dtypes, pytree structure and gradients, exactly (`TiledFunction` says what
    that means, and what it costs). What would need an array larger than `fn`'s inputs and outputs to be whole is
    refused. Like `jax.jit`, it traces `fn` once for each set of shapes: what `fn` closes over is read then.

        tiled = tile(loss, axis=(None, 0, 0), n=8)      # loss(weights, hidden, labels), cut along tokens
        jax.value_and_grad(tiled)(weights, hidden, labels)

        @tile(axis="tokens", n="auto", budget="2GiB")   # where the annotations say "tokens"; as few tiles as fit
        def loss(weights: Float[Array, "embed vocab"], hidden: Float[Array, "tokens embed"]): ...

    Its arguments are told in `Settings`, and at the end of what `help(tile)` shows.

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
    _check_function(fn, "the first argument must be a function")
    checked = _checked(n, settings)
    if fn is None:
        return functools.partial(tile, axis=axis, n=n, **settings)
    return TiledFunction(fn, Tracer(fn, axis, **checked))


def _needed(function: Callable[..., Any], *names: str) -> inspect.Signature:
    """Return a function's signature for people, who must give what is named, though a decorator is given it later."""
    found = inspect.signature(function)
    bare = lambda one: one.replace(default=one.empty) if one.name in names else one
    return found.replace(parameters=[bare(one) for one in found.parameters.values()])


if tile.__doc__:  # `python -OO` has none
    tile.__doc__ += f"\n{Settings.__doc__}"
setattr(tile, "__signature__", _needed(tile, "fn", "axis"))  # noqa: B010 (type checkers know no such attribute)


def _checked(n: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Check what `tile` is told beside function and axis; return the fields of `Tracer` that hold it."""
    size, policy, reduced = settings["size"], settings["policy"], settings["reduce_dtype"]
    budget = _check_count(n, size, settings["budget"])
    _check_word("gather", settings["gather"], GATHER)
    _check_word("sync", settings["sync"], SYNC)
    _check_function(policy, "policy must be a policy of jax.checkpoint, a function")
    options = {name: settings[name] for name in ("gather", "policy", "lowmem", "sync")}
    options["accumulate"] = _check_dtype("accumulate", settings["accumulate"])
    options["reduce_dtype"] = None if reduced is None else _check_dtype("reduce_dtype", reduced)
    count = int(n) if isinstance(n, np.integer) else n
    told = {name: settings[name] for name in ("has_aux", "in_sharding")}
    return {"n": count, "size": size, "budget": budget, **told, "options": options}


def _check_count(n: Any, size: Any, budget: Any) -> int | None:
    """Check how many tiles are asked for; return the budget in bytes."""
    if (n is None) == (size is None):
        raise ValueError(f"tile: give either n, the number of tiles, or size, their length; got n={n}, size={size}.")
    if n == "auto" and budget is None:
        raise ValueError('tile: n="auto" takes as few tiles as fit; say into what, such as budget="2GiB".')
    if n != "auto" and budget is not None:
        raise ValueError(f'tile: budget={budget!r} goes with n="auto"; n={n}, size={size} are obeyed as they are.')
    if n == "auto":
        return read_budget(budget)
    name, value = ("n", n) if size is None else ("size", size)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        other = "" if n is None else ' or "auto"'
        raise TypeError(f"tile: {name} must be an int{other}, not {value!r}.")
    if value < 1:
        raise ValueError(f"tile: {name}={value}, but it must be at least 1.")
    return None


def _check_function(value: Any, must: str) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"tile: {must}, not {value!r}.")


def _check_word(name: str, value: Any, words: Sequence[str]) -> None:
    if value not in words:
        raise ValueError(f"tile: {name}={value!r} is none of {', '.join(map(repr, words))}.")


def _check_dtype(name: str, value: Any) -> np.dtype:
    """Return the dtype that sums are formed in."""
    try:
        if value is not None and jnp.issubdtype(dtype := jnp.dtype(value), jnp.floating):
            return dtype
    except TypeError:
        pass  # NumPy knows no such type
    raise TypeError(f"tile: {name} must be a floating-point dtype, such as jnp.float32, not {value!r}.")


# ------------------------------------------------------------------------ a call, traced and planned once for each kind


class Needed(Exception):
    """The function needs the values of these Python numbers while it is traced."""

    def __init__(self, numbers: Sequence[int]):
        self.numbers = numbers


class Captured(Exception):
    """The function closes over what no program of its own can: what is planned holds for this call alone."""


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A leaf that is static. Numbers are told apart by their digits: -0.0 is not 0.0, and NaN is NaN."""

    key: Any
    value: Any = dataclasses.field(compare=False)

    @staticmethod
    def of(leaf: Any) -> Fixed:
        return Fixed((type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf), leaf)


@dataclasses.dataclass(frozen=True)
class Number:
    """In a result: the Python number that the call was given as its number `index`, as it is."""

    index: int


@dataclasses.dataclass(frozen=True)
class Call:
    """A call apart from the values of its arrays and numbers: `leaves` holds what is static, None for the others."""

    tree: Any
    leaves: tuple[Any, ...]
    placements: tuple[Placement, ...]
    total: int

    def arguments(self, arrays: Sequence[Any], numbers: Sequence[Any]) -> Any:
        given, others = iter(arrays), iter(numbers)
        values = {None: lambda: next(given), Number: lambda: next(others)}
        leaves = [x.value if isinstance(x, Fixed) else values[x]() for x in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """How a call's results are put together: of arrays, of what is static, and of its own numbers."""

    structure: Any
    static: Any

    def build(self, results: Sequence[Any], numbers: Sequence[Any]) -> Any:
        static = jax.tree.map(lambda x: numbers[x.index] if isinstance(x, Number) else x, self.static)
        return eqx.combine(jax.tree.unflatten(self.structure, results), static)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function at certain shapes: its program, what it closes over, and how its results are put together."""

    program: Program
    consts: Sequence[Any]
    form: Form

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """The results, weakly typed like those of the function, and derivatives like the arguments."""
        # A NumPy array that the function closes over may be wider than what JAX makes of it.
        consts = (c if isinstance(c, (jax.Array, JaxTracer)) else jnp.asarray(np.asarray(c)) for c in self.consts)
        args = [*consts, *arrays]
        if self.program.is_one_tile:
            return jaxpr_as_fun(self.program.closed)(*args)
        args = [_weaken(x, False) if jax.typeof(x).weak_type else x for x in args]
        outs = zip(call(self.program, *args), self.program.closed.out_avals, strict=True)
        return [_weaken(x, True) if a.weak_type else x for x, a in outs]


@dataclasses.dataclass(frozen=True, eq=False)
class Tracer:
    """What `tile` was told; `options` are further fields of `Options`.

    Calls are traced and planned inside a `jax.jit`, whose cache knows all that a trace depends on. Python's floats and
    complex numbers are its arguments too, unless the function needs their values.
    """

    fn: Callable[..., Any]
    axis: Any
    n: int | str | None
    size: int | None
    budget: int | None
    has_aux: bool
    in_sharding: Any
    options: dict[str, Any]
    needed: dict[Any, frozenset[int]] = dataclasses.field(default_factory=dict)  # leaves that are static after all

    def __getstate__(self) -> dict[str, Any]:  # copies and pickles start with nothing traced
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"needed": {}}

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], whole: int = 0) -> Any:
        """Trace and plan the call, unless one like it was before, and run it."""
        _, total = found = place(self.fn, self.axis, args, kwargs, whole)
        if self._is_one_tile(total):
            return self._untiled(*args, **kwargs)
        (form, results), numbers = self._with_numbers(self._cached, args, kwargs, found)
        return form.build(results, numbers)

    def trace(self, args: Sequence[Any], kwargs: dict[str, Any], whole: int = 0) -> Traced:
        """Trace and plan the call. The first `whole` arguments are not cut, whatever `axis` says."""
        found = place(self.fn, self.axis, args, kwargs, whole)
        return self._with_numbers(self._trace, args, kwargs, found)[0]

    def _is_one_tile(self, total: int) -> bool:
        """Whether the function runs as it is: there is one tile, or none."""
        one = total == 1 or self.n == 1 or (self.size is not None and self.size >= total)
        return total == 0 or (one and not self.options["lowmem"])

    def _untiled(self, *args: Any, **kwargs: Any) -> Any:
        result = self.fn(*args, **kwargs)
        return _stop_aux(result) if self.has_aux else result

    def _with_numbers(
        self, use: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], found: tuple[Any, int]
    ) -> Any:
        """`use` a call, its arrays and as many of its Python numbers as need not be static; and those numbers."""
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        arrays = [x for x in leaves if is_array(x)]
        while True:
            fixed = self.needed.get(tree, frozenset())
            free = [i for i, x in enumerate(leaves) if _is_number(x) and i not in fixed]
            kinds = [None if is_array(x) else Number if i in free else Fixed.of(x) for i, x in enumerate(leaves)]
            numbers = [leaves[i] for i in free]
            try:
                return use(Call(tree, tuple(kinds), tuple(found[0]), found[1]), arrays, numbers), numbers
            except Needed as error:
                self.needed[tree] = fixed | {free[i] for i in error.numbers}

    def _cached(self, call: Call, arrays: Sequence[Any], numbers: Sequence[Any]) -> tuple[Form, list[Any]]:
        try:
            hash(call)
        except TypeError:  # a static leaf cannot be hashed
            return self._call(call, arrays, numbers)
        try:
            return self._jitted(call, arrays, numbers)
        except Captured:
            return self._call(call, arrays, numbers)

    @functools.cached_property
    def _jitted(self) -> Callable[..., tuple[Form, list[Any]]]:
        def tiled(call: Call, arrays: Sequence[Any], numbers: Sequence[Any]) -> tuple[Form, list[Any]]:
            return self._call(call, arrays, numbers, cached=True)

        tiled.__name__ = getattr(self.fn, "__name__", tiled.__name__)
        return jax.jit(tiled, static_argnums=0, inline=True)

    def _call(
        self, call: Call, arrays: Sequence[Any], numbers: Sequence[Any], cached: bool = False
    ) -> tuple[Form, list[Any]]:
        traced = self._trace(call, arrays, numbers)
        # Of what devices hold parts of a program has no constants.
        if cached and any(isinstance(c, JaxTracer) or unreduced(jax.typeof(c)) for c in traced.consts):
            raise Captured
        return traced.form, traced.run([*arrays, *map(jnp.asarray, numbers)])

    def _trace(self, call: Call, arrays: Sequence[Any], numbers: Sequence[Any]) -> Traced:
        found: dict[str, Any] = {}

        def flat(*arguments: Any) -> list[Any]:
            given, others = arguments[: len(arrays)], arguments[len(arrays) :]
            args, kwargs = call.arguments(given, others)
            own = {id(x): Number(i) for i, x in enumerate(others)}
            result = jax.tree.map(lambda x: own.get(id(x), x), self._untiled(*args, **kwargs))
            dynamic, found["static"] = eqx.partition(result, is_array)
            outs, found["tree"] = jax.tree.flatten(dynamic)
            return outs

        try:
            with explained(), looked_into():
                closed = jax.make_jaxpr(flat)(*arrays, *numbers)
        except Exception as error:
            if not numbers:
                raise
            raise Needed(_named(str(error), len(arrays)) or range(len(numbers))) from error
        if numbers and (_begins(closed.jaxpr) or _shows(closed.jaxpr, len(arrays), found["static"])):
            raise Needed(range(len(numbers)))
        jaxpr, given, own = closed.jaxpr, {}, {}
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):  # NumPy's numbers are known: np.arange(n)
            known = not isinstance(const, jax.Array) and not jnp.issubdtype(var.aval.dtype, jnp.inexact)
            (own if known else given)[var] = const
        jaxpr = jaxpr.replace(constvars=[*own], invars=[*given, *jaxpr.invars])
        everywhere = (*(WHOLE,) * len(given), *call.placements, *(WHOLE,) * len(numbers))
        jaxpr = ClosedJaxpr(jaxpr, [*own.values()])
        program = self._program(jaxpr, everywhere, call.total, rows(arrays, call.placements))
        return Traced(program, [*given.values()], Form(found["tree"], found["static"]))

    def _program(self, jaxpr: ClosedJaxpr, places: tuple[Placement, ...], total: int, rows: int) -> Program:
        kinds = {*jax.sharding.get_abstract_mesh().axis_types}
        mixed = AxisType.Explicit in kinds and len(kinds) > 1  # there JAX has no type for sums that are left for later
        told = self.options | ({"sync": "tile"} if mixed else {})
        options = functools.partial(Options, **told, named=vmapped(jaxpr))
        if self._is_one_tile(total):
            return Program(jaxpr, places, options(total=total, size=max(1, total)))
        places, each = by_shares(jaxpr, places, options(total=total, size=total))
        total = each.total

        def make(size: int) -> Program:
            return Program(jaxpr, places, dataclasses.replace(each, size=size))

        if self.n == "auto":
            assert self.budget is not None
            return fewest(make, total, rows, self.budget)
        if self.size is not None:
            return make(min(total, max(1, self.size // each.shares)))
        assert isinstance(self.n, int)
        return make(-(-total // self.n))


def _is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python float or complex number that arrays can hold as they do others of its kind."""
    parts = (leaf.real, leaf.imag) if type(leaf) in (float, complex) else ()
    return bool(parts) and all(v == 0 or not math.isfinite(v) or 1e-37 < abs(v) < 1e38 for v in parts)


def _named(message: str, first: int) -> list[int]:
    """The numbers, of arguments that begin at `first`, whose values were asked for, as far as JAX says so."""
    named = {int(i) - first for i in re.findall(r"arguments\[(\d+)\]", message)}
    return sorted(i for i in named if i >= 0)


def _begins(jaxpr: Jaxpr) -> bool:
    """Whether a reduction, such as a pooling layer's, may begin with a Python number, which JAX must know."""
    return any(has(eqn.primitive.name, "begins") for eqn in equations(jaxpr))


def _shows(jaxpr: Jaxpr, arrays: int, static: Any) -> bool:
    """Whether a result is, or may be, made of Python numbers alone: then it is no array, or holds their digits."""
    if any(not isinstance(x, (bool, int, float, complex, Number)) for x in jax.tree.leaves(static)):
        return True
    of_arrays, of_numbers = (
        depend(jaxpr, [(i < arrays) is own for i in range(len(jaxpr.invars))]) for own in (True, False)
    )
    return any(number and not array for array, number in zip(of_arrays, of_numbers, strict=True))


def _weaken(array: Any, weak: bool) -> Any:
    array = jnp.asarray(array)
    return lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=weak, sharding=None)


def _stop_aux(result: Any) -> Any:
    if not isinstance(result, tuple) or len(result) != 2:
        what = describe(jax.typeof(result)) if isinstance(result, jax.Array) else type(result).__name__
        raise TypeError(f"tile: with has_aux=True the function must return a pair (out, aux), not {what}.")
    out, aux = result
    return out, jax.tree.map(lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x, aux)


def vmapped(closed: ClosedJaxpr) -> tuple[tuple[Any, int], ...]:
    """The axes of `jax.vmap` around that a function names, and their lengths."""
    of_mesh = jax.sharding.get_abstract_mesh().manual_axes
    return tuple((name, lax.axis_size(name)) for name in axis_names({"jaxpr": closed}).difference(of_mesh))
