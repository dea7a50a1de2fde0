"""Functions over [B S ...] and other layouts: cut along either, along different dims, reshaped, moved, padded."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.transforms.cases.table import D, V, case

B, S = 9, 3
LONG = 11  # the cut length of the cases cut along S: tiles of 3, 3, 3, 2 for n = 4
ALONG_B = {"args": lambda d: (d(D, V), d(B, S, D), d.ids(V, B, S)), "axis": (None, 0, 0)}
ALONG_S = {"args": lambda d: (d(D, V), d(3, LONG, D), d.ids(V, 3, LONG)), "axis": (None, 1, 1)}
ROWS = {"args": lambda d: (d(D, 6), d(25, D)), "axis": (None, 0)}


def _nll(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


@case(**ALONG_B, head=True)
def batch_cut(w, h, y):
    return _nll(h @ w, y).mean()


@case(**ALONG_S, head=True)
def sequence_cut(w, h, y):
    return _nll(h @ w, y).mean()


@case(args=lambda d: (d(D, V), d(3, LONG, D), d.ids(V, 3, LONG)), axis=(None, -2, -1), head=True)
def sequence_cut_negative_axis(w, h, y):
    return _nll(jnp.einsum("bsd,dv->bsv", h, w), y).sum(-1)


@case(args=lambda d: (d(D, V), d(LONG, 3, D), d.ids(V, 3, LONG), d.mask(LONG)), axis=(None, 0, 1, 0), head=True)
def different_dims_per_argument(w, h, y, m):
    nll = _nll(jnp.swapaxes(h, 0, 1) @ w, y)
    return jnp.where(m, nll, 0).sum() / m.sum()


@case(args=lambda d: (d(V, D), d(D, 25), d.ids(V, 25)), axis=(None, 1, 0), head=True)
def tokens_along_the_last_dim(w, h, y):
    logp = jax.nn.log_softmax(w @ h, axis=0)
    return -jnp.sum(logp * jax.nn.one_hot(y, V, axis=0)) / y.shape[0]


@case(**ALONG_B, head=True)
def flatten_batch_cut(w, h, y):
    return _nll(h.reshape(-1, D) @ w, y.reshape(-1)).mean()


@case(**ALONG_S, head=True)
def flatten_sequence_cut(w, h, y):
    return _nll(h.reshape(-1, D) @ w, y.reshape(-1)).mean()


@case(**ALONG_B)
def flatten_and_back(w, h, y):
    return jax.nn.gelu(h.reshape(-1, D) @ w).reshape(B, S, -1)


@case(**ALONG_S)
def flatten_and_back_sequence_cut(w, h, y):
    b, s, d = h.shape
    return jax.nn.gelu(h.reshape(b * s, d) @ w).reshape(b, s, -1), _nll((h.reshape(b * s, d) @ w), y.ravel())


@case(args=lambda d: (d(4, D, 3), d(B, S, D)), axis=(None, 0))
def heads_by_reshape(w, h):
    q = jnp.einsum("bsd,kdh->bskh", h, w)
    return q.reshape(*q.shape[:2], -1), q.transpose(2, 0, 1, 3).reshape(4, -1, 3).sum(1)


@case(args=lambda d: (d(D, 8), d(25, D)), axis=(None, 0))
def grouped_features(w, h):
    x = (h @ w).reshape(25, 2, 4)
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3)
    return x.reshape(25, 8)


@case(args=lambda d: (d(D, 4), d(24, D)), axis=(None, 0))
def windows_of_tokens_by_reshape(w, h):
    return jnp.tanh((h @ w).reshape(12, 2, 4).mean(1)).sum()


@case(args=lambda d: (d(D, 5), d(D, 5), d(B, 6, D)), axis=(None, None, 0))
def attention_off_the_axis(wq, wk, x):
    q, k = x @ wq, x @ wk
    p = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(5.0))
    return p @ x


@case(args=lambda d: (d(D, 5), d(D, 5), d(B, 6, D), d.mask(B, 6)), axis=(None, None, 0, 0))
def attention_pooling_masked(w, v, x, m):
    m = m.at[:, 0].set(True)
    score = jnp.where(m[..., None], jnp.tanh(x @ w), -jnp.inf)
    return jnp.einsum("bsk,bsd,dk->bk", jax.nn.softmax(score, axis=1), x, v)


@case(args=lambda d: (d(B, 6, D), d(B, 6, D), d(B, 6, D)), axis=0)
def attention_causal_function(q, k, v):
    score = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q @ k.swapaxes(1, 2), -1e9)
    return jax.nn.softmax(score, axis=-1) @ v


@case(args=lambda d: (d(B, 6, 4, 3), d(B, 6, 2, 3), d(B, 6, 2, 3)), axis=0, head=True)
def attention_library_function(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@case(args=lambda d: (d(5, D), d(6, D), d(LONG, D)), axis=(None, None, 0))
def cross_attention_queries_cut(wq, memory, x):
    p = jax.nn.softmax((x @ wq.T) @ (memory @ wq.T).T, axis=-1)
    return p @ memory


@case(**ROWS)
def pad_concatenate_flip_off_the_axis(w, h):
    x = jnp.pad(h @ w, ((0, 0), (1, 2)))
    x = jnp.concatenate([x, h[:, :2], jnp.ones((25, 1))], axis=1)
    return jnp.flip(x, 1)[:, ::2] * jnp.arange(6), jnp.roll(x, 2, axis=-1)


@case(**ROWS)
def stack_split_and_tile(w, h):
    a, b = jnp.split(h @ w, 2, axis=1)
    return jnp.stack([a, b, a * b], axis=1), jnp.tile(a, (1, 2)), jnp.repeat(b, 2, axis=1)


@case(**ROWS)
def transposes_and_moveaxis(w, h):
    x = jnp.moveaxis((h @ w)[:, :, None] * jnp.arange(1.0, 4), 0, 1)
    return x.transpose(2, 1, 0).sum(0), jnp.expand_dims(x, 0)


@case(**ROWS)
def dynamic_slice_off_the_axis(w, h):
    x = h @ w
    x = lax.dynamic_update_slice(x, x[:, :2] * 3, (0, 3))
    return lax.dynamic_slice(x, (0, 1), (25, 4)) ** 2


@case(args=lambda d: (d(D, 6), d(25, D), d.ids(6, 25)), axis=(None, 0, 0))
def gather_and_scatter_with_batch_dims(w, h, i):
    x = h @ w
    one = jax.vmap(lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False))(x, i)
    row = jax.vmap(lambda row, i, new: row.at[i].mul(new))(x, i, one)
    return jnp.put_along_axis(row, i[:, None], one[:, None] ** 2, axis=1, inplace=False)


@case(args=lambda d: (d(5, 6), d(25, D), d.ids(5, 25), d.ids(6, 25)), axis=(None, 0, 0, 0))
def gather_two_indices_of_a_whole_table(table, h, i, j):
    return (h.sum(-1) * table[i, j]).sum(), table.at[i, j].add(h[:, 0])


@case(args=lambda d: (d(D, D), d(D, D), d(25, D), d(25, D)), axis=(None, None, 0, 0))
def einsum_of_several_operands(a, b, x, y):
    return jnp.einsum("nd,de,ef,nf->n", x, a, b, y), jnp.einsum("nd,nd,de->e", x, y, a), jnp.einsum("nd,ne->de", x, y)


@case(args=lambda d: (d(5, D, D), d(25, D), d(25, D)), axis=(None, 0, 0), head=True)
def bilinear_scores(w, x, y):
    return jnp.einsum("nd,kde,ne->nk", x, w, y)


@case(args=lambda d: (d(D, 3), d(D, 3), d(25, D)), axis=(None, None, 0))
def low_rank_adapter(a, b, h):
    return h + 2.0 * (h @ a) @ b.T


@case(args=lambda d: (d(D, 6), d(25, D)), axis=(None, 0), head=True)
def triangular_and_diagonal_masks(w, h):
    x = (h @ w).reshape(25, 2, 3)
    gram = jnp.tril(x.swapaxes(1, 2) @ x)
    return jnp.trace(gram, axis1=1, axis2=2), jnp.diagonal(gram, axis1=-2, axis2=-1).prod(-1), gram.sum(0)


@case(args=lambda d: (d(3, 4, 4), d(3, 25, 4)), axis=(None, 1))
def batched_matmul_rows_cut(w, h):
    return jnp.matmul(h, w), lax.batch_matmul(h, w).sum(1)


@case(args=lambda d: (d(25, 6), d(3, 2)), axis=(0, None), head=True, special=False)
def convolution_over_features(h, kernel):
    out = lax.conv_general_dilated(h[:, None], kernel[:, None], (1,), "SAME")
    return jax.nn.relu(out).sum((1, 2))


@case(args=lambda d: (d(D, 4, scale=0.5), d(25, D)), axis=(None, 0))
def small_matrices_per_token(w, h):
    x = (h @ w).reshape(-1, 2, 2)
    a = x @ x.swapaxes(-1, -2) + jnp.eye(2)
    return jnp.linalg.det(a), a[:, 0, 1]


@case(
    args=lambda d: (
        d(
            25,
        ),
        d(
            25,
        ),
    ),
    axis=0,
)
def vectors_only(x, y):
    return jnp.vdot(x, y), jnp.outer(x, jnp.arange(3.0)), x.dot(x) + y.sum()


@case(args=lambda d: (d(D, 6), d(1, 25, D)), axis=(None, 1))
def squeeze_and_broadcast(w, h):
    x = jnp.squeeze(h, 0) @ w
    return x + jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape) * jnp.ones((25, 1)), jnp.atleast_3d(x)


@case(args=lambda d: (d(D, 6), d(25, D)), axis=(None, 0))
def products_along_a_dimension(w, h):
    x = (1 + jnp.tanh(h @ w) / 2).reshape(-1, 2, 3)
    return x.prod(2), x.prod((1, 2)), jax.lax.reshape(x, (25, 6), (0, 2, 1))[:, 1]
