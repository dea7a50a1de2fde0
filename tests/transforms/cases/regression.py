"""Regression and density heads, contrastive losses against fixed prototypes."""

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import gammaln, logsumexp

from tests.transforms.cases.table import D, N, V, case

ONE = {"args": lambda d: (d(D, scale=0.5), d(N, D), d(N)), "axis": (None, 0, 0)}
MANY = {"args": lambda d: (d(D, 5), d(N, D), d(N, 5)), "axis": (None, 0, 0)}


@case(**MANY)
def squared_error(w, h, target):
    return jnp.mean((h @ w - target) ** 2)


@case(**MANY)
def huber(w, h, target):
    return optax.huber_loss(h @ w, target, delta=0.7).sum(-1).mean()


@case(**MANY)
def log_cosh(w, h, target):
    return optax.log_cosh(h @ w, target).mean()


@case(**MANY)
def cosine_distance(w, h, target):
    return optax.cosine_distance(h @ w, target, epsilon=1e-6).mean()


@case(**MANY)
def cosine_by_norms(w, h, target):
    p = h @ w
    return -jnp.mean((p * target).sum(-1) / (jnp.linalg.norm(p, axis=-1) * jnp.linalg.norm(target, axis=-1)))


@case(**MANY)
def root_mean_square_error(w, h, target):
    return jnp.sqrt(jnp.mean((h @ w - target) ** 2))


@case(args=lambda d: (d(D, 2, scale=0.5), d(N, D), d(N)), axis=(None, 0, 0))
def gaussian_with_variance_head(w, h, target):
    mean, log_scale = jnp.split(h @ w, 2, axis=-1)
    z = (target[:, None] - mean) * jnp.exp(-log_scale)
    return jnp.mean(0.5 * z**2 + log_scale)


@case(args=lambda d: (d(D, 12, scale=0.5), d(N, D), d(N)), axis=(None, 0, 0), head=True)
def mixture_density(w, h, target):
    logit, mean, log_scale = jnp.moveaxis((h @ w).reshape(-1, 4, 3), -1, 0)
    logp = -0.5 * ((target[:, None] - mean) * jnp.exp(-log_scale)) ** 2 - log_scale
    return -logsumexp(jax.nn.log_softmax(logit) + logp, axis=-1).mean()


@case(args=lambda d: (d(D, scale=0.5), d(N, D), d.ids(7, N)), axis=(None, 0, 0))
def poisson(w, h, count):
    log_rate = h @ w
    return jnp.mean(jnp.exp(log_rate) - count * log_rate + gammaln(count + 1.0))


@case(args=lambda d: (d(D, scale=0.5), d(N, D), d.mask(N)), axis=(None, 0, 0))
def bernoulli(w, h, outcome):
    logits = h @ w
    return -jnp.where(outcome, jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)).mean()


@case(args=lambda d: (d(D, 2, scale=0.4), d(N, D), d.ids(7, N)), axis=(None, 0, 0))
def negative_binomial(w, h, count):
    p = h @ w
    r, logits = jax.nn.softplus(p[:, 0]) + 0.5, p[:, 1]
    logp = gammaln(count + r) - gammaln(r) - gammaln(count + 1.0)
    return -jnp.mean(logp + r * jax.nn.log_sigmoid(-logits) + count * jax.nn.log_sigmoid(logits))


@case(**ONE)
def student_t(w, h, target):
    return jnp.mean(jnp.log1p((h @ w - target) ** 2 / 3.0))


@case(args=lambda d: (d(D, 3), d(N, D), d(N)), axis=(None, 0, 0))
def quantile_pinball(w, h, target):
    q = jnp.array([0.1, 0.5, 0.9])
    error = target[:, None] - h @ w
    return jnp.maximum(q * error, (q - 1) * error).sum(-1).mean()


@case(args=lambda d: (d(D, 9), d(N, D), d(N)), axis=(None, 0, 0), head=True)
def two_hot_value(w, h, target):
    centres = jnp.linspace(-3, 3, 9)
    label = jax.nn.relu(1 - jnp.abs(target[:, None] - centres) / 0.75)
    return optax.safe_softmax_cross_entropy(h @ w, label).mean()


@case(args=lambda d: (d(D, 9), d(N, D)), axis=(None, 0), head=True)
def expected_value_of_bins(w, h):
    return jax.nn.softmax(h @ w) @ jnp.linspace(-3, 3, 9)


@case(args=lambda d: (d(V, 5), d(D, 5), d(N, D), d.ids(V, N)), axis=(None, None, 0, 0), head=True)
def contrastive_against_prototypes(prototypes, w, h, y):
    z = h @ w
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    p = prototypes / jnp.linalg.norm(prototypes, axis=-1, keepdims=True)
    return optax.softmax_cross_entropy_with_integer_labels(z @ p.T / 0.2, y).mean()


@case(args=lambda d: (d(D, 5), d(N, D), d(N, D), d(N, D)), axis=(None, 0, 0, 0))
def triplet(w, anchor, positive, negative):
    a, p, n = anchor @ w, positive @ w, negative @ w
    return jax.nn.relu(((a - p) ** 2).sum(-1) - ((a - n) ** 2).sum(-1) + 5).mean()


@case(args=lambda d: (d(D, 5), d(N, D), d(N, D), d.ids(2, N)), axis=(None, 0, 0, 0))
def siamese_margin(w, a, b, same):
    distance = jnp.sqrt((((a - b) @ w) ** 2).sum(-1) + 1e-3)
    return jnp.mean(same * distance**2 + (1 - same) * jnp.maximum(4 - distance, 0) ** 2)


@case(args=lambda d: (d(V, D), d(N, D)), axis=(None, 0), head=True)
def nearest_codebook_straight_through(codebook, h):
    distance = ((h[:, None, :] - codebook[None]) ** 2).sum(-1)
    q = codebook[jnp.argmin(distance, axis=-1)]
    commitment = jnp.mean((h - jax.lax.stop_gradient(q)) ** 2) + jnp.mean((jax.lax.stop_gradient(h) - q) ** 2)
    return commitment + jnp.mean((h + jax.lax.stop_gradient(q - h)) ** 3)


@case(args=lambda d: (d(V, D), d(N, D)), axis=(None, 0), head=True)
def kernel_density(centres, h):
    squared = (h**2).sum(-1)[:, None] - 2 * h @ centres.T + (centres**2).sum(-1)
    return -logsumexp(-0.5 * squared, axis=-1).mean()


@case(args=lambda d: (d(D, V, scale=0.5), d(V, D, scale=0.5), d(N, D)), axis=(None, None, 0), head=True)
def sparse_autoencoder(encode, decode, h):
    code = jax.nn.relu(h @ encode)
    return jnp.mean((code @ decode - h) ** 2) + 1e-2 * jnp.abs(code).sum(-1).mean()


@case(args=lambda d: (d(D, V, scale=0.5), d(V, D, scale=0.5), d(N, D)), axis=(None, None, 0), head=True)
def top_k_autoencoder(encode, decode, h):
    pre = h @ encode
    value, index = jax.lax.top_k(pre, 3)
    code = jnp.zeros_like(pre).at[jnp.arange(h.shape[0])[:, None], index].set(value)
    return jnp.mean((code @ decode - h) ** 2)


@case(args=lambda d: (d(D, 6, scale=0.5), d(3, D), d(N, D), d(N, 3)), axis=(None, None, 0, 0))
def variational_with_given_noise(encode, decode, h, noise):
    stats = h @ encode
    mean, log_var = stats[:, :3], stats[:, 3:]
    z = mean + jnp.exp(0.5 * log_var) * noise
    kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), axis=-1)
    return jnp.mean(((z @ decode - h) ** 2).sum(-1) + kl)


@case(args=lambda d: (d(D, D), d(N, D), d(N, D), d.uniform(N)), axis=(None, 0, 0, 0))
def flow_matching_given_times(w, x, noise, t):
    xt = (1 - t[:, None]) * noise + t[:, None] * x
    return jnp.mean((jnp.tanh(xt @ w) - (x - noise)) ** 2)


@case(args=lambda d: (d(D, 4, scale=0.5), d(N, D)), axis=(None, 0), head=True)
def gaussian_kernel_to_fixed_points(w, h):
    z = h @ w
    grid = jnp.stack(jnp.meshgrid(jnp.arange(2.0), jnp.arange(2.0)), -1).reshape(-1, 2)
    return jnp.exp(-((z[:, None, :2] - grid) ** 2).sum(-1)).mean(0)
