"""Index-set splitting: arrays a little longer or shorter than the cut axis, `logits[:, :-1]`, or a sink beside keys.

The polyhedral model's word for it (Griebl, Feautrier & Lengauer, Index set splitting, 2000), here by hand.

What is made of such an array is made of its pieces instead. Of a join along the cut axis, these are what was joined:
each is as long as its operand, and reductions are combined. Of a part, there is one, the whole axis: rows outside the
part are computed like the others and left out of reductions; a scan passes them by. So no array is as long as the
join, or as the part.

An operation runs on a piece as it runs on a tile, by the same rules.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from transforms.layout import TOGETHER, full, like
from transforms.tiling.frontend.trace import append, inlined
from transforms.tiling.ir.facts import Region, grain
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.obstacles import Complete
from transforms.tiling.ir.placement import COMBINE, WHOLE, Partial, Placement, Tiled
from transforms.tiling.ir.walks import scan_counts
from transforms.tiling.passes.across import ACROSS, cropped, padded, rejoin, scanned
from transforms.tiling.passes.displaced.rows import slices
from transforms.tiling.passes.pieces import Cut, Piece, combine, compute, join, places
from transforms.tiling.primitives import REMAT
from transforms.tiling.rules import RULES, Move, pulled
from transforms.tiling.rules.reduction import OPS

MOST = 8  # pieces of a join
DEPTH = 50  # how far back the computation of a piece is followed


def divide(graph: Graph, node: Node, dim: int, known: set[Node]) -> bool:
    """Rewrite what is made of a slice or a join along dimension `dim` so that it is made piece by piece.

    Args:
        graph: the program.
        node: a slice, pad, join or split.
        dim: its cut dimension.
        known: nodes for which there is no such way; those that this leaves behind are added.

    Returns:
        Whether `graph` was changed.
    """
    if node in known or node not in graph.nodes:
        return False
    known.add(node)
    if node.name == "split":
        graph.replace(node, *slices(node))
        return True
    writer = _Writer(graph, known)
    if not writer.begin(node, dim):
        return False
    for other in graph.nodes[graph.nodes.index(node) + 1 :]:
        writer.visit(other)
    writer.end(node)
    return True


@dataclasses.dataclass(eq=False)
class _Writer:
    graph: Graph
    known: set[Node]
    spans: list[Piece] = dataclasses.field(default_factory=list)
    cuts: dict[Value, Cut] = dataclasses.field(default_factory=dict)
    same: dict[Value, Value] = dataclasses.field(default_factory=dict)  # values that stand in the place of others
    nodes: list[Node] = dataclasses.field(default_factory=list)
    gone: set[Node] = dataclasses.field(default_factory=set)
    made: dict[Any, Value] = dataclasses.field(default_factory=dict)

    # --------------------------------------------------------------------------------------------- beginning and end

    def begin(self, node: Node, dim: int) -> bool:
        """Divide the result of `node`."""
        (out, source), shape = (node.outputs[0], node.inputs[0]), node.inputs[0].shape
        part, beside = cropped(node, dim), padded(node, dim)
        if part is not None:
            joined = [source]
        elif beside is not None:
            before, after = (self.filled(node, (*shape[:dim], n, *shape[dim + 1 :])) for n in beside)
            joined = [before, source, after]
        elif node.name == "concatenate" and node.params["dimension"] == dim:
            joined = node.inputs
        else:
            return False
        pieces = [v for v in joined if v.shape[dim]]
        where = places([v.shape[dim] for v in pieces]) if part is None else [(-part[0], shape[dim])]
        if not 0 < len(pieces) <= MOST or not out.shape[dim]:
            return False
        self.spans = [Piece(start, length, out.shape[dim]) for start, length in where]
        self.cuts[out] = Cut(Tiled(dim), tuple(pieces))
        self.gone.add(node)
        return True

    def end(self, first: Node) -> None:
        """Write what was found into the graph."""
        kept = [n for n in self.graph.nodes if n not in self.gone]
        read = [(node, [self.plain(v, node) for v in node.inputs]) for node in (*kept, *self.nodes)]
        outputs = [self.plain(v, first) for v in self.graph.outputs]
        for node, inputs in read:
            node.change(inputs=inputs)
        self.graph.reset([*kept, *self.nodes], outputs).sort().prune()

    # ------------------------------------------------------------------------------------------------------ equations

    def visit(self, node: Node) -> None:
        """Rewrite an equation, if it reads a value in pieces."""
        divided = any(self.find(v) in self.cuts for v in node.inputs)
        if divided and any(way(node) for way in (self.enter, self.scan, self.across, self.by_rule)):
            self.gone.add(node)

    def enter(self, node: Node) -> bool:
        """Put the body of a `jax.checkpoint` in its place. Returns whether it is one."""
        if node.name not in REMAT:
            return False
        nodes, outs = inlined(node)
        for other in nodes:
            self.visit(other)
            if other not in self.gone:
                self.nodes.append(other)
        self.same.update(zip(node.outputs, outs, strict=True))
        return True

    def scan(self, node: Node) -> bool:
        """Let a scan over a part of the axis pass by the rows beside it. Returns whether it is one."""
        if node.name != "scan":
            return False
        constants, carried = scan_counts(node)
        xs = [self.find(v) for v in node.inputs[constants + carried :]]
        cuts = [self.cuts[v] for v in xs if v in self.cuts]
        if not self.spans[0].beyond or not cuts or any(c.placement != Tiled(0) for c in cuts) or node.effects:
            return False
        ins = [self.plain(v, node) for v in node.inputs[: constants + carried]]
        ins += [self.operand(v, Tiled(0), 0, node) for v in xs]
        outs = self.trace(functools.partial(scanned, node, self.spans[0]), ins, node)
        self.same.update(zip(node.outputs[:carried], outs, strict=False))
        self.cuts.update((v, Cut(Tiled(0), (x,))) for v, x in zip(node.outputs[carried:], outs[carried:], strict=True))
        return True

    def across(self, node: Node) -> bool:
        """Let an operation along the axis read the pieces of it. Returns whether it is one."""
        for i, value in enumerate(node.inputs):
            cut, fn = self.cuts.get(self.find(value)), None
            if cut is not None and cut.placement.plain and node.name == "concatenate":
                fn = rejoin(node, i, cut.placement, self.spans)
            elif cut is not None and cut.placement.plain and node.name in ACROSS and i == 0:
                fn = ACROSS[node.name](node, cut.placement, self.spans)
            if cut is not None and fn is not None:
                others = [self.plain(v, node) for j, v in enumerate(node.inputs) if j != i]
                self.same.update(zip(node.outputs, self.trace(fn, [*cut.pieces, *others], node), strict=True))
                return True
        return False

    def by_rule(self, node: Node) -> bool:
        """Compute the results of a node piece by piece, as its rule has it. Returns whether that is a way."""
        placements = [c.placement if (c := self.cuts.get(self.find(v))) else WHOLE for v in node.inputs]
        while any(isinstance(p, Tiled) for p in placements) and node.name in RULES:
            move = RULES[node.name].push(node, tuple(placements))
            if isinstance(move, Complete):
                placements = [WHOLE if i in move.operands else p for i, p in enumerate(placements)]
                continue
            if runs := isinstance(move, Move) and self.runs(node, move):
                self.write(node, move)
            return runs
        return False

    def runs(self, node: Node, move: Move) -> bool:
        """Whether results of pieces can be put together."""
        if grain(move) > 1 or move.reach:
            return False  # a piece has no neighbours
        joined = node.params["dimension"] if node.name == "concatenate" else None
        if self.spans[0].total == 1 and any(isinstance(p, Tiled) and p.dim == joined for p in move.outs):
            return False  # one row is no axis of which others are multiples
        longer = self.spans[0].beyond
        for out, placement in zip(node.outputs, move.outs, strict=True):
            if isinstance(placement, Partial):
                known = placement.op == "sum" if node.name not in OPS else placement.op in COMBINE
                if not known or (longer and node.name not in (*OPS, "dot_general", "scatter-add", "gather")):
                    return False
            if jax.dtypes.issubdtype(out.dtype, jax.dtypes.extended):
                return False
        if node.name == "gather" and self.spans[0].start and isinstance(move.outs[0], Partial):
            return False  # places out of bounds are filled in on the tile that begins at 0
        overwrites = node.name.startswith("scatter") and node.name != "scatter-add" and isinstance(move.ins[2], Tiled)
        return not (node.effects or isinstance(move, Region) or (longer and overwrites))

    def write(self, node: Node, move: Move) -> None:
        """Compute the results of a node piece by piece."""
        found = []
        for k, span in enumerate(self.spans):
            ins = [self.operand(v, p, k, node) for v, p in zip(node.inputs, move.ins, strict=True)]
            fn = functools.partial(compute, node, move, span, k)
            found.append(self.trace(fn, ins, node))
        for out, placement, parts in zip(node.outputs, move.outs, zip(*found, strict=True), strict=True):
            if isinstance(placement, Tiled):
                self.cuts[out] = Cut(placement, parts)
            elif isinstance(placement, Partial):
                merge = functools.partial(combine, placement.op, out.dtype)
                (self.same[out],) = self.trace(merge, parts, node)
            else:
                self.same[out] = parts[0]

    # ------------------------------------------------------------------------------------------------------- operands

    def find(self, value: Value) -> Value:
        while value in self.same:
            value = self.same[value]
        return value

    def operand(self, value: Value, placement: Placement, k: int, node: Node, depth: int = 0) -> Value:
        """What the computation of piece number `k` reads."""
        return self.piece(value, placement, k, node, depth) if isinstance(placement, Tiled) else self.plain(value, node)

    def plain(self, value: Value, node: Node) -> Value:
        """A value as one array."""
        value = self.find(value)
        cut = self.cuts.get(value)
        if cut is None:
            return value
        if value not in self.made:
            before = len(self.nodes)
            fn = functools.partial(join, cut.placement, self.spans)
            (self.made[value],) = self.trace(fn, cut.pieces, node)
            self.known.update(self.nodes[before:])
        return self.made[value]

    def piece(self, value: Value, want: Tiled, k: int, node: Node, depth: int) -> Value:
        """Piece number `k` of a value, computed for it where that is cheap."""
        value = self.find(value)
        cut = self.cuts.get(value)
        if cut is not None and cut.placement == want:
            return cut.pieces[k]
        key = (value, want, k)
        if key not in self.made:
            self.made[key] = self._piece(value, want, k, node, depth)
        return self.made[key]

    def _piece(self, value: Value, want: Tiled, k: int, node: Node, depth: int) -> Value:
        made, span = value.producer, self.spans[k]
        if value not in self.cuts and made is not None:
            if (part := self.part(value, want, span, node)) is not None:
                return part
            dear = RULES[made.name].heavy or (made.name == "pad" and any(made.params["padding_config"][want.dim]))
            move = None if dear or depth >= DEPTH else pulled(made, want)
            if move is not None and grain(move) == 1:
                operands = [self.operand(v, p, k, node, depth + 1) for v, p in zip(made.inputs, move.ins, strict=True)]
                fn = functools.partial(compute, made, move, span, 0)
                return self.trace(fn, operands, made)[0]
        return self.trace(lambda x: [span.take(x, want)], [self.plain(value, node)], node)[0]

    def part(self, value: Value, want: Tiled, span: Piece, node: Node) -> Value | None:
        """A piece that was padded, or joined to others: what it was before."""
        made, dim = value.producer, want.dim
        if made is None or not want.plain:
            return None
        if made.name == "concatenate" and made.params["dimension"] == dim:
            for source, place in zip(made.inputs, places([v.shape[dim] for v in made.inputs]), strict=True):
                if place == (span.start, span.length):
                    return self.plain(source, node)
        if (beside := padded(made, dim)) is not None:
            source, first = made.inputs[0], beside[0]
            if (first, source.shape[dim]) == (span.start, span.length):
                return self.plain(source, node)
            if span.start >= first + source.shape[dim] or span.start + span.length <= first:
                return self.filled(made, span.local_shape(value.shape, want))
        return None

    def filled(self, node: Node, shape: tuple[int, ...]) -> Value:
        """What a `pad` puts beside its operand, spread as that is."""
        aval = like(node.outputs[0].aval, shape)
        return self.trace(lambda x: [full(aval, x, aval.dtype, TOGETHER)], [self.find(node.inputs[1])], node)[0]

    def trace(self, fn: Callable[..., Any], inputs: Sequence[Value], node: Node) -> list[Value]:
        """Append the equations of `fn`; return its results."""
        return append(self.nodes, fn, inputs, node)
