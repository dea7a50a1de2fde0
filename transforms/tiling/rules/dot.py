"""dot_general: a cut free or batch dimension stays cut, a cut contracted one leaves a partial sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax

from transforms import layout, products
from transforms.bits import bits, numbers
from transforms.tiling.ir.graph import Node, elements
from transforms.tiling.ir.placement import Partial, Span
from transforms.tiling.rules import Move
from transforms.tiling.rules.factors import Factors, register_factors


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


def dot(node: Node, lhs: Any, rhs: Any, dtype: Any, span: Span) -> Any:
    """The node's dot_general with a result of `dtype`, wider than its operands if need be."""
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


def wide(node: Node, values: list[Any], dtype: Any, span: Span) -> Any:
    return dot(node, *values, dtype, span)


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    (out,), (placement,) = node.outputs, move.outs
    if isinstance(placement, Partial):
        return [dot(node, *values, span.wide(out.dtype), span)]
    return [dot(node, *values, out.dtype, span)] if _has_kernel(node, values, out.dtype) else node.bind(values)


# Below this many bytes one more temporary of the accumulator's size is nothing to save.
SMALL = 4 << 20


def longest(node: Node, names: Iterable[Any]) -> Any | None:
    """Of some factors that of the most elements; of those alone whose length is the same in every tile."""
    stated = factors(node)
    sizes = {
        name: n for v, own in zip(node.inputs, stated.ins, strict=True) for name, n in zip(own, v.shape, strict=True)
    }
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

    def plain(total: Any, lhs: Any, rhs: Any) -> Any:
        return total + dot(node, lhs, rhs, total.dtype, span)

    where, size = longest(node, free(node)), elements(total.shape) * total.dtype.itemsize
    if where is None or not span.chunks or size < SMALL:
        return plain(total, *values)
    return lax.platform_dependent(
        total, *values, cpu=lambda total, *ops: chunked(node, ops, total, where, size), default=plain
    )


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


register_factors("dot_general", factors=factors, heavy=True, emit=emit, accumulate=accumulate, wide=wide)
