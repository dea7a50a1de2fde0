"""Batches made ahead of time in a thread, so that the device never waits for them."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `make(step)` for the steps to come, in their order, and hands the results out.

    Args:
        make: makes a batch from the number of its step.
        first: the first step.
        end: the step after the last.
        ahead: how many batches are made before they are wanted.
    """

    def __init__(self, make: Callable[[int], T], first: int, end: int, ahead: int = 2):
        self._make, self._next, self._end = make, first, end
        self._thread = ThreadPoolExecutor(1, "data")
        self._made: deque[Future[T]] = deque()
        for _ in range(ahead):
            self._start()

    def take(self) -> T:
        """Return the next step's batch; what went wrong in making it is raised here."""
        self._start()
        return self._made.popleft().result()

    def close(self) -> None:
        """Make no more."""
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> None:
        if self._next < self._end:
            self._made.append(self._thread.submit(self._make, self._next))
            self._next += 1
