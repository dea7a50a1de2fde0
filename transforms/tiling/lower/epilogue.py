"""The epilogue of a loop: whole values, computed from its results before another loop reads them, or at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from transforms.tiling.ir.facts import Local
from transforms.tiling.ir.graph import Node, Value, read
from transforms.tiling.ir.loops import Schedule
from transforms.tiling.ir.placement import Span
from transforms.tiling.rules import RULES

Env = dict[Value, Any]


def finish(plan: Schedule, env: Env, wanted: Sequence[Value], span: Span, effects: Sequence[Node] = ()) -> None:
    """Compute whole values outside the loops, operands first; and run `effects`."""
    for node in effects:
        if not node.outputs:
            finish(plan, env, node.inputs, span)
            node.bind([narrow(env, v) for v in node.inputs])
    stack = [v for v in (*wanted, *(v for n in effects for v in n.outputs[:1])) if v not in env and v.const is None]
    while stack:
        value = stack[-1]
        node = value.producer
        if value in env:
            stack.pop()
            continue
        assert node is not None
        if missing := [v for v in plan.analysis.needs(node) if v not in env and v.const is None]:
            stack.extend(missing)
            continue
        if isinstance(move := plan.analysis.moves[node], Local):
            results = move.run([narrow(env, v) if i in move.reads else None for i, v in enumerate(node.inputs)])
            env.update(zip(node.outputs, results, strict=True))
        elif value in plan.late:
            env[value] = combine_partials(node, [read(env, v) for v in node.inputs], span)[0]
        else:
            env.update(zip(node.outputs, node.bind([narrow(env, v) for v in node.inputs]), strict=True))


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
    values = [v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.inexact) else v for v in map(jnp.asarray, values)]
    rule = RULES[node.name]
    return node.bind(values) if rule.wide is None else [rule.wide(node, values, dtype)]
