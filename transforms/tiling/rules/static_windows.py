"""Windows at known places, `x.at[5:11].set(v)` or `.at[:-8].multiply(v)`, as slices and choices, which tiles can take.

JAX writes them as a scatter to, or a gather from, one place. They are opened where a jaxpr becomes a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from transforms.layout import like, named, varying
from transforms.tiling.frontend.flatten import OPENED
from transforms.tiling.ir.graph import Value
from transforms.tiling.ir.walks import constant

Opened = tuple[ClosedJaxpr, list[Value]] | None


def put(operation: Callable[..., Any], params: dict[str, Any], operands: Sequence[Value]) -> Opened:
    """What a scatter of one window does: `operation` of what is there, where the window is, and of what is put."""
    (operand, indices, update), numbers = operands, params["dimension_numbers"]  # both arrays are of one dtype
    window = set(numbers.update_window_dims) == set(range(len(update.shape))) and not numbers.operand_batching_dims
    kept = [d for d in range(len(operand.shape)) if d not in numbers.inserted_window_dims]
    sizes = [1] * len(operand.shape)
    for d, size in zip(kept, update.shape, strict=False):
        sizes[d] = size
    known = _starts(indices, numbers.scatter_dims_to_operand_dims, operand.shape, sizes) if window else None
    if known is None or _spread(operands):
        return None
    starts, cut = known, [d for d, size in enumerate(sizes) if size < operand.shape[d]]
    filled, node = constant(update), update.producer
    source, dims = update, kept
    if filled is None and node is not None and node.name == "broadcast_in_dim":
        source, dims = node.inputs[0], [kept[d] for d in node.params["broadcast_dimensions"]]

    def everywhere(there: Any, new: Any) -> Any:
        """The same for all, then chosen: what is put is the same along the window."""
        all_ = lax.broadcast_in_dim(new, there.shape, dims) if filled is None else jnp.full_like(there, filled)
        return lax.select(inside(there), operation(there, all_), there)

    def inside(there: Any) -> Any:
        rows = [(d, lax.broadcasted_iota(jnp.int32, there.shape, d)) for d in cut]
        within = [(at >= starts[d]) & (at < starts[d] + sizes[d]) for d, at in rows]
        return functools.reduce(jnp.logical_and, within, jnp.ones(there.shape, bool))

    def apart(there: Any, new: Any) -> Any:
        part = lax.slice(there, starts, [a + b for a, b in zip(starts, sizes, strict=True)])
        made = operation(part, jnp.expand_dims(new, numbers.inserted_window_dims))
        if len(cut) != 1:
            return lax.dynamic_update_slice(there, made, starts)
        end = lambda begin, limit: lax.slice_in_dim(there, begin, limit, axis=cut[0])
        return lax.concatenate([end(0, starts[cut[0]]), made, end(starts[cut[0]] + sizes[cut[0]], None)], cut[0])

    alike = filled is not None or (source is not update and all(d not in cut for d in dims))
    taken = [operand, source if alike and filled is None else update]
    return jax.make_jaxpr(everywhere if alike else apart)(*(like(v.aval) for v in taken)), taken


def take(params: dict[str, Any], operands: Sequence[Value]) -> Opened:
    """What a gather of one window does."""
    (operand, indices), numbers, sizes = operands, params["dimension_numbers"], params["slice_sizes"]
    collapsed = numbers.collapsed_slice_dims
    window = len(numbers.offset_dims) + len(collapsed) == len(operand.shape) and len(indices.shape) == 1
    starts = _starts(indices, numbers.start_index_map, operand.shape, sizes) if window else None
    if starts is None or numbers.operand_batching_dims or _spread(operands):
        return None
    ends = [a + b for a, b in zip(starts, sizes, strict=True)]
    picked = lambda x: lax.squeeze(lax.slice(x, starts, ends), collapsed)
    return jax.make_jaxpr(picked)(like(operand.aval)), [operand]


def _spread(values: Sequence[Value]) -> bool:
    """Whether their types say how devices have them, which slices and joins would have to say too."""
    return any(named(v.aval) is not None or varying(v.aval) for v in values)


def _starts(indices: Value, dims: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """Where a window begins in each dimension, if there is one that lies within the array and its place is known."""
    if len(indices.shape) != 1:
        return None
    node = indices.producer
    parts = node.inputs if node is not None and node.name == "concatenate" else [indices]
    known = [constant(part) for part in parts for _ in range(part.shape[0])]
    at = {dim: int(start) for dim, start in zip(dims, known, strict=True) if start is not None}
    starts = [at.get(d, 0) for d in range(len(shape))]
    inside = all(a >= 0 and a + b <= n for a, b, n in zip(starts, sizes, shape, strict=True))
    return starts if inside and len(at) == len(dims) else None


SCATTERS = {
    "scatter": lambda _, new: new,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}
OPENED |= {"gather": take} | {name: functools.partial(put, operation) for name, operation in SCATTERS.items()}
