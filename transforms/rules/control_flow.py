"""Regions: equations with a body. `jax.checkpoint` is bound again, as it was, around the tiled body."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from transforms import lower, schedule
from transforms.graph import CUSTOM_CALLS, REMAT, Node, body, evaluate, flatten
from transforms.placement import Placement, Span, Whole
from transforms.propagate import Analysis, Inline, propagate
from transforms.rules import Complete, Move, partial, refuse_partial, register, tiled


@dataclasses.dataclass(frozen=True)
class Region(Move):
    """A move together with the analysis of the body that it was read off."""

    body: Analysis | None = None


def push_remat(node: Node, placements: tuple[Placement, ...]) -> Move:
    if partial(placements):
        raise Complete(partial(placements), "is a checkpointed block, which takes whole values")
    graph = flatten(ClosedJaxpr(node.params["jaxpr"], ()))
    try:
        found = propagate(graph, placements, None)
    except Inline:
        raise Inline(node) from None  # a block inside must be inlined, which takes this one to be
    outs = tuple(found.fact(v).placement for v in graph.outputs)
    if any(isinstance(p, Whole) for p in outs):
        raise Inline(node)  # what does not depend on the tile should not be computed for each
    return Region(outs, placements, found)


def emit_remat(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    """Bind the primitive, with its own parameters, around the body at tile size."""
    assert isinstance(move, Region) and move.body is not None
    found = move.body
    loop = schedule.region(found)

    def run(start: Any, *values: Any) -> list[Any]:
        inner = span._replace(start=start)
        env = {v: x for v, x, p in zip(found.graph.inputs, values, move.ins, strict=True) if isinstance(p, Whole)}
        cut = {
            (v, p): x for v, x, p in zip(found.graph.inputs, values, move.ins, strict=True) if not isinstance(p, Whole)
        }
        evaluate(env, list(loop.reads))
        tiles = lower.compute(loop, env, cut, inner)
        return [tiles[(v, p)] for v, p in zip(found.graph.outputs, move.outs, strict=True)]

    closed = jax.make_jaxpr(run)(span.start, *values)
    jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    return node.bind([*closed.consts, span.start, *values], node.params | {"jaxpr": jaxpr})


def push_custom(node: Node, placements: tuple[Placement, ...]) -> Move:
    """A function with its own derivative rule, in a graph that is yet to be differentiated: placed, never run."""
    graph = flatten(body(node.params, CUSTOM_CALLS[node.name]))
    found = propagate(graph, placements, None)
    return Region(tuple(found.fact(v).placement for v in graph.outputs), placements, found)


def push_callback(node: Node, placements: tuple[Placement, ...]) -> Move:
    """A callback without results runs once for each tile, on the tile."""
    refuse_partial(node, placements, "reports it")
    if node.outputs:
        raise Complete(tiled(placements), "is a callback whose results have the whole shape")
    return Move((), placements)


register("debug_callback", "debug_print", "io_callback", push=push_callback)
register(*CUSTOM_CALLS, push=push_custom)
register(*REMAT, push=push_remat, emit=emit_remat)
