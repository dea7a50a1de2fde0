"""Unreduced sums: those of which the devices of a mesh may each keep a part until a loop is over."""

from __future__ import annotations

from typing import Any

from transforms.layout import TOGETHER, named
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.placement import Partial, Tiled
from transforms.tiling.mesh.sums import contracted, flowing, narrowest, summed
from transforms.tiling.primitives import has


def keep_apart(found: Any, node: Node, move: Any, moving: bool) -> None:
    """Note, in an analysis, which partial sums a node makes or passes on that stay apart.

    None that is `moving`: an online sum is rescaled on the way, which takes all of it.
    """
    if node.together:
        return
    for i, value in enumerate(node.outputs):
        allowed = found.flowing is None or value in found.flowing
        if move.outs[i] != Partial("sum") or moving or not allowed:
            continue
        if getattr(move, "bodies", ()):
            made = move.apart[i] if move.apart else TOGETHER
        else:
            joined = any(v in found.apart for v in found.added.get(value, ()))  # the two gradients of a tied table
            made = summed(node, found.apart, [isinstance(p, Partial) for p in move.ins], joined)
        if made.axes:
            found.apart[value] = made


def postpone(found: Any) -> None:
    """Leave the sum of a product's parts until after the loop where a cut result is only written (tensor parallelism).

    And find the dtype in which each sum is made.
    """
    alone = flowing(found.graph, found.completed)
    for node in found.graph.nodes:
        value = node.outputs[0] if len(node.outputs) == 1 else None
        if value is None or value not in alone or found.fact(value).moving or node.together:
            continue
        spread = named(value.aval) is not None and isinstance(found.moves[node].outs[0], Tiled)
        held = [v in found.apart and (node, i) not in found.completed for i, v in enumerate(node.inputs)]
        if spread and (has(node.name, "product") or True in held[:1]):
            made = summed(node, found.apart, held)
            left, right = contracted(node)
            if made.axes and (not has(node.name, "product") or left == right):
                found.apart[value] = made
    found.apart.update({v: narrowest(v, apart, found.graph) for v, apart in found.apart.items()})
