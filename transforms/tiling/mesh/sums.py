"""What an equation does to arrays that are spread over devices: which sums stay apart, and how a tile of it runs.

A sum over a spread dimension is a part on each device until something needs the whole of it (`unreduced`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from transforms.layout import TOGETHER, Apart, Held, away, axes, axes_of, devices, layout, move, named, spec
from transforms.tiling.primitives import has, having
from transforms.tiling.rules import RULES
from transforms.tiling.rules.factors import origins

FLOWS, ADDS, RESCALES = having("flows"), having("adding"), having("rescales")


def contracted(node: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The mesh axes that an equation sums over, as its first and as its last operand is spread."""
    if has(node.name, "lands"):
        updates, window = node.inputs[2], node.params["dimension_numbers"].update_window_dims
        found = frozenset(a for d in range(len(updates.shape)) if d not in window for a in origin(updates, d))
        return found, found
    if not has(node.name, "contracts"):
        return frozenset(), frozenset()
    stated, found = RULES[node.name].factors(node), []
    for names, value in zip(stated.ins, node.inputs, strict=True):
        found.append(frozenset(a for d, n in enumerate(names) if n in stated.reduced for a in axes(value.aval, d)))
    return found[0], found[-1]


def met(node: Any) -> dict[Any, tuple[str, ...]]:
    """How both operands of a product are spread along each dimension that it contracts, where its result is apart.

    As one of them is. If the other is not, then over no axis that the result is spread over: all that the devices have
    would be sent, and a result summed that is as large as all of theirs, where to gather the one operand is enough.
    """
    stated, taken = RULES[node.name].factors(node), set[str]()
    made = axes_of(spec(node.outputs[0].aval).partitions) if named(node.outputs[0].aval) is not None else ()
    found = {}
    for name in stated.reduced:
        ways = [axes(v.aval, names.index(name)) for names, v in zip(stated.ins, node.inputs, strict=True)]
        left = {*made}.difference(frozenset(ways[0]).intersection(ways[1])) | taken
        found[name] = next(filter(None, (tuple(a for a in way if a not in left) for way in ways)), ())
        taken.update(found[name])
    return found


def origin(value: Any, dim: int) -> tuple[str, ...]:
    """The mesh axes that a dimension is spread over; of a value on a mesh made Auto, as it was before it came there."""
    node = value.producer
    if named(value.aval) is not None or node is None:
        return axes(value.aval, dim)
    if has(node.name, "respreads"):
        return axes(node.inputs[0].aval, dim)
    backs = [origins(node, i) or {} for i in range(len(node.inputs))]
    ways = [(v, back[dim]) for v, back in zip(node.inputs, backs, strict=True) if dim in back]
    return next((found for v, its in ways if (found := origin(v, its))), ())


def kept(value: Any) -> Any:
    """The type in which a loop keeps a value: of one on a mesh made Auto, on the mesh around it, spread as before."""
    if away(value.aval) is None:
        return value.aval
    entries, taken = [], set[str]()
    for dim in range(len(value.shape)):
        entries.append([a for a in origin(value, dim) if a not in taken])
        taken.update(entries[-1])
    return value.aval.update(sharding=NamedSharding(get_abstract_mesh(), layout(entries)))


def leaves_auto(node: Any) -> bool:
    """Whether a value leaves a mesh made Auto, where no type says how it is spread."""
    return has(node.name, "respreads") and named(node.inputs[0].aval) is None


def enters_auto(node: Any) -> bool:
    """Whether a value comes to a mesh made Auto, whose types know of no parts: their sum is made there."""
    inputs, out = node.inputs, node.outputs[0]
    return has(node.name, "respreads") and named(inputs[0].aval) is not None and named(out.aval) is None


def summed(node: Any, before: Held, partial: Sequence[bool], joined: bool = False) -> Apart:
    """How the devices hold the partial sum that a node makes, or passes on from those that it reads.

    `joined`: it is added to one that is apart.
    """
    if enters_auto(node):
        return TOGETHER
    given = [before[v] for v, p in zip(node.inputs, partial, strict=True) if p]
    out = node.outputs[0]
    over = frozenset().union(*(a.axes for a in given))
    if has(node.name, "product") and not all(partial):
        over |= {a for entry in met(node).values() for a in entry}
    elif not all(partial):
        left, right = contracted(node)
        over |= left | right
    elif has(node.name, "contracts"):
        over |= contracted(node)[0]
    if leaves_auto(node) and not joined:
        # The gradient of a lookup, leaving a mesh made Auto: where the table's rows are spread over all devices that
        # hold the tokens, they are sent what they gain, which is less than all of the table. It cannot leave spread
        # over some of these axes and apart over others.
        over = over if over - {a for dim in range(len(out.shape)) for a in axes(out.aval, dim)} else frozenset()
    if not over:
        return TOGETHER
    dtypes = [a.dtype for a in given if a.axes] or [node.params.get("preferred_element_type") or out.dtype]
    origin = min(dtypes, key=lambda d: jnp.dtype(d).itemsize)
    narrower = jnp.dtype(out.dtype).itemsize < jnp.dtype(origin).itemsize
    return Apart(over, out.dtype if narrower else origin)


def narrowest(value: Any, apart: Apart, graph: Any) -> Apart:
    """The same sum, made in the narrowest dtype that its only reader, and that one's, turn it into by and by."""
    dtype = jnp.dtype(apart.dtype)
    while value not in graph.outputs:
        # What compares it asks only whether it is zero.
        readers = [n for n in graph.nodes if value in n.inputs and not has(n.name, "equates")]
        if len(readers) != 1 or readers[0].name not in RESCALES or readers[0].outputs[0].aval.size != value.aval.size:
            break
        (value,) = readers[0].outputs
        if jnp.dtype(value.dtype).itemsize < dtype.itemsize and jnp.issubdtype(value.dtype, jnp.floating):
            dtype = jnp.dtype(value.dtype)
    return Apart(apart.axes, dtype)


def flowing(graph: Any, completed: Any = ()) -> set[Any]:
    """The values of a graph that go nowhere but to its outputs, through equations that may run on what is apart.

    `completed`: operands (of which node, which number) that are read after the loop anyway.
    """
    readers: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        for i, value in enumerate(node.inputs):
            if (node, i) not in completed:
                readers.setdefault(value, []).append(node)
    found: set[Any] = set()
    for value in (*(v for node in reversed(graph.nodes) for v in node.outputs), *graph.inputs):
        if all(n.name in FLOWS and n.outputs[0] in found for n in readers.get(value, ())):
            found.add(value)
    return found


def fit(
    node: Any, values: list[Any], apart: Apart, moved: Callable[[int, Any, PartitionSpec, bool], Any]
) -> tuple[Any, list[Any]]:
    """The equation whose result is spread as its type says with its sums `apart`, and operands that fit it.

    `moved` returns an operand, of which it is told the number, as a product needs it spread; or as it is, where that
    need not be and the compiler is to choose.
    """
    out = node.outputs[0].aval if node.outputs else None
    sharding = named(out)
    if out is None or sharding is None:
        return node, values
    if node.name in ADDS:
        values = [*map(jnp.asarray, values)]
        whole = jnp.broadcast_shapes(*(v.shape for v in values))
        return node, [move(v, spec(out, apart)) if v.shape == whole else v for v in values]
    if has(node.name, "product"):
        targets = [demand(node, i, apart) for i in (0, 1)]
        values = [
            moved(i, v, t, bool(apart.axes) or _is_less(node, i, t))
            for i, (v, t) in enumerate(zip(values, targets, strict=True))
        ]
    if not apart.axes:
        return node, values
    key = next((k for k in ("sharding", "out_sharding", "dst_sharding") if k in node.params), "")
    if key and (node.params[key] is not None or has(node.name, "contracts")):
        target = spec(out, apart)
        if leaves_auto(node):  # apart at first, and then spread: both at once XLA gets wrong
            target = layout([()] * len(out.shape), target.unreduced)
        node = dataclasses.replace(node, params=node.params | {key: NamedSharding(sharding.mesh, target)})
    return node, values


def _is_less(node: Any, operand: int, target: PartitionSpec) -> bool:
    """Whether a product's operand is to be gathered, and that is no more to send than what its result would be.

    That is a gathering too, or, of an operand that is spread where it is contracted, a sum: sent twice, there and back.
    """
    me, out = node.inputs[operand].aval, node.outputs[0].aval
    if (sharding := named(me)) is None:
        return False
    lost = {*axes_of(spec(me).partitions)} - {*axes_of(target.partitions)}
    gathered = me.size * me.dtype.itemsize // devices(me) * math.prod(sharding.mesh.shape[a] for a in lost)
    times = 2 if lost & contracted(node)[-operand] else 1
    return bool(lost) and gathered <= times * out.size * out.dtype.itemsize // devices(out)


def demand(node: Any, operand: int, apart: Apart) -> PartitionSpec:
    """How a product needs an operand spread: as the result is and, where it contracts, as the other operand.

    One that is whole where it contracts stays so: how the other meets it is the compiler's choice, as untiled. Where
    the result is `apart`, a contracted dimension is spread as both operands are then (`met`).
    """
    stated = RULES[node.name].factors(node)
    own, others, (made,) = stated.ins[operand], stated.ins[1 - operand], stated.outs
    me, other, out = node.inputs[operand].aval, node.inputs[1 - operand].aval, node.outputs[0].aval
    given = {name: tuple(a for a in axes(out, dim) if a not in apart.axes) for dim, name in enumerate(made)}
    taken = {a for name, entry in given.items() if name in own for a in entry}
    meeting = met(node) if apart.axes else {}

    def entry(dim: int, name: Any) -> tuple[str, ...]:
        if name in given:
            return given[name]
        if apart.axes:
            return tuple(a for a in meeting[name] if a in apart.axes)
        there = axes(other, others.index(name)) if axes(me, dim) else ()
        return tuple(a for a in there if a not in taken)

    return layout([entry(dim, name) for dim, name in enumerate(own)])
