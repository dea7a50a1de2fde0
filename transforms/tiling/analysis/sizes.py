"""Which whole values a schedule makes that are too large, and which of them could be made tile by tile instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transforms import layout
from transforms.tiling.analysis.limits import FEWER, Limits, check_size, human, too_large
from transforms.tiling.frontend.trace import any_platform
from transforms.tiling.ir.facts import Analysis, Outlined
from transforms.tiling.ir.graph import Node, Value, describe, elements, nbytes
from transforms.tiling.ir.jaxprs import bodies, equations
from transforms.tiling.ir.loops import Loop
from transforms.tiling.ir.obstacles import Inline, Obstacle, Promote, Refusal
from transforms.tiling.ir.placement import WHOLE, Partial, Span, Stacked, Tiled
from transforms.tiling.ir.walks import ancestors, closure, depends, operands
from transforms.tiling.primitives import has
from transforms.tiling.rules import pulled
from transforms.tiling.rules.factors import connected

Dimension = tuple[Value, int]


def check_whole(
    analysis: Analysis, loops: Sequence[Loop], requested: Iterable[Value], limits: Limits, online: Iterable[Value] = ()
) -> Obstacle | None:
    """Find whole values that carry the cut axis, or that come from a completed one, and are too large.

    What is made of an accumulator, such as an `online` sum, may be as large as that: wider than what it ends in.
    """
    for loop in loops:
        if (refusal := _check_written(analysis, loop, limits)) is not None:
            return refusal
    found: dict[Value, tuple[Node, str]] = {}
    reads = [(step.node, ref) for loop in loops for step in loop.steps for ref in step.refs]
    for node, ref in reads:
        if ref.how == "slice" and ref.value.producer and analysis.is_whole(ref.value):
            found.setdefault(ref.value, (node, "reads, tile by tile, a value that is made whole"))
    sources = {c.value for c in analysis.completions if isinstance(c.placement, Tiled)}
    sources |= {n.inputs[i] for n, i in analysis.completed if _is_input(analysis, n, n.inputs[i])}
    grown = depends(analysis.graph, sources) if sources else set()
    for value in requested:
        if value in grown and value.producer and analysis.is_whole(value):
            found.setdefault(value, (value.producer, "makes a whole value from one that had to be completed"))
            outlined = isinstance(analysis.moves[value.producer], Outlined)
            if not outlined and (refusal := _check_inside(analysis, value.producer, limits)) is not None:
                return refusal
    whole = {v for v in (*found, *requested) if analysis.is_whole(v)}
    needed = _forms((ref.value for _, ref in reads if ref.how == "whole"), copies=True)  # cutting these is no help
    free = needed | _finished(analysis, online)
    made = lambda v: v not in free and all(f.producer or f.const is not None for f in _forms([v]))
    large = [v for v in whole if v.nbytes > limits.largest and (v in found or made(v))]
    if branched := [n for v in large if (n := v.producer) is not None and any_platform(n) is not None]:
        return Inline(branched[0])
    options = limits.options
    axes = [connected(analysis.graph, dims) for dims in _dims(analysis)] if large else [set(), set()]
    if promoted := {v: cut for v in large if (cut := _cut_of(v, options.total, options.shares, *axes)) is not None}:
        return Promote(promoted)
    for value, (node, reason) in found.items():
        if not limits.allow(value):
            return check_size(value, WHOLE, node, reason, limits, _origins(analysis, value))
    return None


def _check_written(analysis: Analysis, loop: Loop, limits: Limits) -> Refusal | None:
    """Refuse to add up to an array that is larger than inputs, outputs and all that a tile of the loop holds.

    And to store states that take more than the largest input or output.
    """
    tile = tile_bytes(loop, limits.options.span)
    for value in (u.value for u in loop.updates):
        node, placement = value.producer, analysis.fact(value).placement
        if node is None:
            continue
        if isinstance(placement, Stacked) and value.nbytes > limits.bound and limits.gather != "any":
            where = f"the recurrence at {node.where}"
            why = "what follows runs the other way, so the state that each tile begins with would have to be stored"
            return Refusal(too_large(limits, where, why, f"states: {value}, {human(value.nbytes)}", FEWER))
        if isinstance(placement, Partial) and not limits.accumulate(value, tile):
            why = "the tiles add up to an array that is larger than they are"
            array = f"sum: {describe(value.aval)}, {human(value.nbytes)}; a tile holds {human(tile)}"
            return Refusal(too_large(limits, str(node), why, array, FEWER))
    return None


def tile_bytes(loop: Loop, span: Span) -> int:
    """The bytes of the largest cut array that a tile holds: what a step adds straight to its accumulator is none."""
    made = [key for step in loop.steps for key in step.keys] + [(r.value, r.want) for r in loop.refs]
    return max((nbytes(v.aval, span.local_shape(v.shape, p)) for v, p in made if isinstance(p, Tiled)), default=0)


def _finished(analysis: Analysis, sums: Iterable[Value]) -> set[Value]:
    """What is computed from sums, no larger than they are in elements; and the numbers that it is filled with."""
    found, others = set(sums), set()
    for node in analysis.graph.nodes:
        known = [elements(v.shape) for v in node.inputs if v in found]
        made = {v for v in node.outputs if known and elements(v.shape) <= max(known)}
        found |= made
        others.update(() if made else node.inputs)
    read = {v for node in analysis.graph.nodes if not found.isdisjoint(node.outputs) for v in node.inputs}
    return found | {v for v in read - others if _is_filled(v)}


def _is_filled(value: Value) -> bool:
    """Whether a value is one number, which takes no memory unless a loop reads it slice by slice."""
    node = value.producer
    return node is not None and has(node.name, "moving") and elements(node.inputs[0].shape) == 1


def _origins(analysis: Analysis, value: Value) -> list[tuple[Node, int]]:
    """The equations that read cut operands whole on the way to `value`, and where those are cut, the largest first."""
    before = ancestors([value])
    found = []
    for node, i in analysis.completed:
        placement = analysis.fact(node.inputs[i]).placement
        if isinstance(placement, Tiled) and not before.isdisjoint(node.outputs):
            found.append((node.inputs[i].nbytes, node, placement.dim))
    return [(node, dim) for _, node, dim in sorted(found, key=lambda f: -f[0])]


def _forms(values: Iterable[Value], copies: bool = False) -> set[Value]:
    """`values`, and what they are in another dtype, order or place: of a weight that a product reads, the input.

    `copies`: or several times.
    """

    def alike(value: Value) -> list[Value]:
        smaller = [v for v in operands(value) if elements(v.shape) <= elements(value.shape)]
        return smaller if copies else [v for v in smaller if elements(v.shape) == elements(value.shape)]

    return set(closure(values, alike))


def _is_input(analysis: Analysis, node: Node, value: Value) -> bool:
    """Whether a cut value that a node reads whole was whole all along."""
    return analysis.is_cut(value) and analysis.is_there(value) and not isinstance(analysis.moves[node], Outlined)


def _check_inside(analysis: Analysis, node: Node, limits: Limits) -> Refusal | None:
    """Refuse an equation with a body that runs on whole operands and makes something too large there."""
    made = (v.aval for body in bodies(node.params) for eqn in equations(body) for v in eqn.outvars)
    inside = max(map(nbytes, made), default=0)
    if limits.gather == "any" or inside <= limits.largest:
        return None
    why = next((reason for (n, _), reason in analysis.completed.items() if n is node), "needs a cut array whole")
    array = f"array: {human(inside)}"
    return Refusal(too_large(limits, str(node), f"it {why}, and its body makes an array then that is too large", array))


def _dims(analysis: Analysis) -> tuple[list[Dimension], list[Dimension]]:
    """The dimensions along which inputs are cut, and their others."""
    cut, others = [], []
    for value in analysis.graph.inputs:
        place = analysis.fact(value).placement
        for dim in range(len(value.shape)):
            (cut if isinstance(place, Tiled) and place.dim == dim else others).append((value, dim))
    return cut, others


def _cut_of(value: Value, total: int, shares: int, axis: set[Dimension], others: set[Dimension]) -> Tiled | None:
    """A dimension of the cut axis' length along which a whole value can be made tile by tile: the axis, or the first.

    The axis is spread over `shares` devices, with `total` on each. Other dimensions are of its length where pairs of
    rows are as many as they are: `axis` are the dimensions that are known to be it, `others` those of other inputs.
    """
    node = value.producer
    alike = lambda dim: layout.named(value.aval) is None or layout.shares(value.aval, dim) == shares
    cuts = [Tiled(dim, shares) for dim, size in enumerate(value.shape) if size == total * shares and alike(dim)]
    if len(cuts) > 1:
        cuts = [c for c in cuts if (value, c.dim) in axis] or [c for c in cuts if (value, c.dim) not in others]
    return None if node is None else next((cut for cut in cuts if pulled(node, cut) is not None), None)
