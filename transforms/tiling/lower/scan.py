"""Loops become `lax.scan`: slices in, results accumulated in place, one shorter tail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from transforms.tiling import rules, schedule
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.flatten import evaluate
from transforms.tiling.ir.graph import Node, Value, constant, read
from transforms.tiling.ir.loops import Loop, Ref, Schedule, Step, Update
from transforms.tiling.ir.placement import ALONE, COMBINE, Partial, Placement, Span, Stacked, Tiled, Whole, identity
from transforms.tiling.lower.epilogue import Env, combine_partials, finish, narrow
from transforms.tiling.mesh import layout, weight_gather
from transforms.tiling.mesh.sums import fit
from transforms.tiling.passes.online.rewrite import rescale
from transforms.tiling.primitives import having
from transforms.tiling.rules.bodies import LOWERING, Body
from transforms.tiling.rules.dot import dot
from transforms.tiling.schedule import runs_once

Tiles = dict[tuple[Any, Any], Any]  # what a tile computed, by value and placement


def run(
    plan: Schedule,
    inputs: Sequence[Any],
    options: Any,
    wide: frozenset[int],
    chunks: bool = True,
    reuse: Mapping[int, Sequence[int]] | None = None,
) -> list[Any]:
    """Run a schedule.

    Args:
        plan: the loops.
        inputs: the whole inputs of the graph.
        options: of the program: how long the cut axis is and a tile (the last may be shorter), and what sums are
            formed in.
        wide: numbers of the outputs to return in that dtype.
        chunks: whether a product may be added to an accumulator chunk by chunk.
        reuse: for the number of an output, those of inputs which nobody needs afterwards, as a rule: a loop that reads
            one and writes the other slice by slice does so in one buffer (in a copy, where it is needed after all).
    """
    graph = plan.analysis.graph
    env: Env = dict(zip(graph.inputs, inputs, strict=True))
    span = Span(0, options.total, options.total, options.accumulate, chunks)
    broad = wide_chain(plan, {graph.outputs[i] for i in wide})
    # What the devices hold parts of is stored as it is sent.
    sent = {v for v in plan.analysis.apart if isinstance(plan.analysis.fact(v).placement, Tiled)}
    broad -= set() if options.reduce_dtype else sent
    for loop in plan.loops:
        finish(plan, env, list(loop.reads), span)
        if loop.updates or loop.steps:
            env.update(_run_loop(plan, loop, env, span, options, broad, _shared(plan, loop, reuse or {})))
    effects = [n for n in graph.nodes if n.effects and runs_once(plan.analysis, n)]
    finish(plan, env, graph.outputs, span, effects)
    return [read(env, v) if i in wide else narrow(env, v) for i, v in enumerate(graph.outputs)]


def _shared(plan: Schedule, loop: Loop, reuse: Mapping[int, Sequence[int]]) -> dict[Value, Value]:
    """For results of a loop, the inputs whose buffers they take over: read in this loop alone, at the tile written."""
    graph, fact = plan.analysis.graph, plan.analysis.fact
    made = {update.value for update in loop.updates}
    found = {}
    for out, number in ((out, number) for out, numbers in reuse.items() for number in numbers):
        value, source = graph.outputs[out], graph.inputs[number]
        if value in found or source in found.values():
            continue
        alike = value in made and source.aval == value.aval and fact(value)[:2] == fact(source)[:2]
        alike = alike and value not in plan.analysis.apart  # there devices hold parts of a sum
        here = {id(r) for r in loop.refs if r.value is source and r.how == "slice" and r.halo == ALONE}
        everywhere = {id(ref) for other in plan.loops for ref in other.refs if ref.value is source}
        outside = source in graph.outputs or any(
            source in node.inputs
            for node in graph.nodes
            if all(isinstance(p, Whole) for p in plan.analysis.moves[node].outs[:1])
        )
        if alike and isinstance(fact(value).placement, Tiled) and here == everywhere and not outside:
            found[value] = source
    return found


def _run_loop(
    plan: Schedule,
    loop: Loop,
    env: Env,
    whole: Span,
    options: Any,
    broad: set[Value],
    shared: Mapping[Value, Value],
) -> dict[Value, Any]:
    """All tiles of one loop: a scan over those of equal length, then the tail."""
    fact, apart, total, size = plan.analysis.fact, plan.analysis.apart, whole.total, plan.size
    if options.sync == "once":
        env = env | weight_gather.gather(loop, lambda value: narrow(env, value))

    def body(results: dict[int, Any] | None, start: Any, length: int) -> dict[int, Any]:
        span = whole._replace(start=start, length=length)
        before = {} if results is None else {u.value: results[i] for i, u in enumerate(loop.updates)}
        now = env | {source: before[value] for value, source in shared.items() if value in before}
        tiles = compute(loop, now, {}, span, broad, before, apart)
        anchors = {v: x for (v, p), x in tiles.items() if isinstance(p, Whole)}
        made = {}
        for i, update in enumerate(loop.updates):
            result = before.get(update.value)
            if result is not None and update.anchors:
                weight = None if update.weight is None else before[update.weight]
                result = rescale(result, update.anchors, before, anchors, weight)
            made[i] = _apply(
                update, result, fact(update.value).placement, tiles, now, span, update.value in broad, apart
            )
        return made

    count, rest = divmod(total, total if loop.light(plan.analysis) else size)
    if count == 1 and not rest:
        results = body(None, 0, total)
    else:
        span = whole._replace(length=size)
        results = {
            i: _initial(u, fact(u.value).placement, span, u.value in broad, apart) for i, u in enumerate(loop.updates)
        }
        results |= {i: env[shared[u.value]] for i, u in enumerate(loop.updates) if u.value in shared}
        results = _over_tiles(body, results, count, size, rest, loop.reverse)
    return {
        u.value: layout.settle(results[i], u.value.aval, apart[u.value], options.reduce_dtype)
        for i, u in enumerate(loop.updates)
    }


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


def _operands(step: Step, tiles: Any, env: Env, span: Span) -> list[Any]:
    """The operands of a step; those that were gathered for it, as they were."""
    ready = [weight_gather.find(env, step.node, i, ref) for i, ref in enumerate(step.refs)]
    return [fetch(r, tiles, env, span) if x is None else x for r, x in zip(step.refs, ready, strict=True)]


def _initial(update: Update, placement: Any, span: Span, broad: bool, apart: layout.Held) -> Any:
    """What a result holds before the first tile."""
    value = update.value
    op = placement.op if isinstance(placement, Partial) else "sum"
    sums = broad or placement == Partial("sum")
    dtype = span.wide(value.dtype) if sums else value.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return lax.full(value.shape, 0, dtype)
    return layout.full(value.aval, identity(op, dtype), dtype, apart[value])


def _apply(
    update: Update,
    result: Any,
    placement: Any,
    tiles: Tiles,
    env: Env,
    span: Span,
    broad: bool,
    apart: layout.Held,
) -> Any:
    """Fold one tile into a result; with no result yet, the tile is all there is."""
    for term in update.terms:
        if isinstance(term, Step):
            how = apart[term.node.outputs[0]]
            node, values = fit(term.node, _operands(term, tiles, env, span), how)
            accumulate = rules.RULES[node.name].accumulate
            if result is None or accumulate is None or layout.named(node.outputs[0].aval) is not None:
                part = layout.conform(
                    rules.run(node, values, term.move, span)[0],
                    update.value.aval,
                    apart[update.value],
                )
                result = part if result is None else result + part.astype(result.dtype)
            else:
                result = accumulate(node, values, result, span)
            continue
        part = tiles.get((term.value, "wide")) if broad else None
        part = fetch(term, tiles, env, span) if part is None else part
        if isinstance(placement, Whole):  # an anchor, for the next tile
            result = part
        elif isinstance(placement, (Tiled, Stacked)):
            result = part if result is None else span.put(result, part.astype(result.dtype), placement)
        else:
            part = layout.conform(part, update.value.aval, apart[update.value])
            result = part if result is None else COMBINE[placement.op](result, part.astype(result.dtype))
    return result


def wide_chain(plan: Schedule, outputs: set[Value]) -> set[Value]:
    """`outputs`, and what they are rearranged from: cut results of a dot that keep the dtype it is formed in."""
    chain = set(outputs)
    for output in outputs:
        path, value = [], output
        while isinstance(plan.analysis.fact(value).placement, Tiled) and value.producer is not None:
            path.append(value)
            if value.producer.name == "dot_general":
                chain.update(path)
            if value.producer.name not in REARRANGE:
                break
            value = value.producer.inputs[0]
    return chain


REARRANGE = having("rearranges")


def fetch(ref: Ref, tiles: Any, env: Env, span: Span) -> Any:
    """An operand of a step."""
    if ref.how == "tile" and ref.halo == ALONE:
        return tiles[(ref.value, ref.want)]
    if ref.how == "tile":
        array, there = tiles[((ref.value, ref.want), "beside")]
        return there.narrow(array, ref.want, ref.halo)
    if ref.how == "once":
        if constant(ref.value) == 0 and ref.want == Partial("sum"):
            with ref.value.producer.context.manager if ref.value.producer else nullcontext():
                return jnp.zeros(ref.value.shape, ref.value.dtype)
        whole = jnp.asarray(read(env, ref.value))
        op = ref.want.op if isinstance(ref.want, Partial) else "sum"
        return jnp.where(span.start == 0, whole, jnp.full_like(whole, identity(op, whole.dtype)))
    whole = narrow(env, ref.value)
    sliced = isinstance(ref.want, Tiled) and ref.how == "slice"
    return span.beside(ref.halo).take(jnp.asarray(whole), ref.want) if sliced else whole


def compute(
    loop: Loop,
    env: Env,
    known: Tiles,
    span: Span,
    broad: Set[Value] = frozenset(),
    before: Mapping[Value, Any] | None = None,
    apart: layout.Held | None = None,
) -> Tiles:
    """Run the steps of a loop on one tile: every result, by value and placement (those in `broad` as "wide" too).

    `before` holds what the tiles before this one accumulated.
    """
    tiles, apart = dict(known), layout.Held() if apart is None else apart
    for step in loop.steps:
        rule = rules.RULES.get(step.node.name)
        if rule is not None and rule.resume is not None:  # a loop's state, as the tiles before left it
            (ref,) = step.refs
            tiles[step.keys[0]] = rule.resume(step.node, ref.value, fetch(ref, tiles, env, span), before or {}, span)
            continue
        how = apart[step.node.outputs[0]] if step.node.outputs else layout.TOGETHER
        node, values = fit(step.node, _operands(step, tiles, env, span), how)
        if step.node.effects and all(
            isinstance(p, Whole) for p in step.move.ins
        ):  # in a region: the same for each tile
            if span.effects:
                _on_first_tile(node, values, span)
            continue
        there = span.beside(step.halo)._replace(effects=span.effects and not step.silent)
        if step.halo == ALONE and (wide := _wide(step, node, values, tiles, span, broad)) is not None:
            value, _ = step.keys[0]
            wide = layout.conform(wide, value.aval, how)
            tiles[(value, "wide")], tiles[step.keys[0]] = wide, wide.astype(value.dtype)
            continue
        sums = Partial("sum") in step.move.outs and Partial("sum") in step.move.ins
        if sums and rule is not None and rule.emit is None:
            results = combine_partials(node, values, span)
        else:
            results = rules.run(node, values, step.move, there)
        made = zip(step.node.outputs, results, strict=True)
        by_value = {v: x if x is None else layout.conform(x, v.aval, apart[v]) for v, x in made}
        for key in step.keys:
            (value, want), tiles[key] = key, by_value[key[0]]
            if step.halo != ALONE and isinstance(want, Tiled):
                tiles[(key, "beside")] = (tiles[key], there)
                tiles[key] = there.narrow(by_value[value], want, span.halo)
    return tiles


def _on_first_tile(node: Node, values: list[Any], span: Span) -> None:
    """Have the side effects of a node once in all."""

    def run(*values: Any) -> tuple[()]:
        node.bind(values)
        return ()

    lax.cond(span.start == 0, run, lambda *_: (), *values)


def _wide(step: Step, node: Node, values: list[Any], tiles: Tiles, span: Span, broad: Set[Value]) -> Any | None:
    """One step on the way from a dot to an output in `broad`, without rounding in between."""
    if not step.keys or step.keys[0][0] not in broad or not isinstance(step.move.outs[0], Tiled):
        return None
    if node.name == "dot_general":
        return dot(node, *values, span.wide(node.outputs[0].dtype))
    source = tiles.get((node.inputs[0], "wide")) if node.name in REARRANGE else None
    if source is None:
        return None
    return source if node.name == "convert_element_type" else rules.run(node, [source], step.move, span)[0]


def body(found: Analysis, ins: Sequence[Placement], outs: Sequence[Placement | None], span: Span) -> Body:
    """A region's body at tile size, as `rules.bodies.at_tile` describes it."""
    loop, refs = schedule.region(found, outs, span.effects)

    def run(values: Sequence[Any]) -> list[Any]:
        both = list(zip(found.graph.inputs, values, ins, strict=True))
        env = {v: x for v, x, p in both if isinstance(p, Whole)}
        evaluate(env, list(loop.reads))
        known = {(v, p): x for v, x, p in both if not isinstance(p, Whole)}
        tiles = compute(loop, env, known, span, apart=found.apart)
        return [None if ref is None else fetch(ref, tiles, env, span) for ref in refs]

    return run


LOWERING[:] = [body]
