"""A tile plan as a table that a person can read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from transforms.tiling.analysis.limits import human
from transforms.tiling.ir.placement import Partial, Stacked, Tiled

WIDTH = 100


def totals(plans: dict[str, Any], columns: dict[str, Any]) -> list[str]:
    """Tiled and untiled, side by side: `columns` has for each name what it says of a plan, as two texts."""
    rows = {name: [column(plan) for plan in plans.values()] for name, column in columns.items()}
    lines = [" " * 28 + "".join(f"{name:>28}" for name in plans)]
    lines.append(" " * 28 + "".join(f"{'tiled':>14}{'untiled':>14}" for _ in plans))
    return lines + [f"{k:28}" + "".join(f"{a:>14}{b:>14}" for a, b in v) for k, v in rows.items()]


def describe_run(name: str, plan: Any) -> Iterator[str]:
    yield name if plan.loops else f"{name}: no loops, all of it is whole"
    for i, loop in enumerate(plan.loops, 1):
        tiles = "all at once" if loop.tiles == 1 else f"{loop.tiles} tiles{', backwards' if loop.reverse else ''}"
        size = f"{loop.equations} equations, {flops_text(loop.flops)}, largest array {human(loop.largest)}"
        yield f"  loop {i} of {len(plan.loops)}: {tiles}, {size}"
        yield from _table("gathers", [(g.array, human(g.nbytes), f"to {g.spec}") for g in loop.gathered])
        yield from _table("carries", [(c.array, human(c.nbytes), _made(c)) for c in loop.carries])
        again = sorted(loop.recomputed, key=lambda r: (-r.flops, -r.nbytes))
        rows = [(f"{r.primitive} {r.array}", flops_text(r.flops) if r.flops else "", short(r.where)) for r in again]
        rest = [(f"and {len(rows) - SHOWN} smaller", "", "")] if len(rows) > SHOWN else []
        yield from _table("recomputes", rows[:SHOWN] + rest)
    if sum(r.flops for loop in plan.loops for r in loop.recomputed) > plan.untiled_flops:
        yield from REMEDY
    if plan.effects:
        yield "  side effects"
    for e in plan.effects:
        yield _fit(f"    `{e.primitive}` at {short(e.where)}: once{' for each tile' if e.tiles else ''}")
    if plan.completed:
        yield "  made whole, for an operation that needs it whole"
    for c in plan.completed:
        yield _fit(f"    {c.array}, {human(c.nbytes)}, for `{c.primitive}` at {short(c.where)}:")
        yield _fit(f"      it {c.reason}")


REMEDY = (
    "  computes more products again than the function has: scan over its layers, or give a name to what",
    "    each ends in (jax.ad_checkpoint.checkpoint_name) and keep that, with",
    "    policy=jax.checkpoint_policies.save_only_these_names(...)",
)
SHOWN = 4  # of what a loop computes again, the largest


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    first = max((len(a) for a, _, _ in rows), default=0)
    for i, (a, b, c) in enumerate(rows):
        yield _fit(f"    {title if i == 0 else '':12}{a:{first}}  {b:>11}  {c}".rstrip())


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _made(carry: Any) -> str:
    devices = f", then over the devices along {', '.join(carry.apart)}" if carry.apart else ""
    if isinstance(carry.placement, Tiled):
        return f"a slice of dimension {carry.placement.dim} from each tile{devices.replace('then', 'then summed')}"
    if isinstance(carry.placement, Stacked):
        return "the state that each tile begins with"
    return f"{carry.placement.op} over the tiles{devices}" if isinstance(carry.placement, Partial) else "whole"


def short(where: str) -> str:
    """A source line without the way to its folder."""
    return re.sub(r"^.*/(?=[^/]*/[^/]*$)", "", where)


def flops_text(count: float | int) -> str:
    """FLOPs in the unit that reads best."""
    return human(count, 1000, [f"{unit}FLOP" for unit in ("", "k", "M", "G", "T", "P")])
