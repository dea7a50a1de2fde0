"""A call of a tiled function: traced and planned once for each kind of arguments, inside `jax.jit`, then run."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer as JaxTracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.autodiff.derive import call
from transforms.tiling.autodiff.program import Options, Program
from transforms.tiling.inputs.axes import is_array, place, rows
from transforms.tiling.ir.errors import explained
from transforms.tiling.ir.facts import Along, Analysis, Inline, Sink
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.placement import WHOLE, Placement, Tiled, TileError
from transforms.tiling.mesh.layout import shares
from transforms.tiling.report import budget
from transforms.tiling.rules import shard_map


class Needed(Exception):
    """The function needs the values of these Python numbers while it is traced."""

    def __init__(self, numbers: Sequence[int]):
        self.numbers = numbers


class Captured(Exception):
    """The function closes over values of a trace around the call: what is planned holds for this call alone."""


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
            return self._untiled(args, kwargs)
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

    def _untiled(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
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
        if cached and any(isinstance(c, JaxTracer) for c in traced.consts):
            raise Captured
        return traced.form, traced.run([*arrays, *map(jnp.asarray, numbers)])

    def _trace(self, call: Call, arrays: Sequence[Any], numbers: Sequence[Any]) -> Traced:
        found: dict[str, Any] = {}

        def flat(*arguments: Any) -> list[Any]:
            given, others = arguments[: len(arrays)], arguments[len(arrays) :]
            args, kwargs = call.arguments(given, others)
            result = self.fn(*args, **kwargs)
            if self.has_aux:
                result = _stop_aux(result)
            own = {id(x): Number(i) for i, x in enumerate(others)}
            dynamic, found["static"] = eqx.partition(jax.tree.map(lambda x: own.get(id(x), x), result), is_array)
            outs, found["tree"] = jax.tree.flatten(dynamic)
            return outs

        try:
            with explained():
                closed = jax.make_jaxpr(flat)(*arrays, *numbers)
        except Exception as error:
            if not numbers:
                raise
            raise Needed(_named(str(error), len(arrays)) or range(len(numbers))) from error
        if numbers and _shows(closed.jaxpr, len(arrays), found["static"]):
            raise Needed(range(len(numbers)))
        jaxpr = closed.jaxpr
        jaxpr = ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), ())
        everywhere = (*(WHOLE,) * len(closed.consts), *call.placements, *(WHOLE,) * len(numbers))
        program = self._program(jaxpr, everywhere, call.total, rows(arrays, call.placements))
        return Traced(program, closed.consts, Form(found["tree"], found["static"]))

    def _program(self, jaxpr: ClosedJaxpr, places: tuple[Placement, ...], total: int, rows: int) -> Program:
        if self._is_one_tile(total):
            return Program(jaxpr, places, Options(total=total, size=max(1, total), **self.options))
        shares = spread_over(jaxpr, places, Options(total=total, size=total, **self.options))
        places = split(places, shares)
        total //= shares  # the mesh divides it: each device walks its own share

        def make(size: int) -> Program:
            return Program(jaxpr, places, Options(total=total, size=size, shares=shares, **self.options))

        if self.n == "auto":
            assert self.budget is not None
            return budget.fewest(make, total, rows, self.budget)
        if self.size is not None:
            return make(min(total, max(1, self.size // shares)))
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


def _shows(jaxpr: Jaxpr, arrays: int, static: Any) -> bool:
    """Whether a result is, or may be, made of Python numbers alone: then it is no array, or holds their digits."""
    if any(not isinstance(x, (bool, int, float, complex, Number)) for x in jax.tree.leaves(static)):
        return True
    mixed, alone = set(jaxpr.invars[:arrays]), set(jaxpr.invars[arrays:])
    for eqn in jaxpr.eqns:
        read = {v for v in eqn.invars if isinstance(v, Var)}
        if read & mixed:
            mixed.update(eqn.outvars)
        elif read & alone:
            alone.update(eqn.outvars)
    return any(isinstance(v, Var) and v in alone for v in jaxpr.outvars)


def _weaken(array: Any, weak: bool) -> Any:
    array = jnp.asarray(array)
    return lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=weak, sharding=None)


def _stop_aux(result: Any) -> Any:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"tile: with has_aux=True the function must return a pair (out, aux), not {type(result)}.")
    out, aux = result
    return out, jax.tree.map(lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x, aux)


def split(placements: Sequence[Placement], shares: int) -> tuple[Placement, ...]:
    """The placements of arguments whose cut axis is spread over so many devices."""
    return tuple(dataclasses.replace(p, major=shares) if isinstance(p, Tiled) else p for p in placements)


def spread_over(closed: ClosedJaxpr, placements: Sequence[Placement], options: Options) -> int:
    """Over how many devices the cut axis is spread, in the arguments or where the function spreads it."""
    cuts = [shares(v, p.dim) for v, p in zip(closed.in_avals, placements, strict=True) if isinstance(p, Tiled)]
    known, before = math.lcm(*cuts), 0
    while known != before and options.total % known == 0:
        before = known
        anyhow = dataclasses.replace(options, total=options.total // known, gather="any")
        program = Program(closed, split(placements, known), anyhow)
        if not any(node.name in ("reshard", "shard_map") for node in program.graph.nodes):
            break
        try:
            found = analyse(program.graph, program.placements, program.limits)
        except (Along, Inline, Sink, TileError):
            break  # to be told when it is planned
        cut = [(v, f.placement) for v, f in found.facts.items() if isinstance(f.placement, Tiled)]
        known = math.lcm(known, *(n for v, p in cut if p.major % (n := shares(v.aval, p.dim))))
        known = math.lcm(known, *(n for node in program.graph.nodes for n in _shared(node, found)))
    return before or known


def _shared(node: Node, found: Analysis) -> list[int]:
    """Over how many devices a `shard_map` spreads the cut dimensions of its operands that are not known to be."""
    if node.name != "shard_map":
        return []
    places = [(i, found.fact(v).placement) for i, v in enumerate(node.inputs)]
    counts = [(p, shard_map.share(node, node.params["in_specs"][i], p.dim)) for i, p in places if isinstance(p, Tiled)]
    return [n for p, n in counts if p.major % n]
