"""What `tile` did and why: loops, what they carry and repeat, what was completed, and what all of it costs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from transforms import passes
from transforms.estimate import temp_bytes
from transforms.graph import Graph, Node, Value, flatten, flops
from transforms.limits import human
from transforms.loops import Loop
from transforms.placement import Partial, Placement, Span, Tiled
from transforms.program import Program

WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Carry:
    """A result that a loop fills: the array, how the tiles make it up, and its bytes."""

    array: str
    placement: Placement
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
class LoopPlan:
    """One loop over the tiles.

    `equations` counts those of its body; `flops` are those of its matrix products, over all tiles; `largest` is the
    largest array that one tile holds, in bytes.
    """

    tiles: int
    equations: int
    flops: int
    largest: int
    carries: tuple[Carry, ...]
    recomputed: tuple[Recomputed, ...]


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """One way to run the function, tiled, and the same untiled.

    `temp` and `untiled_temp` estimate the temporary memory of the compiled program, in bytes; `largest` and
    `untiled_largest` are the bytes of the largest array inside; `flops` and `untiled_flops` are of matrix products.
    """

    loops: tuple[LoopPlan, ...]
    completed: tuple[Completed, ...]
    flops: int
    untiled_flops: int
    untiled_largest: int
    temp: int
    untiled_temp: int

    @property
    def largest(self) -> int:
        return max((loop.largest for loop in self.loops), default=0)

    @property
    def carried(self) -> int:
        return max((sum(c.nbytes for c in loop.carries) for loop in self.loops), default=0)


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """What `tile` does with a call. `print` it.

    Attributes:
        length, tiles, size: of the cut axis, how many tiles it has, and how long the first ones are.
        value: the function without derivatives.
        gradient: the function with the gradients of all its inexact inputs; None where it has none to give.
    """

    length: int
    tiles: int
    size: int
    value: PassPlan
    gradient: PassPlan | None

    def __str__(self) -> str:
        last = self.length - (self.tiles - 1) * self.size
        short = "" if last == self.size else f", the last {last}"
        lines = [f"{self.length} steps in {self.tiles} tiles of {self.size}{short}", ""]
        found = {"value": self.value, "value and gradient": self.gradient}
        known = {name: plan for name, plan in found.items() if plan is not None}
        lines += _totals(known)
        for name, plan in known.items():
            lines += ["", *_describe(name, plan)]
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- printing


def _totals(plans: dict[str, PassPlan]) -> list[str]:
    """Tiled and untiled, side by side."""
    rows = {
        "temporary memory, estimated": [(human(p.temp), human(p.untiled_temp)) for p in plans.values()],
        "largest array inside": [(human(p.largest), human(p.untiled_largest)) for p in plans.values()],
        "matrix products": [(_flops(p.flops), _flops(p.untiled_flops)) for p in plans.values()],
    }
    lines = [" " * 28 + "".join(f"{name:>28}" for name in plans)]
    lines.append(" " * 28 + "".join(f"{'tiled':>14}{'untiled':>14}" for _ in plans))
    return lines + [f"{k:28}" + "".join(f"{a:>14}{b:>14}" for a, b in v) for k, v in rows.items()]


def _describe(name: str, plan: PassPlan) -> Iterator[str]:
    yield name if plan.loops else f"{name}: no loops, all of it is whole"
    for i, loop in enumerate(plan.loops, 1):
        tiles = "all at once" if loop.tiles == 1 else f"{loop.tiles} tiles"
        size = f"{loop.equations} equations, {_flops(loop.flops)}, largest array {human(loop.largest)}"
        yield f"  loop {i} of {len(plan.loops)}: {tiles}, {size}"
        yield from _table("carries", [(c.array, human(c.nbytes), _made(c.placement)) for c in loop.carries])
        again = sorted(loop.recomputed, key=lambda r: (-r.flops, -r.nbytes))
        rows = [(f"{r.primitive} {r.array}", _flops(r.flops) if r.flops else "", short(r.where)) for r in again]
        rest = [(f"and {len(rows) - SHOWN} smaller", "", "")] if len(rows) > SHOWN else []
        yield from _table("recomputes", rows[:SHOWN] + rest)
    if plan.completed:
        yield "  made whole, for an operation that needs it whole"
    for c in plan.completed:
        yield _fit(f"    {c.array}, {human(c.nbytes)}, for `{c.primitive}` at {short(c.where)}:")
        yield _fit(f"      it {c.reason}")


SHOWN = 4  # of what a loop computes again, the largest


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    first = max((len(a) for a, _, _ in rows), default=0)
    for i, (a, b, c) in enumerate(rows):
        yield _fit(f"    {title if i == 0 else '':12}{a:{first}}  {b:>11}  {c}".rstrip())


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _made(placement: Placement) -> str:
    if isinstance(placement, Tiled):
        return f"a slice of dimension {placement.dim} from each tile"
    return f"{placement.op} over the tiles" if isinstance(placement, Partial) else "whole"


def short(where: str) -> str:
    """A source line without the way to its folder."""
    return re.sub(r"^.*/(?=[^/]*/[^/]*$)", "", where)


def _flops(count: float | int) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.4g} {unit}FLOP"
        count /= 1000
    return f"{count:.4g} PFLOP"


# ------------------------------------------------------------------------------------------------------------- planning


def explain(program: Program) -> TilePlan:
    """Describe a program, and its gradient if it has one, without running either."""
    options, back = program.options, passes.gradient(program)
    tiles = -(-options.total // options.size)
    gradient = None if back is None else _pass(back)
    return TilePlan(options.total, tiles, options.size, _pass(passes.value(program)), gradient)


def _pass(run: passes.Pass) -> PassPlan:
    loops, completed, total = [], [], 0
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
        total += plan.flops + sum(flops(n) for n in plan.analysis.graph.nodes if n not in seen)
    untiled = flatten(run.untiled)
    return PassPlan(
        loops=tuple(loops),
        completed=tuple(dict.fromkeys(completed)),
        flops=total,
        untiled_flops=sum(map(flops, untiled.nodes)),
        untiled_largest=_largest(untiled),
        temp=temp_bytes(run.tiled),
        untiled_temp=temp_bytes(run.untiled),
    )


def _key(node: Node) -> tuple[str, str, str]:
    return node.name, node.where, str(node.outputs)


def _loop(program: Program, loop: Loop, again: Iterable[Node]) -> LoopPlan:
    """Describe one loop, `again` being those of its nodes that earlier ones run too."""
    options, analysis = program.options, program.plan.analysis
    span = Span(0, options.size, options.total, options.accumulate)
    if loop.light(analysis):
        span = span._replace(length=span.total)
    sizes = [_bytes(span.local_shape(v.shape, p), v) for s in loop.steps for v, p in s.keys]
    return LoopPlan(
        tiles=-(-span.total // span.length),
        equations=len(loop.nodes),
        flops=sum(map(flops, loop.nodes)),
        largest=max(sizes, default=0),
        carries=tuple(_carry(u.value, analysis.fact(u.value).placement, span) for u in loop.updates),
        recomputed=tuple(map(_recomputed, again)),
    )


def _recomputed(node: Node) -> Recomputed:
    value = max(node.outputs, key=lambda v: v.nbytes, default=None)
    array, size = (repr(value), value.nbytes) if value is not None else ("", 0)
    return Recomputed(node.name, array, node.where, flops(node), size)


def _carry(value: Value, placement: Placement, span: Span) -> Carry:
    dtype = value.dtype if isinstance(placement, Tiled) else span.wide(value.dtype)
    return Carry(repr(value), placement, math.prod(value.shape) * getattr(dtype, "itemsize", 4))


def _bytes(shape: Iterable[int], value: Value) -> int:
    return math.prod(shape) * getattr(value.dtype, "itemsize", 4)


def _largest(graph: Graph) -> int:
    edges = {*graph.inputs, *graph.outputs}
    return max((v.nbytes for n in graph.nodes for v in n.outputs if v not in edges), default=0)
