"""Operations that work element by element: a cut passes through; those that are linear pass partial sums too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Obstacle
from transforms.tiling.ir.placement import Partial, Placement, Span
from transforms.tiling.primitives import having
from transforms.tiling.rules import Move, each, linear, partial, refuse_partial, register, shrinks, tiled
from transforms.tiling.rules.factors import elementwise, leading, register_factors


def converted(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle | None:
    """Between floats, and to narrower integers, a conversion commutes with a sum."""
    source, target = node.inputs[0].dtype, node.outputs[0].dtype
    if jnp.issubdtype(source, jnp.inexact):
        commutes = jnp.issubdtype(target, jnp.inexact)
    else:  # integers wrap around: a tile's part may where the sum does not
        narrows = jnp.issubdtype(target, jnp.integer) and target.itemsize <= source.itemsize
        commutes = narrows or (jnp.issubdtype(target, jnp.inexact) and source in (jnp.int32, jnp.int64))
    return linear(node, placements) if commutes else None


def divided(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle | None:
    """Integers are rounded, so that quotients of parts do not add up to that of their sum."""
    return None if jnp.issubdtype(node.outputs[0].dtype, jnp.integer) else linear(node, placements)


def extremum(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """max(running maximum, x): x Whole or another running maximum; likewise min."""
    parts = partial(placements)
    running = parts and not tiled(placements) and {placements[i] for i in parts} == {Partial(node.name)}
    if running and all(shrinks(node, i) for i in parts):
        return Move((Partial(node.name),), placements)
    return None


def push_sink(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Keeps what it is given from being removed as dead code, and that is all."""
    return refuse_partial(node, placements, "keeps it") or Move((), placements)


def push_each(node: Node, placements: tuple[Placement, ...]) -> Move:
    """Every operand goes through to the result of its own number."""
    return Move(placements, placements)


def widened(node: Node, values: list[Any], dtype: Any, span: Span) -> Any:
    """A conversion in the dtype of sums; of a complex one to a float it is the real part."""
    real = values[0].dtype.kind == "c" and jnp.dtype(dtype).kind != "c"
    return (jnp.real(values[0]) if real else values[0]).astype(dtype)


# Sums are formed in a real dtype where one of the two is real.
COMPLEX = ("complex", "real", "imag")
MARKS = ("nonbatchable", "nondifferentiable_backward", "nontraceable", "select_if_vmap")  # Equinox's

register_factors(*having("elementwise"), *COMPLEX, "threefry2x32", factors=elementwise, sums=refuse_partial)
register_factors("add", "add_any", "sub", "neg", "mul", "select_n", *having("alias"), factors=elementwise)
register_factors(*MARKS, factors=elementwise)
register_factors("convert_element_type", factors=elementwise, sums=converted, wide=widened)
register_factors("div", factors=elementwise, sums=divided)
register_factors("max", "min", factors=elementwise, sums=extremum)
register_factors("bitcast_convert_type", factors=leading)
register("optimization_barrier", push=push_each, emit=each)
register("dce_sink", push=push_sink)
