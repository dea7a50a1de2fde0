"""Text out: prompts of any lengths are read once, then every step reads one token per text and picks the next.

Dimensions: `B` batch `S` sequence `V` vocab `D` embed.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from zoo.engine.sampling import GREEDY, Sampling, penalise, threshold
from zoo.inference.cache import Cache, advance
from zoo.models.decoder import widened
from zoo.models.layers import check_tokens

_STEP = 64  # lengths are rounded up to a multiple, so that few programs are compiled


def generate(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **how: Any) -> list[list[int]]:
    """Return what follows each prompt: at most `max_tokens` ids, ending with a stop if one was picked.

    Arguments as in `stream`.
    """
    found: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, prompts, max_tokens, **how):
        for row, token in zip(found, tokens.tolist(), strict=True):
            row += [] if token < 0 else [token]
    return found


def stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    stop: Iterable[int] = (),
    key: PRNGKeyArray | None = None,
    dtype: DTypeLike | None = None,
    chunk: int = 1024,
    widen: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Iterator[np.ndarray]:
    """Yield the next id of every text, step by step, until all have stopped; -1 for those that had before.

    Each text has random numbers of its own, by its place in the batch. While an id is looked at, the next is computed.

    Args:
        model: any model of the zoo.
        prompts: ids of each text so far, none empty; lengths may differ.
        max_tokens: most steps.
        sampling: how ids are picked; what belongs to requests, biases and the like, is for `zoo.engine` alone.
        stop: ids after which a text is over.
        key: of the random numbers; needed unless the temperature is 0.
        dtype: what to compute and to keep keys and values in; None is the parameters' own.
        chunk: tokens of the prompts that are read at a time, which bounds attention's memory.
        widen: whether 16-bit weights are converted once where the device would convert them at every step, as CPUs do;
            that takes twice their memory, beside them (`zoo.models.decoder.widened`).
        compiler_options: XLA's, for the programs that run the model.

    Raises:
        ValueError: no prompt, an empty one, an id outside the vocabulary, no key where one is needed; or the model's
            logits are no numbers.
    """
    _check(model, prompts, max_tokens, sampling, key)
    key = jax.random.key(0) if key is None else key
    model = widened(model) if widen else model
    programs = _Programs.of(jnp.dtype(model.embed.dtype if dtype is None else dtype), compiler_options)
    stops = np.array(sorted(stop), np.int64)
    logits, cache, seen = _prefill(model, prompts, max_tokens, chunk, programs, sampling)
    tokens, seen = _pick(logits, seen, key, 0, sampling=sampling)
    over = np.zeros(len(prompts), bool)
    for step in range(1, max_tokens + 1):
        known = tokens
        if step < max_tokens:
            logits, cache = programs.step(model, known, cache)
            tokens, seen = _pick(logits, seen, key, step, sampling=sampling)
        found = np.asarray(known)
        if (lost := np.flatnonzero((found < 0) & ~over)).size:
            raise ValueError(
                f"cannot generate token {step} of text {int(lost[0])}: the model's logits are NaN. "
                "Its weights are damaged or untrained, or overflow in this dtype: check them, or pass dtype=float32."
            )
        yield np.where(over, -1, found)
        over |= np.isin(found, stops)
        if over.all():
            return


def _check(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling, key: Any) -> None:
    """Raise ValueError where `stream` cannot do what is asked."""
    if not prompts or not all(len(prompt) for prompt in prompts) or max_tokens < 1:
        sizes = [len(prompt) for prompt in prompts]
        raise ValueError(
            f"cannot generate {max_tokens} tokens after prompts of {sizes} tokens: each must be at least 1."
        )
    if sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty:
        raise ValueError("cannot generate with biases, presence or frequency penalties here: zoo.engine does that.")
    if key is None and sampling.temperature > 0:
        raise ValueError("random sampling needs a key: pass key=jax.random.key(seed), or sampling=GREEDY.")
    for prompt in prompts:
        check_tokens(np.asarray(prompt), model.config.vocab_size)
    model.check_length(max(map(len, prompts)) + max_tokens - 1)  # the last one is not read


@dataclass(frozen=True)
class _Programs:
    """The compiled passes of any model under some options."""

    first: Any
    more: Any
    step: Any

    @classmethod
    def of(cls, dtype: Any, options: Mapping[str, Any] | None) -> "_Programs":
        return cls._of(dtype, tuple(sorted((options or {}).items())))

    @classmethod
    @functools.cache
    def _of(cls, dtype: Any, options: tuple) -> "_Programs":
        jit = functools.partial(jax.jit, compiler_options=dict(options) or None)
        first = functools.partial(_read_first, dtype=dtype)
        more = functools.partial(_read, dtype=dtype, fresh=False)
        step = functools.partial(_step, dtype=dtype)
        return cls(jit(first, static_argnums=3), jit(more, donate_argnums=(3, 4)), jit(step, donate_argnums=2))


def _prefill(model, prompts, max_tokens: int, chunk: int, programs: _Programs, sampling: Sampling):
    """Read the prompts; return the logits after each, the cache, and which tokens there were (if that matters)."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = _rounded(int(lengths.max()))
    ids = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    counts = lambda start: np.clip(lengths - start, 0, chunk).astype(np.int32)
    whole = np.int32(lengths.max())
    last, cache = programs.first(model, ids[:, :chunk], counts(0), _rounded(padded + max_tokens), whole)
    for start in range(chunk, int(lengths.max()), chunk):
        piece = ids[:, start : start + chunk]
        last, cache = programs.more(model, piece, counts(start), cache, last, whole)
    seen = None
    if sampling.repetition_penalty != 1.0:
        there = np.zeros((len(prompts), model.config.vocab_size), bool)
        for row, prompt in zip(there, prompts, strict=True):
            row[np.asarray(prompt)] = True
        seen = jnp.asarray(there)
    return _logits(model, last), cache, seen


def _rounded(length: int) -> int:
    return -(-length // _STEP) * _STEP


def _read_first(model, tokens, counts, capacity, whole, *, dtype):
    cache = Cache.empty(model.config, len(tokens), capacity, dtype)
    last = jnp.zeros((len(tokens), model.config.embed_dim), dtype)
    return _read(model, tokens, counts, cache, last, whole, dtype=dtype, fresh=True)


def _read(model, tokens, counts, cache, last, whole, *, dtype, fresh):
    """Read a chunk of the prompts; return the hidden state of each prompt's last token so far, and the cache."""
    hidden, cache = advance(model, tokens, counts, cache, dtype=dtype, fresh=fresh, whole=whole)
    newest = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where((counts > 0)[:, None], newest, last), cache


def _step(model, tokens, cache, *, dtype):
    hidden, cache = advance(model, tokens[:, None], jnp.ones_like(tokens), cache, dtype=dtype)
    return model.logits(hidden[:, 0]), cache


_logits = jax.jit(lambda model, hidden: model.logits(hidden))


@functools.partial(jax.jit, static_argnames="sampling")
def _pick(logits, seen, key, step, *, sampling):
    """Return the next token of each text, -1 where logits are NaN, and the tokens that each has then had."""
    if seen is not None:
        logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        rows = jnp.arange(len(logits))
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows)
        tokens = jax.vmap(jax.random.categorical)(keys, restrict(logits / sampling.temperature, sampling))
    tokens = jnp.where(jnp.isnan(logits).any(axis=-1), -1, tokens).astype(jnp.int32)
    return tokens, None if seen is None else seen.at[jnp.arange(len(tokens)), tokens].set(True)


def restrict(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Return the logits with -inf for what top_k, top_p and min_p leave out; the most likely token always stays."""
    each = lambda value, plain: jnp.full(len(logits), plain if value is None else value)
    least = threshold(logits, each(sampling.top_k, 2**30), each(sampling.top_p, 1.0), each(sampling.min_p, 0.0))
    return jnp.where(logits < least[:, None], -jnp.inf, logits)


def stopped(tokens: Sequence[int], stop: Iterable[int]) -> Sequence[int]:
    """Return tokens without the stop that ends them, if one does."""
    return tokens[:-1] if tokens and tokens[-1] in set(stop) else tokens
