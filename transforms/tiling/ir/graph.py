"""A jaxpr as a flat graph of values and nodes: nested calls inlined, dead code gone, each node with its line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, Primitive

from transforms.tiling.ir.jaxprs import bodies, counts
from transforms.tiling.mesh.layout import devices
from transforms.tiling.primitives import has

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
        return f"`{self.name}` at {self.where}"

    @property
    def where(self) -> str:
        """`file:line (function)` of the user's code; for an equation of a cached jit, which has none, the call's."""
        own = source_info_util.summarize(self.source)
        return own if ":" in own or self.caller is None else source_info_util.summarize(self.caller)

    def like(self, inputs: Sequence[Value], avals: Sequence[Any], **changes: Any) -> Node:
        """A node like this one, of other operands and with results of types `avals`, but for `changes`."""
        made = dataclasses.replace(self, inputs=list(inputs), outputs=[], bodies={}, **changes)
        made.outputs = [Value(aval, made, i) for i, aval in enumerate(avals)]
        return made

    def bind(self, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
        """Apply the primitive to `values`; one list of results whatever the primitive returns."""
        params = self.primitive.get_bind_params(self.params if params is None else params)
        with source_info_util.user_context(self.source.traceback), self.context.manager:
            results = self.primitive.bind(*values, **params)
        return list(results) if self.primitive.multiple_results else [results]


@dataclasses.dataclass(eq=False, slots=True)
class Graph:
    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value]


def elements(shape: Iterable[Any]) -> int:
    """How many elements an array has, to be compared: a dimension that `jax.export` leaves open counts as long."""
    return math.prod(n if isinstance(n, (int, np.integer)) else SYMBOLIC for n in shape)


def nbytes(aval: Any, shape: Iterable[Any] | None = None) -> int:
    """Bytes of an array, or of a part of it that has `shape`, on each device."""
    return elements(aval.shape if shape is None else shape) * getattr(aval.dtype, "itemsize", 4) // devices(aval)


def describe(aval: Any) -> str:
    """`float32[8192,256000]`."""
    return f"{getattr(aval.dtype, 'name', aval.dtype)}[{','.join(map(str, aval.shape))}]"


def prune(graph: Graph) -> Graph:
    """Drop the nodes that no output and no side effect needs."""
    states = (s.yielded for node in graph.nodes if (s := node.state) is not None and s.yielded is not None)
    alive, kept = {*graph.outputs, *states}, []
    for node in reversed(graph.nodes):
        if node.effects or any(v in alive for v in node.outputs):
            alive.update(node.inputs)
            kept.append(node)
    return Graph(graph.inputs, kept[::-1], graph.outputs)


def read(env: dict[Value, Any], value: Value) -> Any:
    return env.get(value, value.const)


def substitute(graph: Graph, values: Mapping[Value, Value]) -> None:
    """Have values read in the place of others."""
    for node in graph.nodes:
        node.inputs = [values.get(v, v) for v in node.inputs]
    graph.outputs[:] = [values.get(v, v) for v in graph.outputs]


def depends(graph: Graph, sources: set[Value], *, differentiably: bool = False) -> set[Value]:
    """The values of `graph` that depend on `sources`; `differentiably` leaves out integers and stopped gradients."""
    reached = set(sources)
    for node in graph.nodes:
        if differentiably and has(node.name, "stops"):
            continue
        if any(v in reached for v in node.inputs):
            reached.update(v for v in node.outputs if not differentiably or jax.dtypes.issubdtype(v.dtype, np.inexact))
    return reached


def constant(value: Value) -> Any | None:
    """The one number that fills `value`, if that is known at trace time."""
    while value.const is None and value.producer is not None:
        if not has(value.producer.name, "level"):
            return None
        value = value.producer.inputs[0]
    if value.const is None or isinstance(value.const, Tracer):
        return None
    array = np.asarray(value.const)
    return array.reshape(-1)[0] if array.size and (array == array.reshape(-1)[0]).all() else None


def flops(node: Node) -> int:
    """Multiplications and additions of a matrix product, or of those in a node's bodies; others count nothing."""
    if isinstance(part := node.params.get("of"), Node):  # a part of another equation
        return flops(part)
    return _flops(node.name, node.params, [v.aval for v in node.inputs], [v.aval for v in node.outputs])


def _flops(name: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> int:
    if has(name, "product"):
        contract, _ = params["dimension_numbers"]
        return 2 * elements(ins[0].shape[d] for d in contract[0]) * elements(outs[0].shape)
    found = [_body_flops(b) for b in bodies(params)]
    if has(name, "branches"):  # one of them runs
        return max(found, default=0)
    times = math.prod(params["mesh"].shape[a] for a in params["newly_manual_axes"]) if has(name, "devices") else 1
    return sum(found) * (params["length"] if has(name, "steps") else times)


def scan_counts(node: Node) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    return counts(node.params, node.inputs, node.outputs)


def _body_flops(jaxpr: Jaxpr) -> int:
    avals = lambda atoms: [a.aval for a in atoms]
    return sum(_flops(e.primitive.name, e.params, avals(e.invars), avals(e.outvars)) for e in jaxpr.eqns)


def closure(values: Iterable[Value], further: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """`values`, and what `further` returns of each, and of those, and so on: each once."""
    stack, seen = list(values), set()
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            yield value
            stack += further(value)


def operands(value: Value) -> Sequence[Value]:
    """What a value is computed from, if it is."""
    return () if value.producer is None else value.producer.inputs


def ancestors(values: Iterable[Value]) -> set[Value]:
    """`values` and all that they are computed from."""
    return set(closure(values, operands))
