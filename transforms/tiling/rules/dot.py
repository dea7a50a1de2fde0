"""dot_general: a cut free or batch dimension stays cut, a cut contracted one leaves a partial sum."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.tiling.ir.graph import Node, elements
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled, Whole
from transforms.tiling.rules import Move, partial, register, shrinks, smaller, tiled

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def free_dims(node: Node, side: int) -> list[int]:
    """The dimensions of an operand that are neither contracted nor batched."""
    contract, batch = node.params["dimension_numbers"]
    return [d for d in range(len(node.inputs[side].shape)) if d not in contract[side] and d not in batch[side]]


def out_dim(node: Node, side: int, dim: int) -> int:
    """Where a free or batch dimension of an operand stands in the result."""
    _, batch = node.params["dimension_numbers"]
    if dim in batch[side]:
        return batch[side].index(dim)
    before = len(batch[0]) + (len(free_dims(node, 0)) if side == 1 else 0)
    return before + free_dims(node, side).index(dim)


def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    parts, cuts = partial(placements), tiled(placements)
    if parts:
        linear = len(parts) == 1 and not cuts and placements[parts[0]] == Partial("sum")
        if linear and shrinks(node, parts[0]):
            return Move((Partial("sum"),), placements)
        return Complete(parts, "would not keep a partial sum small" if linear else "is not linear in it")
    contract, batch = (tuple(tuple(map(int, d)) for d in pair) for pair in node.params["dimension_numbers"])
    side = cuts[0]
    cut = placements[side]
    assert isinstance(cut, Tiled)
    for pairs, contracted in ((contract, True), (batch, False)):
        if cut.dim in pairs[side]:
            partner = cut.at(pairs[1 - side][pairs[side].index(cut.dim)])
            if len(cuts) == 2 and placements[1] != partner:
                return Complete(smaller(node, cuts), "has operands that are cut along different dimensions")
            ins = (cut, partner) if side == 0 else (partner, cut)
            return Move((Partial("sum") if contracted else cut.at(out_dim(node, side, cut.dim)),), ins)
    if len(cuts) == 2:
        return Complete(smaller(node, cuts), "has operands that are cut along different dimensions")
    return Move((cut.at(out_dim(node, side, cut.dim)),), placements)


def pull(node: Node, want: Tiled) -> tuple[Placement, ...]:
    """One tile of a product of whole operands, from one tile of those that have the dimension."""
    _, batch = node.params["dimension_numbers"]
    if want.dim < len(batch[0]):
        return want.at(int(batch[0][want.dim])), want.at(int(batch[1][want.dim]))
    left, dim = free_dims(node, 0), want.dim - len(batch[0])
    if dim < len(left):
        return want.at(left[dim]), WHOLE
    return WHOLE, want.at(free_dims(node, 1)[dim - len(left)])


def dot(node: Node, lhs: Any, rhs: Any, dtype: Any) -> Any:
    """The node's dot_general with a result of `dtype`, wider than its operands if need be."""
    params = dict(node.params, preferred_element_type=dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and (lhs.dtype != dtype or rhs.dtype != dtype)
    if not narrow:
        return node.bind([lhs, rhs], params)[0]

    def upcast(lhs: Any, rhs: Any) -> Any:
        # XLA:CPU has no kernel for some narrow x narrow -> wide dots, and upcasts inside the others.
        return node.bind([lhs.astype(dtype), rhs.astype(dtype)], params)[0]

    return lax.platform_dependent(lhs, rhs, cpu=upcast, default=lambda lhs, rhs: node.bind([lhs, rhs], params)[0])


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    if isinstance(move.outs[0], Whole):
        return node.bind(values)
    if isinstance(move.outs[0], Partial):
        return [dot(node, *values, span.wide(node.outputs[0].dtype))]
    return node.bind(values)


# Below this many bytes one more temporary of the accumulator's size is nothing to save.
SMALL = 4 << 20


def chunked_dim(node: Node) -> tuple[int, int] | None:
    """The operand and its largest free dimension: along it a dot can be added to an accumulator chunk by chunk."""
    candidates = [(node.inputs[side].shape[d], side, d) for side in (0, 1) for d in free_dims(node, side)]
    known = [c for c in candidates if isinstance(c[0], int)]
    return max(known)[1:] if known else None


def accumulate(node: Node, values: list[Any], total: Any, span: Span) -> Any:
    """`total` plus the node's partial sum.

    XLA:CPU does not fuse the addition into the dot: there it would hold one more array of the accumulator's size and
    pass over it twice more. So the dot runs in chunks of its largest uncut dimension, each added in place.
    """

    def plain(total: Any, lhs: Any, rhs: Any) -> Any:
        return total + dot(node, lhs, rhs, total.dtype)

    where = chunked_dim(node)
    if where is None or not span.chunks or elements(total.shape) * total.dtype.itemsize < SMALL:
        return plain(total, *values)
    return lax.platform_dependent(
        total, *values, cpu=lambda total, *ops: chunked(node, list(ops), total, *where), default=plain
    )


def chunked(node: Node, operands: list[Any], total: Any, side: int, dim: int) -> Any:
    """Add the dot to `total` in chunks of dimension `dim` of operand `side`, in place."""
    size, target = operands[side].shape[dim], out_dim(node, side, dim)
    bytes_total = elements(total.shape) * total.dtype.itemsize
    chunk = -(-size // max(1, min(size, -(-bytes_total // max(CHUNK, bytes_total // CHUNKS)))))
    params = dict(node.params, preferred_element_type=total.dtype)

    def add(total: Any, start: Any, length: int) -> Any:
        ops = list(operands)
        ops[side] = lax.dynamic_slice_in_dim(ops[side], start, length, dim)
        part = node.bind([op.astype(total.dtype) for op in ops], params)[0]
        old = lax.dynamic_slice_in_dim(total, start, length, target)
        return lax.dynamic_update_slice_in_dim(total, old + part, start, target)

    total = lax.fori_loop(0, size // chunk, lambda i, total: add(total, i * chunk, chunk), total)
    return add(total, size // chunk * chunk, size % chunk) if size % chunk else total


# Bytes of the accumulator that one chunk covers: large enough for the matmul's own blocking, small beside the rest.
CHUNK, CHUNKS = 8 << 20, 32  # at least so many bytes, and no more than so many chunks


register("dot_general", push=push, pull=pull, heavy=True, emit=emit, accumulate=accumulate)
