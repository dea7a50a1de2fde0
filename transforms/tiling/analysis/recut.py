"""Values that two readers would have cut along different dimensions: one of them is made along the other's.

All pairs of rows can be made row by row or column by column. A product of something whole with cut rows comes by
columns; where it meets pairs that come by rows, it is made by rows too, from rows that are small enough to be whole.
(The cotangent of a mean is such a whole factor: the gradient of self-attention meets its scores by rows.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transforms.tiling.analysis.fits import unfit
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.obstacles import Complete, Obstacle, Promote
from transforms.tiling.ir.placement import WHOLE, Placement, Tiled
from transforms.tiling.rules import RULES, Move, partial, pulled, tiled

DEPTH = 50  # how far back a value's computation is followed


def recut(
    found: Analysis, node: Node, placements: Sequence[Placement], operands: Sequence[int], known: Mapping[Value, Tiled]
) -> Obstacle | None:
    """How else the operands of a node could be cut, rather than to have those numbered `operands` whole.

    Args:
        found: what is known of all before the node.
        node: it has operands that are cut along different dimensions.
        placements: of its operands.
        operands: those that would have to be whole.
        known: what was cut another way before.

    Returns:
        Where values are to stand, or what is in the way of that; None if nothing that has to be whole is too large, or
        if there is no way.
    """
    if partial(placements) or all(_may_be_whole(found, node.inputs[i]) for i in operands):
        return None
    found_ways = []
    for asked in (operands, [i for i in tiled(placements) if i not in operands]):
        given = tuple(WHOLE if i in asked else p for i, p in enumerate(placements))
        move = RULES[node.name].push(node, given) if tiled(given) else None
        if isinstance(move, Obstacle) and not isinstance(move, Complete):
            return move
        wanted = move.ins if isinstance(move, Move) else ()
        ways: dict[Value, Tiled] = {}
        if wanted and all(_follow(found, node.inputs[i], wanted[i], known, ways) for i in asked) and ways:
            found_ways.append(ways)
    return Promote(min(found_ways, key=len)) if found_ways else None


def _may_be_whole(found: Analysis, value: Value) -> bool:
    there = found.is_whole(value) or found.is_there(value)
    return there or found.limits is None or found.limits.allow(value)


def _follow(
    found: Analysis,
    value: Value,
    want: Placement,
    known: Mapping[Value, Tiled],
    ways: dict[Value, Tiled],
    depth: int = 0,
) -> bool:
    """Whether a value can stand at `want`; `ways` takes what has to be cut another way for that."""
    if found.fact(value).placement == want or ways.get(value) == want or _may_be_whole(found, value):
        return True
    node = value.producer
    if node is None or not isinstance(want, Tiled) or value in ways or value in known or depth > DEPTH:
        return False
    move = pulled(node, want)
    if move is None or unfit(found, node, move):
        return False
    ways[value] = want
    return all(_follow(found, v, p, known, ways, depth + 1) for v, p in zip(node.inputs, move.ins, strict=True))
