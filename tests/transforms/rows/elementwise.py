"""Rows of primitives that work element by element, and of random bits."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from tests.transforms.rows.arrays import L, bind, each, fixed, on, words

UNARY = """abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh""".split()
BINARY = "add atan2 div eq ge gt le lt max min mul ne pow rem sub".split()
INTEGER = "clz population_count bitwise_not".split()
INTEGERS = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical".split()

FLOAT = {name: on(name, "x") for name in UNARY}
FLOAT |= {name: on(name, "x", "y") for name in BINARY}
FLOAT |= {
    "acosh": lambda a: lax.acosh(1 + a.x),
    "add_any": lambda a: bind("add_any", a.x, a.y),
    "clamp": lambda a: (lax.clamp(0.3, a.x, 0.6), lax.clamp(0.3 * a.y, a.x, 0.6 + a.y)),
    "copy": lambda a: jnp.copy(a.x),
    "dce_sink": lambda a: lax.dce_sink(fixed(a.x)),
    "device_put": lambda a: (jax.device_put(a.x), jax.device_put(a.t, jax.devices()[0])),
    "eq_to": lambda a: bind("eq_to", a.x, a.y),
    "integer_pow": lambda a: a.x**3,
    "layout_constraint": lambda a: with_layout_constraint(fixed(a.x), Layout((1, 0))),
    "le_to": lambda a: bind("le_to", a.x, a.y),
    "lt_to": lambda a: bind("lt_to", a.x, a.y),
    "name": lambda a: checkpoint_name(a.x, "x"),
    "named": lambda a: bind("named", a.x, name="x"),
    "nextafter": lambda a: lax.nextafter(fixed(a.x), fixed(a.y)),
    "one_minus_square": lambda a: bind("one_minus_square", a.x),
    "polynomial": lambda a: bind("polynomial", fixed(a.x), 1.0, jnp.float64(0.5), 0.25),
    "log2": lambda a: lax.log2(a.x),
    "optimization_barrier": lambda a: lax.optimization_barrier((a.x, a.i)),
    "reduce_precision": lambda a: lax.reduce_precision(a.x, 5, 10),
    "remat2": lambda a: jax.checkpoint(lambda x, w: jnp.sin(x @ w.T))(a.x, a.table),
    "select_n": lambda a: (lax.select_n(a.b, a.x, a.y), lax.select_n(a.label.sum() > 3, a.x, a.y)),
    "stop_gradient": lambda a: lax.stop_gradient(a.x),
    "xla_metadata_value": lambda a: bind("xla_metadata_value", a.x, xla_metadata_kvs=(("a", "b"),)),
}
SPECIAL = {
    "igamma": lambda a: lax.igamma(a.x, a.y),
    "igamma_grad_a": lambda a: lax.igamma_grad_a(fixed(a.x), fixed(a.y)),
    "igammac": lambda a: lax.igammac(a.x, a.y),
    "polygamma": lambda a: lax.polygamma(fixed(jnp.floor(3 * a.x)), a.y),
    "regularized_incomplete_beta": lambda a: lax.betainc(fixed(a.x), fixed(a.y), 0.5 * a.y),
    "zeta": lambda a: lax.zeta(fixed(2 + a.x), fixed(a.y)),
}
BITS = {name.removeprefix("bitwise_"): on(name, "i") for name in INTEGER}
BITS |= {name.removeprefix("bitwise_"): on(name, "i", "shift") for name in INTEGERS}
BITS |= {
    "bitcast_convert_type": lambda a: (
        lax.bitcast_convert_type(fixed(a.x), jnp.uint8),
        lax.bitcast_convert_type(a.i, jnp.float32),
    ),
    "complex": lambda a: lax.complex(a.x, a.y),
    "conj": lambda a: lax.conj(a.z),
    "convert_element_type": lambda a: (a.x.astype(jnp.float32), (9 * a.x).astype(jnp.int8), a.b.astype(jnp.float32)),
    "imag": lambda a: lax.imag(a.z),
    "mulhi": lambda a: lax.mulhi(a.i, a.j * 2**24),
    "real": lambda a: lax.real(a.z),
    "random_bits": lambda a: (
        each(lambda k: jax.random.bits(k, (2,)), a.key),
        jax.random.bits(jax.random.key(0), (L, 2)),
    ),
    "random_clone": lambda a: jax.random.key_data(jax.random.clone(a.key)),
    "random_gamma": lambda a: each(lambda k, x: jax.random.gamma(k, x), a.key, fixed(a.x)),
    "random_seed": lambda a: each(lambda i: jax.random.key_data(jax.random.key(i)), a.label),
    "random_fold_in": lambda a: each(lambda k, i: jax.random.key_data(jax.random.fold_in(k, i)), a.key, a.label),
    "random_split": lambda a: (
        each(lambda k: jax.random.key_data(jax.random.split(k, 2)), a.key),
        jax.random.key_data(jax.random.split(jax.random.key(0), L)),
    ),
    "random_unwrap": lambda a: jax.random.key_data(a.key),
    "random_wrap": lambda a: each(lambda d: jax.random.bits(jax.random.wrap_key_data(d)), words(a.i)[:, :2]),
    "philox2x32": lambda a: bind("philox2x32", *map(words, (a.i, a.j, a.i))),
    "philox4x32": lambda a: bind("philox4x32", *map(words, (a.i, a.j, a.i, a.j, a.i, a.j))),
    "threefry4x32": lambda a: bind("threefry4x32", *map(words, (a.i, a.j, a.i, a.j, a.i, a.j, a.i, a.j))),
    "threefry2x32": lambda a: bind("threefry2x32", *map(words, (a.i, a.j, a.i, a.j))),
}
