"""Reads weights straight onto a mesh: each process reads what its own devices hold, and every byte of that once; of a
tensor that holds several parameters that take turns, all of it for each.

On the host there is one layer of a leaf at a time, or one leaf that has no layers. Dimensions: as in `zoo.parameters`.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from transforms.sharding import Axes, sharding_of
from zoo.huggingface.tensors import Tensor
from zoo.parameters import Row

Bounds = tuple[tuple[int, int], ...]  # first and one past the last, of each dimension


def load_leaf(
    row: Row, dims: dict[str, int], tensors: Mapping[str, Tensor], dtype: np.dtype, mesh: Mesh, axes: Axes
) -> Shaped[Array, "..."]:
    """Return a leaf that lies on a mesh as its letters say, read from disk a layer at a time.

    Raises:
        DamagedError: a tensor is not what its file's digest says. A process that needs a part of a tensor alone reads
            only that, and cannot check it.
    """
    shape, parts = row.shape(dims), row.tensors(dims)
    sharding = sharding_of(mesh, row.letters, shape, axes)
    if not row.stack:
        ((name, _),) = parts
        return _on_devices(shape, sharding, lambda wanted: read_parts(row, dims, {(): tensors[name]}, dtype, wanted))
    leaf = jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    put = jax.jit(_put, donate_argnums=0, out_shardings=sharding)
    layer_sharding = NamedSharding(mesh, PartitionSpec(*sharding.spec[1:]))
    for layer, group in itertools.groupby(parts, lambda part: part[1][0]):
        members = {index[1:]: tensors[name] for name, index in group}
        read = functools.partial(read_parts, row, dims, members, dtype)
        piece = _on_devices(shape[1:], layer_sharding, read)
        leaf = put(leaf, piece, layer).block_until_ready()  # or layers would wait for their turn in memory
    return leaf


def _put(leaf, piece, layer):
    return jax.lax.dynamic_update_index_in_dim(leaf, piece, layer, 0)


def _on_devices(shape, sharding, read) -> jax.Array:
    """Return the array whose parts `read` returns for the bounds that this process's devices hold."""
    held: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
        held.setdefault(bounds, []).append(device)
    parts = read(held)
    placed = [jax.device_put(parts.pop(bounds), device) for bounds in held for device in held[bounds][:1]]
    copies = [
        jax.device_put(first, device)
        for first, devices in zip(placed, held.values(), strict=True)
        for device in devices[1:]
    ]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, placed + copies)


def read_parts(
    row: Row,
    dims: dict[str, int],
    members: Mapping[tuple[int, ...], Tensor],
    dtype: np.dtype,
    wanted: Iterable[Bounds],
) -> dict[Bounds, np.ndarray]:
    """Return some parts of one layer of a leaf (or of a leaf that has none), reading nothing else.

    Args:
        row: the leaf's.
        dims: the size of each letter.
        members: the layer's tensors by where they stand in it: `()`, or their expert.
        dtype: of the parts.
        wanted: the parts, as bounds in the layer; none overlaps another.
    """
    depth = max(0, len(row.stack) - 1)
    parts = {bounds: np.empty([stop - start for start, stop in bounds], dtype) for bounds in wanted}
    for index, tensor in members.items():
        views = {}
        for bounds, part in parts.items():
            lead = tuple(at - start for at, (start, _) in zip(index, bounds, strict=False))
            if all(start <= at < stop for at, (start, stop) in zip(index, bounds, strict=False)):
                views[bounds[depth:]] = part[lead]
        boxes = {bounds: _on_disk(row, dims, bounds) for bounds in views}
        read = _read(tensor, set(boxes.values()))
        for bounds, view in views.items():
            view[...] = _turned(read[boxes[bounds]], row, dims, bounds)
    return parts


def _on_disk(row: Row, dims: dict[str, int], bounds: Bounds) -> Bounds:
    """Return the box of a tensor on disk that holds a part; only the first of letters in one dimension can be cut."""
    of = {letter: (0, 1) for group in row.disk for letter in group} | dict(zip(row.inner, bounds, strict=True))
    sizes, box = row.disk_dims(dims), []
    for group in row.disk:
        rest = math.prod(sizes[letter] for letter in group[1:])
        whole = all(of[letter] == (0, sizes[letter]) for letter in group[1:])
        cut = row.slice_on_disk(group[0], *of[group[0]], dims)
        start, stop = (cut.start, cut.stop) if whole and cut.step in (None, 1) else (0, sizes[group[0]])
        box.append((start * rest, stop * rest))
    return tuple(box)


def _turned(read, row, dims, bounds):
    """Return what was read of a tensor in the model's order of dimensions."""
    left, right = row.kept, row.inner
    of, sizes = dict(zip(right, bounds, strict=True)), row.disk_dims(dims)
    shape = []
    for group, size in zip(row.disk, read.shape, strict=True):
        rest = [sizes[letter] for letter in group[1:]]
        shape += [size // math.prod(rest), *rest] if set(group) <= set(left) else []
    split = read.reshape(shape).transpose([left.index(letter) for letter in right])
    cut = [
        row.slice_on_disk(letter, *of[letter], dims) if size != stop - start else slice(None)
        for letter, size, (start, stop) in zip(right, split.shape, bounds, strict=True)
    ]
    return split[tuple(cut)]


def _read(tensor: Tensor, boxes: set[Bounds]) -> dict[Bounds, np.ndarray]:
    """Return boxes of a tensor that do not overlap: in one pass, which checks its digest, where they are all of it."""
    sizes = {box: [stop - start for start, stop in box] for box in boxes}
    if sum(map(math.prod, sizes.values())) < math.prod(tensor.shape):
        return {box: tensor.part(tuple(slice(*cut) for cut in box)) for box in boxes}
    found: dict[Bounds, np.ndarray] = {}
    for first, rows in tensor.pieces():
        for box in boxes:
            low, high = max(first, box[0][0]), min(first + len(rows), box[0][1])
            if low < high:
                out = found.setdefault(box, np.empty(sizes[box], rows.dtype))
                cut = (slice(low - first, high - first), *(slice(*c) for c in box[1:]))
                out[low - box[0][0] : high - box[0][0]] = rows[cut]
    return found
