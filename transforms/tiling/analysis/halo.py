"""The halo, rows beside the tile: what reads its neighbours along the cut axis is computed on a longer tile.

Stencil codes exchange such rows between devices (halo exchange); here they are computed twice.

A shift, a convolution or a window reads rows before and after those that it makes. A loop computes these rows with the
tile, down to its inputs, and readers that want less take the middle: they are computed twice, in the next tile again.
Rows that lie outside of the axis hold anything: whoever reaches out for them masks them.
"""

from __future__ import annotations

from collections.abc import Iterable

from transforms.tiling.ir.facts import Analysis, Region, grain
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Along, Complete, Inline, Obstacle
from transforms.tiling.ir.placement import ALONE, Partial, Reach, Tiled
from transforms.tiling.primitives import REMAT, has
from transforms.tiling.rules import RULES, Move

FEW = 16  # rows that may be computed again even with shorter tiles


def check(found: Analysis, node: Node, move: Move) -> Obstacle | None:
    """Why a node that reads rows beside the tile cannot have them: its operands must be whole.

    Or the body of a `jax.checkpoint` that they come from must be part of the graph.
    """
    if not move.reach:
        return None
    limits = found.limits
    cut = [i for i, v in enumerate(node.inputs) if found.is_cut(v)]
    cut = [i for i in cut if (node, i) not in found.completed]
    # Where what it reads so is whole already, sliced to go with another operand, that one must be whole too.
    operands = [i for i in cut if i in move.reach] or cut
    if limits is None:
        return Complete(operands, "reads rows beside the tile")
    if limits.options.shares > 1:
        return Complete(operands, "reads rows that another device holds")
    for i in move.reach:
        if (fixed := found.fact(node.inputs[i]).fixed) is not None:
            if fixed.name in REMAT:
                return Inline(fixed)
            if _shifts_alone(node):
                return Along(node)
            why = f"which {fixed} does not make"
            return Complete(operands, f"reads rows beside the tile, {why}")
    before, after = _reach(found, node, move)
    if before + after > min(max(limits.options.size, FEW), limits.options.total):
        if _shifts_alone(node) and max(map(sum, move.reach.values())) < limits.options.size:
            return Along(node)
        rows = f"{before} rows before and {after} after each tile of {limits.options.size}"
        return Complete(operands, f"reads {rows}, with what it is computed from")
    return None


def _shifts_alone(node: Node) -> bool:
    """Whether an equation moves rows along one dimension, and does nothing else."""
    return has(node.name, "shifts") and sum(map(any, node.params["padding_config"])) == 1


def taken(found: Analysis, node: Node, move: Move) -> tuple[Reach, Node | None]:
    """How far a node's results reach, and the equation for which they cannot be computed beside the tile, if any."""
    exact = bool(node.effects) or _exact(node, move) or any(isinstance(p, Partial) for p in move.outs)
    if exact or any(found.fact(v).varies for v in node.inputs):
        return _reach(found, node, move), node
    cut = [found.fact(v).fixed for v, p in zip(node.inputs, move.ins, strict=True) if isinstance(p, Tiled)]
    return _reach(found, node, move), next((fixed for fixed in cut if fixed is not None), None)


def _reach(found: Analysis, node: Node, move: Move) -> Reach:
    """How many rows before and after its tile a node's results take, all the way from what is whole."""
    both = [(i, v) for i, v in enumerate(node.inputs) if isinstance(move.ins[i], Tiled)]
    return even(union(plus(found.fact(v).reach, move.reach.get(i, ALONE)) for i, v in both), grain(move))


def _exact(node: Node, move: Move) -> bool:
    inside = [(n, b.moves[n]) for b in move.bodies for n in b.graph.nodes] if isinstance(move, Region) else []
    return RULES[node.name].alone or any(_exact(n, m) for n, m in inside)


def even(reach: Reach, rows: int) -> Reach:
    """A reach of whole groups of rows."""
    before, after = (-(-r // rows) * rows for r in reach)
    return before, after


def plus(one: Reach, other: Reach) -> Reach:
    return one[0] + other[0], one[1] + other[1]


def union(found: Iterable[Reach]) -> Reach:
    both = [ALONE, *found]
    return max(before for before, _ in both), max(after for _, after in both)
