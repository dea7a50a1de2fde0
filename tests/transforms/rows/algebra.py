"""Rows of reductions, products, windows and linear algebra."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.transforms.rows.arrays import D, bind, fixed


def convolve(lhs, rhs, numbers=("NHC", "HIO", "NHC"), groups=1):
    return lax.conv_general_dilated(lhs, rhs, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups)


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
    "approx_top_k": lambda a: lax.approx_max_k(a.x, 2),
    "reduce": lambda a: (
        lax.reduce(fixed(a.x), 0.5, lambda x, y: x + y - x * y, (1,)),
        lax.reduce((a.i, fixed(a.t[0])), (jnp.int32(0), 1.0), lambda x, y: (x[0] ^ y[0], x[1] * y[1]), (1,)),
    ),
}


def ragged(rows, weights, sizes, contract=False):
    """Rows times the matrix of their group; or, for each group, the sum over its rows of their products."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=((((0,), (0,)) if contract else ((1,), (1,))), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[] if contract else [0],
    )
    return lax.ragged_dot_general(rows, weights, jnp.array(sizes, jnp.int32), numbers)


PRODUCT = {
    "conv_general_dilated": lambda a: (
        convolve(jnp.moveaxis(a.t, 1, 0), jnp.ones((2, D, 4))),  # the batch is cut
        convolve(jnp.ones((1, 4, D)), jnp.moveaxis(a.t, 1, 2)),  # the features that come out are
        convolve(jnp.moveaxis(a.t, 1, 2), jnp.moveaxis(a.t, 1, 2), ("NHC", "OHI", "NHC")),  # those that are summed are
        convolve(jnp.moveaxis(a.t, 1, 0), jnp.ones((2, 1, D)), groups=D),
    ),
    "dot_general": lambda a: (
        a.x @ a.table.T,  # free
        a.table @ a.x.T,
        jnp.einsum("bld,led->leb", a.t, jnp.stack([a.x, a.y], 1)),  # batch
        a.x.T @ a.y,  # contracted
    ),
    "ragged_dot_general": lambda a: (
        ragged(a.x, jnp.stack([a.table.T, 2 * a.table.T]), (3, 5)),  # the rows are cut
        ragged(a.x, jnp.stack([a.table.T, a.table.T, -a.table.T]), (1, 0, 9)),
        ragged(fixed(a.x), fixed(a.y), (3, 0, 5), contract=True),
        ragged(a.table, jnp.moveaxis(a.t, 2, 1), (3, 1)),  # the features that come out are
        ragged(a.x.T, a.t, (1, 2)),  # those that are summed are
    ),
}
WINDOW = {
    "fft": lambda a: (jnp.fft.fft(a.x, axis=1), jnp.fft.rfft(a.x), jnp.fft.fft2(a.t, axes=(0, 2))),
    "reduce_window": lambda a: lax.reduce_window(
        fixed(a.x), 1.0, lambda x, y: x * y + x, (1, 2), (1, 1), ((0, 0), (1, 0))
    ),
    "reduce_window_max": lambda a: lax.reduce_window(a.x, -jnp.inf, lax.max, (1, 2), (1, 2), "SAME"),
    "reduce_window_min": lambda a: lax.reduce_window(fixed(a.t), jnp.inf, lax.min, (2, 1, 2), (1, 1, 1), "VALID"),
    "reduce_window_sum": lambda a: lax.reduce_window(a.t, 0.0, lax.add, (2, 1, 2), (1, 1, 1), "SAME"),
    "select_and_gather_add": lambda a: jax.jvp(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"), (a.x,), (a.y,)
    )[1],
    "select_and_scatter_add": lambda a: jax.vjp(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"), a.x
    )[1](a.y[:, 1:])[0],
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
    "geqp3": lambda a: bind("geqp3", fixed(matrices(a)), jnp.zeros_like(a.i), use_magma=None),
    "geqrf": lambda a: bind("geqrf", fixed(matrices(a))),
    "householder_product": lambda a: lax.linalg.householder_product(fixed(matrices(a)), fixed(a.x)),
    "lu": lambda a: lax.linalg.lu(matrices(a)),
    "lu_pivots_to_permutation": lambda a: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(fixed(matrices(a)))[1], D),
    "ormqr": lambda a: lax.linalg.ormqr(fixed(matrices(a)), fixed(a.x), fixed(matrices(a))),
    "qr": lambda a: lax.linalg.qr(fixed(matrices(a)), full_matrices=False),
    "schur": lambda a: lax.linalg.schur(fixed(matrices(a))),
    "svd": lambda a: lax.linalg.svd(fixed(matrices(a)), compute_uv=False),
    "symmetric_product": lambda a: lax.linalg.symmetric_product(fixed(matrices(a)), fixed(matrices(a)), beta=0.5),
    "triangular_solve": lambda a: lax.linalg.triangular_solve(
        jnp.tril(matrices(a)), a.x[:, :, None], left_side=True, lower=True
    ),
    "tridiagonal": lambda a: lax.linalg.tridiagonal(fixed(matrices(a))),
    "tridiagonal_solve": lambda a: lax.linalg.tridiagonal_solve(a.x, 3 + a.y, a.x, a.x[:, :, None]),
}
