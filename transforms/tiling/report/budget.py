"""`n="auto", budget=`: the fewest tiles with which a program stays within so much temporary memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from transforms.tiling.analysis.limits import human
from transforms.tiling.autodiff.program import Program
from transforms.tiling.report import runs as passes
from transforms.tiling.report.estimate import temp_bytes

# Fewer rows in a matrix product and it runs slower than it need.
ROWS = 64
UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read(budget: Any) -> int:
    """Return a number of bytes: of an int, or of text such as "2GiB" (1024**3 each) or "500 MB" (1000**2).

    Raises:
        TypeError: neither an int nor text.
        ValueError: not positive, or no number of bytes.
    """
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)b\s*", budget, re.IGNORECASE)
        if found is None:
            raise ValueError(
                f'tile: budget={budget!r} is no number of bytes; write an int, or such as "2GiB" or "500MB".'
            )
        number, unit, binary = found.groups()
        budget = int(float(number) * (1024 if binary else 1000) ** UNITS[unit.lower()])
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f'tile: budget must be a number of bytes, an int or such as "2GiB", not {budget!r}.')
    if budget < 1:
        raise ValueError(f"tile: budget={budget}, but it must be at least 1 byte.")
    return budget


def fewest(make: Callable[[int], Program], total: int, rows: int, budget: int) -> Program:
    """Return the program with the fewest tiles whose temporary memory, gradients included, is within `budget`.

    Args:
        make: the program whose tiles are so long.
        total: length of the cut axis.
        rows: rows of a matrix in each step along it; a tile has at least `ROWS`, unless the axis is shorter.
        budget: bytes.

    Raises:
        ValueError: the smallest tiles take more.
    """
    most = max(1, total // -(-ROWS // rows))
    made: dict[int, Program] = {}
    taken: dict[int, int] = {}

    def fits(n: int) -> bool:
        made[n] = make(-(-total // n))
        runs = (passes.value(made[n]), passes.gradient(made[n]))
        taken[n] = max(temp_bytes(run.tiled) for run in runs if run is not None)
        return taken[n] <= budget

    if fits(1):
        return made[1]
    if not fits(most):
        n = min(taken, key=lambda n: taken[n])
        raise ValueError(
            f'tile: n="auto" cannot keep within budget={human(budget)}: the smallest possible is {human(taken[n])} of '
            f"temporary memory, gradients included, with {n} tiles of {-(-total // n)} ({human(taken[1])} untiled).\n"
            "  Raise the budget, or pass n= or size=: they are obeyed."
        )
    low, high = 1, most
    while high - low > 1:
        # Memory falls like a + b / n: try where that says, but at least halve what is left every other time.
        b = (taken[low] - taken[high]) / (1 / low - 1 / high)
        a = taken[low] - b / low
        guess = int(b / (budget - a)) + 1 if b > 0 and budget > a else 0
        for n in (guess, (low + high) // 2):
            if low < n < high:
                low, high = (low, n) if fits(n) else (n, high)
    return made[high]
