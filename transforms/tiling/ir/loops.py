"""What a schedule is made of: loops over the tiles, their steps, and how results are accumulated."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.placement import ALONE, Move, Partial, Placement, Reach
from transforms.tiling.ir.terms import Term
from transforms.tiling.ir.walks import flops
from transforms.tiling.primitives import has

How = Literal["whole", "slice", "once", "tile"]


class Ref(NamedTuple):
    """An operand as a loop reads it.

    `whole`: the whole value; `slice`: this tile of the whole value; `once`: the whole value on the first tile and 0 on
    the others; `tile`: what a step of this loop computed. `halo`: with how many rows before and after the tile.
    """

    value: Value
    want: Placement
    how: How
    halo: Reach = ALONE


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Run `node` on one tile, with `halo` rows before and after it; `silent` if another loop has its side effects."""

    node: Node
    move: Move
    refs: tuple[Ref, ...]
    keys: tuple[tuple[Value, Placement], ...]
    halo: Reach = ALONE
    silent: bool = False


@dataclasses.dataclass(frozen=True)
class Online:
    """How the accumulator of a partial sum is rescaled: by `exp(weight * (new - old))` of each running anchor.

    If there is another sum, of the weights, then `weight * (new - old)` is added that often instead.
    """

    anchors: tuple[Term, ...] = ()
    weight: Value | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """How one tile changes a result: terms are added (or, if Tiled, written) one after the other.

    A term is a step whose rule adds to the accumulator itself, or a reference to what the loop computed. Before that,
    what was added is rescaled as the running anchors that it is relative to (`online`) have moved.
    """

    value: Value
    terms: tuple[Step | Ref, ...]
    online: Online = Online()


@dataclasses.dataclass
class Loop:
    steps: list[Step] = dataclasses.field(default_factory=list)
    updates: list[Update] = dataclasses.field(default_factory=list)
    reads: dict[Value, None] = dataclasses.field(default_factory=dict)  # whole values, ready before the loop
    states: dict[Value, None] = dataclasses.field(default_factory=dict)  # what the next tile reads
    reverse: bool = False  # from the last tile to the first
    made: set[tuple[Value, Placement]] = dataclasses.field(default_factory=set)  # the keys of the steps

    @property
    def all_steps(self) -> list[Step]:
        """The steps, and those that are left to accumulators."""
        return [*self.steps, *(t for u in self.updates for t in u.terms if isinstance(t, Step))]

    @property
    def refs(self) -> list[Ref]:
        """All operands."""
        return [r for s in self.all_steps for r in s.refs] + self.accumulated

    @property
    def accumulated(self) -> list[Ref]:
        return [t for u in self.updates for t in u.terms if isinstance(t, Ref)]

    @property
    def nodes(self) -> list[Node]:
        return [step.node for step in self.all_steps]

    def light(self, facts: Analysis) -> bool:
        """Whether one pass over whole arrays does as well as tiles: sums of what is no larger than the inputs read.

        Only sums: a maximum is compared, later, with values that must come out the same to the last bit.
        """
        refs = [r for s in self.steps for r in s.refs] + self.accumulated
        read = max((r.value.nbytes for r in refs if r.how == "slice"), default=0)
        made = max((v.nbytes for s in self.steps for v in s.node.outputs), default=0)
        if any(n.effects or n.state is not None for n in self.nodes):
            return False  # what goes from tile to tile is rounded as it goes
        sums = all(facts.fact(u.value).placement == Partial("sum") for u in self.updates)
        return sums and made <= read and not any(flops(n) or has(n.name, "heavy") for n in self.nodes)


@dataclasses.dataclass
class Schedule:
    analysis: Analysis
    loops: list[Loop]
    late: set[Value]  # partial results that are computed from another one after the loop
    passes: tuple[str, ...] = ()  # the names of the rewrites that led to it, in order

    @property
    def options(self) -> Any:
        """Those of the program; a tile is as long as was asked for, or a little longer where rows stay together."""
        assert self.analysis.limits is not None, "a body is not planned by itself"
        return self.analysis.limits.options

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products in all loops."""
        return sum(flops(node) for loop in self.loops for node in loop.nodes)
