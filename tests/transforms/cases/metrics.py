"""Metrics beside a loss (`has_aux`) and functions whose outputs are of several kinds."""

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logsumexp

from tests.transforms.cases.table import MASKED_TOKENS, TOKENS, D, N, V, case


@case(**MASKED_TOKENS, has_aux=True, head=True)
def aux_of_every_kind(w, h, y, m):
    logits = h @ w
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    aux = {
        "nll": nll,
        "count": m.sum(),
        "tokens": m.size,
        "largest": nll.max(),
        "smallest": logits.min(),
        "all_finite": jnp.isfinite(logits).all(),
        "any_large": (nll > 5).any(),
        "sums": {"z": (logsumexp(logits, -1) * m).sum(), "correct": ((logits.argmax(-1) == y) & m).sum()},
        "mean_logits": logits.mean(0),
    }
    return (nll * m).sum() / m.sum(), aux


@case(**TOKENS, has_aux=True, head=True)
def aux_confusion_matrix(w, h, y):
    logits = h @ w
    confusion = jnp.zeros((V, V), jnp.int32).at[y, logits.argmax(-1)].add(1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), confusion


@case(**TOKENS, has_aux=True, head=True)
def aux_histogram_and_bincount(w, h, y):
    logits = h @ w
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return nll.sum(), (jnp.bincount(logits.argmax(-1), length=V), jnp.bincount(y, weights=nll, length=V))


@case(**TOKENS, has_aux=True, head=True)
def aux_median_and_percentile(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return nll.mean(), {"median": jnp.median(nll), "p90": jnp.percentile(nll, 90), "std": nll.std()}


@case(**TOKENS, has_aux=True, head=True)
def aux_worst_token(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return nll.mean(), {"worst": jnp.argmax(nll), "best": jnp.argmin(nll)}


@case(**TOKENS, has_aux=True, head=True)
def aux_none_and_constants(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return nll.mean(), {"nothing": None, "one": jnp.ones(()), "table": jnp.arange(5), "labels": y}


@case(**MASKED_TOKENS, head=True)
def outputs_of_several_kinds(w, h, y, m):
    logits = h @ w
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return {"per_token": nll, "sum": (nll * m).sum(), "per_class": (jax.nn.softmax(logits) * m[:, None]).sum(0)}


@case(**TOKENS, head=True)
def outputs_float_and_int(w, h, y):
    logits = h @ w
    return logits.max(-1), jnp.argmax(logits, -1), (logits.argmax(-1) == y), (y == 3).sum()


@case(**TOKENS)
def output_logits(w, h, y):
    return h @ w


@case(**TOKENS)
def output_transposed(w, h, y):
    return jax.nn.log_softmax(h @ w).T, (h @ w)[None, :, None]


@case(**TOKENS, head=True)
def output_argument_untouched(w, h, y):
    return h, w, (h @ w).sum(), y


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N)), axis=(None, 0, 0), differentiable=False, head=True)
def output_integer_only(w, h, y):
    return jnp.argmax(h @ w, axis=-1), ((h @ w).argmax(-1) == y).sum()


@case(args=lambda d: (d(D, V), d(N, D)), axis=(None, 0), head=True)
def extremes_over_tokens(w, h):
    logits = h @ w
    return jnp.max(logits, axis=0), jnp.min(logits, axis=0), jnp.max(logits) - jnp.min(logits)


@case(args=lambda d: (d(D, V), d(N, D)), axis=(None, 0), head=True)
def logsumexp_over_tokens(w, h):
    return logsumexp(h @ w, axis=0)


@case(args=lambda d: (d(D), d(N, D)), axis=(None, 0))
def smooth_maximum_of_scores(w, h):
    score = h @ w
    return logsumexp(5 * score) / 5 + score.min()


@case(args=lambda d: (d(D), d(N, D)), axis=(None, 0), has_aux=True)
def products_over_tokens(w, h):
    p = jax.nn.sigmoid(h @ w)
    return jnp.log(p).sum(), (p.prod(), (p > 0.01).all(), (p > 0.99).any(), jnp.count_nonzero(p > 0.5))


@case(**TOKENS, head=True)
def calibration_error_by_bins(w, h, y):
    p = jax.nn.softmax(h @ w)
    confidence, correct = p.max(-1), (p.argmax(-1) == y).astype(p.dtype)
    bins = jnp.clip((jax.lax.stop_gradient(confidence) * 5).astype(jnp.int32), 0, 4)
    gap = jax.ops.segment_sum(confidence - correct, bins, num_segments=5)
    return jnp.sqrt((gap / h.shape[0]) ** 2 + 1e-4).sum()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d.ids(4, N)), axis=(None, 0, 0, 0), head=True)
def mean_per_domain(w, h, y, domain):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    total = jax.ops.segment_sum(nll, domain, num_segments=4)
    count = jax.ops.segment_sum(jnp.ones_like(nll), domain, num_segments=4)
    return (total / jnp.maximum(count, 1)).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d.ids(4, N)), axis=(None, 0, 0, 0), head=True)
def worst_domain(w, h, y, domain):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    hot = jax.nn.one_hot(domain, 4)
    means = (hot * nll[:, None]).sum(0) / (hot.sum(0) + 1e-6)
    return means.max(), means


@case(**TOKENS, head=True)
def hardest_tokens_only(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return jax.lax.top_k(nll, 9)[0].mean()


@case(**TOKENS, head=True)
def trimmed_mean_by_sort(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return jnp.sort(nll)[3:-3].mean()


@case(**TOKENS, head=True)
def above_mean_only(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return jnp.where(nll > jax.lax.stop_gradient(nll.mean()), nll, 0).sum() / nll.size


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N)), axis=(None, 0, 0), head=True)
def discounted_by_position(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return (nll * 0.95 ** jnp.arange(nll.shape[0])).sum()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N)), axis=(None, 0, 0), head=True)
def cumulative_of_losses(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return (jnp.cumsum(nll) / jnp.arange(1, N + 1)).max(), nll[0] + nll[-1]
