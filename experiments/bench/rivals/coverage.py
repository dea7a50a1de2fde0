"""How many ordinary losses each system that takes a user's loss computes slice by slice, and gets right.

    python -m experiments.bench losses                  # 53 losses, by kind; `losses.py` has them
    python -m experiments.bench losses --only tile

A loss counts as right where its value and the gradients of hidden states and weights, at a cotangent of 3, are those of
JAX in float64 to 1e-4; and as sliced where the system says that it sliced it (Inductor leaves alone what it cannot).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.made import made_with
from experiments.bench.rivals import environments
from experiments.bench.rivals.compare import RESULTS, Worker, error, save, started
from experiments.bench.rivals.losses import KIND, LOSSES
from experiments.bench.rivals.table import SYSTEMS

TOKENS, EMBED, VOCAB = 512, 32, 1024
CLOSE = 1e-4


def draw(dtype: type = np.float32) -> dict[str, np.ndarray]:
    """All that a loss may ask for."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape)
    soft = np.exp(normal(TOKENS, VOCAB))
    found = {"h": normal(TOKENS, EMBED), "w": normal(EMBED, VOCAB) / EMBED**0.5, "m": rng.uniform(0, 1, TOKENS)}
    found |= {"teacher": normal(TOKENS, VOCAB), "soft": soft / soft.sum(-1, keepdims=True), "x": normal(TOKENS, VOCAB)}
    found |= {"multi": (normal(TOKENS, VOCAB) > 2) * 1.0, "adv": normal(TOKENS)}
    found |= {"old": normal(TOKENS) / 4 - 7.4, "ref": normal(TOKENS) / 4 - 7.4}
    return {k: v.astype(np.float32).astype(dtype) for k, v in found.items()} | {"y": rng.integers(0, VOCAB, TOKENS)}


def measure(names: Sequence[str], losses: Sequence[str]) -> dict[str, Any]:
    """Of each system and loss: right, wrong, whole (right, but not sliced) or failed, with its words."""
    workers, missing = started(names)
    found: dict[str, dict[str, str]] = {name: {} for name in workers}
    oracle = Worker(SYSTEMS["JAX, untiled"], JAX_ENABLE_X64="1")
    with tempfile.TemporaryDirectory() as folder:
        inputs, exact, outputs = (Path(folder) / f"{name}.npz" for name in ("inputs", "exact", "outputs"))
        save(inputs, draw())
        save(exact, draw(np.float64))
        for loss in losses:
            oracle("loss", name=loss, inputs=str(exact), to=str(outputs))
            true = dict(np.load(outputs))
            for name, worker in workers.items():
                try:
                    told = worker("loss", name=loss, inputs=str(inputs), to=str(outputs))
                except environments.Missing as problem:
                    found[name][loss] = f"failed: {problem}"
                    continue
                got = np.load(outputs)
                worst = max(error(got[what], true[what]) for what in ("loss", "dh", "dw"))
                right = "right" if told["sliced"] else "whole"
                found[name][loss] = right if worst <= CLOSE else f"wrong: error {worst:.1e}"
    for worker in (*workers.values(), oracle):
        worker.close()
    made = {"made": made_with(), "tokens": TOKENS, "embed": EMBED, "vocab": VOCAB, "close": CLOSE}
    versions = {name: worker.versions for name, worker in workers.items()}
    return {**made, "versions": versions, "losses": found, "missing": missing}


def table(figures: dict[str, Any]) -> str:
    """How many losses of each kind each system slices and gets right, in Markdown."""
    of_kind = Counter(KIND.values())
    lines = ["| sliced and right, of | " + " | ".join(f"{kind} ({n})" for kind, n in of_kind.items())]
    lines[0] += f" | all ({len(LOSSES)}) | wrong |"
    lines.append("|---" * (len(of_kind) + 3) + "|")
    for name, results in figures["losses"].items():
        right = Counter(KIND[loss] for loss, result in results.items() if result == "right")
        wrong = sum(result.startswith("wrong") for result in results.values())
        cells = [str(right[kind]) for kind in of_kind]
        lines.append(f"| {name} | {' | '.join(cells)} | {right.total()} | {wrong} |")
    lines += [f"\nNot measured: {name}: {why}" for name, why in figures["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    able = [name for name, system in SYSTEMS.items() if system.any_loss and system.tiles]
    parser.add_argument("--only", nargs="+", choices=able, metavar="SYSTEM", help=f"of {', '.join(able)}")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, metavar="LOSS", default=list(LOSSES))
    parser.add_argument(
        "--write",
        action="store_true",
        help="write results/losses.json beside this file; with --only, those systems in it",
    )
    args = parser.parse_args()
    figures = measure(args.only or able, args.losses)
    print(table(figures))
    for name, results in figures["losses"].items():
        for loss, result in results.items():
            if result != "right":
                print(f"  {name}, {loss}: {result}")
    if args.write:
        path = RESULTS / "losses.json"
        if args.only:  # the other systems' results stay
            known = json.loads(path.read_text())
            figures |= {part: known[part] | figures[part] for part in ("versions", "losses", "missing")}
        figures = {"command": "python -m experiments.bench losses", **figures}
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
