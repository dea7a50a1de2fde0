"""The one thread that owns the device: requests come in by a queue, and events go back to where each was asked.

Coroutines never touch the engine. What a client does not read any more is cancelled, and its pages are free.
"""

import asyncio
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from experiments.serving.stops import Stops
from zoo.engine.engine import Answer, Engine, Token

NO_MARKS: Mapping[int, str] = MappingProxyType({})


class Unavailable(RuntimeError):
    """The server is going down, or the device has failed."""


class Listener:
    """Turns an answer's ids into text as they come, and finds its stop strings.

    Args:
        tokenizer: the model's.
        before: the ids that the answer's text goes on from; none where it is a message of its own.
        stop: strings that end the answer.
        ends: ids that end it, and are no part of the text.
        marks: special tokens that are to be seen in the text all the same.
    """

    def __init__(
        self,
        tokenizer: Any,
        before: Sequence[int],
        stop: Sequence[str],
        ends: frozenset[int],
        marks: Mapping[int, str] = NO_MARKS,
    ):
        self._stream, self._ends, self._stops, self._marks = tokenizer.stream(before), ends, Stops(stop), marks
        self.pieces: list[str] = []  # what each id adds to what may be shown

    def __call__(self, token: int) -> bool:
        """Take an id; return whether a stop string is complete."""
        piece = "" if token in self._ends else self._marks.get(token, "")
        if token not in self._ends and not piece:
            piece = self._stream(token)
        self.pieces.append(self._stops.feed(piece))
        return self._stops.found is not None

    def rest(self) -> str:
        """Return what is still to be shown once no more ids come."""
        return self._stops.feed(self._stream.rest(), last=True)


@dataclass(frozen=True)
class Event:
    """What is new of an answer.

    Attributes:
        index: which of the request's answers.
        tokens: that were picked.
        text: what may now be shown.
        finish: why it has ended, if it has.
    """

    index: int
    tokens: tuple[Token, ...]
    text: str
    finish: str | None


class Feed:
    """A request's answers, as its coroutine reads them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: list[Answer], listeners: list[Listener]):
        self.answers, self.listeners = answers, listeners
        self.came = time.monotonic()
        self._loop = loop
        self._told, self._over = [0] * len(answers), [False] * len(answers)
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()

    def put(self, event: Event | Exception) -> None:
        """Hand over an event, from any thread."""
        with contextlib.suppress(RuntimeError):  # whose loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def tell(self) -> bool:
        """Hand over what is new; return whether all has ended."""
        for index, answer in enumerate(self.answers):
            told, tokens = self._told[index], answer.tokens
            if self._over[index] or (len(tokens) == told and answer.finish is None):
                continue
            text = ""
            if self.listeners:
                text = "".join(self.listeners[index].pieces[told : len(tokens)])
                text += self.listeners[index].rest() if answer.finish is not None else ""
            self._told[index], self._over[index] = len(tokens), answer.finish is not None
            self.put(Event(index, tuple(tokens[told:]), text, answer.finish))
        return all(self._over)

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until every answer has ended.

        Raises:
            Unavailable: it will never end.
        """
        left = len(self.answers)
        while left:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            left -= event.finish is not None
            yield event


class Worker:
    """Drives an engine in a thread of its own.

    Args:
        engine: which nothing else may touch from here on.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failure: BaseException | None = None
        self.closing = False
        self.picked = self.read = self.answered = self.first_tokens = 0
        self.first_seconds = 0.0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._feeds: dict[Feed, None] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End what is left, and the thread."""
        self.closing = True
        self._inbox.put(None)
        self._thread.join()

    def drain(self) -> None:
        """Take no more requests, and send away those that wait; those that run go on. Any thread may call it."""
        self.closing = True
        self._inbox.put(self._turn_away)

    async def submit(self, ask: Callable[[Engine], Iterable[Answer]], listeners: list[Listener]) -> Feed:
        """Return the feed of the answers that `ask` asks the engine for, in the engine's thread: all of them or none.

        Raises:
            Unavailable: nothing is taken any more.
            Overload: too many texts wait.
            ValueError: the engine refuses the request.
        """
        if self.closing or self.failure is not None:
            raise Unavailable("the server is going down" if self.closing else f"the device has failed: {self.failure}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Feed] = loop.create_future()

        def settle(found: Feed | Exception) -> None:
            if future.cancelled():
                if isinstance(found, Feed):
                    self.cancel(found)
            elif isinstance(found, Feed):
                future.set_result(found)
            else:
                future.set_exception(found)

        def begin() -> None:
            answers: list[Answer] = []
            try:
                if self.closing:
                    raise Unavailable("the server is going down")
                for answer in ask(self.engine):
                    answers.append(answer)
                feed: Feed | Exception = Feed(loop, answers, listeners)
            except Exception as error:
                for answer in answers:
                    self.engine.cancel(answer)
                feed = error
            else:
                self._feeds[feed] = None
                self.read += sum(answer.text.given for answer in feed.answers if answer.text.leader is None)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, feed)

        self._inbox.put(begin)
        return await future

    def cancel(self, feed: Feed) -> None:
        """End what a client does not read any more."""

        def end() -> None:
            for answer in feed.answers:
                if answer.finish is None:
                    self.engine.cancel(answer)
            self._feeds.pop(feed, None)

        self._inbox.put(end)

    def _run(self) -> None:
        try:
            while self._heed():
                if self.engine.step():
                    self._tell()
        except BaseException as error:
            self.failure = error
            traceback.print_exception(error)
            self._fail(Unavailable(f"the device has failed: {error}"))
        self._fail(Unavailable("the server is going down"))

    def _heed(self) -> bool:
        """Do what is asked for; wait for it where there is nothing else to do. Return whether to go on."""
        wait = not self.engine.busy
        while True:
            try:
                asked = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if asked is None:
                return False
            asked()
            self._tell()
            wait = not self.engine.busy

    def _tell(self) -> None:
        for feed in list(self._feeds):
            before = sum(feed._told)
            over = feed.tell()
            new = sum(feed._told) - before
            self.picked += new
            if new and not before:
                self.first_tokens += 1
                self.first_seconds += time.monotonic() - feed.came
            if over:
                self.answered += 1
                del self._feeds[feed]

    def _turn_away(self) -> None:
        for feed in list(self._feeds):
            if all(answer.text.slot is None and not answer.tokens for answer in feed.answers):
                self._drop(feed, Unavailable("the server is going down"))

    def _drop(self, feed: Feed, why: Exception) -> None:
        for answer in feed.answers:
            if answer.finish is None:
                self.engine.cancel(answer)
        del self._feeds[feed]
        feed.put(why)

    def _fail(self, why: Exception) -> None:
        while True:  # whoever came in between is told as well
            self.closing = True
            for feed in list(self._feeds):
                self._drop(feed, why)
            try:
                asked = self._inbox.get(timeout=0.05)
            except queue.Empty:
                return
            if asked is not None:
                asked()
