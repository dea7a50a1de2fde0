"""What `tile` did and why: loops, what they carry and repeat, what was completed, and what all of it costs."""

from __future__ import annotations

import dataclasses
import functools
import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from transforms.layout import axes, devices, like, named
from transforms.tiling.analysis.limits import human
from transforms.tiling.autodiff.program import Program
from transforms.tiling.frontend.flatten import flatten
from transforms.tiling.ir.effects import sources
from transforms.tiling.ir.errors import TileError
from transforms.tiling.ir.facts import Analysis, Outlined
from transforms.tiling.ir.graph import Graph, Node, Value, describe, elements, nbytes
from transforms.tiling.ir.loops import Loop
from transforms.tiling.ir.placement import Partial, Placement, Span, Tiled
from transforms.tiling.ir.walks import flops
from transforms.tiling.mesh.weight_gather import gathered
from transforms.tiling.report.memory import temp_bytes
from transforms.tiling.report.table import describe_run, flops_text, totals
from transforms.tiling.schedule import runs_once


@dataclasses.dataclass(frozen=True)
class Carry:
    """A result that a loop fills: the array, how the tiles make it up, its bytes on each device.

    The devices along the mesh axes `apart` hold parts of it, which are summed after the loop.
    """

    array: str
    placement: Placement
    nbytes: int
    apart: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A weight brought into the form `spec` before a loop, for the products that read it; its bytes on each device."""

    array: str
    spec: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """What a loop computes although an earlier one did: `array` is the whole of it, over all tiles."""

    primitive: str
    array: str
    where: str
    flops: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Completed:
    """A cut array that is made whole, for the operation `primitive` at `where`, which `reason`."""

    array: str
    placement: Placement
    nbytes: int
    primitive: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.array} {self.placement} for `{self.primitive}` at {self.where}: it {self.reason}"


@dataclasses.dataclass(frozen=True)
class SideEffect:
    """A callback or the like, at `where`: it runs once in all, or once whenever a tile comes by (`tiles`)."""

    primitive: str
    where: str
    tiles: bool


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """One loop over the tiles, from the last to the first if `reverse`.

    `equations` counts those of its body; `flops` are those of its matrix products, over all tiles and devices;
    `largest` is the largest array that one tile holds, in bytes on each device.
    """

    tiles: int
    equations: int
    flops: int
    largest: int
    carries: tuple[Carry, ...]
    recomputed: tuple[Recomputed, ...]
    gathered: tuple[Gathered, ...] = ()
    reverse: bool = False


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """One way to run the function, tiled, and the same untiled.

    `temp` and `untiled_temp` estimate the temporary memory of the compiled program, in bytes (`report.memory`), which
    `compile` asks the compiler for; `largest` and `untiled_largest` are the bytes of the largest array inside; `flops`
    and `untiled_flops` are of matrix products.
    `passes` names the rewrites that led to the loops, in order (`transforms.tiling.passes.driver`).
    """

    loops: tuple[LoopPlan, ...]
    completed: tuple[Completed, ...]
    flops: int
    untiled_flops: int
    untiled_largest: int
    temp: int
    untiled_temp: int
    effects: tuple[SideEffect, ...] = ()
    passes: tuple[str, ...] = ()
    run: Any = dataclasses.field(default=None, repr=False, compare=False)

    def compile(self, untiled: bool = False) -> int:
        """Compile it, and return the temporary memory that it takes then, in bytes on each device."""
        return self.run.compile(untiled)

    @property
    def largest(self) -> int:
        return max((loop.largest for loop in self.loops), default=self.untiled_largest)

    @property
    def carried(self) -> int:
        return max((sum(c.nbytes for c in loop.carries) for loop in self.loops), default=0)


COLUMNS: dict[str, Callable[[RunPlan], tuple[str, str]]] = {  # what the table says of each, tiled and untiled
    "temporary memory, estimated": lambda p: (human(p.temp), human(p.untiled_temp)),
    "largest array inside": lambda p: (human(p.largest), human(p.untiled_largest)),
    "matrix products": lambda p: (flops_text(p.flops), flops_text(p.untiled_flops)),
}


@dataclasses.dataclass(frozen=True, repr=False)
class TilePlan:
    """What `tile` does with a call. It shows itself as a table, printed or as the last line of a notebook's cell.

    Attributes:
        length, tiles, size: of the cut axis, how many tiles it has, and how long the first ones are; on each device.
        value: the function without derivatives.
        gradient: the function with the gradients of all its inexact inputs; None where it has none to give.
        shares: over how many devices the cut axis is spread: each walks its own share.
    """

    length: int
    tiles: int
    size: int
    value: RunPlan
    gradient: RunPlan | None
    shares: int = 1

    def __str__(self) -> str:
        last = self.length - (self.tiles - 1) * self.size
        short = "" if last == self.size else f", the last {last}"
        where = "" if self.shares == 1 else f" on each of {self.shares} devices"
        own = self.tiles == 1 and not self.value.loops
        count = "one tile: the function as it is" if own else f"{self.tiles} tiles of {self.size}{short}"
        lines = [f"{self.length} steps in {count}{where}", ""]
        found = {"value": self.value, "value and gradient": self.gradient}
        known = {name: plan for name, plan in found.items() if plan is not None}
        lines += totals(known, COLUMNS)
        for name, plan in known.items():
            lines += ["", *describe_run(name, plan)]
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of the rewrites that led to the value's loops, then of those that led to the gradient's."""
        return (*self.value.passes, *(self.gradient.passes if self.gradient is not None else ()))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


# ------------------------------------------------------------------------------------------------------------- planning


def explain(program: Program) -> TilePlan:
    """Describe a program, and its gradient if it has one, without running either."""
    options, value, back = program.options, value_run(program), gradient_run(program)
    size = max((p.plan.options.size for p in value.programs), default=options.size)
    tiles = max(1, -(-options.total // size))
    gradient = None if back is None else _run_plan(back)
    return TilePlan(options.total, tiles, size, _run_plan(value), gradient, options.shares)


def _run_plan(run: Run) -> RunPlan:
    loops, completed, effects, total = [], [], [], 0
    before: set[object] = set()  # what the programs before this one compute: not the same nodes, but the same lines
    for program in run.programs:
        plan, seen = program.plan, set()
        for loop in plan.loops:
            if loop.steps or loop.updates:
                loops.append(_loop(program, loop, [n for n in loop.nodes if n in seen or _key(n) in before]))
                seen.update(loop.nodes)
        before.update(map(_key, seen))
        completed += [
            Completed(repr(c.value), c.placement, c.value.nbytes, c.node.name, c.node.where, c.reason)
            for c in plan.analysis.completions
            if isinstance(c.placement, Tiled)
        ]
        effects += [e for n in plan.analysis.graph.nodes if n.effects for e in _effects(n, plan.analysis)]
        total += plan.flops + sum(flops(n) for n in plan.analysis.graph.nodes if n not in seen)
    untiled = flatten(run.untiled)
    total = total if run.programs else sum(map(flops, untiled.nodes))
    return RunPlan(
        loops=tuple(loops),
        completed=tuple(dict.fromkeys(completed)),
        flops=total,
        untiled_flops=sum(map(flops, untiled.nodes)),
        untiled_largest=_largest(untiled),
        temp=temp_bytes(run.tiled),
        untiled_temp=temp_bytes(run.untiled),
        effects=tuple(dict.fromkeys(effects)),
        passes=tuple(name for program in run.programs for name in program.plan.passes),
        run=run,
    )


def _effects(node: Node, analysis: Analysis) -> list[SideEffect]:
    tiles = isinstance(analysis.moves[node], Outlined) or not runs_once(analysis, node)
    return [SideEffect(name, where, tiles) for name, where in sources(node.name, node.where, node.params)]


def _key(node: Node) -> tuple[str, str, str]:
    return node.name, node.where, str(node.outputs)


def _loop(program: Program, loop: Loop, again: Iterable[Node]) -> LoopPlan:
    """Describe one loop, `again` being those of its nodes that earlier ones run too."""
    options, analysis = program.options, program.plan.analysis
    span = options.span._replace(length=program.plan.options.size)
    if loop.light(analysis):
        span = span._replace(length=span.total)
    sizes = [nbytes(v.aval, span.local_shape(v.shape, p)) for s in loop.steps for v, p in s.keys]
    return LoopPlan(
        tiles=-(-span.total // span.length),
        equations=len(loop.nodes),
        flops=sum(map(flops, loop.nodes)),
        largest=max(sizes, default=0),
        carries=tuple(_carry(u.value, analysis, span) for u in loop.updates),
        recomputed=tuple(map(_recomputed, again)),
        gathered=tuple(map(_gathered, gathered(loop, analysis.apart) if options.sync == "once" else ())),
        reverse=loop.reverse,
    )


def _gathered(found: tuple[Value, PartitionSpec, Any]) -> Gathered:
    value, spec, dtype = found
    sharding = named(value.aval)
    assert sharding is not None
    aval = ShapedArray(value.shape, dtype, sharding=NamedSharding(sharding.mesh, spec))
    return Gathered(describe(aval), str(spec), nbytes(aval))


def _recomputed(node: Node) -> Recomputed:
    value = max(node.outputs, key=lambda v: v.nbytes, default=None)
    array, size = (repr(value), value.nbytes) if value is not None else ("", 0)
    return Recomputed(node.name, array, node.where, flops(node), size)


def _carry(value: Value, analysis: Analysis, span: Span) -> Carry:
    placement, apart = analysis.fact(value).placement, analysis.apart[value].axes
    dtype = span.wide(value.dtype) if isinstance(placement, Partial) else value.dtype
    # Not cut until it is summed.
    whole = [a for d in range(len(value.shape)) for a in axes(value.aval, d) if a in apart]
    sharding = named(value.aval)
    copies = math.prod(sharding.mesh.shape[a] for a in whole) if sharding is not None else 1
    size = elements(value.shape) * getattr(dtype, "itemsize", 4) * copies // devices(value.aval)
    return Carry(repr(value), placement, size, tuple(sorted(apart)))


def _largest(graph: Graph) -> int:
    edges = {*graph.inputs, *graph.outputs}
    return max((v.nbytes for n in graph.nodes for v in n.outputs if v not in edges), default=0)


# ------------------------------------------------------------ a function's value, and its gradient, as one program each


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to run it: the tiled programs that do so, one after the other; all of it as one function, or untiled."""

    programs: tuple[Program, ...]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    avals: Sequence[Any]  # of the arguments of both

    def compile(self, untiled: bool = False) -> int:
        """Compile it, and return the temporary memory that it takes then, in bytes on each device."""
        compiled: Any = jax.jit(self.plain if untiled else self.run).lower(*map(like, self.avals)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    @functools.cached_property
    def tiled(self) -> ClosedJaxpr:
        return self._trace(self.run)

    @functools.cached_property
    def untiled(self) -> ClosedJaxpr:
        return self._trace(self.plain)

    @property
    def has_result(self) -> bool:
        """Whether JAX can trace it untiled: it has no derivative of some functions. A refusal is told where it runs."""
        try:
            return self.untiled is not None
        except (ValueError, NotImplementedError) as error:
            return isinstance(error, TileError)

    def _trace(self, fn: Callable[..., Any]) -> ClosedJaxpr:
        return jax.make_jaxpr(fn)(*(like(a) for a in self.avals))


def value_run(program: Program) -> Run:
    """The function without derivatives."""
    plain = jaxpr_as_fun(program.closed)
    if program.is_one_tile:
        return Run((), plain, plain, program.closed.in_avals)
    return Run((program,), program.run, plain, program.closed.in_avals)


def gradient_run(program: Program) -> Run | None:
    """The function with the gradients of all its inexact inputs; None where it has none to give.

    Those of one scalar; otherwise the cotangents of the results that have any are further arguments.
    """
    avals = program.closed.in_avals
    outs, active = program.differentiable([i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)])
    if not active:
        return None
    plain, scalar = functools.partial(_plain, program, active, outs), program.is_scalar(outs, active)
    cotangents = [] if scalar else [program.closed.out_avals[i] for i in outs]
    untiled = Run((), plain, plain, [*avals, *cotangents])
    if program.is_one_tile:
        return untiled if untiled.has_result else None
    try:
        return _gradient(program, untiled, active, outs, scalar)
    except (ValueError, NotImplementedError):
        if untiled.has_result:
            raise
        return None  # JAX has none


def _gradient(program: Program, untiled: Run, active: Sequence[int], outs: Sequence[int], scalar: bool) -> Run:
    avals, plain = program.closed.in_avals, untiled.plain
    if not program.in_one_pass(outs, active):
        back = program.cotangent(tuple(active), tuple(outs))
        unit = [jnp.ones((), program.closed.out_avals[outs[0]].dtype)] if scalar else []
        forward = program.forward(tuple(active))
        both = lambda *args: _both(program, forward, back)(*args, *unit)
        return Run((forward, back), both, plain, untiled.avals)
    joint, combine = program.gradient(tuple(active), outs[0])

    def run(*args: Any) -> Any:
        results, found = combine(joint.run(*args))
        return results, [g.astype(avals[i].dtype) for i, g in zip(active, found, strict=True)]

    return Run((joint,), run, plain, avals)


def _both(program: Program, forward: Program, back: Program) -> Callable[..., Any]:
    """A program's forward and its backward pass, from the inputs and the cotangents."""
    inputs, outputs = len(program.closed.in_avals), len(program.closed.out_avals)

    def run(*args: Any) -> Any:
        found = forward.run(*args[:inputs])
        return found[:outputs], back.run(*args[:inputs], *found[outputs:], *args[inputs:])

    return run


def _plain(program: Program, active: Sequence[int], outs: Sequence[int], *args: Any) -> Any:
    """The results of the untiled function, and its gradients."""
    count = len(program.closed.in_avals)
    values, vjp, results = jax.vjp(*program.chosen(args[:count], active, outs), has_aux=True)
    return results, vjp(list(args[count:]) or [jnp.ones_like(v) for v in values])


# ----------------------------------------------------------------------------------- the fewest tiles that fit a budget

# Fewer rows in a matrix product and it runs slower than it need.
ROWS = 64

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read_budget(budget: Any) -> int:
    """Return a number of bytes: of an int, or of text such as "2GiB" (1024**3 each) or "500 MB" (1000**2).

    Raises:
        TypeError: neither an int nor text.
        ValueError: not positive, or no number of bytes.
    """
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)b\s*", budget, re.IGNORECASE)
        if found is None:
            raise ValueError(
                f'tile: budget={budget!r} is no number of bytes; write an int, or such as "2GiB" or "500MB".'
            )
        number, unit, binary = found.groups()
        budget = int(float(number) * (1024 if binary else 1000) ** UNITS[unit.lower()])
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f'tile: budget must be a number of bytes, an int or such as "2GiB", not {budget!r}.')
    if budget < 1:
        raise ValueError(f"tile: budget={budget}, but it must be at least 1 byte.")
    return budget


def fewest(make: Callable[[int], Program], total: int, rows: int, budget: int) -> Program:
    """Return the program with the fewest tiles whose temporary memory, gradients included, is within `budget`.

    Args:
        make: the program whose tiles are so long.
        total: length of the cut axis.
        rows: rows of a matrix in each step along it; a tile has at least `ROWS`, unless the axis is shorter.
        budget: bytes.

    Raises:
        ValueError: the smallest tiles take more.
    """
    most = max(1, total // -(-ROWS // rows))
    made: dict[int, Program] = {}
    taken: dict[int, int] = {}

    def fits(n: int, ask: bool = False) -> bool:
        made[n] = make(-(-total // n))
        runs = [run for run in (value_run(made[n]), gradient_run(made[n])) if run is not None]
        taken[n] = max(run.compile() if ask else temp_bytes(run.tiled) for run in runs)
        return taken[n] <= budget

    if fits(1):
        return made[1]
    # Before it refuses, the compiler is asked: it may need less. Not on a mesh, whose devices nobody may have yet.
    if not fits(most) and jax.sharding.get_abstract_mesh().empty and fits(most, ask=True):
        return made[most]
    if taken[most] > budget:
        n = min(taken, key=lambda n: taken[n])
        raise ValueError(
            f'tile: n="auto" cannot keep within budget={human(budget)}: the smallest possible is {human(taken[n])} of '
            f"temporary memory, gradients included, with {n} tiles of {-(-total // n)} ({human(taken[1])} untiled).\n"
            "  Raise the budget, or pass n= or size=: they are obeyed."
        )
    low, high = 1, most
    # First of counts that divide the axis: the rest of any other is a loop of its own, and may take as much again.
    for counts in ([n for n in range(2, most) if total % n == 0], range(2, most)):
        while between := [n for n in counts if low < n < high]:
            n = between[len(between) // 2]
            low, high = (low, n) if fits(n) else (n, high)
    return made[high]
