"""A call of a tiled function: traced and planned once for each kind of arguments, then run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer as JaxTracer
from jax.extend.core import ClosedJaxpr

from transforms import budget
from transforms.analysis import Along, Analysis, Inline
from transforms.arguments import is_array, place, rows
from transforms.derive import call
from transforms.graph import Node
from transforms.placement import WHOLE, Placement, Tiled, TileError
from transforms.program import Options, Program
from transforms.propagate import analyse
from transforms.refused import explained
from transforms.rules import shard
from transforms.spread import shares


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function at certain shapes: its program, what it closes over, and how its results are put together."""

    program: Program
    consts: Sequence[Any]
    structure: Any
    static: Any

    def run(self, arrays: Sequence[Any]) -> Any:
        results = call(self.program, *self.consts, *arrays)
        return eqx.combine(jax.tree.unflatten(self.structure, results), self.static)


@dataclasses.dataclass(frozen=True)
class Tracer:
    """What `tile` was told, and the calls that it has planned so far; `options` are further fields of `Options`."""

    fn: Callable[..., Any]
    axis: Any
    n: int | str | None
    size: int | None
    budget: int | None
    has_aux: bool
    in_sharding: Any
    options: dict[str, Any]
    cache: dict[Any, Traced] = dataclasses.field(default_factory=dict)

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], whole: int = 0) -> Any:
        """Trace and plan the call, and run it."""
        traced, arrays = self.trace(args, kwargs, whole)
        return traced.run(arrays)

    def trace(self, args: Sequence[Any], kwargs: dict[str, Any], whole: int = 0) -> tuple[Traced, list[Any]]:
        """Trace and plan the call, or find that it was before; and the arrays among its arguments.

        The first `whole` arguments are not cut, whatever `axis` says.
        """
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        arrays = [x for x in leaves if is_array(x)]
        static = [None if is_array(x) else (type(x), x) for x in leaves]
        placements, total = place(self.fn, self.axis, args, kwargs, whole)
        key = (tree, tuple(static), tuple(map(_aval, arrays)), tuple(placements), *_surroundings())
        try:
            if (known := self.cache.get(key)) is not None:
                return known, arrays
        except TypeError:  # a static leaf cannot be hashed
            return self._trace(leaves, tree, placements, total), arrays
        traced = self._trace(leaves, tree, placements, total)
        if not any(isinstance(c, JaxTracer) for c in traced.consts):
            self.cache[key] = traced
        return traced, arrays

    def _trace(self, leaves: Sequence[Any], tree: Any, placements: Sequence[Placement], total: int) -> Traced:
        self._check_length(total)
        found: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            args, kwargs = jax.tree.unflatten(tree, [next(given) if is_array(x) else x for x in leaves])
            result = self.fn(*args, **kwargs)
            dynamic, found["static"] = eqx.partition(result, is_array)
            if self.has_aux:
                dynamic = _stop_aux(result, dynamic)
            outs, found["tree"] = jax.tree.flatten(dynamic)
            return outs

        with explained():
            closed = jax.make_jaxpr(flat)(*(x for x in leaves if is_array(x)))
        jaxpr = closed.jaxpr
        jaxpr = ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), ())
        everywhere = (*(WHOLE,) * len(closed.consts), *placements)

        shares = spread_over(jaxpr, everywhere, Options(total=total, size=total, **self.options))
        everywhere = split(everywhere, shares)
        total //= shares  # the mesh divides it: each device walks its own share

        def make(size: int) -> Program:
            return Program(jaxpr, everywhere, Options(total=total, size=size, shares=shares, **self.options))

        if self.n == "auto":
            assert self.budget is not None
            program = budget.fewest(make, total, rows(leaves, placements), self.budget)
        elif self.size is not None:
            program = make(min(total, max(1, self.size // shares)))
        else:
            assert isinstance(self.n, int)
            program = make(-(-total // self.n))
        return Traced(program, closed.consts, found["tree"], found["static"])

    def _check_length(self, total: int) -> None:
        if total == 0:
            raise ValueError("tile: the axis to cut is 0 long, so it has no tiles. Pass arrays that are not empty.")
        if isinstance(self.n, int) and self.n > total:
            raise ValueError(
                f"tile: n={self.n} tiles of an axis that is {total} long. Pass n <= {total}, or size=, a tile's length."
            )


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
        except (Along, Inline, TileError):
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
    counts = [(p, shard.share(node, node.params["in_specs"][i], p.dim)) for i, p in places if isinstance(p, Tiled)]
    return [n for p, n in counts if p.major % n]


def _surroundings() -> tuple[Any, ...]:
    """What else a trace depends on: the widest float, and the mesh."""
    return jax.dtypes.canonicalize_dtype(float), jax.sharding.get_abstract_mesh()


def _stop_aux(result: Any, dynamic: Any) -> Any:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"tile: with has_aux=True the function must return a pair (out, aux), not {type(result)}.")
    return dynamic[0], jax.tree.map(jax.lax.stop_gradient, dynamic[1])


def _aval(array: Any) -> Any:
    """What a trace depends on: shape, dtype, weak type and sharding type."""
    return array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
