"""Being told to stop: the first SIGTERM or SIGINT is a request, one that comes later acts as it always does.

What starts a process may tell it the same as the terminal or the cluster does: what comes within `SAME` is one request.
"""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from experiments import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0  # seconds


class Stop:
    """While entered, remembers the first signal that asks the process to end; of several processes, any of them."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
            return self
        if distributed.several():  # JAX takes SIGTERM, so that all stop after the same step
            self._before = {signal.SIGINT: signal.signal(signal.SIGINT, distributed.forward)}
        else:
            self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def told(self, step: int) -> signal.Signals | None:
        """Return the signal, once there was one; to be asked at every step."""
        return distributed.told(step) if distributed.several() else self._signal

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._since = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._since > SAME:
            self.__exit__()
            os.kill(os.getpid(), number)


class Stopped(Exception):
    """A run ended early because it was told to, in words for the user.

    Attributes:
        status: the exit status that shells expect of a process that a signal ended.
    """

    def __init__(self, message: str, number: signal.Signals):
        super().__init__(message)
        self.status = 128 + number
