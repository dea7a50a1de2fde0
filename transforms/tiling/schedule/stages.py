"""Placements become loops: what each loop computes, keeps and reads.

Loops are planned from the last to the first. Each result is accumulated in the latest loop that its readers allow, or
in the earliest that can compute it if that takes fewer matrix products. A loop holds exactly the steps that its results
need, in order, so lowering is a walk down a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transforms.tiling.analysis.limits import Limits
from transforms.tiling.analysis.sizes import check_whole
from transforms.tiling.autodiff.policy import Policy
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Value, flops
from transforms.tiling.ir.loops import Loop, Ref, Schedule
from transforms.tiling.ir.placement import Placement, Stacked
from transforms.tiling.passes.loop_state import check_begun
from transforms.tiling.passes.online.rewrite import Online
from transforms.tiling.schedule.planner import Planner

ROUNDS = 20  # in which a schedule may forget what it meant to store


def schedule(analysis: Analysis, limits: Limits, total: int, online: Mapping[Value, Online]) -> Schedule:
    """Plan the loops of an analysed graph, along an axis of length `total`; `online` sums are rescaled.

    Raises:
        TileError: an array that is too large would have to be whole.
        Promote: it would, but its value can be made tile by tile if it is placed so.
    """
    policy = limits.options.policy if limits.options else None
    planner, loops = _settle(analysis, online, policy, eager=False)
    if len(loops) > 1:
        # What an early loop computes anyway costs nothing there, and what it takes need not be computed again later.
        eager = _settle(analysis, online, policy, eager=True)
        if _cost(eager) < _cost((planner, loops)):
            planner, loops = eager
    check_begun(analysis, loops, limits)
    check_whole(analysis, loops, planner.requested, limits, total, online)
    return Schedule(analysis, loops, planner.late, limits.options.size)


def _cost(planned: tuple[Planner, list[Loop]]) -> tuple[int, int]:
    """Of the matrix products, and the bytes of states that are stored for loops that go the other way."""
    planner, loops = planned
    stacked = (
        u.value for loop in loops for u in loop.updates if isinstance(planner.analysis.fact(u.value).placement, Stacked)
    )
    return sum(flops(node) for loop in loops for node in loop.nodes), sum(v.nbytes for v in stacked)


def _settle(
    analysis: Analysis, online: Mapping[Value, Online], policy: Policy | None, eager: bool
) -> tuple[Planner, list[Loop]]:
    """Plan until all loops agree on what earlier ones store: a stored value is read, not computed again.

    If they go on changing their minds, what is stored once stays stored, no later than then: loops then only come to
    store more values, or values earlier, and there are finitely many of both.
    """
    deadline: dict[Value, int] = {}
    rounds = 0
    while True:
        planner = Planner(analysis, dict(deadline), online, eager, policy)
        if rounds >= ROUNDS:
            planner.deadline |= deadline
        loops = planner.plan()
        if planner.deadline == deadline:
            return planner, loops
        deadline, rounds = planner.deadline, rounds + 1


def region(
    analysis: Analysis, wants: Sequence[Placement | None], effects: bool = True
) -> tuple[Loop, list[Ref | None]]:
    """The one loop body that computes a region's outputs at the tile at hand, and where they are read.

    Args:
        analysis: of the region's graph.
        wants: where each output is to stand; None for those that are not wanted.
        effects: whether its side effects run.
    """
    planner = Planner(analysis, {}, {}, eager=False, local=True)
    loop = Loop()
    refs: list[Ref | None] = []
    for value, want in zip(analysis.graph.outputs, wants, strict=True):
        refs.append(None if want is None else planner.resolve(value, want, 0, loop))
        if (ref := refs[-1]) is not None:
            planner.emit(ref, 0, loop)
    for node in analysis.graph.nodes:
        if node.effects and effects:
            planner.emit(planner.effect(node), 0, loop)
    return loop, refs
