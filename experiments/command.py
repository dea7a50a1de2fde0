"""The installed command, `tiling-zoo train model=tiny`, `tiling-zoo generate ...`, and how each of them is carried out.

Each word is one of the scripts in this folder, which can also be run as they are: `python experiments/run.py`. No JAX.
"""

import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from experiments.runtime.signals import is_command

if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C ends the process, and leaves no traceback. Python's own handler raises: that is lost in callbacks of the
    # garbage collector, as JAX has one. Commands that have something to save have handlers of their own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from experiments.commandline import schema, usage
from experiments.commandline.console import CONSOLE, CommandError, write_any_text
from experiments.data import DataError
from experiments.runtime.manifest import reason
from experiments.runtime.remote import fetched

COMMANDS = {  # word -> (module, what it does)
    "train": ("run", "train a model, or go on with a run"),
    "plan": ("run", "tell what that will cost, and train nothing"),
    "generate": ("generate", "continue prompts"),
    "serve": ("serve", "answer requests over HTTP, in OpenAI's protocol"),
    "score": ("score", "measure how well a model predicts text"),
    "convert": ("convert", "write a model anew: another number format, an adapter merged in"),
    "tokenizer": ("tokenizer", "train a byte-level BPE on local text"),
    "plots": ("plots", "draw the pictures of runs anew"),
    "launch": ("launch", "start one run in several processes on this machine"),
    "sweep": ("sweep", "hand many runs to a cluster"),
}
TEXTS = ("prompt", "system")  # values that are the user's own words, which Hydra must not read


def help_text() -> str:
    """Return what the command prints when it is not told what to do."""
    lines = [f"  {CONSOLE} {word:<10} {about}" for word, (_, about) in COMMANDS.items()]
    return "\n".join(
        ["Tile models: train, run and measure them a slice at a time.", "", *lines, "", "--help after any."]
    )


def main(argv: list[str] | None = None) -> int:
    """Carry out the command that the first word names; return the exit status."""
    word, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if word in ("-h", "--help"):
        return ended(lambda _: print(help_text()) or 0, words)
    if word not in COMMANDS:
        print(f"error: there is no command `{word}`: choose {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    os.environ["TILING_ZOO_CALLED"] = CONSOLE  # what messages call it, those of the processes that it starts too
    words += ["plan=true"] if word == "plan" else []
    return ended(importlib.import_module(f"experiments.{COMMANDS[word][0]}").main, words)


def carry_out(name: str, action: Callable[[Any, list[str]], None], argv: list[str]) -> int:
    """Compose a command's configuration, carry it out, and return the exit status: 0, 1 failed, 2 misconfigured."""
    write_any_text()
    if {"-h", "--help"}.intersection(argv):
        return usage.tell(name, argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own log: errors only
    texts = {key: [word[len(key) + 1 :] for word in argv if word.startswith(f"{key}=")] for key in TEXTS}
    words = [word for word in argv if word.partition("=")[0] not in TEXTS or name != "generate"]
    try:
        config, _ = schema.compose(words, name)
        if name == "generate":
            config = dataclasses.replace(config, **{key: found or None for key, found in texts.items()})
        action(fetched(config)[0], argv)
    except (schema.ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:  # what is read or written meanwhile
        print(f"error: cannot go on: {reason(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def ended(main: Callable[[list[str]], int], words: list[str]) -> int:
    """Carry out a command and return its exit status, 141 where nobody reads on (`| head`).

    One that was told to stop ends at once: a compiler in it may crash when taken down.
    """
    try:
        status = main(words)
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 128 + signal.SIGPIPE
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
