"""Being told to stop: the first SIGTERM or SIGINT is a request, one that comes later ends the process at once.

The request is remembered from the first line of a run on, and asked for between its stages and after each step. It is
heard by a thread: a handler that raises is lost wherever Python swallows exceptions, as in a callback of the garbage
collector, and one in the main thread waits for a compiler that is at work. Before the training there is nothing to
lose: a stage that goes on for `GRACE` after it is ended with the process.

What starts a process may tell it the same as the terminal or the cluster does: what comes within `SAME` is one request.
No JAX here.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0  # seconds
GRACE = 3.0  # seconds
END = b"\0"  # no signal's number


def is_command() -> bool:
    """Whether this process is one of the scripts of `experiments`, or the installed command."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return script.stem == "tiling-zoo" or script.resolve().parent == Path(__file__).resolve().parents[1]


class Stopped(Exception):
    """A run ended early because it was told to, in words for the user.

    Attributes:
        trained: whether it had begun to train, so that there is something to go on from.
        status: the exit status that shells expect of a process that a signal ended.
    """

    def __init__(self, message: str, number: signal.Signals, *, trained: bool):
        super().__init__(message)
        self.trained, self.status = trained, 128 + number


class Stop:
    """While entered, remembers the first signal that asks the process to end; of several processes, any of them.

    Args:
        alone: whether the process is the run's own, and may be ended with it.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self._signal: signal.Signals | None = None
        self._since, self._heard, self._handled = 0.0, 0, 0
        self._training = False
        self._told: Callable[[int], signal.Signals | None] | None = None
        self._lock = threading.RLock()  # a handler may interrupt itself
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._write, END)
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def share(self, told: Callable[[int], signal.Signals | None], forward: Any) -> None:
        """Let JAX hear for all processes of a run, once they have found each other: all stop after the same step.

        Args:
            told: returns the signal that one of them got, at a step at which all of them are told.
            forward: the handler of SIGINT, which tells the others.
        """
        self._told = told
        if self._before:
            signal.signal(signal.SIGINT, forward)
            del self._before[signal.SIGTERM]  # JAX's own by now

    def ask(self) -> None:
        """Raise Stopped if there was a signal; to be called between the stages before the training."""
        if self._signal is not None:
            raise Stopped(_early(self._signal), self._signal, trained=False)

    def begin(self) -> None:
        """Say that the training begins: from now on every stage is finished, and `told` is asked after each step."""
        with self._lock:
            self.ask()
            self._training = True

    def told(self, step: int) -> signal.Signals | None:
        """Return the signal, once there was one; to be asked at every step."""
        return self._signal if self._told is None else self._told(step)

    def _handle(self, number: int, _: FrameType | None) -> None:
        with self._lock:
            again = not self._alone and self._handled > 0 and self._again()
            self._handled += 1
            if self._handled > self._heard:  # the thread is late, or another library has taken the wake-up
                self._hear(number)
            if again:
                raise KeyboardInterrupt

    def _listen(self) -> None:
        while True:
            for byte in os.read(self._read, 1):
                if byte == END[0]:
                    return
                if byte in SIGNALS and self._told is None:
                    with self._lock:
                        self._heard += 1
                        self._hear(byte)

    def _hear(self, number: int) -> None:
        if self._signal is None:
            self._signal, self._since = signal.Signals(number), time.monotonic()
            if self._training:
                _write(f"\n{self._signal.name}: the run ends after this step; a second one ends it at once\n")
            elif self._alone:
                late = threading.Timer(GRACE, self._give_up)
                late.daemon = True
                late.start()
        elif self._alone and self._again():
            _write(f"\nerror: ended by a second {signal.Signals(number).name}\n")
            os._exit(128 + number)

    def _again(self) -> bool:
        return self._signal is not None and time.monotonic() - self._since > SAME

    def _give_up(self) -> None:
        with self._lock:
            if self._before and not self._training and self._signal is not None:
                _write(f"\nerror: {_early(self._signal)}\n")
                os._exit(128 + self._signal)


def _early(number: signal.Signals) -> str:
    how = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    return f"{how} before the training began"


def _write(text: str) -> None:
    """Print to the terminal past Python's own buffers, which the main thread may hold."""
    os.write(2, text.encode())
