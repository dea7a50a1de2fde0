"""Functions that couple tokens with one another: exact, or refused for a reason that the case names."""

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logsumexp

from tests.transforms.cases.table import TOKENS, D, N, V, case


def _nll(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


@case(**TOKENS, refused="runs along the cut axis")
def sort_of_logits_along_tokens(w, h, y):
    return (jnp.sort(h @ w, axis=0) * jnp.arange(N)[:, None]).sum()


@case(**TOKENS, refused="runs along the cut axis")
def median_of_logits_over_tokens(w, h, y):
    return jnp.median(h @ w, axis=0)


@case(**TOKENS, refused="runs along the cut axis")
def argsort_along_tokens(w, h, y):
    logits = h @ w
    order = jnp.argsort(logits, axis=0)
    return (jnp.take_along_axis(logits, order, axis=0)[:3] ** 2).sum()


@case(**TOKENS, refused="transforms the cut axis")
def fourier_along_tokens(w, h, y):
    return jnp.abs(jnp.fft.fft(h @ w, axis=0)).sum()


@case(
    args=lambda d: (d(D, V), d(N, D), d.ids(N, N)),
    axis=(None, 0, 0),
    refused="looks up arbitrary places along the cut axis",
)
def permutation_of_logits(w, h, permutation):
    return (jnp.tanh(h @ w)[permutation] * jnp.arange(N)[:, None]).sum()


@case(args=lambda d: (d(N, 2),), axis=0, refused="takes whole matrices along the cut axis")
def inverse_of_the_gram_matrix(h):
    return jnp.linalg.slogdet(h @ h.T + 5 * jnp.eye(N))[1]


@case(**TOKENS)
def softmax_over_tokens(w, h, y):
    return jax.nn.softmax(h @ w, axis=0).T @ h


@case(**TOKENS)
def softmax_over_tokens_per_token_output(w, h, y):
    return jnp.max(jax.nn.softmax(h @ w, axis=0), axis=-1)


@case(**TOKENS)
def attention_pooling_over_tokens(w, h, y):
    p = jax.nn.softmax(jnp.tanh(h @ w) @ jnp.ones(V), axis=0)
    return p @ h


@case(**TOKENS)
def cumulative_sum_along_tokens(w, h, y):
    return (jnp.cumsum(jax.nn.softmax(h @ w), axis=0) ** 2).mean()


@case(**TOKENS)
def cumulative_maximum_along_tokens(w, h, y):
    return jax.lax.cummax(h @ w, axis=0).sum()


@case(args=lambda d: (d(N, D), d(N, D)), axis=0)
def info_nce_all_pairs(x, y):
    x, y = x / jnp.linalg.norm(x, axis=1, keepdims=True), y / jnp.linalg.norm(y, axis=1, keepdims=True)
    logits = x @ y.T / 0.3
    return _nll(logits, jnp.arange(N)).mean() + _nll(logits.T, jnp.arange(N)).mean()


@case(args=lambda d: (d(D, 4), d(N, D)), axis=(None, 0))
def all_pairs_distances(w, h):
    z = h @ w
    return jnp.exp(-((z[:, None] - z[None]) ** 2).sum(-1)).mean()


@case(args=lambda d: (d(N, 40),), axis=0)
def gram_matrix_smaller_than_the_input(h):
    return jnp.tanh(h @ h.T / 40)


@case(args=lambda d: (d(D, 5), d(N, D)), axis=(None, 0))
def self_attention_over_the_cut_axis(w, x):
    q = x @ w
    return jax.nn.softmax(q @ q.T, axis=-1) @ x


@case(args=lambda d: (d(D, V), d(3, 11, D), d.ids(V, 3, 11)), axis=(None, 1, 1))
def next_token_shift(w, h, y):
    logits = h @ w
    return _nll(logits[:, :-1], y[:, 1:]).mean()


@case(args=lambda d: (d(D, V), d(9, 4, D), d.ids(V, 9, 4)), axis=(None, 0, 0), head=True)
def next_token_shift_batch_cut(w, h, y):
    logits = h @ w
    return _nll(logits[:, :-1], y[:, 1:]).mean()


@case(**TOKENS)
def roll_of_labels(w, h, y):
    return _nll(h @ w, jnp.roll(y, -1)).mean()


@case(**TOKENS)
def flip_along_tokens(w, h, y):
    return (jnp.flip(h @ w, axis=0) * jnp.arange(N)[:, None]).sum(1)


@case(**TOKENS)
def every_second_token(w, h, y):
    return _nll(h[::2] @ w, y[::2]).mean()


@case(**TOKENS)
def first_token_against_the_rest(w, h, y):
    logits = h @ w
    return ((logits[1:] - logits[:1]) ** 2).mean()


@case(**TOKENS)
def differences_of_neighbours(w, h, y):
    return jnp.abs(jnp.diff(h @ w, axis=0)).mean()


@case(**TOKENS)
def concatenate_with_a_start_token(w, h, y):
    x = jnp.concatenate([jnp.zeros((1, D)), h[:-1]], axis=0)
    return _nll(x @ w, y).mean()


@case(**TOKENS)
def pad_along_tokens(w, h, y):
    return jnp.pad(jax.nn.log_softmax(h @ w), ((0, 2), (0, 0)))


@case(args=lambda d: (d(D, V), d(N, D), d.ids(N, N)), axis=(None, 0, 0))
def gather_of_hidden_by_token(w, h, source):
    return logsumexp(h[source] @ w, -1).mean()


@case(args=lambda d: (d(D, 5), d(N, D), d.ids(4, N)), axis=(None, 0, 0))
def pooled_segments_then_gather(w, h, segment):
    z = jnp.tanh(h @ w)
    pooled = jax.ops.segment_max(z, segment, num_segments=4)
    return ((z - pooled[segment]) ** 2).mean()


@case(args=lambda d: (d(D, 5), d(N, D)), axis=(None, 0))
def sinkhorn_codes(w, h):
    scores = h @ w
    q = jnp.exp(jax.lax.stop_gradient(scores) / 2)
    for _ in range(2):
        q = q / q.sum(0, keepdims=True)
        q = q / q.sum(1, keepdims=True)
    return -(q * jax.nn.log_softmax(scores)).sum(1).mean()


@case(args=lambda d: (d(D), d(N, D), d(N)), axis=(None, 0, 0))
def exponential_moving_average_by_scan(w, h, start):
    def step(carry, x):
        carry = 0.9 * carry + x
        return carry, carry

    return jax.lax.scan(step, 0.0, h @ w)[1] * start


@case(args=lambda d: (d(D), d(N, D)), axis=(None, 0))
def product_of_probabilities(w, h):
    return jnp.prod(1 - 0.3 * jax.nn.sigmoid(h @ w))


@case(args=lambda d: (d(D), d(N, D)), axis=(None, 0))
def map_over_tokens(w, h):
    return jax.lax.map(lambda x: jnp.tanh(x @ w), h)


@case(args=lambda d: (d(D, 3), d(N, D)), axis=(None, 0))
def singular_values(w, h):
    return jnp.linalg.svd(h @ w, compute_uv=False)


@case(args=lambda d: (d(N, 5), d(2)), axis=(0, None), special=False)
def convolution_along_tokens(h, kernel):
    return jnp.convolve(h.sum(1), kernel, mode="same")


@case(
    args=lambda d: (d(D), d(N, D), d.mask(N)),
    axis=(None, 0, 0),
)
def area_under_curve_all_pairs(w, h, y):
    s = h @ w
    pair = y[:, None] & ~y[None]
    return jnp.where(pair, jax.nn.sigmoid(s[None] - s[:, None]), 0.0).sum() / pair.sum()
