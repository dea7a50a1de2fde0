"""Random weights, drawn leaf by leaf from the rows of `zoo.parameters`."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from transforms.bits import bits, numbers
from transforms.sharding import AXES, Axes, sharding_of
from zoo.config import Config, rows
from zoo.models.layers import accumulator

_SLAB = 2**22  # elements drawn at a time, at most


def draw(
    config: Config,
    *,
    key: PRNGKeyArray,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    axes: Axes = AXES,
    compiler_options: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """Return every leaf of a model, by its path: normal with the standard deviation of its row, or its constant.

    Each leaf is drawn in slabs of 16 MiB, so nothing larger than the model is ever held. For billions of parameters
    use `jax.random.key(seed, impl="rbg")`, which draws several times faster than the default.

    Args:
        config: the model's.
        key: of all leaves.
        dtype: of the parameters.
        mesh: where they lie as their letters say, the same numbers as on one device; each device draws what it holds.
        axes: which axes of the mesh cut which letter.
        compiler_options: XLA options for the programs that draw.
    """
    table = rows(config)
    options = tuple(sorted((compiler_options or {}).items()))
    leaves = {}
    for row, leaf_key in zip(table, jax.random.split(key, len(table)), strict=True):
        shape, std = row.shape(config.dims), row.std(config.dims)
        where = None if mesh is None else sharding_of(mesh, row.letters, shape, axes)
        own = jnp.dtype(jnp.float32 if row.wide else dtype)
        leaves[row.leaf] = _program(_normal if std else _full, shape, own, where, options)(leaf_key, std or row.start)
    return leaves


@functools.cache
def _program(make: Callable, shape: tuple[int, ...], dtype: Any, where: NamedSharding | None, options: tuple) -> Any:
    """Return `make(key, value)` as a program: one for all leaves of a shape that lie alike."""
    jit = functools.partial(jax.jit, compiler_options=dict(options) or None)
    if where is None or make is _full:
        return jit(functools.partial(make, shape=shape, dtype=dtype), out_shardings=where)
    spec, local = where.spec, where.shard_shape(shape)

    def part(key, value):
        """What one device holds, made by itself."""
        starts = []
        for axes, size in zip(spec, local, strict=True):
            starts.append(0 if axes is None else jax.lax.axis_index(axes) * size)
        return _normal_part(key, value, shape, dtype, starts, local)

    return jit(jax.shard_map(part, mesh=where.mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False))


def _full(key, value, shape, dtype):
    return jnp.full(shape, value, dtype)


def _slabs(shape):
    """Return (how many slabs a leaf is drawn in, how many rows of its last dimension each has)."""
    count, width = math.prod(shape[:-1]), shape[-1]
    slabs = next(n for n in range(-(-count * width // _SLAB), count + 1) if count % n == 0)
    return slabs, count // slabs


def _slab(key, std, i, shape, dtype):
    rows = _slabs(shape)[1]
    drawn = jax.random.normal(jax.random.fold_in(key, i), (rows, shape[-1]), accumulator(dtype))
    return (std * drawn).astype(dtype)


def _normal(key, std, shape, dtype):
    """Normal numbers of any shape, drawn in equal slabs of rows, each rounded as soon as it is drawn."""
    slabs = jnp.arange(_slabs(shape)[0])
    drawn = jax.lax.map(lambda i: bits(_slab(key, std, i, shape, dtype)), slabs)
    return numbers(drawn, dtype).reshape(shape)


def _normal_part(key, std, shape, dtype, starts, local):
    """Return the part of `_normal` that begins at `starts`: a slab at a time, of which the part's own rows are kept."""
    rows, number_R = _slabs(shape)[1], jnp.zeros((), jnp.int32)
    for start, size, whole in zip(starts[:-1], local[:-1], shape[:-1], strict=True):
        number_R = number_R[..., None] * whole + start + jnp.arange(size)
    number_R = number_R.reshape(-1)  # of each row among all rows: in order, so that those of a slab are neighbours
    count, width = number_R.size, local[-1]

    def write(i, out):
        slab = jax.lax.dynamic_slice_in_dim(_slab(key, std, i, shape, dtype), starts[-1], width, 1)
        begin = jnp.searchsorted(number_R, i * rows)
        mine = number_R[jnp.minimum(begin + jnp.arange(rows), count - 1)] - i * rows
        # Rows of later slabs are written too, and overwritten by theirs.
        return jax.lax.dynamic_update_slice_in_dim(out, slab[jnp.clip(mine, 0, rows - 1)], begin, 0)

    out = jnp.zeros((count + rows, width), dtype)
    out = jax.lax.fori_loop(number_R[0] // rows, number_R[-1] // rows + 1, write, out)
    return out[:count].reshape(local)
