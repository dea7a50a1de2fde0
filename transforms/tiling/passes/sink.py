"""Constants of a scan that are too large to be whole (masks, positions) are made in its body, in each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transforms.tiling.frontend.flatten import body_graph, evaluate
from transforms.tiling.frontend.trace import traced
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.regions.bodies import Body, run_scan, whole_body, with_gaps


def sink(
    graph: Graph,
    node: Node,
    operands: Sequence[int],
    sources: Sequence[Value],
    body: Body | None = None,
    around: Callable[[Body], Body] = lambda step: step,
) -> None:
    """Have the body of a scan make the constants `operands` itself, from `sources`, in each of its steps.

    Args:
        graph: what the scan is in.
        node: the scan.
        operands: the numbers of the constants.
        sources: what they are computed from.
        body: the scan's, if it is not to run as a graph.
        around: what a step, with all that it makes, is put into.
    """
    kept = [i for i in range(len(node.inputs)) if i not in operands]
    whole = body or whole_body(body_graph(node, "jaxpr"))

    def run(*values: Any) -> list[Any]:
        def step(inner: Sequence[Any]) -> list[Any]:
            env: dict[Value, Any] = dict(zip(sources, values[len(kept) :], strict=True))
            made = dict(zip(operands, evaluate(env, [node.inputs[i] for i in operands]), strict=True))
            return whole([made.get(i, x) for i, x in enumerate(inner)])

        return run_scan(node, with_gaps(kept, values[: len(kept)], len(node.inputs)), around(step))

    graph.replace(node, *traced(run, [*(node.inputs[i] for i in kept), *sources], node))
    graph.prune()
