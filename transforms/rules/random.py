"""Random keys that are cut like any other array. Bits made from a Whole key are Whole."""

from __future__ import annotations

from transforms.graph import Node
from transforms.placement import Placement, Tiled
from transforms.rules import Complete, Move, one_cut, register


def push_leading(node: Node, placements: tuple[Placement, ...]) -> Move:
    """The result has the operand's dimensions first, then its own."""
    cut = one_cut(node, placements)
    if cut.dim >= len(node.outputs[0].shape):
        raise Complete([0], "takes the cut axis apart")
    return Move((cut,) * len(node.outputs), placements)


def pull_leading(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    return (want,) if want.dim < len(node.inputs[0].shape) else None


register("random_bits", "random_wrap", "random_unwrap", "random_split", push=push_leading, pull=pull_leading)
