"""What a run leaves behind: what it is, one record per step as JSON lines and CSV; and a progress bar or plain lines.

The records also go to TensorBoard and Weights & Biases, each an extra that is imported only if asked for.
"""

import csv
import importlib
import importlib.util
import io
import json
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from experiments import configs
from experiments.commandline import console
from experiments.commandline.console import digits, quantity, size
from experiments.runtime.manifest import reason

FACTS = "plan.json"  # what the pictures need beside the records, so that they can be drawn again at any time


@dataclass(frozen=True, kw_only=True)
class Record:
    """One step. What was not measured is None: step 0 has only what was there before the training."""

    step: int
    loss: float | None = None  # the objective, of this step's batch before its update; of text in nats per token
    cross_entropy: float | None = None  # nats per token, where that is not the objective
    accuracy: float | None = None  # share of the pairs whose chosen answer the model prefers
    margin: float | None = None  # by how much, on average
    extra: dict[str, float] | None = None  # what else the objective measures
    bits_per_byte: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None  # from the end of the step before, without what evaluating and saving took
    data_seconds: float | None = None  # of them, waiting for the batch
    save_seconds: float | None = None  # before the step, beside `seconds`: until training could go on
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    mfu: float | None = None  # share of what the devices can do at most, where that is known
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    held_out_loss: float | None = None  # nats per token; of pairs of answers the objective
    held_out_objective: float | None = None  # a user's own loss
    held_out_bits_per_byte: float | None = None
    held_out_accuracy: float | None = None


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """Return nats per token as bits per byte, where a token's bytes are known."""
    return None if bytes_per_token is None else loss / math.log(2) / bytes_per_token


def describe(record: Record, paired: bool = False) -> str:
    """Return a record's held-out measure in words; `paired`: of pairs of answers."""
    if paired:
        right = "" if record.held_out_accuracy is None else f", {record.held_out_accuracy:.0%} of pairs right"
        return f"loss {record.held_out_loss:.3f}{right}"
    if record.held_out_bits_per_byte is not None:
        text = f"{record.held_out_bits_per_byte:.3f} bits per byte"
    else:
        text = f"{record.held_out_loss:.3f} nats per token"
    return text if record.held_out_objective is None else f"{text}, objective {record.held_out_objective:.4g}"


class Recorder:
    """Writes records as they come, so that a run that dies leaves what it had; `NaN` becomes null in JSON.

    Args:
        directory: where metrics.jsonl and metrics.csv are; None: nothing is written.
        loggers: what else takes the records.
        after: the step that a run goes on from: what the files hold up to it stays, what comes later will come again.
    """

    def __init__(self, directory: Path | None, loggers: Sequence[Any] = (), after: int | None = None):
        self._loggers, self._files = loggers, ()
        self.records = [] if after is None or directory is None else read(directory, after)
        if directory is None:
            return
        jsonl, table = directory / "metrics.jsonl", directory / "metrics.csv"
        _write(jsonl, "".join(f"{json.dumps(_row(record))}\n" for record in self.records))
        names = list(Record.__dataclass_fields__)
        buffer = io.StringIO(newline="")
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(record) for record in self.records)
        _write(table, buffer.getvalue())
        self._jsonl, self._file = jsonl.open("a"), table.open("a", newline="")
        self._csv = csv.DictWriter(self._file, names, lineterminator="\n")
        self._files = self._jsonl, self._file

    def add(self, record: Record) -> None:
        """Append a record to both files and to `records`."""
        self.records.append(record)
        if self._files:
            self._csv.writerow(asdict(record))
            self._jsonl.write(json.dumps(_row(record)) + "\n")
        for file in self._files:
            file.flush()
        for logger in self._loggers:
            logger.add(record)

    def close(self) -> None:
        """Close both files, and the loggers."""
        for file in self._files:
            file.close()
        for logger in self._loggers:
            logger.close()


def read(directory: Path, last: int | None = None) -> list[Record]:
    """Return the records in a run's metrics.jsonl, up to a step, without the lines that are damaged or cut short."""
    records: list[Record] = []
    try:
        lines = (directory / "metrics.jsonl").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            row = json.loads(line)
            record = Record(**{name: row.get(name) for name in Record.__dataclass_fields__})
            late = record.step > (math.inf if last is None else last)
        except (ValueError, AttributeError, TypeError):
            continue
        if not late:
            records.append(record)
    return records


def _write(path: Path, text: str) -> None:
    """Replace a file, whole or not at all."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.replace(path)


def _row(record: Record) -> dict[str, Any]:
    return {key: finite(value) for key, value in asdict(record).items()}


def finite(value: Any) -> Any:
    """Return a value, or what is in a table, as JSON has it: what is no number is null there."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """A bar on a terminal; elsewhere a line every so many steps. Every held-out measure is a line of its own."""

    def __init__(self, steps: int, log_every: int, stream: TextIO | None = None, *, paired: bool = False):
        self._stream, self._paired = stream or sys.stdout, paired
        self._steps, self._log_every = steps, log_every
        self._bar: Any = None
        self._held_out: Record | None = None

    def start(self, step: int = 0) -> None:
        """Show the bar, before the first step, which comes after `step` others."""
        if self._stream.isatty():
            from tqdm import tqdm

            form = "  {n_fmt}/{total_fmt} {bar} first step ..."  # the bar takes the width that is left
            self._bar = tqdm(total=self._steps, initial=step, file=self._stream, bar_format=form, dynamic_ncols=True)

    def begin(self, record: Record) -> None:
        """Show what was measured before training."""
        what = "pairs" if self._paired else "text"
        self.say(f"  held-out {what} before training: {describe(record, self._paired)}")

    def show(self, record: Record, beside: str | None = None) -> None:
        """Show one training step, what was measured after it, and what else is said of it."""
        if record.held_out_loss is not None:
            self._held_out = record
        if self._bar is not None:
            columns = self._bar.format_dict["ncols"] or 80
            self._bar.bar_format = _bar_format(record, self._held_out, self._steps, columns)
            self._bar.update(record.step - self._bar.n)
        elif record.step % self._log_every == 0 or record.step in (1, self._steps):
            width = len(str(self._steps))
            self.say(f"  step {record.step:>{width}}/{self._steps}  {'  '.join(_fields(record).values())}")
        if record.held_out_loss is not None:
            self.say(f"  held-out, step {record.step}: {describe(record, self._paired)}")
        if beside is not None:
            self.say(beside)

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


def _fields(record: Record) -> dict[str, str]:
    """Return what is shown of a step, every number beside its name or unit."""
    fields = {"loss": f"loss {record.loss:.3f}"}
    if record.accuracy is not None:
        fields["pairs"] = f"{record.accuracy:.0%} of pairs right"
    if record.bits_per_byte is not None:
        fields["bits"] = f"{record.bits_per_byte:.3f} bits/byte"
    if record.tokens_per_second is not None and record.seconds is not None:
        fields["speed"] = f"{quantity(record.tokens_per_second)} tok/s"
        fields["seconds"] = f"{digits(record.seconds)} s/step"
    if record.learning_rate is not None:
        fields["rate"] = f"lr {record.learning_rate:.3g}"
    if record.grad_norm is not None:
        fields["norm"] = f"grad {digits(record.grad_norm)}"
    if record.mfu is not None:
        fields["mfu"] = f"{record.mfu:.0%} MFU"
    if record.memory_bytes is not None:
        fields["memory"] = size(record.memory_bytes, digits=1)
    return fields


FIRST = ("bits", "loss", "left", "pairs", "seconds", "rate", "norm", "held-out", "speed", "memory", "mfu")
LEAST_BAR = 12  # columns: a shorter bar shows nothing


def _bar_format(record: Record, held_out: Record | None, steps: int, columns: int) -> str:
    """Return tqdm's format for a bar that fits: of the fields those that matter most, and a bar where there is room."""
    fields = _fields(record)
    if held_out is not None:
        bits, loss = held_out.held_out_bits_per_byte, held_out.held_out_loss
        fields["held-out"] = f"held-out {loss if bits is None else bits:.3f}"
    lengths = {name: len(text) for name, text in fields.items()} | {"left": len("00:00 left")}
    fields["left"] = "{remaining} left"
    room = columns - 1 - len(f"  {steps}/{steps}")
    kept = []
    wanted = [name for name in FIRST if name in lengths]
    if "bits" in wanted:  # the loss in another unit
        wanted.append(wanted.pop(wanted.index("loss")))
    for name in wanted:
        if lengths[name] + 2 <= room:
            kept.append(name)
            room -= lengths[name] + 2
    bar = " {bar}" if room > LEAST_BAR else ""
    return "  {n_fmt}/{total_fmt}" + bar + "".join(f"  {fields[name]}" for name in fields if name in kept)


PACKAGES = {"tensorboard": ("tensorboardX", "tb"), "wandb": ("wandb", "wandb")}


class Logger(Protocol):
    """Something that takes a run's records as they come."""

    def add(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's directory; what came later than the step that a run goes on from is hidden."""

    def __init__(self, directory: Path, after: int | None = None):
        again: dict[str, Any] = {} if after is None else {"purge_step": after + 1}
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(str(directory / "tensorboard"), **again)

    def add(self, record: Record) -> None:
        for name, value in _measured(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run, the same one after a resumption; `WANDB_MODE=offline` keeps it in the run's directory."""

    def __init__(self, directory: Path, about: dict[str, Any]):
        wandb = importlib.import_module("wandb")
        file = directory / "wandb-id.txt"
        if not file.exists():
            file.write_text(secrets.token_hex(8))
        words = {"dir": str(directory), "name": directory.name, "id": file.read_text(), "resume": "allow"}
        self._run: Any = wandb.init(**words, config=about)

    def add(self, record: Record) -> None:
        self._run.log(_measured(record), step=record.step)

    def close(self) -> None:
        self._run.finish()


def check_loggers(save: configs.Save) -> None:
    """Raise a CommandError if a logger that was asked for is not installed."""
    for option, (package, extra) in PACKAGES.items():
        if getattr(save, option) and importlib.util.find_spec(package) is None:
            raise console.CommandError(f"save.{option}=true needs the package {package}: {console.install(extra)}")


def open_recorder(
    directory: Path,
    files: Mapping[str, str],
    save: configs.Save,
    about: dict[str, Any],
    after: int | None,
    say: Callable[[str], None],
) -> Recorder:
    """Write what a run is; return what takes the records after a step, with the loggers that are asked for.

    Args:
        directory: the run's.
        files: what it writes about itself, by their names.
        save: which loggers.
        about: the run in words, for them.
        after: the step that the run goes on from; None if it begins.
        say: is told of records that are not there any more.

    Raises:
        CommandError: its directory cannot be written to.
    """
    try:
        for name, text in files.items():
            _write(directory / name, text)
    except OSError as error:
        raise console.CommandError(f"cannot write to {directory}: {reason(error)}") from None
    found: list[Logger] = []
    if save.tensorboard:
        found.append(TensorBoard(directory, after))
    if save.wandb:
        found.append(Wandb(directory, about))
    recorder = Recorder(directory, found, after)
    if after is not None and (few := len(recorder.records)) <= after:
        say(f"  warning: metrics.jsonl has {few} of the {after + 1} records up to step {after}")
    return recorder


def _measured(record: Record) -> dict[str, Any]:
    found = {
        name: value for name, value in asdict(record).items() if value is not None and name not in ("step", "extra")
    }
    return (record.extra or {}) | found
