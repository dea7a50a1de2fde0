"""Text out: prompts of any lengths are read, then every step reads one token per text and picks the next."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from zoo.engine.answers import Answer
from zoo.engine.engine import Engine, Settings
from zoo.engine.sampling import GREEDY, Sampling
from zoo.models.layers import check_tokens

_PAGE = 64  # tokens: lengths are those of whole pages, so that few programs are compiled


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
    kv_dtype: str | None = None,
    drafts: int = 0,
    drafter: Any = None,
    chunk: int = 1024,
    widen: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Iterator[np.ndarray]:
    """Yield the next id of every text, step by step, until all have stopped; -1 for those that had before.

    An engine of the prompts' size answers them (`zoo.engine`), at once and in narrow steps where nothing is left to
    read. Each text has random numbers of its own, by its row in the batch. While an id is looked at, the next is
    computed.

    Args:
        model: any model of the zoo.
        prompts: ids of each text so far, none empty; lengths may differ.
        max_tokens: most steps.
        sampling: how ids are picked; its seed is not read.
        stop: ids after which a text is over.
        key: of the random numbers; needed unless the temperature is 0.
        dtype: what to compute and to keep keys and values in; None is the parameters' own.
        kv_dtype: what to keep keys and values in instead: `int8`.
        drafts: ids that are guessed at a time and checked in one step; the text is the same.
        drafter: a smaller model of the same vocabulary that guesses; None looks into the text itself.
        chunk: tokens of the prompts that are read at a time, and at least one of each.
        widen: whether 16-bit weights are converted once where the device would convert them at every step, as CPUs do;
            that takes twice their memory, beside them (`zoo.models.decoder.widened`).
        compiler_options: XLA's, for the programs that run the model.

    Raises:
        ValueError: no prompt, an empty one, an id outside the vocabulary, no key where one is needed; the drafter has
            another vocabulary; or the model's logits are no numbers.
    """
    _check(model, prompts, max_tokens, sampling, key)
    how: dict[str, Any] = {"dtype": dtype, "widen": widen, "compiler_options": compiler_options}
    engine = _engine(model, _sizes(prompts, max_tokens, chunk, drafts), drafter, kv_dtype, **how)
    stops, own = frozenset(stop), _seeded(sampling, key, len(prompts))
    answers = [
        engine.submit(prompt, max_tokens=max_tokens, sampling=picks, stop=stops, drafts=drafts)[0]
        for prompt, picks in zip(prompts, own, strict=True)
    ]
    yield from _steps(engine, answers, max_tokens)


def _engine(model: Any, settings: Settings, drafter: Any, kv_dtype: str | None, **how: Any) -> Engine:
    """Return an engine, which a smaller model's guesses for where there is one."""
    small = dataclasses.replace(settings, page=4, share=True)  # what was read of a text is not read again
    guesser = None if drafter is None else Engine(drafter, small, **how)
    return Engine(model, dataclasses.replace(settings, kv_dtype=kv_dtype), **how, drafter=guesser)


def _seeded(sampling: Sampling, key: PRNGKeyArray | None, count: int) -> list[Sampling]:
    """Return how the ids of each text are picked, with random numbers of its own."""
    seeds = jax.random.bits(jax.random.key(0) if key is None else key, (count,)).tolist()
    return [dataclasses.replace(sampling, seed=seed) for seed in seeds]


def _steps(engine: Engine, answers: Sequence[Answer], most: int) -> Iterator[np.ndarray]:
    """Yield the ids that an engine gives its texts, step by step.

    Raises:
        ValueError: the logits of one are no numbers.
    """
    for step in range(most):
        while any(len(answer.tokens) <= step and answer.finish is None for answer in answers):
            engine.step()
        if lost := [row for row, answer in enumerate(answers) if answer.finish == "error"]:
            raise ValueError(
                f"cannot generate token {len(answers[lost[0]].tokens) + 1} of text {lost[0]}: the model's logits are "
                "NaN. Its weights are damaged or untrained, or overflow in this dtype: check them, or pass "
                "dtype=float32."
            )
        found = [answer.tokens[step].id if step < len(answer.tokens) else -1 for answer in answers]
        if max(found) < 0:
            return
        yield np.array(found)


def _check(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling, key: Any) -> None:
    """Raise ValueError where `stream` cannot do what is asked."""
    if not prompts or not all(len(prompt) for prompt in prompts) or max_tokens < 1:
        sizes = [len(prompt) for prompt in prompts]
        raise ValueError(
            f"cannot generate {max_tokens} tokens after prompts of {sizes} tokens: each must be at least 1."
        )
    if key is None and sampling.temperature > 0:
        raise ValueError("random sampling needs a key: pass key=jax.random.key(seed), or sampling=GREEDY.")
    for prompt in prompts:
        check_tokens(np.asarray(prompt), model.config.vocab_size)


def _sizes(prompts: Sequence[Sequence[int]], max_tokens: int, chunk: int, drafts: int) -> Settings:
    """Return an engine that has a row for each text, and room for all to the end."""
    rows, longest = len(prompts), max(map(len, prompts))
    length = longest + max_tokens
    width = max(1 + drafts, min(1 << (longest - 1).bit_length(), max(1, chunk // rows)))
    tokens = rows * -(-length // _PAGE) * _PAGE
    return Settings(
        length=length, rows=rows, width=width, page=_PAGE, tokens=tokens, queue=rows, logits=rows, share=False,
        exact=False,
    )  # fmt: skip


def stopped(tokens: Sequence[int], stop: Iterable[int]) -> Sequence[int]:
    """Return tokens without the stop that ends them, if one does."""
    return tokens[:-1] if tokens and tokens[-1] in set(stop) else tokens
