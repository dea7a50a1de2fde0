"""The installed command: `tiling-zoo train model=tiny`, `tiling-zoo generate ...`. Runs go under the current folder.

Each word is one of the scripts in this folder, which can also be run as they are: `python experiments/run.py`. No JAX.
"""

import importlib
import os
import signal
import sys

from experiments.commandline.commands import CONSOLE

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
        print(help_text())
        return 0
    if word not in COMMANDS:
        print(f"error: there is no command `{word}`: choose {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    os.environ["TILING_ZOO_CALLED"] = CONSOLE  # what messages call it, those of the processes that it starts too
    words += ["plan=true"] if word == "plan" else []
    status = importlib.import_module(f"experiments.{COMMANDS[word][0]}").main(words)
    return ended(status)


def ended(status: int) -> int:
    """Return an exit status; one that was told to stop ends at once: a compiler in it may crash when taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
