"""The epilogue of a loop: whole values, computed from its results before another loop reads them, or at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from transforms.tiling.frontend.flatten import compute
from transforms.tiling.ir.facts import Outlined
from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.loops import Schedule
from transforms.tiling.ir.placement import Span
from transforms.tiling.ir.walks import read
from transforms.tiling.rules import RULES

Env = dict[Value, Any]


def finish(plan: Schedule, env: Env, wanted: Sequence[Value], span: Span, effects: Sequence[Node] = ()) -> None:
    """Compute whole values outside the loops, operands first; and run `effects`."""
    for node in effects:
        if not node.outputs:
            finish(plan, env, node.inputs, span)
            node.bind([narrow(env, v) for v in node.inputs])

    def run(node: Node) -> list[Any]:
        move = plan.analysis.moves[node]
        if isinstance(move, Outlined):
            return move.run([narrow(env, v) if i in move.reads else None for i, v in enumerate(node.inputs)])
        if plan.late.isdisjoint(node.outputs):
            return node.bind([narrow(env, v) for v in node.inputs])
        return combine_partials(node, [read(env, v) for v in node.inputs], span)

    compute(env, [*wanted, *(v for n in effects for v in n.outputs[:1])], run, plan.analysis.needs)


def narrow(env: Env, value: Value) -> Any:
    """A value in the dtype that the user's function gives it; sums are kept wider until somebody reads them."""
    array = read(env, value)
    same = array.dtype == value.dtype or not jnp.issubdtype(value.dtype, jnp.inexact)
    return array if same else array.astype(value.dtype)


def combine_partials(node: Node, values: list[Any], span: Span) -> list[Any]:
    """Run a node on parts of sums, in the dtype in which those are formed."""
    if not jnp.issubdtype(node.outputs[0].dtype, jnp.inexact):
        return node.bind(values)
    dtype = span.wide(node.outputs[0].dtype)
    kind = lambda v: v.dtype if _parts_differ(v.dtype, dtype) else dtype
    values = [v.astype(kind(v)) if jnp.issubdtype(v.dtype, jnp.inexact) else v for v in map(jnp.asarray, values)]
    rule = RULES[node.name]
    return node.bind(values) if rule.wide is None else [rule.wide(node, values, dtype, span)]


def _parts_differ(dtype: Any, other: Any) -> bool:
    """Whether one of two dtypes is complex alone: an equation takes a part of numbers, or puts them together."""
    return jnp.issubdtype(dtype, jnp.complexfloating) != jnp.issubdtype(other, jnp.complexfloating)
