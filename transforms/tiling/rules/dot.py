"""dot_general: a cut free or batch dimension stays cut, a cut contracted one leaves a partial sum."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.tiling.ir.graph import Node, elements
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import Partial, Placement, Span, Whole
from transforms.tiling.rules import Move, partial, shrinks, tiled
from transforms.tiling.rules.factors import Factors, register_factors


def factors(node: Node) -> Factors:
    """`([b m k], [b k n]) -> [b m n]`."""
    contract, batch = node.params["dimension_numbers"]
    left, right = ([(side, d) for d in range(len(v.shape))] for side, v in enumerate(node.inputs))
    for mine, its in (*zip(*contract, strict=True), *zip(*batch, strict=True)):
        right[its] = left[mine]
    summed, batched = ([left[d] for d in dims] for dims in (contract[0], batch[0]))
    free = [name for name in dict.fromkeys([*left, *right]) if name not in (*summed, *batched)]
    return Factors([left, right], [[*batched, *free]], reduced=dict.fromkeys(summed, "sum"))


def linear(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle | None:
    """A partial sum times something Whole."""
    parts = partial(placements)
    if not parts:
        return None
    one = len(parts) == 1 and not tiled(placements) and placements[parts[0]] == Partial("sum")
    if one and shrinks(node, parts[0]):
        return Move((Partial("sum"),), placements)
    return Complete(parts, "would not keep a partial sum small" if one else "is not linear in it")


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


def wide(node: Node, values: list[Any], dtype: Any) -> Any:
    return dot(node, *values, dtype)


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    if isinstance(move.outs[0], Whole):
        return node.bind(values)
    if isinstance(move.outs[0], Partial):
        return [dot(node, *values, span.wide(node.outputs[0].dtype))]
    return node.bind(values)


# Below this many bytes one more temporary of the accumulator's size is nothing to save.
SMALL = 4 << 20


def free(node: Node, side: int) -> dict[int, int]:
    """The dimensions that only one operand and the result have, and where in the result they stand."""
    stated = factors(node)
    other = stated.origins(1 - side)
    return {own: d for d, own in stated.origins(side).items() if d not in other}


def chunked_dim(node: Node) -> tuple[int, int] | None:
    """The operand and its largest free dimension: along it a dot can be added to an accumulator chunk by chunk."""
    candidates = [(v.shape[d], side, d) for side, v in enumerate(node.inputs) for d in free(node, side)]
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
    size, target = operands[side].shape[dim], free(node, side)[dim]
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


register_factors("dot_general", factors=factors, sums=linear, heavy=True, emit=emit, accumulate=accumulate, wide=wide)
