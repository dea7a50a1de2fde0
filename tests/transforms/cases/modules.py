"""Equinox modules, multi-layer blocks and pytrees of arguments."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.transforms.cases.table import D, N, V, case

KEY = jax.random.key(7)
NETWORK = [eqx.nn.LayerNorm(D), eqx.nn.Linear(D, 5, key=KEY), eqx.nn.Lambda(jax.nn.silu), eqx.nn.Linear(5, V, key=KEY)]


def _nll(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


class _Head(eqx.Module):
    scale: jax.Array
    linear: eqx.nn.Linear
    eps: float = eqx.field(static=True)

    def __call__(self, x):
        x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + self.eps) * (1 + self.scale)
        return jax.vmap(self.linear)(x)


def _module_args(make):
    return lambda d: (make(), d(N, D), d.ids(V, N))


@case(args=_module_args(lambda: eqx.nn.Linear(D, V, key=KEY)), axis=(None, 0, 0), head=True)
def equinox_linear(linear, h, y):
    return _nll(jax.vmap(linear)(h), y).mean()


@case(args=_module_args(lambda: eqx.nn.Linear(D, V, key=KEY)), axis=0, head=True)
def equinox_linear_bare_axis(linear, h, y):
    return _nll(jax.vmap(linear)(h), y).mean()


@case(args=_module_args(lambda: eqx.nn.MLP(D, V, 9, 2, jax.nn.gelu, key=KEY)), axis=(None, 0, 0), head=True)
def equinox_mlp(mlp, h, y):
    return _nll(jax.vmap(mlp)(h), y).mean()


@case(
    args=_module_args(lambda: _Head(jnp.full(D, 0.3), eqx.nn.Linear(D, V, key=KEY), 1e-5)), axis=(None, 0, 0), head=True
)
def module_with_norm_and_static_field(head, h, y):
    return _nll(head(h), y).sum() / y.shape[0]


@case(
    args=_module_args(lambda: eqx.nn.Sequential(NETWORK)),
    axis=(None, 0, 0),
    head=True,
)
def equinox_sequential(net, h, y):
    return jax.vmap(lambda x, y: _nll(net(x), y))(h, y).mean()


@case(
    args=lambda d: (eqx.nn.Embedding(V, D, key=KEY), d.ids(V, N), d.ids(V, N)),
    axis=(None, 0, 0),
    head=True,
)
def equinox_embedding_tied(embedding, x, y):
    h = jax.vmap(embedding)(x)
    return _nll(h @ embedding.weight.T, y).mean()


@case(
    args=lambda d: ({"w": d(D, V), "b": d(V), "step": jnp.asarray(3, jnp.int32)}, {"h": d(N, D), "y": d.ids(V, N)}),
    axis=(None, 0),
    head=True,
)
def dict_arguments(params, batch):
    return _nll(batch["h"] @ params["w"] + params["b"], batch["y"]).mean()


@case(
    args=lambda d: ((d(D, V), d(N, D)), [d.ids(V, N), {"m": d.mask(N), "temperature": d.uniform(1)}]),
    axis=((None, 0), [0, {"m": 0, "temperature": None}]),
    head=True,
)
def nested_prefix(first, second):
    (w, h), (y, rest) = first, second
    nll = _nll(h @ w / rest["temperature"], y)
    return jnp.sum(nll * rest["m"]) / rest["m"].sum()


@case(
    args=lambda d: (
        [(d(D, 9, scale=0.4), d(9)), (d(9, 9, scale=0.4), d(9)), (d(9, V, scale=0.4), d(V))],
        d(N, D),
        d.ids(V, N),
    ),
    axis=(None, 0, 0),
    head=True,
)
def multi_layer_perceptron(layers, h, y):
    *body, (w, b) = layers
    for a, c in body:
        h = jnp.tanh(h @ a + c)
    return _nll(h @ w + b, y).mean()


@case(
    args=lambda d: (d(D), d(D, 19), d(D, 19), d(19, D, scale=0.3), d(N, D)), axis=(None, None, None, None, 0), head=True
)
def rms_norm_gated_mlp(scale, gate, up, down, x):
    var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    z = x * jax.lax.rsqrt(var + 1e-6) * (1 + scale)
    return x + (jax.nn.gelu(z @ gate, approximate=True) * (z @ up)) @ down


@case(args=lambda d: (d(D), d(D), d(D, V), d(N, D), d.ids(V, N)), axis=(None, None, None, 0, 0), head=True)
def layer_norm_before_head(scale, bias, w, h, y):
    h = jax.nn.standardize(h, axis=-1, epsilon=1e-3) * scale + bias
    return _nll(h @ w, y).mean()


@case(args=lambda d: (d(4, D, D, scale=0.3), d(D, V), d(N, D), d.ids(V, N)), axis=(None, None, 0, 0), head=True)
def residual_blocks_checkpointed(ws, w, h, y):
    @jax.checkpoint
    def block(h, w):
        return h + jax.nn.relu(h @ w)

    for i in range(ws.shape[0]):
        h = block(h, ws[i])
    return _nll(h @ w, y).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N)), axis=(None, 0, 0), head=True)
def head_under_checkpoint(w, h, y):
    return jax.checkpoint(lambda w, h: _nll(h @ w, y))(w, h).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N)), axis=(None, 0, 0), head=True)
def head_under_checkpoint_with_policy(w, h, y):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def head(w, h):
        return jax.nn.log_softmax(jnp.tanh(h @ w) * 5)

    return -jnp.take_along_axis(head(w, h), y[:, None], 1).mean()


@case(
    args=lambda d: (d(4, D, D, scale=0.3), d(D, V), d(N, D), d.ids(V, N)),
    axis=(None, None, 0, 0),
    head=True,
)
def residual_blocks_scanned(ws, w, h, y):
    h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (h + jax.nn.relu(h @ w), None)), h, ws)
    return _nll(h @ w, y).mean()


@case(args=lambda d: (d(D, D, scale=0.4), d(N, D)), axis=(None, 0))
def fixed_point_by_fori_loop(w, h):
    return jax.lax.fori_loop(0, 3, lambda _, z: jnp.tanh(z @ w + h), jnp.zeros_like(h)).sum()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d.ids(2, 1)), axis=(None, 0, 0, None), head=True)
def choice_by_cond(w, h, y, flag):
    return jax.lax.cond(flag[0] > 0, lambda: _nll(h @ w, y).mean(), lambda: (h @ w).mean())
