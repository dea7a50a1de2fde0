"""Rows along the axis: moved, split, made of what stands there in other arrays; and one of every few of them.

`jax.lax.associative_scan` takes every second row: neighbours are combined, then those, down to one element, and the way
back puts between them what each is combined with. Such arrays are as long as there are such rows, and shifted, padded
or cut off as the axis is.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax

from transforms.tiling.frontend.trace import Made, traced
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.rules import RULES
from transforms.tiling.rules.factors import elementwise


def moved(array: Any, dim: int, before: int, after: int, fill: Any = None) -> Any:
    """An array with so many rows more before and after, or fewer."""
    if (before, after) == (0, 0):
        return array
    config = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(array.ndim)]
    return lax.pad(array, jnp.zeros((), array.dtype) if fill is None else fill, config)


def slices(node: Node) -> tuple[list[Node], list[Value]]:
    """A split as slices."""
    dim, ends = node.params["axis"], itertools.accumulate(node.params["sizes"], initial=0)
    cuts = [*itertools.pairwise(ends)]
    return traced(lambda x: [lax.slice_in_dim(x, *cut, axis=dim) for cut in cuts], node.inputs, node)


def made_alike(value: Value) -> bool:
    """Whether each element of a value is made of those that stand there in others."""
    made = value.producer
    if made is None or made.effects or len(made.outputs) > 1:
        return False
    return RULES[made.name].factors is elementwise and all(v.shape in ((), value.shape) for v in made.inputs)


def lengths(graph: Graph, total: int) -> list[int]:
    """How long the axis is, and arrays of every second of its rows, every fourth and so on, where there are any."""
    strides = (n.params["strides"] or () for n in graph.nodes if n.name == "slice")
    halves, found = any(2 in s for s in strides), [total]
    while halves and found[-1] % 2 == 0 and found[-1] > 2:
        found.append(found[-1] // 2)
    return found


def spread(node: Node, dim: int, total: int) -> Made:
    """Rows put at one of every few places, but not at all: padded to as many rows as there are places before."""
    if node.name != "pad" or node.outputs[0].shape[dim] != total:
        return None
    config, (source, _) = [tuple(c) for c in node.params["padding_config"]], node.inputs
    low, high, gap = config[dim]
    places, count = total // (gap + 1), source.shape[dim]
    first, begin = divmod(low, gap + 1)
    if gap == 0 or low < 0 or high < 0 or total % (gap + 1) or count == places or count < 2:
        return None
    rest = [(begin, gap - begin, gap) if d == dim else c for d, c in enumerate(config)]
    return traced(
        lambda x, fill: [lax.pad(moved(x, dim, first, places - count - first, fill), fill, rest)], node.inputs, node
    )


def rows_apart(node: Node, dim: int, total: int) -> Made:
    """A split of what has every few rows of the axis: slices."""
    return slices(node) if node.name == "split" and node.inputs[0].shape[dim] == total else None
