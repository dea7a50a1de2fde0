"""How arrays are spread over the devices of a mesh, read from their types (meshes with `Explicit` axes).

Such a type says which mesh axes cut each dimension, and over which axes the devices hold parts of a sum that is yet to
be made (`unreduced`). Tiles keep it: a cut dimension that is spread is cut within each device's share, weights are
brought once into the form in which a loop's products read them, and sums over a spread dimension stay apart, a part on
each device, until the loop is over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

# Linear equations that JAX types on values that are apart. (Not: neg, sub, mul, dynamic_slice, scatter.)
FLOWS = frozenset(
    "add add_any transpose convert_element_type reshape squeeze reduce_sum broadcast_in_dim reshard".split()
)
ADDS = ("add", "add_any")
RESCALES = frozenset("convert_element_type mul div neg select_n transpose reshape squeeze copy reshard".split())
# What runs on a tile wherever it runs on the whole: these keep each dimension as it is spread, or sum over it.
ALWAYS_TYPED = FLOWS | frozenset(
    """sub mul div neg exp log log1p tanh logistic max min select_n eq ne lt le gt ge and or not sign sqrt rsqrt square
    integer_pow pow abs is_finite stop_gradient copy copy_p name dot_general reduce_max reduce_min mesh_cast exp2 expm1
    erf sin cos one_minus_square custom_jvp_call custom_vjp_call""".split()
)


def axes_of(parts: Iterable[Any]) -> tuple[str, ...]:
    """Return the mesh axes that a spec, or some of its parts, names, in order."""
    named = ((part,) if isinstance(part, str) else part for part in parts if part is not None)
    return tuple(axis for axes in named for axis in axes)


class Apart(NamedTuple):
    """A sum of which the devices along `axes` hold parts; it is made in `dtype`, that of the product it comes from."""

    axes: frozenset[str]
    dtype: Any


TOGETHER = Apart(frozenset(), None)


class Held(dict[Any, Apart]):
    """The sums that are apart, by value; all other values are together."""

    def __missing__(self, value: Any) -> Apart:
        return TOGETHER


def named(aval: Any) -> NamedSharding | None:
    """The sharding of a type, if it is part of the type: on a mesh whose axes are Explicit."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding if getattr(sharding.mesh, "explicit_axes", ()) else None


def axes(aval: Any, dim: int) -> tuple[str, ...]:
    """The mesh axes that a dimension is spread over."""
    sharding = named(aval)
    return () if sharding is None else axes_of(sharding.spec.partitions[dim : dim + 1])


def entries_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension that a spec names."""
    return [axes_of([part]) for part in spec.partitions]


def shares(aval: Any, dim: int) -> int:
    """Over how many devices a dimension is spread."""
    sharding = named(aval)
    return 1 if sharding is None else math.prod(sharding.mesh.shape[a] for a in axes(aval, dim))


def devices(aval: Any) -> int:
    """Over how many devices an array is spread; on a mesh made Auto, where the compiler chooses, over all."""
    sharding = getattr(aval, "sharding", None)
    if isinstance(sharding, NamedSharding) and AxisType.Auto in sharding.mesh.axis_types:
        return sharding.mesh.size
    return math.prod(shares(aval, dim) for dim in range(len(aval.shape)))


def varying(aval: Any) -> frozenset[str]:
    """In the body of a `shard_map`, the mesh axes along which devices hold different arrays; empty where untracked."""
    return frozenset(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def like(aval: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """An abstract array of a type; or a tile of it, of another shape and spread alike."""
    manual = {"sharding": aval.sharding, "manual_axis_type": aval.manual_axis_type} if varying(aval) else {}
    return jax.ShapeDtypeStruct(
        aval.shape if shape is None else shape, aval.dtype, **({"sharding": named(aval)} | manual)
    )


def layout(entries: Sequence[Sequence[str]], apart: frozenset[str] = frozenset(), kept: Any = ()) -> PartitionSpec:
    """The spec with these axes for each dimension, except those that the value is apart over."""
    left = [tuple(a for a in entry if a not in apart) for entry in entries]
    parts = [None if not e else e[0] if len(e) == 1 else e for e in left]
    return PartitionSpec(*parts, unreduced=apart, reduced=frozenset(kept) - apart)


def spec(aval: Any, apart: Apart = TOGETHER) -> PartitionSpec:
    """The spec of a type, once its sums are apart over further axes."""
    sharding = named(aval)
    assert sharding is not None
    entries = [axes(aval, dim) for dim in range(len(aval.shape))]
    return layout(entries, apart.axes | sharding.spec.unreduced, sharding.spec.reduced)


def full(aval: Any, fill: Any, dtype: Any, apart: Apart) -> Any:
    """An array full of one number, of a type but for `dtype`."""
    array = jnp.full(aval.shape, fill, dtype, out_sharding=None if named(aval) is None else spec(aval, apart))
    manual = tuple(varying(aval))
    return jax.lax.pcast(array, manual, to="varying") if manual else array


def move(array: Any, target: PartitionSpec) -> Any:
    """The array as `target` says; what the devices hold apart is scattered first where it ends up spread."""
    mine = named(jax.typeof(array))
    if mine is None or spec(jax.typeof(array)) == target:
        return array
    extra = mine.spec.unreduced - target.unreduced
    spread = extra.intersection(axes_of(target.partitions))
    if spread and spread != extra:
        array = reshard(array, layout(entries_of(target), target.unreduced | (extra - spread), target.reduced))
    return reshard(array, target)


def conform(array: Any, aval: Any, apart: Apart) -> Any:
    """The array spread as its type in the untiled program says, with its sums `apart`."""
    if named(aval) is None:
        return array
    return move(array, spec(aval, apart))


def typed(array: Any, aval: Any) -> Any:
    """An array from outside, spread as a type says: one that no mesh is known of, too."""
    if named(aval) is None or named(jax.typeof(array)) is not None:
        return conform(array, aval, TOGETHER)
    return reshard(array, spec(aval))


def settle(array: Any, aval: Any, apart: Apart, dtype: Any = None) -> Any:
    """The sum of what the devices hold, formed in `dtype` or that of the product that it comes from."""
    if not apart.axes:
        return conform(array, aval, TOGETHER)
    narrow = apart.dtype if dtype is None else jnp.promote_types(apart.dtype, dtype)
    return move(array.astype(narrow), spec(aval))


def split(array: Any, dim: int, major: int) -> Any:
    """`[.., major * rest, ..]` as `[.., major, rest, ..]`: what the dimension was spread over, `major` is."""
    shape = (*array.shape[:dim], major, array.shape[dim] // major, *array.shape[dim + 1 :])
    return _reshaped(array, shape, lambda entries: [*entries[: dim + 1], (), *entries[dim + 1 :]])


def merge(array: Any, dim: int) -> Any:
    """The inverse of `split`."""
    shape = (*array.shape[:dim], array.shape[dim] * array.shape[dim + 1], *array.shape[dim + 2 :])
    return _reshaped(array, shape, lambda entries: [*entries[: dim + 1], *entries[dim + 2 :]])


def _reshaped(array: Any, shape: tuple[int, ...], change: Callable[[list[Any]], list[Any]]) -> Any:
    aval = jax.typeof(array)
    sharding = named(aval)
    if sharding is None:
        return array.reshape(shape)
    entries = change([axes(aval, dim) for dim in range(len(aval.shape))])
    return jax.lax.reshape(array, shape, out_sharding=layout(entries, sharding.spec.unreduced, sharding.spec.reduced))


# ----------------------------------------------------------------------------------------- what sums are apart, and how


def contracted(node: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The mesh axes that an equation sums over, as its first and as its last operand is spread."""
    if node.name == "dot_general":
        sides = node.params["dimension_numbers"][0]
    elif node.name == "reduce_sum":
        sides = (node.params["axes"],)
    elif node.name == "scatter-add":
        updates, window = node.inputs[2], node.params["dimension_numbers"].update_window_dims
        found = {a for d in range(len(updates.shape)) if d not in window for a in origin(updates, d)}
        return frozenset(found), frozenset(found)
    else:
        return frozenset(), frozenset()
    found = [frozenset(a for d in s for a in axes(v.aval, d)) for s, v in zip(sides, node.inputs, strict=True)]
    return found[0], found[-1]


def origin(value: Any, dim: int) -> tuple[str, ...]:
    """The mesh axes that a dimension is spread over; of a value on a mesh made Auto, as it was before it came there."""
    node = value.producer
    if named(value.aval) is not None or node is None:
        return axes(value.aval, dim)
    if node.name == "reshard":
        return axes(node.inputs[0].aval, dim)
    alike = (v for v in node.inputs if v.shape == value.shape)
    return next((found for v in alike if (found := origin(v, dim))), ())


def summed(node: Any, before: Held, partial: Sequence[bool], joined: bool = False) -> Apart:
    """How the devices hold the partial sum that a node makes, or passes on from those that it reads.

    `joined`: it is added to one that is apart.
    """
    given = [before[v] for v, p in zip(node.inputs, partial, strict=True) if p]
    out = node.outputs[0]
    over = frozenset().union(*(a.axes for a in given))
    if not all(partial):
        left, right = contracted(node)
        over |= left | right
    elif node.name == "reduce_sum":
        over |= contracted(node)[0]
    if node.name == "reshard" and named(node.inputs[0].aval) is None and not joined:
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
        readers = [n for n in graph.nodes if value in n.inputs and n.name != "eq"]  # asks only whether it is zero
        if len(readers) != 1 or readers[0].name not in RESCALES or readers[0].outputs[0].aval.size != value.aval.size:
            break
        (value,) = readers[0].outputs
        if jnp.dtype(value.dtype).itemsize < dtype.itemsize and jnp.issubdtype(value.dtype, jnp.floating):
            dtype = jnp.dtype(value.dtype)
    return Apart(apart.axes, dtype)


def passable(graph: Any, completed: Any = ()) -> set[Any]:
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


# ------------------------------------------------------------------------------------------- one equation, at tile size


def fit(node: Any, values: list[Any], apart: Apart) -> tuple[Any, list[Any]]:
    """The equation whose result is spread as its type says with its sums `apart`, and operands that fit it."""
    out = node.outputs[0].aval if node.outputs else None
    sharding = named(out)
    if out is None or sharding is None:
        return node, values
    if node.name in ADDS:
        return node, [move(v, spec(out, apart)) if jnp.shape(v) == out.shape else v for v in map(jnp.asarray, values)]
    if not apart.axes:
        return node, values
    if node.name == "dot_general":
        values = [move(v, demand(node, i, apart)) for i, v in enumerate(values)]
    key = next((k for k in ("sharding", "out_sharding", "dst_sharding") if k in node.params), "")
    if key and (node.params[key] is not None or node.name in ("dot_general", "reduce_sum")):
        node = dataclasses.replace(node, params=node.params | {key: NamedSharding(sharding.mesh, spec(out, apart))})
    return node, values


def demand(node: Any, operand: int, apart: Apart | None = None) -> PartitionSpec:
    """How a product needs an operand spread: as the result is and, where it contracts or batches, the other operand.

    Where the result is `apart`, a contracted dimension in which only this operand is spread stays so. A mesh axis that
    the result takes cuts no contracted dimension: there the other operand is gathered.
    """
    contract, batch = node.params["dimension_numbers"]
    me, other, out = node.inputs[operand].aval, node.inputs[1 - operand].aval, node.outputs[0].aval
    entries: dict[int, tuple[str, ...]] = {}
    for pairs in (contract, batch):
        for mine, its in zip(pairs[operand], pairs[1 - operand], strict=True):
            entries[int(mine)] = axes(other, int(its)) or (axes(me, int(mine)) if apart else ())
    free = [d for d in range(len(me.shape)) if d not in entries]
    first = len(batch[0])
    if operand:
        first += len(other.shape) - len(contract[0]) - len(batch[0])
    gone = apart.axes if apart else ()
    kept = {d: tuple(a for a in axes(out, first + i) if a not in gone) for i, d in enumerate(free)}
    taken = {a for entry in kept.values() for a in entry}.union(*(entries[int(d)] for d in batch[operand]))
    for d in map(int, contract[operand]):
        entries[d] = tuple(a for a in entries[d] if a not in taken)
    entries |= kept
    return layout([entries[d] for d in range(len(me.shape))])
