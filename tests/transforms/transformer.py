"""A small transformer in plain jnp, scanned and checkpointed, and its training loss.

Dimension key: `B` batch, `S` sequence, `E` embed, `V` vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYERS, HEADS = 2, 2


def parameters(E=16, V=32):
    """The layers' weights, stacked, and the table of the vocabulary."""
    rng = np.random.default_rng(0)
    names = {"q": (E, E), "k": (E, E), "v": (E, E), "o": (E, E), "up": (E, 2 * E), "down": (2 * E, E)}
    layers = {k: jnp.asarray(rng.normal(size=(LAYERS, *s)) * s[0] ** -0.5, jnp.float32) for k, s in names.items()}
    return layers, jnp.asarray(0.5 * rng.normal(size=(V, E)), jnp.float32)


def draw_tokens(B, S, V=32):
    """Tokens and labels."""
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32) for _ in range(2))


def normalise(x):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rotate(x):
    angles = jnp.arange(x.shape[1])[:, None, None] / 100 ** jnp.linspace(0.0, 1.0, x.shape[-1] // 2, dtype=x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def block(x, w):
    """One layer: causal attention with rotary positions, and a gated MLP."""
    h = normalise(x)
    q, k, v = ((h @ w[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    scores = jnp.einsum("bshd,bthd->bhst", rotate(q), rotate(k)) / 2
    places = jnp.arange(x.shape[1])
    weights = jax.nn.softmax(jnp.where(places[:, None] >= places, scores, -1e30), -1)
    x = x + jnp.einsum("bhst,bthd->bshd", weights, v).reshape(x.shape) @ w["o"]
    return x + jax.nn.gelu(normalise(x) @ w["up"]) @ w["down"]


def training_loss(layers, table, tokens, labels, mask):
    """The mean over all tokens that `mask` keeps."""
    x, _ = lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), table[tokens], layers)
    logits = normalise(x) @ table.T
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (nll * mask).sum() / mask.sum()
