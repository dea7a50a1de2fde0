"""What a step is told of its spans, as arrays of its fixed shape: written on the host, read by the device."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zoo.engine.answers import Answer
from zoo.engine.sampling import Rules
from zoo.engine.scheduler import Span
from zoo.engine.sizes import Plan, Settings
from zoo.engine.step import Work


class Writer:
    """Writes the work of steps.

    What no text asks for, and how texts pick from one step to the next, is not sent anew with every step: it stays on
    the device.
    """

    def __init__(self, settings: Settings, plan: Plan):
        self.settings, self.plan = settings, plan
        self._history = jnp.full((settings.rows, plan.most * settings.page), -1, jnp.int32)
        self._allowed = jnp.zeros((settings.rows, plan.words), jnp.uint32)
        self._blanks = functools.cache(self._blank)  # making the modules anew takes longer than copying their arrays
        self._asks: tuple = ()  # how the step before picked
        self._settled: Work | None = None  # a blank with its rules, once two steps have picked alike

    def work(self, spans: Sequence[Span], answers: Sequence[Answer | None]) -> tuple[Work, list[int]]:
        """Return the work of a step, and where in it each span begins.

        Args:
            spans: of the step.
            answers: whose spans these are; None of a text that is over.
        """
        narrow = not self.settings.exact and all(span.count == 1 for span in spans)
        width = 1 if narrow else self.settings.width
        ends = [*itertools.accumulate(math.ceil(span.count / width) for span in spans)]
        rows = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        told = zip(spans, answers, rows, strict=True)
        there = [(span, answer, own) for span, answer, own in told if answer is not None]
        work = self._ruled(width, [(answer, own) for span, answer, own in there if span.picks], answers)
        asked: list[int] = []
        for span, own in zip(spans, rows, strict=True):
            self._put_tokens(work, span, own.start * width)
            self._put_text(work, span, slice(own.start, own.stop))
        for span, answer, own in there:
            begin = own.start * width
            asked += range(begin + unasked(answer, span), begin + span.count)
        np.asarray(work.asked).reshape(-1)[: len(asked)] = asked
        return work, [own.start * width for own in rows]

    def _ruled(self, width: int, picking: Sequence[tuple[Answer, range]], answers: Sequence[Answer | None]) -> Work:
        """Return work that says how rows pick and what is told of it, and else nothing yet."""
        adjusts, bound = any(one.sampling.adjusts for one, _ in picking), any(one.guide for one, _ in picking)
        scores = any(one is not None and one.scores is not None for one in answers)
        lists = any(one is not None and bool(one.top) for one in answers)
        asks = width, scores, lists, *((own, one.sampling, one.text.given) for one, own in picking)
        again = asks == self._asks and not (adjusts or bound)
        if again and self._settled is not None:
            return _copied(self._settled)
        blank = self._blanks(width, adjusts, bound)
        work = _copied(blank)
        for answer, own in picking:
            self._put_rules(work.rules, answer, own)
        np.asarray(work.rules.scores)[...], np.asarray(work.rules.lists)[...] = scores, lists
        self._asks = asks
        self._settled = dataclasses.replace(blank, rules=jax.tree.map(jnp.asarray, work.rules)) if again else None
        return work

    def _blank(self, width: int, adjusts: bool, bound: bool) -> Work:
        """Return work of a step in which nothing is computed, as numpy arrays but for what is not asked for."""
        rows, most, block = self.settings.rows, self.plan.most, self.plan.block
        history, words = most * self.settings.page if adjusts else 0, self.plan.words if bound else 0
        rules = Rules.neutral(rows, history, words)
        rules = rules if adjusts else dataclasses.replace(rules, history=self._history)
        rules = rules if bound else dataclasses.replace(rules, allowed=self._allowed)
        tokens, targets = np.zeros((2, rows, width), np.int32)
        slots, lengths = np.zeros((2, rows), np.int32)
        blocks = math.ceil(rows * width / block)
        return Work(
            tokens=tokens, positions=np.full((rows, width), -1, np.int32), targets=targets,
            drafted=np.zeros((rows, width), bool), slots=slots,
            tables=tuple(np.full((rows, most), pages, np.int32) for pages in self.plan.pages), lengths=lengths,
            keeps=np.zeros(rows, bool), asked=np.full((blocks, block), rows * width, np.int32), rules=rules,
        )  # fmt: skip

    def _put_tokens(self, work: Work, span: Span, begin: int) -> None:
        """Write a span's tokens, their positions, and what follows each of them as far as that is known."""
        text, count = span.text, span.count
        flat = lambda array: np.asarray(array).reshape(-1)[begin : begin + count]
        following = text.known[span.start : span.start + count + 1]
        own, following = following[:count], following[1:]
        flat(work.tokens)[:] = [*own, *([-1] * (count - len(own)))]
        flat(work.targets)[: len(following)] = following
        flat(work.positions)[:] = np.arange(span.start, span.start + count)
        flat(work.drafted)[count - max(0, span.picks - 1) :] = True

    def _put_text(self, work: Work, span: Span, rows: slice) -> None:
        """Write which text the rows of a span are of, and its pages."""
        np.asarray(work.slots)[rows], np.asarray(work.lengths)[rows] = span.slot, span.text.turned
        np.asarray(work.keeps)[rows.stop - 1] = span.picks > 0
        for table, held, last in zip(work.tables, span.text.pages, self.plan.pages, strict=True):
            np.asarray(table)[rows, : len(held)] = [last if page is None else page for page in held]

    @staticmethod
    def _put_rules(rules: Rules, answer: Answer, rows: range) -> None:
        """Write how the rows of a span pick; only the last of them does so by a guide."""
        for row in rows:
            rules.put(row, answer.sampling, answer.text.known, answer.text.given)
        if answer.guide is None:
            return
        try:
            words = answer.guide.allowed()[: rules.allowed.shape[1]]
        except Exception as error:  # this text ends where the step's results are taken, and no other
            answer.error = reason(error)
            return
        rules.bound[rows[-1]], rules.allowed[rows[-1], : len(words)] = True, words


def _copied(blank: Work) -> Work:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, blank)


def reason(error: Exception) -> str:
    """Return why a text ends of which who watches or guides it has failed."""
    return str(error) or type(error).__name__


def unasked(answer: Answer, span: Span) -> int:
    """Return how many of a span's slots neither pick nor are scored."""
    if answer.vector is not None:
        return span.count
    if answer.scores is None:
        return span.count - span.picks
    return min(span.count, max(0, (span.text.fresh or 0) - span.start))
