"""Loops become `lax.scan`s over the tiles: accumulators are carried, and one shorter tile comes last."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from transforms import layout
from transforms.tiling.frontend.flatten import evaluate
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Value
from transforms.tiling.ir.jaxprs import trimmed
from transforms.tiling.ir.loops import Loop, Schedule
from transforms.tiling.ir.placement import ALONE, Placement, Span, Tiled, Whole
from transforms.tiling.ir.walks import closure, operands, read
from transforms.tiling.lower.accumulators import accumulators
from transforms.tiling.lower.epilogue import Env, finish, narrow
from transforms.tiling.lower.tile import REARRANGE, Tile
from transforms.tiling.mesh import weight_gather
from transforms.tiling.primitives import has
from transforms.tiling.regions.bodies import LOWERING, Body
from transforms.tiling.rules import RULES
from transforms.tiling.schedule import region, runs_once

Reuse = Mapping[int, Sequence[int]]


def run(
    plan: Schedule, inputs: Sequence[Any], wide: frozenset[int], chunks: bool = True, reuse: Reuse | None = None
) -> list[Any]:
    """Run a schedule. Of bodies nothing runs that only results need which are computed apart from them.

    Args:
        plan: the loops.
        inputs: the whole inputs of the graph.
        wide: numbers of the outputs to return in the dtype that sums are formed in.
        chunks: whether a product may be added to an accumulator chunk by chunk.
        reuse: for the number of an output, those of inputs which nobody needs afterwards, as a rule: a loop that reads
            one and writes the other slice by slice does so in one buffer (in a copy, where it is needed after all).
    """
    made = functools.partial(_run, plan, wide, chunks, {} if reuse is None else reuse)
    return jaxpr_as_fun(trimmed(jax.make_jaxpr(made)(*inputs)))(*inputs)


def _run(plan: Schedule, wide: frozenset[int], chunks: bool, reuse: Reuse, *inputs: Any) -> list[Any]:
    graph, options = plan.analysis.graph, plan.options
    env: Env = dict(zip(graph.inputs, inputs, strict=True))
    span = options.span._replace(length=options.total, chunks=chunks)
    broad = wide_chain(plan, {graph.outputs[i] for i in wide})
    # What the devices hold parts of is stored as it is sent.
    sent = {v for v in plan.analysis.apart if plan.analysis.is_cut(v)}
    broad -= set() if options.reduce_dtype else sent
    for loop in plan.loops:
        finish(plan, env, list(loop.reads), span)
        if loop.updates or loop.steps:
            env.update(_run_loop(plan, loop, env, span, broad, _shared(plan, loop, reuse)))
    effects = [n for n in graph.nodes if n.effects and runs_once(plan.analysis, n)]
    finish(plan, env, graph.outputs, span, effects)
    return [read(env, v) if i in wide else narrow(env, v) for i, v in enumerate(graph.outputs)]


def _shared(plan: Schedule, loop: Loop, reuse: Reuse) -> dict[Value, Value]:
    """For results of a loop, the inputs whose buffers they take over: read in this loop alone, at the tile written."""
    graph, fact = plan.analysis.graph, plan.analysis.fact
    made = {update.value for update in loop.updates}
    found = {}
    for out, number in ((out, number) for out, numbers in reuse.items() for number in numbers):
        value, source = graph.outputs[out], graph.inputs[number]
        if value in found or source in found.values():
            continue
        alike = value in made and source.aval == value.aval and fact(value)[:2] == fact(source)[:2]
        # Where devices hold parts of a sum, it is read together.
        alike = alike and value not in plan.analysis.apart and not layout.unreduced(value.aval)
        here = {id(r) for r in loop.refs if r.value is source and r.how == "slice" and r.halo == ALONE}
        everywhere = {id(ref) for other in plan.loops for ref in other.refs if ref.value is source}
        whole = (n for n in graph.nodes if all(isinstance(p, Whole) for p in plan.analysis.moves[n].outs[:1]))
        outside = source in graph.outputs or any(source in node.inputs for node in whole)
        if alike and isinstance(fact(value).placement, Tiled) and here == everywhere and not outside:
            found[value] = source
    return found


def _run_loop(
    plan: Schedule, loop: Loop, env: Env, whole: Span, broad: set[Value], shared: Mapping[Value, Value]
) -> dict[Value, Any]:
    """All tiles of one loop: a scan over those of equal length, then the tail."""
    options, total, size = plan.options, whole.total, plan.options.size
    parts = {ref.value for ref in loop.refs if ref.how != "tile" and layout.unreduced(ref.value.aval)}
    env = env | {value: _together(env, value) for value in parts}
    results = {a.value: a for a in accumulators(plan, loop, broad)}
    if options.sync == "once":
        env = env | weight_gather.all_gather(loop, lambda value: narrow(env, value), plan.analysis.apart)

    def body(totals: list[Any] | None, start: Any, length: int) -> list[Any]:
        before = {} if totals is None else dict(zip(results, totals, strict=True))
        now = env | {source: before[value] for value, source in shared.items() if value in before}
        span = whole._replace(start=start, length=length)
        tile = Tile(span, now, before=before, held=plan.analysis.apart, broad=broad).run(loop)
        return [result.add(before.get(value), tile) for value, result in results.items()]

    count, rest = divmod(total, total if loop.light(plan.analysis) else size)
    if count == 1 and not rest:
        env = _opaque(env, loop) if any(a.apart.axes for a in results.values()) else env
        totals = body(None, 0, total)
    else:
        span = whole._replace(length=size)
        totals = [env[shared[v]] if v in shared else result.begin(span) for v, result in results.items()]
        totals = _over_tiles(body, totals, count, size, rest, loop.reverse)
    ended = zip(results.items(), totals, strict=True)
    return {value: result.end(total, options.reduce_dtype) for (value, result), total in ended}


def _opaque(env: Env, loop: Loop) -> Env:
    """Whole values, those that a loop reads such that XLA does not know them, where it is no loop.

    Of constants it takes a sum that devices hold parts of for the whole sum, on each.
    """
    reads = {ref.value: None for ref in loop.refs if ref.how != "tile" and layout.named(ref.value.aval) is not None}
    return env | {value: lax.optimization_barrier(jnp.asarray(read(env, value))) for value in reads}


def _together(env: Env, value: Value) -> Any:
    """What devices hold parts of, summed: tiles take it apart again (`Tile.fetch`).

    XLA may forget of a loop's constants that they are apart.
    """
    node = value.producer
    if node is not None and has(node.name, "respreads") and not layout.unreduced(node.inputs[0].aval):
        return layout.together(read(env, node.inputs[0]), value.aval)
    return layout.together(read(env, value), value.aval)


def _over_tiles(body: Any, results: Any, count: int, size: int, rest: int, reverse: bool) -> Any:
    """Run a loop's body on `count` tiles of `size` and on the `rest`, which comes last, or first in `reverse`."""
    if rest and reverse:
        results = body(results, count * size, rest)
    if count == 1:
        results = body(results, 0, size)
    elif count:
        starts = jnp.arange(count, dtype=jnp.int32) * size
        step = lambda results, start: (body(results, start, size), None)
        results, _ = lax.scan(step, results, starts, reverse=reverse)
    return body(results, count * size, rest) if rest and not reverse else results


def wide_chain(plan: Schedule, outputs: set[Value]) -> set[Value]:
    """`outputs`, and what they are rearranged from: cut results of a product that keep the dtype it is formed in."""
    is_cut = plan.analysis.is_cut
    made_by = lambda value: "" if value.producer is None else value.producer.name
    turned = lambda value: operands(value)[:1] if is_cut(value) and made_by(value) in REARRANGE else ()
    paths = [list(closure([value], turned)) for value in outputs]
    ends = [made_by(path[-1]) if is_cut(path[-1]) else "" for path in paths]
    wide = [path for path, end in zip(paths, ends, strict=True) if end not in REARRANGE and RULES[end].wide is not None]
    return outputs.union(*wide)


def body(found: Analysis, ins: Sequence[Placement], outs: Sequence[Placement], span: Span) -> Body:
    """A region's body at tile size, as `rules.bodies.at_tile` describes it."""
    loop, refs = region(found, outs, span.effects)

    def run(values: Sequence[Any]) -> list[Any]:
        both = list(zip(found.graph.inputs, values, ins, strict=True))
        env = {v: x for v, x, p in both if isinstance(p, Whole)}
        evaluate(env, list(loop.reads))
        known: dict[tuple[Value, Placement], Any] = {(v, p): x for v, x, p in both if not isinstance(p, Whole)}
        tile = Tile(span, env, known, held=found.apart).run(loop)
        return [tile.fetch(ref) for ref in refs]

    return run


LOWERING[:] = [body]
