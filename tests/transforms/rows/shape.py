"""Rows of primitives that move elements: shapes, slices, lookups."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.transforms.rows.arrays import D, L, V, each, fixed

MODES = ("fill", "clip", "promise_in_bounds")


def places(a):
    """Lookups at whole places along the cut axis, in and out of bounds."""
    rows, few = jnp.sin(a.x), jnp.array([7, 0, -1, 12, 9])
    labels = jnp.array([[3, 9], [-2, 0]])
    return (
        *(rows.at[few[:4]].get(mode=mode) for mode in MODES[:2]),
        rows.at[few[:2]].get(mode=MODES[2]),
        rows.at[few, jnp.array([0, 1, 2, 0, 4])].get(mode="fill", fill_value=2.0),
        jnp.take_along_axis(jnp.sin(a.t), labels[:, :, None], 1),
        (2 * a.i).at[few[2:4]].get(mode="fill", fill_value=7),
        (a.i > 3)[few[:3]],
        jnp.tile(rows, (2, 1)).at[few + 4].get(mode="clip"),
    )


def written(a, how):
    """Writes to whole places along the cut axis, in and out of bounds."""
    few, new = jnp.array([7, 0, -1, 12]), jnp.arange(12).reshape(4, D)
    x, t = (a.i, a.j) if how in ("min", "max") else (a.x, a.y)
    put = lambda x, where, new, **kwargs: getattr(x.at[where], how)(new.astype(x.dtype), **kwargs)
    both = jnp.concatenate([x, t])
    return (
        *(put(x, few, new, mode=mode) for mode in MODES[:2]),
        put(x, (few[:2], jnp.array([1, 2])), new[:2, 0], mode=MODES[2]),
        put(jnp.zeros_like(x), few[:2], new[:2]),
        put(jnp.tile(x, (2, 1)), few + 5, new, mode="clip"),
        put(both.reshape(2, L, D), (slice(None), few), jnp.stack([new, 2 * new]), mode="fill"),
    )


SHAPE = {
    "broadcast_in_dim": lambda a: (jnp.broadcast_to(a.x, (2, L, D)), lax.broadcast_in_dim(a.label, (L, 2), (0,))),
    "concatenate": lambda a: (
        jnp.concatenate([a.x, a.y[:, :1]], 1),
        jnp.concatenate([a.x, jnp.tile(a.y, (2, 1)), jnp.ones((L, D))]),  # along the cut axis, all of it each time
    ),
    "reshape": lambda a: (a.x.reshape(L, 1, D), a.t.reshape(2 * L, D), a.x.reshape(-1), a.t.reshape(2, L * D)),
    "split": lambda a: (lax.split(a.x, (1, 2), 1), lax.split(jnp.tile(a.x, (3, 1)), (L, 2 * L))),
    "squeeze": lambda a: (lax.squeeze(a.t[:1], (0,)), lax.squeeze(a.t[:, :, :1], (2,))),
    "stack": lambda a: (jnp.stack([a.x, a.y]), jnp.stack([a.x, a.y], 1)),
    "tile": lambda a: (jnp.tile(a.x, (1, 2)), jnp.tile(a.x, (2, 1))),
    "transpose": lambda a: a.t.transpose(1, 2, 0),
    "unstack": lambda a: (*jnp.unstack(a.x, axis=1), *jnp.unstack(a.t)),
}
SLICING = {
    "dynamic_slice": lambda a: (
        lax.dynamic_slice(a.x, (jnp.int32(0), a.i.max() % 2), (L, 2)),
        lax.dynamic_slice(jnp.sin(a.t), (jnp.int32(1), a.i.max() % 9, jnp.int32(0)), (1, 4, 2)),
        lax.dynamic_slice_in_dim(jnp.sin(a.x), a.i.min() + 90, 3),  # counted back from the end
    ),
    "dynamic_update_slice": lambda a: (
        lax.dynamic_update_slice(a.x, a.y[:, :1], (jnp.int32(0), a.i.max() % 2)),
        lax.dynamic_update_slice(a.x, 2 * a.table, (a.i.max() % 9, jnp.int32(0))),  # a part of the cut axis
        lax.dynamic_update_slice(a.t, jnp.stack([a.table[:, 1:]]), (jnp.int32(1), a.i.min() + 90, jnp.int32(1))),
    ),
    "pad": lambda a: (
        lax.pad(a.x, 0.5, ((0, 0, 0), (2, -1, 1))),
        *(lax.pad(a.table, 0.5, (config, (0, 1, 0))) for config in ((2, 3, 0), (0, 1, 1), (1, -1, 1), (5, 0, 0))),
        lax.pad(a.x, 0.5, ((L, 2 * L, 0), (0, 1, 0))),
    ),
    "rev": lambda a: lax.rev(a.x, (1,)),
    "slice": lambda a: (
        a.x[:, ::2],
        jnp.sin(a.x)[3:8],  # a part of the cut axis
        lax.slice(jnp.sin(a.t), (0, 1, 1), (2, 9, 3), (1, 3, 2)),
        a.b[5:7] | a.b[:2],
        jnp.sin(a.x)[-1],
        jnp.tile(a.x, (4, 1))[L : 3 * L],  # all of the cut axis, twice
    ),
}
INDEXING = {
    "gather": lambda a: (
        a.table[a.label],  # a table
        a.x[jnp.arange(L), a.label],  # the position along the cut axis
        jnp.take_along_axis(a.x, a.label[:, None], 1),  # a batch dimension
        a.x[:, jnp.array([2, 0])],  # a window
        each(lambda x, k: x[k], a.x, a.label),
        *places(a),
    ),
    "scatter": lambda a: (
        a.x.at[jnp.arange(L), a.label].set(a.y[:, 0]),
        a.x.at[:, jnp.array([2, 0])].set(a.y[:, :2]),
        each(lambda x, k, y: x.at[k].set(y), a.x, a.label, a.y[:, 0]),
        *written(a, "set"),
    ),
    "scatter-add": lambda a: (
        a.x.at[jnp.arange(L), a.label].add(a.y[:, 0]),
        a.x.at[:, jnp.array([2, 2])].add(a.y[:, :2]),
        a.table.at[a.label].add(a.x),
        jnp.zeros((V, D)).at[a.label].add(a.x),
        jax.ops.segment_sum(a.x, a.label, num_segments=V),
        *written(a, "add"),
    ),
    "scatter-max": lambda a: (
        a.i.at[jnp.arange(L), a.label].max(a.j[:, 0]),
        jax.ops.segment_max(fixed(a.x), a.label, num_segments=V),
        *written(a, "max"),
    ),
    "scatter-min": lambda a: (
        a.i.at[:, jnp.array([2, 2])].min(a.j[:, :2]),
        fixed(a.table).at[a.label].min(fixed(a.x)),
        *written(a, "min"),
    ),
    "scatter-sub": lambda a: (
        a.x.at[jnp.arange(L), a.label].subtract(a.y[:, 0]),
        a.x.at[:, jnp.array([2, 2])].subtract(2.0),
        a.table.at[a.label].subtract(a.x),
    ),
    "scatter-mul": lambda a: (
        a.x.at[jnp.arange(L), a.label].multiply(a.y[:, 0], unique_indices=True),
        a.x.at[jnp.array([7, 2])].multiply(2.0, unique_indices=True),
    ),
}
INDEXING |= {name.replace("-", "_"): INDEXING[name] for name in ("scatter-max", "scatter-min", "scatter-mul")}
