"""What each jax primitive does to a placement: one small rule per kind of primitive.

A rule has up to eleven parts, and flags. Most primitives need one part, `factors`, and what they do to sums. What is
true of a primitive wherever it runs (a product, an alias, a comparison) is a word in `tiling.primitives`; nothing
outside of rules and passes asks for a name.

    push(node, placements) -> Move    where the results stand, and where each operand must stand for that; or an
                                      obstacle: `Complete`, these operands must be whole first, and why
    pull(node, want) -> placements    how operands that are Whole can yield one tile of the result (None: they cannot)
    localise(node, move, span)        the primitive's parameters at tile size
    emit(node, values, move, span)    the tile's results, where binding the primitive is not enough
    accumulate(node, values, total, span)   `total` plus the tile's part, where that is cheaper than making the part
    part(node, values, wanted)        (of an equation with bodies) some of its results, of whole operands; of the others
                                      None, or what nobody reads
    outline(node, placements, limits) (likewise) how to run it on whole operands with its bodies tiled
    resume(node, source, given, before, span)   (of what goes from tile to tile) its result, from its operand `source`,
                                      whose tile is `given`, and from what the tiles before this one accumulated
    unfit(node, move, span)           why tiles of this length do not suit it, though others would; None if they do
    wide(node, values, dtype, span)   the result unrounded, in a wider dtype: of a product, and what passes it on
    factors(node)                     which dimensions of operands and results are one: `push` and `pull` follow from
                                      that (`rules.factors`), and walks that ask where a dimension comes from

Rules see neither stages nor loops; `analysis.propagate` adds the primitive, the line and the operands to what they say.
A primitive whose operands are all Whole needs no rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transforms.layout import shares, there
from transforms.tiling.ir.graph import Node, Value, elements
from transforms.tiling.ir.obstacles import Complete, Obstacle, Refusal
from transforms.tiling.ir.placement import WHOLE, Move, Partial, Placement, Span, Tiled, Whole
from transforms.tiling.primitives import PRODUCTS, having, summed

Push = Callable[[Node, tuple[Placement, ...]], "Move | Obstacle"]
Pull = Callable[[Node, Tiled], tuple[Placement, ...] | None]
Localise = Callable[[Node, Move, Span], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Rule:
    push: Push
    pull: Pull | None = None
    localise: Localise = lambda node, move, span: node.params
    emit: Callable[[Node, list[Any], Move, Span], list[Any]] | None = None
    accumulate: Callable[[Node, list[Any], Any, Span], Any] | None = None
    part: Callable[[Node, Sequence[Any], Sequence[int]], list[Any]] | None = None
    outline: Callable[[Node, tuple[Placement, ...], Any], Move | Obstacle | None] | None = None
    resume: Callable[[Node, Value, Any, Mapping[Value, Any], Span], Any] | None = None
    unfit: Callable[[Node, Move, Span], str | None] | None = None
    wide: Callable[[Node, list[Any], Any, Span], Any] | None = None
    factors: Callable[[Node], Any] = lambda node: None
    heavy: bool = False  # pulled only where the whole result would be too large
    alone: bool = False  # runs on the tile's own rows, with none beside it
    trims: bool = False  # leaves out the results that stand nowhere
    reason: str = ""  # why no tile goes through it, or all of its operands must be whole: reads after "it"


class Rules(dict[str, Rule]):
    """The rule of each primitive; where there is none, no tile goes through it."""

    def __missing__(self, name: str) -> Rule:
        return Rule(push_refused)


RULES = Rules()


def register(*names: str, push: Push, **parts: Any) -> None:
    """Give the primitives `names` a rule, whose other parts are named as in `Rule`. One primitive has one rule.

    Raises:
        ValueError: a primitive already has a rule.
    """
    for name in names:
        if name in RULES:
            raise ValueError(f"`{name}` already has a rule, in {RULES[name].push.__module__}.")
        RULES[name] = Rule(push, **parts)


def push_refused(node: Node, placements: tuple[Placement, ...]) -> Obstacle:
    why = RULES[node.name].reason
    if not tiled(placements):
        return Complete(partial(placements), why or "needs it whole")
    why = f"it {why}" if why else "there is no rule for this primitive yet"
    operands = ", ".join(f"{v} {p}" for v, p in zip(node.inputs, placements, strict=True))
    return Refusal(
        f"cannot tile {node}: {why}.\n  operands: {operands}.\n"
        "  Compute it outside the tiled function, or cut an axis that does not reach it."
    )


def refuse(*names: str, reason: str) -> None:
    """Let nothing that is cut go through the primitives `names`."""
    register(*names, push=push_refused, reason=reason)


def push_completed(node: Node, placements: tuple[Placement, ...]) -> Obstacle:
    return Complete([*tiled(placements), *partial(placements)], RULES[node.name].reason)


def complete(*names: str, reason: str) -> None:
    """Run the primitives `names` on whole operands alone, completed where those are small enough."""
    register(*names, push=push_completed, reason=reason)


def of_nothing(node: Node, placements: tuple[Placement, ...]) -> Move:
    raise AssertionError(f"`{node.name}` has no operands that could be cut")


def each(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """Operands go through one by one: sums in the dtype that they are formed in, others in their own."""
    return node.bind(values)


def resumes(node: Node) -> bool:
    """Whether a node's result comes from the tiles before, too."""
    return RULES[node.name].resume is not None


def run(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """Compute one tile of a node's results from its operands."""
    rule = RULES[node.name]
    if rule.emit is not None:
        start = there(span.start, node.outputs[0].aval) if node.outputs else span.start
        with node.context.manager:
            return rule.emit(node, values, move, span._replace(start=start))
    return node.bind(values, rule.localise(node, move, span))


def pulled(node: Node, want: Tiled) -> Move | None:
    """How one tile of a node's only result is made from operands that are whole, if there is a way.

    There is none where it is not a part of each device's share of an operand.
    """
    pull = RULES[node.name].pull
    ins = pull(node, want) if pull is not None and len(node.outputs) == 1 else None
    if ins is None:
        return None
    both = zip(node.inputs, ins, strict=True)
    across = any(isinstance(p, Tiled) and p.major % shares(v.aval, p.dim) for v, p in both)
    return None if across else Move((want,), ins)


# ------------------------------------------------------------------------------------------ what several rules share


def tiled(placements: Sequence[Placement]) -> list[int]:
    return [i for i, p in enumerate(placements) if isinstance(p, Tiled)]


def first_cut(placements: Sequence[Placement]) -> tuple[int, Tiled]:
    return next((i, p) for i, p in enumerate(placements) if isinstance(p, Tiled))


def partial(placements: Sequence[Placement]) -> list[int]:
    return [i for i, p in enumerate(placements) if isinstance(p, Partial)]


def unlike(node: Node, operands: Sequence[int]) -> Complete:
    """Of operands that are cut along different dimensions, all but the largest must be whole; a lone one too."""
    smaller = sorted(operands, key=lambda i: (node.inputs[i].nbytes, -i))[:-1]
    return Complete(smaller or operands, "has operands that are cut along different dimensions")


def refuse_partial(node: Node, placements: Sequence[Placement], reason: str = "is not linear in it") -> Complete | None:
    """Ask for reductions over the cut axis to be finished, if there are any among the operands."""
    found = partial(placements)
    return Complete(found, reason) if found else None


def no_sums(node: Node, placements: Sequence[Placement]) -> Complete | None:
    """What is linear, but forms its sums in a dtype of its own."""
    return refuse_partial(node, placements, "is not run on partial sums")


def wait(placements: Sequence[Placement], reason: str) -> Complete:
    """Run an equation with bodies as it is, on whole operands."""
    return Complete([i for i, p in enumerate(placements) if not isinstance(p, Whole)], reason)


COPIES = having("alias", "moving", "copying") - having("negates")  # extrema pass through these, too
JOINS = ("concatenate", "stack")  # are larger than any of their operands
PUTS = ("pad", "dynamic_update_slice")  # put one operand into another, or into nothing


def linear(node: Node, placements: tuple[Placement, ...]) -> Move | Complete | None:
    """Partial results among the operands of what is linear in them (`primitives`), the others Whole, are one in it.

    What is Whole of a sum is counted once. They do not flow into larger arrays, but from body to body of a loop.
    """
    if not (parts := partial(placements)):
        return None
    added, (own, *others) = summed(node.name, len(placements)), {placements[i] for i in parts}
    together = added.issuperset(parts) or (len(parts) == 1 and parts[0] in PRODUCTS.get(node.name, ()))
    if others or tiled(placements) or not together or not (own == Partial("sum") or node.name in COPIES):
        return Complete(parts, "is not linear in it")
    ins = tuple(count_once(p) if i in added else p for i, p in enumerate(placements))
    move = Move((own,) * len(node.outputs), ins)
    fits = any if node.name in PUTS else all
    if node.name in JOINS or fits(shrinks(node, i) for i in parts):
        return move
    return Complete(parts, "would make it larger", move if node.name in PUTS else None)


def by_cut(push: Callable[[Node, tuple[Placement, ...], Tiled], Move | Obstacle]) -> Push:
    """A rule of operands that are all cut alike, from what it does then; others must be whole first."""

    def rule(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
        if (found := linear(node, placements)) is not None:
            return found
        cuts, (_, cut) = tiled(placements), first_cut(placements)
        if any(placements[i] != cut for i in cuts):
            return unlike(node, cuts)
        return push(node, placements, cut)

    rule.__module__ = push.__module__
    return rule


def aligned(value: Value, cut: Tiled, size: int) -> Placement:
    """Where an operand that broadcasts along the result must stand: cut alike, or Whole where its size is 1."""
    return cut if len(value.shape) > cut.dim and value.shape[cut.dim] == size else WHOLE


def count_once(placement: Placement) -> Placement:
    """A Whole term of a partial sum is added on one tile only."""
    return placement if isinstance(placement, Partial) else Partial("sum")


def shrinks(node: Node, operand: int) -> bool:
    """Whether the result is no larger than the operand: partial sums do not flow into larger arrays."""
    return elements(node.outputs[0].shape) <= elements(node.inputs[operand].shape)
