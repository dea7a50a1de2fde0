"""Loop-carried state: what goes from tile to tile, in the direction of a loop, and what the other way is known of it.

`carried`, an equation of our own, is what the tiles before this one left: it reads a loop's accumulator. A loop that
goes the other way cannot have come by it. It begins each tile with the state that an earlier loop found there, and
stored: `begun`, an array of one state for each tile. That is checkpointing of a recurrence with one checkpoint a tile
(Griewank 1992, treeverse; Griewank & Walther 2000, revolve).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from transforms.layout import TOGETHER, full, stacked
from transforms.tiling.ir.graph import Graph, Node, State, Value, add
from transforms.tiling.ir.placement import Span
from transforms.tiling.rules import Move, of_nothing, push_completed, register

carried_p = Primitive("carried")  # what the tiles before this one left; its operand before the first
begun_p = Primitive("begun")  # the same, of all tiles


def begin(nodes: list[Node], node: Node, init: Value, aval: Any, span: Span, reverse: bool) -> Value:
    """Append the state that each tile begins with: `init` where the axis begins, or ends in `reverse`."""
    (state,) = add(nodes, node, carried_p, [init], [aval])
    checkpoints = stacked(aval, -(-span.total // span.length))
    (begun,) = add([], node, begun_p, [state], [checkpoints], size=span.length)
    state.maker.change(state=State(reverse, begun))
    return state


def hand_on(
    nodes: list[Node],
    node: Node,
    primitive: Primitive,
    operands: Sequence[Value],
    first: Sequence[Value],
    outs: Any,
    span: Span,
    **params: Any,
) -> Any:
    """Append an equation that reads `operands`, then what the tile before left; return its results.

    The last of these, of types `outs`, it leaves in turn; `first` is what the first tile begins with. Where `params` do
    not say which way, it is that of `node`.
    """
    reverse = (node.params | params).get("reverse", False)
    states = [begin(nodes, node, v, aval, span, reverse) for v, aval in zip(first, outs[-len(first) :], strict=True)]
    made = add(nodes, node, primitive, [*operands, *states], outs, **params)
    for state, left in zip(states, made[-len(first) :], strict=True):
        leave(state, left)
    return made


def scalar(number: Any, dtype: Any) -> Value:
    """One number as a value."""
    return Value(ShapedArray((), dtype), const=np.asarray(number).astype(dtype))


def resize(graph: Graph, total: int, size: int) -> None:
    """Have states for tiles of another length."""
    for begun in (s.checkpoints for n in graph.nodes if (s := n.state) is not None):
        begun.maker.change(params={"size": size})
        begun.retype(begun.aval.update(shape=(-(-total // size), *begun.shape[1:])))


def leave(state: Value, total: Value) -> None:
    """Let `total`, what a tile leaves, be the state that the next begins with."""
    known = state.maker.state
    assert known is not None
    state.maker.change(state=dataclasses.replace(known, yielded=total))


def resume_state(node: Node, source: Value, given: Any, before: Mapping[Value, Any], span: Span) -> Any:
    """The state that a tile begins with: as an earlier loop stored it, or as the tile before left it."""
    state = node.state
    assert state is not None
    if source is state.checkpoints:
        number = span.start // source.maker.params["size"]
        return lax.dynamic_index_in_dim(given, number, 0, keepdims=False)
    aval = node.outputs[0].aval
    init = given if jnp.shape(given) == aval.shape else full(aval, given, aval.dtype, TOGETHER)
    if not before or state.yielded is None:
        return init
    first = span.start + span.length == span.total if state.reverse else span.start == 0
    return lax.select(first, init, before[state.yielded])


def emit_begun(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    return [jnp.expand_dims(values[0], 0)]


register("carried", push=push_completed, reason="begins a loop along the cut axis with it", resume=resume_state)
register("begun", push=of_nothing, emit=emit_begun)
