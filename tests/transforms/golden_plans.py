"""The plans of all functions of the tests, as committed texts: how many loops, what they carry, what was made whole.

A text per table in `golden/`, a line for each row, number of tiles and way to run it; two more hold bytes of
temporary memory: as the plan estimates them, and as the compiler of the CPU reports them, of some. A change of the
compiler that changes a plan changes a line, which is committed with its reason. Rewrite them, or those of some tables:

    python -m tests.transforms.rewrite_plans [TABLE ...]

They read the public plan alone, and say in plain words what it shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from tests.transforms.plan_table import Row, rows
from transforms import TileError

FOLDER = Path(__file__).parent / "golden"
OLDEST = "0.10.2"  # other versions of JAX write the same function in other equations
TOLERANCE = 0.02  # of compiled memory
ESTIMATED, COMPILED = "memory_estimated", "memory_compiled"
Fields = dict[str, str]  # of a line, by name
Lines = dict[str, Fields]


# --------------------------------------------------------------------------------------------------- a plan in words


def describe(row: Row, count: int) -> tuple[Lines, Lines]:
    """The lines of one plan, and those of the bytes that it estimates."""
    name = named(row, count)
    try:
        plan = row.plan(count)
    except TileError as error:
        refused = {"refused": sentence(error)}
        try:
            value = row.plan(count, stopped=True)
        except TileError as error:
            return {f"{name}, value": {"refused": sentence(error)}}, {}
        return {f"{name}, value": _run(value, value.value), f"{name}, gradient": refused}, {}
    found = {"value": plan.value, "gradient": plan.gradient}
    lines = {f"{name}, {k}": _run(plan, v) if v else {"none": "nothing to differentiate"} for k, v in found.items()}
    bytes = {k: f"{v.temp} for {v.untiled_temp}" for k, v in found.items() if v}
    return lines, {name: bytes}


def named(row: Row, count: int) -> str:
    return f"{row.name}, {row.by}={count}"


def sentence(error: Exception) -> str:
    """The first sentence of an error, without the source line."""
    first = str(error).split("\n")[0]
    first = re.sub(r" at [^ ]*:\d+(:\d+)? \([^()]*(\([^()]*\))?[^()]*\)", "", first)
    return re.split(r"(?<=[a-z)\]`])\. ", first)[0].rstrip(".").replace(" | ", " or ")


def _run(plan: Any, run: Any) -> Fields:
    """What one way to run a function does."""
    cut = f"{plan.tiles} tiles of {plan.size} of {plan.length}"
    cut += f" on each of {plan.shares} devices" if plan.shares > 1 else ""
    fields = {"cut": cut, "products": f"{run.flops} for {run.untiled_flops}"}
    fields |= {f"loop {i}": _loop(loop) for i, loop in enumerate(run.loops, 1)}
    whole = [f"{c.array} {_placed(c.placement)} for {c.primitive}" for c in run.completed]
    effects = [f"{e.primitive} {'with every tile' if e.tiles else 'once'}" for e in run.effects]
    return fields | _listed("whole", whole) | _listed("effects", effects)


def _loop(loop: Any) -> str:
    again = sum(r.flops for r in loop.recomputed)
    parts = [
        f"{loop.tiles} tiles{' backwards' if loop.reverse else ''}, {loop.flops} FLOPs",
        f"{again} of them again" if again else "",
        f"an array of {loop.largest} bytes",
        *sorted(f"gathers {g.array} as {g.spec}" for g in loop.gathered),
    ]
    carries = sorted(f"{_placed(c.placement)} {c.array} in {c.nbytes} bytes{_apart(c)}" for c in loop.carries)
    return ", ".join(filter(None, parts)) + "; " + "; ".join(carries)


def _apart(carry: Any) -> str:
    return f", then over {' and '.join(carry.apart)}" if carry.apart else ""


def _placed(placement: Any) -> str:
    """How an array goes with the tiles, in words."""
    found = re.fullmatch(r"(\w+)(?:\((?:dim=)?(.*)\))?", str(placement))
    assert found is not None, placement
    kind, detail = found.groups()
    words = {"Tiled": f"slices along {detail}", "Partial": detail, "Stacked": "states", "Whole": "whole"}
    return words[kind]


def _listed(name: str, items: list[str]) -> Fields:
    return {name: "; ".join(sorted(items))} if items else {}


# ------------------------------------------------------------------------------------------------------------- texts


def write_line(name: str, fields: Fields) -> str:
    return " | ".join([name, *(f"{k}: {v}" for k, v in fields.items())])


def read_line(line: str) -> tuple[str, Fields]:
    name, *fields = line.split(" | ")
    return name, dict(field.split(": ", 1) for field in fields)


def read(text: str) -> Lines:
    """A text of the folder; empty where there is none yet."""
    path = FOLDER / f"{text}.txt"
    return dict(map(read_line, path.read_text().splitlines())) if path.exists() else {}


def write(text: str, lines: Lines) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{text}.txt").write_text("".join(write_line(k, v) + "\n" for k, v in lines.items()))


def differences(name: str, was: Mapping[str, str] | None, now: Mapping[str, str] | None) -> Iterator[str]:
    """What has changed between two lines of one name, a line for each field."""
    if was is None or now is None:
        yield f"{name}: was not there" if was is None else f"{name}: is not there any more"
        return
    for field in dict.fromkeys([*was, *now]):
        if was.get(field) != now.get(field):
            yield f"{name}: {field}\n    was {was.get(field, 'nothing')}\n    is  {now.get(field, 'nothing')}"


def compare(was: Lines, now: Lines) -> list[str]:
    """All differences between two sets of lines, in order."""
    return [line for name in dict.fromkeys([*was, *now]) for line in differences(name, was.get(name), now.get(name))]


def of_row(lines: Lines, row: Row, count: int) -> Lines:
    """Those lines that are about one row and number of tiles."""
    own = named(row, count)
    return {k: v for k, v in lines.items() if k == own or k in (f"{own}, value", f"{own}, gradient")}


# ---------------------------------------------------------------------------------------------------------- rewriting


def tables() -> list[str]:
    return list(dict.fromkeys(row.table for row in rows().values()))


def measured() -> list[Row]:
    """The rows whose compiled memory is known."""
    return [row for row in rows().values() if row.memory is not None]


def measure(row: Row) -> Fields:
    assert row.memory is not None
    return {"bytes": str(row.temporary(row.memory))}


def rewrite(chosen: list[str]) -> Iterator[str]:
    """Write the texts of some tables anew, or of all; yield what has changed."""
    assert jax.__version__ == OLDEST, f"the texts are of JAX {OLDEST}, this is {jax.__version__}"
    known = [*tables(), COMPILED]
    assert set(chosen) <= set(known), f"there are {', '.join(known)}, not {', '.join(set(chosen) - set(known))}"
    for table in [t for t in tables() if t in (chosen or known)]:
        lines, estimated = {}, {}
        for row in (row for row in rows().values() if row.table == table):
            for count in row.counts:
                one, other = describe(row, count)
                lines |= one
                estimated |= {f"{table}: {k}": v for k, v in other.items()}
        yield from replace(table, lines)
        before = {k: v for k, v in read(ESTIMATED).items() if not k.startswith(f"{table}: ")}
        both = before | estimated
        yield from replace(ESTIMATED, {k: both[k] for t in tables() for k in both if k.startswith(f"{t}: ")})
        jax.clear_caches()
    if COMPILED in (chosen or known):
        yield from replace(
            COMPILED, {f"{row.table}: {named(row, row.memory or 0)}": measure(row) for row in measured()}
        )


def replace(text: str, lines: Lines) -> list[str]:
    """Write one text; return what has changed."""
    changed = [f"{text}: {line}" for line in compare(read(text), lines)]
    write(text, lines)
    return changed
