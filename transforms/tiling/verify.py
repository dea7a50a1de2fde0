"""What must hold of a planned program, whichever rewrites it went through: run after planning by the tests.

Of the graph: every value is defined before it is used, once, and has the type that its primitive gives it. Of what is
known of it: every node has a move, a cut dimension exists and holds the axis, tiles keep groups of rows together. Of
the loops: each finds what it reads, whole or computed by a step before, nothing larger than the footprint limit is
written whole, and no comparison sees what is computed again beside a copy of it (`rounding.check`).

`faults` returns what is wrong as values, each a line that names the equation; `verify` raises them together. Neither
changes anything. It is no part of what users run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from transforms.layout import like, named, varying
from transforms.tiling.analysis import rounding
from transforms.tiling.analysis.sizes import tile_bytes
from transforms.tiling.ir.facts import Analysis, Outlined, Region
from transforms.tiling.ir.graph import Graph, Node, Value, describe
from transforms.tiling.ir.jaxprs import bodies
from transforms.tiling.ir.loops import Loop, Ref, Schedule, Step, Update
from transforms.tiling.ir.placement import ALONE, Partial, Placement, Reach, Stacked, Tiled, Whole, wide
from transforms.tiling.rules import Move
from transforms.tiling.schedule import keeps


def verify(plan: Schedule) -> None:
    """Check a planned program.

    Raises:
        AssertionError: something does not hold; the message has a line for each thing.
    """
    found = list(faults(plan))
    assert not found, "\n".join(["a plan does not hold:", *(f"  {fault}" for fault in found)])


def faults(plan: Schedule) -> Iterator[str]:
    """What does not hold of a planned program; of its loops only where what they stand on holds."""
    analysis = plan.analysis
    if found := list(graph_faults(analysis.graph)):
        yield from found
        return
    if found := [*type_faults(analysis), *fact_faults(analysis, plan.options.size)]:
        yield from found
        return
    yield from loop_faults(plan)
    yield from footprint_faults(plan)
    if (refusal := rounding.check(plan)) is not None:
        yield f"rounding: {refusal.message.splitlines()[0]}"


# ----------------------------------------------------------------------------------------------------------- the graph


def graph_faults(graph: Graph) -> Iterator[str]:
    """Values that are not defined where they are used, or not by the node that they name; nodes that stand twice."""
    defined: set[Value] = set(graph.inputs)
    nodes = set(graph.nodes)
    if len(nodes) < len(graph.nodes) or len(defined) < len(graph.inputs):
        yield "graph: a node or an input stands in it twice"
    for node in graph.nodes:
        for i, value in enumerate(node.inputs):
            if value not in defined and value.const is None:
                yield f"graph: operand {i} of {node}, {value}, {_missing(value, nodes)}"
        for i, value in enumerate(node.outputs):
            if value.producer is not node or value.index != i:
                yield f"graph: result {i} of {node}, {value}, names another producer"
            if value in defined:
                yield f"graph: result {i} of {node}, {value}, is defined twice"
        defined.update(node.outputs)
    for node in graph.nodes:  # what a state comes from is computed after the state is read
        total = None if node.state is None else node.state.yielded
        if total is not None and total not in defined:
            yield f"graph: what {node} is left with, {total}, {_missing(total, nodes)}"
    for i, value in enumerate(graph.outputs):
        if value not in defined and value.const is None:
            yield f"graph: output {i}, {value}, {_missing(value, nodes)}"


def _missing(value: Value, nodes: set[Node]) -> str:
    if value.producer is None:
        return "is neither an input nor a constant"
    where = "comes only later" if value.producer in nodes else "is not in the graph any more"
    return f"is made by {value.producer}, which {where}"


def type_faults(analysis: Analysis) -> Iterator[str]:
    """Results that do not have the shape and dtype that the primitive gives them.

    Nodes with bodies and those that devices share are taken for right: to evaluate them is dear, or needs their mesh.
    """
    plain = [node for node in analysis.graph.nodes if _is_plain(node)]
    read = list(dict.fromkeys(v for node in plain for v in node.inputs))
    found: list[str] = []

    def evaluate(*values: Any) -> None:
        there = dict(zip(read, values, strict=True))  # each as it is said to be, so that one fault makes no other
        for node in plain:
            found.extend(_type_faults(analysis, node, [there[v] for v in node.inputs]))

    jax.eval_shape(evaluate, *(like(v.aval) for v in read))
    yield from found


def _type_faults(analysis: Analysis, node: Node, operands: list[Any]) -> Iterator[str]:
    try:
        made = node.bind(operands)
    except NotImplementedError:
        return  # an equation of our own, which only loops can run
    except Exception as error:  # whatever a primitive says of operands that do not fit
        said = next(iter(str(error).splitlines()), type(error).__name__)
        yield f"types: {node} does not take {', '.join(map(str, node.inputs))}: {said}"
        return
    for value, result in zip(node.outputs, made, strict=True):
        dtypes = {result.dtype}
        if analysis.limits is not None and isinstance(analysis.fact(value).placement, Partial):
            dtypes.add(wide(result.dtype, analysis.limits.options.accumulate))  # as it is formed
        if value.shape != result.shape or value.dtype not in dtypes:
            yield f"types: {node} makes {describe(jax.typeof(result))}, said to be {value}"


def _is_plain(node: Node) -> bool:
    values = [*node.inputs, *node.outputs]
    meshed = any(v.aval is not None and (named(v.aval) is not None or varying(v.aval)) for v in values)
    return not (meshed or node.effects or bodies(node.params) or any(map(callable, node.params.values())))


# ------------------------------------------------------------------------------------------------- what is known of it


def fact_faults(analysis: Analysis, size: int) -> Iterator[str]:
    """Placements that values of these shapes cannot have, and moves that do not fit their nodes; bodies included."""
    for number, value in enumerate(analysis.graph.inputs):
        yield from _placement_faults(analysis, f"input {number}", value, analysis.fact(value).placement, size)
    for node in analysis.graph.nodes:
        move = analysis.moves.get(node)
        if move is None:
            yield f"facts: {node} has no move"
            continue
        if len(move.ins) != len(node.inputs) or len(move.outs) != len(node.outputs):
            yield f"facts: {node} moves {len(move.ins)} operands and {len(move.outs)} results, and has others"
            continue
        for i, value in enumerate(node.outputs):
            known = analysis.fact(value).placement
            if known != move.outs[i]:
                yield f"facts: result {i} of {node} moves to {move.outs[i]}, and stands at {known}"
            yield from _placement_faults(analysis, f"result {i} of {node}", value, known, size)
        yield from _operand_faults(analysis, node, move)
        if node.state is not None:
            begun = node.state.checkpoints
            known = analysis.fact(begun).placement
            yield from _placement_faults(analysis, f"what {node} begins with", begun, known, size)
        for body in move.bodies if isinstance(move, Region) else ():
            yield from (f"in {node}: {fault}" for fault in (*graph_faults(body.graph), *fact_faults(body, size)))


def _operand_faults(analysis: Analysis, node: Node, move: Move) -> Iterator[str]:
    for i, (value, want) in enumerate(zip(node.inputs, move.ins, strict=True)):
        known = analysis.fact(value).placement
        free = isinstance(known, Whole) or value in analysis.resident or (node, i) in analysis.completed
        if known != want and not free:
            yield f"facts: {node} reads operand {i} as {want}, which stands at {known}"
        if isinstance(known, Tiled) and isinstance(want, Whole) and (node, i) not in analysis.completed and not free:
            yield f"facts: {node} reads operand {i} whole, which is cut and was not completed"
        if (reach := move.reach.get(i, ALONE)) != ALONE and not isinstance(want, Tiled):
            yield f"facts: {node} reads {reach} rows beside operand {i}, which is not cut"


def _placement_faults(analysis: Analysis, name: str, value: Value, placement: Placement, size: int) -> Iterator[str]:
    shape = value.shape if value.aval is not None else ()
    if isinstance(placement, Stacked):
        limits = analysis.limits
        count = None if limits is None else -(-limits.options.total // size)
        if not shape or placement.size != size or count not in (None, shape[0]):
            yield f"facts: {name}, {value}, has an entry for each tile of {placement.size}; {count} tiles have {size}"
        return
    if not isinstance(placement, Tiled):
        return
    if not 0 <= placement.dim < len(shape):
        yield f"facts: {name}, {value}, is cut along dimension {placement.dim}, which it does not have"
        return
    if analysis.limits is None or not isinstance(shape[placement.dim], int):
        return  # a body does not know how long the axis is; nor does an export
    total = analysis.limits.options.total
    if (whole := placement.major * placement.steps(total)) != shape[placement.dim]:
        yield f"facts: {name}, {value}, is {placement}, which makes dimension {placement.dim} {whole} long"
    if size < total and size % placement.group:
        yield f"facts: {name}, {value}, keeps {placement.group} rows together, and tiles have {size}"


# ----------------------------------------------------------------------------------------------------------- the loops


def loop_faults(plan: Schedule) -> Iterator[str]:
    """Loops that read what is not there yet, steps in the wrong order, and outputs that nothing computes."""
    ready = {*plan.analysis.graph.inputs}
    for number, loop in enumerate(plan.loops, 1):
        place = f"loop {number} of {len(plan.loops)}"
        for value in loop.reads:
            yield from (f"{place}: reads {value}, {fault}" for fault in _unready(plan, value, ready))
        yield from (f"{place}: {fault}" for fault in _step_faults(plan, loop, ready))
        for update in loop.updates:
            # What goes from tile to tile does so anew in each loop that has use for it.
            again = plan.analysis.fact(update.value).varies or update.value in loop.states or _is_kept(update)
            if update.value in ready and not again:
                yield f"{place}: writes {update.value}, which is there already"
        ready.update(u.value for u in loop.updates)
    for i, value in enumerate(plan.analysis.graph.outputs):
        yield from (f"after the loops: output {i}, {value}, {fault}" for fault in _unready(plan, value, ready))


def _is_kept(update: Update) -> bool:
    """Whether a loop leaves what an earlier one left, as it was: idle, not wrong. Weights of online sums are."""
    return all(isinstance(t, Ref) and t.value is update.value and t.how == "once" for t in update.terms)


def _unready(plan: Schedule, value: Value, ready: set[Value]) -> Iterator[str]:
    """Why a whole value cannot be computed from those that are there: what it needs is cut, or the rest of a sum."""
    stack, seen = [value], set()
    while stack:
        value = stack.pop()
        if value in seen or value in ready or value.const is not None:
            continue
        seen.add(value)
        node = value.producer
        if node is None:
            yield "which is neither an input nor a constant"
        elif node not in plan.analysis.moves:
            yield f"which needs {node}, of which nothing is known"
        elif plan.analysis.is_whole(value) or value in {*plan.analysis.resident, *plan.late}:
            stack += plan.analysis.needs(node)
        else:
            yield f"which needs {value} of {node} whole, and no loop before leaves it"


def _step_faults(plan: Schedule, loop: Loop, ready: set[Value]) -> Iterator[str]:
    """Operands of a loop's steps and results that are neither whole before it nor computed by a step before."""
    made: dict[tuple[Value, Placement], Reach] = {}
    left = {u.value for u in loop.updates}

    def missing(ref: Ref, reader: str) -> Iterator[str]:
        value = ref.value
        if ref.how == "tile":
            halo = made.get((value, ref.want))
            if halo is None and value.const is None:
                yield f"{reader} reads {value} as {ref.want}, which no step before computes"
            elif halo is not None and (halo[0] < ref.halo[0] or halo[1] < ref.halo[1]):
                yield f"{reader} reads {ref.halo} rows beside {value}, which is computed with {halo}"
        elif value.const is None and value not in ready and value not in loop.reads:
            yield f"{reader} reads {value} ({ref.how}), which is not there before the loop"
        if ref.how == "slice" and not isinstance(ref.want, Tiled):
            yield f"{reader} reads a slice of {value}, which is wanted as {ref.want}"

    def of(step: Step) -> Iterator[str]:
        for ref in step.refs:
            yield from missing(ref, str(step.node))

    for step in loop.steps:
        yield from of(step)
        if (known := step.node.state) is not None:
            state = known.yielded
            if state not in left and known.checkpoints not in ready:
                yield f"{step.node} reads the state {state}, which the loop does not leave"
        made.update(dict.fromkeys(step.keys, step.halo))
    for update in loop.updates:
        for term in update.terms:
            yield from of(term) if isinstance(term, Step) else missing(term, f"the result {update.value}")
        for anchor in update.online.anchors:
            if anchor.value not in left:
                yield f"the sum {update.value} is relative to {anchor.value}, which the loop does not keep"
        if update.online.weight is not None and update.online.weight not in left:
            yield f"the sum {update.value} moves with {update.online.weight}, which the loop does not keep"


# ------------------------------------------------------------------------------------------------------- the footprint


def footprint_faults(plan: Schedule) -> Iterator[str]:
    """Arrays that loops write although they are larger than what may be whole: inputs, outputs, a tile, the policy's.

    And equations that were completed although they were not to be.
    """
    analysis = plan.analysis
    limits = analysis.limits
    assert limits is not None, "a body is not planned by itself"
    outputs = {*analysis.graph.outputs}
    for number, loop in enumerate(plan.loops, 1):
        tile = tile_bytes(loop, plan.options.span)
        for value in (u.value for u in loop.updates):
            placement = analysis.fact(value).placement
            kept = value.producer is not None and keeps(limits.options.policy, value.producer)
            if isinstance(placement, Partial):
                fits = limits.accumulate(value, tile)
            else:
                fits = limits.allow(value) or kept or value in outputs
            if not fits and not _is_named_whole(analysis, value):
                yield (
                    f"loop {number} of {len(plan.loops)}: writes {value} {placement}, {value.nbytes} bytes; "
                    f"{limits.bound} may be whole"
                )
    for c in analysis.completions:
        if isinstance(c.placement, Tiled) and not limits.allow(c.value) and not _is_named_whole(analysis, c.value):
            yield f"completed {c}: {c.value.nbytes} bytes; {limits.bound} may be whole"


def _is_named_whole(analysis: Analysis, value: Value) -> bool:
    """Whether an equation runs on whole operands however large they are, as the untiled program does."""
    return any(value in analysis.needs(node) for node, move in analysis.moves.items() if isinstance(move, Outlined))
