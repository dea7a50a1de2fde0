"""States that go from tile to tile, in the direction of a loop, and what loops that go the other way know of them.

`carried`, an equation of our own, is what the tiles before this one left: it reads a loop's accumulator. A loop that
goes the other way cannot have come by it. It begins each tile with the state that an earlier loop found there, and
stored: `begun`, an array of one state for each tile.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from transforms.tiling.ir.edit import add
from transforms.tiling.ir.facts import Analysis, Fact
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.obstacles import Complete
from transforms.tiling.ir.placement import WHOLE, Placement, Span, Stacked
from transforms.tiling.mesh.layout import named
from transforms.tiling.rules import Move, register

carried_p = Primitive("carried")  # what the tiles before this one left; its operand before the first
begun_p = Primitive("begun")  # the same, of all tiles


def begin(nodes: list[Node], node: Node, init: Value, aval: Any, span: Span, reverse: bool = False) -> Value:
    """Append the state that each tile begins with: `init` where the axis begins, or, in `reverse`, where it ends."""
    (state,) = add(nodes, node, carried_p, [init], [aval], reverse=reverse)
    sharding, shape = named(aval), (-(-span.total // span.length), *aval.shape)
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    (begun,) = add([], node, begun_p, [state], [ShapedArray(shape, aval.dtype, sharding=sharding)], size=span.length)
    producer(state).params["begun"] = begun
    return state


def resize(graph: Graph, total: int, size: int) -> None:
    """Have states for tiles of another length."""
    for node in (n for n in graph.nodes if n.name == "carried"):
        begun = node.params["begun"]
        begun.producer.params["size"] = size
        begun.aval = begun.aval.update(shape=(-(-total // size), *begun.shape[1:]))


def leave(state: Value, total: Value) -> None:
    """Let `total`, what a tile leaves, be the state that the next begins with."""
    producer(state).params["total"] = total


def producer(state: Value) -> Node:
    assert state.producer is not None
    return state.producer


def place(found: Analysis) -> None:
    """Place the arrays of states that loops may store."""
    for node in (n for n in found.graph.nodes if n.name == "carried"):
        begun, (state,) = node.params["begun"], node.outputs
        stage = max(found.fact(state).stage, found.fact(node.params["total"]).stage)
        placement = Stacked(begun.producer.params["size"])
        found.facts[begun] = Fact(placement, found.turned(stage, node.params["reverse"]))
        found.moves[begun.producer] = Move((placement,), (WHOLE,))
        found.ways[begun] = node.params["reverse"]


def state_of(node: Node, init: Any, stored: Any | None, before: Any, span: Span) -> Any:
    """The state that a tile begins with, from what is `stored` of it, or from what the tile before left."""
    reverse, shape = node.params["reverse"], node.outputs[0].shape
    if stored is not None:
        number = span.start // node.params["begun"].producer.params["size"]
        return lax.dynamic_index_in_dim(stored, number, 0, keepdims=False)
    state = jnp.broadcast_to(init, shape)
    if not before:
        return state
    first = span.start + span.length == span.total if reverse else span.start == 0
    return lax.select(first, state, before[node.params["total"]])


def push_carried(node: Node, placements: tuple[Placement, ...]) -> Complete:
    return Complete([0], "begins a loop along the cut axis with it")


def push_begun(node: Node, placements: tuple[Placement, ...]) -> Move:
    return Move((Stacked(node.params["size"]),), (WHOLE,))


def emit_begun(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    return [jnp.expand_dims(values[0], 0)]


register("carried", push=push_carried)
register("begun", push=push_begun, emit=emit_begun)
