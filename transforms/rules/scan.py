"""`lax.scan`, rebuilt around its body at tile size.

What it carries finds its placement by iteration: it starts where the initial value stands and moves on with what the
body returns, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from transforms.graph import Node, ancestors, body_graph
from transforms.placement import Placement, Span, Tiled, Whole
from transforms.propagate import Region
from transforms.rules import Complete, Move, register
from transforms.rules.regions import (
    Body,
    at_tile,
    body_of,
    carries_for,
    cast,
    join,
    kept,
    spread,
    wait,
    whole_body,
    widen,
)


def scan_counts(node: Node) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried (JAX's versions write this differently)."""
    graph = body_graph(node, "jaxpr")
    carried = sum(len(v.shape) == len(o.shape) for v, o in zip(graph.outputs, node.outputs, strict=True))
    stacked = sum(len(v.shape) != len(o.shape) for v, o in zip(graph.inputs, node.inputs, strict=True))
    return len(node.inputs) - carried - stacked, carried


def push_scan(node: Node, placements: tuple[Placement, ...]) -> Move:
    graph = body_graph(node, "jaxpr")
    constants, carried = scan_counts(node)
    if along := [
        i for i, p in enumerate(placements) if i >= constants + carried and isinstance(p, Tiled) and not p.dim
    ]:
        raise Complete(along, "runs along the cut axis")
    stacked = [p.at(p.dim - 1) if isinstance(p, Tiled) else p for p in placements[constants + carried :]]
    state: tuple[Placement, ...] = placements[constants : constants + carried]
    while True:
        ins = (*placements[:constants], *state, *stacked)
        found = body_of(graph, ins, placements)
        outs = [found.fact(v).placement for v in graph.outputs]
        joined = tuple(join(a, b) for a, b in zip(state, outs[:carried], strict=True))
        if None in joined:
            raise wait(placements, "carries what is cut along different dimensions")
        if joined == state:
            break
        state = joined  # ty: ignore[invalid-assignment]
    results = [p.at(p.dim + 1) if isinstance(p, Tiled) else p for p in outs[carried:]]
    moved = (*placements[:constants], *state, *placements[constants + carried :])
    return Region((*state, *results), moved, (found,))


def run_scan(node: Node, values: Sequence[Any], wanted: Sequence[int], body: Body) -> list[Any]:
    """The results `wanted` of a scan over `body`, None for the others; operands that nothing reads may be None."""
    constants, carried = scan_counts(node)
    carries = carries_for(body_graph(node, "jaxpr"), constants, carried, wanted)
    stacks = [i for i in wanted if i >= carried]
    xs = list(values[constants + carried :])

    def step(state: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        known = dict(zip(carries, state, strict=True))
        outs = body([*values[:constants], *(known.get(i) for i in range(carried)), *xs])
        return [cast(outs[i], known[i]) for i in carries], [outs[i] for i in stacks]

    init = [values[constants + i] for i in carries]
    options = {k: node.params[k] for k in ("length", "reverse", "unroll")}
    final, stacked = lax.scan(step, init, xs, **options)
    results = dict(zip((*carries, *stacks), (*final, *stacked), strict=True))
    return [results.get(i) if i in wanted else None for i in range(len(node.outputs))]


def emit_scan(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    assert isinstance(move, Region)
    constants, carried = scan_counts(node)
    wanted = [i for i, p in enumerate(move.outs) if not isinstance(p, Whole)]
    stacked = [p.at(p.dim - 1) if isinstance(p, Tiled) else p for p in move.ins[constants + carried :]]
    ins = (*move.ins[: constants + carried], *stacked)
    carries = carries_for(body_graph(node, "jaxpr"), constants, carried, wanted)
    outs = [move.outs[i] if i in carries else None for i in range(carried)]
    for placement in kept(move)[carried:]:
        outs.append(placement.at(placement.dim - 1) if isinstance(placement, Tiled) else placement)
    values = [widen(v, p, span) for v, p in zip(values, ins, strict=True)]
    return run_scan(node, values, wanted, at_tile(move.bodies[0], ins, outs, span))


def part_scan(node: Node, wanted: Sequence[int]) -> tuple[list[int], Callable[..., Any]]:
    graph = body_graph(node, "jaxpr")
    constants, carried = scan_counts(node)
    needed = sorted({*carries_for(graph, constants, carried, wanted), *wanted})
    used = ancestors(graph, [graph.outputs[i] for i in needed])
    carries = {constants + i for i in needed if i < carried}
    inputs = [i for i, v in enumerate(graph.inputs) if v in used or i in carries]

    def run(*values: Any) -> list[Any]:
        results = run_scan(node, spread(inputs, values, len(node.inputs)), wanted, whole_body(graph, needed))
        return [results[i] for i in wanted]

    return inputs, run


register("scan", push=push_scan, emit=emit_scan, part=part_scan)
