"""Why an equation that its rule has placed cannot run on a tile all the same: how long that is, or how it is spread."""

from __future__ import annotations

from typing import Any

import jax

from transforms.layout import like, named
from transforms.tiling.ir.facts import Analysis, Outlined, Region
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.placement import ALONE, Move, Span, Tiled, Whole
from transforms.tiling.primitives import having
from transforms.tiling.rules import RULES, run

TYPED = having("flows", "typed")


def unfit(found: Analysis, node: Node, move: Move) -> str | None:
    """Why an equation cannot run, or be spread over devices, on a tile of its operands, though it can on all."""
    options = None if found.limits is None else found.limits.options
    check = RULES[node.name].unfit
    if check is not None and not all(isinstance(p, Whole) for p in move.ins):
        return check(node, move, options.span) if options else None
    known = node.name in TYPED or isinstance(move, (Region, Outlined)) or options is None
    if known or not any(isinstance(p, Tiled) for p in (*move.ins, *move.outs)):
        return None
    if all(named(v.aval) is None for v in (*node.inputs, *node.outputs)):
        return None
    key: Any = (node, *move.ins, *move.outs)
    if key not in found.typed:
        found.typed[key] = _untyped(node, move, options.span)
    return found.typed[key]


def _untyped(node: Node, move: Move, span: Span) -> str | None:
    """What JAX says of the sharding types of a tile."""
    spans = [span.beside(move.reach.get(i, ALONE)) for i in range(len(move.ins))]
    both = zip(node.inputs, move.ins, spans, strict=True)
    tiles = [like(v.aval, s.local_shape(v.shape, p)) for v, p, s in both]
    try:
        jax.eval_shape(lambda start, *values: run(node, list(values), move, span._replace(start=start)), 0, *tiles)
    except Exception as error:  # JAX has no public name for errors of sharding types
        return f"cannot be spread over the devices a tile at a time ({str(error)[:200]})"
    return None
