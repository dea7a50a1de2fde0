"""Losses that are nonlinear in sums over the tokens: moments, batch statistics, ratios, balance terms."""

import jax
import jax.numpy as jnp
import optax

from tests.transforms.cases.table import MASKED_TOKENS, TOKENS, D, N, V, case

PAIR = {"args": lambda d: (d(D, 5), d(N, D), d(N, D)), "axis": (None, 0, 0)}


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d(D), d(D)), axis=(None, 0, 0, None, None), head=True)
def batch_norm_then_head(w, h, y, scale, bias):
    mean, var = h.mean(0), h.var(0)
    h = scale * (h - mean) / jnp.sqrt(var + 1e-3) + bias
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean()


@case(**TOKENS, head=True)
def batch_norm_of_logits(w, h, y):
    logits = h @ w
    logits = (logits - logits.mean(axis=0)) * jax.lax.rsqrt(logits.var(axis=0) + 1e-3)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@case(**TOKENS, head=True)
def loss_normalised_over_tokens(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return jnp.mean(jnp.tanh((nll - nll.mean()) / (nll.std() + 1e-2)) * nll)


@case(**TOKENS, head=True, oracle=True)
def centred_logits(w, h, y):
    logits = h @ w
    return jnp.mean((logits - logits.mean(0, keepdims=True)) ** 2) / jnp.mean(logits**2)


@case(**TOKENS, head=True)
def dice(w, h, y):
    p, hot = jax.nn.softmax(h @ w), jax.nn.one_hot(y, V)
    return 1 - jnp.mean((2 * (p * hot).sum(0) + 1) / (p.sum(0) + hot.sum(0) + 1))


@case(**TOKENS, head=True)
def tversky_and_soft_f1(w, h, y):
    p, hot = jax.nn.softmax(h @ w), jax.nn.one_hot(y, V)
    tp, fp, fn = (p * hot).sum(0), (p * (1 - hot)).sum(0), ((1 - p) * hot).sum(0)
    return jnp.mean((1 - tp / (tp + 0.3 * fp + 0.7 * fn + 1e-3)) ** 0.75) - jnp.mean(2 * tp / (2 * tp + fp + fn + 1))


@case(**TOKENS, head=True)
def logit_adjustment_by_label_counts(w, h, y):
    prior = jnp.log((jnp.bincount(y, length=V) + 1) / (y.size + V))
    return optax.softmax_cross_entropy_with_integer_labels(h @ w + prior, y).mean()


@case(**TOKENS, head=True)
def class_balanced_weights(w, h, y):
    counts = jnp.zeros(V).at[y].add(1.0)
    weight = (1 / jnp.maximum(counts, 1))[y]
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return (weight * nll).sum() / weight.sum()


@case(args=lambda d: (d(D), d(N, D), d.mask(N)), axis=(None, 0, 0))
def positive_weight_from_batch(w, h, y):
    logits, y = h @ w, y * 1.0
    positive = (1 - y).sum() / jnp.maximum(y.sum(), 1)
    return -jnp.mean(positive * y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits))


@case(**TOKENS, head=True)
def log_of_a_sum(w, h, y):
    return jnp.log(jnp.sum(jnp.square(h @ w))) + jnp.sqrt(jnp.abs(h @ w).mean())


@case(**TOKENS, head=True)
def square_of_a_mean(w, h, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean() ** 2 + (h @ w).mean() ** 2


@case(**MASKED_TOKENS, head=True)
def mean_and_variance_of_loss(w, h, y, m):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    mean = (nll * m).sum() / m.sum()
    return mean + 0.5 * ((nll - mean) ** 2 * m).sum() / m.sum()


@case(**TOKENS, head=True)
def tilted_loss(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return jax.scipy.special.logsumexp(0.7 * nll - jnp.log(nll.shape[0])) / 0.7


@case(**TOKENS, head=True)
def geometric_mean_probability(w, h, y):
    p = jax.nn.softmax(h @ w)[jnp.arange(N), y]
    return jnp.exp(jnp.log(p).mean()) - p.mean()


@case(**TOKENS, head=True)
def diversity_of_mean_prediction(w, h, y):
    p = jax.nn.softmax(h @ w)
    marginal = p.mean(0)
    return (marginal * jnp.log(marginal)).sum() - (p * jnp.log(p)).sum(1).mean()


@case(args=lambda d: (d(D, 5), d(N, D)), axis=(None, 0), head=True)
def router_balance(w, h):
    p = jax.nn.softmax(h @ w)
    chosen = jax.lax.top_k(p, 2)[1]
    fraction = jax.nn.one_hot(chosen, 5).sum(1).mean(0)
    return 5 * jnp.sum(fraction * p.mean(0)) + 1e-1 * jnp.mean(jax.scipy.special.logsumexp(h @ w, -1) ** 2)


@case(args=lambda d: (d(D, 5), d(N, D), d.mask(N)), axis=(None, 0, 0))
def router_importance_variation(w, h, m):
    importance = (jax.nn.softmax(h @ w) * m[:, None]).sum(0)
    return importance.var() / importance.mean() ** 2


@case(args=lambda d: (d(D, 5), d(5, D, 4), d(N, D)), axis=(None, None, 0), head=True)
def mixture_of_experts_dense(router, experts, h):
    p = jax.nn.softmax(h @ router)
    gate, chosen = jax.lax.top_k(p, 2)
    out = jnp.einsum("nd,edf->nef", h, experts)
    out = jnp.take_along_axis(jax.nn.silu(out), chosen[:, :, None], axis=1)
    return jnp.einsum("nkf,nk->nf", out, gate / gate.sum(-1, keepdims=True))


@case(**PAIR)
def covariance(w, x, y):
    x, y = x @ w, jnp.tanh(y @ w)
    return x.T @ y / x.shape[0]


@case(**PAIR)
def barlow_twins(w, x, y):
    x, y = x @ w, y @ w
    x, y = (x - x.mean(0)) / (x.std(0) + 1e-2), (y - y.mean(0)) / (y.std(0) + 1e-2)
    c = x.T @ y / x.shape[0]
    return ((1 - jnp.diag(c)) ** 2).sum() + 0.1 * (c**2).sum()


@case(**PAIR)
def vicreg(w, x, y):
    x, y = x @ w, y @ w
    variance = jax.nn.relu(3 - jnp.sqrt(x.var(0) + 1e-4)).mean()
    centred = x - x.mean(0)
    c = centred.T @ centred / (len(x) - 1)
    off = c - jnp.diag(jnp.diag(c))
    return jnp.mean((x - y) ** 2) + variance + (off**2).sum() / 5


@case(args=lambda d: (d(D, 5), d(N, D)), axis=(None, 0))
def cov_and_determinant(w, h):
    c = jnp.cov(h @ w, rowvar=False)
    return jnp.linalg.slogdet(c + 0.5 * jnp.eye(5))[1]


@case(**PAIR)
def uniformity_of_centroids(w, x, y):
    c = jnp.stack([(x @ w).mean(0), (y @ w).mean(0)])
    return jnp.linalg.norm(c[0] - c[1]) + jnp.vdot(c[0], c[1])


@case(args=lambda d: (d(D), d(N, D), d(N)), axis=(None, 0, 0))
def pearson_correlation(w, h, target):
    p = h @ w
    p, t = p - p.mean(), target - target.mean()
    return 1 - (p * t).sum() / jnp.sqrt((p**2).sum() * (t**2).sum())


@case(args=lambda d: (d(D), d(N, D), d(N)), axis=(None, 0, 0), special=False)
def r_squared(w, h, target):
    p = h @ w
    return 1 - jnp.sum((target - p) ** 2) / jnp.sum((target - target.mean()) ** 2)


@case(args=lambda d: (d(D), d(N, D), d(N)), axis=(None, 0, 0))
def concordance_correlation(w, h, target):
    p = jnp.tanh(h @ w)
    cov = ((p - p.mean()) * (target - target.mean())).mean()
    return 1 - 2 * cov / (p.var() + target.var() + (p.mean() - target.mean()) ** 2)


@case(args=lambda d: (d(D, 3), d(N, D), d(N, 3)), axis=(None, 0, 0))
def least_squares_by_normal_equations(w, h, target):
    x = jnp.tanh(h @ w)
    beta = jnp.linalg.solve(x.T @ x + jnp.eye(3), x.T @ target)
    return jnp.mean((target - x @ beta) ** 2)


@case(args=lambda d: (d(5, D), d(N, D), d.mask(N)), axis=(None, 0, 0), head=True)
def soft_kmeans_step(centres, h, m):
    a = jax.nn.softmax(-((h[:, None] - centres) ** 2).sum(-1)) * m[:, None]
    return (a.T @ h) / (a.sum(0)[:, None] + 1e-3)


@case(args=lambda d: (d(D, 5), d(N, D)), axis=(None, 0))
def global_norm_scaling(w, h):
    x = h @ w
    return x / jnp.linalg.norm(x)


@case(args=lambda d: (d(D, 5), d(N, D)), axis=(None, 0), bitwise=True)
def quantise_by_absolute_maximum(w, h):
    x = h @ w
    scale = jnp.abs(x).max(axis=0)
    return jnp.sum((x / scale) ** 2) + scale.sum()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N)), axis=(None, 0, 0), head=True)
def weight_decay_added(w, h, y):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ w, y).sum() / len(y)
    return nll + 0.1 * (w**2).sum() + 0.01 * jnp.linalg.norm(w)
