"""How a graph is planned: analysed, rewritten where that saves a loop or lets equations run in tiles, and scheduled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from transforms.tiling.analysis import rounding
from transforms.tiling.analysis.limits import Limits
from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.ir.edit import inline
from transforms.tiling.ir.facts import Along, Analysis, Inline, Promote, Sink
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.loops import Schedule
from transforms.tiling.ir.numbering import merge
from transforms.tiling.ir.placement import Placement, Span, Tiled, TileError
from transforms.tiling.passes.cumulative import carry
from transforms.tiling.passes.index_split import divide
from transforms.tiling.passes.loop_state import resize
from transforms.tiling.passes.online.rewrite import Rewritten, rewrite
from transforms.tiling.passes.shifts import align
from transforms.tiling.rules import (  # noqa: F401  each registers its primitives
    collective,
    control_flow,
    dot,
    elementwise,
    gather,
    linalg,
    pallas,
    ragged_dot,
    random,
    reduction,
    reshape,
    scan,
    scatter,
    shard_map,
    slice,
    unsupported,
    window,
)
from transforms.tiling.rules.scan import sink
from transforms.tiling.schedule.stages import schedule


def planned(
    graph: Graph, placements: Sequence[Placement], limits: Limits, also: int = 0
) -> tuple[Schedule, list[Value]]:
    """Plan a graph, which changes it, from where its inputs stand.

    Args:
        graph: the program.
        placements: of its inputs.
        limits: which completions are allowed.
        also: the number of last outputs that are left in the dtype of sums.

    Returns:
        The loops; and of the values that were there before, those which online sums end in, with what they are
        relative to.

    Raises:
        TileError: it cannot be tiled within the limits.
    """
    options = limits.options
    promoted: dict[Value, Tiled] = {}
    done = Rewritten()
    divided: set[Node] = set()
    first: TileError | None = None
    merge(graph)
    limits = dataclasses.replace(limits, longest=2 * options.size)
    while True:
        span = Span(0, limits.options.size, options.total, options.accumulate)
        try:
            found = analyse(graph, placements, limits, promoted)
            if rest := limits.options.size % found.grain:
                size = min(limits.options.size - rest + found.grain, options.total)
                limits = dataclasses.replace(limits, options=dataclasses.replace(limits.options, size=size))
                resize(graph, options.total, size)
                continue
            if (met := rounding.meeting(found)) is not None:
                _mend(found, met, limits, span)
            elif not rewrite(found, done, span) and not _widen(graph, also):
                plan = schedule(found, limits, options.total, done.sums)
                rounding.check(plan)
                return plan, list(done.ends)
        except Promote as large:
            promoted |= large.placements
        except Inline as region:
            inline(graph, region.node)
            merge(graph)
        except Sink as read:
            sink(graph, read.node, read.operands, read.sources)
        except Along as found:
            carry(graph, found.node, span)
            first = None
        except TileError as refusal:
            if back := {n for n, _ in refusal.origins if n.params.get("reverse")} - limits.backward:
                limits = dataclasses.replace(limits, backward=limits.backward | back)
                continue
            first = first or refusal
            if align(graph, options.total):
                first = None  # what is refused now says more
                continue
            if any(divide(graph, node, dim, divided) for node, dim in refusal.origins):
                continue
            if limits.stretched:
                raise first from None
            limits = dataclasses.replace(limits, stretched=True)


def _mend(found: Analysis, met: rounding.Meeting, limits: Limits, span: Span) -> None:
    """Let no comparison see a value that is computed again beside copies of it from before."""
    if limits.allow(met.value):
        rounding.store(found.graph, met.value)
    elif not rounding.agree(found, met, span):
        raise TileError(rounding.refusal(met, limits))


def _widen(graph: Graph, count: int) -> bool:
    """Take the last outputs before they are rounded. Returns whether any was."""
    changed = False
    for i in range(len(graph.outputs) - count, len(graph.outputs)):
        node = graph.outputs[i].producer
        if node is not None and node.name == "convert_element_type" and _wider(node.inputs[0], node.outputs[0]):
            graph.outputs[i] = node.inputs[0]
            changed = True
    return changed


def _wider(value: Value, other: Value) -> bool:
    floats = all(jnp.issubdtype(v.dtype, jnp.floating) for v in (value, other))
    return floats and value.dtype.itemsize > other.dtype.itemsize
