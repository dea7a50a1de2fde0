"""`jax.shard_map`: its body runs on the share that each device has of a tile.

A cut dimension that the mesh does not spread is cut alike on every device. One that it spreads is cut within each
device's share, so that a tile takes a part from every device. Sums over the cut axis that leave the body are parts of a
sum, as elsewhere; devices exchange with every tile what the body has them exchange.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transforms.layout import entries_of
from transforms.tiling.analysis.propagate import body_of
from transforms.tiling.frontend.flatten import body_graph
from transforms.tiling.ir.facts import Region
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import Placement, Span, Tiled
from transforms.tiling.regions.bodies import at_tile, held, whole_body, widen, with_gaps
from transforms.tiling.rules import Move, register


def share(node: Node, spec: PartitionSpec, dim: int) -> int:
    """Over how many devices a spec of a `shard_map` spreads a dimension."""
    entries = entries_of(spec)
    return math.prod(node.params["mesh"].shape[a] for a in entries[dim]) if dim < len(entries) else 1


def inside(node: Node, spec: PartitionSpec, placement: Placement, out: bool = False) -> Placement:
    """Where an operand of this spec stands in the body; or, `out` of it, a result that stands so in the body."""
    if not isinstance(placement, Tiled):
        return placement
    devices, major = share(node, spec, placement.dim), placement.major
    return dataclasses.replace(placement, major=major * devices if out else major // devices)


def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    graph = body_graph(node, "jaxpr")
    for i, p in enumerate(placements):
        if isinstance(p, Tiled) and p.major % share(node, node.params["in_specs"][i], p.dim):
            return Complete([i], "spreads the cut axis over devices")
    ins = [inside(node, spec, p) for spec, p in zip(node.params["in_specs"], placements, strict=True)]
    found = body_of(graph, ins, placements)
    if isinstance(found, Obstacle):
        return found
    made = zip(node.params["out_specs"], graph.outputs, strict=True)
    outs = [inside(node, spec, found.fact(v).placement, out=True) for spec, v in made]
    return Region(tuple(outs), placements, (found,), held(found))


def emit(node: Node, values: list[Any], move: Region, span: Span) -> list[Any]:
    (found,) = move.bodies
    ins = [inside(node, spec, p) for spec, p in zip(node.params["in_specs"], move.ins, strict=True)]
    outs = [found.fact(v).placement for v in found.graph.outputs]

    def run(start: Any, *values: Any) -> list[Any]:
        results = at_tile(found, ins, outs, span._replace(start=start))(values)
        return [widen(x, p, span) for x, p in zip(results, move.outs, strict=True)]

    specs = (PartitionSpec(), *node.params["in_specs"])
    return over_devices(node, run, specs, range(len(outs)))(jnp.asarray(span.start), *values)


def over_devices(node: Node, run: Callable[..., Any], specs: Sequence[PartitionSpec], outputs: Sequence[int]) -> Any:
    """`run` as the body of a `shard_map` like the node's, for its results `outputs`; `specs` are of the operands."""
    return jax.shard_map(
        run,
        mesh=node.params["mesh"],
        in_specs=tuple(specs),
        out_specs=[node.params["out_specs"][i] for i in outputs],
        axis_names=set(node.params["newly_manual_axes"]),
        check_vma=node.params["check_vma"],
    )


def part(node: Node, values: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    body = whole_body(body_graph(node, "jaxpr"), wanted)

    def run(*values: Any) -> list[Any]:
        results = body(values)
        return [results[i] for i in wanted]

    made = over_devices(node, run, node.params["in_specs"], wanted)(*values)
    return with_gaps(wanted, made, len(node.outputs))


register("shard_map", push=push, emit=emit, part=part, alone=True)
