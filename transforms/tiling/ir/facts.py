"""What is known of a graph whose axis is cut: where each value stands, from which loop on, what had to be whole."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from transforms.layout import Apart, Held
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.placement import ALONE, WHOLE, Move, Placement, Reach, Tiled, Whole
from transforms.tiling.primitives import has


class Fact(NamedTuple):
    """What is known of one value.

    `stage`: the first loop that can compute it; of a Whole value, that which comes after what it needs. `reach`: how
    many rows beside the tile it takes. `fixed`: the equation for which a cut value is made for the tile alone.
    `varies`: Whole, but it changes from tile to tile. `direction`: whether only loops that go from the last tile to the
    first can form it (or only the others), if that matters. `moving`: it depends on the tiles before.
    """

    placement: Placement
    stage: int = 0
    reach: Reach = ALONE
    fixed: Node | None = None
    varies: bool = False
    direction: bool | None = None
    moving: bool = False


OUTSIDE = Fact(WHOLE)  # what is known of constants


@dataclasses.dataclass(frozen=True)
class Completion:
    """`value` is stored whole for `node`: `reason` reads after the primitive's name."""

    value: Value
    node: Node
    reason: str
    placement: Placement

    def __str__(self) -> str:
        return f"{self.value} {self.placement} for {self.node}: it {self.reason}"


@dataclasses.dataclass(frozen=True)
class Region(Move):
    """How an equation with bodies moves, the analyses that this was read off, and what devices hold parts of."""

    bodies: tuple[Analysis, ...] = ()
    apart: tuple[Apart, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outlined(Move):
    """An equation that runs on whole operands, outside the loops, its body a tiled program of its own.

    Its results are stored whole, but cut ones are still read slice by slice.
    """

    programs: tuple[Any, ...] = ()
    reads: tuple[int, ...] = ()  # the operands that it needs
    run: Callable[[list[Any]], list[Any]] = lambda values: values  # None stands for the others
    constants: tuple[int, ...] = ()  # those of `reads` that stay the same from step to step
    reason: str = "runs on whole operands, its body tile by tile"  # why the operands are whole


def grain(move: Move) -> int:
    """Of how many rows tiles must hold a multiple: groups that have become one element stay together."""
    groups = [p.group for p in (*move.ins, *move.outs) if isinstance(p, Tiled)]
    return math.lcm(*groups, *(b.grain for b in move.bodies)) if isinstance(move, Region) else math.lcm(*groups)


@dataclasses.dataclass
class Analysis:
    """What `propagate` found out about `graph`."""

    graph: Graph
    facts: dict[Value, Fact]
    limits: Any  # `analysis.limits.Limits`; None inside a body
    moves: dict[Node, Move] = dataclasses.field(default_factory=dict)
    completions: list[Completion] = dataclasses.field(default_factory=list)
    # Operands (by number) that are read after they were completed, and why.
    completed: dict[tuple[Node, int], str] = dataclasses.field(default_factory=dict)
    resident: set[Value] = dataclasses.field(default_factory=set)  # cut values that are whole before the loops
    # Of the loops that have an order, whether they reverse it.
    backward: dict[int, bool] = dataclasses.field(default_factory=dict)
    apart: Held = dataclasses.field(default_factory=Held)  # sums that each device holds a part of
    typed: dict[Any, str | None] = dataclasses.field(default_factory=dict)  # of `analysis.fits`
    flowing: set[Value] | None = None  # in a region: the values that may be apart
    grain: int = 1  # tiles hold a multiple of so many rows

    @functools.cached_property
    def inputs(self) -> frozenset[Value]:
        return frozenset(self.graph.inputs)

    @functools.cached_property
    def used(self) -> set[Value]:
        """The values that an output or another node reads."""
        return {v for n in self.graph.nodes for v in n.inputs}.union(self.graph.outputs)

    def fact(self, value: Value) -> Fact:
        return self.facts.get(value, OUTSIDE)

    def is_cut(self, value: Value) -> bool:
        return isinstance(self.fact(value).placement, Tiled)

    def is_whole(self, value: Value) -> bool:
        return isinstance(self.fact(value).placement, Whole)

    def is_there(self, value: Value) -> bool:
        """Whether all of a value is there before the loops, whether or not it is cut."""
        return value in self.inputs or value in self.resident

    @functools.cached_property
    def added(self) -> dict[Value, list[Value]]:
        """What each value of the graph is added to."""
        found: dict[Value, list[Value]] = {}
        for node in self.graph.nodes:
            for value in node.inputs if has(node.name, "adding") else ():
                found.setdefault(value, []).extend(node.inputs)
        return found

    def turned(self, stage: int, backward: bool) -> int:
        """The first loop from `stage` on that runs, or from now on will run, in a direction."""
        while self.backward.setdefault(stage, backward) != backward:
            stage += 1
        return stage

    def needs(self, node: Node) -> list[Value]:
        """The operands that a node, run on whole values, reads."""
        move = self.moves.get(node)
        return [node.inputs[i] for i in move.reads] if isinstance(move, Outlined) else node.inputs

    def last_loop(self, value: Value) -> int:
        """The last loop that has to run for `value` to be whole."""
        fact = self.fact(value)
        return fact.stage - (isinstance(fact.placement, Whole) or value in self.resident)
