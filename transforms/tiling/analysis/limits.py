"""How large an array may be that is made whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transforms.tiling.ir.graph import Graph, Node, Value, describe
from transforms.tiling.ir.obstacles import Refusal
from transforms.tiling.ir.placement import Placement, Tiled
from transforms.tiling.ir.walks import depends
from transforms.tiling.primitives import has

FEWER = "take fewer tiles, cut another axis"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Which completions are allowed: `gather` is "none", "small" or "any"; `largest` is what small means, in bytes.

    Where there is no other way, small is also what is no larger than all cut inputs `together` (of numbers, not of
    labels), and a tile: the join of two views of a batch, or a batch in the wider dtype that sums are formed in, with
    rows of padding at its ends; and what devices `gather` of each other's.
    """

    gather: str
    largest: int
    options: Any = None  # of the program, for those of bodies
    nested: Any = None  # the class of programs, for bodies that are tiled by themselves
    together: int = 0
    summed: int = 0  # bytes of the largest input or output in the dtype that its sum is formed in
    stretched: bool = False  # there is no other way
    longest: int = 0  # a tile may become to hold groups of rows whole: twice as long as was asked for
    again: frozenset[Value] = frozenset()  # cut values that no loop reads as an earlier one stored them
    beside: bool = True  # what reads along the axis is rewritten, where that is a way, rather than given whole operands
    granted: frozenset[Node] = frozenset()  # those of which none is one
    backward: frozenset[Node] = frozenset()  # what runs backwards tile by tile, for its operand may not be whole

    def allow(self, value: Value) -> bool:
        return self.gather == "any" or (self.gather == "small" and value.nbytes <= self.bound)

    def accumulate(self, value: Value, beside: int, picked: bool = False) -> bool:
        """Whether loops may add up to an array: no larger than an input or output, or than what a tile holds anyway.

        A narrow weight's gradient is summed up in a wider dtype, and may be as large as that makes it; that of a
        complex weight, whose parts are two inputs, as large as both.

        Args:
            value: the sum.
            beside: bytes of what a tile holds beside it.
            picked: it is made of rows of the cut axis, so it counts as made whole.
        """
        bound = 0 if picked and self.gather == "none" else self.bound
        size = value.nbytes // (2 if jax.dtypes.issubdtype(value.dtype, np.complexfloating) else 1)
        return self.gather == "any" or size <= max(bound, beside, 0 if picked else self.summed)

    @property
    def bound(self) -> int:
        if not self.stretched or self.options is None:
            return self.largest
        most = max(self.largest, self.together)
        return most + most * self.options.size // self.options.total


def looked_up(graph: Graph, placements: Sequence[Placement]) -> list[int]:
    """Bytes of the rows of whole inputs that are looked up at cut ones: what tokens stand for is an input too."""
    cut = {v for v, p in zip(graph.inputs, placements, strict=True) if isinstance(p, Tiled)}
    places = depends(graph, cut) if cut else set()
    whole = {v for v in graph.inputs if v not in cut}
    found = []
    for node in graph.nodes:
        if has(node.name, "rearranges") and node.inputs[0] in whole:
            whole.update(node.outputs)
        elif has(node.name, "looks_up") and node.inputs[0] in whole and node.inputs[1] in places:
            found.append(node.outputs[0].nbytes)
    return found


def gathered(graph: Graph, placements: Sequence[Placement], most: int) -> list[int]:
    """Bytes of the rows that devices gather of each other's, where a device's own are at most so many: asked for."""
    cut = {v for v, p in zip(graph.inputs, placements, strict=True) if isinstance(p, Tiled)}
    rows = depends(graph, cut) if cut else set()
    asked = (n for n in graph.nodes if has(n.name, "gathers") and n.inputs[0] in rows)
    return [n.outputs[0].nbytes for n in asked if n.inputs[0].nbytes <= most]


def check_size(
    value: Value,
    placement: Placement,
    node: Node,
    reason: str,
    limits: Limits,
    origins: Sequence[tuple[Node, int]] = (),
) -> Refusal | None:
    """Refuse an array that must be whole and is larger than the function's inputs and outputs."""
    if limits.allow(value):
        return None
    made = f"made by {value.producer}" if value.producer else "an argument"
    bound = f"the largest input or output is {human(limits.largest)}"
    remedy = 'cut another axis, reduce it first, or pass gather="any"'
    if limits.gather == "none":
        bound, remedy = 'gather="none" allows no completed array', 'cut another axis, or pass gather="small"'
    return Refusal(
        f"cannot tile {node}: it {reason}, so its operand would have to be whole.\n"
        f"  operand: {describe(value.aval)} {placement}, {human(value.nbytes)}, {made}; {bound}.\n"
        f"  To go on: {remedy}.",
        origins,
    )


def too_large(limits: Limits, where: str, why: str, array: str, remedy: str = "cut another axis") -> str:
    """What is said of an array that is larger than what may be whole: where, why it is there, which, and what to do."""
    allowed = "" if limits.gather == "any" else ', or pass gather="any"'
    return (
        f"cannot tile {where}: {why}.\n  {array}; the largest input or output is {human(limits.largest)}.\n"
        f"  To go on: {remedy}{allowed}."
    )


def human(size: float | int, step: int = 1024, units: Sequence[str] = ("B", "KiB", "MiB", "GiB")) -> str:
    """Bytes, or another amount, in the unit that reads best, each so many times as much as the one before."""
    for unit in units[:-1]:
        if size < step:
            return f"{size:.4g} {unit}"
        size /= step
    return f"{size:.4g} {units[-1]}"
