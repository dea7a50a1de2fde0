"""Factors: which dimensions of an equation's operands and results are one, as in Shardy's sharding rules.

    transpose      ([i j]) -> [j i]
    reduce_max     ([i j]) -> [i]                  `j` is reduced: cut, it leaves a partial maximum
    dot_general    ([b m k], [b k n]) -> [b m n]   `k` is reduced, by a sum
    cumsum         ([i j]) -> [i j]                `j` is blocked: the equation runs along it

A rule that says so (`register_factors`) has its `push` and its `pull` from that. So have walks along a dimension, which
ask where one comes from: `origins`, and `peel` for an array that another repeats; and which others are one with it in a
graph: `corresponding` of an equation's, `connected`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Tiled
from transforms.tiling.ir.terms import Dims
from transforms.tiling.ir.walks import closure, scan_counts
from transforms.tiling.rules import RULES, Move, Pull, Push, first_cut, linear, refuse_partial, register, tiled, unlike

ALONG = "runs along the cut axis"
Names = Sequence[Any]  # of the factors of an array's dimensions; None for a dimension that no other array has


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of each operand's dimensions and of each result's.

    `reduced`: those that results do not have, and the operation. `blocked`: those that may not be cut, and why.
    """

    ins: Sequence[Names]
    outs: Sequence[Names]
    reduced: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    blocked: Mapping[Any, str] = dataclasses.field(default_factory=dict)

    def origins(self, operand: int = 0) -> dict[int, int]:
        """Of the dimensions of the result that an operand has too, which of its own each is."""
        own = {name: d for d, name in enumerate(self.ins[operand]) if name is not None}
        return {d: own[name] for d, name in enumerate(self.outs[0]) if name in own}


Stated = Callable[[Node], Factors]
Sums = Callable[[Node, tuple[Placement, ...]], "Move | Obstacle | None"]
Along = Callable[[Node, Tiled], bool]


def register_factors(
    *names: str, factors: Stated, sums: Sums = linear, along: Along | None = None, **parts: Any
) -> None:
    """Give primitives the rule that follows from their factors.

    Args:
        names: of the primitives.
        factors: those of an equation.
        sums: where its results stand if partial results are among its operands; None if it takes none.
        along: whether a state can go from tile to tile where it runs along a cut.
        parts: further parts of the rule, and others in the place of these; `pull=None` if no tile of the result is
            made of whole operands.
    """
    stated: dict[str, Any] = {"push": push_factor(factors, sums, along), "pull": pull_factor(factors)}
    register(*names, factors=factors, **stated | parts)


def push_factor(factors: Stated, sums: Sums, along: Along | None = None) -> Push:
    """The cut follows its factor: into all operands and results that have it."""

    def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
        if (found := sums(node, placements) or refuse_partial(node, placements)) is not None:
            return found
        stated, cuts, (first, cut) = factors(node), tiled(placements), first_cut(placements)
        name = stated.ins[first][cut.dim]
        wanted = tuple(_stands(dims, name, cut) for dims in stated.ins)
        if any(placements[i] != wanted[i] for i in cuts):
            return unlike(node, cuts)
        if name in stated.blocked:
            return Complete(cuts, stated.blocked[name], along=along is not None and along(node, cut))
        if name in stated.reduced:
            return Move((Partial(stated.reduced[name]),) * len(stated.outs), wanted)
        return Move(tuple(_stands(dims, name, cut) for dims in stated.outs), wanted)

    return push


def pull_factor(factors: Stated) -> Pull:
    """A tile of the result is made from a tile of those operands that have its factor, and all of the others."""

    def pull(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
        stated = factors(node)
        name = stated.outs[0][want.dim]
        return None if name in stated.blocked else tuple(_stands(dims, name, want) for dims in stated.ins)

    return pull


def _stands(dims: Names, name: Any, cut: Tiled) -> Placement:
    found = [dim for dim, own in enumerate(dims) if own == name and own is not None]
    return cut if cut.dim in found else cut.at(found[0]) if found else WHOLE


# ------------------------------------------------------------------------------------------------ of many primitives


def elementwise(node: Node) -> Factors:
    """`([i j], [i j]) -> [i j]`; a dimension of length 1 is not that of the result."""
    shape = node.outputs[0].shape
    ins = [[d if n == shape[d] else None for d, n in enumerate(v.shape)] for v in node.inputs]
    return Factors(ins, [range(len(shape))] * len(node.outputs))


def leading(node: Node) -> Factors:
    """`([i]) -> [i j]`, or `([i j]) -> [i]`: a last dimension comes or goes (bits in another type, random keys)."""
    ins, outs = (range(len(v.shape)) for v in (node.inputs[0], node.outputs[0]))
    gone = dict.fromkeys({*ins} ^ {*outs}, "takes the cut axis apart")
    return Factors([ins], [outs] * len(node.outputs), blocked=gone)


def keeping(axis: Callable[[Node], int]) -> Stated:
    """`([i j], [i j]) -> [i j], [i j]`, running along one dimension."""

    def factors(node: Node) -> Factors:
        dims = range(len(node.inputs[0].shape))
        return Factors([dims] * len(node.inputs), [dims] * len(node.outputs), blocked={axis(node): ALONG})

    return factors


def squeezed(node: Node) -> Factors:
    """`([i 1 j]) -> [i j]`."""
    dims, gone = range(len(node.inputs[0].shape)), node.params["dimensions"]
    kept = [d for d in dims if d not in gone]
    return Factors([dims], [kept], blocked=dict.fromkeys(gone, "removes the cut axis, whose length is 1"))


def units(node: Node) -> Factors | None:
    """`([1 i j]) -> [i 1 j]`: a reshape in which dimensions of length 1 come and go, and no others."""
    (source, *_), (result,) = node.inputs, node.outputs
    came, real = ([d for d, n in enumerate(v.shape) if n != 1] for v in (source, result))
    if [source.shape[d] for d in came] != [result.shape[d] for d in real]:
        return None
    ins, outs = ({d: i for i, d in enumerate(dims)} for dims in (came, real))
    return Factors([[*map(ins.get, range(len(source.shape)))]], [[*map(outs.get, range(len(result.shape)))]])


# --------------------------------------------------------------------------------------- walks that follow a dimension

PARTS = ("slice", "pad", "concatenate", "split", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
REPEATS = ("broadcast_in_dim", "transpose", "reshape", "squeeze")


def origins(node: Node, operand: int = 0) -> dict[int, int] | None:
    """Of the dimensions of a node's result that an operand has too, which of its own each is; None if nobody says."""
    stated = RULES[node.name].factors(node)
    return None if stated is None else stated.origins(operand)


def corresponding(node: Node) -> Factors | None:
    """Which dimensions are one, also those that an equation runs along, takes rows from or puts some between."""
    if node.name in PARTS:
        ins, outs = ([range(len(v.shape)) for v in values] for values in (node.inputs, node.outputs))
        return Factors(ins, outs)
    if node.name == "scan":
        constants, carried = scan_counts(node)
        steps = lambda v, here: [0 if here and d == 0 else None for d in range(len(v.shape))]
        ins = [steps(v, i >= constants + carried) for i, v in enumerate(node.inputs)]
        return Factors(ins, [steps(v, i >= carried) for i, v in enumerate(node.outputs)])
    if node.name == "conv_general_dilated":  # its batch, and its features
        left, right, out = node.params["dimension_numbers"]
        names = lambda **known: [next((n for n, d in known.items() if d == at), None) for at in range(len(out))]
        return Factors([names(batch=left[0]), names(features=right[0])], [names(batch=out[0], features=out[1])])
    return RULES[node.name].factors(node)


def connected(graph: Graph, dims: Iterable[tuple[Value, int]]) -> set[tuple[Value, int]]:
    """The dimensions of values that are one with some of `dims`, by way of the equations of a graph."""
    linked: defaultdict[tuple[Value, int], list[tuple[Value, int]]] = defaultdict(list)
    for node in graph.nodes:
        if (stated := corresponding(node)) is None:
            continue
        one: defaultdict[Any, list[tuple[Value, int]]] = defaultdict(list)
        for value, names in zip((*node.inputs, *node.outputs), (*stated.ins, *stated.outs), strict=True):
            for dim, name in enumerate(names):
                if name is not None:  # twice where a diagonal is, of which neither dimension is the other
                    one[name, [d for d, other in enumerate(names) if other == name].index(dim)].append((value, dim))
        for found in one.values():
            for at in found:
                linked[at] += found
    return set(closure(dims, linked.__getitem__))


def peel(value: Value, rank: int) -> tuple[Value, Dims]:
    """The array that `value` repeats, and which of its dimensions varies along each of the `rank` dimensions."""
    if not value.shape:
        return value, (None,) * rank
    dims: list[int | None] = list(range(len(value.shape)))
    while (node := value.producer) is not None and node.inputs and node.name in REPEATS:
        if (back := origins(node)) is None:
            break
        dims = [None if d is None else back.get(d) for d in dims]
        value = node.inputs[0]
    return value, tuple(None if d is None or value.shape[d] == 1 else d for d in dims)
