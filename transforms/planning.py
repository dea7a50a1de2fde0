"""How a graph is planned: analysed, rewritten where that saves a loop or lets equations run in tiles, and scheduled."""

from __future__ import annotations

from collections.abc import Sequence

from transforms.analysis import Along, Inline, Promote
from transforms.divide import divide
from transforms.graph import Graph, Node, Value
from transforms.limits import Limits
from transforms.loops import Schedule
from transforms.online import Rewritten, rewrite
from transforms.placement import Placement, Span, Tiled, TileError
from transforms.prefix import carry
from transforms.propagate import analyse
from transforms.rewrite import inline
from transforms.rules import (  # noqa: F401
    collective,
    contraction,
    control_flow,
    elementwise,
    indexing,
    linalg,
    ragged,
    random,
    reduction,
    refusals,
    scan,
    scatter,
    shape,
    slicing,
    windows,
)
from transforms.schedule import schedule


def planned(graph: Graph, placements: Sequence[Placement], limits: Limits) -> tuple[Schedule, list[Value]]:
    """Plan a graph, which changes it, from where its inputs stand.

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
    span = Span(0, options.size, options.total, options.accumulate)
    while True:
        try:
            found = analyse(graph, placements, limits, promoted)
            if not rewrite(found, done, span):
                return schedule(found, limits, options.total, done.sums), list(done.ends)
        except Promote as large:
            promoted |= large.placements
        except Inline as region:
            inline(graph, region.node)
        except Along as found:
            carry(graph, found.node, span)
        except TileError as refusal:
            first = first or refusal
            if not any(divide(graph, node, dim, divided) for node, dim in refusal.origins):
                raise first from None
