"""Reversals along the axis: put behind what reads them, until another undoes them or a sum does not see them.

A recurrence from the last row to the first is often written as `scan(f, c, x[::-1])[1][::-1]`; it is the scan that runs
in `reverse`. So is what `lax.associative_scan(reverse=True)` does between its two reversals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from transforms.tiling.ir.graph import Graph, Node, Value, elements
from transforms.tiling.rules.factors import REPEATS, origins, peel, spans

Dims = frozenset[int]
NONE: Dims = frozenset()
JOINS = {"concatenate": "dimension", "split": "axis"}
SAYING_WHERE = ("argmax", "argmin")  # reductions that see in which order they read


class Turned(NamedTuple):
    """Along which dimensions an equation reads each operand reversed, and makes each result so."""

    reads: Sequence[Dims]
    makes: Sequence[Dims]


def postpone(graph: Graph) -> bool:
    """Move reversals behind what reads them. Returns whether smaller arrays are reversed then; else nothing changes."""
    undone: dict[Value, Dims] = {}  # the dimensions along which values are reversed, of those that are made otherwise
    turned: dict[Node, Turned] = {}
    left: set[tuple[Value, Dims]] = set()  # the reversals that there will be
    states = {node.state.yielded for node in graph.nodes if node.state is not None}
    for node in graph.nodes:
        own = [undone.get(v, NONE) for v in node.inputs]
        found = None if states.intersection(node.outputs) else _turned(node, own)
        if found is not None:
            turned[node] = found
            undone.update(zip(node.outputs, found.makes, strict=True))
        reads = [NONE] * len(own) if found is None else found.reads
        left.update((v, d) for v, a, d in zip(node.inputs, own, reads, strict=True) if a != d)
    left.update((v, NONE) for v in graph.outputs if undone.get(v))
    now = [node.outputs[0] for node in graph.nodes if node.name == "rev"]
    if _sizes(v for v, _ in left) >= _sizes(now):
        return False
    _rewrite(graph, turned, undone)
    return True


def _sizes(values: Iterable[Value]) -> list[int]:
    """How many elements arrays have, or those that they repeat; the largest first."""
    return sorted((elements(peel(v, len(v.shape))[0].shape) for v in values), reverse=True)


def _turned(node: Node, own: Sequence[Dims]) -> Turned | None:
    """How an equation is read by those that come to its reversal; None if it has to read its operands as they are.

    Of its operands are `own` the dimensions along which they are reversed. What is not, along one of these, has to be:
    that is worth it where it has fewer elements.
    """
    if node.name == "rev":
        return Turned(own, [own[0] ^ {*node.params["dimensions"]}])
    kept = node.effects or node.state is not None or "axis_name" in node.params or node.name in SAYING_WHERE
    stated = None if kept or not any(own) else spans(node)
    if stated is None:
        return None
    sides = [(v, d | _varies(v), d, names) for v, d, names in zip(node.inputs, own, stated.ins, strict=True)]
    saved: Counter[Any] = Counter()
    for value, dims, done, names in sides:
        for d in dims:
            saved[names[d]] += max(*_sizes([value]), 1) * (1 if d in done else -1)
    chosen = {name for name, size in saved.items() if size > 0 and name is not None and name not in stated.blocked}
    at = lambda names: frozenset(d for d, name in enumerate(names) if name in chosen)
    return Turned([at(names) & dims for _, dims, _, names in sides], [*map(at, stated.outs)]) if chosen else None


def _varies(value: Value) -> Dims:
    """The dimensions along which an array is more than one of its rows, repeated."""
    dims = enumerate(peel(value, len(value.shape))[1])
    return frozenset(d for d, of in dims if of is not None and value.shape[d] != 0)


def _rewrite(graph: Graph, turned: Mapping[Node, Turned], undone: Mapping[Value, Dims]) -> None:
    nodes: list[Node] = []
    there: dict[tuple[Value, Dims], Value] = {}  # what is read in the place of a value that is reversed so
    last = next(node for node in graph.nodes if node.name == "rev")

    def read(value: Value, dims: Dims) -> Value:
        own = undone.get(value, NONE)
        if dims != own and (value, dims) not in there:
            there[value, dims] = turn(read(value, own), dims ^ own)
        return there.get((value, dims), value)

    def turn(value: Value, dims: Dims) -> Value:
        """Reverse an array; of one that repeats another, that one."""
        made = value.producer
        back = origins(made) if made is not None and made.name in REPEATS else None
        if made is not None and back is not None:
            inner = frozenset(back[d] for d in dims & back.keys() if made.inputs[0].shape[back[d]] > 1)
            node = made.like([turn(made.inputs[0], inner)] if inner else made.inputs, [value.aval])
        else:
            node = last.like([value], [value.aval], params={"dimensions": tuple(sorted(dims))})
        nodes.append(node)
        return node.outputs[0]

    for node in graph.nodes:
        how = turned.get(node)
        if how is None:
            node.change(inputs=[read(v, NONE) for v in node.inputs])
            nodes.append(node)
            continue
        results = [read(v, dims) for v, dims in zip(node.inputs, how.reads, strict=True)]
        if node.name == "rev":
            last = node
        else:
            turns = node.name in JOINS and node.params[JOINS[node.name]] in how.makes[0]
            order = slice(None, None, -1 if turns else 1)  # of what is joined or split
            made = node.like(results[order], [v.aval for v in node.outputs[order]], params=_params(node, how.makes[0]))
            nodes.append(made)
            results = made.outputs[order]
        there.update(((v, dims), new) for v, dims, new in zip(node.outputs, how.makes, results, strict=True))
    graph.reset(nodes, [read(v, NONE) for v in graph.outputs])


def _params(node: Node, dims: Dims) -> dict[str, Any]:
    """Those with which an equation makes, from operands that are not reversed along `dims`, results that are not."""
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
