"""Runs one system in its own environment: reads commands, a JSON object a line, and answers likewise.

    {"do": "load", "inputs": FILE.npz, "dtype": ..., "slices": n}   compile, run once: {"temporaries": bytes, ...}
    {"do": "step"}                                  value and gradients, once: {"seconds": ...}
    {"do": "results", "to": FILE.npz, "every": k}   what they are, of the weights' gradient every k-th word
    {"do": "oracle", "inputs": FILE.npz, "to": FILE.npz, "every": k}        what they should be; in JAX alone
    {"do": "loss", "name": ..., "inputs": FILE.npz, "to": FILE.npz}   one of `losses`, with a cotangent of 3

It imports nothing of this project, for other systems' environments do not have it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path


def main(side: str, build: str) -> None:
    answers = os.fdopen(os.dup(1), "w")  # libraries print, too
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).parent))
    runner = importlib.import_module(side).Runner(build)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(runner, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            words = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {words[0]}"[:200]}
        print(json.dumps(answer or {}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
