"""Operations that work element by element: a cut passes through; those that are linear pass partial sums too."""

from __future__ import annotations

import jax.numpy as jnp

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Tiled, Whole
from transforms.tiling.primitives import having
from transforms.tiling.rules import (
    Move,
    aligned,
    by_cut,
    count_once,
    only_sums,
    partial,
    refuse_partial,
    register,
    shrinks,
    tiled,
)


@by_cut()
def push(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    size = node.outputs[0].shape[cut.dim]
    ins = tuple(aligned(v, cut, size) for v in node.inputs)
    return Move((cut,) * len(node.outputs), ins)


def pull(node: Node, want: Tiled) -> tuple[Placement, ...]:
    size = node.outputs[0].shape[want.dim]
    return tuple(aligned(v, want, size) for v in node.inputs)


def push_linear(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Operations of one operand that commute with a sum; a running maximum or minimum passes those that copy."""
    (placement,) = placements
    if isinstance(placement, Partial) and (placement.op == "sum" or node.name in COPIES):
        return Move((placement,), placements)
    return push(node, placements)


def push_convert(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Between floats, and to narrower integers, a conversion commutes with a sum."""
    source, target = node.inputs[0].dtype, node.outputs[0].dtype
    if jnp.issubdtype(source, jnp.inexact):
        linear = jnp.issubdtype(target, jnp.inexact)
    else:  # integers wrap around: a tile's part may where the sum does not
        narrows = jnp.issubdtype(target, jnp.integer) and target.itemsize <= source.itemsize
        linear = narrows or (jnp.issubdtype(target, jnp.inexact) and source in (jnp.int32, jnp.int64))
    if isinstance(placements[0], Partial) and placements[0].op == "sum" and linear:
        return Move(placements, placements)
    return push(node, placements)


def push_add(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """A partial sum plus another, or plus something Whole that is counted once."""
    parts = partial(placements)
    if only_sums(placements):
        if all(shrinks(node, i) for i in parts):
            return Move((Partial("sum"),), tuple(count_once(p) for p in placements))
        return Complete(parts, "would make it larger")
    return push(node, placements)


def push_multiply(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """A partial sum times, or divided by, something Whole."""
    parts = partial(placements)
    scaled = parts == [0] or (parts == [1] and node.name == "mul")
    if scaled and isinstance(placements[1 - parts[0]], Whole) and placements[parts[0]] == Partial("sum"):
        integer_division = node.name == "div" and jnp.issubdtype(node.outputs[0].dtype, jnp.integer)
        if shrinks(node, parts[0]) and not integer_division:
            return Move((Partial("sum"),), placements)
    return push(node, placements)


def push_extremum(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """max(running maximum, x): x Whole or another running maximum; likewise min."""
    parts = partial(placements)
    running = parts and not tiled(placements) and {placements[i] for i in parts} == {Partial(node.name)}
    if running and all(shrinks(node, i) for i in parts):
        return Move((Partial(node.name),), placements)
    return push(node, placements)


def push_select(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Partial sums are chosen between by something Whole."""
    if isinstance(placements[0], Whole) and only_sums(placements):
        return Move((Partial("sum"),), (WHOLE, *map(count_once, placements[1:])))
    return push(node, placements)


@by_cut()
def push_bitcast(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    """Bits in another type: a last dimension comes or goes where the widths differ."""
    if cut.dim >= len(node.outputs[0].shape):
        return Complete([0], "takes the cut axis apart")
    return Move((cut,), placements)


def pull_bitcast(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    return (want,) if want.dim < len(node.inputs[0].shape) else None


def push_sink(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Keeps what it is given from being removed as dead code, and that is all."""
    return refuse_partial(node, placements, "keeps it") or Move((), placements)


def push_each(node: Node, placements: tuple[Placement, ...]) -> Move:
    """Every operand goes through to the result of its own number."""
    return Move(placements, placements)


COPIES = having("alias")

register(*having("elementwise"), "threefry2x32", "complex", "real", "imag", push=push, pull=pull)
register("neg", *COPIES, push=push_linear, pull=pull)
register("nonbatchable", "nondifferentiable_backward", "nontraceable", push=push_linear, pull=pull)  # Equinox's
register("select_if_vmap", push=push, pull=pull)
register("convert_element_type", push=push_convert, pull=pull)
register("add", "add_any", "sub", push=push_add, pull=pull)
register("mul", "div", push=push_multiply, pull=pull)
register("max", "min", push=push_extremum, pull=pull)
register("select_n", push=push_select, pull=pull)
register("bitcast_convert_type", push=push_bitcast, pull=pull_bitcast)
register("optimization_barrier", push=push_each)
register("dce_sink", push=push_sink)
