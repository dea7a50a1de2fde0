"""The layers' mathematics against float64 oracles written differently."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.models.attention.rotary import frequencies
from zoo.models.layers import attention, gated_mlp, lookup, rms_norm, rope, softcap


def normal(seed: int, *shape: int, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def wide(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


@pytest.fixture(autouse=True)
def strict():
    """Our own functions never promote by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm_scales_by_one_plus_weight_in_float32(dtype):
    x, weight = normal(0, 3, 5, 64, dtype=dtype) * jnp.asarray(7, dtype), normal(1, 64, dtype=dtype)
    out = rms_norm(x, weight, 1e-6)
    x64 = wide(x)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * (1 + wide(weight))
    assert out.dtype == dtype
    # One rounding to bfloat16 at the end is at most half a unit in the last place: 2 ** -8 of the value.
    np.testing.assert_allclose(wide(out), expected, rtol=2**-7.99 if dtype == jnp.bfloat16 else 1e-6, atol=1e-7)


def test_rms_norm_without_offset_multiplies_by_the_weight():
    x, weight = normal(0, 3, 8), normal(1, 8)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6, offset=0.0), rms_norm(x, weight - 1, 1e-6), atol=1e-6)


def test_rms_norm_adds_eps_to_the_mean_square():
    np.testing.assert_allclose(rms_norm(jnp.full((1, 4), 1e-3), jnp.zeros(4), 1e-6), 1 / math.sqrt(2), rtol=1e-6)


def test_softcap_is_bounded_odd_and_the_identity_for_small_values():
    x = jnp.asarray([-1e4, -1.0, 0.0, 1e-3, 1.0, 1e4])
    np.testing.assert_allclose(softcap(x, 5.0), 5 * np.tanh(np.asarray(x, np.float64) / 5), rtol=1e-6)
    assert softcap(x, None) is x


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding as a product of complex numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[None, :, None]
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("theta", [1e4, 500.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rope_turns_halves_as_complex_numbers(dtype, theta):
    x = normal(0, 2, 300, 3, 16, dtype=dtype)
    out = rope(x, frequencies(16, theta))
    assert out.dtype == dtype
    np.testing.assert_allclose(wide(out), _rotate(wide(x), theta), atol=2e-2 if dtype == jnp.bfloat16 else 5e-5)


def test_rope_scores_depend_on_distance_only():
    q, k = (jnp.broadcast_to(normal(seed, 1, 1, 1, 16), (1, 20, 1, 16)) for seed in (0, 1))
    scores = np.einsum("bsnh,btnh->st", rope(q, frequencies(16, 1e4)), rope(k, frequencies(16, 1e4)))
    for distance in range(1, 10):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert abs(scores[1, 0] - scores[0, 1]) > 1e-2


def _attend(q, k, v, scale, cap, window):
    """Attention one query at a time."""
    q, k, v = wide(q), wide(k), wide(v)
    out = np.zeros_like(q)
    for b, s, n in np.ndindex(q.shape[:3]):
        group = n // (q.shape[2] // k.shape[2])
        first = 0 if window is None else max(0, s - window + 1)
        scores = k[b, first : s + 1, group] @ q[b, s, n] * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out[b, s, n] = weights / weights.sum() @ v[b, first : s + 1, group]
    return out


@pytest.mark.parametrize(
    ("kv_heads", "cap", "window"),
    [(2, None, None), (2, 2.0, None), (2, None, 4), (1, 2.0, 4), (6, 2.0, 4), (2, None, 1), (2, None, 99)],
)
def test_attention_is_causal_grouped_capped_and_windowed(kv_heads, cap, window):
    q, k, v = normal(0, 2, 9, 6, 8), normal(1, 2, 9, kv_heads, 8), normal(2, 2, 9, kv_heads, 8)
    out = jax.jit(attention, static_argnames=("scale", "cap", "window"))(q, k, v, scale=0.7, cap=cap, window=window)
    np.testing.assert_allclose(out, _attend(q, k, v, 0.7, cap, window), atol=3e-6)


def test_a_traced_window_is_the_same_as_a_static_one():
    q, k, v = normal(0, 1, 9, 2, 8), normal(1, 1, 9, 2, 8), normal(2, 1, 9, 2, 8)
    traced = jax.jit(lambda window: attention(q, k, v, scale=1.0, window=window))
    for window in (1, 4, 9):
        static = attention(q, k, v, scale=1.0, window=window)
        np.testing.assert_allclose(traced(jnp.asarray(window)), static, atol=1e-6)


def test_a_window_of_one_key_returns_the_values():
    q, k, v = normal(0, 1, 5, 2, 8), normal(1, 1, 5, 2, 8), normal(2, 1, 5, 2, 8)
    np.testing.assert_allclose(attention(q, k, v, scale=1.0, window=1), v, atol=1e-6)


def test_positions_decide_what_a_query_sees():
    q, k, v = normal(0, 2, 9, 4, 8), normal(1, 2, 9, 2, 8), normal(2, 2, 9, 2, 8)
    whole = attention(q, k, v, scale=1.0, window=4)
    places = jnp.arange(9)[None]
    same = attention(q, k, v, scale=1.0, window=4, q_positions=places, k_positions=places)
    np.testing.assert_allclose(same, whole, atol=1e-6)
    order = jnp.asarray([3, 8, 0, 1, 7, 2, 6, 5, 4])  # keys in any order, as in a ring that has been written round
    shuffled = attention(q, k[:, order], v[:, order], scale=1.0, window=4, q_positions=places, k_positions=order[None])
    np.testing.assert_allclose(shuffled, whole, atol=2e-6)


def test_one_query_against_a_cache_with_empty_places_is_the_last_row():
    q, k, v = normal(0, 2, 9, 4, 8), normal(1, 2, 9, 2, 8), normal(2, 2, 9, 2, 8)
    whole = attention(q, k, v, scale=1.0)
    room = lambda x: jnp.pad(x, ((0, 0), (0, 5), (0, 0), (0, 0)), constant_values=9.0)
    places = jnp.where(jnp.arange(14) < 9, jnp.arange(14), 2**30)[None]
    out = attention(
        q[:, 8:], room(k), room(v), scale=1.0, q_positions=jnp.full((2, 1), 8), k_positions=jnp.tile(places, (2, 1))
    )
    np.testing.assert_allclose(out, whole[:, 8:], atol=2e-6)


def test_sequences_may_stand_at_different_positions():
    q, k, v = normal(0, 2, 1, 4, 8), normal(1, 2, 9, 2, 8), normal(2, 2, 9, 2, 8)
    places = jnp.arange(9)[None]
    out = attention(q, k, v, scale=1.0, q_positions=jnp.asarray([[3], [6]]), k_positions=places)
    for row, last in enumerate((3, 6)):
        alone = lambda x, row=row, last=last: x[row : row + 1, : last + 1]
        query = jnp.pad(alone(q), ((0, 0), (last, 0), (0, 0), (0, 0)))
        np.testing.assert_allclose(out[row, 0], attention(query, alone(k), alone(v), scale=1.0)[0, -1], atol=2e-6)


def test_attention_in_bfloat16_keeps_scores_in_float32():
    q, k, v = (normal(seed, 1, 64, 2, 32, dtype=jnp.bfloat16) for seed in range(3))
    out = attention(q, k, v, scale=1.0)
    error = np.abs(wide(out) - _attend(q, k, v, 1.0, None, None))
    # Weights and result are rounded to bfloat16; scores (here up to 20) rounded to it would give errors near 0.1.
    assert out.dtype == jnp.bfloat16
    assert error.max() < 0.02


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_gradients_are_finite_and_in_the_operands_dtype(dtype):
    q, k, v = (normal(seed, 1, 9, 2, 8, dtype=dtype) for seed in range(3))
    loss = lambda q, k, v: attention(q, k, v, scale=1.0, cap=2.0, window=4).astype(jnp.float32).sum()
    for grad in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v):
        assert grad.dtype == dtype
        assert bool(jnp.isfinite(grad).all()) and bool((grad != 0).any())


def test_gated_mlp_uses_the_tanh_form_of_gelu():
    x, gate, up, down = normal(0, 3, 8), normal(1, 8, 12), normal(2, 8, 12), normal(3, 12, 8)
    g = wide(x) @ wide(gate)
    gelu = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    exact = 0.5 * g * (1 + np.vectorize(math.erf)(g / math.sqrt(2)))
    out = gated_mlp(x, gate, up, down)
    np.testing.assert_allclose(out, gelu * (wide(x) @ wide(up)) @ wide(down), rtol=1e-5, atol=2e-5)
    assert np.abs(out - exact * (wide(x) @ wide(up)) @ wide(down)).max() > 2e-3


IDS = jnp.asarray([[3, 0, 3, 4, 3], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("store", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])
def test_lookup_returns_rows_in_the_dtype_asked_for(store, compute):
    table = normal(0, 5, 6, dtype=store)
    out = lookup(table, IDS, compute)
    assert out.dtype == compute
    np.testing.assert_array_equal(out, table[IDS].astype(compute))


@pytest.mark.parametrize("store", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_lookup_of_an_id_outside_gives_nan_there_and_nowhere_else(store, bad):
    out = jax.jit(lookup, static_argnums=2)(normal(0, 5, 6, dtype=store), IDS.at[0, 2].set(bad), jnp.float32)
    np.testing.assert_array_equal(jnp.isnan(out).all(-1), jnp.zeros((2, 5), bool).at[0, 2].set(True))


@pytest.mark.parametrize("store", [jnp.float32, jnp.bfloat16])
def test_lookup_gradient_sums_a_sequences_occurrences_in_float32(store):
    table, ids = normal(0, 4, 6, dtype=store), jnp.ones((1, 2000), jnp.int32)
    weight = jax.random.uniform(jax.random.key(1), (1, 2000, 6))
    grad = jax.grad(lambda table: (lookup(table, ids, jnp.float32) * weight).sum())(table)
    exact = np.asarray(weight, np.float64).sum((0, 1))
    # In bfloat16 a running sum near 1000 no longer grows by numbers below one: the error would be beyond a half.
    np.testing.assert_allclose(wide(grad)[1], exact, rtol=2**-7.99 if store == jnp.bfloat16 else 1e-5)
    np.testing.assert_array_equal(wide(grad)[[0, 2, 3]], 0)
