"""An engine: submit texts, and their answers come token by token, the same whoever else is asking.

    engine = Engine(model, Settings(length=256))
    answer = engine.submit([1, 2, 3], max_tokens=16)[0]
    ids = [token.id for token in engine.stream(answer)]

Read on in `zoo.engine.scheduler` (what a step does, and for whom), `zoo.engine.pages` (where keys and values are),
`zoo.engine.step` (the one program), `zoo.engine.sampling` (how ids are picked).

One thread drives an engine: `step()` hands a step to the device and takes the results of the one before, so that the
device computes while the host plans. Ids that were picked stay on the device, where the next step finds them.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zoo.engine.sampling import GREEDY, Guide, Rules, Sampling
from zoo.engine.scheduler import Limits, Scheduler, Span, Text
from zoo.engine.step import Kinds, State, Work, program, table, table_width
from zoo.models.decoder import widened
from zoo.models.layers import check_tokens
from zoo.models.mixture import Mixture

_WHOLE = 2  # arrays as large as the logits that picking has at once


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes of an engine.

    Attributes:
        length: tokens of the longest text, what is generated included.
        rows: texts that run at once, a row of a step for each; a step costs `rows * width` tokens, idle or busy.
        width: tokens of one text in a row; 1 fits CPUs, 8 accelerators, which read weights for that many anyway.
        page: tokens on a page.
        tokens: tokens that are kept, of texts that run and of those that may come again; None is twice what `rows`
            texts of a quarter of `length` have, and at least one text.
        queue: texts that may wait.
        flights: steps that are handed to the device before the first one's results are read.
        share: whether texts that begin alike share their beginning.
        likeliest: how many of the likeliest ids can be asked for.
        logits: places of a step whose logits exist at a time, for each of which the head is read once; None is one of
            each row, or as many as take a hundredth of the pages' memory.
        exact: refuse what could make a text's bits depend on others; otherwise a step in which no text has more than a
            token runs in rows of one place.
    """

    length: int = 2048
    rows: int = 16
    width: int = 1
    page: int = 16
    tokens: int | None = None
    queue: int = 1024
    flights: int = 2
    share: bool = True
    likeliest: int = 20
    logits: int | None = None
    exact: bool = True

    def __post_init__(self):
        names = ("length", "rows", "width", "page", "tokens", "queue", "flights", "logits")
        values = {name: getattr(self, name) for name in names}
        if wrong := [f"{name}={value}" for name, value in values.items() if value is not None and value < 1]:
            raise ValueError(f"an engine cannot have {', '.join(wrong)}: each must be at least 1.")

    def pages(self, windows: Sequence[int | None]) -> tuple[int, ...]:
        """Return how many pages each window kind has: behind a window fewer are needed."""
        least = math.ceil(self.length / self.page)
        tokens = max(self.length, self.rows * self.length // 2) if self.tokens is None else self.tokens
        whole = max(1, math.ceil(tokens / self.page))
        of = lambda window: 2 * self.rows * (math.ceil((window + self.width) / self.page) + 2) + least
        return tuple(whole if window is None else min(whole, of(window)) for window in windows)


@dataclass(frozen=True)
class Token:
    """An id that was picked, and its log-probabilities: as the model has it, and as it was drawn (`Picked`)."""

    id: int
    logprob: float
    drawn: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scores:
    """Of every id of a text after the first: its log-probability, the entropy of what could have stood there in nats,
    how many ids were likelier, and the likeliest `[.., top]`; NaN and -1 before the first that is scored."""

    logprobs: np.ndarray
    entropy: np.ndarray
    rank: np.ndarray
    top: np.ndarray
    top_logprobs: np.ndarray


@dataclass(eq=False)
class Answer:
    """What becomes of a text.

    Attributes:
        text: as the scheduler has it.
        sampling: how it goes on.
        guide: what allows its ids.
        tokens: what followed so far, a stop that ends it included.
        finish: why it has ended: `stop`, `length`, `time`, `cancelled` or `error`; None while it has not.
        scores: of a text that is scored.
        vector: of a text that is embedded, the sum of its hidden states, or the last one.
    """

    text: Text
    sampling: Sampling
    stop: frozenset[int] = frozenset()
    watch: Callable[[int], bool] | None = None
    top: int = 0
    drafts: int = 0
    guide: Guide | None = None
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    scores: Scores | None = None
    vector: np.ndarray | None = None
    pooling: str = "mean"
    summed: int = 0  # positions that `vector` holds

    @property
    def embedding(self) -> np.ndarray:
        """The hidden state of a text as one vector `[D]`, in float32."""
        assert self.vector is not None
        return np.asarray(self.vector / (self.summed if self.pooling == "mean" else 1), np.float32)


class Engine:
    """A model, its pages, and the texts that it is answering.

    Args:
        model: any of the zoo.
        settings: sizes.
        dtype: what to compute and to keep keys and values in; None is the parameters' own.
        widen: whether 16-bit weights are converted once where the device would convert them at every step
            (`zoo.models.decoder.widened`).
        compiler_options: XLA's.
        clock: seconds, for time limits.
        drafter: an engine of a smaller model of the same vocabulary, with pages of its own, that guesses how texts go
            on where `drafts` are asked for; None looks into the text itself.

    Raises:
        ValueError: the model cannot read texts of `length`; or the answers of such a model would depend on others, and
            `exact` is asked for; or the drafter has other ids, or less room.
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
        model.check_length(settings.length - 1)  # the last token is not read
        config = model.config
        self.dtype = jnp.dtype(model.embed.dtype if dtype is None else dtype)
        platform = next(iter(jax.tree.leaves(model)[0].devices())).platform
        if settings.exact and platform != "cpu" and isinstance(model, Mixture):
            raise ValueError(
                f"cannot serve this mixture exactly on a {platform}: its ragged products may round a token by how many "
                "others go to the same expert. Pass exact=False."
            )
        if drafter is not None:
            _check_drafter(drafter, config.vocab_size, settings)
        self.drafter = drafter
        self.model = widened(model) if widen else model
        self.kinds = Kinds.of(config.layer_windows, settings.length)
        pages = settings.pages(self.kinds.windows)
        grows = any(
            rope is not None and rope[1] is not None and rope[1].kind in ("dynamic", "longrope")
            for rope in config.layer_ropes
        )
        self.scheduler = Scheduler(
            Limits(
                rows=settings.rows, width=settings.width, page=settings.page, length=settings.length,
                queue=settings.queue, windows=self.kinds.windows, pages=pages,
                share=settings.share and not grows,  # frequencies that grow with the text: no beginning is another's
            )
        )  # fmt: skip
        pool = self.kinds.pool(config, pages, settings.page, self.dtype, on_cpu=platform == "cpu")
        self._state = State(pool, jnp.zeros(settings.rows, jnp.int32))
        size = sum(each.nbytes for each in jax.tree.leaves(pool))
        block = settings.logits or min(settings.rows, max(1, size // 100 // (_WHOLE * 4 * config.vocab_size)))
        self._block = min(block, settings.rows * settings.width)
        options = tuple(sorted((compiler_options or {}).items()))
        self.program = program(self.kinds, self.dtype, settings.likeliest, options)
        self.steps = 0
        self._most = table_width(settings.length, settings.page)
        self._blank = jnp.full((settings.rows, self._most * settings.page), -1, jnp.int32)
        self._free = jnp.zeros((settings.rows, math.ceil(config.vocab_size / 32)), jnp.uint32)
        self._answers: dict[Text, Answer] = {}
        self._flying: deque[tuple[list[Span], list[int], Any, Any, bool]] = deque()
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
        check_tokens(np.asarray(prompt, np.int64), self.model.config.vocab_size)
        if n < 1 or max_tokens < 1 or not 0 <= top <= self.settings.likeliest:
            raise ValueError(
                f"cannot make n={n} answers of max_tokens={max_tokens} with top={top}: n and max_tokens must be at "
                f"least 1, and top between 0 and {self.settings.likeliest}."
            )
        if self.scheduler.limits.queue - len(self.scheduler.waiting) < n:
            self.scheduler.refuse()
        answers: list[Answer] = []
        blind = sampling.adjusts and self.settings.flights > 2  # penalties need all ids but the newest, which is there
        drafts, patient = 0 if guides else drafts, drafts > 0 or blind or bool(guides)
        ids, limit, deadline = list(map(int, prompt)), len(prompt) + max_tokens, self._clock() + seconds
        for i in range(n):
            leader = answers[0].text if i else None
            text = Text(ids.copy(), limit, priority, deadline, leader=leader, patient=patient)
            own = dataclasses.replace(sampling, seed=(sampling.seed + i * 0x9E3779B9) & 0xFFFFFFFF)
            told = watch[i] if watch else None, top, drafts, guides[i] if guides else None
            answers.append(self._wait(Answer(text, own, frozenset(stop), *told)))
        return answers

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
        check_tokens(np.asarray(ids, np.int64), self.model.config.vocab_size)
        if not 1 <= first < len(ids) or not 0 <= top <= self.settings.likeliest:
            raise ValueError(
                f"cannot score a text of {len(ids)} ids from number {first} on with top={top}: give at least two ids, "
                f"and at most top={self.settings.likeliest}."
            )
        text = Text(list(map(int, ids)), len(ids), priority, self._clock() + seconds, fresh=first - 1)
        blank = lambda value, kind, *more: np.full((len(ids) - 1, *more), value, kind)
        scores = Scores(
            blank(np.nan, np.float32), blank(np.nan, np.float32), blank(-1, np.int64), blank(-1, np.int64, top),
            blank(np.nan, np.float32, top),
        )  # fmt: skip
        return self._wait(Answer(text, GREEDY, top=top, scores=scores))

    def embed(
        self, ids: Sequence[int], *, pooling: str = "mean", priority: int = 0, seconds: float = math.inf
    ) -> Answer:
        """Let a text wait to be embedded: what the head reads, the mean over its ids or the last one's.

        The mean is summed in order of position, so its bits do not depend on who else is asking either.

        Raises:
            Overload: too many texts wait.
            ValueError: an id is not in the vocabulary, the text is too long, or there is no such pooling.
        """
        check_tokens(np.asarray(ids, np.int64), self.model.config.vocab_size)
        if pooling not in ("mean", "last"):
            raise ValueError(f"cannot embed with pooling={pooling}: there are mean and last.")
        fresh = 0 if pooling == "mean" else None
        text = Text(list(map(int, ids)), len(ids) + 1, priority, self._clock() + seconds, fresh=fresh)
        return self._wait(Answer(text, GREEDY, vector=np.zeros(self.model.config.embed_dim), pooling=pooling))

    def cancel(self, answer: Answer) -> None:
        """End an answer; its pages are free."""
        self.scheduler.end(answer.text, "cancelled")
        self._end(answer)

    def step(self) -> bool:
        """Hand a step to the device, and take the results of one before; return whether there was anything to do."""
        self._draft()
        spans = self.scheduler.plan(self._clock())
        if spans:
            self._flying.append(self._hand(spans))
            self.steps += 1
        landed = False
        while len(self._flying) > (self.settings.flights - 1 if spans else 0):
            self._land(*self._flying.popleft())
            landed = True
        for answer in [answer for text, answer in self._answers.items() if text.over is not None]:
            self._end(answer)
        return bool(spans) or landed

    def _draft(self) -> None:
        """Guess how the texts go on that ask for it and are about to be written.

        The drafter draws with the random numbers that its guess is checked with (`zoo.engine.sampling`), so it is right
        more often than a draw of its own would be.
        """
        waiting = []
        for text in self.scheduler.running:
            answer = self._answers[text]
            most = min(answer.drafts, text.limit - len(text.ids) - 1)
            if most > 0 and not text.flying and text.todo == 1:
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

    def work(self, spans: Sequence[Span]) -> tuple[Work, list[int]]:
        """Return what a step is told of its spans, and where in it each of them begins."""
        rows, most = self.settings.rows, self._most
        narrow = not self.settings.exact and all(span.count == 1 for span in spans)
        width = 1 if narrow else self.settings.width
        tokens, targets = np.zeros((2, rows, width), np.int32)
        positions = np.full((rows, width), -1, np.int32)
        slots, lengths = np.zeros((2, rows), np.int32)
        keeps, last = np.zeros(rows, bool), [len(pool.holders) for pool in self.scheduler.pools]
        tables = tuple(np.full((rows, most), page, np.int32) for page in last)
        answers = [self._answers.get(span.text) for span in spans]
        adjusts = any(
            span.picks and one is not None and one.sampling.adjusts for span, one in zip(spans, answers, strict=True)
        )
        bound = any(span.picks and one is not None and one.guide for span, one in zip(spans, answers, strict=True))
        rules = Rules.neutral(rows, most * self.settings.page if adjusts else 0, self._free.shape[1] if bound else 0)
        begins, asked, row = [], [], 0
        for span, answer in zip(spans, answers, strict=True):
            text, count, begin = span.text, span.count, row * width
            ids = text.ids + text.drafts if text.unsure else text.ids
            own = ids[span.start : span.start + count]
            tokens.reshape(-1)[begin : begin + count] = [*own, *([-1] * (count - len(own)))]
            following = ids[span.start + 1 : span.start + count + 1]
            targets.reshape(-1)[begin : begin + len(following)] = following
            positions.reshape(-1)[begin : begin + count] = np.arange(span.start, span.start + count)
            until = row + math.ceil(count / width)
            slots[row:until], lengths[row:until] = span.slot, text.given
            keeps[until - 1] = span.picks > 0
            for kind, held in enumerate(text.pages):
                tables[kind][row:until] = table(held, most, last[kind])
            if answer is not None:
                asked += range(begin + self._unasked(answer, span), begin + count)
            if answer is not None and span.picks:
                for each in range(row, until):
                    rules.put(each, answer.sampling, text.ids, text.given)
                if answer.guide is not None:
                    words = answer.guide.allowed()[: self._free.shape[1]]
                    rules.bound[until - 1], rules.allowed[until - 1, : len(words)] = True, words
            begins, row = [*begins, begin], until
        wants = [one for one in answers if one is not None]
        rules = dataclasses.replace(
            rules,
            history=rules.history if adjusts else self._blank,
            allowed=rules.allowed if bound else self._free,
            scores=np.asarray(any(one.scores is not None for one in wants)),
            lists=np.asarray(any(one.top for one in wants)),
        )
        blocks = math.ceil(rows * width / self._block)
        places = np.full(blocks * self._block, rows * width, np.int32)
        places[: len(asked)] = asked
        return Work(
            tokens, positions, targets, slots, tables, lengths, keeps, places.reshape(blocks, -1), rules
        ), begins

    @staticmethod
    def _unasked(answer: Answer, span: Span) -> int:
        """How many of a span's places neither pick nor are scored."""
        if answer.vector is not None:
            return span.count
        if answer.scores is None:
            return span.count - span.picks
        return min(span.count, max(0, (span.text.fresh or 0) - span.start))

    def _hand(self, spans):
        work, begins = self.work(spans)
        self._state, picked, hidden = self.program(self.model, self._state, work)
        return spans, begins, picked, hidden, bool(work.rules.lists)

    def _land(self, spans, begins, picked, hidden, lists):
        ids, full, drawn, target = map(np.asarray, (picked.ids, picked.full, picked.drawn, picked.target))
        entropy, rank = np.asarray(picked.entropy), np.asarray(picked.rank)
        likeliest = tuple(map(np.asarray, picked.top)) if lists else ()
        for span, begin in zip(spans, begins, strict=True):
            answer, end = self._answers.get(span.text), begin + span.count
            first = end - span.picks
            new = self.scheduler.commit(span, ids[first:end].tolist())
            if answer is None:
                continue
            if answer.vector is not None:
                self._pool(answer, span, np.asarray(hidden)[begin:end])
                continue
            if answer.scores is not None:
                first = begin + self._unasked(answer, span)
                put = slice(span.start + first - begin, span.start + span.count)
                answer.scores.logprobs[put], answer.scores.entropy[put] = target[first:end], entropy[first:end]
                answer.scores.rank[put] = rank[first:end]
                if answer.top:
                    both = (each[first:end, : answer.top] for each in likeliest)
                    answer.scores.top[put], answer.scores.top_logprobs[put] = both
            for place, token in enumerate(new, first):
                top = zip(*(each[place, : answer.top].tolist() for each in likeliest), strict=True)
                self._take(answer, Token(token, float(full[place]), float(drawn[place]), tuple(top)))
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
        if token.id < 0:
            self.scheduler.end(answer.text, "error")
            return
        answer.tokens.append(token)
        heard = answer.watch is not None and answer.watch(token.id)
        complete = answer.guide is not None and answer.guide.take(token.id)
        if token.id in answer.stop or heard or complete:
            self.scheduler.end(answer.text, "stop")

    def _end(self, answer: Answer) -> None:
        answer.finish = answer.finish or answer.text.over
        self._answers.pop(answer.text, None)


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
