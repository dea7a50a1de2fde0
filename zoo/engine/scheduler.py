"""Which tokens of which texts run in the next step, and on which pages they are kept. Plain Python, free of JAX.

A pass has a fixed number of rows of a fixed number of slots. A row holds consecutive tokens of one text; a `Span` is
what a text gets of a pass, as many rows as it takes. Texts that write come first, one token each and their drafts; what
is left goes to prompts, in chunks, and so do further passes of the same step. Texts are served by urgency: smaller
`priority` first, then who came first; nobody overtakes a text that waits for pages, or a long one would wait for ever.

Nothing here changes an answer: the step computes a token's bits from its text alone (`zoo.engine.step`), and random
numbers belong to (seed, position). So a text that was preempted is read again, and one that begins as another did uses
its pages.

Invariants, which the tests' state machine holds it to: the holders of pages are texts and the prefix cache and nobody
else; a position is written on pages that its text holds alone; no pass has more rows than there are.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from zoo.engine.pages import Node, Pool, PrefixCache, behind


class Overload(RuntimeError):
    """The queue is full: come again later."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The sizes that a scheduler keeps to.

    Attributes:
        rows: rows of a pass.
        width: slots of a row.
        page: tokens on a page.
        length: tokens of the longest text.
        queue: how many texts may wait.
        windows: how many keys the layers of each window kind see; None is all.
        pages: how many pages each window kind has.
        share: whether beginnings are shared.
        again: whether drafts that were right are read again: what layers hand on was kept from before them.
        turn: tokens beyond which other rotary frequencies are a text's, from its beginning on: one that grows so long
            is read anew.
    """

    rows: int
    width: int
    page: int
    length: int
    queue: int
    windows: tuple[int | None, ...]
    pages: tuple[int, ...]
    share: bool = True
    again: bool = False
    turn: int | None = None


@dataclass(eq=False)
class Text:
    """A text that is read, and perhaps written on.

    Attributes:
        ids: what is known of it.
        limit: tokens in all at which it is over; that of a text that is only read is its length.
        priority: smaller is more urgent.
        deadline: when it is over at the latest, in the clock of `plan`.
        fresh: positions from here on have to be computed, not taken from the prefix cache; None is none of them.
        leader: a text with the same beginning, for whose pages this one waits.
        drafts: ids that may follow, to be checked in the same step.
        patient: it runs only when all that it picked is known, so that drafts can be made of it.
        over: why it has ended, if it has.
        slot: its number among the texts that run.
        done: how many positions have been handed to the device.
        flying: of these, spans whose results are not known yet.
        pending: ids that will have been picked by them.
        pages: where its keys and values are, of each window kind; None behind a window.
        given: how many ids it had at first.
        turned: for a text of how many tokens, at least, its keys are turned.
    """

    ids: list[int]
    limit: int
    priority: int = 0
    deadline: float = math.inf
    fresh: int | None = None
    leader: "Text | None" = None
    drafts: list[int] = field(default_factory=list)
    patient: bool = False
    over: str | None = None
    slot: int | None = None
    done: int = 0
    flying: int = 0
    pending: int = 0
    pages: list[list[int | None]] = field(default_factory=list)
    given: int = 0
    turned: int = 0
    number: int = 0
    unsure: bool = False  # drafts fly: how long the text will be is not known
    node: Node | None = None  # of its last page in the prefix cache
    noted: int = 0  # pages in the prefix cache

    @property
    def urgency(self) -> tuple[int, int]:
        """What texts are sorted by."""
        return self.priority, self.number

    @property
    def known(self) -> list[int]:
        """The ids, and the drafts that fly behind them."""
        return self.ids + self.drafts if self.unsure else self.ids

    @property
    def todo(self) -> int:
        """Positions that can be computed now; the last id of a whole text is only a target."""
        return min(len(self.ids) + self.pending, self.limit - 1) - self.done


@dataclass(frozen=True)
class Span:
    """Positions `start` to `start + count` of a text, in one pass.

    Attributes:
        text: whose.
        slot: the text's, in this pass.
        start: the first position.
        count: how many.
        picks: how many ids they pick: none, the next one, or one after the next id and each draft.
    """

    text: Text
    slot: int
    start: int
    count: int
    picks: int


class Scheduler:
    """The texts that wait and run, and the pages that they are on."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pools = [Pool(*each) for each in zip(limits.pages, limits.windows, strict=True)]
        self.prefixes = PrefixCache(self.pools, limits.page)
        self.waiting: list[Text] = []  # by urgency
        self.running: list[Text] = []
        self.preemptions = self.reused = 0
        self._slots = list(range(limits.rows))[::-1]
        self._numbers = itertools.count()

    def submit(self, text: Text) -> None:
        """Let a text wait for its turn.

        Raises:
            Overload: so many wait already.
            ValueError: it could never run.
        """
        size = self.limits.page
        if not text.ids or text.limit > self.limits.length or len(text.ids) > text.limit:
            raise ValueError(
                f"cannot take a text of {len(text.ids)} ids that ends at {text.limit}: texts here have 1 to "
                f"{self.limits.length} tokens, what is generated included. Shorten it, or make `length` larger."
            )
        for pool in self.pools:
            most = math.ceil((text.limit - 1) / size)
            most = most if pool.window is None else min(most, math.ceil(pool.window / size) + 1)
            if most > len(pool.holders):
                raise ValueError(
                    f"cannot take a text of {text.limit} tokens: it needs {most} pages of {size}, and there are "
                    f"{len(pool.holders)}. Make `tokens` larger."
                )
        if len(self.waiting) >= self.limits.queue:
            self.refuse()
        text.given, text.number = len(text.ids), next(self._numbers)
        self._wait(text)

    def refuse(self) -> NoReturn:
        """Say that the queue is full."""
        raise Overload(f"{len(self.waiting)} texts wait already, and at most {self.limits.queue} may.")

    def end(self, text: Text, why: str) -> None:
        """End a text, wherever it is, and let go of its pages."""
        if text.over is None:
            text.over = why
            if text.slot is None:
                self.waiting.remove(text)
            else:
                self._stop(text)

    def plan(self, now: float = 0.0, before: Sequence[Span] = ()) -> list[Span]:
        """Return what the next pass computes; it counts as handed to the device from here on.

        Args:
            now: the time.
            before: what the passes before it in the same step compute: who picks there does so once a step.
        """
        for text in [*self.waiting, *self.running]:
            if text.deadline <= now:
                self.end(text, "time")
        spans, rows = list(before), self.limits.rows
        picked = {span.text for span in before if span.picks}
        for text in sorted(self.running, key=lambda text: (text.todo > 1, *text.urgency)):
            if text.slot is not None and self._grown(text) and text.todo > 0:
                self._stop(text)
                self._wait(text)
            waits = text.unsure or (text.patient and text.pending > 0) or text in picked
            if rows and text.slot is not None and not waits and text.todo > 0:
                rows -= self._run(text, rows, spans)
        for text in list(self.waiting):
            if self._follows(text):
                continue
            if not (rows and self._slots and self._admit(text)):
                break
            rows -= self._run(text, rows, spans)
        return spans[len(before) :]

    def commit(self, span: Span, picked: Sequence[int]) -> list[int]:
        """Take the ids that a span picked; return those that the text goes on with."""
        text = span.text
        text.flying -= 1
        if span.picks and not text.unsure:
            text.pending -= 1
        if text.over is not None:
            return []
        new: list[int] = []
        if span.picks:
            drafts = text.drafts if text.unsure else []
            right = next((i for i, draft in enumerate(drafts) if draft != picked[i]), len(drafts))
            new = list(picked[: right + 1])[: text.limit - len(text.ids)]
            text.ids += new
            if text.unsure:
                text.unsure, text.drafts = False, []
                sure = span.count - len(drafts) + (0 if self.limits.again else len(new) - 1)
                text.done = span.start + sure if text.slot is not None else text.done
        if text.slot is not None:
            self._note(text)
        return new

    def finished(self, text: Text) -> bool:
        """Whether everything of a text is known."""
        read = text.given < text.limit or text.done >= text.limit - 1
        return read and len(text.ids) >= text.limit and not text.flying

    def _run(self, text: Text, rows: int, spans: list[Span]) -> int:
        """Give a text its span of the pass, if it gets pages; return how many rows that takes."""
        todo, drafts = text.todo, text.drafts[: max(0, text.limit - len(text.ids) - 1)] if not text.flying else []
        want = min(rows * self.limits.width, todo + len(drafts))
        if self.limits.turn is not None and text.turned <= self.limits.turn:
            want = min(want, self.limits.turn - text.done)
        self._trim(text)
        count = self._extend(text, want, spans)
        if not count or text.slot is None:
            return 0
        start, text.done = text.done, text.done + count
        text.drafts = drafts = drafts[: max(0, count - todo)]
        picks = 1 + len(drafts) if text.done - len(drafts) == len(text.ids) + text.pending else 0
        text.unsure = picks > 1
        text.pending += picks == 1
        text.flying += 1
        spans.append(Span(text, text.slot, start, count, picks))
        if not text.unsure:
            self._note(text)
        return math.ceil(count / self.limits.width)

    def _grown(self, text: Text) -> bool:
        """Whether all frequencies of a text change with its next token."""
        turn = self.limits.turn
        return turn is not None and text.turned <= turn <= text.done

    def _follows(self, text: Text) -> bool:
        """Whether a text cannot run yet: what it was computing is on its way, or its leader's pages are."""
        leader, size = text.leader if self.limits.share else None, self.limits.page
        behind_leader = leader is not None and leader.over is None and leader.done < (text.given - 1) // size * size
        return text.flying > 0 or behind_leader

    def _admit(self, text: Text) -> bool:
        """Let a waiting text run if there is room, with the pages of the longest beginning that is known."""
        size, most = self.limits.page, len(text.ids) - 1
        most = most if text.fresh is None else min(most, text.fresh)
        nodes = self.prefixes.match(text.ids, most) if self.limits.share else []
        start = len(nodes) * size
        text.pages = [
            [
                None if i < behind(start, pool.window, size) or page is None else pool.hold(page)
                for i, page in enumerate(node.pages[kind] for node in nodes)
            ]
            for kind, pool in enumerate(self.pools)
        ]
        if self.running and not self._roomy(len(text.ids) - start):
            self._drop(text)
            return False
        text.node, text.noted = nodes[-1] if nodes else self.prefixes.root, len(nodes)
        text.done, text.slot = start, self._slots.pop()
        long = self.limits.turn is not None and len(text.ids) > self.limits.turn
        text.turned = len(text.ids) if long else text.given
        self.reused += start
        self.waiting.remove(text)
        self.running.append(text)
        return True

    def _roomy(self, tokens: int) -> bool:
        """Whether there are pages for so many tokens more, and for one of every text that runs."""
        for kind, pool in enumerate(self.pools):
            step = self.limits.rows * self.limits.width
            kept = tokens if pool.window is None else min(tokens, pool.window + step)
            need = math.ceil(kept / self.limits.page) + 1 + len(self.running)
            if len(pool.free) < need and len(pool.free) + self.prefixes.spare(kind) < need:
                return False
        return True

    def _extend(self, text: Text, count: int, spans: list[Span]) -> int:
        """Return for how many of so many positions more a text has pages, after getting what can be got."""
        have = len(text.pages[0]) * self.limits.page - text.done
        while have < count and self._grow(text, spans, have > 0):
            have += self.limits.page
        return min(count, have) if text.slot is not None else 0

    def _grow(self, text: Text, spans: list[Span], content: bool) -> bool:
        """Give a text one page more of every kind: a free one, one of the prefix cache, or a less urgent text's.

        One that is content, having room for a token, takes no text's; one that would have to give up its own pages
        waits instead, if others run in this step.
        """
        for kind, pool in enumerate(self.pools):
            while not pool.free:
                if self.prefixes.evict(kind):
                    continue
                if content:
                    return False
                planned = {id(span.text) for span in spans}
                others = [one for one in self.running if id(one) not in planned]
                if not others:  # the text itself has its tokens of this step
                    return False
                victim = max(others, key=lambda one: one.urgency)
                if victim is text and planned & {id(one) for one in self.running}:
                    return False
                self._stop(victim)
                self._wait(victim)
                self.preemptions += 1
                if victim is text:
                    return False
        for held, pool in zip(text.pages, self.pools, strict=True):
            held.append(pool.take())
        return True

    def _note(self, text: Text) -> None:
        """Put full pages of known ids into the prefix cache."""
        size = self.limits.page
        assert text.node is not None
        while self.limits.share and text.node.attached and (text.noted + 1) * size <= min(text.done, len(text.ids)):
            start = text.noted * size
            own = [held[text.noted] for held in text.pages]
            text.node = self.prefixes.add(text.node, tuple(text.ids[start : start + size]), own)
            for kind, (page, kept) in enumerate(zip(own, text.node.pages, strict=True)):
                if page is not None and kept is not None and page != kept:  # another text had computed the same
                    text.pages[kind][text.noted] = self.pools[kind].hold(kept)
                    self.pools[kind].release(page)
            text.noted += 1

    def _trim(self, text: Text) -> None:
        """Let go of the pages that nothing from here on sees."""
        size = self.limits.page
        for held, pool in zip(text.pages, self.pools, strict=True):
            for i in reversed(range(min(behind(text.done, pool.window, size), len(held)))):
                if (page := held[i]) is None:
                    break
                pool.release(page)
                held[i] = None

    def _stop(self, text: Text) -> None:
        """Take a text that runs out of the steps; what is not in the prefix cache is to be computed again."""
        assert text.slot is not None
        if text.node is not None and text.node.attached:
            self.prefixes.touch(text.node)
        self._drop(text)
        self.running.remove(text)
        self._slots.append(text.slot)
        text.slot, text.node, text.noted, text.done = None, None, 0, 0

    def _drop(self, text: Text) -> None:
        for held, pool in zip(text.pages, self.pools, strict=True):
            for page in held:
                if page is not None:
                    pool.release(page)
        text.pages = []

    def _wait(self, text: Text) -> None:
        bisect.insort(self.waiting, text, key=lambda one: one.urgency)
