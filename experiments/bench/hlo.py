"""Count what a compiled program does from its HLO text: loop bodies times their trip counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_SHAPE = r"\w+\[([\d,]*)\](?:\{[^}]*\})?"
_RESULT = re.compile(rf"^\s*(?:ROOT )?%?([\w.\-]+) = {_SHAPE} (\w[\w\-]*)\((.*)")
_CALLED = re.compile(r"(?:to_apply|body|calls|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)"?')


def dot_flops(text: str) -> int:
    """Return the multiplications and additions of all matrix products that a run of the program executes.

    Args:
        text: `compiled.as_text()`.

    Raises:
        ValueError: a loop that holds products has no trip count that the compiler knows.
    """
    bodies = _computations(text)
    entry = next(name for name, (is_entry, _) in bodies.items() if is_entry)
    known: dict[str, int] = {}

    def count(name: str) -> int:
        if name not in known:
            lines = bodies[name][1]
            known[name] = sum(_dots(lines)) + sum(times * count(inner) for inner, times in _calls(lines, bodies))
        return known[name]

    return count(entry)


def _computations(text: str) -> dict[str, tuple[bool, list[str]]]:
    found: dict[str, tuple[bool, list[str]]] = {}
    name = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header.group(1)
            found[name] = (line.startswith("ENTRY"), [])
        elif name:
            found[name][1].append(line)
    return found


def _calls(lines: list[str], bodies: dict[str, tuple[bool, list[str]]]) -> Iterator[tuple[str, int]]:
    """The computations that these lines run, and how often."""
    for line in lines:
        called = _CALLED.search(line)
        if called is None:
            continue
        names = [n.lstrip("%") for n in called.group(1).split(", ")]
        trips = 1
        if " while(" in line:
            found = _TRIPS.search(line)
            if found is None:
                raise ValueError(f"a loop without a known trip count: {line.strip()[:200]}")
            trips = int(found.group(1))
        yield from ((name, trips) for name in names if name in bodies)


def _dots(lines: list[str]) -> Iterator[int]:
    """2 * the result's size * the contracted size, for each dot of a computation."""
    shapes: dict[str, list[int]] = {}
    for line in lines:
        found = _RESULT.match(line)
        if found is None:
            continue
        name, dims, op, operands = found.groups()
        shapes[name] = [int(d) for d in dims.split(",") if d]
        if op == "dot":
            first = re.search(r"%([\w.\-]+)", operands)
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operands)
            assert first is not None and contracted is not None, line
            inner = [shapes[first.group(1)][int(d)] for d in contracted.group(1).split(",") if d]
            yield 2 * math.prod(shapes[name]) * math.prod(inner)
