"""Operations that work element by element: a cut passes through; those that are linear pass partial sums too."""

from __future__ import annotations

import jax.numpy as jnp

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Whole
from transforms.tiling.primitives import having
from transforms.tiling.rules import Move, count_once, each, only_sums, partial, refuse_partial, register, shrinks, tiled
from transforms.tiling.rules.factors import elementwise, leading, register_factors


def linear(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """Operations of one operand that commute with a sum; a running maximum or minimum passes those that copy."""
    (placement,) = placements
    if isinstance(placement, Partial) and (placement.op == "sum" or node.name in COPIES):
        return Move((placement,), placements)
    return None


def converted(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """Between floats, and to narrower integers, a conversion commutes with a sum."""
    source, target = node.inputs[0].dtype, node.outputs[0].dtype
    if jnp.issubdtype(source, jnp.inexact):
        linear = jnp.issubdtype(target, jnp.inexact)
    else:  # integers wrap around: a tile's part may where the sum does not
        narrows = jnp.issubdtype(target, jnp.integer) and target.itemsize <= source.itemsize
        linear = narrows or (jnp.issubdtype(target, jnp.inexact) and source in (jnp.int32, jnp.int64))
    if isinstance(placements[0], Partial) and placements[0].op == "sum" and linear:
        return Move(placements, placements)
    return None


def added(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle | None:
    """A partial sum plus another, or plus something Whole that is counted once."""
    parts = partial(placements)
    if only_sums(placements):
        if all(shrinks(node, i) for i in parts):
            return Move((Partial("sum"),), tuple(count_once(p) for p in placements))
        return Complete(parts, "would make it larger")
    return None


def scaled(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """A partial sum times, or divided by, something Whole."""
    parts = partial(placements)
    one = parts == [0] or (parts == [1] and node.name == "mul")
    if one and isinstance(placements[1 - parts[0]], Whole) and placements[parts[0]] == Partial("sum"):
        integer_division = node.name == "div" and jnp.issubdtype(node.outputs[0].dtype, jnp.integer)
        if shrinks(node, parts[0]) and not integer_division:
            return Move((Partial("sum"),), placements)
    return None


def extremum(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """max(running maximum, x): x Whole or another running maximum; likewise min."""
    parts = partial(placements)
    running = parts and not tiled(placements) and {placements[i] for i in parts} == {Partial(node.name)}
    if running and all(shrinks(node, i) for i in parts):
        return Move((Partial(node.name),), placements)
    return None


def selected(node: Node, placements: tuple[Placement, ...]) -> Move | None:
    """Partial sums are chosen between by something Whole."""
    if isinstance(placements[0], Whole) and only_sums(placements):
        return Move((Partial("sum"),), (WHOLE, *map(count_once, placements[1:])))
    return None


def push_sink(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Keeps what it is given from being removed as dead code, and that is all."""
    return refuse_partial(node, placements, "keeps it") or Move((), placements)


def push_each(node: Node, placements: tuple[Placement, ...]) -> Move:
    """Every operand goes through to the result of its own number."""
    return Move(placements, placements)


COPIES = having("alias")

register_factors(*having("elementwise"), "threefry2x32", "complex", "real", "imag", factors=elementwise)
register_factors("neg", *COPIES, factors=elementwise, sums=linear)
register_factors("nonbatchable", "nondifferentiable_backward", "nontraceable", factors=elementwise, sums=linear)
register_factors("select_if_vmap", factors=elementwise)
register_factors(
    "convert_element_type",
    factors=elementwise,
    sums=converted,
    wide=lambda node, values, dtype, span: values[0].astype(dtype),
)
register_factors("add", "add_any", "sub", factors=elementwise, sums=added)
register_factors("mul", "div", factors=elementwise, sums=scaled)
register_factors("max", "min", factors=elementwise, sums=extremum)
register_factors("select_n", factors=elementwise, sums=selected)
register_factors("bitcast_convert_type", factors=leading)
register("optimization_barrier", push=push_each, emit=each)
register("dce_sink", push=push_sink)
