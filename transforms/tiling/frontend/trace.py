"""Equations of functions: traced, and put into a graph in the place of others, or bodies in that of what has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType

from transforms.layout import like, varying
from transforms.tiling.frontend.flatten import flatten
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.jaxprs import body, trimmed

Made = tuple[list[Node], list[Value]] | None  # what an equation is rewritten to: others, and their results


def traced(fn: Callable[..., Any], inputs: Sequence[Value], node: Node) -> tuple[list[Node], list[Value]]:
    """The equations of a function of some values, which stand for `node` in messages; and its results."""
    around = [v.aval for v in (*node.inputs, *node.outputs)]
    closed = there(node.context, around, lambda: jax.make_jaxpr(fn)(*(like(v.aval) for v in inputs)))
    made = flatten(trimmed(closed), together=node.together)
    for other in made.nodes:
        other.change(source=node.source, caller=node.caller)
    return made.nodes, called(made, inputs)


def append(nodes: list[Node], fn: Callable[..., Any], inputs: Sequence[Value], node: Node) -> list[Value]:
    """Append the equations of a function of some values, which stand for `node` in messages; return its results."""
    made, outs = traced(fn, inputs, node)
    nodes += made
    return outs


def rewrite_all(graph: Graph, find: Callable[[Node], Made]) -> bool:
    """Put what `find` has for an equation, others and their results, in its place. Returns whether it has any."""
    changed = False
    for node in list(graph.nodes):
        if (made := find(node)) is not None:
            graph.replace(node, *made)
            changed = True
    if changed:
        graph.sort().prune()
    return changed


def called(made: Graph, inputs: Sequence[Value]) -> list[Value]:
    """The results of a graph whose nodes, from now on, read `inputs`."""
    made.substitute(dict(zip(made.inputs, inputs, strict=True)))
    return made.outputs


def there(context: Any, avals: Iterable[Any], trace: Callable[[], ClosedJaxpr]) -> ClosedJaxpr:
    """What `trace` returns where an equation of these types runs, which may be the body of a `shard_map`."""
    here = jax.sharding.get_abstract_mesh()
    with context.manager:
        mesh = jax.sharding.get_abstract_mesh()
    manual = {*mesh.manual_axes} - {*here.manual_axes}
    if not manual:
        return trace()
    found: list[ClosedJaxpr] = []
    mesh = mesh.update_axis_types(dict.fromkeys(manual, AxisType.Auto)) if here.empty else here
    checked = any(map(varying, avals))
    body = jax.shard_map(
        lambda: found.append(trace()), mesh=mesh, in_specs=(), out_specs=None, axis_names=manual, check_vma=checked
    )
    jax.eval_shape(body)
    return found[0]


def inline(graph: Graph, node: Node) -> None:
    """Put the body of a `jax.checkpoint`, or that of `lax.platform_dependent` for any platform, in its place."""
    graph.replace(node, *inlined(node))


def inlined(node: Node) -> tuple[list[Node], list[Value]]:
    """The equations of such a body, of the node's own operands, and its results."""
    number = any_platform(node)
    closed = body(node.params) if number is None else node.params["branches"][number]
    inner = flatten(closed, together=node.together)
    outs = called(inner, node.inputs[number is not None :])
    for other in inner.nodes:
        other.change(caller=other.caller or node.place)
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
    graph.insert(nodes, before=node)
    graph.substitute(dict(zip([node.outputs[i] for i in wanted], outs, strict=True)))
    return nodes
