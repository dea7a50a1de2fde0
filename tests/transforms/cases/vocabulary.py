"""Heads that sort, scan, gather or split along the vocabulary, which is not cut."""

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logsumexp

from tests.transforms.cases.table import TOKENS, D, N, V, case


@case(**TOKENS, has_aux=True, head=True)
def accuracy_and_top5(w, h, y):
    logits = h @ w
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    top = jax.lax.top_k(logits, 5)[1]
    return loss, {
        "accuracy": jnp.mean(logits.argmax(-1) == y),
        "top5": jnp.mean((top == y[:, None]).any(-1)),
        "prediction": jnp.argmax(logits, -1),
    }


@case(**TOKENS, head=True)
def top_k_cross_entropy(w, h, y):
    values, ids = jax.lax.top_k(h @ w, 4)
    hit = (ids == y[:, None]).astype(values.dtype)
    return jnp.mean(logsumexp(values, -1) - (values * hit).sum(-1))


@case(**TOKENS, head=True)
def sorted_logits_margin(w, h, y):
    ordered = jnp.sort(h @ w, axis=-1)
    return jnp.mean(ordered[:, -1] - ordered[:, -2]) + 0.1 * jnp.mean(ordered[:, 0] ** 2)


@case(**TOKENS, head=True)
def sparsemax(w, h, y):
    z = h @ w
    ordered = -jnp.sort(-z, axis=-1)
    k = jnp.arange(1, V + 1)
    total = jnp.cumsum(ordered, axis=-1)
    support = (1 + k * ordered > total).sum(-1)
    tau = (jnp.take_along_axis(total, support[:, None] - 1, -1)[:, 0] - 1) / support
    p = jax.nn.relu(z - tau[:, None])
    return jnp.mean(0.5 * (p * (2 * z - p)).sum(-1) - jnp.take_along_axis(z, y[:, None], -1)[:, 0])


@case(**TOKENS, head=True)
def nucleus_mass(w, h, y):
    p = jax.nn.softmax(h @ w)
    order = jnp.argsort(-p, axis=-1)
    ordered = jnp.take_along_axis(p, order, axis=-1)
    kept = jnp.where(jnp.cumsum(ordered, -1) - ordered < 0.8, ordered, 0.0)
    return -jnp.log(kept.sum(-1)).mean() + (kept**2).sum() / kept.shape[0]


@case(**TOKENS, head=True)
def earth_mover_along_vocabulary(w, h, y):
    p = jnp.cumsum(jax.nn.softmax(h @ w), axis=1)
    q = jnp.cumsum(jax.nn.one_hot(y, V), axis=1)
    return jnp.mean(jnp.sum((p - q) ** 2, axis=1))


@case(**TOKENS, head=True)
def entropy_of_logits(w, h, y):
    logp = jax.nn.log_softmax(h @ w)
    return -(jnp.exp(logp) * logp).sum(-1).mean() - 0.1 * logp.mean()


@case(args=lambda d: (d(3, D, V), d(D, 3), d(N, D), d.ids(V, N)), axis=(None, None, 0, 0), head=True)
def mixture_of_softmaxes(ws, gate, h, y):
    logp = jax.nn.log_softmax(jnp.einsum("nd,kdv->nkv", h, ws))
    logp = logsumexp(logp + jax.nn.log_softmax(h @ gate)[:, :, None], axis=1)
    return -jnp.take_along_axis(logp, y[:, None], axis=1).mean()


@case(args=lambda d: ([d(D, V), d(D, V)], d(N, D), d.ids(V, N, 2)), axis=(None, 0, 0), head=True)
def two_future_tokens(heads, h, y):
    losses = [optax.softmax_cross_entropy_with_integer_labels(h @ w, y[:, i]).mean() for i, w in enumerate(heads)]
    return sum(losses) / len(losses)


@case(args=lambda d: (d(V, D), d(N, D), d.ids(V, N), d.ids(V, N, 4)), axis=(None, 0, 0, 0), head=True)
def sampled_softmax(table, h, y, negatives):
    candidates = jnp.concatenate([y[:, None], negatives], axis=1)
    logits = jnp.einsum("nkd,nd->nk", table[candidates], h)
    return -jax.nn.log_softmax(logits)[:, 0].mean()


@case(args=lambda d: (d(V, D), d.ids(V, N), d.ids(V, N)), axis=(None, 0, 0), head=True)
def tied_embedding_bigram(table, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(table[x] @ table.T, y).mean()


@case(args=lambda d: (d(V, D), d(D, D), d.ids(V, N), d.ids(V, N)), axis=(None, None, 0, 0), head=True)
def tied_embedding_take_scaled(table, w, x, y):
    h = jnp.take(table, x, axis=0) * jnp.sqrt(D)
    h = h + jax.nn.gelu(h @ w)
    return optax.softmax_cross_entropy_with_integer_labels(jnp.einsum("nd,vd->nv", h, table), y).mean()


@case(args=lambda d: (d(D, 5), d(D, V), d(N, D), d.ids(4 + V, N)), axis=(None, None, 0, 0), head=True)
def adaptive_softmax(w_head, w_tail, h, y):
    head, tail = jax.nn.log_softmax(h @ w_head), jax.nn.log_softmax(h @ w_tail)
    rows = jnp.arange(h.shape[0])
    near = head[rows, jnp.minimum(y, 3)]
    far = head[:, 4] + tail[rows, jnp.clip(y - 4, 0)]
    return -jnp.where(y < 4, near, far).mean()


@case(**TOKENS, head=True)
def pairwise_ranking_along_vocabulary(w, h, y):
    scores = h @ w
    difference = scores[:, :, None] - scores[:, None, :]
    weight = jax.nn.one_hot(y, V)[:, :, None]
    return jnp.mean(jnp.sum(weight * jax.nn.softplus(-difference), axis=(1, 2)))


@case(**TOKENS)
def python_loop_over_vocabulary_chunks(w, h, y):
    logz = jnp.full(h.shape[:1], -jnp.inf, h.dtype)
    for i in range(0, V, 5):
        logz = jnp.logaddexp(logz, logsumexp(h @ w[:, i : i + 5], axis=-1))
    return (logz - (h * w.T[y]).sum(-1)).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V - 3, N)), axis=(None, 0, 0), head=True)
def padded_vocabulary(w, h, y):
    logits = h @ w
    logits = jnp.where(jnp.arange(V) < V - 3, logits, -1e9)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@case(**TOKENS, head=True)
def logits_set_at(w, h, y):
    logits = (h @ w).at[:, 0].set(-1e4)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(y, 1)).mean()


@case(**TOKENS, head=True)
def target_logit_reduced_by_scatter(w, h, y):
    logits = (h @ w).at[jnp.arange(h.shape[0]), y].add(-0.35)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N, 3)), axis=(None, 0, 0), head=True)
def listwise_several_labels(w, h, ys):
    logp = jax.nn.log_softmax(h @ w)
    return -jnp.take_along_axis(logp, ys, axis=1).sum(1).mean()


@case(**TOKENS, head=True)
def repetition_penalty(w, h, y):
    logits = h @ w
    return jnp.mean(jnp.where(logits > 0, logits / 1.3, logits * 1.3)[:, ::-1][:, 2:5] ** 2)


@case(args=lambda d: (d(D, V), d(N, D), d.ids(2, N, V)), axis=(None, 0, 0))
def lambda_weights_by_rank(w, h, relevance):
    scores = h @ w
    rank = jnp.argsort(jnp.argsort(-scores, axis=-1), axis=-1)
    gain = relevance / jnp.log2(rank + 2.0)
    return -jnp.mean(gain * jax.nn.log_softmax(scores))
