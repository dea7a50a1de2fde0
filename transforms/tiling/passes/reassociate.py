"""Reassociation: sums over the cut axis of what a matrix product gives, read off the result of another product.

The gradient of `o = p @ v` in `p` is `dp = do @ v.T`, and that of a softmax needs `sum(p * dp)` over the keys: a loop
of its own, for one number of each query. But the sum is that of `do * o` over the features, and `o` is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from transforms.tiling.frontend.trace import Made, rewrite_all, traced
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.numbering import Numbers, constant_key
from transforms.tiling.ir.terms import broadcast_by
from transforms.tiling.rules.dot import factors as factors_of_dot
from transforms.tiling.rules.factors import peel

Labels = tuple[Any, ...]  # what each dimension of an array runs over; None: it is repeated, or has one element


class Factor(NamedTuple):
    value: Value
    labels: Labels
    power: int


class Product(NamedTuple):
    """A matrix product whose result is known as `value`."""

    node: Node
    value: Value


def reassociate(graph: Graph, product: Product, numbers: Numbers) -> bool:
    """Read sums of a graph off a matrix product that is known. Returns whether there were any.

    `numbers` tell which values of that graph, and of the product's, are the same.
    """

    def read(node: Node) -> Made:
        if node.name != "reduce_sum" or not jnp.issubdtype(node.outputs[0].dtype, jnp.floating):
            return None
        found = next(_matches(node, product, numbers), None)
        return None if found is None else _written(node, *found)

    return rewrite_all(graph, read)


def factors(value: Value, labels: Labels, power: int = 1) -> Iterator[Factor]:
    """What a value is a product of, each factor with what its own dimensions run over."""
    base, dims = peel(value, len(labels))
    back: dict[int, Any] = {d: label for d, label in zip(dims, labels, strict=True) if d is not None}
    labels = tuple(back.get(d) for d in range(len(base.shape)))
    node = base.producer
    if node is None:
        yield Factor(base, labels, power)
        return
    match node.name:
        case "mul":
            for operand in node.inputs:
                yield from factors(operand, _own(operand, labels), power)
        case "div":
            yield from factors(node.inputs[0], _own(node.inputs[0], labels), power)
            yield from factors(node.inputs[1], _own(node.inputs[1], labels), -power)
        case "integer_pow":
            yield from factors(node.inputs[0], labels, power * node.params["y"])
        case "neg":
            yield from factors(node.inputs[0], labels, power)
            yield Factor(Value(ShapedArray((), base.dtype), const=np.asarray(-1, base.dtype)), (), power)
        case "convert_element_type" if _floats(node.inputs[0]) and _floats(base):
            yield from factors(node.inputs[0], labels, power)
        case _:
            yield Factor(base, labels, power)


def _own(operand: Value, labels: Labels) -> Labels:
    return labels if operand.shape else ()


def _floats(value: Value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def operands(node: Node, out: Labels, fresh: Iterator[Any]) -> tuple[Labels, Labels]:
    """What the operands' dimensions run over, in a matrix product whose result's dimensions run over `out`."""
    stated = factors_of_dot(node)
    names = dict(zip(stated.outs[0], out, strict=True)) | {name: next(fresh) for name in stated.reduced}
    left, right = (tuple(names[name] for name in dims) for dims in stated.ins)
    return left, right


def _matches(node: Node, product: Product, numbers: Numbers) -> Iterator[tuple[list[Factor], set[Any]]]:
    """The ways to write the sum `node` as one of other factors, the product's result among them."""
    (whole,) = node.inputs
    reduced = set(node.params["axes"])
    found = list(factors(whole, tuple(range(len(whole.shape)))))
    fresh = map("sum {}".format, itertools.count())
    names = map("known {}".format, itertools.count())
    theirs = tuple(next(names) for _ in product.node.outputs[0].shape)
    sides = operands(product.node, theirs, names)
    contracted = set(sides[0]) - set(theirs)
    for i, factor in enumerate(found):
        dot = factor.value.producer
        if dot is None or dot.name != "dot_general" or factor.power != 1:
            continue
        rest = found[:i] + found[i + 1 :]
        ours = operands(dot, factor.labels, fresh)
        for mine, other in itertools.product((0, 1), (0, 1)):
            match = _Match(numbers)
            if not match.same(dot.inputs[mine], ours[mine], product.node.inputs[other], sides[other]):
                continue
            left = match.divide(rest, list(factors(product.node.inputs[1 - other], sides[1 - other])))
            gone = {match.labels[c] for c in contracted if c in match.labels}
            kept = [Factor(dot.inputs[1 - mine], ours[1 - mine], 1), *(left or ())]
            if left is None or not gone or not gone <= reduced or any(gone & set(f.labels) for f in kept):
                continue
            if all(t in match.labels or n == 1 for t, n in zip(theirs, product.value.shape, strict=True)):
                labels = tuple(match.labels.get(t) for t in theirs)
                yield [*kept, Factor(product.value, labels, 1)], gone


class _Match:
    """What the dimensions of a known product run over, in terms of those of a sum."""

    def __init__(self, numbers: Numbers):
        self.numbers = numbers
        self.labels: dict[Any, Any] = {}

    def same(self, mine: Value, labels: Labels, other: Value, others: Labels) -> bool:
        """Whether two operands are the same value, seen alike."""
        a, b = list(factors(mine, labels)), list(factors(other, others))
        return len(a) == len(b) == 1 and a[0].power == b[0].power == 1 and self.bind(a[0], b[0])

    def bind(self, mine: Factor, other: Factor) -> bool:
        if self.identity(mine.value) != self.identity(other.value):
            return False
        labels = dict(self.labels)
        for a, b in zip(mine.labels, other.labels, strict=True):
            if (a is None) != (b is None) or (b is not None and labels.setdefault(b, a) != a):
                return False
        if len(set(labels.values())) < len(labels):
            return False
        self.labels = labels
        return True

    def identity(self, value: Value) -> Any:
        """What tells a value from others; `factors` writes constants of its own, which have no number."""
        return self.numbers.get(value, value) if value.const is None else constant_key(value.const)

    def divide(self, mine: list[Factor], others: list[Factor]) -> list[Factor] | None:
        """The factors `mine` without `others`; None if those are not among them."""
        left = list(mine)
        for other in others:
            found = next((f for f in left if f.power * other.power > 0 and self.bind(f, other)), None)
            if found is None:
                return None
            left.remove(found)
            if found.power != other.power:
                left.append(found._replace(power=found.power - other.power))
        return left


def _written(node: Node, found: list[Factor], gone: set[Any]) -> tuple[list[Node], list[Value]]:
    """A sum as that of a product of factors, over all that the result has no dimension for.

    The dimensions `gone` are not summed over: the product that is known has done that.
    """
    result, (whole,) = node.outputs[0], node.inputs
    sizes: dict[Any, int] = dict(enumerate(whole.shape))
    out = [d for d in sizes if d not in node.params["axes"]]
    summed = [d for d in sizes if d not in out and d not in gone]
    labels = dict.fromkeys([*out, *summed, *(x for f in found for x in f.labels if x is not None)])
    sizes.update((x, n) for f in found for x, n in zip(f.labels, f.value.shape, strict=True) if x is not None)

    def product(factors: Sequence[Factor], arrays: Sequence[Any], labels: Sequence[Any]) -> Any:
        total = jnp.ones((), result.dtype)
        for factor, array in zip(factors, arrays, strict=True):
            dims = tuple(factor.labels.index(x) if x in factor.labels else None for x in labels)
            aligned = broadcast_by(array.astype(result.dtype), dims, [sizes[x] for x in labels])
            total = total * (aligned if factor.power == 1 else aligned**factor.power)
        return jnp.broadcast_to(total, [sizes[x] for x in labels])

    def compute(*arrays: Any) -> Any:
        first, *others, last = found
        inner = {x for x in labels if x not in out}
        both = {x for f in (first, last) for x in f.labels}
        if not inner <= both or any(inner & set(f.labels) for f in others):
            return product(found, arrays, list(labels)).sum(range(len(out), len(labels)))
        # A matrix product reads narrow operands as they are: no wide copy of them is made.
        number = {x: i for i, x in enumerate(labels)}
        squeezed = [
            a.squeeze([i for i, x in enumerate(f.labels) if x is None]) for f, a in zip(found, arrays, strict=True)
        ]
        ours = [[number[x] for x in f.labels if x is not None] for f in (first, last)]
        kept = [x for x in out if x in both]
        dot = jnp.einsum(
            squeezed[0], ours[0], squeezed[-1], ours[1], [number[x] for x in kept], preferred_element_type=result.dtype
        )
        factors = [Factor(last.value, tuple(kept), 1), *others]
        return product(factors, [dot, *arrays[1:-1]], out)

    return traced(compute, [f.value for f in found], node)
