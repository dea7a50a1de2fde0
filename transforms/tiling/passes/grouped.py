"""Grouped products: a batch of products with an operand that is repeated reads it once for each group.

`jnp.repeat(k, 4, axis=1)` gives every four query heads one key head, and each of them a copy. Without the copies the
group is a dimension of the other operand, as in grouped-query attention written with `einsum`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.layout import named
from transforms.tiling.frontend.trace import Made, traced
from transforms.tiling.ir.graph import Node, Value, elements


def group(node: Node) -> Made:
    """A product that reads what was repeated along its last batch dimension."""
    for side in (0, 1) if node.name == "dot_general" else ():
        if (found := _repeated(node, side)) is not None:
            return traced(_grouped(node, side, *found[1:]), [found[0], node.inputs[1 - side]], node)
    return None


def _repeated(node: Node, side: int) -> tuple[Value, int, int] | None:
    """What an operand repeats, along which dimension, and how often: the last one of the batch, neighbours alike."""
    flat = node.inputs[side].producer
    wide = None if flat is None or flat.name != "reshape" else flat.inputs[0].producer
    if wide is None or wide.name != "broadcast_in_dim" or any(named(v.aval) for v in (*node.inputs, *node.outputs)):
        return None
    (source, *_), shape, kept = wide.inputs, wide.params["shape"], wide.params["broadcast_dimensions"]
    new = [d for d in range(len(shape)) if d not in kept]
    _, batch = node.params["dimension_numbers"]
    if len(new) != 1 or not batch[side] or tuple(shape[d] for d in kept) != source.shape:
        return None
    dim, times = new[0] - 1, shape[new[0]]
    merged = (*shape[:dim], shape[dim] * times, *shape[dim + 2 :]) if dim >= 0 else None
    if merged != node.inputs[side].shape or batch[side][-1] != dim:
        return None
    turns = side == 0 and elements(node.outputs[0].shape) > elements(node.inputs[1].shape)  # a large result
    return None if turns else (source, dim, times)


def _grouped(node: Node, side: int, dim: int, times: int) -> Any:
    """The product of what is repeated with the other operand, whose batch dimension is of groups and members."""
    contract, batch = node.params["dimension_numbers"]
    split, count = batch[1 - side][-1], len(batch[side])
    taken = {*contract[1 - side], *batch[1 - side]}
    how = {k: node.params[k] for k in ("precision", "preferred_element_type")}

    def product(source: Any, other: Any) -> list[Any]:
        length = other.shape[split] // times
        other = other.reshape(*other.shape[:split], length, times, *other.shape[split + 1 :])
        first = next(d for d in range(split + 2) if d == split + 1 or d not in taken)
        other = jnp.moveaxis(other, split + 1, first)  # the first of the free dimensions
        place = lambda d: d + (d >= first or d > split)
        mine = tuple(map(place, contract[1 - side])), tuple(map(place, batch[1 - side]))
        both = [(source, contract[side], batch[side]), (other, *mine)]
        (a, b), contracts, batches = zip(*(both if side == 0 else both[::-1]), strict=True)
        made = lax.dot_general(a, b, (contracts, batches), **how)
        free = source.ndim - len(contract[side]) - count if side == 0 else 0
        made = jnp.moveaxis(made, count + free, count)
        return [made.reshape(node.outputs[0].shape)]

    return product
