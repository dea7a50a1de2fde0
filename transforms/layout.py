"""How arrays are spread over the devices of a mesh, read from their types (meshes with `Explicit` axes).

Such a type says which mesh axes cut each dimension, and over which axes the devices hold parts of a sum that is yet to
be made (`unreduced`). Tiles keep it: a cut dimension that is spread is cut within each device's share, weights are
brought once into the form in which a loop's products read them, and sums over a spread dimension stay apart, a part on
each device, until the loop is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh, reshard


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


def unreduced(aval: Any) -> frozenset[str]:
    """The mesh axes over whose devices a value is still to be summed."""
    sharding = named(aval)
    return frozenset() if sharding is None else sharding.spec.unreduced


def named(aval: Any) -> NamedSharding | None:
    """The sharding of a type, if it is part of the type: on a mesh whose axes are Explicit."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding if getattr(sharding.mesh, "explicit_axes", ()) else None


def away(aval: Any) -> NamedSharding | None:
    """The sharding of a type on a mesh made Auto within the one at hand: there only equations that stand in it run."""
    sharding, here = getattr(aval, "sharding", None), get_abstract_mesh()
    if not isinstance(sharding, NamedSharding) or here.empty or not here.explicit_axes:
        return None
    return sharding if AxisType.Auto in {*sharding.mesh.axis_types} - {*here.axis_types} else None


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


def stacked(aval: Any, count: int) -> Any:
    """The type of so many arrays of a type, one behind the other."""
    return _of_rank(aval, (count, *aval.shape), (None, *aval.sharding.spec.partitions))


def slice_of(aval: Any, dim: int) -> Any:
    """The type of one slice across a dimension."""
    left = [d for d in range(len(aval.shape)) if d != dim]
    partitions = (*aval.sharding.spec.partitions, *(None,) * len(aval.shape))
    return _of_rank(aval, tuple(aval.shape[d] for d in left), tuple(partitions[d] for d in left))


def _of_rank(aval: Any, shape: tuple[int, ...], partitions: tuple[Any, ...]) -> Any:
    was = aval.sharding.spec
    spec = PartitionSpec(*partitions, unreduced=was.unreduced, reduced=was.reduced)
    return aval.update(shape=shape, sharding=NamedSharding(aval.sharding.mesh, spec))


def dual(aval: Any) -> Any:
    """The type of a cotangent: of what devices hold parts of all have it, and the other way round."""
    sharding = named(aval)
    if sharding is None or not sharding.spec.unreduced | sharding.spec.reduced:
        return aval
    was = sharding.spec
    spec = PartitionSpec(*was.partitions, unreduced=was.reduced, reduced=was.unreduced)
    return aval.update(sharding=NamedSharding(sharding.mesh, spec))


def like(aval: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """An abstract array of a type; or a tile of it, of another shape and spread alike."""
    manual = {"sharding": aval.sharding, "manual_axis_type": aval.manual_axis_type} if varying(aval) else {}
    return jax.ShapeDtypeStruct(
        aval.shape if shape is None else shape, aval.dtype, **({"sharding": named(aval) or away(aval)} | manual)
    )


def layout(entries: Sequence[Sequence[str]], apart: frozenset[str] = frozenset(), kept: Any = ()) -> PartitionSpec:
    """The spec with these axes for each dimension, except those that the value is apart over."""
    left = [tuple(a for a in entry if a not in apart) for entry in entries]
    return PartitionSpec(*left, unreduced=apart, reduced=frozenset(kept) - apart)


def spec(aval: Any, apart: Apart = TOGETHER) -> PartitionSpec:
    """The spec of a type, once its sums are apart over further axes."""
    sharding = named(aval)
    assert sharding is not None
    entries = [axes(aval, dim) for dim in range(len(aval.shape))]
    return layout(entries, apart.axes | sharding.spec.unreduced, sharding.spec.reduced)


def full(aval: Any, fill: Any, dtype: Any, apart: Apart) -> Any:
    """An array full of one number, of a type but for `dtype`."""
    array = jnp.full(aval.shape, fill, dtype, out_sharding=None if named(aval) is None else spec(aval, apart))
    return vary(array, aval)


def places(array: Any, dim: int) -> Any:
    """Which place along a dimension each element of an array has, spread as the array is."""
    sharding = None if named(jax.typeof(array)) is None else spec(jax.typeof(array))
    return jax.lax.broadcasted_iota(jnp.int32, array.shape, dim, out_sharding=sharding)


def move(array: Any, target: PartitionSpec) -> Any:
    """The array as `target` says; what the devices hold apart is scattered first where it ends up spread.

    Axes that cut a dimension, and over which the array is to be apart, become so one by one, the last first: several of
    different lengths at once XLA takes for one another. Nor are some given up together with others taken.
    """
    mine = named(jax.typeof(array))
    if mine is None:  # on no mesh, such as a constant: all devices have it
        return reshard(array, target) if axes_of(target.partitions) or target.unreduced | target.reduced else array
    if spec(jax.typeof(array)) == target:
        return array
    extra, added = mine.spec.unreduced - target.unreduced, target.unreduced - mine.spec.unreduced
    if extra and added:
        array = move(array, layout(entries_of(target), target.unreduced - added, target.reduced))
        return reshard(array, target)
    spread = extra.intersection(axes_of(target.partitions))
    if spread and spread != extra:
        array = reshard(array, layout(entries_of(target), target.unreduced | (extra - spread), target.reduced))
    apart = mine.spec.unreduced
    for axis in reversed([a for a in axes_of(mine.spec.partitions) if a in added]):
        apart |= {axis}
        array = reshard(array, layout(entries_of(mine.spec), apart, mine.spec.reduced))
    return reshard(array, target)


def times(scalar: Any, array: Any) -> Any:
    """Their product; types say of what multiplies parts of a sum that all devices have it."""
    apart = unreduced(jax.typeof(array))
    return (reshard(scalar, PartitionSpec(reduced=apart)) if apart else scalar) * array


def together(array: Any, aval: Any) -> Any:
    """The array spread as a type says, but with no sum left to be made, whatever that says."""
    sharding = named(aval)
    return array if sharding is None else move(array, layout(entries_of(sharding.spec), kept=sharding.spec.reduced))


def conform(array: Any, aval: Any, apart: Apart) -> Any:
    """The array spread as its type in the untiled program says, with its sums `apart`."""
    array = vary(array, aval)
    return array if named(aval) is None else move(array, spec(aval, apart))


def vary(array: Any, aval: Any) -> Any:
    """In the body of a `shard_map`, the array with a type that says where devices hold different ones."""
    lacking = tuple(varying(aval) - varying(jax.typeof(array)))
    return jax.lax.pcast(array, lacking, to="varying") if lacking else array


def typed(array: Any, aval: Any) -> Any:
    """An array from outside, spread as a type says: one that no mesh is known of, too."""
    if named(aval) is None or named(jax.typeof(array)) is not None:
        return conform(array, aval, TOGETHER)
    return reshard(array, spec(aval))


def there(array: Any, aval: Any) -> Any:
    """An array, or a scalar, on the mesh that a type names, if that is made Auto within the one at hand."""
    sharding, own = away(aval), named(jax.typeof(array))
    if sharding is None or own is None or own.mesh == sharding.mesh:
        return array
    return reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions[: array.ndim])))


def here(array: Any, aval: Any) -> Any:
    """The inverse: an array from such a mesh on the one at hand, spread as a type says."""
    return array if away(jax.typeof(array)) is None else reshard(array, spec(aval))


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
