"""Placements become loops: what each loop computes, keeps and reads (loop fission).

Loops are planned from the last to the first. Each result is accumulated in the latest loop that its readers allow, or
in the earliest that can compute it if that takes fewer matrix products. A loop holds exactly the steps that its results
need, in order, so lowering is a walk down a list.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transforms import layout
from transforms.tiling.analysis.fits import unfit
from transforms.tiling.analysis.halo import even, plus, union
from transforms.tiling.analysis.sizes import check_whole
from transforms.tiling.ir.facts import Analysis, grain
from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.loops import How, Loop, Online, Ref, Schedule, Step, Update
from transforms.tiling.ir.obstacles import Obstacle
from transforms.tiling.ir.placement import ALONE, WHOLE, Partial, Placement, Reach, Stacked, Tiled, Whole
from transforms.tiling.ir.walks import flops
from transforms.tiling.mesh.sums import leaves_auto
from transforms.tiling.primitives import has
from transforms.tiling.rules import RULES, Move, pulled, resumes

Policy = Callable[..., Any]  # of `jax.checkpoint`
ROUNDS = 20  # in which a schedule may forget what it meant to store


def schedule(analysis: Analysis, online: Mapping[Value, Online]) -> Schedule | Obstacle:
    """Plan the loops of an analysed graph; `online` sums are rescaled.

    Or say which array is too large that would have to be whole.
    """
    limits = analysis.limits
    assert limits is not None, "a body is not planned by itself"
    planner, loops = _settle(analysis, online, eager=False)
    if len(loops) > 1:
        # What an early loop computes anyway costs nothing there, and what it takes need not be computed again later.
        eager = _settle(analysis, online, eager=True)
        if _cost(eager) < _cost((planner, loops)):
            planner, loops = eager
    obstacle = check_whole(analysis, loops, planner.requested, limits, online)
    return obstacle or Schedule(analysis, loops, planner.late)


def _cost(planned: tuple[Planner, list[Loop]]) -> tuple[int, int]:
    """Of the matrix products, and the bytes of states that are stored for loops that go the other way."""
    planner, loops = planned
    made = (u.value for loop in loops for u in loop.updates)
    stacked = sum(v.nbytes for v in made if isinstance(planner.analysis.fact(v).placement, Stacked))
    return sum(flops(node) for loop in loops for node in loop.nodes), stacked


def _settle(analysis: Analysis, online: Mapping[Value, Online], eager: bool) -> tuple[Planner, list[Loop]]:
    """Plan until all loops agree on what earlier ones store: a stored value is read, not computed again.

    If they go on changing their minds, what is stored once stays stored, no later than then: loops then only come to
    store more values, or values earlier, and there are finitely many of both.
    """
    deadline: dict[Value, int] = {}
    rounds = 0
    while True:
        planner = Planner(analysis, dict(deadline), online, eager)
        if rounds >= ROUNDS:
            planner.deadline |= deadline
        loops = planner.plan()
        if planner.deadline == deadline:
            return planner, loops
        deadline, rounds = planner.deadline, rounds + 1


def region(analysis: Analysis, wants: Sequence[Placement], effects: bool = True) -> tuple[Loop, list[Ref]]:
    """The one loop body that computes a region's outputs at the tile at hand, and where they are read.

    Args:
        analysis: of the region's graph.
        wants: where each output is to stand.
        effects: whether its side effects run.
    """
    planner = Planner(analysis, {}, {}, eager=False)
    loop = Loop()
    refs = [planner.resolve(v, want, 0, loop) for v, want in zip(analysis.graph.outputs, wants, strict=True)]
    for ref in refs:
        planner.emit(ref, 0, loop)
    for node in analysis.graph.nodes:
        if node.effects and effects:
            planner.emit(planner.effect(node), 0, loop)
    return loop, refs


@dataclasses.dataclass(eq=False)
class Planner:
    """Plans all loops of an analysed graph once, given what earlier loops are known to store.

    Args:
        analysis: the graph's.
        stored: what the loops of the plan before stored, and in which loop.
        online: sums that are rescaled.
        eager: form each result in the first loop that can, not in the last that may.
    """

    analysis: Analysis
    stored: dict[Value, int]
    online: Mapping[Value, Online]
    eager: bool
    deadline: dict[Value, int] = dataclasses.field(default_factory=dict)
    late: set[Value] = dataclasses.field(default_factory=set)
    requested: dict[Value, int] = dataclasses.field(default_factory=dict)
    heard: dict[Node, int] = dataclasses.field(default_factory=dict)  # in which loop nodes have their side effects

    @property
    def inside(self) -> bool:
        """Whether it is a region: its inputs are tiles already."""
        return self.analysis.limits is None

    @property
    def again(self) -> frozenset[Value]:
        """What each loop computes for itself, whatever is stored."""
        return frozenset() if self.analysis.limits is None else self.analysis.limits.again

    @functools.cached_property
    def readers(self) -> dict[Value, list[Node]]:
        found: dict[Value, list[Node]] = {}
        for node in self.analysis.graph.nodes:
            for i, value in enumerate(node.inputs):
                if (node, i) not in self.analysis.completed:
                    found.setdefault(value, []).append(node)
        return found

    def plan(self) -> list[Loop]:
        effects = [n for n in self.analysis.graph.nodes if n.effects and not runs_once(self.analysis, n)]
        once = [n for n in self.analysis.graph.nodes if n.effects and runs_once(self.analysis, n)]
        outputs = [v for v in self.analysis.graph.outputs if v.const is None]
        outputs += [v for n in once for v in n.inputs if v.const is None]
        ends = [self.analysis.last_loop(v) for v in outputs]
        self.heard = {n: self.first(n) for n in effects}
        last = max([*ends, *self.heard.values(), -1])
        for value in outputs:
            self.request([value], last)
        loops = [Loop(reverse=self.analysis.backward.get(d, False)) for d in range(last + 1)]
        for d in range(last, -1, -1):
            done: set[Value] = set()
            while todo := [v for v, k in self.deadline.items() if k == d and v not in done]:
                for value in todo:
                    done.add(value)
                    loops[d].updates.append(self.update(value, d, loops[d]))
            loops[d].updates = [u for u in loops[d].updates if self.deadline[u.value] == d]
            loops[d].updates += self.states(d, loops[d])
            for node in (n for n in effects if self.heard[n] == d):
                self.emit(self.effect(node), d, loops[d])
            trim(loops[d])
            with_halos(loops[d])
        return loops

    def first(self, node: Node) -> int:
        """The first loop that can run a node."""
        if node.outputs:
            return max(self.analysis.fact(v).stage for v in node.outputs)
        there, completed = self.analysis.is_there, self.analysis.completed
        waits = [not there(v) and (node, i) in completed for i, v in enumerate(node.inputs)]
        return max(self.analysis.fact(v).stage + late for v, late in zip(node.inputs, waits, strict=True))

    def effect(self, node: Node) -> Ref:
        """What to emit so that a node with a side effect runs."""
        value = node.outputs[0] if node.outputs else Value(None, node)
        return Ref(value, self.analysis.fact(value).placement, "tile")

    # ------------------------------------------------------------------------------- what must be whole, and by when

    def request(self, values: Iterable[Value], d: int) -> None:
        """Have `values` whole once loop `d` is over."""
        stack = list(values)
        while stack:
            value = stack.pop()
            node = value.producer
            if node is None or value in self.analysis.inputs or self.requested.get(value, d + 1) <= d:
                continue
            self.requested[value] = d
            if self.analysis.is_whole(value) or value in self.analysis.resident:
                stack.extend(self.analysis.needs(node))
            elif self.sinks(value):
                self.late.add(value)
                stack.extend(node.inputs)
            else:
                last = self.formed(value, d)
                self.deadline[value] = min(self.deadline.get(value, last), last)

    def formed(self, value: Value, d: int) -> int:
        """The last loop up to `d` that can form a value; the first, if they are eager."""
        if self.eager:
            return self.analysis.fact(value).stage
        way = self.analysis.fact(value).direction
        return d if way is None else max(k for k in range(d + 1) if self.analysis.backward.get(k, False) == way)

    def sinks(self, value: Value) -> bool:
        """Whether a partial result is better computed, after the loop, from the one that it is made of.

        Where that is no smaller; and of a product wherever the whole sum may be held: a tile's part may be 0 where the
        sum is not, and 0 times infinity is no number.
        """
        node = value.maker
        placements = [self.analysis.fact(v).placement for v in node.inputs]
        if not has(node.name, "adding"):  # these count an operand that is whole by then once, in the same sum
            completed = self.analysis.completed
            placements = [WHOLE if (node, i) in completed else p for i, p in enumerate(placements)]
        parts = [v for v, p in zip(node.inputs, placements, strict=True) if isinstance(p, Partial)]
        if len(parts) != 1 or any(isinstance(p, Tiled) for p in placements) or len(node.outputs) > 1:
            return False
        if not isinstance(self.analysis.moves[node].outs[0], Partial):
            return False
        if leaves_auto(node):
            return False  # parts leave it as such
        limits = self.analysis.limits
        held = has(node.name, "product") and limits is not None and limits.accumulate(parts[0], 0)
        return held or parts[0].aval.size == value.aval.size

    # ------------------------------------------------------------------------------------------------ steps of a loop

    def update(self, value: Value, d: int, loop: Loop) -> Update:
        """Plan how loop `d` accumulates `value`."""
        terms: list[Step | Ref] = []
        stack = [value]
        while stack:
            part = stack.pop()
            node = part.maker
            move = self.analysis.moves[node]
            readers = [n for n in self.readers.get(part, []) if not self.late.issuperset(n.outputs)]
            alone = len(readers) <= (part is not value)
            summed = move.outs[0] == Partial("sum") and alone
            from_tiles = any(isinstance(p, Tiled) for p in move.ins)
            computed = summed and self.computes(part, d)
            if computed and has(node.name, "adding") and self.all_parts(node):
                stack.extend(reversed(node.inputs))
                continue
            if computed and from_tiles and RULES[node.name].accumulate:
                terms.append(self.step(node, move, d, loop))
            else:
                ref = self.resolve(part, self.analysis.fact(part).placement, d, loop)
                self.emit(ref, d, loop)
                terms.append(ref)
        online = self.online.get(value, Online())
        if online.weight is not None:
            self.deadline[online.weight] = d
        return Update(value, tuple(terms), online)

    def states(self, d: int, loop: Loop) -> list[Update]:
        """What a loop's tiles hand to the next, the anchors of its sums too, unless it is accumulated anyway."""
        anchors = [term.value for update in loop.updates for term in update.online.anchors]
        loop.states = dict.fromkeys([*anchors, *loop.states])
        found: dict[Value, Update] = {}
        while todo := [v for v in loop.states if v not in found]:
            for value in todo:
                ref = Ref(value, self.analysis.fact(value).placement, "tile")
                self.emit(ref, d, loop)
                found[value] = Update(value, (ref,))
        return [update for value, update in found.items() if value not in {u.value for u in loop.updates}]

    def all_parts(self, node: Node) -> bool:
        """Whether a node's operands are all partial results that it reads as such."""
        parts = all(isinstance(self.analysis.fact(v).placement, Partial) for v in node.inputs)
        return parts and not any((node, i) in self.analysis.completed for i in range(len(node.inputs)))

    def computes(self, value: Value, d: int) -> bool:
        """Whether loop `d` has to compute the value: no earlier loop stored it, or it is to be computed `again`."""
        return self.stored.get(value, d) >= d or value in self.again

    def resolve(self, value: Value, want: Placement, d: int, loop: Loop, completed: bool = False) -> Ref:
        """Decide how loop `d` reads `value` as `want`, and ask for what that takes."""
        placement = self.analysis.fact(value).placement
        if self.analysis.fact(value).varies:
            tiled = isinstance(want, Tiled) and self.pulls(value, want) is not None
            return Ref(value, want if tiled else WHOLE, "tile")
        own = not isinstance(placement, Whole) and not completed
        if own and value in self.analysis.inputs:
            return Ref(value, want, "tile" if self.inside else "slice")
        if own and value in self.analysis.resident:
            return self.read(value, want, "slice", d, loop)
        if own and self.computes(value, d):
            if not self.kept(value, placement, d):
                return Ref(value, placement, "tile")
            self.deadline[value] = self.analysis.fact(value).stage
        if isinstance(want, Tiled) and isinstance(placement, Whole) and self.pulls(value, want) is not None:
            return Ref(value, want, "tile")
        how = "whole" if isinstance(want, Whole) else "slice" if isinstance(want, Tiled) else "once"
        return self.read(value, want, how, d, loop)

    def read(self, value: Value, want: Placement, how: How, d: int, loop: Loop) -> Ref:
        """Read what is whole once the loops before are over."""
        loop.reads[value] = None
        self.request([value], d - 1)
        return Ref(value, want, how)

    def kept(self, value: Value, placement: Placement, d: int) -> bool:
        """Whether the policy has an earlier loop store what loop `d` would compute again."""
        limits, node = self.analysis.limits, value.producer
        early = isinstance(placement, Tiled) and self.analysis.fact(value).stage < d and value not in self.again
        return early and limits is not None and node is not None and keeps(limits.options.policy, node)

    def pulls(self, value: Value, want: Tiled) -> Move | None:
        """How one tile of a whole value is made, without the rest of it."""
        node = value.producer
        # Within a region all of a whole value would be made for each tile.
        if node is None or value in self.analysis.inputs or (RULES[node.name].heavy and not self.inside):
            return None
        move = pulled(node, want)
        if move is None or self.analysis.grain % grain(move) or unfit(self.analysis, node, move):
            return None
        # Of what devices are still to sum no part can be read: it is summed whole, where its loops end.
        parts = (v for v, p in zip(node.inputs, move.ins, strict=True) if isinstance(p, Tiled))
        return None if any(layout.unreduced(v.aval) for v in parts) else move

    def emit(self, root: Ref, d: int, loop: Loop) -> None:
        """Append the steps that compute `root`, operands first."""
        stack: list[Ref | Step] = [root]
        while stack:
            ref = stack.pop()
            if isinstance(ref, Step):
                loop.steps.append(ref)
                loop.made.update(ref.keys)
                continue
            if ref.how != "tile" or (ref.value, ref.want) in loop.made or ref.value.producer is None:
                continue
            node, move = self.expand(ref)
            if move is self.analysis.moves.get(node):
                made = tuple((v, p) for v, p in zip(node.outputs, move.outs, strict=True))
            else:
                made = ((ref.value, ref.want),)
            silent = self.heard.get(node, d) != d
            step = Step(node, move, self.operands(node, move, d, loop), made, silent=silent)
            stack.extend((step, *step.refs))

    def expand(self, ref: Ref) -> tuple[Node, Move]:
        """The node that computes `ref`, and how: as analysed, or pulled from whole operands."""
        node = ref.value.maker
        whole = ref.value.aval is not None and self.analysis.is_whole(ref.value)
        if not whole or isinstance(ref.want, Whole):
            return node, self.analysis.moves[node]
        assert isinstance(ref.want, Tiled)
        move = self.pulls(ref.value, ref.want)
        assert move is not None
        return node, move

    def operands(self, node: Node, move: Move, d: int, loop: Loop) -> tuple[Ref, ...]:
        if (state := node.state) is not None:
            if loop.reverse != state.reverse:
                return (self.read(state.checkpoints, WHOLE, "whole", d, loop),)
            assert state.yielded is not None
            loop.states[state.yielded] = None
        elif resumes(node) and isinstance(move.outs[0], Whole):
            (value,) = node.inputs
            if not self.computes(value, d):
                return (self.read(value, WHOLE, "whole", d, loop),)
            self.deadline[value] = min(self.deadline.get(value, d), d)
        all_ = move is not self.analysis.moves.get(node)  # it is pulled: its operands are whole, or were completed
        whole = [all_ or (node, i) in self.analysis.completed for i in range(len(node.inputs))]
        return tuple(self.resolve(v, p, d, loop, w) for v, p, w in zip(node.inputs, move.ins, whole, strict=True))

    def step(self, node: Node, move: Move, d: int, loop: Loop) -> Step:
        """A step whose operands are computed, but which is left to whoever accumulates its result."""
        refs = self.operands(node, move, d, loop)
        for ref in refs:
            self.emit(ref, d, loop)
        return Step(node, move, refs, ())


def keeps(policy: Policy | None, node: Node) -> bool:
    """Whether a `jax.checkpoint` policy keeps what a node computes (to offload it is to keep it)."""
    if policy is None or node.primitive.multiple_results:
        return False
    verdict = policy(node.primitive, *(v.aval for v in node.inputs), **node.params)
    return verdict is True or type(verdict).__name__ in ("SaveableType", "Offloadable")


def trim(loop: Loop) -> None:
    """Leave out those results of a loop's steps that nobody reads, where their rules can."""
    read = {(ref.value, ref.want) for ref in loop.refs}
    for i, step in enumerate(loop.steps):
        if RULES[step.node.name].trims:
            both = zip(step.node.outputs, step.move.outs, strict=True)
            outs = tuple(p if (v, p) in read else WHOLE for v, p in both)
            keys = tuple(key for key in step.keys if key in read)
            loop.steps[i] = dataclasses.replace(step, move=dataclasses.replace(step.move, outs=outs), keys=keys)


def runs_once(analysis: Analysis, node: Node) -> bool:
    """Whether a side effect has only whole operands, and so runs after the loops rather than once for each tile."""
    return all(isinstance(p, Whole) for p in analysis.moves[node].ins)


def with_halos(loop: Loop) -> None:
    """Have each step of a loop compute as many rows beside the tile as its readers take."""
    if not any(step.move.reach for step in loop.all_steps):
        return
    asked: dict[tuple[Value, Placement], Reach] = {}

    def reading(ref: Ref, halo: Reach) -> Ref:
        if halo == ALONE or not isinstance(ref.want, Tiled):
            return ref
        key = (ref.value, ref.want)
        asked[key] = union([asked.get(key, ALONE), halo])
        return ref._replace(halo=halo)

    def longer(step: Step) -> Step:
        halo = even(union(asked.get(key, ALONE) for key in step.keys), grain(step.move))
        assert halo == ALONE or any(isinstance(p, Tiled) for _, p in step.keys)
        reach = step.move.reach
        refs = tuple(reading(ref, plus(halo, reach.get(i, ALONE))) for i, ref in enumerate(step.refs))
        return dataclasses.replace(step, refs=refs, halo=halo)

    for i, update in enumerate(loop.updates):
        terms = tuple(longer(t) if isinstance(t, Step) else t for t in update.terms)
        loop.updates[i] = dataclasses.replace(update, terms=terms)
    loop.steps[:] = [longer(step) for step in reversed(loop.steps)][::-1]
