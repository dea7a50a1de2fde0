"""A jaxpr as a flat graph of values and nodes: nested calls inlined, dead code gone, each node with its line.

Whoever changes one does it by the methods of `Value`, `Node` and `Graph`; nobody else writes to their fields.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Primitive

from transforms.layout import devices

# Lines that messages name are the user's: what is traced here has the place of the call.
source_info_util.register_exclusion(str(Path(__file__).parents[1]) + os.sep)

SYMBOLIC = 1024


class Value:
    """One array of the graph: an input, a constant (`const` is set) or the result number `index` of `producer`."""

    __slots__ = ("aval", "const", "index", "producer")

    def __init__(self, aval: Any, producer: Node | None = None, index: int = 0, const: Any = None):
        self.aval, self.producer, self.index, self.const = aval, producer, index, const

    @property
    def shape(self) -> tuple[Any, ...]:  # of int, where `jax.export` leaves none open
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def nbytes(self) -> int:
        return nbytes(self.aval)

    def __repr__(self) -> str:
        return describe(self.aval)

    @property
    def maker(self) -> Node:
        """Its producer, where it is known to have one."""
        assert self.producer is not None, "it is an input or a constant"
        return self.producer

    def retype(self, aval: Any) -> None:
        """Have an array of another type in its place."""
        self.aval = aval


@dataclasses.dataclass(eq=False, slots=True)
class State:
    """What goes from tile to tile (an `iter_arg`, as loops of MLIR have): a node's result is what a tile begins with.

    The node's operand is what the first tile begins with, the last in `reverse`; what a tile leaves, `yielded`, the
    next begins with. `checkpoints` hold what each tile begins with, for loops that go the other way.
    """

    reverse: bool
    checkpoints: Value
    yielded: Value | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One application of a primitive."""

    primitive: Primitive
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    source: Any
    caller: Any  # the source of the call that it was inlined from
    context: Any
    effects: Any = ()
    bodies: dict[Any, Graph] = dataclasses.field(default_factory=dict)  # of an equation with bodies, once they are flat
    together: bool = False  # what devices hold parts of is summed at once, not after the loop
    state: State | None = None  # that its result is, if it is one

    @property
    def name(self) -> str:
        return self.primitive.name

    def __str__(self) -> str:
        where = self.where
        return f"`{self.name}` at {where}" if where else f"`{self.name}`"

    @property
    def where(self) -> str:
        """`file:line (function)` of the user's code; for an equation of a cached jit, which has none, the call's."""
        return source_info_util.summarize(self.place)

    @property
    def place(self) -> Any:
        """The source of the equation, or of the call that it was inlined from."""
        return self.source if ":" in source_info_util.summarize(self.source) or self.caller is None else self.caller

    def like(self, inputs: Sequence[Value], avals: Sequence[Any], **changes: Any) -> Node:
        """A node like this one, of other operands and with results of types `avals`, but for `changes`."""
        made = dataclasses.replace(self, inputs=list(inputs), outputs=[], bodies={}, **changes)
        made.outputs = [Value(aval, made, i) for i, aval in enumerate(avals)]
        return made

    def change(self, **fields: Any) -> None:
        """Let it be another equation, of other operands or parameters, that makes the same results."""
        for name, value in fields.items():
            setattr(self, name, value)

    def make(self, results: Sequence[Value]) -> Node:
        """Let it be what makes some values, whichever equation did so before."""
        self.outputs = list(results)
        for i, out in enumerate(self.outputs):
            out.producer, out.index = self, i
        return self

    def bind(self, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
        """Apply the primitive to `values`; one list of results whatever the primitive returns."""
        params = self.primitive.get_bind_params(self.params if params is None else params)
        with source_info_util.user_context(self.place.traceback), self.context.manager:
            results = self.primitive.bind(*values, **params)
        return list(results) if self.primitive.multiple_results else [results]


@dataclasses.dataclass(eq=False, slots=True)
class Graph:
    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value]

    def insert(self, nodes: Sequence[Node], *, before: Node | None = None, after: Node | None = None) -> None:
        """Put equations before another, after it, or where neither is given before all."""
        there = before or after
        at = 0 if there is None else self.nodes.index(there) + (after is not None)
        self.nodes[at:at] = nodes

    def replace(self, node: Node, nodes: Sequence[Node], results: Sequence[Value]) -> None:
        """Put `nodes` in the place of `node`, and `results` in that of its own."""
        at = self.nodes.index(node)
        self.nodes[at : at + 1] = nodes
        self.substitute(dict(zip(node.outputs, results, strict=True)))

    def reset(self, nodes: Sequence[Node], outputs: Sequence[Value]) -> Graph:
        """Have other equations, and other results."""
        self.nodes[:], self.outputs[:] = nodes, outputs
        return self

    def substitute(self, values: Mapping[Value, Value]) -> None:
        """Have values read in the place of others."""
        for node in self.nodes:
            node.inputs = [values.get(v, v) for v in node.inputs]
        self.outputs[:] = [values.get(v, v) for v in self.outputs]

    def prune(self) -> Graph:
        """Drop the nodes that no output and no side effect needs."""
        states = (s.yielded for node in self.nodes if (s := node.state) is not None and s.yielded is not None)
        alive, kept = {*self.outputs, *states}, []
        for node in reversed(self.nodes):
            if node.effects or any(v in alive for v in node.outputs):
                alive.update(node.inputs)
                kept.append(node)
        return self.reset(kept[::-1], self.outputs)

    def sort(self) -> Graph:
        """Bring the nodes into an order in which operands come first, changing as little as possible."""
        ordered: dict[Node, None] = {}
        for root in self.nodes:
            stack = [root]
            while stack:
                missing = [v.producer for v in stack[-1].inputs if v.producer and v.producer not in ordered]
                if missing:
                    stack.extend(missing)
                else:
                    ordered.setdefault(stack.pop())
        return self.reset(list(ordered), self.outputs)

    def copied(self) -> tuple[Graph, dict[Value, Value]]:
        """A graph to be changed in the place of this one, and the values of this that its own are made after."""
        same: dict[Value, Value] = {}

        def again(value: Value) -> Value:
            if value.const is not None or value in same:
                return same.get(value, value)
            same[value] = made = Value(value.aval)
            return made

        copy = Graph([again(v) for v in self.inputs], [], [])
        for node in self.nodes:
            made = node.like([again(v) for v in node.inputs], [v.aval for v in node.outputs])
            same.update(zip(node.outputs, made.outputs, strict=True))
            copy.nodes.append(made)
        copy.outputs[:] = [again(v) for v in self.outputs]
        return copy, {new: old for old, new in same.items()}


def elements(shape: Iterable[Any]) -> int:
    """How many elements an array has, to be compared: a dimension that `jax.export` leaves open counts as long."""
    return math.prod(n if isinstance(n, (int, np.integer)) else SYMBOLIC for n in shape)


def nbytes(aval: Any, shape: Iterable[Any] | None = None) -> int:
    """Bytes of an array, or of a part of it that has `shape`, on each device."""
    return elements(aval.shape if shape is None else shape) * getattr(aval.dtype, "itemsize", 4) // devices(aval)


def describe(aval: Any) -> str:
    """`float32[8192,256000]`."""
    return f"{getattr(aval.dtype, 'name', aval.dtype)}[{','.join(map(str, aval.shape))}]"


def add(nodes: list[Node], like: Node, primitive: Primitive, inputs: Sequence[Value], avals: Any, **params: Any) -> Any:
    """Append a node; return its results. It has the side effects of the one that it is a part `of`, if of any."""
    effects = like.effects if "of" in params else ()
    node = like.like(inputs, avals, primitive=primitive, params=params, effects=effects, state=None)
    nodes.append(node)
    return node.outputs
