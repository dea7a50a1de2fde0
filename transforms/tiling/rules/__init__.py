"""What each jax primitive does to a placement: one small rule per kind of primitive.

A rule has up to eight parts.

    push(node, placements) -> Move    where the results stand, and where each operand must stand for that
    pull(node, want) -> placements    how operands that are Whole can yield one tile of the result (None: they cannot)
    localise(node, move, span)        the primitive's parameters at tile size
    emit(node, values, move, span)    the tile's results, where binding the primitive is not enough
    accumulate(node, values, total, span)   `total` plus the tile's part, where that is cheaper than making the part
    part(node, wanted)                (of an equation with bodies) the operands and a function for some results alone
    local(node, placements, limits)   (likewise) how to run it on whole operands with its bodies tiled
    unfit(node, move, span)           why tiles of this length do not suit it, though others would; None if they do

A rule that cannot go on raises `Complete`: these operands must be whole first, and why. Rules see neither stages nor
loops; `analysis.propagate` adds the primitive, the line and the operands to what they say. A primitive whose operands
are all Whole needs no rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transforms.tiling.ir.errors import TileError
from transforms.tiling.ir.graph import Node, Value, elements
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Reach, Span, Tiled, Whole


@dataclasses.dataclass(frozen=True)
class Move:
    """Where a node's results stand, and where its operands must stand for that.

    `reach`: of which operands it reads rows beside the tile, and how many before and after.
    """

    outs: tuple[Placement, ...]
    ins: tuple[Placement, ...]
    reach: Mapping[int, Reach] = dataclasses.field(default_factory=dict, kw_only=True, hash=False)


class Complete(Exception):
    """Operands (by number) must be whole before the node can run; `reason` reads after the primitive's name.

    `otherwise` is how it moves where they cannot be: in the body of a loop. `along`: it runs along the cut axis, so
    outside such bodies it can hand a state from tile to tile instead.
    """

    def __init__(self, operands: Sequence[int], reason: str, otherwise: Move | None = None, along: bool = False):
        super().__init__(reason)
        self.operands, self.reason, self.otherwise, self.along = tuple(operands), reason, otherwise, along


Push = Callable[[Node, tuple[Placement, ...]], Move]
Pull = Callable[[Node, Tiled], tuple[Placement, ...] | None]
Localise = Callable[[Node, Move, Span], dict[str, Any]]
Emit = Callable[[Node, list[Any], Move, Span], list[Any]]
Accumulate = Callable[[Node, list[Any], Any, Span], Any]
Local = Callable[[Node, tuple[Placement, ...], Any], "Move | None"]
Part = Callable[[Node, Sequence[int]], tuple[Sequence[int], Callable[..., Any]]]


@dataclasses.dataclass(frozen=True)
class Rule:
    push: Push
    pull: Pull | None = None
    localise: Localise | None = None
    emit: Emit | None = None
    accumulate: Accumulate | None = None
    part: Part | None = None
    local: Local | None = None
    unfit: Callable[[Node, Move, Span], str | None] | None = None
    heavy: bool = False  # pulled only where the whole result would be too large


RULES: dict[str, Rule] = {}
REFUSED: dict[str, str] = {}  # why no tile goes through these primitives
COMPLETED: dict[str, str] = {}  # why all operands of these must be whole


def register(*names: str, push: Push, **parts: Any) -> None:
    """Give the primitives `names` a rule, whose other parts are named as in `Rule`. One primitive has one rule.

    Raises:
        ValueError: a primitive already has a rule.
    """
    for name in names:
        if name in RULES:
            raise ValueError(f"`{name}` already has a rule, in {RULES[name].push.__module__}.")
        RULES[name] = Rule(push, **parts)


def refuse(*names: str, reason: str) -> None:
    """Let nothing that is cut go through the primitives `names`. `reason` reads after "it", as in `Complete`."""

    def push(node: Node, placements: tuple[Placement, ...]) -> Move:
        if not tiled(placements):
            raise Complete(partial(placements), REFUSED[node.name])
        operands = ", ".join(f"{v} {p}" for v, p in zip(node.inputs, placements, strict=True))
        raise TileError(
            f"cannot tile `{node.name}` at {node.where}: it {REFUSED[node.name]}.\n  operands: {operands}.\n"
            "  Compute it outside the tiled function, or cut an axis that does not reach it."
        )

    for name in names:
        register(name, push=push)
        REFUSED[name] = reason


def complete(*names: str, reason: str) -> None:
    """Run the primitives `names` on whole operands alone, completed where those are small enough."""

    def push(node: Node, placements: tuple[Placement, ...]) -> Move:
        raise Complete([*tiled(placements), *partial(placements)], COMPLETED[node.name])

    for name in names:
        register(name, push=push)
        COMPLETED[name] = reason


def run(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """Compute one tile of a node's results from its operands."""
    rule = RULES.get(node.name)
    if rule is not None and rule.emit is not None:
        with node.context.manager:
            return rule.emit(node, values, move, span)
    params = rule.localise(node, move, span) if rule is not None and rule.localise is not None else None
    return node.bind(values, params)


# ------------------------------------------------------------------------------------------ what several rules share


def tiled(placements: Sequence[Placement]) -> list[int]:
    return [i for i, p in enumerate(placements) if isinstance(p, Tiled)]


def partial(placements: Sequence[Placement]) -> list[int]:
    return [i for i, p in enumerate(placements) if isinstance(p, Partial)]


def smaller(node: Node, operands: Sequence[int]) -> list[int]:
    """All but the largest of `operands`."""
    return sorted(operands, key=lambda i: (node.inputs[i].nbytes, -i))[:-1]


def refuse_partial(node: Node, placements: Sequence[Placement], reason: str = "is not linear in it") -> None:
    """Ask for reductions over the cut axis to be finished, if there are any among the operands."""
    if found := partial(placements):
        raise Complete(found, reason)


def one_cut(node: Node, placements: Sequence[Placement]) -> Tiled:
    """The cut that all tiled operands share; operands that are cut otherwise must be whole first."""
    refuse_partial(node, placements)
    found = tiled(placements)
    if len({placements[i] for i in found}) > 1:
        raise Complete(smaller(node, found), "has operands that are cut along different dimensions")
    cut = placements[found[0]]
    assert isinstance(cut, Tiled)
    return cut


def aligned(value: Value, cut: Tiled, size: int) -> Placement:
    """Where an operand that broadcasts along the result must stand: cut alike, or Whole where its size is 1."""
    return cut if len(value.shape) > cut.dim and value.shape[cut.dim] == size else WHOLE


def count_once(placement: Placement) -> Placement:
    """A Whole term of a partial sum is added on one tile only."""
    return placement if isinstance(placement, Partial) else Partial("sum")


def shrinks(node: Node, operand: int) -> bool:
    """Whether the result is no larger than the operand: partial sums do not flow into larger arrays."""
    return elements(node.outputs[0].shape) <= elements(node.inputs[operand].shape)


def only_sums(placements: Sequence[Placement]) -> bool:
    """Whether there are partial sums among the operands, and otherwise only Whole ones."""
    found = {p for p in placements if not isinstance(p, Whole)}
    return found == {Partial("sum")}


def passes(node: Node, placements: tuple[Placement, ...]) -> bool:
    """Whether operand 0 is a partial result that a rearrangement may carry along, the others Whole."""
    first, *rest = placements
    return isinstance(first, Partial) and all(isinstance(p, Whole) for p in rest) and shrinks(node, 0)
