"""The installed command: `tiling-zoo train model=tiny`, `tiling-zoo generate ...`. Runs go under the current folder.

Each word is one of the scripts in this folder, which can also be run as they are: `python experiments/run.py`. No JAX.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable

from experiments.commandline.console import CONSOLE

COMMANDS = {  # word -> (module, what it does)
    "train": ("run", "train a model, or go on with a run"),
    "plan": ("run", "tell what that will cost, and train nothing"),
    "generate": ("generate", "continue prompts"),
    "score": ("score", "measure how well a model predicts text"),
    "convert": ("convert", "write a model anew: another number format, an adapter merged in"),
    "tokenizer": ("tokenizer", "train a byte-level BPE on local text"),
    "plots": ("plots", "draw the pictures of runs anew"),
    "launch": ("launch", "start one run in several processes on this machine"),
    "sweep": ("sweep", "hand many runs to a cluster"),
}


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
