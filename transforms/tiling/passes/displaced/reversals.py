"""Reversals along the axis: put behind what reads them, until another undoes them or a sum does not see them.

A recurrence from the last row to the first is often written as `scan(f, c, x[::-1])[1][::-1]`; it is the scan that runs
in `reverse`. So is what `lax.associative_scan(reverse=True)` does between its two reversals. What is left is put before
what makes its operand, if that is made of less, and exactly: masks, places and labels, which is no product made again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from transforms.tiling.frontend.trace import append
from transforms.tiling.ir.graph import Graph, Node, Value, elements
from transforms.tiling.primitives import has
from transforms.tiling.rules import RULES
from transforms.tiling.rules.factors import PARTS, Factors, corresponding, elementwise, peel

Dims = frozenset[int]
NONE: Dims = frozenset()
JOINS = {"concatenate": "dimension", "split": "axis"}
DEPTH = 50  # how far back a value's computation is followed


class Turned(NamedTuple):
    """Along which dimensions an equation reads each operand reversed, and makes each result so."""

    reads: Sequence[Dims]
    makes: Sequence[Dims]


def move_reversals(graph: Graph) -> bool:
    """Move reversals behind what reads them, or before. Returns whether that leaves smaller ones; else nothing changes.

    An array that is reversed twice, or summed, is not reversed then.
    """
    moved, left = Moved({}, {}), set()
    states = {node.state.yielded for node in graph.nodes if node.state is not None}
    for node in graph.nodes:
        own = [moved.undone.get(v, NONE) for v in node.inputs]
        found = None if states.intersection(node.outputs) else _turned(node, own, moved)
        if found is not None:
            moved.turned[node] = found
            moved.undone.update(zip(node.outputs, found.makes, strict=True))
        left.update(moved.read(node))
    left.update((v, moved.undone.get(v, NONE)) for v in graph.outputs)
    now = [node.outputs[0] for node in graph.nodes if node.name == "rev"]
    if _sizes(v for v, _ in set().union(*(moved.leaves(v, dims) for v, dims in left))) >= _sizes(now):
        return False
    _rewrite(graph, moved)
    return True


# ------------------------------------------------------------------------------------------------- which are worth it


def _turned(node: Node, own: Sequence[Dims], moved: Moved) -> Turned | None:
    """How an equation is read by those that come to its reversal; None if it has to read its operands as they are.

    Of its operands are `own` the dimensions along which they are reversed. What is not, along one of these, has to be:
    that is worth it where it has fewer elements.
    """
    if node.name == "rev":
        return Turned(own, [own[0] ^ {*node.params["dimensions"]}])
    stated = _either_way(node) if any(own) else None
    if stated is None:
        return None
    sides = [(v, d | _varies(v), d, names) for v, d, names in zip(node.inputs, own, stated.ins, strict=True)]
    saved: Counter[Any] = Counter()
    for value, dims, done, names in sides:
        for d in dims:
            leaves = [(value, done)] if d in done else moved.leaves(value, frozenset({d}))
            saved[names[d]] += max(sum(_sizes(v for v, _ in leaves)), 1) * (1 if d in done else -1)
    chosen = {name for name, size in saved.items() if size > 0 and name is not None and name not in stated.blocked}
    at = lambda names: frozenset(d for d, name in enumerate(names) if name in chosen)
    return Turned([at(names) & dims for _, dims, _, names in sides], [*map(at, stated.outs)]) if chosen else None


@dataclasses.dataclass(eq=False)
class Moved:
    """Where reversals are postponed to: `undone` are the dimensions along which values are made before theirs."""

    turned: dict[Node, Turned]
    undone: dict[Value, Dims]
    known: dict[tuple[Value, Dims], set[tuple[Value, Dims]]] = dataclasses.field(default_factory=dict)

    def read(self, node: Node) -> list[tuple[Value, Dims]]:
        """The operands of an equation, and along which dimensions it reads them reversed, of how they are made."""
        reads = self.turned[node].reads if node in self.turned else [NONE] * len(node.inputs)
        return [(v, self.undone.get(v, NONE) ^ want) for v, want in zip(node.inputs, reads, strict=True)]

    def leaves(self, value: Value, dims: Dims, depth: int = 0) -> set[tuple[Value, Dims]]:
        """What has to be reversed for an array to be: it, or what it is made of if that is less."""
        if not dims:
            return set()
        if (value, dims) not in self.known:
            self.known[value, dims] = {(value, dims)}
            made = self.made_of(value, dims) if depth < DEPTH else None
            found = None if made is None else set().union(*(self.leaves(v, d, depth + 1) for v, d in made))
            if found is not None and sum(_sizes(v for v, _ in found)) < elements(value.shape):
                self.known[value, dims] = found
        return self.known[value, dims]

    def made_of(self, value: Value, dims: Dims) -> list[tuple[Value, Dims]] | None:
        """The operands of what makes an array exactly, and along which dimensions they are to be reversed for it."""
        node = value.producer
        if node is None or len(node.outputs) > 1:
            return None
        if node.name == "rev":
            return [(node.inputs[0], dims if node in self.turned else dims ^ {*node.params["dimensions"]})]
        if node.name == "iota":
            return []
        exact = any(has(node.name, word) for word in ("exact", "moving", "copying"))
        exact = exact or not jnp.issubdtype(value.dtype, jnp.inexact)
        if not exact or (stated := _either_way(node)) is None:
            return None
        names = {stated.outs[0][d] for d in dims}
        if not names.isdisjoint({None, *stated.blocked}):
            return None
        at = lambda v, own: frozenset(d for d, name in enumerate(own) if name in names) & _varies(v)
        return [(v, was ^ at(v, own)) for (v, was), own in zip(self.read(node), stated.ins, strict=True)]


def _either_way(node: Node) -> Factors | None:
    """The factors of an equation that makes of reversed operands what is reversed; those where it does not blocked.

    So are those along which an `argmax` says, or a lookup asks, where elements lie.
    """
    if node.effects or node.state is not None or "axis_name" in node.params:
        return None
    batch = getattr(node.params.get("dimension_numbers"), "operand_batching_dims", None)  # of a lookup or a scatter
    alike = RULES[node.name].factors is elementwise or batch is not None or node.name in PARTS
    stated = corresponding(node)
    if stated is None or not (alike or any(has(node.name, w) for w in ("moving", "contracts", "reducing", "steps"))):
        return None
    asked = {name for d, name in enumerate(stated.ins[0]) if batch is not None and d not in batch}
    return Factors(stated.ins, stated.outs, blocked={**stated.blocked, **dict.fromkeys(asked, "finds places along it")})


def _varies(value: Value) -> Dims:
    """The dimensions along which an array is more than one of its rows, repeated."""
    node, dims = value.producer, enumerate(peel(value, len(value.shape))[1])
    if node is not None and node.name == "iota":
        return frozenset({node.params["dimension"]})
    return frozenset(d for d, of in dims if of is not None)


def _sizes(values: Iterable[Value]) -> list[int]:
    """How many elements arrays have, or those that they repeat; the largest first."""
    return sorted((elements(peel(v, len(v.shape))[0].shape) for v in values), reverse=True)


# ---------------------------------------------------------------------------------------------------------- rewriting


def _rewrite(graph: Graph, moved: Moved) -> None:
    nodes: list[Node] = []
    there: dict[Value, Value] = {}  # what is made in the place of a value, before its reversal
    made = Moved({}, {})
    last = next(node for node in graph.nodes if node.name == "rev")

    @functools.cache
    def turn(value: Value, dims: Dims) -> Value:
        """A value reversed, made of what is."""
        if not dims:
            return value
        node, parts = value.producer, made.made_of(value, dims)
        if node is None or parts is None or made.leaves(value, dims) == {(value, dims)}:
            new = last.like([value], [value.aval], params={"dimensions": tuple(sorted(dims))})
        elif node.name == "rev":
            return turn(*parts[0])
        elif node.name == "iota":
            (d,) = dims
            return append(nodes, lambda at: [value.shape[d] - 1 - at], [value], last)[0]
        else:
            new = _reversed(node, [turn(v, own) for v, own in parts], dims)
        nodes.append(new)
        return new.outputs[0]

    for node in graph.nodes:
        inputs = [turn(there.get(v, v), dims) for v, dims in moved.read(node)]
        if node not in moved.turned:
            node.change(inputs=inputs)
            nodes.append(node)
        elif node.name == "rev":
            last, there[node.outputs[0]] = node, inputs[0]
        else:
            makes = moved.turned[node].makes[0]
            new = _reversed(node, inputs, makes)
            nodes.append(new)
            results = new.outputs[::-1] if node.name == "split" and _joins(node, makes) else new.outputs
            there.update(zip(node.outputs, results, strict=True))
    outputs = [turn(there.get(v, v), moved.undone.get(v, NONE)) for v in graph.outputs]
    graph.reset(nodes, outputs).prune()


def _joins(node: Node, dims: Dims) -> bool:
    """Whether an equation joins or splits along a dimension that is reversed."""
    return node.name in JOINS and node.params[JOINS[node.name]] in dims


def _reversed(node: Node, inputs: Sequence[Value], dims: Dims) -> Node:
    """The equation that makes, of operands that are reversed, the results reversed along `dims`, or the other way."""
    order = slice(None, None, -1 if _joins(node, dims) else 1)  # of what is joined or split
    return node.like(inputs[order], [v.aval for v in node.outputs[order]], params=_params(node, dims))


def _params(node: Node, dims: Dims) -> dict[str, Any]:
    params = dict(node.params)
    if node.name == "scan" or (node.name.startswith("cum") and params["axis"] in dims):
        return params | {"reverse": not params["reverse"]}
    if node.name == "split" and params["axis"] in dims:
        return params | {"sizes": params["sizes"][::-1]}
    if node.name == "pad":
        config = enumerate(params["padding_config"])
        return params | {
            "padding_config": tuple((b, a, gap) if d in dims else (a, b, gap) for d, (a, b, gap) in config)
        }
    if node.name == "slice":
        begins, ends, steps = params["start_indices"], params["limit_indices"], params["strides"] or ()
        shapes = zip(node.inputs[0].shape, node.outputs[0].shape, begins, steps or [1] * len(begins), strict=True)
        last = [(n - 1 - a - (count - 1) * step, n - a) for n, count, a, step in shapes]
        both = [last[d] if d in dims else cut for d, cut in enumerate(zip(begins, ends, strict=True))]
        begins, ends = zip(*both, strict=True)
        return params | {"start_indices": begins, "limit_indices": ends}
    return params
