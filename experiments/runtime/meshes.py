"""Where everything in a run lies on its mesh.

The mesh in use is the one that JAX has set (`jax.set_mesh`); with one device there is none, and nothing here acts.
"""

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments import configs
from transforms.sharding import Axes, make_mesh, sharding_of
from zoo.adapters import lora
from zoo.config import rows
from zoo.quantised import Quantised, shardings


def spread(mesh: configs.Mesh, devices: Sequence[Any] | None = None) -> contextlib.AbstractContextManager:
    """Return the context in which a run is compiled and carried out: its mesh, or nothing where it has one device.

    Args:
        mesh: the run's.
        devices: descriptions of those that are not here, of which it takes the first.
    """
    if mesh.devices == 1 and devices is None:
        return contextlib.nullcontext()
    sizes: dict[str, Any] = mesh.sizes
    return jax.set_mesh(make_mesh(**sizes, devices=None if devices is None else devices[: mesh.devices]))


def current() -> Mesh | None:
    """Return the mesh that is set, if there is one."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def leaf_shardings(model: Any, mesh: Mesh, named: Axes) -> Any:
    """Return a tree like a model, of any shapes, that says where each leaf lies."""

    def one(letters, leaf):
        if isinstance(leaf, Quantised):
            return shardings(leaf, letters, mesh, named)
        return sharding_of(mesh, letters, leaf.shape, named)

    for row in rows(model.config):
        get = operator.attrgetter(row.leaf)
        part = get(model)
        if isinstance(part, lora.LowRank):
            a, b = lora.letters_of(row)
            lies = eqx.tree_at(
                lambda p: (p.base, p.a, p.b),
                part,
                (one(row.letters, part.base), one(tuple(a), part.a), one(tuple(b), part.b)),
            )
        else:
            lies = one(row.letters, part)
        model = eqx.tree_at(get, model, lies)
    return model


def abstract(model: Any, named: Axes) -> Any:
    """Return an abstract model whose leaves say where they lie, where there is a mesh."""
    mesh = current()
    if mesh is None:
        return model
    typed = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return jax.tree.map(typed, model, leaf_shardings(model, mesh, named))


def placed(model: Any, named: Axes) -> Any:
    """Return a model whose leaves lie where they belong, where there is a mesh."""
    mesh = current()
    return model if mesh is None else jax.device_put(model, leaf_shardings(model, mesh, named))


def where(named: Axes) -> dict[str, Any]:
    """Return the arguments that tell `zoo.load` and `zoo.models.init.draw` where parameters lie."""
    return {"mesh": current(), "axes": named}


def feeder(count: int) -> Callable[[Callable[[slice], tuple[np.ndarray, ...]]], tuple[jax.Array, ...]]:
    """Return what puts the arrays of a batch, [B, S] or [P, 2, S], where they belong; any thread may call it.

    It is given a function that reads some rows of the batch, and reads those that this process's devices hold.

    Args:
        count: rows, or pairs of them, of the whole batch.
    """
    mesh = current()
    if mesh is None:
        return lambda read: jax.device_put(read(slice(None)))
    lies = lambda shape: sharding_of(mesh, "B S" if len(shape) == 2 else "B 2 S", shape)
    shares = lies((count, 1)).addressable_devices_indices_map((count, 1)).values()
    held = [share[0].indices(count) for share in shares if share is not None]
    first, end = min(start for start, _, _ in held), max(stop for _, stop, _ in held)

    def put(array: np.ndarray) -> jax.Array:
        shape = count, *array.shape[1:]
        ours = lambda index: array[(slice(*(at - first for at in index[0].indices(count)[:2])), *index[1:])]
        return jax.make_array_from_callback(shape, lies(shape), ours)

    return lambda read: tuple(map(put, read(slice(first, end))))


def abstract_activation(letters: str, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an activation, and where it lies if there is a mesh."""
    mesh = current()
    where = None if mesh is None else sharding_of(mesh, letters, shape)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=where)


def everywhere(tree: Any) -> Any:
    """Return an abstract tree on the devices of the mesh, if there is one: what lies nowhere is whole on each."""
    mesh = current()
    if mesh is None:
        return tree

    def typed(leaf):
        spec = PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(typed, tree)
