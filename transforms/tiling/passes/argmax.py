"""`argmax`, `argmin` and `top_k` along the cut axis: the best so far goes from tile to tile with its places."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Span, Tiled
from transforms.tiling.passes.loop_state import hand_on, scalar
from transforms.tiling.rules import Move, register
from transforms.tiling.rules.reduction import first_best

chosen_p = Primitive("chosen")

NOBODY = -1  # the place of an entry of `top_k` that no tile has filled


def write_choice(nodes: list[Node], node: Node, span: Span) -> list[Value]:
    """Rewrite a choice along the cut axis: what it returns is what the last tile leaves."""
    (operand,) = node.inputs
    places = node.outputs[-1].aval
    values = places.update(dtype=operand.dtype)
    nobody = [scalar(0, values.dtype), scalar(NOBODY, places.dtype)]
    outs = hand_on(nodes, node, chosen_p, [operand], nobody, [values, places], span, of=node)
    return outs[-len(node.outputs) :]


def push(node: Node, placements: tuple[Placement, ...]) -> Move:
    return Move((Partial("last"),) * 2, (placements[0], WHOLE, WHOLE))


def emit(node: Node, values: list[Any], move: Move, span: Span) -> list[Any]:
    cut, of = move.ins[0], node.params["of"]
    assert isinstance(cut, Tiled)
    choose = best_few if len(of.outputs) == 2 else first_best
    return choose(of, values, cut, span)


def best_few(node: Node, values: list[Any], cut: Tiled, span: Span) -> list[Any]:
    """The best of the tile's and those before: the larger first, of equal ones the earlier."""
    array, before, places = values
    count = before.shape[cut.dim]
    found, local = node.bind([array], node.params | {"k": min(count, array.shape[cut.dim])})
    here = local + jnp.asarray(cut.steps(span.start), local.dtype)
    all_values = jnp.concatenate([before, found], cut.dim)
    all_places = jnp.concatenate([places, here], cut.dim)
    taken = (all_places != NOBODY).astype(jnp.int32)
    keys = (taken, _totally_ordered(all_values), -all_places)
    *_, turned, sorted_values = lax.sort((*keys, all_values), dimension=cut.dim, num_keys=3)
    last = lambda x: jnp.flip(lax.slice_in_dim(x, x.shape[cut.dim] - count, None, axis=cut.dim), cut.dim)
    return [last(sorted_values), -last(turned)]


def _totally_ordered(array: Any) -> Any:
    """Integers in the order in which `top_k` puts floats: -0.0 is less than 0.0, and subnormal numbers are no zeros."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    integer = jnp.dtype(f"int{8 * array.dtype.itemsize}")
    bits = lax.bitcast_convert_type(array, integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


register("chosen", push=push, emit=emit)
