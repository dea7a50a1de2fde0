"""Equations with bodies: `jax.checkpoint` is bound again as it was, with its policy; `while` and `cond` are rebuilt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from transforms.tiling.analysis.propagate import analyse, analyse_body, body_of
from transforms.tiling.frontend.flatten import body_graph, flatten, solver
from transforms.tiling.frontend.trace import any_platform
from transforms.tiling.ir.facts import Analysis, Region
from transforms.tiling.ir.graph import Graph, Node
from transforms.tiling.ir.jaxprs import body_key
from transforms.tiling.ir.obstacles import Complete, Inline, Obstacle
from transforms.tiling.ir.placement import WHOLE, Placement, Span, Whole
from transforms.tiling.ir.walks import ancestors, closure, operands
from transforms.tiling.primitives import CUSTOM_CALLS, REMAT, SOLVE
from transforms.tiling.regions import bodies
from transforms.tiling.regions.bodies import Body
from transforms.tiling.rules import Move, refuse_partial, register, tiled, wait

# -------------------------------------------------------------------------------------------------- jax.checkpoint


def push_remat(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    graph = body_graph(node, "jaxpr")
    found = analyse_body(graph, placements, {})
    if isinstance(found, Obstacle):
        return Inline(node) if isinstance(found, Inline) else found  # it takes more than one loop
    return Region(tuple(found.fact(v).placement for v in graph.outputs), placements, (found,), bodies.held(found))


def emit_remat(node: Node, values: list[Any], move: Region, span: Span) -> list[Any]:
    """Bind the primitive, with its own parameters, around the body at tile size."""

    def run(start: Any, *values: Any) -> list[Any]:
        return bodies.at_tile(move.bodies[0], move.ins, move.outs, span._replace(start=start))(values)

    closed = jax.make_jaxpr(run)(span.start, *values)
    jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    return node.bind([*closed.consts, span.start, *values], node.params | {"jaxpr": jaxpr})


def part_remat(node: Node, values: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    return bodies.whole_body(body_graph(node, "jaxpr"), wanted)(values)


# ------------------------------------------------------------------------------------------------------------ while


def push_while(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    tests, constants = node.params["cond_nconsts"], node.params["body_nconsts"]
    test, graph = body_graph(node, "cond_jaxpr"), body_graph(node, "body_jaxpr")
    first = tests + constants
    state: tuple[Placement, ...] = placements[first:]
    while True:
        given = (*placements[tests:first], *state)
        found = body_of(graph, given, placements, tests)
        if isinstance(found, Obstacle):
            return found
        joined = tuple(bodies.join(a, found.fact(v).placement) for a, v in zip(state, graph.outputs, strict=True))
        if None in joined:
            return wait(placements, "carries what is cut along different dimensions")
        if joined == state:
            break
        state = joined  # ty: ignore[invalid-assignment]
    ended = analyse_test(test, (*placements[:tests], *state))
    if isinstance(ended, Obstacle):
        return ended
    if ended is None:
        return wait(placements, "ends on what differs from tile to tile")
    return Region(state, (*placements[:first], *state), (ended, found))


def analyse_test(graph: Graph, placements: Sequence[Placement]) -> Analysis | Obstacle | None:
    """The test of a while loop, if it is the same for every tile."""
    found = analyse(graph, placements, None)
    if isinstance(found, Obstacle):
        return None if isinstance(found, (Complete, Inline)) else found
    return found if isinstance(found.fact(graph.outputs[0]).placement, Whole) else None


def run_while(node: Node, values: Sequence[Any], carries: Sequence[int], test: Body, body: Body) -> list[Any]:
    """The carried values `carries` after a while loop, None for the others."""
    tests = node.params["cond_nconsts"]
    first = tests + node.params["body_nconsts"]
    full = lambda state: bodies.with_gaps(carries, state, len(node.outputs))
    go_on = lambda state: test([*values[:tests], *full(state)])[0]

    def step(state: list[Any]) -> list[Any]:
        outs = body([*values[tests:first], *full(state)])
        return [bodies.cast(outs[i], s) for i, s in zip(carries, state, strict=True)]

    return full(lax.while_loop(go_on, step, [values[first + i] for i in carries]))


def emit_while(node: Node, values: list[Any], move: Region, span: Span) -> list[Any]:
    tests = node.params["cond_nconsts"]
    first = tests + node.params["body_nconsts"]
    ended, found = move.bodies
    test = bodies.at_tile(ended, (*move.ins[:tests], *move.outs), [WHOLE], span)
    body = bodies.at_tile(found, (*move.ins[tests:first], *move.outs), move.outs, span)
    values = [bodies.widen(v, p, span) for v, p in zip(values, move.ins, strict=True)]
    return run_while(node, values, range(len(node.outputs)), test, body)


def part_while(node: Node, values: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """What is carried for the results `wanted` and for the test: JAX carries all of it."""
    test, body = body_graph(node, "cond_jaxpr"), body_graph(node, "body_jaxpr")
    read, state = ancestors(test.outputs), body.inputs[node.params["body_nconsts"] :]
    first = {*wanted, *(i for i, v in enumerate(test.inputs[node.params["cond_nconsts"] :]) if v in read)}
    after = dict(zip(state, body.outputs, strict=True))
    used = set(closure([state[i] for i in first], lambda v: [after[v]] if v in after else operands(v)))
    carries = [i for i, v in enumerate(state) if v in used]
    return run_while(node, values, carries, bodies.whole_body(test), bodies.whole_body(body, carries))


# ------------------------------------------------------------------------------------------------------------- cond


def push_cond(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    if not isinstance(placements[0], Whole):
        return Complete([0], "chooses by it")
    found = push_branches(node, placements)
    return Inline(node) if isinstance(found, Complete) and any_platform(node) is not None else found


def push_branches(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    found: list[Analysis] = []
    for graph in branches_of(node):
        branch = body_of(graph, placements[1:], placements, 1)
        if isinstance(branch, Obstacle):
            return branch
        found.append(branch)
    placed = ([branch.fact(v).placement for v in branch.graph.outputs] for branch in found)
    outs = tuple(functools.reduce(bodies.join, places, WHOLE) for places in zip(*placed, strict=True))
    if None in outs:
        return wait(placements, "has branches whose results are cut along different dimensions")
    return Region(outs, placements, tuple(found))  # ty: ignore[invalid-argument-type]


def branches_of(node: Node) -> list[Graph]:
    return [body_graph(node, "branches", i) for i in range(len(node.params["branches"]))]


def choose(node: Node, values: Sequence[Any], runs: Sequence[Body]) -> Any:
    """`lax.switch`; or, where the platform chooses, `lax.platform_dependent`: which sees what all branches read."""
    index, *values = values
    branches = [lambda *values, run=run: run(values) for run in runs]
    if (platforms := node.params.get("branches_platforms")) is None:
        return lax.switch(index, branches, *values)
    named = {p: fn for names, fn in zip(platforms, branches, strict=True) for p in names or ("default",)}
    return lax.platform_dependent(*values, **named)


def emit_cond(node: Node, values: list[Any], move: Region, span: Span) -> list[Any]:
    def branch(found: Analysis) -> Body:
        body = bodies.at_tile(found, move.ins[1:], move.outs, span)
        return lambda values: [bodies.widen(x, p, span) for x, p in zip(body(values), move.outs, strict=True)]

    return choose(node, values, [branch(b) for b in move.bodies])


def part_cond(node: Node, values: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    return choose(node, values, [bodies.whole_body(graph, wanted) for graph in branches_of(node)])


# ------------------------------------------------------------------------------------- custom derivatives, callbacks


def push_custom(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """A function, or a solve, with its own derivative rule, in a graph yet to be differentiated: placed, never run."""
    closed, taken = solver(node.params, placements) if node.name == SOLVE else (None, placements)
    graph = body_graph(node, body_key(node.params)) if closed is None else flatten(closed)
    found = analyse(graph, taken, None)
    if isinstance(found, Obstacle):
        return found
    return Move(tuple(found.fact(v).placement for v in graph.outputs), placements)


def push_callback(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """A callback without results runs once for each tile, on the tile."""
    if (parts := refuse_partial(node, placements, "reports it")) is not None:
        return parts
    if node.outputs:
        return Complete(tiled(placements), "is a callback whose results have the whole shape")
    return Move((), placements)


register("debug_callback", "debug_print", "io_callback", push=push_callback)
register(*CUSTOM_CALLS, SOLVE, push=push_custom)
register(*REMAT, push=push_remat, emit=emit_remat, part=part_remat)
register("while", push=push_while, emit=emit_while, part=part_while)
register("cond", push=push_cond, emit=emit_cond, part=part_cond)
