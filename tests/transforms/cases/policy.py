"""Losses of reinforcement learning and preference learning over tokens and sequences."""

import jax
import jax.numpy as jnp
import optax

from tests.transforms.cases.table import D, V, case

B, S = 10, 3  # cut along B: tiles of 3, 3, 3, 1 for n = 4 and five of 2 for n = 7
N = 29
SEQUENCES = {
    "args": lambda d: (d(D, V, scale=0.6), d(B, S, D), d.ids(V, B, S), d.mask(B, S)),
    "axis": (None, 0, 0, 0),
}


def _logp(w, h, y):
    return jnp.take_along_axis(jax.nn.log_softmax(h @ w), y[..., None], -1)[..., 0]


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d(N, scale=0.2) - 2.5, d(N)), axis=(None, 0, 0, 0, 0), head=True)
def ppo_clipped(w, h, action, old_logp, advantage):
    ratio = jnp.exp(_logp(w, h, action) - old_logp)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()


@case(
    args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d(N, scale=0.2) - 2.5, d(N)),
    axis=(None, 0, 0, 0, 0),
    head=True,
    has_aux=True,
)
def ppo_with_normalised_advantage_and_entropy(w, h, action, old_logp, advantage):
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    logp = jax.nn.log_softmax(h @ w)
    chosen = logp[jnp.arange(N), action]
    ratio = jnp.exp(chosen - old_logp)
    entropy = -(jnp.exp(logp) * logp).sum(-1).mean()
    clipped = jnp.abs(ratio - 1) > 0.2
    return -(ratio * advantage).mean() - 0.01 * entropy, {"entropy": entropy, "clipped": clipped.mean()}


@case(args=lambda d: (d(D), d(N, D), d(N), d(N)), axis=(None, 0, 0, 0))
def clipped_value_loss(w, h, old_value, returns):
    value = h @ w
    clipped = old_value + jnp.clip(value - old_value, -0.5, 0.5)
    return 0.5 * jnp.maximum((value - returns) ** 2, (clipped - returns) ** 2).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d(N)), axis=(None, 0, 0, 0), head=True)
def reinforce_with_mean_baseline(w, h, action, reward):
    baseline = jax.lax.stop_gradient(reward.mean())
    return -(_logp(w, h, action) * (reward - baseline)).mean()


@case(args=lambda d: (d(D, V), d(D, V), d(N, D), d.ids(V, N)), axis=(None, None, 0, 0), head=True)
def low_variance_kl_to_reference(w, ref, h, action):
    log_ratio = _logp(jax.lax.stop_gradient(ref), h, action) - _logp(w, h, action)
    return (jnp.exp(log_ratio) - log_ratio - 1).mean()


@case(
    args=lambda d: (d(D, V), d(12, S, D), d.ids(V, 12, S), d(12)),
    axis=(None, 0, 0, 0),
    head=True,
)
def group_relative_by_reshape(w, h, y, reward):
    grouped = reward.reshape(-1, 3)
    advantage = ((grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 0.1)).reshape(-1)
    return -(jnp.exp(_logp(w, h, y)) * advantage[:, None]).mean()


@case(
    args=lambda d: (d(D, V), d(B, S, D), d.ids(V, B, S), d(B), d.ids(3, B)),
    axis=(None, 0, 0, 0, 0),
    head=True,
)
def group_relative_by_segments(w, h, y, reward, group):
    count = jax.ops.segment_sum(jnp.ones(B, reward.dtype), group, num_segments=3)
    mean = jax.ops.segment_sum(reward, group, num_segments=3) / jnp.maximum(count, 1)
    return -(jnp.exp(_logp(w, h, y)) * (reward - mean[group])[:, None]).mean()


@case(
    args=lambda d: (d(D, V), d(9, 4, S, D), d.ids(V, 9, 4, S), d(9, 4), d.mask(9, 4, S)),
    axis=(None, 0, 0, 0, 0),
    head=True,
)
def group_relative_groups_along_second_dim(w, h, y, reward, m):
    advantage = (reward - reward.mean(-1, keepdims=True)) / (reward.std(-1, keepdims=True) + 1e-2)
    logp = _logp(w, h, y)
    ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
    return -((ratio * advantage[..., None] * m).sum(-1) / jnp.maximum(m.sum(-1), 1)).mean()


@case(
    args=lambda d: (
        d(D, V, scale=0.6),
        d(B, S, D),
        d(B, S, D),
        d.ids(V, B, S),
        d.ids(V, B, S),
        d(B, scale=0.1),
        d.mask(B, S),
    ),
    axis=(None, 0, 0, 0, 0, 0, 0),
    head=True,
    has_aux=True,
)
def dpo_chosen_and_rejected_arguments(w, h_chosen, h_rejected, chosen, rejected, reference, m):
    good, bad = (_logp(w, h_chosen, chosen) * m).sum(-1), (_logp(w, h_rejected, rejected) * m).sum(-1)
    margin = 0.5 * (good - bad - reference)
    return -jax.nn.log_sigmoid(margin).mean(), {"accuracy": (margin > 0).mean(), "margin": margin}


@case(
    args=lambda d: (d(D, V, scale=0.6), d(B, 2, S, D), d.ids(V, B, 2, S)),
    axis=(None, 0, 0),
    head=True,
)
def dpo_pairs_along_second_dim(w, h, y):
    total = _logp(w, h, y).sum(-1)
    return -jax.nn.log_sigmoid(0.3 * (total[:, 0] - total[:, 1])).mean()


@case(**SEQUENCES, head=True)
def mean_of_sequence_means(w, h, y, m):
    nll = -_logp(w, h, y)
    return jnp.mean((nll * m).sum(1) / jnp.maximum(m.sum(1), 1))


@case(**SEQUENCES, head=True)
def sequence_log_probability(w, h, y, m):
    return jnp.sum(_logp(w, h, y), axis=-1, where=m)


@case(**SEQUENCES, head=True)
def kto_with_batch_kl(w, h, y, m):
    total = (_logp(w, h, y) * m).sum(-1)
    kl = jax.lax.stop_gradient(jax.nn.relu(total.mean()))
    desired = jnp.arange(B) % 2 == 0
    return 1 - jnp.where(desired, jax.nn.sigmoid(total + 6 - kl), jax.nn.sigmoid(kl - total - 6)).mean()


@case(args=lambda d: (d(D), d(B, 2, D)), axis=(None, 0))
def reward_model_bradley_terry(w, h):
    r = h @ w
    return -jax.nn.log_sigmoid(r[:, 0] - r[:, 1]).mean() + 0.01 * (r.sum(1) ** 2).mean()


@case(args=lambda d: (d(D, 5), d(N, D), d.ids(5, N), d(N), d(N, 5)), axis=(None, 0, 0, 0, 0))
def q_learning_given_targets(w, h, action, reward, next_q):
    q = (h @ w)[jnp.arange(N), action]
    target = jax.lax.stop_gradient(reward + 0.9 * next_q.max(-1))
    return optax.huber_loss(q, target).mean()
