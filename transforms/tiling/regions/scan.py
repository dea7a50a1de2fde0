"""`lax.scan`, rebuilt around its body at tile size.

What it carries finds its placement by iteration: it starts where the initial value stands and moves on with what the
body returns, until nothing changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from transforms.layout import Held, conform, like
from transforms.tiling.analysis.limits import human, too_large
from transforms.tiling.analysis.propagate import body_of
from transforms.tiling.frontend.flatten import body_graph, evaluate
from transforms.tiling.ir.facts import Outlined, Region
from transforms.tiling.ir.graph import Node, Value, describe
from transforms.tiling.ir.obstacles import Complete, Obstacle, Refusal
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled
from transforms.tiling.ir.walks import closure, operands, scan_counts
from transforms.tiling.mesh.sums import flowing
from transforms.tiling.regions import bodies
from transforms.tiling.rules import RULES, Move, register, wait


def of_a_step(placement: Placement) -> Placement:
    """Where one step's entry stands of what is scanned over, or stacked."""
    return placement.at(placement.dim - 1) if isinstance(placement, Tiled) else placement


def of_all_steps(placement: Placement) -> Placement:
    return placement.at(placement.dim + 1) if isinstance(placement, Tiled) else placement


def push_scan(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    graph = body_graph(node, "jaxpr")
    constants, carried = scan_counts(node)
    first = constants + carried
    if along := [i for i, p in enumerate(placements) if i >= first and isinstance(p, Tiled) and not p.dim]:
        if (move := push_sums(node, placements)) is not None:
            return move
        return Complete(along, "runs along the cut axis", along=_alone(placements, along))
    stacked = [*map(of_a_step, placements[constants + carried :])]
    state: tuple[Placement, ...] = placements[constants : constants + carried]
    lazy = flowing(graph)
    apart = Held()
    while True:
        ins = (*placements[:constants], *state, *stacked)
        found = body_of(graph, ins, placements, apart=apart)
        if isinstance(found, Obstacle):
            return found
        outs = [found.fact(v).placement for v in graph.outputs]
        joined = tuple(bodies.join(a, b) for a, b in zip(state, outs[:carried], strict=True))
        if None in joined:
            return wait(placements, "carries what is cut along different dimensions")
        parts = zip(graph.inputs[constants:], bodies.held(found)[:carried], strict=False)
        kept_apart = Held({v: a for v, a in parts if a.axes and v in lazy})
        if joined == state and kept_apart == apart:
            break
        state, apart = joined, kept_apart  # ty: ignore[invalid-assignment]
    results = map(of_all_steps, outs[carried:])
    moved = (*placements[:constants], *state, *placements[constants + carried :])
    carries = [apart[v] for v in graph.inputs[constants : constants + carried]]
    return Region((*state, *results), moved, (found,), (*carries, *bodies.held(found)[carried:]))


def _alone(placements: tuple[Placement, ...], operands: Sequence[int]) -> bool:
    """Whether operands are cut alike, and the axis, or groups of its rows, is the dimension that is scanned."""
    cuts = {placements[i] for i in operands}
    return len(cuts) == 1 and all(isinstance(p, Tiled) and (p.dim, p.major, p.minor) == (0, 1, 1) for p in cuts)


def push_sums(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """Along the cut axis, where no step sees another: what is carried is added to, or stays as it is.

    Such are `lax.map`, and its gradients. Tiles sum their own steps, in any order.
    """
    constants, carried = scan_counts(node)
    first, adds, graph = constants + carried, bodies.added(node), body_graph(node, "jaxpr")
    kept = [i for i in range(carried) if graph.outputs[i] is graph.inputs[constants + i]]
    cuts = {*placements[first:]} - {WHOLE}
    if len(adds) + len(kept) < carried or len(cuts) != 1:
        return None
    (cut,) = cuts
    ins = (*(WHOLE,) * constants, *(Partial("sum") if i in adds else WHOLE for i in range(carried)))
    if any(p not in (WHOLE, wanted) for p, wanted in zip(placements, ins, strict=False)):
        return None
    outs = (*(Partial("sum" if i in adds else "last") for i in range(carried)), *(cut,) * (len(node.outputs) - carried))
    return Move(outs, (*ins, *(cut,) * (len(placements) - first)))


def emit_scan(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    constants, carried = scan_counts(node)
    if not isinstance(move, Region):
        return bodies.run_part(node, values, move, span)  # each tile's sums
    ins = (*move.ins[: constants + carried], *map(of_a_step, move.ins[constants + carried :]))
    outs = (*move.outs[:carried], *map(of_a_step, move.outs[carried:]))
    values = [bodies.widen(v, p, span) for v, p in zip(values, ins, strict=True)]
    for i in range(constants, constants + carried):
        values[i] = conform(values[i], node.inputs[i].aval, move.apart[i - constants])
    return bodies.run_scan(node, values, bodies.at_tile(move.bodies[0], ins, outs, span))


# ------------------------------------------------------------------- a scan of whole operands whose body runs in tiles


def outline_scan(node: Node, placements: tuple[Placement, ...], limits: Any) -> Move | Obstacle | None:
    """Layers that mix all places along the cut axis: the scan runs outside the loops, each layer is a tiled program."""
    constants, carried = scan_counts(node)
    stacked = placements[constants + carried :]
    if any(isinstance(p, Tiled) and p.dim == 0 for p in stacked):
        return None
    options = dataclasses.replace(limits.options, floor=limits.largest, outline=False)
    closed, kept = sink_constants(node)
    reuse = {i: [kept.index(constants + i)] for i in range(carried)}
    state: tuple[Placement, ...] = placements[constants : constants + carried]
    while True:
        ins = (*placements[:constants], *state, *map(of_a_step, stacked))
        program = limits.nested(closed, tuple(ins[i] for i in kept), options, reuse=reuse)
        if program.refusal is not None:
            return Refusal(program.refusal.message)  # its origins are no equations of this graph
        outs = program.output_placements
        joined = tuple(bodies.join(a, b) for a, b in zip(state, outs[:carried], strict=True))
        if None in joined:
            return None
        if joined == state:
            break
        state = joined  # ty: ignore[invalid-assignment]
    if (refusal := check_steps(node, (*state, *outs[carried:]), limits)) is not None:
        return refusal

    def run(values: list[Any]) -> list[Any]:
        body = lambda inner: program.run(*(jnp.asarray(inner[i]) for i in kept))
        return bodies.run_scan(node, values, body)

    results = map(of_all_steps, outs[carried:])
    constant = tuple(i for i in kept if i < constants)
    return Outlined((*state, *results), (WHOLE,) * len(placements), (program,), tuple(kept), run, constant)


def check_steps(node: Node, outs: Sequence[Placement], limits: Any) -> Refusal | None:
    """Refuse a scan that would keep more of each step than inputs, outputs, or the state that steps hand on."""
    _, carried = scan_counts(node)
    adds = bodies.added(node)
    cut = [i for i, p in enumerate(outs) if isinstance(p, Tiled)]
    sizes = {i: node.outputs[i].nbytes // (1 if i < carried else max(1, node.params["length"])) for i in cut}
    state = max((sizes[i] for i in cut if i < carried and i not in adds), default=0)
    large = [i for i in cut if sizes[i] > max(limits.bound, state) and limits.gather != "any"]
    if not large:
        return None
    most = max(large, key=lambda i: sizes[i])
    what = "adds up a cut array from step to step" if most < carried else "keeps a cut array of each step"
    # Derivatives have tried to compute the steps again (`autodiff.steps`), but where a policy says what they do.
    remedy = "put the body into `jax.checkpoint`, unroll the loop" if limits.options.policy else "unroll the loop"
    array = f"{describe(node.outputs[most].aval)} {outs[most]}, {human(sizes[most])} a step"
    why = f"it {what}, which would have to be whole"
    return Refusal(too_large(limits, str(node), why, f"array: {array}", f"{remedy}, cut another axis"))


def sink_constants(node: Node) -> tuple[ClosedJaxpr, list[int]]:
    """A scan's body which makes masks and positions itself, tile by tile; and the operands that it still has."""
    graph = body_graph(node, "jaxpr")
    constants, _ = scan_counts(node)
    made = {i for i in range(constants) if node.inputs[i].shape and from_nothing(node.inputs[i])}
    kept = [i for i in range(len(node.inputs)) if i not in made]

    whole = bodies.whole_body(graph, effects=True)

    def body(*values: Any) -> list[Any]:
        given = bodies.with_gaps(kept, values, len(node.inputs))
        return whole([evaluate({}, [node.inputs[i]])[0] if i in made else x for i, x in enumerate(given)])

    avals = [like(graph.inputs[i].aval) for i in kept]
    return jax.make_jaxpr(body)(*avals), kept


def part_scan(node: Node, values: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """All results of a scan over what the graph has of its body: JAX leaves out of that what `wanted` does not need.

    Of the body as it was written it would not: an equation of several results, a barrier, it keeps whole.
    """
    del wanted
    return bodies.run_scan(node, values, bodies.whole_body(body_graph(node, "jaxpr")))


def from_nothing(value: Value, steps: int = 64) -> bool:
    """Whether a value is made of constants in a few cheap steps."""
    for count, v in enumerate(v for v in closure([value], operands) if v.const is None):
        rule = None if v.producer is None else RULES[v.producer.name]
        if rule is None or rule.pull is None or rule.heavy or count >= steps:
            return False
    return True


register("scan", push=push_scan, emit=emit_scan, part=part_scan, outline=outline_scan)
