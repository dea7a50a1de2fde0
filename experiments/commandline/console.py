"""How a command speaks: what it is called, here and where it is installed, its notes and errors, and its quantities."""

import codecs
import io
import os
import sys
from pathlib import Path
from typing import Any

PLAIN = "tiling-zoo-plain"  # how Python's codecs call `_plain`
CONSOLE = "tiling-zoo"  # the installed command, whose first word is what the others are called


class CommandError(RuntimeError):
    """A command that cannot do what it was asked for, in words for the user."""


def write_any_text() -> None:
    """Have the screen show what it cannot encode some other way: rules as hyphens, all else by its number."""
    codecs.register_error(PLAIN, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].replace("─", "-")
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


def note(text: str) -> None:
    """Say something about a command's work, beside what it prints."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def warn_of_length(length: int, config: Any, what: str) -> None:
    """Say if a sequence is longer than those that a model was made for."""
    if length > config.context_length:
        note(f"{what} of {length:,} tokens is beyond the {config.context_length:,} that this model was made for")


def called(name: str = "config") -> str:
    """Return how the user calls a command: as it was called now, where that is known."""
    name = {"config": "train"}.get(name, name)
    if console := os.environ.get("TILING_ZOO_CALLED"):
        return f"{console} {name}"
    first = Path(sys.argv[0])
    file = {"train": "run"}.get(name, name)
    known = first.suffix == ".py" and first.stem == file
    return f"python {sys.argv[0] if known and not first.is_absolute() else f'experiments/{file}.py'}"


def install(extra: str) -> str:
    """Return the command that installs an extra: from a checkout, or of the installed package."""
    checkout = (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()
    return f"pip install {'-e ' if checkout else ''}'{'.' if checkout else CONSOLE}[{extra}]'"


GIB = 2**30


def size(count: float, digits: int = 2) -> str:
    """Return bytes in MiB or GiB: `4.67 GiB`."""
    if count >= GIB:
        return f"{count / GIB:,.{digits}f} GiB"
    return f"{count / 2**20:,.{digits - 1}f} MiB"


def quantity(value: float, unit: str = "") -> str:
    """Return a number to three digits with a decimal prefix: `1.93 TFLOP`, `2.10k`."""
    scales = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    prefix, scale = next(((p, s) for p, s in scales.items() if value >= s), ("", 1.0))
    return f"{digits(value / scale)}{' ' if unit else ''}{prefix}{unit}"


def counted(count: int, what: str) -> str:
    """Return how many of something there are: `1 file`, `2 files`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def digits(value: float) -> str:
    """Return a number to three significant digits, trailing zeros kept so that columns stay in line."""
    return f"{value:#.3g}".rstrip(".")
