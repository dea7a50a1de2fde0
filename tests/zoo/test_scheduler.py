"""The scheduler, held to its invariants by a state machine: pages in are pages out, whatever happens in between."""

import math
from collections import Counter, deque

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zoo.engine.pages import Pool, PrefixCache, behind
from zoo.engine.scheduler import Limits, Overload, Scheduler, Text


def limits(**changes):
    sizes = dict(rows=4, width=2, page=2, length=24, queue=6, windows=(None,), pages=(16,))
    return Limits(**{**sizes, **changes})


def run(scheduler, flights=1, pick=lambda text, i: 7, most=300):
    """Run until nothing is left; return the spans of every step."""
    flying, steps = deque(), []
    for _ in range(most):
        spans = scheduler.plan()
        flying.append(spans)
        steps.append(spans)
        while len(flying) > (flights if spans else 0):
            for span in flying.popleft():
                scheduler.commit(span, [pick(span.text, i) for i in range(span.picks)])
                if span.text.over is None and scheduler.finished(span.text):
                    scheduler.end(span.text, "length")
        if not (scheduler.waiting or scheduler.running):
            return steps
    raise AssertionError(f"texts starve: {scheduler.waiting} {scheduler.running}")


class Weather(RuleBasedStateMachine):
    """Texts come, run, are cancelled and run out of time, in any order."""

    @initialize(
        windows=st.sampled_from([(None,), (3,), (None, 3), (5, None)]),
        pages=st.integers(10, 20),
        width=st.integers(1, 3),
        share=st.booleans(),
        again=st.booleans(),
    )
    def begin(self, windows, pages, width, share, again):
        sizes = tuple(pages if window is None else max(6, pages // 2) for window in windows)
        self.scheduler = Scheduler(
            limits(windows=windows, pages=sizes, width=width, length=20, share=share, again=again)
        )
        self.flying, self.texts, self.now = deque(), [], 0.0

    @rule(
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        more=st.integers(0, 4),
        priority=st.integers(0, 1),
        wait=st.sampled_from([math.inf, 3.0]),
        follows=st.booleans(),
    )
    def submit(self, ids, more, priority, wait, follows):
        if len(ids) == 1 and not more:
            return
        leader = self.texts[-1] if follows and self.texts and self.texts[-1].priority == priority else None
        ids = leader.ids[: leader.given] if leader else ids
        text = Text(ids=list(ids), limit=len(ids) + max(more, len(ids) == 1), priority=priority, leader=leader)
        text.deadline, text.fresh = self.now + wait, None if more else 0
        try:
            self.scheduler.submit(text)
            self.texts.append(text)
        except Overload:
            assert len(self.scheduler.waiting) == 6

    @rule(drafts=st.lists(st.integers(0, 1), max_size=3), passes=st.integers(1, 3))
    def step(self, drafts, passes):
        self.now += 1.0
        for text in self.scheduler.running:
            if not text.flying:
                text.drafts = list(drafts)
        spans = []
        for _ in range(passes):
            new = self.scheduler.plan(self.now, spans)
            rows = sum(math.ceil(span.count / self.scheduler.limits.width) for span in new)
            assert rows <= self.scheduler.limits.rows
            assert len({span.slot for span in new}) == len(new)
            spans += new
        picking = [span.text for span in spans if span.picks]
        assert len(set(picking)) == len(picking)  # a token of each in a step
        for span in spans:
            text, size = span.text, self.scheduler.limits.page
            assert span.count > 0 and span.start + span.count < text.limit
            if text.unsure:
                for position in range(span.start, span.start + span.count):
                    for held, pool in zip(text.pages, self.scheduler.pools, strict=True):
                        assert pool.holders[held[position // size]] == 1
        self.flying.append(spans)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def land(self, data):
        for span in self.flying.popleft():
            before = len(span.text.ids)
            picked = [data.draw(st.integers(0, 1)) for _ in range(span.picks)]
            new = self.scheduler.commit(span, picked)
            assert new == picked[: len(new)]
            assert span.text.over or len(span.text.ids) == before + len(new) <= span.text.limit
            if span.text.over is None and self.scheduler.finished(span.text):
                self.scheduler.end(span.text, "length")

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def cancel(self, data):
        self.scheduler.end(data.draw(st.sampled_from(self.texts)), "cancelled")

    @invariant()
    def pages_are_held_by_texts_and_the_prefix_cache_alone(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        for kind, pool in enumerate(scheduler.pools):
            held = Counter(page for text in self.texts if text.pages for page in text.pages[kind])
            held += Counter(node.pages[kind] for node in scheduler.prefixes._used)
            del held[None]
            assert held == Counter({page: count for page, count in enumerate(pool.holders) if count})
            assert sorted(pool.free + list(held)) == list(range(len(pool.holders)))
        assert all(text.slot is not None and text.over is None for text in scheduler.running)
        assert all(text.slot is None and text.over is None and not text.pages for text in scheduler.waiting)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda text: text.urgency)

    @invariant()
    def what_a_text_still_sees_is_there_and_what_it_writes_is_its_own(self):
        if not hasattr(self, "scheduler"):
            return
        size = self.scheduler.limits.page
        for text in self.scheduler.running:
            for held, pool in zip(text.pages, self.scheduler.pools, strict=True):
                position = min(text.done, len(text.ids)) if text.unsure else text.done
                for i in range(behind(position, pool.window, size), math.ceil(text.done / size)):
                    assert held[i] is not None
                for page in held[math.ceil(text.done / size) :]:
                    assert pool.holders[page] == 1

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.flying:
            for span in self.flying.popleft():
                self.scheduler.commit(span, [1] * span.picks)
        for text in list(self.scheduler.running):
            if self.scheduler.finished(text):
                self.scheduler.end(text, "length")
        run(self.scheduler)
        for kind, pool in enumerate(self.scheduler.pools):
            while self.scheduler.prefixes.evict(kind):
                pass
            assert len(pool.free) == len(pool.holders)


Weather.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, phases=[Phase.generate])
TestWeather = Weather.TestCase


def test_texts_that_write_come_before_prompts():
    scheduler = Scheduler(limits(width=1, pages=(40,)))
    first, second = Text(ids=[1, 2], limit=10), Text(ids=list(range(12)), limit=14)
    scheduler.submit(first)
    [span] = scheduler.plan()
    scheduler.commit(span, [3])
    scheduler.submit(second)
    assert [(span.text is first, span.count) for span in scheduler.plan()] == [(True, 1), (False, 3)]


def test_a_text_that_begins_like_another_starts_with_its_pages():
    scheduler = Scheduler(limits(pages=(40,)))
    scheduler.submit(Text(ids=list(range(9)), limit=12))
    run(scheduler)
    again = Text(ids=[*range(7), 9, 9], limit=12)
    scheduler.submit(again)
    assert scheduler.plan()[0].start == 6
    assert scheduler.reused == 6


def test_answers_to_one_prompt_share_its_pages():
    scheduler = Scheduler(limits(rows=6, width=4, pages=(40,)))
    leader = Text(ids=list(range(9)), limit=12)
    texts = [leader, *(Text(ids=list(range(9)), limit=12, leader=leader) for _ in range(3))]
    for text in texts:
        scheduler.submit(text)
    spans = scheduler.plan()
    assert [span.start for span in spans] == [0, 8, 8, 8]  # in the very step that computes the leader's
    assert len({text.pages[0][3] for text in texts}) == 1
    assert len({text.pages[0][4] for text in texts}) == 4


def test_pages_behind_a_window_are_free_again():
    scheduler = Scheduler(limits(windows=(3,), pages=(6,), share=False))
    text = Text(ids=[1], limit=24)
    scheduler.submit(text)
    most = 0
    for _ in range(23):
        [span] = scheduler.plan()
        most = max(most, 6 - len(scheduler.pools[0].free))
        scheduler.commit(span, [1])
    assert most == 2


def test_the_least_urgent_text_gives_up_its_pages_and_is_read_again():
    scheduler = Scheduler(limits(pages=(12,), share=False))
    texts = [Text(ids=[1] * 3, limit=22, priority=priority) for priority in (1, 0)]
    for text in texts:
        scheduler.submit(text)
    steps = run(scheduler)
    assert scheduler.preemptions >= 1
    again = [span for spans in steps[5:] for span in spans if span.count > 1]
    assert again and all(span.text is texts[0] for span in again)
    assert [len(text.ids) for text in texts] == [22, 22]


def test_a_long_text_is_not_overtaken_for_ever():
    scheduler = Scheduler(limits(rows=4, width=4, pages=(16,), share=False, queue=100))
    short = lambda: Text(ids=[1, 2], limit=12)
    long = Text(ids=[1] * 20, limit=24)
    for step in range(60):
        scheduler.submit(long if step == 3 else short())
        for span in scheduler.plan():
            scheduler.commit(span, [7] * span.picks)
            if span.text.over is None and scheduler.finished(span.text):
                scheduler.end(span.text, "length")
    assert long.over == "length"


def test_a_text_that_was_preempted_goes_on_from_what_it_has_written():
    scheduler = Scheduler(limits(pages=(40,)))
    text = Text(ids=[1, 2, 3], limit=20)
    scheduler.submit(text)
    for _ in range(8):
        [span] = scheduler.plan()
        scheduler.commit(span, [4])
    scheduler._stop(text)
    scheduler._wait(text)
    [span] = scheduler.plan()
    assert (len(text.ids), span.start, span.count) == (11, 10, 1)


@pytest.mark.parametrize(
    ("rows", "width", "passes", "prompt", "steps"),
    [
        (16, 1, 1, 1, 1), (16, 8, 1, 16, 2), (32, 1, 1, 34, 2), (64, 1, 1, 98, 2), (32, 8, 1, 256, 2),
        (32, 1, 1, 35, 3), (16, 1, 16, 241, 1), (16, 1, 16, 482, 2), (16, 1, 16, 483, 3), (16, 8, 2, 272, 2),
    ],
)  # fmt: skip
def test_a_prompt_is_read_in_few_steps_while_fifteen_texts_are_written(rows, width, passes, prompt, steps):
    """What they leave of each step is all its own: a token of the answer is there a step later."""
    sizes = dict(rows=rows, width=width, page=16, length=512, queue=100, windows=(None,), pages=(600,))
    scheduler = Scheduler(Limits(**sizes))
    for number in range(15):
        scheduler.submit(Text(ids=[number + 1] * 4, limit=400))
    for _ in range(10):
        for span in scheduler.plan():
            scheduler.commit(span, [7] * span.picks)
    text, taken = Text(ids=list(range(prompt)), limit=prompt + 9), 0
    scheduler.submit(text)
    while len(text.ids) == prompt:
        spans, taken = [], taken + 1
        for _ in range(passes):
            spans += scheduler.plan(0.0, spans)
        assert sum(span.picks for span in spans if span.text is not text) == 15
        for span in spans:
            scheduler.commit(span, [7] * span.picks)
    assert taken == steps


def test_least_recently_used_leaves_go_first():
    pool = Pool(4, None)
    tree = PrefixCache([pool], 1)
    first = tree.add(tree.root, (1,), [pool.take()])
    tree.add(first, (2,), [pool.take()])
    third = tree.add(tree.root, (3,), [pool.take()])
    for node in (first, *first.children.values(), third):
        pool.release(node.pages[0])  # whose text is over
    tree.match([1, 2], 2)
    assert tree.evict(0)
    assert not third.attached
    assert tree.evict(0)
    assert first.attached and not first.children
    assert tree.evict(0)
    assert not tree.evict(0)
    assert len(pool.free) == 4


def drafting(**how):
    """A scheduler, its one text, and the span in which three drafts of it are read."""
    scheduler, text = Scheduler(limits(pages=(40,), **how)), Text(ids=[1, 2, 3], limit=20)
    scheduler.submit(text)
    [span] = scheduler.plan()
    scheduler.commit(span, [4])
    text.drafts = [5, 6, 9]
    [span] = scheduler.plan()
    return scheduler, text, span


def test_drafts_that_are_right_are_kept_and_wrong_ones_forgotten():
    scheduler, text, span = drafting()
    assert (span.start, span.count, span.picks) == (3, 4, 4)
    assert scheduler.plan() == []  # how long the text is, nobody knows
    assert scheduler.commit(span, [5, 6, 7, 8]) == [5, 6, 7]
    assert (text.ids, text.done) == ([1, 2, 3, 4, 5, 6, 7], 6)


def test_drafts_that_are_right_are_read_again_where_layers_hand_on_a_state():
    """Of them nothing was kept: the next step begins behind what was sure, and makes up for it beside new drafts."""
    scheduler, text, span = drafting(share=False, again=True)
    assert scheduler.commit(span, [5, 6, 7, 8]) == [5, 6, 7]
    assert (text.ids, text.done, text.todo) == ([1, 2, 3, 4, 5, 6, 7], 4, 3)
    text.drafts = [8, 9]
    [span] = scheduler.plan()
    assert (span.start, span.count, span.picks) == (4, 5, 3)
    assert scheduler.commit(span, [8, 1, 2]) == [8, 1]
    assert text.done == 7


def test_time_runs_out_for_who_waits_and_who_runs():
    scheduler = Scheduler(limits(rows=1))
    texts = [Text(ids=[1, 2], limit=20, deadline=2.0) for _ in range(2)]
    for text in texts:
        scheduler.submit(text)
    scheduler.plan(1.0)
    assert scheduler.plan(2.0) == []
    assert [text.over for text in texts] == ["time", "time"]


@pytest.mark.parametrize(
    ("ids", "limit", "message"),
    [
        ([], 5, r"a text of 0 ids that ends at 5: texts here have 1 to 24 tokens"),
        ([1], 25, r"a text of 1 ids that ends at 25.*make `length` larger"),
        ([1], 24, r"a text of 24 tokens: it needs 12 pages of 2, and there are 8"),
    ],
)
def test_texts_that_could_never_run_are_refused(ids, limit, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(limits(pages=(8,))).submit(Text(ids=ids, limit=limit))


def test_a_full_queue_refuses():
    scheduler = Scheduler(limits(queue=1))
    scheduler.submit(Text(ids=[1], limit=3))
    with pytest.raises(Overload, match="1 texts wait already, and at most 1 may"):
        scheduler.submit(Text(ids=[1], limit=3))
