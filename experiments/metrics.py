"""What a run leaves behind: one record per step as JSON lines and CSV, and a progress bar or plain lines meanwhile."""

import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from experiments.table import digits, quantity, size


@dataclass(frozen=True, kw_only=True)
class Record:
    """One step. What was not measured is None: step 0 has only the held-out loss of the untrained model."""

    step: int
    loss: float | None = None  # nats per token, of this step's batch before its update
    bits_per_byte: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    memory_bytes: int | None = None
    held_out_loss: float | None = None
    held_out_bits_per_byte: float | None = None


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """Return nats per token as bits per byte, where a token's bytes are known."""
    return None if bytes_per_token is None else loss / math.log(2) / bytes_per_token


def describe(record: Record) -> str:
    """Return a record's held-out measure in words."""
    if record.held_out_bits_per_byte is not None:
        return f"{record.held_out_bits_per_byte:.3f} bits per byte"
    return f"{record.held_out_loss:.3f} nats per token"


class Recorder:
    """Writes records as they come, so that a run that dies leaves what it had; `NaN` becomes null in JSON."""

    def __init__(self, directory: Path, loggers: Sequence[Any] = ()):
        self.records: list[Record] = []
        self._loggers = loggers
        self._jsonl = (directory / "metrics.jsonl").open("w")
        self._file = (directory / "metrics.csv").open("w", newline="")
        self._csv = csv.DictWriter(self._file, list(Record.__dataclass_fields__))
        self._csv.writeheader()

    def add(self, record: Record) -> None:
        """Append a record to both files and to `records`."""
        self.records.append(record)
        self._csv.writerow(asdict(record))
        self._file.flush()
        json.dump({key: _finite(value) for key, value in asdict(record).items()}, self._jsonl)
        self._jsonl.write("\n")
        self._jsonl.flush()
        for logger in self._loggers:
            logger.add(record)

    def close(self) -> None:
        """Close both files, and the loggers."""
        self._jsonl.close()
        self._file.close()
        for logger in self._loggers:
            logger.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """A bar on a terminal; elsewhere a line every so many steps."""

    def __init__(self, steps: int, log_every: int, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._steps, self._log_every = steps, log_every
        self._bar: Any = None

    def start(self) -> None:
        """Show the bar, before the first step."""
        if self._stream.isatty():
            from tqdm import tqdm

            form = "  {n_fmt}/{total_fmt} {bar} {desc}  {remaining}"  # the bar takes the width that is left
            self._bar = tqdm(total=self._steps, file=self._stream, bar_format=form, dynamic_ncols=True)
            self._bar.set_description_str("first step ...")

    def show(self, record: Record) -> None:
        """Show one training step."""
        if self._bar is not None:
            self._bar.set_description_str(_words(record).replace("/byte", "/B"), refresh=False)
            self._bar.update(record.step - self._bar.n)
        elif record.step % self._log_every == 0 or record.step in (1, self._steps):
            width = len(str(self._steps))
            self.say(f"  step {record.step:>{width}}/{self._steps}  {_words(record)}")

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it is, and end its line."""
        if self._bar is not None:
            self._bar.close()


def _words(record: Record) -> str:
    words = [f"loss {record.loss:.3f}"]
    if record.bits_per_byte is not None:
        words.append(f"{record.bits_per_byte:.3f} bits/byte")
    if record.tokens_per_second is not None and record.seconds is not None:
        words += [f"{quantity(record.tokens_per_second)} tok/s", f"{digits(record.seconds)} s"]
    if record.memory_bytes is not None:
        words.append(size(record.memory_bytes, digits=1))
    return "  ".join(words)
