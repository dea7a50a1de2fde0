"""dot_general: a cut free or batch dimension stays cut, a cut contracted one leaves a partial sum.

Likewise products of rows with the matrix of their group (mixtures of experts): a tile of rows has its own group sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from transforms import layout, products
from transforms.bits import bits, numbers
from transforms.tiling.ir.graph import Node, elements
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled
from transforms.tiling.rules import Move, no_sums, partial, refuse_partial, register, tiled
from transforms.tiling.rules.factors import Factors, push_factor, register_factors


def factors(node: Node) -> Factors:
    """`([b m k], [b k n]) -> [b m n]`."""
    return product(node, node.params["dimension_numbers"])


def product(node: Node, numbers: Any) -> Factors:
    """The factors of a product of a node's first two operands, by the dimensions that it contracts and its batches."""
    contract, batch = numbers
    left, right = ([(side, d) for d in range(len(v.shape))] for side, v in enumerate(node.inputs[:2]))
    for mine, its in (*zip(*contract, strict=True), *zip(*batch, strict=True)):
        right[its] = left[mine]
    summed, batched = ([left[d] for d in dims] for dims in (contract[0], batch[0]))
    free = [name for name in dict.fromkeys([*left, *right]) if name not in (*summed, *batched)]
    return Factors([left, right], [[*batched, *free]], reduced=dict.fromkeys(summed, "sum"))


def dot(node: Node, operands: Sequence[Any], dtype: Any, span: Span) -> Any:
    """The node's dot_general with a result of `dtype`, wider than its operands if need be."""
    lhs, rhs = operands
    plain = lambda lhs, rhs: node.bind([lhs, rhs], dict(node.params, preferred_element_type=dtype))[0]
    if _has_kernel(node, [lhs, rhs], dtype):
        if products.is_kernel(lhs, rhs, node.params["dimension_numbers"], dtype):
            return plain(lhs, rhs)
        return lax.platform_dependent(lhs, rhs, cpu=lambda *ops: _multiply(node, ops, dtype), default=plain)
    if lhs.dtype == rhs.dtype == dtype:
        return plain(lhs, rhs)

    def upcast(*operands: Any) -> Any:
        """XLA:CPU has no kernel for some narrow x narrow -> wide dots, and upcasts inside the others.

        A large operand is upcast chunk by chunk of a summed factor, for XLA would make a wide copy of all of it; but
        for a program that is cut again, where loops may run over what is cut.
        """
        large = max((op for op in operands if op.dtype != dtype), key=lambda op: op.size)
        out = jax.eval_shape(plain, *operands)
        summed = longest(node, factors(node).reduced)
        small = large.size <= max(out.size, CHUNK // dtype.itemsize)
        if summed is None or not span.chunks or small or layout.named(node.outputs[0].aval):
            return plain(*(op.astype(dtype) for op in operands))
        return chunked(node, operands, layout.full(out, 0, dtype, layout.TOGETHER), summed, large.size * dtype.itemsize)

    return lax.platform_dependent(lhs, rhs, cpu=upcast, default=plain)


def _has_kernel(node: Node, operands: Sequence[Any], dtype: Any) -> bool:
    """Whether XLA on CPUs multiplies bfloat16 as it is: see `transforms.products`."""
    plain = layout.named(node.outputs[0].aval) is None and products.usual(node.params["precision"])
    return plain and products.has_kernel(*operands, node.params["dimension_numbers"], dtype)


def _multiply(node: Node, operands: Sequence[Any], dtype: Any) -> Any:
    with node.context.manager:
        return products.multiply(*operands, node.params["dimension_numbers"], dtype)


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    (out,), (placement,) = node.outputs, move.outs
    if isinstance(placement, Partial):
        return [dot(node, values, span.wide(out.dtype), span)]
    return [dot(node, values, out.dtype, span)] if _has_kernel(node, values, out.dtype) else node.bind(values)


# Below this many bytes one more temporary of the accumulator's size is nothing to save.
SMALL = 4 << 20


def longest(node: Node, names: Iterable[Any]) -> Any | None:
    """Of some factors that of the most elements; of those alone whose length is the same in every tile."""
    sizes: dict[Any, Any] = {}
    for value, own in zip(node.inputs, factors(node).ins, strict=True):
        sizes |= zip(own, value.shape, strict=True)
    known = [name for name in names if isinstance(sizes[name], int)]
    return max(known, key=sizes.__getitem__, default=None)


def free(node: Node) -> list[Any]:
    """The factors that only one operand and the result have."""
    left, right = factors(node).ins
    return [name for name in (*left, *right) if (name in left) != (name in right)]


def accumulate(node: Node, values: list[Any], total: Any, span: Span) -> Any:
    """`total` plus the node's partial sum.

    XLA:CPU does not fuse the addition into the dot: there it would hold one more array of the accumulator's size and
    pass over it twice more. So the dot runs in chunks of its largest uncut dimension, each added in place.
    """

    plain = lambda total, *operands: total + dot(node, operands, total.dtype, span)
    where, size = longest(node, free(node)), elements(total.shape) * total.dtype.itemsize
    if where is None or not span.chunks or size < SMALL:
        return plain(total, *values)
    in_chunks = lambda total, *operands: chunked(node, operands, total, where, size)
    return lax.platform_dependent(total, *values, cpu=in_chunks, default=plain)


def chunked(node: Node, operands: Sequence[Any], total: Any, name: Any, size: int) -> Any:
    """Add the dot to `total` a chunk of a factor at a time, so that of `size` bytes that have it few are there at once.

    A free factor's chunks are added in place, each to its part of `total`, a summed one's to all of it.
    """
    stated = factors(node)
    cut = {i: names.index(name) for i, names in enumerate(stated.ins) if name in names}
    (length, *_) = (operands[i].shape[dim] for i, dim in cut.items())
    chunk = -(-length // max(1, min(length, -(-size // max(CHUNK, size // CHUNKS)))))
    dtype, sliced = total.dtype, lax.dynamic_slice_in_dim
    params = dict(node.params, preferred_element_type=dtype)

    def add(total: Any, start: Any, length: int) -> Any:  # what there is in bfloat16 by its bits: this runs on CPUs
        # Without the barrier XLA:CPU upcasts before it slices, and all of it before the loop.
        ops, start = lax.optimization_barrier((list(operands), start))
        for i, dim in cut.items():
            ops[i] = numbers(sliced(bits(ops[i]), start, length, dim), ops[i].dtype)
        if _has_kernel(node, ops, dtype):
            part = _multiply(node, ops, dtype)
        else:
            part = node.bind([op.astype(dtype) for op in ops], params)[0]
        if name not in stated.outs[0]:
            return bits(numbers(total, dtype) + part)
        dim = stated.outs[0].index(name)
        old = numbers(sliced(total, start, length, dim), dtype)
        return lax.dynamic_update_slice_in_dim(total, bits(old + part), start, dim)

    total = lax.fori_loop(0, length // chunk, lambda i, total: add(total, i * chunk, chunk), bits(total))
    return numbers(add(total, length // chunk * chunk, length % chunk) if length % chunk else total, dtype)


# Bytes that one chunk covers: large enough for the matmul's own blocking, small beside the rest.
CHUNK, CHUNKS = 8 << 20, 32  # at least so many bytes, and no more than so many chunks


# ---------------------------------------------------------------------- products of rows with the matrix of their group


def ragged_dim(node: Node) -> int:
    """The dimension of the first operand whose rows are of groups."""
    return node.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions[0]


def ragged_factors(node: Node) -> Factors:
    """`([m k], [g k n], [g]) -> [m n]`; where `m` is summed over, `([k m], [m n], [g]) -> [g k n]`."""
    numbers, ragged = node.params["ragged_dot_dimension_numbers"], ragged_dim(node)
    contract, batch = numbers.dot_dimension_numbers
    found = product(node, (contract, batch))
    (left, right), (out,) = found.ins, found.outs
    groups = [right[d] for d in numbers.rhs_group_dimensions]
    first = ["group"] if ragged in contract[0] else []
    blocked = dict.fromkeys([*groups, *([left[ragged]] if ragged in batch[0] else ())], "groups the cut axis")
    outs = [[*first, *(name for name in out if name not in groups)]]
    return Factors([left, right, ["group"]], outs, reduced=found.reduced, blocked=blocked)


by_factors = push_factor(ragged_factors, no_sums)


def push_ragged(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """As factors say, where each tile of the rows can tell which groups they are of: not from a part of the groups."""
    cuts, ragged = tiled(placements), ragged_dim(node)
    if 2 in cuts or len(node.inputs[2].shape) != 1 or node.params["group_offset"] is not None:
        return refuse_partial(node, placements) or Complete(cuts, "needs the sizes of all groups")
    move = by_factors(node, placements)
    rows = move.ins[0] if isinstance(move, Move) else WHOLE
    if isinstance(rows, Tiled) and rows.dim == ragged and not rows.plain:
        return Complete(cuts, "groups the cut axis")
    return move


def emit_ragged(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    lhs, rhs, sizes = values
    cut, ragged = move.ins[0], ragged_dim(node)
    if isinstance(cut, Tiled) and cut.dim == ragged:
        ends = jnp.cumsum(sizes, dtype=sizes.dtype)
        start = jnp.asarray(span.start, sizes.dtype)
        inside = [jnp.clip(x, start, start + span.length) for x in (ends - sizes, ends)]
        sizes = inside[1] - inside[0]
    if not partial(move.outs):
        return node.bind([lhs, rhs, sizes])
    dtype = span.wide(node.outputs[0].dtype)
    return node.bind([lhs.astype(dtype), rhs.astype(dtype), sizes], node.params | {"preferred_element_type": dtype})


register_factors("dot_general", factors=factors, heavy=True, emit=emit, accumulate=accumulate, wide=dot)
register("ragged_dot_general", push=push_ragged, emit=emit_ragged, alone=True)
