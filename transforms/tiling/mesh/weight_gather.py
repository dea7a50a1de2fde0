"""All-gathers of weights before the loop whose products read them: loop-invariant, so once and not for each tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec

from transforms.layout import Held, entries_of, layout, move, named, spec
from transforms.tiling.frontend.flatten import body_graph
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.loops import Loop, Ref
from transforms.tiling.ir.walks import closure, scan_counts
from transforms.tiling.mesh.sums import demand
from transforms.tiling.primitives import REMAT, has

Wanted = tuple[PartitionSpec, Any]


def all_gather(loop: Loop, read: Callable[[Value], Any], held: Held) -> dict[Any, Any]:
    """The whole operands of a loop's products and of those inside its equations with bodies, each gathered once.

    Args:
        loop: the loop.
        read: returns a whole value.
        held: sums that devices hold parts of.
    """
    return {key: move(read(key[0]).astype(key[2]), key[1]) for key in gathered(loop, held)}


def gathered(loop: Loop, held: Held) -> list[tuple[Value, PartitionSpec, Any]]:
    """What is gathered for a loop: the value, and how it is spread and its dtype from then on."""
    keys = (_key(step.node, i, ref, held) for step in loop.all_steps for i, ref in enumerate(step.refs))
    return list(dict.fromkeys(key for key in keys if key is not None))


def find(env: dict[Any, Any], node: Node, operand: int, ref: Ref, held: Held) -> Any | None:
    """What was gathered for an operand, if it was."""
    key = _key(node, operand, ref, held)
    return None if key is None else env.get(key)


def _key(node: Node, operand: int, ref: Ref, held: Held) -> tuple[Value, PartitionSpec, Any] | None:
    if ref.how != "whole" or named(ref.value.aval) is None:
        return None
    found = wanted(node, operand, held)
    return None if found is None or found == (spec(ref.value.aval), ref.value.dtype) else (ref.value, *found)


def wanted(node: Node, operand: int, held: Held) -> Wanted | None:
    """How the products that read an operand need it spread, and in which dtype; None if not only such alike do."""
    if has(node.name, "product"):
        return demand(node, operand, held[node.outputs[0]]), node.inputs[operand].dtype
    if node.name in REMAT:
        return _inside(body_graph(node, "jaxpr"), operand)
    if not has(node.name, "steps"):
        return None
    constants, carried = scan_counts(node)
    if constants <= operand < constants + carried:
        return None  # it changes from step to step
    found = _inside(body_graph(node, "jaxpr"), operand)
    if found is None or operand < constants:
        return found
    return layout([(), *entries_of(found[0])]), found[1]


def _inside(graph: Graph, number: int) -> Wanted | None:
    """How the products in a body need one of its inputs."""
    casts = [n for n in graph.nodes if has(n.name, "casts")]
    forms = {*closure([graph.inputs[number]], lambda value: [n.outputs[0] for n in casts if n.inputs[0] is value])}
    others = [n for n in graph.nodes if n not in casts]
    found = {wanted(n, i, Held()) for n in others for i, value in enumerate(n.inputs) if value in forms}
    return found.pop() if len(found) == 1 and forms.isdisjoint(graph.outputs) else None
