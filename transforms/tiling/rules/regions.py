"""What equations with bodies (regions) share: a body at tile size, a body on whole values, and how placements meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.ir.edit import any_platform, inline
from transforms.tiling.ir.facts import Analysis, Inline
from transforms.tiling.ir.graph import Graph, Node, Value, ancestors, evaluate
from transforms.tiling.ir.placement import Partial, Placement, Span, Whole
from transforms.tiling.lower import scan
from transforms.tiling.mesh.layout import Apart, move, named, spec
from transforms.tiling.rules import Complete, Move
from transforms.tiling.schedule import stages

Body = Callable[[Sequence[Any]], list[Any]]


def at_tile(found: Analysis, ins: Sequence[Placement], outs: Sequence[Placement | None], span: Span) -> Body:
    """A region's body as a function of tiles that stand at `ins`; results at `outs`, and None for those not wanted."""
    loop, refs = stages.region(found, outs, span.effects)

    def run(values: Sequence[Any]) -> list[Any]:
        both = list(zip(found.graph.inputs, values, ins, strict=True))
        env = {v: x for v, x, p in both if isinstance(p, Whole)}
        evaluate(env, list(loop.reads))
        known = {(v, p): x for v, x, p in both if not isinstance(p, Whole)}
        tiles = scan.compute(loop, env, known, span, apart=found.apart)
        return [None if ref is None else scan.fetch(ref, tiles, env, span) for ref in refs]

    return run


def kept(move: Move) -> list[Placement | None]:
    """The results that a region computes tile by tile; those that are Whole are computed apart."""
    return [None if isinstance(p, Whole) else p for p in move.outs]


def join(first: Placement, second: Placement) -> Placement | None:
    """Where a value stands that may come from two places: what is Whole can be cut, or counted once."""
    if first == second or isinstance(second, Whole):
        return first
    return second if isinstance(first, Whole) else None


def wait(placements: Sequence[Placement], reason: str) -> Complete:
    """Run the region as it is, on whole operands."""
    return Complete([i for i, p in enumerate(placements) if not isinstance(p, Whole)], reason)


def analyse_body(graph: Graph, ins: Sequence[Placement], apart: Mapping[Value, Apart] | None = None) -> Analysis:
    """`analyse` a body, in which what depends on the platform may become what every platform can run."""
    while True:
        try:
            return analyse(graph, ins, None, apart=apart)
        except Inline as need:
            if need.node not in graph.nodes or any_platform(need.node) is None:
                raise
            inline(graph, need.node)


def body_of(
    graph: Graph,
    ins: Sequence[Placement],
    given: Sequence[Placement],
    offset: int = 0,
    apart: Mapping[Value, Apart] | None = None,
) -> Analysis:
    """Analyse a body; what it needs to be whole is asked of the region's own operands, `given`, from `offset` on."""
    try:
        return analyse_body(graph, ins, apart)
    except Complete as request:
        operands = [i + offset for i in request.operands]
        if any(isinstance(given[i], Whole) for i in operands):
            raise wait(given, f"carries what its body needs whole: it {request.reason}") from None
        raise Complete(operands, request.reason) from None
    except Inline as need:
        raise wait(given, f"needs a cut array whole inside, for `{need.node.name}` at {need.node.where}") from None


def carries_for(graph: Graph, constants: int, carried: int, wanted: Sequence[int], effects: bool = False) -> list[int]:
    """The numbers of the carried values that a loop needs for its results `wanted`, and for its side effects."""
    needed = set(wanted)
    heard = [v for node in aloud(graph, effects) for v in node.inputs]
    while True:
        used = ancestors(graph, [*heard, *(graph.outputs[i] for i in needed)])
        more = {i for i in range(carried) if graph.inputs[constants + i] in used} - needed
        if not more:
            return sorted(i for i in needed if i < carried)
        needed |= more


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


def aloud(graph: Graph, effects: bool) -> list[Node]:
    """The nodes that have side effects, if these are to run."""
    return [node for node in graph.nodes if node.effects and effects]


def whole_body(graph: Graph, wanted: Sequence[int], effects: bool = False) -> Body:
    """A body as a function of whole values that computes the results `wanted`, and has its side effects, only."""

    def run(values: Sequence[Any]) -> list[Any]:
        env = {v: x for v, x in zip(graph.inputs, values, strict=True) if x is not None}
        made = evaluate(env, [graph.outputs[i] for i in wanted], aloud(graph, effects))
        found = dict(zip(wanted, made, strict=True))
        return [found.get(i) for i in range(len(graph.outputs))]

    return run


def spread(inputs: Sequence[int], values: Sequence[Any], count: int) -> list[Any]:
    """`values` at their places among `count` operands, None elsewhere."""
    known = dict(zip(inputs, values, strict=True))
    return [known.get(i) for i in range(count)]
