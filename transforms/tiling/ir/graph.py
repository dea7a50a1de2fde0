"""A jaxpr as a flat graph of values and nodes: nested calls inlined, dead code gone, each node with its line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive

from transforms.tiling.analysis.effects import loud, silenced
from transforms.tiling.ir.errors import check_pure
from transforms.tiling.mesh.layout import devices
from transforms.tiling.passes.transpose_folding import part_turns, spread_dots, turn_dots

# Call-like primitives whose body may stand in their place: the parameter that holds the body.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "composite": "jaxpr",
    "eval_jaxpr": "jaxpr",
    "xla_metadata_call": "jaxpr",
    "tiled": "call_jaxpr",  # lower.atomic
}
# The same, but with a derivative rule of their own: inlined once no derivative is to be taken any more.
CUSTOM_CALLS = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
}
SOLVE = "custom_linear_solve"  # the same, with several bodies
# Collectives. `jax.vmap` turns its name into a dimension, a number, and over dimensions they are these reductions.
REDUCES = {"psum": lax.reduce_sum_p, "pmax": lax.reduce_max_p, "pmin": lax.reduce_min_p}
SYMBOLIC = 1024
# jax.checkpoint's names in the versions of JAX.
REMAT = ("remat2", "checkpoint", "remat")


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

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def where(self) -> str:
        """`file:line (function)` of the user's code; for an equation of a cached jit, which has none, the call's."""
        own = source_info_util.summarize(self.source)
        return own if ":" in own or self.caller is None else source_info_util.summarize(self.caller)

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


def nbytes(aval: Any) -> int:
    """Bytes of an array, on each device."""
    return elements(aval.shape) * getattr(aval.dtype, "itemsize", 4) // devices(aval)


def describe(aval: Any) -> str:
    """`float32[8192,256000]`."""
    return f"{getattr(aval.dtype, 'name', aval.dtype)}[{','.join(map(str, aval.shape))}]"


def body(node_params: dict[str, Any], key: str) -> ClosedJaxpr:
    """The body of a call-like equation, closed whichever way its JAX version stores it."""
    jaxpr = node_params[key] if key in node_params else node_params["call_jaxpr"]
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def solver(params: dict[str, Any], operands: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]]:
    """The body of a `custom_linear_solve` that computes its result, and those of its operands which that takes."""
    counts = params["const_lengths"]
    first = counts.matvec + counts.vecmat
    taken = [*operands[first : first + counts.solve], *operands[sum(counts) :]]
    return body({"call_jaxpr": params["jaxprs"].solve}, "call_jaxpr"), taken


def flatten(closed: ClosedJaxpr, *, custom: bool = True, remat: bool = False, together: bool = False) -> Graph:
    """Return `closed` with nested calls inlined and dead code removed; constants become constant values.

    Args:
        closed: the program.
        custom: inline `custom_jvp` and `custom_vjp` calls too (their rules are lost: for graphs that are only run).
        remat: inline the bodies of `jax.checkpoint` too (their effect on memory is lost).
        together: what devices hold parts of is summed at once.
    """
    table = CALLS | (CUSTOM_CALLS if custom else {}) | (dict.fromkeys(REMAT, "jaxpr") if remat else {})
    nodes: list[Node] = []

    def run(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value], outer: Any) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update(zip(jaxpr.constvars, [Value(jax.typeof(c), const=c) for c in consts], strict=True))

        def read(atom: Any) -> Value:
            return Value(atom.aval, const=as_array(atom.val, atom.aval)) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            check_pure(eqn)
            ins = [read(a) for a in eqn.invars]
            key = table.get(eqn.primitive.name)
            if key or (custom and eqn.primitive.name == SOLVE):
                inner, ins = (body(eqn.params, key), ins) if key else solver(eqn.params, ins)
                outs = run(inner.jaxpr, inner.consts, ins, outer or eqn.source_info)
            elif eqn.primitive.name == "concatenate" and len(parts := _long(eqn, ins)) == 1:
                outs = parts
            else:
                ins = _long(eqn, ins) if eqn.primitive.name == "concatenate" else ins
                effects = loud(eqn.effects)
                node = Node(eqn.primitive, plain(eqn.params), ins, [], eqn.source_info, outer, eqn.ctx, effects)
                node.together = together
                outs = node.outputs = [Value(v.aval, node, i) for i, v in enumerate(eqn.outvars)]
                nodes.extend(reductions(node))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    inputs = [Value(v.aval) for v in closed.jaxpr.invars]
    graph = Graph(inputs, nodes, run(closed.jaxpr, closed.consts, inputs, None))
    return prune(spread_dots(turn_dots(part_turns(prune(graph)))))


def _long(eqn: Any, operands: list[Value]) -> list[Value]:
    """Those operands of a `concatenate` that its result holds anything of: a padding by nothing is one, too."""
    return [v for v in operands if v.shape[eqn.params["dimension"]]] or operands[:1]


def reductions(node: Node) -> list[Node]:
    """A collective over dimensions as the reductions that it is, then itself if there are names among its axes."""
    axes = node.params.get("axes", ()) if node.name in REDUCES else ()
    dims = tuple(a for a in axes if isinstance(a, int))
    if not dims:
        return [node]
    parts = []
    for value, out in zip(node.inputs, node.outputs, strict=True):
        params = {"axes": dims, "out_sharding": None}
        part = dataclasses.replace(node, primitive=REDUCES[node.name], params=params, inputs=[value], outputs=[])
        part.outputs.append(Value(out.aval, part))
        parts.append(part)
    if len(dims) == len(axes):
        for out, part in zip(node.outputs, parts, strict=True):
            out.producer, out.index, part.outputs = part, 0, [out]
        return parts
    node.params = node.params | {"axes": tuple(a for a in axes if a not in dims)}
    node.inputs = [v for part in parts for v in part.outputs]
    return [*parts, node]


def plain(param: Any) -> Any:
    """A parameter with Python's numbers where JAX, under `vmap`, leaves NumPy's."""
    if isinstance(param, (np.integer, np.bool_)):
        return param.item()
    if isinstance(param, dict):
        return {k: plain(v) for k, v in param.items()}
    if isinstance(param, tuple):
        items = [plain(v) for v in param]
        return type(param)(*items) if hasattr(param, "_fields") else tuple(items)
    return param


def as_array(const: Any, aval: Any) -> Any:
    """A literal as an array of its own dtype: JAX writes some as Python numbers."""
    return const if isinstance(const, (jax.Array, Tracer)) else np.asarray(const, aval.dtype)


def prune(graph: Graph) -> Graph:
    """Drop the nodes that no output and no side effect needs."""
    states = (v for node in graph.nodes for v in node.params.values() if isinstance(v, Value))
    alive, kept = {*graph.outputs, *states}, []
    for node in reversed(graph.nodes):
        if node.effects or any(v in alive for v in node.outputs):
            alive.update(node.inputs)
            kept.append(node)
    return Graph(graph.inputs, kept[::-1], graph.outputs)


def evaluate(env: dict[Value, Any], wanted: Sequence[Value], effects: Collection[Node] = ()) -> list[Any]:
    """Compute `wanted` from the known values in `env`, which is filled along the way.

    Of the side effects run those of the nodes `effects`; what else has any is run without them.
    """
    stack = [*wanted, *(v for node in effects for v in (node.outputs[:1] or node.inputs))]
    while stack:
        value = stack[-1]
        node = value.producer
        if value in env or value.const is not None:
            stack.pop()
            continue
        assert node is not None, f"{value} is neither known nor computed"
        if missing := [v for v in node.inputs if v not in env and v.const is None]:
            stack.extend(missing)
            continue
        silent = node.effects and node not in effects
        params = silenced(node.name, node.where, node.params) if silent else None
        env.update(zip(node.outputs, node.bind([read(env, v) for v in node.inputs], params), strict=True))
    for node in (n for n in effects if not n.outputs):
        node.bind([read(env, v) for v in node.inputs])
    return [read(env, v) for v in wanted]


def read(env: dict[Value, Any], value: Value) -> Any:
    return env.get(value, value.const)


def depends(graph: Graph, sources: set[Value], *, differentiably: bool = False) -> set[Value]:
    """The values of `graph` that depend on `sources`; `differentiably` leaves out integers and stopped gradients."""
    reached = set(sources)
    for node in graph.nodes:
        if node.name == "stop_gradient" and differentiably:
            continue
        if any(v in reached for v in node.inputs):
            reached.update(v for v in node.outputs if not differentiably or jax.dtypes.issubdtype(v.dtype, np.inexact))
    return reached


def constant(value: Value) -> Any | None:
    """The one number that fills `value`, if that is known at trace time."""
    while value.const is None and value.producer is not None:
        if value.producer.name not in ("broadcast_in_dim", "convert_element_type", "reshape", "copy", "copy_p"):
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
    if name == "dot_general":
        contract, _ = params["dimension_numbers"]
        return 2 * elements(ins[0].shape[d] for d in contract[0]) * elements(outs[0].shape)
    found = [_body_flops(b) for b in bodies(params)]
    if name == "cond":  # one of them runs
        return max(found, default=0)
    times = math.prod(params["mesh"].shape[a] for a in params["newly_manual_axes"]) if name == "shard_map" else 1
    return sum(found) * (params["length"] if name == "scan" else times)


def bodies(params: dict[str, Any]) -> list[Jaxpr]:
    """All bodies among an equation's parameters."""
    found = [b for p in params.values() for b in (p if isinstance(p, tuple) else (p,))]
    return [getattr(b, "jaxpr", b) for b in found if isinstance(b, (Jaxpr, ClosedJaxpr))]


def _body_flops(jaxpr: Jaxpr) -> int:
    avals = lambda atoms: [a.aval for a in atoms]
    return sum(_flops(e.primitive.name, e.params, avals(e.invars), avals(e.outvars)) for e in jaxpr.eqns)


def body_graph(node: Node, key: str, number: int | None = None) -> Graph:
    """A body of an equation as a graph: the parameter `key`, or the entry `number` of it. Flattened once."""
    if (key, number) not in node.bodies:
        jaxpr = node.params[key] if number is None else node.params[key][number]
        closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
        node.bodies[key, number] = flatten(closed, together=node.together)
    return node.bodies[key, number]


def ancestors(graph: Graph, values: Iterable[Value]) -> set[Value]:
    """`values` and all that they are computed from."""
    found = set(values)
    for node in reversed(graph.nodes):
        if any(v in found for v in node.outputs):
            found.update(node.inputs)
    return found
