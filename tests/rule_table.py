"""One row for each primitive that has a rule: a function of cut arrays, one of whose equations is the primitive.

A row serves twice: with its arrays cut, and with the same arrays whole but read tile by tile (where the rule can pull).
Dimension key: `B` sequences, `L` the cut axis, `D` features, `V` vocabulary.
"""

import gc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

L, D, V = 10, 3, 5
PRIMITIVES = {p.name: p for p in gc.get_objects() if isinstance(p, Primitive)}  # what this version of JAX has


class Arrays(NamedTuple):
    """What rows compute with; `AXES` says where each is cut."""

    x: Any  # [L, D], between 0 and 1
    y: Any  # [L, D], between 0 and 1
    t: Any  # [B, L, D]
    z: Any  # [L, D], complex
    i: Any  # [L, D], integers
    j: Any  # [L, D], integers
    shift: Any  # [L, D], small integers
    label: Any  # [L], below D
    b: Any  # [L, D], booleans
    key: Any  # [L]
    table: Any  # [V, D], whole


AXES = Arrays(0, 0, 1, 0, 0, 0, 0, 0, 0, 0, None)


def arrays() -> Arrays:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0.1, 0.9, (2, L, D))
    i, j = rng.integers(1, 100, (2, L, D))
    return Arrays(
        x=x,
        y=y,
        t=rng.normal(size=(2, L, D)),
        z=x + 1j * y,
        i=jnp.asarray(i, jnp.int32),
        j=jnp.asarray(j, jnp.int32),
        shift=jnp.asarray(j % 7, jnp.int32),
        label=jnp.asarray(rng.integers(0, D, L), jnp.int32),
        b=jnp.asarray(x > y),
        key=jax.random.split(jax.random.key(0), L),
        table=rng.normal(size=(V, D)),
    )


def bind(name, *operands, **params):
    """Apply a primitive that has no public function."""
    results = PRIMITIVES[name].bind(*operands, **params)
    return list(results) if PRIMITIVES[name].multiple_results else results


def fixed(x):
    """Operands that JAX cannot differentiate in."""
    return lax.stop_gradient(x)


def each(fn, *operands):
    return jax.vmap(fn)(*operands)


def on(name, *fields):
    """A row: the function of `lax` of these fields."""
    return lambda a: getattr(lax, name)(*(getattr(a, field) for field in fields))


def words(x):
    return x.astype(jnp.uint32)


def convolve(lhs, rhs, numbers=("NHC", "HIO", "NHC")):
    return lax.conv_general_dilated(lhs, rhs, (1,), "SAME", dimension_numbers=numbers)


UNARY = """abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh""".split()
BINARY = "add atan2 div eq ge gt le lt max min mul ne pow rem sub".split()
INTEGER = "clz population_count bitwise_not".split()
INTEGERS = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical".split()

FLOAT = {name: on(name, "x") for name in UNARY}
FLOAT |= {name: on(name, "x", "y") for name in BINARY}
FLOAT |= {
    "acosh": lambda a: lax.acosh(1 + a.x),
    "add_any": lambda a: bind("add_any", a.x, a.y),
    "clamp": lambda a: (lax.clamp(0.3, a.x, 0.6), lax.clamp(0.3 * a.y, a.x, 0.6 + a.y)),
    "copy": lambda a: jnp.copy(a.x),
    "eq_to": lambda a: bind("eq_to", a.x, a.y),
    "integer_pow": lambda a: a.x**3,
    "le_to": lambda a: bind("le_to", a.x, a.y),
    "lt_to": lambda a: bind("lt_to", a.x, a.y),
    "name": lambda a: checkpoint_name(a.x, "x"),
    "nextafter": lambda a: lax.nextafter(fixed(a.x), fixed(a.y)),
    "one_minus_square": lambda a: bind("one_minus_square", a.x),
    "polynomial": lambda a: bind("polynomial", fixed(a.x), 1.0, jnp.float64(0.5), 0.25),
    "log2": lambda a: lax.log2(a.x),
    "optimization_barrier": lambda a: lax.optimization_barrier((a.x, a.i)),
    "reduce_precision": lambda a: lax.reduce_precision(a.x, 5, 10),
    "remat2": lambda a: jax.checkpoint(lambda x, w: jnp.sin(x @ w.T))(a.x, a.table),
    "select_n": lambda a: (lax.select_n(a.b, a.x, a.y), lax.select_n(a.label.sum() > 3, a.x, a.y)),
    "stop_gradient": lambda a: lax.stop_gradient(a.x),
}
SPECIAL = {
    "igamma": lambda a: lax.igamma(a.x, a.y),
    "igamma_grad_a": lambda a: lax.igamma_grad_a(fixed(a.x), fixed(a.y)),
    "igammac": lambda a: lax.igammac(a.x, a.y),
    "polygamma": lambda a: lax.polygamma(fixed(jnp.floor(3 * a.x)), a.y),
    "regularized_incomplete_beta": lambda a: lax.betainc(fixed(a.x), fixed(a.y), 0.5 * a.y),
    "zeta": lambda a: lax.zeta(fixed(2 + a.x), fixed(a.y)),
}
BITS = {name.removeprefix("bitwise_"): on(name, "i") for name in INTEGER}
BITS |= {name.removeprefix("bitwise_"): on(name, "i", "shift") for name in INTEGERS}
BITS |= {
    "bitcast_convert_type": lambda a: (
        lax.bitcast_convert_type(fixed(a.x), jnp.uint8),
        lax.bitcast_convert_type(a.i, jnp.float32),
    ),
    "complex": lambda a: lax.complex(a.x, a.y),
    "conj": lambda a: lax.conj(a.z),
    "convert_element_type": lambda a: (a.x.astype(jnp.float32), (9 * a.x).astype(jnp.int8), a.b.astype(jnp.float32)),
    "imag": lambda a: lax.imag(a.z),
    "mulhi": lambda a: lax.mulhi(a.i, a.j * 2**24),
    "real": lambda a: lax.real(a.z),
    "random_bits": lambda a: each(lambda k: jax.random.bits(k, (2,)), a.key),
    "random_fold_in": lambda a: each(lambda k, i: jax.random.key_data(jax.random.fold_in(k, i)), a.key, a.label),
    "random_split": lambda a: each(lambda k: jax.random.key_data(jax.random.split(k, 2)), a.key),
    "random_unwrap": lambda a: jax.random.key_data(a.key),
    "random_wrap": lambda a: each(lambda d: jax.random.bits(jax.random.wrap_key_data(d)), words(a.i)[:, :2]),
    "threefry2x32": lambda a: bind("threefry2x32", *map(words, (a.i, a.j, a.i, a.j))),
}
SHAPE = {
    "broadcast_in_dim": lambda a: (jnp.broadcast_to(a.x, (2, L, D)), lax.broadcast_in_dim(a.label, (L, 2), (0,))),
    "concatenate": lambda a: jnp.concatenate([a.x, a.y[:, :1]], 1),
    "conv_general_dilated": lambda a: (
        convolve(jnp.moveaxis(a.t, 1, 0), jnp.ones((2, D, 4))),  # the batch is cut
        convolve(jnp.ones((1, 4, D)), jnp.moveaxis(a.t, 1, 2)),  # the features that come out are
        convolve(jnp.moveaxis(a.t, 1, 2), jnp.moveaxis(a.t, 1, 2), ("NHC", "OHI", "NHC")),  # those that are summed are
    ),
    "dot_general": lambda a: (
        a.x @ a.table.T,  # free
        a.table @ a.x.T,
        jnp.einsum("bld,led->leb", a.t, jnp.stack([a.x, a.y], 1)),  # batch
        a.x.T @ a.y,  # contracted
    ),
    "dynamic_slice": lambda a: lax.dynamic_slice(a.x, (jnp.int32(0), a.i.max() % 2), (L, 2)),
    "dynamic_update_slice": lambda a: lax.dynamic_update_slice(a.x, a.y[:, :1], (jnp.int32(0), a.i.max() % 2)),
    "pad": lambda a: lax.pad(a.x, 0.5, ((0, 0, 0), (2, -1, 1))),
    "reshape": lambda a: (a.x.reshape(L, 1, D), a.t.reshape(2 * L, D), a.x.reshape(-1), a.t.reshape(2, L * D)),
    "rev": lambda a: lax.rev(a.x, (1,)),
    "slice": lambda a: a.x[:, ::2],
    "split": lambda a: lax.split(a.x, (1, 2), 1),
    "squeeze": lambda a: (lax.squeeze(a.t[:1], (0,)), lax.squeeze(a.t[:, :, :1], (2,))),
    "stack": lambda a: (jnp.stack([a.x, a.y]), jnp.stack([a.x, a.y], 1)),
    "tile": lambda a: (jnp.tile(a.x, (1, 2)), jnp.tile(a.x, (2, 1))),
    "transpose": lambda a: a.t.transpose(1, 2, 0),
    "unstack": lambda a: (*jnp.unstack(a.x, axis=1), *jnp.unstack(a.t)),
}
INDEXING = {
    "gather": lambda a: (
        a.table[a.label],  # a table
        a.x[jnp.arange(L), a.label],  # the position along the cut axis
        jnp.take_along_axis(a.x, a.label[:, None], 1),  # a batch dimension
        a.x[:, jnp.array([2, 0])],  # a window
        each(lambda x, k: x[k], a.x, a.label),
    ),
    "scatter": lambda a: (
        a.x.at[jnp.arange(L), a.label].set(a.y[:, 0]),
        a.x.at[:, jnp.array([2, 0])].set(a.y[:, :2]),
        each(lambda x, k, y: x.at[k].set(y), a.x, a.label, a.y[:, 0]),
    ),
    "scatter-add": lambda a: (
        a.x.at[jnp.arange(L), a.label].add(a.y[:, 0]),
        a.x.at[:, jnp.array([2, 2])].add(a.y[:, :2]),
        a.table.at[a.label].add(a.x),
        jnp.zeros((V, D)).at[a.label].add(a.x),
        jax.ops.segment_sum(a.x, a.label, num_segments=V),
    ),
    "scatter-max": lambda a: a.i.at[jnp.arange(L), a.label].max(a.j[:, 0]),
    "scatter-min": lambda a: a.i.at[:, jnp.array([2, 2])].min(a.j[:, :2]),
    "scatter-sub": lambda a: (
        a.x.at[jnp.arange(L), a.label].subtract(a.y[:, 0]),
        a.x.at[:, jnp.array([2, 2])].subtract(2.0),
    ),
    "scatter-mul": lambda a: a.x.at[jnp.arange(L), a.label].multiply(a.y[:, 0], unique_indices=True),
}
INDEXING |= {name.replace("-", "_"): INDEXING[name] for name in ("scatter-max", "scatter-min", "scatter-mul")}
REDUCTION = {
    "argmax": lambda a: a.x.argmax(1),
    "argmin": lambda a: a.t.argmin(0),
    "cumlogsumexp": lambda a: lax.cumlogsumexp(a.x, 1),
    "cummax": lambda a: lax.cummax(a.x, 1),
    "cummin": lambda a: lax.cummin(a.x, 1),
    "cumprod": lambda a: lax.cumprod(a.x, 1),
    "cumsum": lambda a: lax.cumsum(a.t, 2, reverse=True),
    "reduce_and": lambda a: (a.b.all(1), a.b.all(0), lax.reduce_and(a.i, (0,))),
    "reduce_max": lambda a: (a.x.max(1), a.x.max(0), a.i.max(0), a.b.max(0)),
    "reduce_min": lambda a: (a.x.min(1), a.x.min(0), a.i.min(0), a.b.min(0)),
    "reduce_or": lambda a: (a.b.any(1), a.b.any(0), lax.reduce_or(a.i, (0,))),
    "reduce_prod": lambda a: (a.x.prod(1), lax.reduce_prod(fixed(a.y), (0,)), a.i.prod(0)),
    "reduce_sum": lambda a: (a.x.sum(1), a.x.sum(0), a.t.sum((0, 1)), a.i.sum(0)),
    "reduce_xor": lambda a: lax.reduce_xor(a.i, (1,)),
    "sort": lambda a: (lax.sort(a.x, dimension=1), lax.sort((a.i, a.x), dimension=1, num_keys=1)),
    "top_k": lambda a: lax.top_k(a.x, 2),
}


def matrices(a):
    """A positive definite matrix for each place along the cut axis."""
    rows = a.x[:, :, None] * a.y[:, None, :] + 2 * jnp.eye(D)
    return rows @ rows.swapaxes(1, 2)


LINALG = {
    "cholesky": lambda a: lax.linalg.cholesky(matrices(a)),
    "eig": lambda a: lax.linalg.eig(fixed(matrices(a)), compute_right_eigenvectors=False),
    "eigh": lambda a: lax.linalg.eigh(fixed(matrices(a)))[1],
    "hessenberg": lambda a: lax.linalg.hessenberg(fixed(matrices(a))),
    "householder_product": lambda a: lax.linalg.householder_product(fixed(matrices(a)), fixed(a.x)),
    "lu": lambda a: lax.linalg.lu(matrices(a)),
    "lu_pivots_to_permutation": lambda a: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(fixed(matrices(a)))[1], D),
    "qr": lambda a: lax.linalg.qr(fixed(matrices(a)), full_matrices=False),
    "schur": lambda a: lax.linalg.schur(fixed(matrices(a))),
    "svd": lambda a: lax.linalg.svd(fixed(matrices(a)), compute_uv=False),
    "triangular_solve": lambda a: lax.linalg.triangular_solve(
        jnp.tril(matrices(a)), a.x[:, :, None], left_side=True, lower=True
    ),
    "tridiagonal": lambda a: lax.linalg.tridiagonal(fixed(matrices(a))),
}
GROUPS = {
    "float": FLOAT,
    "special": SPECIAL,
    "bits": BITS,
    "shape": SHAPE,
    "indexing": INDEXING,
    "reduction": REDUCTION,
    "linalg": LINALG,
}


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
    "pad": lambda s, w: lax.pad(s, w[0, 0], ((1, 0, 0), (0, 1, 0))),
    "reduce_sum": lambda s, w: s.sum(0),
    "reshape": lambda s, w: s.reshape(-1),
    "rev": lambda s, w: s[::-1],
    "scatter-add": lambda s, w: (s.at[jnp.array([1, 1])].add(w[:2]), w.at[jnp.array([1, 1])].add(s[:2])),
    "select_n": lambda s, w: (jnp.where(w > 1, s, w), jnp.where(w > 1, 2 * s, s)),
    "slice": lambda s, w: s[1:3],
    "split": lambda s, w: lax.split(s, (1, 3)),
    "squeeze": lambda s, w: s[:, :1].squeeze(1),
    "stack": lambda s, w: jnp.stack([s, w]),
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
# Rules whose cases are tests of their own in test_rules.py.
APART = """iota custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr debug_callback debug_print io_callback""".split()
