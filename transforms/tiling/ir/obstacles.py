"""Obstacles: what keeps an analysis, or a schedule, from being finished. They are values, which passes answer.

A rule that cannot place an equation returns one, and so does every walk that met it; `passes.driver` looks up which
rewrite answers it. What nothing answers is a refusal: the user sees it as a `TileError`, and nobody else does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Node = Value = Move = Any  # of `ir.graph` and of `rules`, which stand above


@dataclasses.dataclass(frozen=True, eq=False)
class Obstacle:
    """Why something cannot go on as it is."""


@dataclasses.dataclass(frozen=True, eq=False)
class Refusal(Obstacle):
    """A function cannot be tiled along the chosen axis: what, where, why, and what to do.

    `origins`: the equations that need something whole, and along which dimension that is cut.
    """

    message: str
    origins: Sequence[tuple[Node, int]] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Beside(Refusal):
    """An equation reads a cut array along the axis, which may be whole: a halo could take its place, rewritten."""


@dataclasses.dataclass(frozen=True, eq=False)
class Complete(Obstacle):
    """Operands (by number) must be whole before the node can run; `reason` reads after the primitive's name.

    `otherwise` is how it moves where they cannot be: in the body of a loop. `along`: it runs along the cut axis, so
    outside such bodies it can hand a state from tile to tile instead.
    """

    operands: Sequence[int]
    reason: str
    otherwise: Move = None
    along: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Inline(Obstacle):
    """A region cannot be kept as one: its body must be part of the graph around it."""

    node: Node


@dataclasses.dataclass(frozen=True, eq=False)
class Sink(Obstacle):
    """A region reads a cut value that is too large to be made whole: its body is to make it, from `sources`."""

    node: Node
    operands: Sequence[int]
    sources: Sequence[Value]


@dataclasses.dataclass(frozen=True, eq=False)
class Split(Obstacle):
    """Some results of a region are the same for every tile: they are to be computed apart from the others."""

    node: Node
    wanted: Sequence[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Along(Obstacle):
    """A node runs along the cut axis: it is to be rewritten so that it hands a state from tile to tile."""

    node: Node


@dataclasses.dataclass(frozen=True, eq=False)
class Promote(Obstacle):
    """Whole values are too large to be made whole, but can be made tile by tile: to be placed as Tiled."""

    placements: Mapping[Value, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Groups(Obstacle):
    """Chunks, patches or strides keep `grain` rows of the axis together, and tiles hold no multiple of it."""

    grain: int


@dataclasses.dataclass(frozen=True, eq=False)
class Disagreement(Refusal):
    """`node` sees in the last bit how `value` was computed, and more than one loop computes it."""

    _: dataclasses.KW_ONLY
    analysis: Any  # of the graph that both are in
    node: Node
    value: Value
    must_store: bool = False  # nothing but storing the value helps
    again: frozenset[Value] = frozenset()  # what loops are to compute again for it, in place of reading it as stored
