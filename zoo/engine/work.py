"""What a step is told of its spans, as arrays of its fixed shape: written on the host, read by the device."""

import dataclasses
import functools
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

    What no text asks for is not sent anew with every step: it stays on the device.
    """

    def __init__(self, settings: Settings, plan: Plan):
        self.settings, self.plan = settings, plan
        self._history = jnp.full((settings.rows, plan.most * settings.page), -1, jnp.int32)
        self._allowed = jnp.zeros((settings.rows, plan.words), jnp.uint32)
        self._blanks = functools.cache(self._blank)  # making the modules anew takes longer than copying their arrays

    def work(self, spans: Sequence[Span], answers: Sequence[Answer | None]) -> tuple[Work, list[int]]:
        """Return the work of a step, and where in it each span begins.

        Args:
            spans: of the step.
            answers: whose spans these are; None of a text that is over.
        """
        narrow = not self.settings.exact and all(span.count == 1 for span in spans)
        width = 1 if narrow else self.settings.width
        picking = [one for span, one in zip(spans, answers, strict=True) if span.picks and one is not None]
        adjusts, bound = any(one.sampling.adjusts for one in picking), any(one.guide for one in picking)
        work = jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, self._blanks(width, adjusts, bound)
        )
        begins, asked, row = [], [], 0
        for span, answer in zip(spans, answers, strict=True):
            begin, until = row * width, row + math.ceil(span.count / width)
            self._put_tokens(work, span, begin)
            self._put_text(work, span, slice(row, until))
            if answer is not None:
                asked += range(begin + unasked(answer, span), begin + span.count)
                if span.picks:
                    self._put_rules(work.rules, answer, range(row, until))
            begins, row = [*begins, begin], until
        np.asarray(work.asked).reshape(-1)[: len(asked)] = asked
        np.asarray(work.rules.scores)[...] = any(one is not None and one.scores is not None for one in answers)
        np.asarray(work.rules.lists)[...] = any(one is not None and one.top for one in answers)
        return work, begins

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
        np.asarray(work.slots)[rows], np.asarray(work.lengths)[rows] = span.slot, span.text.given
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
