"""Measures again what is committed and can be counted exactly on a CPU: memory, products, and which losses are right.

    python -m experiments.bench check           # ends with 1 if a figure is not what is committed

Times, and what other systems' environments count, are not measured again. Where JAX or the processor is another than
the figures were made with, differences are told and do not count: a compiler may lay out memory otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.bench import memory
from experiments.bench.made import comparable, made_with
from experiments.bench.rivals import compare, coverage, figures, steps
from experiments.bench.rivals.table import SYSTEMS

OURS = [name for name, system in SYSTEMS.items() if system.environment is None]


def again(then: dict[str, Any]) -> dict[str, Any]:
    """The figures of the systems that need no environment of their own, at the sizes that are committed."""
    sizes = then["tokens"], then["embed"], then["vocab"]
    names = compare.of_dtype(then["dtype"], OURS)
    return compare.measure(names, sizes, then["dtype"], then["slices"], rounds=0)["systems"]


def drawn(then: dict[str, Any]) -> dict[str, Any]:
    """What pictures show of these systems."""
    memory = figures.memory(compare.of_dtype("float32", OURS), then["memory"]["tokens"])
    slicing = [name for name in compare.of_dtype("bfloat16", OURS) if SYSTEMS[name].tiles]
    return {"memory": {"bytes": memory}, "errors": {"errors": figures.errors(slicing, then["errors"]["slices"])}}


MEASURED: dict[Path, Callable[[dict[str, Any]], dict[str, Any]]] = {
    memory.FIGURES: lambda then: memory.measure()["bytes"],
    compare.RESULTS / "rivals.json": again,
    compare.RESULTS / "rivals_bfloat16.json": again,
    compare.RESULTS / "figures.json": drawn,
    compare.RESULTS / "steps.json": lambda then: steps.counted(then["dtype"]),
    compare.RESULTS / "steps_bfloat16.json": lambda then: steps.counted(then["dtype"]),
    compare.RESULTS / "losses.json": lambda then: coverage.measure(["tile"], list(then["losses"]["tile"]))["losses"],
}
WHERE = {"memory": "bytes", "losses": "losses"}  # what is measured, in a file's figures; of others the systems, or all


def differences(then: Any, now: Any, at: str = "") -> Iterator[str]:
    """What of `now` is not what it was, and where; times and versions apart, and errors to a digit."""
    if isinstance(now, dict):
        for key, value in now.items():
            if key not in ("time", "versions"):
                yield from differences(then.get(key) if isinstance(then, dict) else None, value, f"{at}: {key}")
    elif ": error of" in at and then is not None:
        if not 0.5 <= (now + 1e-12) / (then + 1e-12) <= 2:
            yield f"{at[2:]} was {then:.1e}, is {now:.1e}"
    elif then != now:
        yield f"{at[2:]} was {then}, is {now}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    changed = 0
    for path, measure in MEASURED.items():
        then = json.loads(path.read_text())
        same = comparable(then["made"], made_with())
        found = list(differences(then.get(WHERE.get(path.stem, "systems"), then), measure(then)))
        told = "as committed" if not found else f"{len(found)} changed" + ("" if same else ", not comparable")
        print(f"{path.name}: {told}", *found, sep="\n  ", flush=True)
        if not same:
            print(f"  made with {then['made']}, this is {made_with()}")
        changed += len(found) * same
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
