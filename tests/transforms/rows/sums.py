"""Rows of primitives that are applied to the tiles' parts of a reduction over the cut axis."""

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.transforms.rows.arrays import D, bind

# Functions of a sum `s` [4, D] over the cut axis and a whole `w` [4, D]: the primitive is applied to the tiles' parts.
SUMS = {
    "add": lambda s, w: (s + w, w + s),
    "add_any": lambda s, w: bind("add_any", s, w),
    "broadcast_in_dim": lambda s, w: lax.broadcast_in_dim(s, (1, 4, D), (1, 2)),
    "concatenate": lambda s, w: jnp.concatenate([w, s, s]),
    "convert_element_type": lambda s, w: s.astype(jnp.complex128),
    "copy": lambda s, w: jnp.copy(s),
    "cumsum": lambda s, w: lax.cumsum(s),
    "div": lambda s, w: s / w,
    "dot_general": lambda s, w: (s @ w.T[:, :2], w[:2] @ s.T),
    "dynamic_slice": lambda s, w: lax.dynamic_slice_in_dim(s, jnp.argmax(w[:, 0]), 2),
    "dynamic_update_slice": lambda s, w: (
        lax.dynamic_update_slice(w, s[:2], (1, 0)),
        lax.dynamic_update_slice(s, w[:2], (1, 0)),
        lax.dynamic_update_slice(s, s[2:], (0, 0)),
    ),
    "gather": lambda s, w: (s[jnp.argsort(w[:, 0])], s.at[jnp.array([1, 9])].get(mode="fill", fill_value=0)),
    "mul": lambda s, w: (s * w, w * s),
    "name": lambda s, w: checkpoint_name(s, "s"),
    "neg": lambda s, w: -s,
    "optimization_barrier": lambda s, w: lax.optimization_barrier((s, w))[0],
    "pad": lambda s, w: lax.pad(s, w[0, 0], ((1, -1, 0), (-1, 1, 0))),
    "reduce_sum": lambda s, w: s.sum(0),
    "reshape": lambda s, w: s.reshape(-1),
    "rev": lambda s, w: s[::-1],
    "scatter-add": lambda s, w: (s.at[jnp.array([1, 1])].add(w[:2]), w.at[jnp.array([1, 1])].add(s[:2])),
    "scatter-sub": lambda s, w: (
        s.at[jnp.array([1, 1])].subtract(w[:2]),
        w.at[jnp.array([1, 1])].subtract(s[:2]),
    ),
    "select_n": lambda s, w: (jnp.where(w > 1, s, w), jnp.where(w > 1, 2 * s, s)),
    "slice": lambda s, w: s[1:3],
    "split": lambda s, w: lax.split(s, (1, 3)),
    "squeeze": lambda s, w: s[:, :1].squeeze(1),
    "stack": lambda s, w: jnp.stack([s, w]),
    "triangular_solve": lambda s, w: lax.linalg.triangular_solve(
        jnp.eye(4) + jnp.tril(w @ w.T), s, left_side=True, lower=True
    ),
    "stop_gradient": lambda s, w: lax.stop_gradient(s),
    "sub": lambda s, w: (s - w, w - s),
    "transpose": lambda s, w: s.T,
    "unstack": lambda s, w: jnp.unstack(s),
}
# The same for a maximum over the cut axis, or (negated) a minimum.
MAXIMA = {
    "broadcast_in_dim": SUMS["broadcast_in_dim"],
    "copy": SUMS["copy"],
    "dynamic_slice": SUMS["dynamic_slice"],
    "gather": SUMS["gather"],
    "max": lambda s, w: jnp.maximum(s, w),
    "name": SUMS["name"],
    "reduce_max": lambda s, w: s.max(0),
    "reshape": SUMS["reshape"],
    "rev": SUMS["rev"],
    "slice": SUMS["slice"],
    "squeeze": SUMS["squeeze"],
    "stop_gradient": SUMS["stop_gradient"],
    "transpose": SUMS["transpose"],
}
MINIMA = MAXIMA | {"min": lambda s, w: jnp.minimum(s, w), "reduce_min": lambda s, w: s.min(0)}
del MINIMA["max"], MINIMA["reduce_max"]
