"""Indices that are provably the position along a dimension: `logits[jnp.arange(n), labels]` stays within the tile."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.walks import constant
from transforms.tiling.rules.factors import origins


def is_position(value: Value, dim: int, column: int | None = None) -> bool:
    """Whether `value` (its last dimension at `column`, if given) is provably the index along its dimension `dim`.

    This is what makes `logits[jnp.arange(n), labels]` a lookup within the tile.
    """
    if value.producer is None:
        return _is_arange(value.const, dim, column)
    if not jnp.issubdtype(value.dtype, jnp.integer) or jnp.iinfo(value.dtype).max < value.shape[dim] - 1:
        return False
    node, source = value.producer, value.producer.inputs[0] if value.producer.inputs else value
    match node.name:
        case "iota":
            return node.params["dimension"] == dim
        case "convert_element_type" | "copy" | "copy_p" | "stop_gradient":
            return is_position(source, dim, column)
        case "select_n":  # jnp counts negative indices from the end: where(i < 0, i + n, i)
            test = node.inputs[0].producer
            tested = test is not None and test.name == "lt" and constant(test.inputs[1]) == 0
            never = constant(node.inputs[0]) == 0 or (tested and is_position(test.inputs[0], dim, column))
            return bool(never) and is_position(node.inputs[1], dim, column)
        case "clamp":
            low, high = constant(node.inputs[0]), constant(node.inputs[2])
            wide = low is not None and high is not None and low <= 0 and high >= value.shape[dim] - 1
            return wide and is_position(node.inputs[1], dim, column)
        case "concatenate" if column is not None and node.params["dimension"] == len(value.shape) - 1:
            for piece in node.inputs:
                if column < piece.shape[-1]:
                    return is_position(piece, dim, column)
                column -= piece.shape[-1]
        case "broadcast_in_dim" | "reshape" | "squeeze":
            return _through_reshape(node, value, source, dim, column)
    return False


def _is_arange(array: Any, dim: int, column: int | None) -> bool:
    if array is None or isinstance(array, Tracer):
        return False
    array = np.asarray(array) if column is None else np.asarray(array)[..., column]
    steps = np.arange(array.shape[dim]).reshape([-1 if d == dim else 1 for d in range(array.ndim)])
    return bool((array == steps).all())


def _through_reshape(node: Node, value: Value, source: Value, dim: int, column: int | None) -> bool:
    """Follow a dimension, and the column of the last one, back through changes of rank."""
    back = origins(node)
    if back is None or dim not in back:
        return False
    last = back.get(len(value.shape) - 1) if column is not None else None
    if last is None or source.shape[last] == 1:
        return is_position(source, back[dim])
    return last == len(source.shape) - 1 and last != back[dim] and is_position(source, back[dim], column)


def find_position(indices: Value, column: int, size: int, batching: tuple[int, ...]) -> int | None:
    """The dimension of `indices`, of length `size`, whose position its column holds; not one paired with another."""
    dims = (d for d in range(len(indices.shape) - 1) if indices.shape[d] == size and d not in batching)
    return next((d for d in dims if is_position(indices, d, column)), None)
