"""The cache: reading on equals reading at once, whatever the chunks, and windows keep only their window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zoo.hf_cases import CASES
from tests.zoo.hf_tiny import FAST, loaded
from zoo.inference.cache import _NOWHERE, Cache, Group, advance

TEXTS = np.random.default_rng(0).integers(3, 97, (2, 14))
QUICK = ("gemma2_gqa", "gemma3", "llama32", "qwen2_windows", "qwen3_moe_mixed")
# Frequencies that grow with the text turn cached keys otherwise than a second reading would.
STEADY = [
    case if case in QUICK else pytest.param(case, marks=pytest.mark.heavy)
    for case in CASES
    if case not in ("llama_dynamic", "phi3_long")
]


@functools.cache
def reader(fresh: bool = False):
    """`advance`, compiled fast."""
    return jax.jit(functools.partial(advance, fresh=fresh), **FAST)


@functools.cache
def whole(case: str):
    """Hidden states of the texts, read at once."""
    return np.asarray(jax.jit(lambda model, ids: model.hidden(ids), **FAST)(loaded(case), jnp.asarray(TEXTS)))


def read_on(case: str, starts: tuple[int, ...], chunk: int, last: int = 14):
    """Read each row from 0 to its own start, padded, and on from there in chunks; return hidden states by position."""
    model, lengths = loaded(case), np.array(starts)
    cache = Cache.empty(model.config, 2, 14, jnp.float32)
    found = np.zeros((2, 14, model.config.embed_dim), np.float32)
    first = np.where(np.arange(max(starts)) < lengths[:, None], TEXTS[:, : max(starts)], 96)
    hidden, cache = reader(True)(model, jnp.asarray(first), jnp.asarray(lengths), cache)
    for row, length in enumerate(lengths):
        found[row, :length] = hidden[row, :length]
    while (lengths < last).any():
        counts = np.minimum(chunk, last - lengths)
        ids = np.full((2, chunk), 96)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            ids[row, :count] = TEXTS[row, length : length + count]
        hidden, cache = reader()(model, jnp.asarray(ids), jnp.asarray(counts), cache)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            found[row, length : length + count] = hidden[row, :count]
        lengths = lengths + counts
    np.testing.assert_array_equal(cache.lengths, lengths)
    return found


@pytest.mark.parametrize("case", STEADY)
def test_reading_on_token_by_token_equals_reading_at_once(case):
    np.testing.assert_allclose(read_on(case, (6, 2), 1), whole(case), atol=2e-5)


@pytest.mark.parametrize(("starts", "chunk"), [((1, 3), 5), ((6, 5), 3), ((13, 1), 13)])
@pytest.mark.parametrize("case", ["gemma2_gqa", "qwen3_moe_mixed"])
def test_chunks_longer_and_shorter_than_the_window_are_exact(case, starts, chunk):
    np.testing.assert_allclose(read_on(case, starts, chunk), whole(case), atol=2e-5)


def test_windows_keep_only_their_window():
    config = loaded("gemma3").config
    cache = Cache.empty(config, 2, 1000, jnp.bfloat16)
    kept = {group.window: group for group in cache.groups}
    assert kept[4].k.shape == kept[4].v.shape == (6, 2, 4, config.num_kv_heads, config.head_dim)
    assert kept[None].k.shape == (1, 2, 1000, config.num_kv_heads, config.head_dim)
    assert sorted(kept[4].layers + kept[None].layers) == list(range(7))
    assert kept[4].k.dtype == jnp.bfloat16
    short = Cache.empty(config, 2, 4, jnp.bfloat16)  # a window as long as the text is none
    assert [group.window for group in short.groups] == [None]


@pytest.mark.parametrize("count", [1, 3, 5])
@given(lengths=st.tuples(*[st.integers(0, 12)] * 3), added=st.tuples(*[st.integers(0, 8)] * 3))
@settings(max_examples=10, deadline=None)
def test_a_ring_holds_the_latest_positions(count, lengths, added):
    """Keys that are their own positions: after writing, each place holds the position that `positions` says."""
    start, end = jnp.array(lengths), jnp.array(lengths) + jnp.array(added)
    keys = lambda positions: jnp.asarray(positions, jnp.float32)[None, :, :, None, None]
    empty = jnp.zeros((1, 3, count, 1, 1))
    before = np.asarray(Group(empty, empty, count, (0,)).positions(start))
    held = [{p for p in range(max(0, n - count), n)} for n in lengths]
    assert [set(row[row != _NOWHERE].tolist()) for row in before] == held
    fresh = np.array(lengths)[:, None] + np.arange(8)
    after = Group(keys(before), -keys(before), count, (0,)).write(keys(fresh), -keys(fresh), start, end)
    expected = np.asarray(after.positions(end), np.float32)
    np.testing.assert_array_equal(np.asarray(after.k)[0, :, :, 0, 0], expected)
    np.testing.assert_array_equal(np.asarray(after.v)[0, :, :, 0, 0], -expected)
