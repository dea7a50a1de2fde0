"""How what is not yet known of cut values follows them through each kind of equation.

Each rule is told of an equation, its move, and the number of the operand that is whole and late, if there is one. It
returns the early form of the result, or None where the result has none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from transforms.tiling.ir.graph import Node, Value, constant
from transforms.tiling.passes.online.terms import Dims, Early, Term, merge, weigh
from transforms.tiling.rules import Move
from transforms.tiling.rules.gather import origins


@runtime_checkable
class Known(Protocol):
    """What the rules ask: what is known of an operand; whether it is cut; what it is as a term, if it is late."""

    def operand(self, value: Value) -> Early: ...
    def is_cut(self, value: Value) -> bool: ...
    def term(self, value: Value, node: Node, move: Move, weight: float) -> Term | None: ...
    def terms(self, late: int, node: Node, move: Move, weight: float, sign: float) -> Sequence[Any] | None: ...


Follow = Callable[[Known, Node, Move, int | None], Early | None]  # the last: the number of the late operand


def follow_add(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    """Adding to what is to be exponentiated; or adding two things that are scaled alike."""
    signs = (1.0, -1.0 if node.name == "sub" else 1.0)
    if late is not None:
        other = 1 - late
        base = self.operand(node.inputs[other])
        found = self.terms(late, node, move, signs[late], signs[other])
        if found is None or base.scaled or base.factors or base.weighted:
            return None
        anchors = tuple(term for term, running in found if running is not None)
        if anchors and not base.plain:  # an extremum of what is known only with the terms that were left out before
            return None
        if signs[other] < 0:
            base = weigh(base, -1.0)
        return dataclasses.replace(
            base,
            stage=max([base.stage, *(running for _, running in found if running is not None)]),
            anchors=merge(base.anchors, anchors),
            offsets=merge(base.offsets, tuple(term for term, running in found if running is None)),
            anchored=base.anchored or bool(anchors),
            # What was taken apart is not rounded as the sum of its parts is, which others subtract before they
            # exponentiate: where both are to cancel, as in the gradient of such weights, they would not.
            bounded=base.bounded or (bool(anchors) and len(found) == 1),
        )
    a, b = (self.operand(v) for v in node.inputs)
    stage = max(a.stage, b.stage)
    if a.weighted or b.weighted:
        return _added(a, b)
    if not (a.scaled or a.factors or b.scaled or b.factors):
        anchors, offsets = merge(a.anchors, b.anchors, signs[1]), merge(a.offsets, b.offsets, signs[1])
        relative = (a.plain or a.anchored) and (b.plain or b.anchored) and bool(anchors)
        bounded = a.bounded and b.bounded and signs[1] > 0
        return Early(stage, anchors, offsets, anchored=relative, bounded=bounded)
    alike = (a.anchors, a.offsets, a.factors, a.scaled) == (b.anchors, b.offsets, b.factors, b.scaled)
    bounded = a.bounded and b.bounded
    return dataclasses.replace(a, stage=stage, masked=a.masked or b.masked, bounded=bounded) if alike else None


def _added(a: Early, b: Early) -> Early | None:
    """The sum of two values, of which one is weighted: the same terms, or none, are in the other."""
    if a.plain or b.plain:
        return dataclasses.replace(b if a.plain else a, stage=max(a.stage, b.stage))
    if a.scaled or b.scaled or a.terms != b.terms:
        return None
    return dataclasses.replace(a, stage=max(a.stage, b.stage), masked=a.masked or b.masked, weighted=True)


def follow_multiply(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    exponents = (1.0, -1.0 if node.name == "div" else 1.0)
    if late is not None:
        other = 1 - late
        base = self.operand(node.inputs[other])
        found = self.term(node.inputs[late], node, move, exponents[late])
        unscaled = (base.anchors or base.offsets) and not base.scaled
        if found is None or unscaled or (node.name == "div" and other == 1):
            return None
        return dataclasses.replace(base, scaled=True, factors=merge(base.factors, (found,)))
    a, b = (self.operand(v) for v in node.inputs)
    stage = max(a.stage, b.stage)
    for early, other, exponent in ((a, node.inputs[1], exponents[1]), (b, node.inputs[0], 1.0)):
        if (early.anchors or early.offsets) and not early.scaled:
            number = constant(other)
            if node.name == "div" and early is b:
                return None
            if number is None or early.weighted:
                return dataclasses.replace(early, stage=stage, weighted=True) if self.operand(other).plain else None
            return dataclasses.replace(weigh(early, float(number) ** exponent), stage=stage)
    if node.name == "div" and not b.plain:
        return None
    moderate = any(constant(v) is not None for v in node.inputs)
    return _multiplied(a, b) if moderate or (a.factorable and b.factorable) else None


def _multiplied(a: Early, b: Early) -> Early:
    """The product of two values: what was exponentiated is at most 1, and does not make the other any larger."""
    terms = (merge(getattr(a, kind), getattr(b, kind)) for kind in ("anchors", "offsets", "factors"))
    bounded = all(e.plain or e.bounded for e in (a, b))
    return Early(max(a.stage, b.stage), *terms, scaled=True, masked=a.masked or b.masked, bounded=bounded)


def follow_exp(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    early = self.operand(node.inputs[0])
    if early.scaled or early.factors or early.weighted or not (early.plain or early.bounded):
        return None
    return dataclasses.replace(weigh(early, math.log(2) if node.name == "exp2" else 1.0), scaled=True)


def follow_neg(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    early = self.operand(node.inputs[0])
    return early if early.scaled or early.factors or early.weighted else weigh(early, -1.0)


def follow_same(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    both = (node.inputs[0].dtype, node.outputs[0].dtype)
    return self.operand(node.inputs[0]) if all(jnp.issubdtype(d, jnp.floating) for d in both) else None


def follow_select(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    """A mask: 0 after an exponential, minus infinity before it, or 0 for a sum; elsewhere values of the same terms."""
    which, *cases = node.inputs
    if late is not None or not self.operand(which).plain:
        return None
    found = [self.operand(v) for v in cases if self.is_cut(v) and constant(v) is None]
    filled = [v for v in cases if not self.is_cut(v) or constant(v) is not None]
    if len({(e.terms, e.scaled, e.bounded) for e in found}) != 1:
        return None
    stage = max(e.stage for e in (*found, self.operand(which)))
    fill = [constant(v) for v in filled]
    if found[0].scaled or found[0].factors:
        if any(f is None or f != 0 for f in fill):
            return None
        return dataclasses.replace(found[0], stage=stage, masked=bool(fill) or any(e.masked for e in found))
    weighted = any(e.weighted for e in found)
    if found[0].terms and all(f is not None and f == 0 for f in fill):
        return dataclasses.replace(found[0], stage=stage, masked=True, weighted=bool(fill) or weighted)
    if weighted or any(f is None or np.iscomplexobj(f) or not np.isneginf(f) for f in fill):
        return None
    return dataclasses.replace(found[0], stage=stage)


def follow_moved(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    source, rank = node.inputs[0], len(node.outputs[0].shape)
    match node.name:
        case "broadcast_in_dim":
            places = {int(out): i for i, out in enumerate(node.params["broadcast_dimensions"])}
        case "transpose":
            places = dict(enumerate(node.params["permutation"]))
        case "reduce_sum":
            places = dict(enumerate(d for d in range(len(source.shape)) if d not in node.params["axes"]))
        case _:
            real, came = ([d for d, n in enumerate(v.shape) if n != 1] for v in (node.outputs[0], source))
            if [node.outputs[0].shape[d] for d in real] != [source.shape[d] for d in came]:
                return None
            places = dict(zip(real, came, strict=True))

    moved = self.operand(source).moved(_carried(places, rank))
    if node.name != "reduce_sum" or moved is None or moved.plain or moved.scaled:
        return moved
    # Relative to nothing, what remains may be much larger than the value itself: its sum would cancel.
    return dataclasses.replace(moved, weighted=True) if moved.anchored else None


def _carried(places: dict[int, int], rank: int) -> Callable[[Dims], Dims | None]:
    """How the dimensions of terms follow those of a value, whose dimension `places[i]` becomes dimension `i`."""

    def dims(old: Dims) -> Dims | None:
        lost = [d for i, d in enumerate(old) if d is not None and i not in places.values()]
        return None if lost else tuple(old[places[i]] if i in places else None for i in range(rank))

    return dims


def follow_gather(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    """Looked up along the cut axis, a value is what it is there, whatever the others are."""
    source, indices = node.inputs
    early, fill = self.operand(source), node.params["fill_value"]
    other = fill is not None and fill != 0 and not np.isnan(fill)  # a number that no term is to change
    if late is not None or not self.operand(indices).plain or other:
        return None
    moved = early.moved(_carried(origins(node), len(node.outputs[0].shape)))
    if moved is None:
        return None
    stage = max(early.stage, self.operand(indices).stage)
    return dataclasses.replace(moved, stage=stage, weighted=not early.plain and not early.scaled)


def follow_dot(self: Known, node: Node, move: Move, late: int | None) -> Early | None:
    if late is not None:
        return None
    contract, batch = node.params["dimension_numbers"]
    parts: list[Early] = []
    inner = True  # no product of matrices, but one of vectors
    for side, value in enumerate(node.inputs):
        early = self.operand(value)
        free = [d for d in range(len(value.shape)) if d not in contract[side] and d not in batch[side]]
        before = len(batch[0])
        if side == 1:
            before += len(node.inputs[0].shape) - len(contract[0]) - len(batch[0])
        places = dict(enumerate(batch[side])) | {before + i: d for i, d in enumerate(free)}
        moved = early.moved(_carried(places, len(node.outputs[0].shape)))
        if moved is None:
            return None
        inner = inner and not free
        parts.append(moved)
    a, b = parts
    if not all(e.plain or e.scaled for e in parts):
        both = dataclasses.replace(b if a.plain else a, stage=max(a.stage, b.stage), weighted=True)
        return both if inner and (a.plain or b.plain) and both.anchored else None
    return _multiplied(a, b) if a.factorable and b.factorable else None


RULES: dict[str, Follow] = {
    **dict.fromkeys(["add", "sub", "add_any"], follow_add),
    **dict.fromkeys(["mul", "div"], follow_multiply),
    **dict.fromkeys(["exp", "exp2"], follow_exp),
    **dict.fromkeys(
        ["convert_element_type", "copy", "copy_p", "stop_gradient", "name", "optimization_barrier"], follow_same
    ),
    **dict.fromkeys(["broadcast_in_dim", "transpose", "squeeze", "reshape", "reduce_sum"], follow_moved),
    "neg": follow_neg,
    "select_n": follow_select,
    "dot_general": follow_dot,
    "gather": follow_gather,
}
