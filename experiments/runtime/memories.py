"""Where arrays live on one device: in its own memory, or in that of the host, from which a step fetches them."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

HOST = "pinned_host"


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
