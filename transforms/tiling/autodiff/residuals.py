"""Residuals: what the loops of a program end in is handed to its derivatives, which would need loops to find it.

The maximum and the denominator of a softmax over the cut axis, and what it weighs, are known once the function has been
evaluated. They are further results of it then, and further inputs of its backward pass: the backward pass reads them
where it would compute them. It is a function of the other inputs alone, so derivatives of any order are what they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from transforms.layout import named
from transforms.tiling.analysis.rounding import decides
from transforms.tiling.frontend.trace import traced
from transforms.tiling.ir.graph import Graph, Value
from transforms.tiling.ir.numbering import Numbering
from transforms.tiling.passes.reassociate import Product, reassociate
from transforms.tiling.primitives import has


@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """Values of a graph that are whole and known once its loops have run."""

    graph: Graph
    values: tuple[Value, ...]

    def among(self, graph: Graph) -> list[Value]:
        """The same values of the same graph, made again."""
        twins = dict(zip(every(self.graph), every(graph), strict=True))
        return [twins[v] for v in self.values]

    def use(self, graph: Graph, first: int) -> None:
        """Read the values from the inputs of a derived graph, number `first` on, wherever that would compute them."""
        numbering = Numbering()
        theirs, ours = numbering(self.graph), numbering(graph)
        given = dict(zip(self.values, graph.inputs[first:], strict=False))
        for value, known in given.items():
            if value.producer is not None and has(value.producer.name, "product"):
                reassociate(graph, Product(value.producer, known), theirs | ours)
        inputs = {theirs[v]: known for v, known in given.items()}
        found = {v: inputs[n] for v, n in ours.items() if n in inputs and not decides(graph, v)}
        graph.substitute({v: _rounded(graph, known, v) for v, known in found.items()})
        graph.prune()


def residuals_of(graph: Graph, found: Iterable[Value], largest: int) -> Residuals:
    """What is worth handing on of the values `found`: arrays of up to `largest` bytes."""
    if any(named(v.aval) is not None for v in graph.inputs):
        return Residuals(graph, ())  # the derivative would have to be told how they are spread over devices
    kept = (v for v in found if v.producer is not None and v.nbytes <= largest)
    return Residuals(graph, tuple(dict.fromkeys(kept)))


def every(graph: Graph) -> list[Value]:
    """All values of a graph, in order."""
    return [*graph.inputs, *(v for node in graph.nodes for v in node.outputs)]


def _rounded(graph: Graph, known: Value, value: Value) -> Value:
    """What is known of a value, in its dtype."""
    if known.dtype == value.dtype:
        return known
    nodes, (rounded,) = traced(lambda x: x.astype(value.dtype), [known], value.maker)
    graph.insert(nodes)
    return rounded
