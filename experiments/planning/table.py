"""The table printed before the first step: what the run is, what it costs, and whether it fits."""

import shutil
import sys
import textwrap
from typing import Any

from experiments import configs
from experiments.planning import preflight
from experiments.planning.preflight import Memory, Plan
from experiments.runtime import meshes
from experiments.runtime.hardware import GIB, Device
from experiments.step import tiles

INDENT: Any = {"initial_indent": "  ", "subsequent_indent": " " * 8}
WIDTH = 80  # at most: a narrower terminal has narrower tables


def width() -> int:
    """Return how wide a table may be."""
    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def size(count: float, digits: int = 2) -> str:
    """Return bytes in MiB or GiB: `4.67 GiB`."""
    if count >= GIB:
        return f"{count / GIB:,.{digits}f} GiB"
    return f"{count / 2**20:,.{digits - 1}f} MiB"


def quantity(value: float, unit: str = "") -> str:
    """Return a number to three digits with a decimal prefix: `1.93 TFLOP`, `2.10k`."""
    scales = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    prefix, scale = next(((p, s) for p, s in scales.items() if value >= s), ("", 1.0))
    return f"{digits(value / scale)}{' ' if unit else ''}{prefix}{unit}"


def digits(value: float) -> str:
    """Return a number to three significant digits, trailing zeros kept so that columns stay in line."""
    return f"{value:#.3g}".rstrip(".")


def render(name: str, config: configs.Resolved, plan: Plan, device: Device, optimizer: str) -> str:
    """Return the whole table as text."""
    hardware = config.hardware
    rows = [
        ("parameters", f"{plan.params:,}", f"{hardware.param_dtype}, computed in {hardware.compute_dtype}"),
        ("tokens per step", f"{config.tokens_per_step:,}", f"{config.batch_size} x {config.seq_len:,}"),
        ("FLOPs per step", quantity(plan.flops, "FLOP"), f"times {config.steps:,} steps"),
        ("optimizer", optimizer, f"learning rate {config.optimizer.learning_rate:g}, {config.optimizer.schedule}"),
    ]
    if config.mesh.devices > 1:
        rows.append(("mesh", f"{config.mesh.devices} devices", meshes.describe(config.mesh)))
    lines = [_rule(f"{name} on {device.name}")]
    rows += [("tiled" * (i == 0), part, how) for i, (part, how) in enumerate(tiles.describe(config))]
    for label, value, note in rows:
        lines += _row(f"  {label:<16} {value:>15}", note)
    return "\n".join([*lines, "", *_memory(config, plan), _rule()])


def _memory(config: configs.Resolved, plan: Plan) -> list[str]:
    heads = [_name(config)] if plan.untiled is None else [_name(config), "untiled"]
    columns: list[Memory] = [plan.memory] if plan.untiled is None else [plan.memory, plan.untiled]
    title = "memory" if config.mesh.devices == 1 else "memory of each"
    cell = 15 if width() >= 50 else 10
    lines = [f"  {title:<16} " + "".join(f"{head:>{cell}}" for head in heads)]
    notes = {"head": _head(config, plan), "activations": f"and the rest; remat {config.remat.policy}"}
    for part in plan.memory.parts:
        cells = "".join(f"{size(getattr(column, part)):>{cell}}" for column in columns)
        lines += _row(f"    {part:<14} {cells}", notes.get(part, ""))
    lines.append(f"    {'compiled step':<14} " + "".join(f"{size(column.total):>{cell}}" for column in columns))
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines += _row(
        f"    {'available':<14} {size(plan.available):>{cell}}", f"{verdict}, {size(plan.headroom)} kept free"
    )
    return lines + _advice(config, plan)


def _row(values: str, note: str) -> list[str]:
    """Return a row of the table, its note below where there is no room beside."""
    if len(line := f"{values}   {note}".rstrip()) <= width():
        return [line]
    return [values, *textwrap.wrap(note, width(), initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _note(text: str) -> list[str]:
    return textwrap.wrap(f"note: {text}", width(), **INDENT)


def _name(config: configs.Resolved) -> str:
    """Return how the run is tiled, where one word says it."""
    if not config.tiling.cuts:
        return "untiled"
    alone = configs.Tiling(n=config.tiling.n) == config.tiling and config.tiling.n != "none"
    return f"tiled, n={config.tiling.n}" if alone else "tiled"


def _advice(config: configs.Resolved, plan: Plan) -> list[str]:
    """Return what a user of tiling should know: whether it helps at this size, and whether its tiles are too short."""
    notes = [f"{note}." for note in meshes.notes(config)]
    tokens, longest = config.tokens_per_step, config.model.config.context_length
    if config.seq_len > longest:
        notes.append(f"seq_len={config.seq_len:,} is beyond the {longest:,} tokens that this model was made for.")
    if plan.refused is not None:
        notes.append(f"untiled, this step does not compile here: {plan.refused.splitlines()[0].strip()}.")
    if plan.saved is not None and plan.saved <= 0.02 * plan.memory.total:
        small = f"at {tokens:,} tokens per step tiling saves nothing: what it cuts is small."
        if plan.at_scale is not None:
            tiled, untiled = (size(bytes, digits=1) for bytes in plan.at_scale)
            small += f" At {preflight.AT_SCALE:,} the head would take about {tiled} tiled, {untiled} untiled."
        notes.append(small)
    length, each = tiles.head_axis(config)
    if config.tiling.n != "none" and tiles.head_tokens(config) < preflight.SHORT_TILE <= length * each:
        steps = -(-preflight.SHORT_TILE // each)
        notes.append(
            f"tiles of {tiles.head_tokens(config)} tokens make slow matrix products; "
            f"tiling.n={length // steps} has {steps * each} in each."
        )
    return [line for note in notes for line in _note(note)]


def _head(config: configs.Resolved, plan: Plan) -> str:
    logits = 4 * tiles.head_tokens(config) * config.model.config.vocab_size
    if tiles.head_tokens(config) >= config.tokens_per_step:
        return f"logits {size(logits)}"
    if plan.head_untiled is None or plan.untiled is not None:
        return f"logits {size(logits)} per tile"
    return f"about {size(plan.head_untiled)} if it were untiled"


def choices(chosen: dict[str, Any]) -> str:
    """Return the lines that say what was chosen for the user, ready to be pasted as overrides."""
    words = [f"{key}={_plain(value)}" for key, value in chosen.items()]
    lines, line = [], "  chosen:"
    for word in words:
        if len(line) + 1 + len(word) > width() and line.strip():
            lines.append(line)
            line = "         "
        line += f" {word}"
    return "\n".join([*lines, line])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{item}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rule(title: str = "") -> str:
    return (f"── {title} " if title else "").ljust(width(), "─")[: width()]
