"""What equations with bodies (regions) share: a body at tile size, a body on whole values, and how placements meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from transforms.layout import Apart, move, named, spec
from transforms.tiling.frontend.flatten import body_graph, evaluate
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.placement import Partial, Placement, Span, Whole
from transforms.tiling.ir.walks import scan_counts
from transforms.tiling.rules import Move

Body = Callable[[Sequence[Any]], list[Any]]


LOWERING: list[Callable[..., Body]] = []  # how a body runs at tile size: `lower` says it here, for it stands above


def at_tile(found: Analysis, ins: Sequence[Placement], outs: Sequence[Placement], span: Span) -> Body:
    """A region's body as a function of tiles that stand at `ins`, with results at `outs`."""
    return LOWERING[0](found, ins, outs, span)


def join(first: Placement | None, second: Placement | None) -> Placement | None:
    """Where a value stands that may come from two places, if they agree: what is Whole can be cut, or counted once."""
    if first == second or isinstance(second, Whole):
        return first
    return second if isinstance(first, Whole) else None


def widen(value: Any, placement: Placement, span: Span) -> Any:
    """A partial sum in the dtype that it is formed in, so that a loop can carry it."""
    value = jnp.asarray(value)
    return value.astype(span.wide(value.dtype)) if placement == Partial("sum") else value


def cast(value: Any, like: Any) -> Any:
    """A result in the dtype in which it is carried, and spread as that is."""
    value = value if value.dtype == like.dtype else value.astype(like.dtype)
    return value if named(jax.typeof(like)) is None else move(value, spec(jax.typeof(like)))


def held(found: Analysis) -> tuple[Apart, ...]:
    """Which results of a body devices hold parts of."""
    return tuple(found.apart[v] for v in found.graph.outputs)


def whole_body(graph: Graph, wanted: Sequence[int] | None = None, effects: bool = False) -> Body:
    """A body as a function of whole values: its results, or those `wanted` and None for the others; and its effects."""
    every = range(len(graph.outputs)) if wanted is None else wanted
    aloud = [node for node in graph.nodes if node.effects and effects]

    def run(values: Sequence[Any]) -> list[Any]:
        env = {v: x for v, x in zip(graph.inputs, values, strict=True) if x is not None}
        made = evaluate(env, [graph.outputs[i] for i in every], aloud)
        return with_gaps(every, made, len(graph.outputs))

    return run


def with_gaps(inputs: Sequence[int], values: Sequence[Any], count: int) -> list[Any]:
    """`values` at their places among `count` operands, None elsewhere."""
    known = dict(zip(inputs, values, strict=True))
    return [known.get(i) for i in range(count)]


def added(node: Node) -> list[int]:
    """The numbers of the carried values that the body only adds to."""
    graph = body_graph(node, "jaxpr")
    constants, carried = scan_counts(node)
    both = zip(graph.inputs[constants : constants + carried], graph.outputs, strict=False)
    return [i for i, (before, after) in enumerate(both) if after is not before and _only_added(graph, before, after)]


def _only_added(graph: Graph, before: Value, after: Value) -> bool:
    """Whether `after` is `before` with something added, once or more, and nothing else reads what is in between."""
    value = before
    while value is not after:
        readers = [node for node in graph.nodes for v in node.inputs if v is value]
        if len(readers) != 1 or readers[0].name not in ("add", "add_any") or value in graph.outputs:
            return False
        (value,) = readers[0].outputs
    return graph.outputs.count(after) == 1 and not any(after in node.inputs for node in graph.nodes)


def run_scan(node: Node, values: Sequence[Any], body: Body, length: int | None = None) -> list[Any]:
    """The results of a scan over `body`, of `length` steps if given; constants that nothing reads may be None."""
    constants, carried = scan_counts(node)
    first = constants + carried

    def step(state: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body([*values[:constants], *state, *xs])
        return list(map(cast, outs[:carried], state)), outs[carried:]

    options = {k: node.params[k] for k in ("length", "reverse", "unroll")}
    if length is not None:
        options |= {"length": length, "unroll": min(length, options["unroll"])}
    final, stacked = lax.scan(step, list(values[constants:first]), list(values[first:]), **options)
    return [*final, *stacked]


def run_part(node: Node, values: Sequence[Any], move: Move, span: Span) -> list[Any]:
    """A scan over a tile's steps; what only adds up is added up in the dtype of sums."""
    whole = whole_body(body_graph(node, "jaxpr"), effects=span.effects)
    constants, carried = scan_counts(node)
    body = summing(node, whole, [i for i in range(carried) if move.ins[constants + i] == Partial("sum")])
    widened = [widen(v, p, span) for v, p in zip(values, move.ins, strict=True)]
    return run_scan(node, widened, body, values[constants + carried].shape[0])


def summing(node: Node, whole: Body, sums: Sequence[int]) -> Body:
    """A scan's body which adds to the carried values `sums`, in their dtype, what `whole` makes of zeros."""
    own = {i: scan_counts(node)[0] + i for i in sums}

    def body(inner: Sequence[Any]) -> list[Any]:
        start = list(inner)
        for at in own.values():
            start[at] = jnp.zeros_like(inner[at], node.inputs[at].dtype)
        outs = whole(start)
        for i, at in own.items():
            outs[i] = inner[at] + outs[i].astype(inner[at].dtype)
        return outs

    return body
