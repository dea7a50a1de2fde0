"""Constants of a scan that are too large to be whole (masks, positions) are made in its body, in each of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transforms.tiling.frontend.flatten import body_graph, evaluate
from transforms.tiling.frontend.trace import traced
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.regions.bodies import run_scan, whole_body, with_gaps


def sink(graph: Graph, node: Node, operands: Sequence[int], sources: Sequence[Value]) -> None:
    """Have the body of a scan make the constants `operands` itself, from `sources`, in each of its steps."""
    kept = [i for i in range(len(node.inputs)) if i not in operands]
    whole = whole_body(body_graph(node, "jaxpr"))

    def run(*values: Any) -> list[Any]:
        def body(inner: Sequence[Any]) -> list[Any]:
            env: dict[Value, Any] = dict(zip(sources, values[len(kept) :], strict=True))
            made = dict(zip(operands, evaluate(env, [node.inputs[i] for i in operands]), strict=True))
            return whole([made.get(i, x) for i, x in enumerate(inner)])

        return run_scan(node, with_gaps(kept, values[: len(kept)], len(node.inputs)), body)

    nodes, outs = traced(run, [*(node.inputs[i] for i in kept), *sources], node)
    graph.replace(node, nodes, dict(zip(node.outputs, outs, strict=True)))
    graph.prune()
