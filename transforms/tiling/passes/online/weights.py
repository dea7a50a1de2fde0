"""Sums of what is linear in values that are not fully known: of the logarithm of a softmax, weighted or looked up.

`log_softmax(x)[label]`, `sum(w * log_softmax(x))`: the logarithm of the denominator, and the maximum, are known only
when the loop ends. But they are the same for all elements, so the sum is that of `w * x` and as often them as the
weights sum up to. The weights are what the same operations make of ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from transforms.tiling.ir.edit import traced
from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.passes.online.find import Finder
from transforms.tiling.passes.online.terms import Early, align


class Weights:
    """Writes, behind `nodes`, how often the terms of a value are in it: `copy` tells what else it is made of."""

    def __init__(self, finder: Finder, copy: Callable[[Value], Value], nodes: list[Node]):
        self.finder, self.copy, self.nodes = finder, copy, nodes
        self.known: dict[Value, Value] = {}

    def __call__(self, value: Value) -> Value:
        if value not in self.known:
            self.known[value] = self._write(value)
        return self.known[value]

    def _write(self, value: Value) -> Value:
        node = value.producer
        assert node is not None
        early = self._early(value)
        if not early.weighted:
            return self._trace(lambda x: jnp.where(x == x, jnp.ones_like(x), 1), [self.copy(value)], node)
        linear = [not self._early(v).plain for v in node.inputs]
        sums = node.name in ("add", "sub", "add_any", "select_n")
        inputs = []
        for i, (v, mine) in enumerate(zip(node.inputs, linear, strict=True)):
            other = sums and not (node.name == "select_n" and i == 0)
            if mine:
                inputs.append(self(v))
            elif other:  # it has none of the terms
                inputs.append(self._trace(lambda x: jnp.zeros_like(x), [v], node))
            else:
                inputs.append(self.copy(v))
        made = dataclasses.replace(node, inputs=inputs, outputs=[], bodies={})
        made.outputs.append(Value(node.outputs[0].aval, made))
        self.nodes.append(made)
        return made.outputs[0]

    def _early(self, value: Value) -> Early:
        return self.finder.sums.get(value) or self.finder.operand(value)

    def _trace(self, fn: Callable[..., Any], inputs: list[Value], node: Node) -> Value:
        nodes, (result,) = traced(fn, inputs, node)
        self.nodes += nodes
        return result


def shifted(early: Early, total: Any, weight: Any, *values: Any) -> Any:
    """Add to a sum what its terms left out, as often as they are in it."""
    anchors, result = len(early.anchors), total
    found = [align(v, t.dims, total.shape) for v, t in zip(values, early.terms, strict=True)]
    for array, term in zip(found[anchors:], early.offsets, strict=True):
        added = term.weight * array * weight
        result = result + (jnp.where(weight == 0, 0, added) if early.masked else added)
    for array, term in zip(found[:anchors], early.anchors, strict=True):  # every element is inf - inf
        result = jnp.where((term.weight * array == jnp.inf) & (weight != 0), jnp.nan, result)
    return result
