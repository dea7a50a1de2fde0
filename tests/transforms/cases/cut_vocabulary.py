"""Losses cut over the vocabulary, or over the places that are looked up: sums of exponentials along the cut axis."""

import jax
import jax.numpy as jnp
import optax
from jax.nn import log_softmax, logsumexp, softmax

from tests.transforms.cases.table import TOKENS, D, N, V, case

HEAD = TOKENS | {"axis": (1, None, None), "head": True}  # of (w [D V], h [N D], y [N])
B, S = 6, 3
PAIRS = {
    "args": lambda d: (d(D, V), d(B, 2, S, D), d.ids(V, B, 2, S), d(B, 2, scale=0.1), d.mask(B, 2, S)),
    "axis": (1, None, None, None, None),
    "head": True,
}
TEACHER = {"args": lambda d: (d(D, V), d(4, V), d(N, D), d(N, 4)), "axis": (1, 1, None, None), "head": True}


def _logp(w, h, y):
    return jnp.take_along_axis(log_softmax(h @ w), y[..., None], -1)[..., 0]


@case(**PAIRS)
def preference_dpo_cut(w, h, y, reference, m):
    total = (_logp(w, h, y) * m).sum(-1) - reference
    return -jax.nn.log_sigmoid(0.3 * (total[:, 0] - total[:, 1])).mean()


@case(**PAIRS, has_aux=True)
def preference_orpo_cut(w, h, y, reference, m):
    mean = (_logp(w, h, y) * m).sum(-1) / jnp.maximum(m.sum(-1), 1) - 0.1
    odds = mean - jnp.log1p(-jnp.exp(mean))
    loss = -mean[:, 0].mean() - 0.1 * jax.nn.log_sigmoid(odds[:, 0] - odds[:, 1]).mean()
    return loss, {"accuracy": (mean[:, 0] > mean[:, 1]).mean()}


@case(**TEACHER)
def distillation_forward_cut(w, teacher, h, ht):
    p = softmax(jax.lax.stop_gradient(ht @ teacher) / 2)
    return 4 * (p * (jnp.log(p) - log_softmax(h @ w / 2))).sum(-1).mean()


@case(**TEACHER)
def distillation_reverse_cut(w, teacher, h, ht):
    q = log_softmax(h @ w)
    return (jnp.exp(q) * (q - log_softmax(ht @ teacher))).sum(-1).mean()


@case(**TEACHER)
def distillation_jensen_shannon_cut(w, teacher, h, ht):
    p, q = softmax(h @ w), softmax(ht @ teacher)
    middle = jnp.log((p + q) / 2)
    return ((p * (jnp.log(p) - middle)).sum(-1) + (q * (jnp.log(q) - middle)).sum(-1)).mean() / 2


@case(**HEAD)
def cross_entropy_of_each_cut(w, h, y):
    return jax.vmap(lambda x, label: -log_softmax(x @ w)[label])(h, y).mean()


@case(**HEAD)
def focal_cut(w, h, y):
    logp = _logp(w, h, y)
    return -((1 - jnp.exp(logp)) ** 2 * logp).mean()


@case(**HEAD)
def smoothed_labels_cut(w, h, y):
    return optax.softmax_cross_entropy(h @ w, optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)).mean()


@case(**HEAD)
def confidence_penalty_cut(w, h, y):
    logp = log_softmax(h @ w)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return -jnp.take_along_axis(logp, y[:, None], 1).mean() - 0.1 * jnp.clip(entropy, 0.5, 1.5).mean()


@case(**HEAD)
def hard_examples_cut(w, h, y):
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ w, y)
    return jax.lax.top_k(losses, 5)[0].mean() + (losses / (1.0 + jnp.argsort(jnp.argsort(-losses)))).mean()


@case(**HEAD)
def learned_denominator_cut(w, h, y):
    gate = jax.nn.softplus(h[:, 0])
    return (optax.softmax_cross_entropy_with_integer_labels(h @ w, y) * gate).sum() / gate.sum()


@case(**HEAD)
def group_relative_cut(w, h, y):
    logp = _logp(w, h, y)
    reward = jnp.cos(jnp.arange(1.0, N + 1)).reshape(2, -1)
    advantage = ((reward - reward.mean(1, keepdims=True)) / reward.std(1, keepdims=True)).reshape(-1)
    ratio = jnp.exp(logp - jax.lax.stop_gradient(logp) + 0.1 * jnp.sin(jnp.arange(1.0 * N)))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.9, 1.1) * advantage).mean()


@case(args=lambda d: (d(N, V), d.ids(V, N)), axis=(1, None))
def margin_cut(z, y):
    return (jax.nn.relu(1 + z - jnp.take_along_axis(z, y[:, None], 1)).sum(1) - 1).mean()


@case(args=lambda d: (d(N, D), d(N, D)), axis=(0, 0), head=True)
def contrastive_both_ways_cut(x, y):
    x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
    scores = 3 * x @ y.T
    right = jnp.diagonal(scores)
    return (logsumexp(scores, 0) - right).mean() + (logsumexp(scores, 1) - right).mean()


@case(args=lambda d: (d(N, D), d(N, D)), axis=(0, 0), head=True)
def contrastive_joined_views(x, y):  # the join is as large as both views together
    z = jnp.concatenate([x, y])
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    scores = jnp.where(jnp.eye(2 * N, dtype=bool), -jnp.inf, 2 * z @ z.T)
    other = jnp.roll(jnp.arange(2 * N), N)
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), other[:, None], 1).mean()


@case(args=lambda d: (d(N, D), d(N)), axis=0, head=True)
def proportional_hazards(x, time):
    risk = x.sum(1)
    later = time[None, :] >= time[:, None]
    return (logsumexp(jnp.where(later, risk[None], -jnp.inf), 1) - risk).mean()
