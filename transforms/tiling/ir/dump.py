"""A planned program as text that a person can read: its graph, where each value stands, and its loops.

    %3:f32[26,13]{cut 0} = dot_general %1 %2  preferred_element_type=float32  # head.py:12 (loss)

A value is `%` and a number, its type, and in braces what is known of it: `cut 0` for one
that is cut along dimension 0, `cut 0 (2*L*3)` where the axis is a part of that, `sum` for a partial result, `states`
for an entry of each tile, `from loop 2` where no loop before computes it; nothing where it is the same for every tile.
Constants stand where they are read. Set `TILE_DUMP` to a folder, and each program is written there as it is planned,
a file for each: `0003_loss_2_loops.txt`, numbered in their order.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from transforms.tiling.ir.facts import Analysis, Region
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.jaxprs import bodies
from transforms.tiling.ir.loops import Loop, Ref, Schedule, Step, Update
from transforms.tiling.ir.placement import ALONE, Partial, Placement, Stacked, Tiled, Whole

DUMP = "TILE_DUMP"
SHORT = {"float": "f", "int": "i", "uint": "u", "bfloat": "bf", "complex": "c"}
LONGEST = 60  # characters of a parameter


class Names:
    """Numbers for the values of a graph, in the order in which they stand there; for others, as they are met."""

    def __init__(self, graph: Graph) -> None:
        self._numbers: dict[Value, int] = {}
        for value in (*graph.inputs, *(v for node in graph.nodes for v in node.outputs)):
            self(value)

    def __call__(self, value: Value) -> str:
        if value.const is not None:
            return constant(value)
        return f"%{self._numbers.setdefault(value, len(self._numbers))}"


def constant(value: Value) -> str:
    """A constant of one element as a number, others as their type."""
    key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    if isinstance(value.const, Tracer) or value.aval.shape != () or key:
        return f"const:{kind(value.aval)}"
    return f"{np.asarray(value.const).item()!r}"


def kind(aval: Any) -> str:
    """The type of an array, as XLA writes it: `f32[8,16]`."""
    if aval is None:
        return "()"
    name = getattr(aval.dtype, "name", str(aval.dtype))
    found = re.fullmatch(r"([a-z]+?)(\d+)", name)
    brief = SHORT.get(found[1], found[1]) + found[2] if found else name
    return f"{brief}[{','.join(map(str, aval.shape))}]"


def place(placement: Placement) -> str:
    """Where a value stands, in a word or two."""
    if isinstance(placement, Tiled):
        group = "" if placement.group == 1 else f"/{placement.group}"
        inner = "" if placement.plain else f" ({placement.major}*L{group}*{placement.minor})"
        return f"cut {placement.dim}{inner}"
    if isinstance(placement, Partial):
        return placement.op
    return "states" if isinstance(placement, Stacked) else ""


def known(analysis: Analysis | None, value: Value) -> str:
    """What is known of a value, in braces; nothing where it is whole from the start."""
    if analysis is None or value.const is not None:
        return ""
    fact = analysis.fact(value)
    apart = " and ".join(sorted(analysis.apart[value].axes))
    words = [
        place(fact.placement),
        f"from loop {fact.stage + 1}" if fact.stage else "",
        "resident" if value in analysis.resident else "",
        "from tile to tile" if fact.varies else "",
        f"unreduced over {apart}" if apart else "",
    ]
    text = ", ".join(filter(None, words))
    return f"{{{text}}}" if text else ""


# ----------------------------------------------------------------------------------------------------------- the graph


def graph_text(graph: Graph, analysis: Analysis | None = None) -> str:
    """A graph as text, an equation a line; with what an analysis knows of each value, if there is one."""
    return "\n".join(_graph(graph, analysis, Names(graph)))


def _graph(graph: Graph, analysis: Analysis | None, names: Names) -> Iterator[str]:
    typed = lambda v: f"{names(v)}:{kind(v.aval)}{known(analysis, v)}"
    yield f"inputs {' '.join(map(typed, graph.inputs))}".rstrip()
    for node in graph.nodes:
        left = " ".join(map(typed, node.outputs))
        operands = (_operand(analysis, node, i, names) for i in range(len(node.inputs)))
        right = " ".join([node.name, *operands, *_params(node, names)])
        where = re.sub(r"^.*/(?=[^/]*/[^/]*$)", "", node.where)  # without the way to its folder
        yield f"{left} = {right}".removeprefix(" = ") + (f"  # {where}" if where else "")
        move = None if analysis is None else analysis.moves.get(node)
        for i, body in enumerate(move.bodies if isinstance(move, Region) else ()):
            yield f"  body {i}"
            yield from (f"    {line}" for line in _graph(body.graph, body, Names(body.graph)))
    yield f"outputs {' '.join(map(names, graph.outputs))}".rstrip()


def _operand(analysis: Analysis | None, node: Node, number: int, names: Names) -> str:
    """An operand, and `whole` after one that had to be made so."""
    value = node.inputs[number]
    return names(value) + ("(whole)" if analysis is not None and (node, number) in analysis.completed else "")


def _params(node: Node, names: Names) -> Iterator[str]:
    """The parameters that say something, no bodies, nothing that is not there; and what a state goes on with."""
    state = node.state
    if state is not None and state.yielded is not None:
        yield f"yielded={names(state.yielded)} checkpoints={names(state.checkpoints)} reverse={state.reverse}"
    for key, param in sorted(node.params.items()):
        if not (param is None or param is False or param == () or _is_program(param)):
            text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(param).split()))
            yield f"{key}={text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'}"


def _is_program(param: Any) -> bool:
    return callable(param) or isinstance(param, Node) or bool(bodies({"": param}))


# ----------------------------------------------------------------------------------------------------------- the loops


def loops_text(plan: Schedule) -> str:
    """The loops of a plan as text: what each reads, computes for a tile, and leaves; numbered as its graph is."""
    names = Names(plan.analysis.graph)
    return "\n".join(line for i, loop in enumerate(plan.loops) for line in _loop(plan, i, loop, names))


def _loop(plan: Schedule, number: int, loop: Loop, names: Names) -> Iterator[str]:
    tiles, total = f"tiles of {plan.options.size}", plan.options.total
    tiles = "all at once" if loop.light(plan.analysis) else tiles
    yield f"loop {number + 1} of {len(plan.loops)}: {tiles} of {total}{', backwards' if loop.reverse else ''}"
    if whole := [names(v) for v in loop.reads if v.const is None]:
        yield f"  reads {' '.join(whole)}"
    for step in loop.steps:
        yield f"  {_step(step, names)}"
    for update in loop.updates:
        yield f"  {_update(plan, update, names)}"


def _step(step: Step, names: Names) -> str:
    made = " ".join(f"{names(v)}:{kind(v.aval)}{_braced(p)}" for v, p in step.keys)
    silent = " silently" if step.silent else ""
    beside = "" if step.halo == ALONE else f" with {step.halo[0]} rows before and {step.halo[1]} after"
    return f"{made} = {_right(step, names)}{beside}{silent}".removeprefix(" = ")


def _right(step: Step, names: Names) -> str:
    return " ".join([step.node.name, *(_ref(ref, names) for ref in step.refs)])


def _ref(ref: Ref, names: Names) -> str:
    """An operand as a loop reads it: the tile that it computes, or a slice, all, or one tile's share of a whole one."""
    if ref.value.const is not None and isinstance(ref.want, Whole):
        return names(ref.value)
    where = "" if ref.how == "tile" else ref.how if isinstance(ref.want, Whole) else f"{ref.how} {place(ref.want)}"
    halo = "" if ref.halo == ALONE else f"{ref.halo[0]} before and {ref.halo[1]} after"
    words = ", ".join(filter(None, (where, halo)))
    return names(ref.value) + (f"[{words}]" if words else "")


def _update(plan: Schedule, update: Update, names: Names) -> str:
    """A result of the loop: what each tile adds to it, or writes of it."""
    placement = plan.analysis.fact(update.value).placement
    terms = ", ".join(f"({_right(t, names)})" if isinstance(t, Step) else _ref(t, names) for t in update.terms)
    source = "" if terms == names(update.value) else f" from {terms}"
    how = "writes" if isinstance(placement, Tiled | Stacked) else "carries"
    anchors = " ".join(names(a.value) for a in update.online.anchors)
    relative = f" relative to {anchors}" if anchors else ""
    weight = "" if update.online.weight is None else f" as often as {names(update.online.weight)}"
    return f"{how} {names(update.value)}:{kind(update.value.aval)}{_braced(placement)}{source}{relative}{weight}"


def _braced(placement: Placement) -> str:
    return f"{{{place(placement)}}}" if place(placement) else ""


# ------------------------------------------------------------------------------------------------------------ the dump


def plan_text(plan: Schedule) -> str:
    """All of a plan as text; a value has the same number in its graph and in its loops."""
    parts = [graph_text(plan.analysis.graph, plan.analysis), loops_text(plan)]
    completed = [f"made whole: {c}" for c in plan.analysis.completions if isinstance(c.placement, Tiled)]
    return "\n\n".join(filter(None, [*parts, "\n".join(completed)])) + "\n"


_numbers = itertools.count()


def dump(plan: Schedule, folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Write a plan into a folder, or into that of `TILE_DUMP`; return the file, None where there is no folder."""
    folder = folder or os.environ.get(DUMP)
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    made = [n.where for n in plan.analysis.graph.nodes]
    named = re.search(r"\(([\w.<>]+)\)\s*$", made[-1]) if made else None
    name = re.sub(r"\W+", "_", named[1].split(".")[-1]).strip("_") if named else "program"
    while True:  # others may write there too
        path = Path(folder) / f"{next(_numbers):04}_{name}_{len(plan.loops)}_loops.txt"
        try:
            with path.open("x") as file:
                file.write(plan_text(plan))
            return path
        except FileExistsError:
            continue
