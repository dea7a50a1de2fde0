"""User derivative rules, nested transformations, closures, keyword and scalar arguments, dtypes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import optax

from tests.transforms.cases.table import MASKED_TOKENS, TOKENS, D, N, V, case


def _nll(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def _bf16(a):
    return a.astype(ml_dtypes.bfloat16)


@jax.custom_jvp
def _softplus(x):
    return jnp.log1p(jnp.exp(x))


@_softplus.defjvp
def _softplus_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return _softplus(x), jax.nn.sigmoid(x) * t * 1.5


@jax.custom_vjp
def _clip_gradient(x, limit):
    return x


_clip_gradient.defvjp(lambda x, limit: (x, limit), lambda limit, g: (jnp.clip(g, -limit, limit), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x, scale, eps):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


def _rms_norm_bwd(eps, saved, g):
    x, scale = saved
    r = jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + eps)
    gs = g * scale
    return r * (gs - x * r**2 * jnp.mean(gs * x, -1, keepdims=True)), (g * x * r).sum(tuple(range(x.ndim - 1)))


_rms_norm.defvjp(lambda x, scale, eps: (_rms_norm(x, scale, eps), (x, scale)), _rms_norm_bwd)


@case(**TOKENS, head=True)
def custom_jvp_activation(w, h, y):
    return _nll(_softplus(h @ w), y).mean()


@case(
    args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d.uniform()), axis=(None, 0, 0, None), forward_mode=False, head=True
)
def custom_vjp_clipped_gradient(w, h, y, limit):
    return _nll(_clip_gradient(h @ w, 0.02 * limit), y).sum()


@case(args=lambda d: (d(D), d(D, V), d(N, D), d.ids(V, N)), axis=(None, None, 0, 0), forward_mode=False, head=True)
def custom_vjp_norm_with_weight_gradient(scale, w, h, y):
    return _nll(_rms_norm(h, scale, 1e-5) @ w, y).mean()


@case(args=lambda d: (d(D, 9), d(N, D)), axis=(None, 0), head=True)
def straight_through_round(w, h):
    x = jax.nn.sigmoid(h @ w)
    return ((x + jax.lax.stop_gradient(jnp.round(x) - x)) * jnp.arange(9)).sum(-1) ** 2


@case(args=lambda d: (d(D, 9), d(N, D)), axis=(None, 0), head=True)
def activations_of_every_kind(w, h):
    x = h @ w
    names = ["relu", "gelu", "silu", "elu", "softplus", "leaky_relu", "mish", "relu6", "celu", "hard_tanh", "selu"]
    return sum(getattr(jax.nn, name)(x + 0.01 * i) for i, name in enumerate(names)).mean(-1)


@case(args=lambda d: (d(D, 6), d(N, D)), axis=(None, 0))
def elementwise_of_every_kind(w, h):
    x = h @ w
    p = jnp.abs(x) + 0.5
    one = jnp.sin(x) + jnp.cos(x) + jnp.exp2(x / 3) + jnp.expm1(x / 3) + jnp.log1p(p) + jnp.cbrt(p) + jnp.arctan(x)
    two = jnp.power(p, 1.5) + p**x * 0.01 + jnp.hypot(x, p) + jnp.arctan2(x, p) + jnp.logaddexp(x, p) + jnp.sinc(x)
    three = jax.scipy.special.erf(x) + jnp.sinh(x / 4) + jnp.mod(p, 0.7) + jnp.sign(x) * x**3 + jnp.reciprocal(p)
    return (one + two + three + jnp.nan_to_num(x) + jnp.clip(x, -1, 1) + jnp.floor(x)).sum(-1)


@case(**TOKENS, head=True)
def nested_jit(w, h, y):
    @jax.jit
    def head(h):
        return jax.jit(lambda a, b: a @ b)(h, w)

    return jnp.mean(jax.jit(_nll)(head(h), y))


@case(args=lambda d: (d(3, D, V), d(N, D), d.ids(V, N, 3)), axis=(None, 0, 0), head=True)
def nested_vmap_over_heads(ws, h, y):
    per_head = jax.vmap(lambda w, y: _nll(h @ w, y).mean(), in_axes=(0, 1))(ws, y)
    return per_head @ jnp.arange(1.0, 4)


@case(args=lambda d: (d(D, V), d(9, 3, D), d.ids(V, 9, 3)), axis=(None, 0, 0), head=True)
def nested_vmap_twice(w, h, y):
    def one(h, y):
        return jax.nn.logsumexp(h @ w) - (h @ w)[y]

    return jax.vmap(jax.vmap(one))(h, y).mean(1)


@case(args=lambda d: (d(D, 4, scale=0.5), d(N, D)), axis=(None, 0))
def gradient_inside_the_function(w, h):
    def energy(x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    return jnp.mean(jax.vmap(jax.grad(energy))(h) ** 2)


@case(args=lambda d: (d(D, 4, scale=0.5), d(N, D)), axis=(None, 0))
def gradient_over_all_tokens_inside(w, h):
    score = jax.grad(lambda h: jnp.sum(jnp.tanh(h @ w) ** 2))(h)
    return h - 0.1 * score, (score**2).sum()


@case(args=lambda d: (d(D, V), d(V), d(N, D), d.ids(V, N)), axis=(0, 0), closed=2, head=True)
def closure_over_traced_weights(w, b, h, y):
    return _nll(h @ w + b, y).mean()


@case(args=lambda d: (d(D, V), d.mask(N), d(N, D), d.ids(V, N)), axis=(0, 0), closed=2, head=True)
def closure_over_traced_array_of_cut_length(w, m, h, y):
    return (_nll(h @ w, y) * m).sum() / m.sum()


@case(
    args=lambda d: (d(D, V), d(N, D), d.ids(V, N)),
    axis=(None, 0, 0),
    kwargs=lambda d: {"temperature": d.uniform(), "bias": d(V), "smoothing": 0.1},
    head=True,
)
def keyword_arguments(w, h, y, *, temperature, bias, smoothing):
    logp = jax.nn.log_softmax((h @ w + bias) / temperature)
    nll = -jnp.take_along_axis(logp, y[:, None], 1)[:, 0]
    return jnp.mean((1 - smoothing) * nll - smoothing * logp.mean(-1))


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), 0.7, 2), axis=(None, 0, 0, None, None), head=True)
def python_scalars(w, h, y, temperature, power):
    return (_nll(h @ w / temperature, y) ** power).mean()


@case(args=lambda d: (d(N, D), d.ids(V, N), d(D, V), d.uniform()), axis=(0, 0, None, None), head=True)
def tracer_scalar_in_default_position(h, y, w, cap):
    return _nll(cap * jnp.tanh(h @ w / cap), y).mean()


@case(
    args=lambda d: (_bf16(d(D, V)), _bf16(d(N, D)), d.ids(V, N)),
    axis=(None, 0, 0),
    tolerance=1e-2,
    x64=False,
    head=True,
)
def bfloat16_with_float32_accumulation(w, h, y):
    return _nll(jnp.dot(h, w, preferred_element_type=jnp.float32), y).mean()


@case(
    args=lambda d: (_bf16(d(D, V)), _bf16(d(N, D)), d.ids(V, N)),
    axis=(None, 0, 0),
    tolerance=2e-2,
    x64=False,
    has_aux=True,
    head=True,
)
def bfloat16_cast_after_the_dot(w, h, y):
    logits = (h @ w).astype(jnp.float32)
    return _nll(logits, y).mean(), (h @ w).max()


@case(args=lambda d: (_bf16(d(D, V)), d(N, D), d.ids(V, N)), axis=(None, 0, 0), tolerance=1e-2, x64=False, head=True)
def bfloat16_weights_cast_up(w, h, y):
    return _nll(h @ w.astype(h.dtype), y).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N)), axis=(None, 0, 0), tolerance=2e-2, x64=False, head=True)
def float16_compute(w, h, y):
    return _nll((h.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32), y).mean()


@case(args=lambda d: (d(D, V), d(N, D), d.ids(V, N), d.ids(2, N)), axis=(None, 0, 0, 0), head=True, has_aux=True)
def integer_and_boolean_arithmetic(w, h, y, segment):
    m = (segment == 1) & ~(y == 0) | (y > 9)
    nll = _nll(h @ w, y)
    return jnp.where(m, nll, 0).sum() / m.sum(dtype=jnp.int32), (m.sum(dtype=jnp.int8), (y * segment).sum(), y % 3)


@case(**MASKED_TOKENS, head=True)
def zero_gradient_of_hidden(w, h, y, m):
    return (_nll(jax.lax.stop_gradient(h) @ w, y) * m).mean() + 0 * h.sum()


@case(args=lambda d: (d(D, V), d(N, D), d(D)), axis=(None, 0, None))
def unused_arguments(w, h, unused):
    return (h**2).sum(-1)


@case(args=lambda d: (d(D, V), d(N, D)), axis=(None, 0))
def result_without_the_cut_arguments(w, h):
    return (w**2).sum(), jnp.ones(h.shape[0]).sum() * w.mean()


@case(args=lambda d: (d(D, 5), d(N, D)), axis=(None, 0))
def complex_phases(w, h):
    x = jnp.exp(1j * (h @ w))
    return jnp.abs(x.mean(0)) ** 2, jnp.real(x * x[:, :1].conj()).sum(-1)


@case(args=lambda d: (d(D, D), d(N, D)), axis=(None, 0))
def rotary_embedding(w, h):
    q = (h @ w)[:, :6]
    angle = jnp.arange(h.shape[0])[:, None] / 100 ** (jnp.arange(3) / 3)
    a, b = jnp.split(q, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


@case(
    args=lambda d: (jax.random.key(3), d(D, V), d(N, D), d.ids(V, N)),
    axis=(None, None, 0, 0),
    x64=False,
)
def dropout_with_a_key(key, w, h, y):
    keep = jax.random.bernoulli(key, 0.8, h.shape)
    return _nll(jnp.where(keep, h / 0.8, 0) @ w, y).mean()


@case(args=lambda d: (jax.random.key(3), d(D, V), d(N, D)), axis=(None, None, 0), x64=False)
def gumbel_softmax_with_a_key(key, w, h):
    return (jax.nn.softmax(h @ w + jax.random.gumbel(key, (N, V))) ** 2).sum(-1)
