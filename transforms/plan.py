"""What `tile` did and why: loops, what they carry and repeat, what was completed, bytes and FLOPs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax.numpy as jnp

from transforms.graph import Graph, Node, Value, flops
from transforms.loops import Loop
from transforms.placement import Span, Tiled
from transforms.program import Program
from transforms.propagate import human


@dataclasses.dataclass(frozen=True)
class Carry:
    """A result that a loop fills: the array, where it stands, and its bytes."""

    array: str
    placement: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """One loop over the tiles.

    `equations` are those of its body, `recomputed` the ones that an earlier loop runs too; `flops` are those of its
    matrix products, over all tiles; `largest` is the largest array that one tile holds, in bytes.
    """

    tiles: int
    equations: int
    recomputed: int
    flops: int
    largest: int
    carries: tuple[Carry, ...]


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """One run of a tiled program: its loops, what had to be completed and why, and the untiled program beside it."""

    loops: tuple[LoopPlan, ...]
    completed: tuple[str, ...]
    flops: int
    untiled_flops: int
    untiled_largest: int

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
        lines = [f"an axis of {self.length} in {self.tiles} tiles of {self.size}{short}"]
        for name, plan in (("value", self.value), ("value and gradient", self.gradient)):
            if plan is not None:
                lines += _describe(name, plan)
        return "\n".join(lines)


def _describe(name: str, plan: PassPlan) -> list[str]:
    ratio = f" ({plan.flops / plan.untiled_flops:.2f}x)" if plan.untiled_flops else ""
    lines = [
        f"{name}:",
        f"  matrix products {_flops(plan.flops)}, untiled {_flops(plan.untiled_flops)}{ratio}",
        f"  largest array inside {human(plan.largest)}, untiled {human(plan.untiled_largest)}; "
        f"results carried {human(plan.carried)}",
    ]
    for i, loop in enumerate(plan.loops):
        again = f", {loop.recomputed} of them again" if loop.recomputed else ""
        passes = "pass" if loop.tiles == 1 else "tiles"
        lines.append(f"  loop {i}: {loop.tiles} {passes}, {loop.equations} equations{again}, {_flops(loop.flops)}")
        lines += [f"    carries {c.array} {c.placement}, {human(c.nbytes)}" for c in loop.carries]
    lines += [f"  completed {c}" for c in plan.completed]
    return lines


def _flops(count: float | int) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.4g} {unit}FLOP"
        count /= 1000
    return f"{count:.4g} PFLOP"


def explain(program: Program) -> TilePlan:
    """Describe a program, and its gradient if it has one, without running either."""
    options = program.options
    inputs = [i for i, a in enumerate(program.closed.in_avals) if jnp.issubdtype(a.dtype, jnp.inexact)]
    outs, active = program.differentiable(inputs)
    gradient = None
    if active:
        scalar = program.in_one_pass(outs, active)
        chosen = tuple(active)
        back = program.gradient(chosen, outs[0]).program if scalar else program.cotangent(chosen, tuple(outs))
        gradient = _pass(back)
    tiles = -(-options.total // options.size)
    return TilePlan(options.total, tiles, options.size, _pass(program), gradient)


def _pass(program: Program) -> PassPlan:
    plan, options = program.plan, program.options
    graph = plan.analysis.graph
    span = Span(0, options.size, options.total, options.accumulate)
    seen: set[Node] = set()
    loops = tuple(_loop(program, loop, span, seen) for loop in plan.loops if loop.steps or loop.updates)
    inside = {n for loop in plan.loops for n in loop.nodes}
    outside = sum(flops(n) for n in graph.nodes if n not in inside)
    return PassPlan(
        loops=loops,
        completed=tuple(str(c) for c in plan.analysis.completions if isinstance(c.placement, Tiled)),
        flops=sum(loop.flops for loop in loops) + outside,
        untiled_flops=sum(map(flops, graph.nodes)),
        untiled_largest=_largest(graph),
    )


def _loop(program: Program, loop: Loop, span: Span, seen: set[Node]) -> LoopPlan:
    fact = program.plan.analysis.fact
    nodes = loop.nodes
    again = sum(n in seen for n in nodes)
    seen.update(nodes)
    if loop.light(program.plan.analysis):
        span = span._replace(length=span.total)
    sizes = [_bytes(span.local_shape(v.shape, p), v) for s in loop.steps for v, p in s.keys]
    carries = tuple(_carry(u.value, fact(u.value).placement, span) for u in loop.updates)
    tiles = -(-span.total // span.length)
    return LoopPlan(tiles, len(nodes), again, sum(map(flops, nodes)), max(sizes, default=0), carries)


def _carry(value: Value, placement: object, span: Span) -> Carry:
    dtype = value.dtype if isinstance(placement, Tiled) else span.wide(value.dtype)
    return Carry(repr(value), str(placement), math.prod(value.shape) * getattr(dtype, "itemsize", 4))


def _bytes(shape: Iterable[int], value: Value) -> int:
    return math.prod(shape) * getattr(value.dtype, "itemsize", 4)


def _largest(graph: Graph) -> int:
    edges = {*graph.inputs, *graph.outputs}
    return max((v.nbytes for n in graph.nodes for v in n.outputs if v not in edges), default=0)
