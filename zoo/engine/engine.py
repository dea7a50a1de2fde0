"""An engine: submit texts, and their answers come token by token, the same whoever else is asking.

    engine = Engine(model, Settings(length=256))
    answer = engine.submit([1, 2, 3], max_tokens=16)[0]
    ids = [token.id for token in engine.stream(answer)]

Read on in `zoo.engine.scheduler` (what a step does, and for whom), `zoo.engine.pages` (where keys and values are),
`zoo.engine.work` (how the device is told), `zoo.engine.step` (the one program), `zoo.engine.attention` (its keys and
values), `zoo.engine.states` (what layers hand on in place of them), `zoo.engine.sampling` (how ids are picked).
`zoo.engine.sizes` and `zoo.engine.answers` are what goes in and comes out.

One thread drives an engine: `step()` hands a step to the device and takes the results of the one before, so that the
device computes while the host plans. Ids that were picked stay on the device, where the next step finds them.
"""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zoo.engine.answers import Answer, Scores, Token
from zoo.engine.sampling import GREEDY, Guide, Picked, Sampling
from zoo.engine.scheduler import Limits, Scheduler, Span, Text
from zoo.engine.sizes import Plan, Settings
from zoo.engine.step import Fixed, program
from zoo.engine.work import Writer, reason, unasked
from zoo.models.decoder import apart, widened
from zoo.models.forward import check_past
from zoo.models.layers import check_tokens
from zoo.models.mixtures.grouped import ragged, stepped

__all__ = ["Answer", "Engine", "Scores", "Settings", "Token"]

_Pass = tuple[list[Span], list[int], Any, Any]  # spans, where each begins, what is picked, hidden states
_NANS = "the model's logits are NaN: its weights are damaged or untrained, or overflow in this dtype"


class Engine:
    """A model, its pages, and the texts that it is answering.

    Args:
        model: any of the zoo, on one device or cut over the axis `model` of an explicit mesh: heads and MLPs, and pages
            over kv heads. Its arrays are the engine's too: who donates them ends it, and those of layers that are
            apart stay in memory while it lives.
        settings: sizes.
        dtype: what to compute and to keep keys and values in; None is the parameters' own.
        widen: whether 16-bit weights are converted once where the device would convert them at every step
            (`zoo.models.decoder.widened`).
        compiler_options: XLA's.
        clock: seconds, for time limits.
        drafter: an engine of a smaller model of the same vocabulary, with pages of its own, that guesses how texts go
            on where `drafts` are asked for; None looks into the text itself.

    Raises:
        ValueError: the model does not write, or cannot read texts of `length`; or the drafter has other ids, or less
            room.
    """

    def __init__(
        self,
        model: Any,
        settings: Settings | None = None,
        *,
        dtype: DTypeLike | None = None,
        widen: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        drafter: "Engine | None" = None,
    ):
        self.settings = settings = settings or Settings()
        check_past(model.config)
        model.check_length(settings.length - 1)  # the last token is not read
        plan = Plan.of(model, settings, dtype)
        if drafter is not None:
            _check_drafter(drafter, model.config.vocab_size, settings)
        self.drafter = drafter
        self.model = _laid_out(widened(model) if widen else model, plan)
        self.scheduler = Scheduler(_limits(model.config, settings, plan))
        self.program = _program(plan, settings, compiler_options)
        self.steps = 0
        self._mesh, self._state = plan.mesh, plan.empty()
        self._writer = Writer(settings, plan)
        self._answers: dict[Text, Answer] = {}
        self._flying: deque[list[_Pass]] = deque()
        self._clock = clock

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        n: int = 1,
        stop: Iterable[int] = (),
        watch: Sequence[Callable[[int], bool]] = (),
        top: int = 0,
        drafts: int = 0,
        guides: Sequence[Guide] = (),
        priority: int = 0,
        seconds: float = math.inf,
    ) -> list[Answer]:
        """Let a prompt wait for its answers, which share its pages.

        Args:
            prompt: ids.
            max_tokens: most tokens of an answer.
            sampling: how ids are picked; each answer has a seed of its own, the first one that of `sampling`.
            n: how many answers.
            stop: ids after which an answer is over.
            watch: of each answer, what is told every id and says whether the answer is over.
            top: how many of the likeliest ids are told with every token.
            drafts: most ids that are guessed, by the drafter or from the text itself, and checked in the same step; the
                text is the same.
            guides: of each answer, what says which ids it may go on with; nothing is guessed then.
            priority: smaller is served first.
            seconds: after which it is over.

        Raises:
            Overload: too many texts wait.
            ValueError: an id is not in the vocabulary, or the text is too long.
        """
        self._check(n, max_tokens, top, sampling)
        answers: list[Answer] = []
        blind = sampling.adjusts and self.settings.flights > 2  # penalties need all ids but the newest, which is there
        drafts, patient = 0 if guides else drafts, drafts > 0 or blind or bool(guides)
        for i in range(n):
            leader = answers[0].text if i else None
            text = self._text(prompt, len(prompt) + max_tokens, priority, seconds, leader=leader, patient=patient)
            own = dataclasses.replace(sampling, seed=(sampling.seed + i * 0x9E3779B9) & 0xFFFFFFFF)
            told = watch[i] if watch else None, top, drafts, guides[i] if guides else None
            answers.append(self._wait(Answer(text, own, frozenset(stop), *told)))
        return answers

    def _check(self, n: int, max_tokens: int, top: int, sampling: Sampling) -> None:
        if n < 1 or max_tokens < 1 or not 0 <= top <= self.settings.likeliest:
            raise ValueError(
                f"cannot make n={n} answers of max_tokens={max_tokens} with top={top}: n and max_tokens must be at "
                f"least 1, and top between 0 and {self.settings.likeliest}."
            )
        if self.scheduler.limits.queue - len(self.scheduler.waiting) < n:
            self.scheduler.refuse()
        check_tokens([token for token, _ in sampling.logit_bias], self.model.config.vocab_size)

    def _text(self, ids: Sequence[int], limit: int, priority: int, seconds: float, **more: Any) -> Text:
        """Return a text, whose ids are of the vocabulary."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.model)):
            raise ValueError(
                "cannot go on with a model whose arrays were donated or deleted: they are the engine's too. Drop the "
                "engine before, and make one of the new model."
            )
        check_tokens(ids, self.model.config.vocab_size)
        return Text(list(map(int, ids)), limit, priority, self._clock() + seconds, **more)

    def _wait(self, answer: Answer) -> Answer:
        self.scheduler.submit(answer.text)
        self._answers[answer.text] = answer
        return answer

    def score(
        self, ids: Sequence[int], *, first: int = 1, top: int = 0, priority: int = 0, seconds: float = math.inf
    ) -> Answer:
        """Let a text wait to be scored: log-probability, entropy and rank of every id from number `first` on.

        What comes before `first` need not be read again where another text began so. With `top`, the likeliest ids that
        could have stood there are told too.

        Raises:
            Overload: too many texts wait.
            ValueError: an id is not in the vocabulary, there is nothing to score, or the text is too long.
        """
        if not 1 <= first < len(ids) or not 0 <= top <= self.settings.likeliest:
            raise ValueError(
                f"cannot score a text of {len(ids)} ids from number {first} on with top={top}: give at least two ids, "
                f"and at most top={self.settings.likeliest}."
            )
        text = self._text(ids, len(ids), priority, seconds, fresh=first - 1)
        return self._wait(Answer(text, GREEDY, top=top, scores=Scores.blank(len(ids) - 1, top)))

    def embed(
        self, ids: Sequence[int], *, pooling: str = "mean", priority: int = 0, seconds: float = math.inf
    ) -> Answer:
        """Let a text wait to be embedded: what the head reads, the mean over its ids or the last one's.

        The mean is summed in order of position, so its bits do not depend on who else is asking either.

        Raises:
            Overload: too many texts wait.
            ValueError: an id is not in the vocabulary, the text is too long, or there is no such pooling.
        """
        if pooling not in ("mean", "last"):
            raise ValueError(f"cannot embed with pooling={pooling}: there are mean and last.")
        text = self._text(ids, len(ids) + 1, priority, seconds, fresh=0 if pooling == "mean" else None)
        return self._wait(Answer(text, GREEDY, vector=np.zeros(self.model.config.embed_dim), pooling=pooling))

    def cancel(self, answer: Answer) -> None:
        """End an answer; its pages are free."""
        self.scheduler.end(answer.text, "cancelled")
        self._end(answer)

    def step(self) -> bool:
        """Hand a step to the device, and take the results of one before; return whether anything has happened.

        A step is one token for every text that is written, and a `budget` of tokens of prompts.
        """
        self._draft()
        if passes := self._passes():
            self._flying.append(passes)
            self.steps += 1
        landed = False
        while len(self._flying) > (self.settings.flights - 1 if passes else 0):
            for each in self._flying.popleft():
                self._land(*each)
            landed = True
        over = [answer for text, answer in self._answers.items() if text.over is not None]
        for answer in over:
            self._end(answer)
        return bool(passes or over) or landed

    def _passes(self) -> list[_Pass]:
        """Hand the passes of a step to the device; return what is needed to take their results."""
        handed: list[_Pass] = []
        planned: list[Span] = []
        while len(handed) < self.settings.passes and (spans := self.scheduler.plan(self._clock(), planned)):
            handed.append(self._hand(spans))
            planned += spans
        return handed

    def _draft(self) -> None:
        """Guess how the texts go on that ask for it and are about to be written.

        The drafter draws with the random numbers that its guess is checked with (`zoo.engine.sampling`), so it is right
        more often than a draw of its own would be.
        """
        waiting = []
        for text in self.scheduler.running:
            answer = self._answers[text]
            most = min(answer.drafts, text.limit - len(text.ids) - 1)
            if most > 0 and not text.flying and text.todo <= 1 + answer.drafts:
                waiting.append((text, answer, most))
        if self.drafter is None:
            for text, _, most in waiting:
                text.drafts = guess(text.ids, most)
            return
        drafted = [self.drafter.submit(text.ids, max_tokens=most, sampling=one.sampling) for text, one, most in waiting]
        self.drafter.run()
        for (text, *_), [found] in zip(waiting, drafted, strict=True):
            text.drafts = [token.id for token in found.tokens]

    def stream(self, answer: Answer) -> Iterator[Token]:
        """Yield an answer's tokens as they come, driving the engine."""
        told = 0
        while True:
            yield from answer.tokens[told:]
            told = len(answer.tokens)
            if answer.finish is not None:
                return
            self.step()

    def run(self) -> None:
        """Go on until nothing waits."""
        while self.step():
            pass

    @property
    def busy(self) -> bool:
        """Whether any text waits or runs."""
        return bool(self._answers or self._flying)

    def _hand(self, spans: list[Span]) -> _Pass:
        """Hand a pass to the device; return what is needed to take its results."""
        work, begins = self._writer.work(spans, [self._answers.get(span.text) for span in spans])
        with contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            self._state, picked, hidden = self.program(self.model, self._state, work)
        return spans, begins, picked, hidden

    def _land(self, spans: list[Span], begins: list[int], picked: Picked, hidden: Any) -> None:
        """Take the results of a pass."""
        answers = [self._answers.get(span.text) for span in spans]
        ids, full, drawn = jax.device_get((picked.ids, picked.full, picked.drawn))
        more = any(answer is not None and (answer.scores is not None or answer.top) for answer in answers)
        told: Picked | None = jax.device_get(picked) if more else None
        for span, begin, answer in zip(spans, begins, answers, strict=True):
            end = begin + span.count
            first = end - span.picks
            new = self.scheduler.commit(span, ids[first:end].tolist())
            if answer is None:
                continue
            if answer.vector is not None:
                self._pool(answer, span, np.asarray(hidden)[begin:end])
                continue
            if told is not None and answer.scores is not None:
                _score(answer, span, jax.tree.map(lambda each, own=slice(begin, end): each[own], told))
            for at, token in enumerate(new, first):
                top = () if told is None else told.top
                likeliest = tuple(zip(*(each[at, : answer.top].tolist() for each in top), strict=True))
                self._take(answer, Token(token, float(full[at]), float(drawn[at]), likeliest))
                if answer.text.over is not None:
                    break
            if answer.text.over is None and self.scheduler.finished(answer.text):
                self.scheduler.end(answer.text, "length")

    def _pool(self, answer: Answer, span: Span, hidden: np.ndarray) -> None:
        """Take hidden states of a text's positions, those that it has already left out."""
        for state in np.asarray(hidden, np.float64)[max(0, answer.summed - span.start) :]:
            answer.vector = answer.vector + state if answer.pooling == "mean" else state
        answer.summed = max(answer.summed, span.start + span.count)
        if answer.summed == answer.text.given and answer.text.over is None:
            self.scheduler.end(answer.text, "length")

    def _take(self, answer: Answer, token: Token) -> None:
        """Go on with an id that was picked; who watches or guides a text and fails ends that text alone."""
        if token.id < 0 or answer.error is not None:
            self._fail(answer, answer.error or _NANS)
            return
        answer.tokens.append(token)
        try:
            heard = answer.watch is not None and answer.watch(token.id)
            complete = answer.guide is not None and answer.guide.take(token.id)
        except Exception as error:
            self._fail(answer, reason(error))
        else:
            if token.id in answer.stop or heard or complete:
                self.scheduler.end(answer.text, "stop")

    def _fail(self, answer: Answer, error: str) -> None:
        answer.error = error
        self.scheduler.end(answer.text, "error")

    def _end(self, answer: Answer) -> None:
        answer.finish = answer.finish or answer.text.over
        self._answers.pop(answer.text, None)


def _limits(config: Any, settings: Settings, plan: Plan) -> Limits:
    """Return what a scheduler keeps to."""
    ropes = [rope[1] for rope in config.layer_ropes if rope is not None and rope[1] is not None]
    turns = [rope.original_length for rope in ropes if rope.rope_type == "longrope"]
    grows = any(rope.rope_type in ("dynamic", "longrope") for rope in ropes)
    return Limits(
        rows=settings.rows, width=settings.width, page=settings.page, length=settings.length, queue=settings.queue,
        windows=plan.kinds.windows, pages=plan.pages,
        # Frequencies that grow with the text make no beginning another's, and of a state pages hold nothing.
        share=settings.share and not grows and not config.recurrent_layers, again=bool(config.recurrent_layers),
        turn=min(turns, default=None),
    )  # fmt: skip


def _laid_out(model: Any, plan: Plan) -> Any:
    """Return a model whose layers are where the program reads them without a copy."""
    if plan.platform != "cpu" or plan.mesh is not None:
        return model
    return apart(model) if plan.unroll else jax.tree.map(_by_bits, model)


def _by_bits(leaf: Any) -> Any:
    """Return floats of 8 bits as integers, in the same memory: of all layers' CPUs would make wider floats at once."""
    if leaf.dtype != jnp.float8_e4m3fn:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=jnp.uint8)
    return jax.device_put(np.asarray(leaf).view(np.uint8), leaf.sharding, may_alias=True)


def _program(plan: Plan, settings: Settings, options: Mapping[str, Any] | None) -> Any:
    told = tuple(sorted((options or {}).items()))
    product = stepped if settings.exact or plan.platform == "cpu" else ragged
    return program(Fixed(plan.kinds, plan.dtype, settings.likeliest, plan.unroll, product), told)


def _score(answer: Answer, span: Span, told: Picked) -> None:
    """Write what a step says of a span into the scores of its text."""
    scores, first = answer.scores, unasked(answer, span)
    assert scores is not None
    put = slice(span.start + first, span.start + span.count)
    scores.logprobs[put], scores.entropy[put] = told.target[first:], told.entropy[first:]
    scores.rank[put] = told.rank[first:]
    if answer.top:
        scores.top[put], scores.top_logprobs[put] = (each[first:, : answer.top] for each in told.top)


def lowered(
    model: Any,
    settings: Settings,
    *,
    dtype: DTypeLike | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Lowered:
    """Return the program of an engine for a model of mere shapes: to be compiled for devices that are not there.

    Its arguments are as `Engine`'s.
    """
    plan = Plan.of(model, settings, dtype)
    work, _ = Writer(settings, plan).work([], [])
    run = _program(plan, settings, compiler_options)
    with contextlib.nullcontext() if plan.mesh is None else jax.set_mesh(plan.mesh):
        return run.lower(_laid_out(model, plan), plan.state, work)


def _check_drafter(drafter: Engine, vocab_size: int, settings: Settings) -> None:
    ids, own = drafter.model.config.vocab_size, drafter.settings
    if ids != vocab_size or own.length < settings.length or own.queue < settings.rows:
        raise ValueError(
            f"cannot draft with a model of {ids} ids for one of {vocab_size}, or for {settings.rows} texts of "
            f"{settings.length} tokens with a queue of {own.queue} and a length of {own.length}: the vocabulary must "
            "be the same, and queue and length at least as large."
        )


def guess(ids: Sequence[int], most: int, longest: int = 3) -> list[int]:
    """Return what followed when the text last ended like this: at most so many ids (https://arxiv.org/abs/2304.04487).

    Args:
        ids: a text.
        most: ids that are returned at most.
        longest: of the endings that are looked for, the longest first.
    """
    whole = np.asarray(ids)
    for size in range(min(longest, len(whole) - 1), 0, -1):
        starts = np.lib.stride_tricks.sliding_window_view(whole[:-1], size)
        if len(found := np.flatnonzero((starts == whole[-size:]).all(axis=1))):
            begin = int(found[-1]) + size
            return whole[begin : begin + most].tolist()
    return []
