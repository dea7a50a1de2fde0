"""Walks over a graph: what values are computed from and what depends on them, constants, matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr

from transforms.layout import varying
from transforms.tiling.ir.graph import Graph, Node, Value, elements
from transforms.tiling.ir.jaxprs import axis_names, bodies, counts
from transforms.tiling.primitives import has

T = TypeVar("T")


def operands(value: Value) -> Sequence[Value]:
    """What a value is computed from, if it is."""
    return () if value.producer is None else value.producer.inputs


def closure(values: Iterable[T], further: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`values`, and what `further` returns of each, and of those, and so on: each once."""
    stack, seen = list(values), set()
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            yield value
            stack += further(value)


def ancestors(values: Iterable[Value]) -> set[Value]:
    """`values` and all that they are computed from."""
    return set(closure(values, operands))


def depends(graph: Graph, sources: set[Value], *, differentiably: bool = False) -> set[Value]:
    """The values of `graph` that depend on `sources`; `differentiably` leaves out integers and stopped gradients."""
    reached = set(sources)
    for node in graph.nodes:
        if differentiably and has(node.name, "stops"):
            continue
        if any(v in reached for v in node.inputs):
            reached.update(v for v in node.outputs if not differentiably or jax.dtypes.issubdtype(v.dtype, np.inexact))
    return reached


def mixes(node: Node, own: frozenset[str]) -> bool:
    """Whether an equation exchanges values along axes in `own`, or along any of which types do not track the values."""
    names = axis_names(node.params)
    return bool(names & own or names - frozenset().union(*(varying(v.aval) for v in (*node.inputs, *node.outputs))))


def read(env: dict[Value, Any], value: Value) -> Any:
    return env.get(value, value.const)


def constant(value: Value) -> Any | None:
    """The one number that fills `value`, if that is known at trace time."""
    while value.const is None and value.producer is not None:
        if not has(value.producer.name, "level"):
            return None
        value = value.producer.inputs[0]
    if value.const is None or isinstance(value.const, Tracer):
        return None
    array = np.asarray(value.const)
    return array.reshape(-1)[0] if array.size and (array == array.reshape(-1)[0]).all() else None


def is_zero(value: Value) -> bool:
    """Whether a value is the constant 0; not minus zero, to which a sum can be added as if nothing were there."""
    known = constant(value)
    return known is not None and bool(known == 0) and not np.signbit(np.real(known))


def flops(node: Node) -> int:
    """Multiplications and additions of a matrix product, or of those in a node's bodies; others count nothing."""
    if isinstance(part := node.params.get("of"), Node):  # a part of another equation
        return flops(part)
    return _flops(node.name, node.params, [v.aval for v in node.inputs], [v.aval for v in node.outputs])


def _flops(name: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> int:
    if has(name, "product"):
        contract, _ = params["dimension_numbers"]
        return 2 * elements(ins[0].shape[d] for d in contract[0]) * elements(outs[0].shape)
    found = [_body_flops(b) for b in bodies(params)]
    if has(name, "branches"):  # one of them runs
        return max(found, default=0)
    times = math.prod(params["mesh"].shape[a] for a in params["newly_manual_axes"]) if has(name, "devices") else 1
    return sum(found) * (params["length"] if has(name, "steps") else times)


def _body_flops(jaxpr: Jaxpr) -> int:
    avals = lambda atoms: [a.aval for a in atoms]
    return sum(_flops(e.primitive.name, e.params, avals(e.invars), avals(e.outvars)) for e in jaxpr.eqns)


def scan_counts(node: Node) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    return counts(node.params, node.inputs, node.outputs)
