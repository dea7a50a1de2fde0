"""Cross-entropies and other classification heads over tokens, cut along the tokens."""

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logsumexp

from tests.transforms.cases.table import MASKED_TOKENS, TOKENS, D, N, V, case


@case(**TOKENS, head=True)
def cross_entropy_optax(w, h, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean()


@case(**MASKED_TOKENS, head=True, x64=False)
def cross_entropy_softcap_zloss_masked(w, h, y, m):
    logits = 30 * jnp.tanh((h @ w).astype(jnp.float32) / 30)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y) + 1e-2 * logsumexp(logits, -1) ** 2
    return (loss * m).sum() / m.sum()


@case(**TOKENS, head=True)
def cross_entropy_indexed(w, h, y):
    n = y.shape[0]
    logp = jax.nn.log_softmax(h @ w)
    return -logp[jnp.arange(n), y].sum() / n


@case(**TOKENS, head=True)
def cross_entropy_take_along_axis(w, h, y):
    logp = jax.nn.log_softmax(h @ w, axis=-1)
    return -jnp.take_along_axis(logp, y[:, None], axis=-1)[:, 0].mean()


@case(**TOKENS, head=True)
def cross_entropy_one_hot(w, h, y):
    logits = jnp.einsum("nd,dv->nv", h, w)
    return jnp.mean(logsumexp(logits, axis=1) - jnp.sum(jax.nn.one_hot(y, logits.shape[-1]) * logits, axis=1))


@case(**TOKENS, head=True)
def cross_entropy_one_hot_by_comparison(w, h, y):
    logits = h @ w
    target = jnp.where(jnp.arange(logits.shape[1])[None, :] == y[:, None], logits, 0.0).sum(-1)
    return (logsumexp(logits, -1) - target).mean()


@case(**TOKENS, head=True)
def cross_entropy_by_hand(w, h, y):
    logits = h @ w
    logits = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    p = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    return -jnp.log(jnp.take_along_axis(p, y[:, None], -1)).mean()


@case(**TOKENS, head=True)
def cross_entropy_vmapped(w, h, y):
    def one(h, y):
        return -jax.nn.log_softmax(w.T @ h)[y]

    return jnp.mean(jax.vmap(one)(h, y))


@case(**TOKENS, head=True)
def cross_entropy_per_token(w, h, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y)


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d(V)), axis=(None, 0, 0, None), head=True)
def cross_entropy_bias_sum(w, h, y, b):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w + b, y).sum()


@case(**TOKENS, head=True)
def label_smoothing_dense(w, h, y):
    labels = optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)
    return optax.softmax_cross_entropy(h @ w, labels).mean()


@case(**TOKENS, head=True)
def label_smoothing_analytic(w, h, y):
    logits = h @ w
    logz = logsumexp(logits, axis=-1)
    nll = logz - jnp.take_along_axis(logits, y[:, None], axis=-1).squeeze(-1)
    return jnp.mean(0.9 * nll + 0.1 * (logz - logits.mean(-1)))


@case(**TOKENS, head=True)
def focal_loss(w, h, y):
    logp = jax.nn.log_softmax(h @ w)
    logp = jnp.take_along_axis(logp, y[:, None], 1)[:, 0]
    return jnp.mean(-((1 - jnp.exp(logp)) ** 2) * logp)


@case(**TOKENS, head=True)
def poly_loss(w, h, y):
    logits, hot = h @ w, jax.nn.one_hot(y, V)
    return optax.losses.poly_loss_cross_entropy(logits, hot, epsilon=2.0).mean()


@case(**TOKENS, head=True)
def unlikelihood(w, h, y):
    p = jax.nn.softmax(h @ w)[jnp.arange(h.shape[0]), y]
    return -jnp.log1p(-jnp.clip(p, 0, 1 - 1e-6)).mean()


@case(**TOKENS, head=True, special=False)
def perplexity(w, h, y):
    return jnp.exp(optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean())


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d.ids(6, N) + 1), axis=(None, 0, 0, 0), head=True)
def bits_per_byte(w, h, y, byte_counts):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return nll.sum() / (byte_counts.sum() * jnp.log(2.0))


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d.uniform(N)), axis=(None, 0, 0, 0), head=True)
def weighted_mean(w, h, y, weight):
    return jnp.average(optax.softmax_cross_entropy_with_integer_labels(h @ w, y), weights=weight)


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d.uniform(V)), axis=(None, 0, 0, None), head=True, special=False)
def class_weights(w, h, y, class_weight):
    nll = -jax.nn.log_softmax(h @ w)[jnp.arange(len(y)), y]
    weight = class_weight[y]
    return (weight * nll).sum() / weight.sum()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V + 4, N) - 4), axis=(None, 0, 0), head=True)
def ignore_index(w, h, y):
    keep = y >= 0
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, jnp.where(keep, y, 0))
    return jnp.where(keep, nll, 0.0).sum() / jnp.maximum(keep.sum(), 1)


@case(**MASKED_TOKENS, head=True)
def nan_mean(w, h, y, m):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return jnp.nanmean(jnp.where(m, nll, jnp.nan))


@case(**MASKED_TOKENS, head=True)
def mean_where(w, h, y, m):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(h @ w, y), where=m)


@case(args=lambda d: (d(D, V), d(D, V), d(N, D), d(N, D)), axis=(None, None, 0, 0), head=True)
def distillation(w, teacher_w, h, teacher_h):
    temperature = 2.0
    teacher = jax.lax.stop_gradient(jax.nn.softmax(teacher_h @ teacher_w / temperature))
    student = jax.nn.log_softmax(h @ w / temperature)
    return temperature**2 * optax.kl_divergence(student, teacher).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.probs(N, V)), axis=(None, 0, 0))
def distillation_given_probabilities(w, h, teacher):
    return optax.softmax_cross_entropy(h @ w, teacher).mean()


@case(args=lambda d: (d(D, V), d(D, V), d(N, D)), axis=(None, None, 0), head=True)
def jensen_shannon(w, v, h):
    p, q = jax.nn.softmax(h @ w), jax.nn.softmax(h @ v)
    m = jnp.log(0.5 * (p + q))
    return 0.5 * jnp.mean(jnp.sum(p * (jnp.log(p) - m) + q * (jnp.log(q) - m), -1))


@case(args=lambda d: (d(D, V), d(D, V), d(N, D)), axis=(None, None, 0), head=True)
def reverse_kl(w, v, h):
    logp, logq = jax.nn.log_softmax(h @ w), jax.nn.log_softmax(h @ v)
    return jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1).mean()


@case(**TOKENS, head=True, tolerance=1e-4)  # its tangent is what is left of terms that cancel
def multiclass_hinge(w, h, y):
    logits = h @ w
    target = jnp.take_along_axis(logits, y[:, None], -1)
    margins = jnp.maximum(0.0, 1.0 + logits - target)
    return jnp.where(jax.nn.one_hot(y, V) == 1, 0.0, margins).sum(-1).mean()


@case(**TOKENS, head=True)
def crammer_singer(w, h, y):
    logits = h @ w
    hot = jax.nn.one_hot(y, V, dtype=bool)
    best_other = jnp.max(jnp.where(hot, -jnp.inf, logits), axis=-1)
    return jax.nn.relu(1 + best_other - logits[jnp.arange(h.shape[0]), y]).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.mask(N, V)), axis=(None, 0, 0))
def multilabel_bce(w, h, labels):
    return optax.sigmoid_binary_cross_entropy(h @ w, labels.astype(h.dtype)).sum(-1).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.mask(N, V)), axis=(None, 0, 0), head=True)
def multilabel_focal(w, h, labels):
    return optax.sigmoid_focal_loss(h @ w, labels * 1.0, alpha=0.25).mean()


@case(**TOKENS, head=True)
def brier_score(w, h, y):
    return jnp.mean(jnp.sum((jax.nn.softmax(h @ w) - jax.nn.one_hot(y, V)) ** 2, axis=-1))


@case(args=lambda d: (d(D, 1), d(4), d(N, D), d.ids(5, N)), axis=(None, None, 0, 0))
def ordinal_regression(w, cuts, h, y):
    cumulative = jax.nn.sigmoid(jnp.sort(cuts) - h @ w)
    padded = jnp.pad(cumulative, ((0, 0), (1, 1)), constant_values=(0, 1))
    p = jnp.diff(padded, axis=1)
    return -jnp.log(jnp.take_along_axis(p, y[:, None], axis=1) + 1e-3).mean()


@case(**TOKENS, head=True)
def arcface(w, h, y):
    w = w / jnp.linalg.norm(w, axis=0, keepdims=True)
    h = h / jnp.linalg.norm(h, axis=1, keepdims=True)
    cosine = jnp.clip(h @ w, -0.99, 0.99)
    with_margin = jnp.where(jax.nn.one_hot(y, V) > 0, jnp.cos(jnp.arccos(cosine) + 0.3), cosine)
    return optax.softmax_cross_entropy_with_integer_labels(4 * with_margin, y).mean()
