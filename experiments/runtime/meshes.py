"""Where everything in a run lies: on which devices of its mesh, and in a device's own memory or in that of the host.

The mesh in use is the one that JAX has set (`jax.set_mesh`); with one device there is none, and what is about meshes
does nothing. From the memory of the host a step fetches what it computes with.
"""

import contextlib
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments import configs
from transforms.sharding import Axes, make_mesh, sharding_of
from zoo.adapters import lora
from zoo.config import rows
from zoo.quantised import Quantised, shardings

HOST = "pinned_host"


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

    return by_leaf(model, one)


def by_leaf(model: Any, one: Callable[[tuple[str, ...], Any], Any]) -> Any:
    """Return a tree like a model with what `one(letters, leaf)` makes of each leaf; a matrix in fewer bits is one."""
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


def placed(model: Any, like: Any) -> Any:
    """Return a model whose leaves lie as those of an abstract one do (`abstract`), where there is a mesh."""
    return model if current() is None else jax.device_put(model, jax.tree.map(lambda leaf: leaf.sharding, like))


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


class _OfDescribed(NamedSharding):
    """In host memory, of a device that is described: one that is a GPU does not say what memories it has."""

    @property
    def memory_kind(self) -> str:
        return HOST


def host(ndim: int) -> NamedSharding:
    """Return where an array lives that is in the memory of the host, whole, for the device that is used.

    With a mesh, that is its one device; only a sharding of a mesh tells a program's types where its arrays live.
    """
    mesh, spec = jax.sharding.get_mesh(), PartitionSpec(*(None,) * ndim)
    if mesh.empty:
        mesh = Mesh(np.asarray(jax.local_devices()[:1]), ("data",))
    made = NamedSharding(mesh, spec, memory_kind=HOST)
    return made if made.memory_kind == HOST else _OfDescribed(mesh, spec)


@contextlib.contextmanager
def by_host() -> Generator[Callable[[Any], Any], None, None]:
    """Let the processor make what is to be in its memory, of which no device then holds a copy.

    Yields what brings a tree to the processor.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        yield lambda tree: jax.device_put(tree, SingleDeviceSharding(cpu, memory_kind="device"))


def on_device(tree: Any) -> Any:
    """Return a tree of arrays in the memory of the device that is used."""
    return jax.device_put(tree, SingleDeviceSharding(jax.local_devices()[0], memory_kind="device"))


def stowed(tree: Any) -> Any:
    """Return a tree, of arrays or of shapes, in the memory of the host, but numbers."""

    def one(leaf):
        if not leaf.shape:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host(leaf.ndim))
        return jax.device_put(leaf, host(leaf.ndim))

    return jax.tree.map(one, tree)


def refusal() -> str | None:
    """Return why nothing can be in host memory beside the device that is used; None where it can."""
    mesh = jax.sharding.get_mesh()
    device = jax.local_devices()[0] if mesh.empty else mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST in kinds or not mesh.empty:  # described devices may not say
        return None
    return f"JAX {jax.__version__} knows no memory called {HOST} of a {device.device_kind}, but {', '.join(kinds)}"
