"""Global value numbering: which values of two programs are the same, equal computations of equal inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.jaxprs import bodies
from transforms.tiling.ir.walks import constant

Numbers = dict[Value, int]


class Numbering:
    """Numbers values such that equal numbers mean equal values, in all graphs that it has seen.

    The inputs of these are taken for the same, one by one: a derived program has those of the one it comes from first.
    """

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def __call__(self, graph: Graph) -> Numbers:
        numbers: Numbers = {v: self._number(("input", i)) for i, v in enumerate(graph.inputs)}
        for node in graph.nodes:
            for value in node.inputs:
                if value not in numbers:
                    numbers[value] = self._number(("constant", *constant_key(value.const)))
            if (number := _filled(node)) is not None:
                numbers[node.outputs[0]] = self._number(number)
                continue
            alone = bool(node.effects) or bool(bodies(node.params)) or node.state is not None
            what = (node.name, id(node) if alone else parameter_key(node), *(numbers[v] for v in node.inputs))
            numbers.update((v, self._number((*what, v.index))) for v in node.outputs)
        return numbers

    def _number(self, key: Any) -> int:
        return self.known.setdefault(key, len(self.known))


def _filled(node: Node) -> tuple[Any, ...] | None:
    """What tells arrays of one number apart, however they were made."""
    if len(node.outputs) != 1 or node.effects or (number := constant(node.outputs[0])) is None:
        return None
    (value,) = node.outputs
    return "filled", str(value.dtype), value.shape, np.asarray(number).astype(value.dtype).tobytes()


def parameter_key(node: Node) -> Any:
    """What tells a node's parameters from those of others, by what they hold; without a hash they are its own."""
    try:
        key = _structure(node.params)
        hash(key)
    except TypeError:
        return id(node)
    return key


def _structure(param: Any) -> Any:
    match param:
        case dict():
            return dict, tuple((name, _structure(param[name])) for name in sorted(param))
        case tuple() | list():
            return type(param), tuple(map(_structure, param))
        case np.ndarray() | np.generic():
            return np.ndarray, str(param.dtype), param.shape, param.tobytes()
        case float() | complex():  # 0.0 == -0.0
            return type(param), repr(param)
    return type(param), param


def constant_key(array: Any) -> tuple[Any, ...]:
    """What tells constants apart: small ones by what they hold."""
    small = isinstance(array, (np.ndarray, np.generic)) and array.size <= 16
    return _structure(array) if small else ("object", id(array))


def merge(graph: Graph) -> None:
    """Compute equal values once (common subexpressions): what a comparison says of two is what it says of one.

    What is one number everywhere, or made of nothing, is left: it takes no time, and readers place it each for himself.
    """
    numbers, first, same = Numbering()(graph), {}, {}
    for node in graph.nodes:
        if node.effects or not node.inputs or any(constant(v) is not None for v in node.outputs):
            continue
        for value in node.outputs:
            known = first.setdefault((numbers[value], value.aval, node.context), value)
            if known is not value:
                same[value] = known
    graph.substitute(same)
    graph.prune()
