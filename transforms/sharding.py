"""Where arrays lie on a mesh of devices: one table from dimension letters to mesh axes.

Letters: `B` batch `S` sequence `T` tokens `D` embed `V` vocab `F`, `f`, `P`, `U` mlp hidden `N` query heads `K`, `k`
kv heads `H` head size `L` layers `E` experts `Y` inputs of all layers. Parameters, optimizer state, batches and
activations all lie as `spec_of` says. What is computed from them follows by type: `einsum` keeps its left operand where
it is, and sums over what is cut.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from transforms.layout import axes_of as axes_of
from transforms.layout import shares as shares
from transforms.layout import varying

Axes = Mapping[str, tuple[str, ...]]

# Which mesh axes cut a dimension. Batches are cut over experts too, so that no device repeats another's attention.
AXES: Axes = {
    "B": ("data", "expert"),
    "T": ("data", "expert", "context"),
    "S": ("context",),
    "E": ("expert",),
    **dict.fromkeys("VFfPUNKkc", ("model",)),
    **dict.fromkeys("DY", ("data",)),
}
NAMES = ("data", "expert", "context", "model")  # the model axis speaks most, so its devices are neighbours
_TOKENS, _STACKED = set("BST"), set("LE")


def make_mesh(
    data: int = -1,
    model: int = 1,
    context: int = 1,
    expert: int = 1,
    *,
    devices: Sequence[Any] | None = None,
    kind: AxisType = AxisType.Explicit,
) -> Mesh:
    """Return a mesh of these sizes; an axis of size one is left out, since it cuts nothing.

    Args:
        data: cuts the batch, and parameters over their embed dimension; -1 takes the devices that the others leave.
        model: cuts heads, MLPs and the vocabulary; likewise -1.
        context: cuts the sequence; likewise -1.
        expert: cuts experts, and the batch; likewise -1.
        devices: in any order; None is all of them.
        kind: of every axis. Explicit ones are part of every array's type.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    found = jax.devices() if devices is None else list(devices)
    sizes = fill({"data": data, "expert": expert, "context": context, "model": model}, len(found))
    names = tuple(name for name in NAMES if sizes[name] > 1) or ("data",)
    return jax.make_mesh(tuple(sizes[name] for name in names), names, (kind,) * len(names), devices=found)


def fill(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the sizes of a mesh's axes with the one that is -1 worked out, for a number of devices.

    Raises:
        ValueError: the sizes do not multiply to that number.
    """
    said = " x ".join(f"{name}={size}" for name, size in sizes.items())
    wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1 and size != -1]
    if wrong:
        raise ValueError(f"cannot make a mesh with {', '.join(wrong)}: sizes are 1 or more, or -1 for the rest.")
    open_, known = [name for name, size in sizes.items() if size == -1], math.prod(s for s in sizes.values() if s > 0)
    if len(open_) > 1:
        raise ValueError(f"cannot make a mesh of {said}: only one axis can take the rest. Give {open_[-1]} a size.")
    if count % known if open_ else count != known:
        what = f"a multiple of {known}" if open_ else f"{known}"
        raise ValueError(f"cannot make a mesh of {said}: it takes {what} devices, and there are {count}.")
    return {name: count // known if size == -1 else size for name, size in sizes.items()}


def spec_of(
    letters: str | Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh, axes: Axes = AXES
) -> PartitionSpec:
    """Return how a value lies on a mesh.

    An axis cuts one dimension of a value at most: the first that names it and that it divides. A dimension which its
    axes do not divide is whole on every device; `uneven` lists those. So are vectors, and `D` of what has tokens.

    Args:
        letters: one per dimension: `"L D F"` or `("L", "D", "F")`.
        shape: the value's.
        mesh: the devices; axes that it lacks cut nothing.
        axes: which axes cut which letter.
    """
    letters = letters.split() if isinstance(letters, str) else tuple(letters)
    vector = len(set(letters) - _STACKED) < 2 and not _TOKENS & set(letters)
    taken: set[str] = set()
    parts: list[Any] = []
    for letter, size in zip(letters, shape, strict=True):
        whole = letter == "D" and (vector or _TOKENS & set(letters))
        names = () if whole else tuple(a for a in axes.get(letter, ()) if a in mesh.shape and a not in taken)
        while names and size % math.prod(mesh.shape[name] for name in names):
            names = names[:-1]
        taken |= set(names)
        parts.append(names)
    return PartitionSpec(*parts)


def uneven(dims: Mapping[str, int], sizes: Mapping[str, int], axes: Axes = AXES) -> list[str]:
    """Say which dimensions of parameters stay whole because axes of these sizes do not divide them."""
    return [
        f"{letter}={size} stays whole: {axis}={sizes[axis]} does not divide it"
        for letter, size in dims.items()
        for axis in axes.get(letter, ())
        if size % sizes.get(axis, 1)
    ]


def explicit() -> bool:
    """Return whether the mesh that is set makes shardings part of types."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def vary_alike(*arrays: Shaped[Array, "..."]) -> tuple[Shaped[Array, "..."], ...]:
    """Return arrays that, in the body of a `shard_map`, all differ along the mesh axes along which any of them does."""
    known = [varying(jax.typeof(x)) for x in arrays]
    lacking = [tuple(frozenset().union(*known) - own) for own in known]
    return tuple(jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, lacking, strict=True))


def constrain(x: Shaped[Array, "..."], letters: str, axes: Axes = AXES) -> Shaped[Array, "..."]:
    """Return `x` where its letters say, on the mesh that is set; without one, and on one of other axes, `x` itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if not any(axis in mesh.shape for letter in letters.split() for axis in axes.get(letter, ())):
        return x
    free = {letter: tuple(axis for axis in names if axis not in mesh.manual_axes) for letter, names in axes.items()}
    spec = spec_of(letters, x.shape, mesh, free)
    return place(x, spec) if explicit() else jax.lax.with_sharding_constraint(x, spec)


def place(x: Shaped[Array, "..."], spec: PartitionSpec) -> Shaped[Array, "..."]:
    """Return `x` moved to a place on the explicit mesh that is set; `x` itself where it is there already."""
    return x if partitions(x) == _padded(spec, x.ndim) else jax.sharding.reshard(x, spec)


def reshape(x: Shaped[Array, "..."], *shape: int) -> Shaped[Array, "..."]:
    """Return `x.reshape(*shape)`, of which leading dimensions that stay as they are lie where they did.

    Of dimensions of one JAX forgets that, as a batch of one on a mesh of one device is.
    """
    made = x.reshape(*shape)
    if not explicit():
        return made
    same = itertools.takewhile(lambda sizes: sizes[0] == sizes[1], zip(x.shape, made.shape, strict=False))
    kept = len(list(same))
    return place(made, PartitionSpec(*partitions(x)[:kept], *partitions(made)[kept:]))


def partitions(x: Any) -> tuple[Any, ...]:
    """Return the axes that cut each dimension of `x`, by its type: all None unless the mesh that is set is explicit."""
    if not explicit():
        return (None,) * jnp.ndim(x)
    return _padded(jax.typeof(x).sharding.spec, jnp.ndim(x))


def uncut(x: Shaped[Array, "..."], *dims: int) -> Shaped[Array, "..."]:
    """Return `x` with some dimensions whole on every device: gathered, where the explicit mesh cuts them."""
    parts = partitions(x)
    if all(parts[dim] is None for dim in dims):
        return x
    kept = [None if dim in {d % x.ndim for d in dims} else part for dim, part in enumerate(parts)]
    return jax.sharding.reshard(x, PartitionSpec(*kept))


def einsum(
    pattern: str, x: Shaped[Array, "..."], weight: Shaped[Array, "..."], kind: DTypeLike | None = None
) -> Shaped[Array, "..."]:
    """Return `jnp.einsum(pattern, x, weight)`, which on an explicit mesh lies as `x` does.

    A dimension that the weight alone has is cut as the weight is, where the axis is free. Sums over a dimension that
    both have cut are completed across devices. Without an explicit mesh it is `jnp.einsum` and nothing else.

    Args:
        pattern: two operands and a result; `...` stands for dimensions of `x`.
        x: activations.
        weight: what multiplies them.
        kind: what the sums are formed in and the result is; None is the operands' dtype.
    """
    return jnp.einsum(pattern, x, weight, preferred_element_type=kind, out_sharding=_result(pattern, x, weight))


def _result(pattern: str, x: Any, weight: Any) -> PartitionSpec | None:
    of_x, of_weight = partitions(x), partitions(weight)
    if not any(of_x + of_weight):
        return None
    inputs, output = pattern.split("->")
    left, right = inputs.split(",")
    lead = "0123456789"[: len(of_x) - len(left.replace("...", ""))]
    left, output = left.replace("...", lead), output.replace("...", lead)
    cut_x, cut_weight = dict(zip(left, of_x, strict=True)), dict(zip(right, of_weight, strict=True))
    taken = axes_of(cut_x.get(letter) for letter in output)
    free = {letter: tuple(axis for axis in axes_of([part]) if axis not in taken) for letter, part in cut_weight.items()}
    return PartitionSpec(*((free | cut_x)[letter] for letter in output))


def _padded(spec: PartitionSpec, ndim: int) -> tuple[Any, ...]:
    return spec.partitions + (None,) * (ndim - len(spec.partitions))


def sharding_of(mesh: Mesh, letters: str | Sequence[str], shape: Sequence[int], axes: Axes = AXES) -> NamedSharding:
    """Return the sharding of a value on a mesh of real devices."""
    return NamedSharding(mesh, spec_of(letters, shape, mesh, axes))
