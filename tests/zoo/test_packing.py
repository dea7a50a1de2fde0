"""Documents that share a row: each gets the losses and gradients that it gets alone, in every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.zoo.hf_tiny import FAST, loaded
from zoo import Ops
from zoo.kernels.attention import tiled
from zoo.models.attention import packing

LENGTHS = ((5, 1, 8), (11, 3), (14,))  # of the documents of each row; the last of 14 places are padding
FAMILIES = (
    "gemma3",
    "llama32",
    "mixtral",
    "gemma2_gqa",
    "gpt2",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v3",
    "llama4",
    "lfm2",
    "granite4_hybrid",
)


def documents():
    rng = np.random.default_rng(0)
    return [[rng.integers(3, 97, length + 1) for length in row] for row in LENGTHS]


def packed():
    """Tokens, targets and segments `[3, 14]`; padding is a document of its own."""
    tokens, targets, segments = np.zeros((3, 3, 14), np.int32)
    for row, texts in enumerate(documents()):
        end = 0
        for number, text in enumerate(texts, 1):
            place = slice(end, end := end + len(text) - 1)
            tokens[row, place], targets[row, place], segments[row, place] = text[:-1], text[1:], number
    return tokens, targets, segments


@functools.partial(jax.jit, static_argnames="ops", **FAST)
def losses(model, tokens, targets, segments=None, ops=None):
    logits = model.logits(model.hidden(tokens, segments=segments, ops=ops))
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def alone(model):
    texts = [text for row in documents() for text in row]
    padded = np.stack([np.pad(text, (0, 15 - len(text))) for text in texts]).astype(np.int32)
    found = np.asarray(losses(model, padded[:, :-1], padded[:, 1:]))
    return [row[: len(text) - 1] for row, text in zip(found, texts, strict=True)]


def together(model, ops=None):
    tokens, targets, segments = packed()
    found = np.asarray(losses(model, tokens, targets, segments, ops))
    numbers = [(row, number) for row, lengths in enumerate(LENGTHS) for number in range(1, len(lengths) + 1)]
    return [found[row][segments[row] == number] for row, number in numbers]


@pytest.mark.parametrize("case", FAMILIES)
def test_documents_of_a_row_have_the_losses_that_they_have_alone(case):
    for a, b in zip(together(loaded(case)), alone(loaded(case)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("case", ["gemma3", "mixtral"])
def test_they_are_the_same_to_the_last_digits_of_float64(case):
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), loaded(case))
        for a, b in zip(together(model), alone(model), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


def test_without_segments_documents_do_see_each_other():
    """What the tests above would not notice if attention ignored segments and documents were short."""
    tokens, targets, _ = packed()
    model = loaded("gemma3")
    found = np.asarray(losses(model, tokens, targets))[0, 6:14]
    assert np.abs(found - alone(model)[2]).max() > 1e-2


def test_tiled_attention_keeps_to_documents():
    for a, b in zip(together(loaded("gemma3"), Ops(attention=tiled(3))), alone(loaded("gemma3")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_positions_start_anew_in_each_document():
    segments = jnp.array([[1, 1, 1, 2, 2, 0], [4, 5, 5, 5, 5, 5]])
    np.testing.assert_array_equal(packing.positions(segments), [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
