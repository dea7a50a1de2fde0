"""Reads weights straight onto a mesh: each device's part of a leaf, and no more, is made on the host at a time.

Dimensions: as in `zoo.tables`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zoo.folder import Tensor
from zoo.tables import Row

# Which mesh axis each dimension is cut over, where the mesh has it and it divides the size.
AXES: Mapping[str, str] = {
    "V": "model",
    "F": "model",
    "P": "model",
    "N": "model",
    "K": "model",
    "E": "expert",
    "D": "data",
}


def spec_of(row: Row, dims: dict[str, int], mesh: Mesh, axes: Mapping[str, str] = AXES) -> PartitionSpec:
    """Return how a leaf lies on a mesh. An axis cuts one dimension of a leaf at most, the first that it divides."""
    taken, parts = set(), []
    for letter, size in zip(row.letters, row.shape(dims), strict=True):
        axis = axes.get(letter)
        fits = axis in mesh.shape and axis not in taken and size % mesh.shape[axis] == 0
        parts.append(axis if fits else None)
        taken.add(axis)
    return PartitionSpec(*parts)


def load_leaf(
    row: Row, dims: dict[str, int], tensors: dict[str, Tensor], dtype: np.dtype, mesh: Mesh, axes: Mapping[str, str]
) -> jax.Array:
    """Return a leaf whose parts were each read from disk for the device that holds them.

    Raises:
        DamagedError: a tensor is not what its file's digest says.
    """
    shape, depth = row.shape(dims), len(row.stack)

    def part(index: Any) -> np.ndarray:
        bounds = [cut.indices(size) for cut, size in zip(index, shape, strict=True)]
        out = np.empty([stop - start for start, stop, _ in bounds], dtype)
        for name, place in row.places(dims):
            if all(start <= at < stop for at, (start, stop, _) in zip(place, bounds, strict=False)):
                spot = tuple(at - start for at, (start, _, _) in zip(place, bounds, strict=False))
                _fill(out[spot], index[depth:], row, dims, tensors[name])
        return out

    sharding = NamedSharding(mesh, spec_of(row, dims, mesh, axes))
    return jax.make_array_from_callback(shape, sharding, part, dtype=jnp.dtype(dtype))


def _fill(out: np.ndarray, index: tuple[slice, ...], row: Row, dims: dict[str, int], tensor: Tensor) -> None:
    """Write a part of a tensor from disk into its place."""
    if row.stack:
        left, right = "".join(row.disk), row.letters[len(row.stack) :]
        ((_, whole),) = tensor.pieces(whole=True)
        split = whole.reshape([dims[letter] for letter in left])
        out[...] = split.transpose([left.index(letter) for letter in right])[index].astype(out.dtype)
        return
    first, last, _ = index[0].indices(tensor.shape[0])
    for start, piece in tensor.pieces():
        low, high = max(start, first), min(start + len(piece), last)
        if low < high:
            out[low - first : high - first] = piece[low - start : high - start][(slice(None), *index[1:])]
