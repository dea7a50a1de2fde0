"""How a graph is planned: the ordered lists of rewrites, and the driver that tries them.

A graph is analysed (`analysis.propagate`), and rewritten until it can be scheduled. What keeps an analysis or a
schedule from being finished is an obstacle, a value: `ANSWERS` says which rewrites answer which. The others are tried
on every finished analysis, because they save a loop (`ALWAYS`). After any rewrite the graph is analysed anew.

That ends: each rewrite leaves fewer equations of the kind that it looks for (calls to inline, scans with constants to
sink, recurrences that have no state yet, joins and slices that are not shifts, sums that wait, comparisons of what is
computed again), or grows a set that is bounded by the graph (`promoted`, `divided`, `backward`), a flag, or the tile.
Were one of them wrong in that, its plan would be refused: `planned` counts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from transforms.tiling import regions, rules
from transforms.tiling.analysis import rounding
from transforms.tiling.analysis.limits import Limits
from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.frontend.trace import inline, rewrite_all
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.jaxprs import bodies, equations
from transforms.tiling.ir.loops import Schedule
from transforms.tiling.ir.numbering import merge
from transforms.tiling.ir.obstacles import Along, Beside, Disagreement, Groups, Inline, Obstacle, Promote, Refusal, Sink
from transforms.tiling.ir.placement import Placement, Tiled
from transforms.tiling.passes import agreement
from transforms.tiling.passes.cumulative import carry
from transforms.tiling.passes.displaced import shifts as shifts_of
from transforms.tiling.passes.displaced.reversals import move_reversals
from transforms.tiling.passes.gathers import join
from transforms.tiling.passes.grouped import group
from transforms.tiling.passes.index_split import divide
from transforms.tiling.passes.loop_state import resize
from transforms.tiling.passes.online.rewrite import Rewritten, rewrite
from transforms.tiling.passes.sink import sink
from transforms.tiling.schedule import schedule

for folder in (rules, regions):
    for module in pkgutil.iter_modules(folder.__path__):  # each registers its primitives
        importlib.import_module(f"{folder.__name__}.{module.name}")


@dataclasses.dataclass
class Work:
    """A graph that is being planned, which rewrites change, and what they remember of it."""

    graph: Graph
    limits: Limits
    also: int  # the number of last outputs that are left in the dtype of sums
    promoted: dict[Value, Tiled] = dataclasses.field(default_factory=dict)  # would be Whole, but are made tile by tile
    online: Rewritten = dataclasses.field(default_factory=Rewritten)
    divided: set[Node] = dataclasses.field(default_factory=set)  # are computed in pieces
    agreed: set[tuple[Node, Value]] = dataclasses.field(default_factory=set)  # what sees a value, and is answered
    refusal: Refusal | None = None  # the first of those that are unanswered: it says more than what follows from it
    passes: list[str] = dataclasses.field(default_factory=list)  # the names of those that changed something, in order


class Pass(NamedTuple):
    """A rewrite: `run` changes the graph or its limits and returns whether it did."""

    name: str
    run: Callable[[Work, Any], bool]
    answers: type[Obstacle] | None = None


# ----------------------------------------------------------------------------------- tried on every finished analysis


def online_reductions(work: Work, found: Analysis) -> bool:
    """A sum that waits for a maximum or a total shares its loop."""
    return rewrite(found, work.online, work.limits.options.span)


def unrounded_results(work: Work, _: Analysis) -> bool:
    """What the backward pass reads too is kept as it was summed."""
    outputs, first = list(work.graph.outputs), len(work.graph.outputs) - work.also
    for i, node in [(i, v.producer) for i, v in enumerate(outputs) if i >= first and v.producer is not None]:
        if node.name == "convert_element_type" and _wider(node.inputs[0], node.outputs[0]):
            outputs[i] = node.inputs[0]
    changed = outputs != work.graph.outputs
    work.graph.reset(work.graph.nodes, outputs)
    return changed


def _wider(value: Value, other: Value) -> bool:
    floats = all(jnp.issubdtype(v.dtype, jnp.floating) for v in (value, other))
    return floats and value.dtype.itemsize > other.dtype.itemsize


ALWAYS = (
    Pass("online reductions", online_reductions),
    Pass("unrounded results", unrounded_results),
)


# ------------------------------------------------------------------------------------------------- answer an obstacle


def whole_groups(work: Work, groups: Groups) -> bool:
    """Tiles hold whole chunks, patches or strides: a few rows longer."""
    options = work.limits.options
    size = min(-(-options.size // groups.grain) * groups.grain, options.total)
    work.limits = dataclasses.replace(work.limits, options=dataclasses.replace(options, size=size))
    resize(work.graph, options.total, size)
    return True


def agree(work: Work, met: Disagreement) -> bool:
    """No comparison sees what is computed again beside copies of it."""
    if met.again:
        made = agreement.compute_again(met)
        work.limits = dataclasses.replace(work.limits, again=work.limits.again | made)
        return True
    at = met.node, met.value
    if at in work.agreed:
        return False
    if work.limits.allow(met.value):
        agreement.store(work.graph, met.value)
    elif met.must_store or not agreement.agree(met, work.limits.options.span):
        return False
    work.agreed.add(at)
    return True


def make_by_tiles(work: Work, large: Promote) -> bool:
    """Whole values are made tile by tile, each tile its own part of them."""
    work.promoted |= large.placements
    return True


def inline_call(work: Work, region: Inline) -> bool:
    """A checkpointed body that takes more than one loop is part of the graph."""
    inline(work.graph, region.node)
    merge(work.graph)
    return True


def sink_constants(work: Work, read: Sink) -> bool:
    """A scan makes masks and positions itself, in each step."""
    sink(work.graph, read.node, read.operands, read.sources)
    return True


def carry_state(work: Work, along: Along) -> bool:
    """Recurrences and cumulative sums hand a state from tile to tile."""
    carry(work.graph, along.node, work.limits.options.span)
    work.refusal = None
    return True


def run_backwards(work: Work, refusal: Refusal) -> bool:
    """What runs from the last row to the first does so tile by tile."""
    reversed_ = {n for n, _ in refusal.origins if n.params.get("reverse")} - work.limits.backward
    work.limits = dataclasses.replace(work.limits, backward=work.limits.backward | reversed_)
    return bool(reversed_)


def shifts(work: Work, refusal: Refusal) -> bool:
    """Slices, padding and joins become shifts along the axis: a halo."""
    if not isinstance(refusal, Beside):
        work.refusal = work.refusal or refusal
    if not shifts_of.align(work.graph, work.limits.options.total):
        return False
    work.refusal = None  # what is refused now says more
    return True


def reversals(work: Work, _: Refusal) -> bool:
    """What is reversed twice, or summed, is not reversed."""
    return move_reversals(work.graph)


def grouped_products(work: Work, _: Refusal) -> bool:
    """What is repeated for the members of groups is read once."""
    return rewrite_all(work.graph, group)


def joined_gathers(work: Work, _: Refusal) -> bool:
    """Rows that devices gather lie behind each other."""
    return rewrite_all(work.graph, functools.partial(join, work.limits))


def index_set_splitting(work: Work, refusal: Refusal) -> bool:
    """Arrays of another length are computed in pieces."""
    return any(divide(work.graph, node, dim, work.divided) for node, dim in refusal.origins)


def lifted_joins(work: Work, _: Refusal) -> bool:
    """What is joined with a few rows is made of all."""
    return shifts_of.rewrite(work.graph, [(shifts_of.lift, work.limits.options.total)])


def whole_operands(work: Work, beside: Beside) -> bool:
    """What reads along the axis, and cannot be rewritten, may read a small array."""
    work.limits = dataclasses.replace(work.limits, granted=work.limits.granted | {node for node, _ in beside.origins})
    return True


def stretched_limit(work: Work, _: Refusal) -> bool:
    """What all cut inputs together take may be whole."""
    before, work.limits = work.limits.stretched, dataclasses.replace(work.limits, stretched=True)
    return not before


ANSWERS = (
    Pass("whole groups", whole_groups, Groups),
    Pass("agreement", agree, Disagreement),
    Pass("make by tiles", make_by_tiles, Promote),
    Pass("inline", inline_call, Inline),
    Pass("sink constants", sink_constants, Sink),
    Pass("loop-carried state", carry_state, Along),
    Pass("run backwards", run_backwards, Refusal),
    Pass("reversals", reversals, Refusal),
    Pass("shifts", shifts, Refusal),
    Pass("grouped products", grouped_products, Refusal),
    Pass("index-set splitting", index_set_splitting, Refusal),
    Pass("lifted joins", lifted_joins, Refusal),
    Pass("whole operands", whole_operands, Beside),
    Pass("joined gathers", joined_gathers, Refusal),
    Pass("stretched limit", stretched_limit, Refusal),
)

REWRITES = 8  # for each equation; no plan is known to take more than one


def planned(
    graph: Graph, placements: Sequence[Placement], limits: Limits, also: int = 0
) -> tuple[Schedule, list[Value]] | Refusal:
    """Plan a graph, which changes it, from where its inputs stand.

    Args:
        graph: the program.
        placements: of its inputs.
        limits: which completions are allowed.
        also: the number of last outputs that are left in the dtype of sums.

    Returns:
        The loops; and of the values that were there before, those which online sums end in, with what they are
        relative to. Or why it cannot be tiled within the limits.
    """
    spare, twins = graph.copied()
    made, rewritten = _planned(graph, placements, limits, also)
    if not rewritten:
        return made
    other, _ = _planned(spare, placements, dataclasses.replace(limits, beside=False), also)
    if isinstance(other, Refusal) or (not isinstance(made, Refusal) and made[0].flops <= other[0].flops):
        return made
    plan, ends = other
    return plan, [twins[v] for v in ends if v in twins]


def _planned(
    graph: Graph, placements: Sequence[Placement], limits: Limits, also: int
) -> tuple[tuple[Schedule, list[Value]] | Refusal, bool]:
    """The same, and whether anything was rewritten that need not be: it could have read whole arrays."""
    work, rewritten = Work(graph, limits, also), False
    merge(graph)
    inside = (eqn for node in graph.nodes for body in bodies(node.params) for eqn in equations(body))
    most = REWRITES * (len(graph.nodes) + sum(1 for _ in inside) + 2)
    while len(work.passes) < most:
        found, granted = _attempt(work, placements), work.limits.granted
        if isinstance(found, Schedule):
            return (dataclasses.replace(found, passes=tuple(work.passes)), list(work.online.results)), rewritten
        if isinstance(found, Analysis):
            continue  # of a graph that was rewritten since
        if not _first([p for p in ANSWERS if p.answers and isinstance(found, p.answers)], work, found):
            assert isinstance(found, Refusal), found  # all others have an answer that never fails
            return work.refusal or found, rewritten
        rewritten |= isinstance(found, Beside) and work.limits.granted == granted
    message = (
        f"cannot tile: {most} rewrites of it leave something to rewrite, the last ones {', '.join(work.passes[-3:])}. "
        "That is a defect of `tile`: please report the function.\n  To go on: cut another axis."
    )
    return Refusal(message), rewritten


def _attempt(work: Work, placements: Sequence[Placement]) -> Schedule | Obstacle | Analysis:
    """The loops of a graph as it stands, what is in their way, or an analysis upon which it was rewritten."""
    found = analyse(work.graph, placements, work.limits, work.promoted)
    if isinstance(found, Obstacle):
        return found
    if work.limits.options.size % found.grain and work.limits.options.size < work.limits.options.total:
        return Groups(found.grain)
    if (met := rounding.meeting(found)) is not None:
        return met
    if _first(ALWAYS, work, found):
        return found
    plan = schedule(found, work.online.sums)
    return plan if isinstance(plan, Obstacle) else rounding.check(plan) or rounding.running(plan) or plan


def _first(passes: Sequence[Pass], work: Work, at: Any) -> bool:
    """Run passes until one changes something; whether one did."""
    for each in passes:
        if each.run(work, at):
            work.passes.append(each.name)
            return True
    return False
