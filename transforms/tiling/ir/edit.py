"""Changes to a graph that leave its meaning as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.sharding import AxisType

from transforms.tiling.ir.flatten import flatten
from transforms.tiling.ir.graph import Graph, Node, Value, substitute
from transforms.tiling.ir.jaxprs import body, trimmed
from transforms.tiling.mesh.layout import like, varying


def copied(graph: Graph) -> tuple[Graph, dict[Value, Value]]:
    """A graph to be changed in the place of another, and the values of that which its own are made after."""
    same: dict[Value, Value] = {}

    def again(value: Value) -> Value:
        if value.const is not None or value in same:
            return same.get(value, value)
        same[value] = made = Value(value.aval)
        return made

    copy = Graph([again(v) for v in graph.inputs], [], [])
    for node in graph.nodes:
        made = node.like([again(v) for v in node.inputs], [v.aval for v in node.outputs])
        same.update(zip(node.outputs, made.outputs, strict=True))
        copy.nodes.append(made)
    copy.outputs[:] = [again(v) for v in graph.outputs]
    return copy, {new: old for old, new in same.items()}


def add(nodes: list[Node], like: Node, primitive: Primitive, inputs: Sequence[Value], avals: Any, **params: Any) -> Any:
    """Append a node; return its results. It has the side effects of the one that it is a part `of`, if of any."""
    effects = like.effects if "of" in params else ()
    node = like.like(inputs, avals, primitive=primitive, params=params, effects=effects, state=None)
    nodes.append(node)
    return node.outputs


def replace(graph: Graph, node: Node, nodes: Sequence[Node], values: dict[Value, Value], keep: bool = False) -> None:
    """Put `nodes` in the place of `node` (before it, if it is to be kept), and `values` in that of its results."""
    at = graph.nodes.index(node)
    graph.nodes[at : at + (not keep)] = nodes
    substitute(graph, values)


def traced(fn: Callable[..., Any], inputs: Sequence[Value], node: Node) -> tuple[list[Node], list[Value]]:
    """The equations of a function of some values, which stand for `node` in messages; and its results."""
    closed = _there(node, lambda: jax.make_jaxpr(fn)(*(like(v.aval) for v in inputs)))
    made = flatten(trimmed(closed), together=node.together)
    for other in made.nodes:
        other.source, other.caller = node.source, node.caller
    return made.nodes, called(made, inputs)


def called(made: Graph, inputs: Sequence[Value]) -> list[Value]:
    """The results of a graph whose nodes, from now on, read `inputs`."""
    substitute(made, dict(zip(made.inputs, inputs, strict=True)))
    return made.outputs


def _there(node: Node, trace: Callable[[], ClosedJaxpr]) -> ClosedJaxpr:
    """What `trace` returns where a node runs, which may be the body of a `shard_map`."""
    here = jax.sharding.get_abstract_mesh()
    with node.context.manager:
        mesh = jax.sharding.get_abstract_mesh()
    manual = {*mesh.manual_axes} - {*here.manual_axes}
    if not manual:
        return trace()
    found: list[ClosedJaxpr] = []
    mesh = mesh.update_axis_types(dict.fromkeys(manual, AxisType.Auto)) if here.empty else here
    checked = any(varying(v.aval) for v in (*node.inputs, *node.outputs))
    body = jax.shard_map(
        lambda: found.append(trace()), mesh=mesh, in_specs=(), out_specs=None, axis_names=manual, check_vma=checked
    )
    jax.eval_shape(body)
    return found[0]


def inline(graph: Graph, node: Node) -> None:
    """Put the body of a `jax.checkpoint`, or that of `lax.platform_dependent` for any platform, in its place."""
    nodes, outs = inlined(node)
    replace(graph, node, nodes, dict(zip(node.outputs, outs, strict=True)))


def inlined(node: Node) -> tuple[list[Node], list[Value]]:
    """The equations of such a body, of the node's own operands, and its results."""
    number = any_platform(node)
    closed = body(node.params, "jaxpr") if number is None else node.params["branches"][number]
    inner = flatten(closed, together=node.together)
    outs = called(inner, node.inputs[number is not None :])
    for other in inner.nodes:
        other.caller = other.caller or node.source
    return inner.nodes, outs


def any_platform(node: Node) -> int | None:
    """The branch of a `lax.platform_dependent` that every platform can run, if the equation is one that has it."""
    platforms = node.params.get("branches_platforms") or ()
    return platforms.index(None) if None in platforms else None


def split(graph: Graph, node: Node, wanted: Sequence[int], part: Callable[..., list[Any]]) -> list[Node]:
    """Compute the results `wanted` of a node apart from the others, by `part(node, operands, wanted)`; return how.

    Without side effects, and without what only the other results need, in bodies too.
    """
    nodes, outs = traced(lambda *values: [part(node, values, wanted)[i] for i in wanted], node.inputs, node)
    replace(graph, node, nodes, dict(zip([node.outputs[i] for i in wanted], outs, strict=True)), keep=True)
    return nodes


def sort(graph: Graph) -> None:
    """Bring the nodes into an order in which operands come first, changing as little as possible."""
    ordered: dict[Node, None] = {}
    for root in graph.nodes:
        stack = [root]
        while stack:
            missing = [v.producer for v in stack[-1].inputs if v.producer and v.producer not in ordered]
            if missing:
                stack.extend(missing)
            else:
                ordered.setdefault(stack.pop())
    graph.nodes[:] = ordered
