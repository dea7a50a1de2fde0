"""The pictures of a run: `python experiments/plots.py RUN_DIRECTORY` draws them anew, while it runs or afterwards."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments.command import ended
from experiments.commandline import console
from experiments.results.metrics import FACTS, read
from experiments.results.summary import draw
from experiments.runtime.manifest import reason


def main(argv: list[str]) -> int:
    """Draw the pictures of runs, in progress or over, anew; return the exit status."""
    if not argv or {"-h", "--help"}.intersection(argv):
        print(f"Draw loss.png, memory.png, speed.png and rate.png of runs: {console.called('plots')} RUN_DIRECTORY ...")
        return 0 if argv else 2
    for directory in map(Path, argv):
        try:
            known = json.loads((directory / FACTS).read_text())
            drawn = draw(directory, read(directory), known)
        except FileNotFoundError as error:
            print(f"error: there is no run at {directory}: it has no {Path(error.filename).name}", file=sys.stderr)
            return 1
        except (OSError, ValueError, KeyError) as error:
            print(f"error: cannot draw the run at {directory}: {reason(error)}", file=sys.stderr)
            return 1
        print(f"{directory}/: {', '.join(drawn) or 'no step has been measured yet'}")
    return 0


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
