"""The tables printed before the first step: what the run is, what it costs, and whether it fits."""

import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import zoo.accounting
from experiments import configs
from experiments.configs.registry import name_of
from experiments.planning import cost
from experiments.planning.cost import Memory, Plan, Traffic
from experiments.runtime import meshes
from experiments.runtime.hardware import Device
from experiments.runtime.numbers import quantity, size
from experiments.step import tiling

INDENT: Any = {"initial_indent": "  ", "subsequent_indent": " " * 8}
WIDTH = 80  # at most: a narrower terminal has narrower tables


def width() -> int:
    """Return how wide a table may be."""
    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def render(name: str, config: configs.Resolved, plan: Plan, device: Device) -> str:
    """Return the whole table as text."""
    hardware = config.hardware
    rows = [
        ("parameters", f"{plan.params:,}", f"{hardware.param_dtype}, computed in {hardware.compute_dtype}"),
        ("tokens per step", f"{config.tokens_per_step:,}", f"{config.batch_size} x {config.seq_len:,}"),
        ("FLOPs per step", quantity(plan.flops, "FLOP"), f"times {config.steps:,} steps"),
        (
            "optimizer",
            name_of("optimizer", config.optimizer),
            f"learning rate {config.optimizer.learning_rate:g}, {config.optimizer.schedule}",
        ),
    ]
    if config.mesh.devices > 1:
        rows.append(("mesh", f"{config.mesh.devices} devices", meshes.describe(config.mesh)))
    lines = [_rule(f"{name} on {device.name}")]
    rows += [("tiled" * (i == 0), part, how) for i, (part, how) in enumerate(tiling.describe(config))]
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
    return [values.rstrip(), *textwrap.wrap(note, width(), initial_indent=" " * 6, subsequent_indent=" " * 6)]


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
    notes = [f"{note}." for note in meshes.notes(config.mesh, config.model.config.dims)]
    tokens, longest = config.tokens_per_step, config.model.config.context_length
    if config.seq_len > longest:
        notes.append(f"seq_len={config.seq_len:,} is beyond the {longest:,} tokens that this model was made for.")
    if plan.refused is not None:
        notes.append(f"untiled, this step does not compile here: {plan.refused.splitlines()[0].strip()}.")
    if plan.saved is not None and plan.saved <= 0.02 * plan.memory.total:
        small = f"at {tokens:,} tokens per step tiling saves nothing: what it cuts is small."
        if plan.at_scale is not None:
            tiled, untiled = (size(bytes, digits=1) for bytes in plan.at_scale)
            small += f" At {cost.AT_SCALE:,} the head would take at most {tiled} tiled, {untiled} untiled."
        notes.append(small)
    length, each = config.head.length, config.head.each
    if config.tiling.n != "none" and config.head.tokens < cost.SHORT_TILE <= length * each:
        steps = -(-cost.SHORT_TILE // each)
        notes.append(
            f"tiles of {config.head.tokens} tokens make slow matrix products; "
            f"tiling.n={length // steps} has {steps * each} in each."
        )
    return [line for note in notes for line in _note(note)]


def _head(config: configs.Resolved, plan: Plan) -> str:
    logits = 4 * config.head.tokens * config.model.config.vocab_size
    if config.head.tokens >= config.tokens_per_step:
        return f"logits {size(logits)}"
    if plan.head_untiled is None or plan.untiled is not None:
        return f"logits {size(logits)} per tile"
    return f"at most {size(plan.head_untiled)} if it were untiled"


def choices(chosen: Mapping[str, configs.Choice]) -> str:
    """Return the lines that say what was chosen for the user, as overrides, and why."""
    reasons = dict.fromkeys(choice.why for choice in chosen.values())
    lines = ["  chosen:"]
    for why in reasons:
        words = " ".join(f"{key}={_plain(choice.value)}" for key, choice in chosen.items() if choice.why == why)
        *before, last = textwrap.wrap(words, width() - 4, break_long_words=False, break_on_hyphens=False)
        lines += [f"    {line}" for line in before] + _row(f"    {last:<30}", why)
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{item}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rule(title: str = "") -> str:
    return (f"── {title} " if title else "").ljust(width(), "─")[: width()]


def render_described(name: str, config: configs.Resolved, traffic: Traffic, device: Device) -> str:
    """Return the whole table of a run on described devices as text."""
    cut = f"tiling.n={config.tiling.n}, remat {config.remat.policy}, attention {config.attention}"
    notes = [f"  note: {note}." for note in meshes.notes(config.mesh, config.model.config.dims)]
    state = [f"{config.hardware.param_dtype}, computed in {config.hardware.compute_dtype}"]
    lines = [
        f"── {name} for {device.name} ".ljust(WIDTH, "─"),
        f"  {'mesh':<18} {f'{config.mesh.devices} devices':>14}   {meshes.describe(config.mesh)}",
        f"  {'parameters':<18} {zoo.accounting.count_params(config.model.config):>14,}   {state[0]}",
        f"  {'tokens per step':<18} {config.tokens_per_step:>14,}   {config.batch_size} x {config.seq_len:,}, "
        f"{config.tokens_per_step // config.mesh.devices:,} of each device",
        "",
        "  each device",
        f"    {'state and batch':<16} {size(traffic.arguments):>14}",
        f"    {'temporary':<16} {size(traffic.peak - traffic.arguments):>14}   {cut}",
        f"    {'peak':<16} {size(traffic.peak):>14}   of {size(device.memory)}",
    ]
    if traffic.host:
        every = f"{size(traffic.host * config.mesh.devices)} for all devices"
        lines.append(f"    {'in host memory':<16} {size(traffic.host):>14}   {every}")
    return "\n".join(
        [
            *lines,
            *_work(config, traffic),
            *notes,
            "─" * WIDTH,
        ]
    )


def _work(config: configs.Resolved, traffic: Traffic) -> list[str]:
    """Return the lines about FLOPs and what devices exchange."""
    useful = zoo.accounting.train_flops(config.model.config, config.batch_size, config.seq_len) / config.mesh.devices
    lines = []
    if traffic.flops is not None:
        note = f"{traffic.flops / useful:.2f} x those of the mathematics"
        lines.append(f"    {'matrix products':<16} {quantity(traffic.flops, 'FLOP'):>14}   {note}")
    if traffic.collectives is None:
        return [*lines, "    what devices exchange cannot be told: a loop has no known number of turns"]
    lines += ["", f"  {'each device sends':<18} {'bytes':>14}   {'times':>7}   {'in loops':>12}"]
    for kind in sorted({one.kind for one in traffic.collectives}):
        found = [one for one in traffic.collectives if one.kind == kind]
        total = sum(one.bytes * one.times for one in found)
        looped = sum(one.bytes * one.times for one in found if one.looped)
        times = sum(one.times for one in found)
        lines.append(f"    {kind:<16} {size(total):>14}   {times:>7,}   {size(looped):>12}")
    return lines if traffic.collectives else [*lines, f"    {'nothing':<16}"]


def facts(plan: Plan, config: configs.Resolved) -> dict[str, Any]:
    """Return what the pictures and the summary of a run need of its plan, as JSON holds it."""
    bars, estimated = {_label(config): plan.memory.parts}, []
    if plan.untiled is not None:
        bars["untiled"] = plan.untiled.parts
    elif plan.head_untiled is not None:
        bars["untiled"] = {**plan.memory.parts, "head": plan.head_untiled}
        estimated.append("untiled")
    return {
        "bars": bars,
        "estimated": estimated,
        "params": plan.params,
        "flops": plan.flops,
        "total": plan.memory.total,
        "total_untiled": plan.untiled and plan.untiled.total,
        "available": plan.available,
        "process": config.hardware.platform is configs.Platform.cpu,
        "weights": plan.memory.weights,
        "paired": config.paired,
    }


def _label(config: configs.Resolved) -> str:
    """Return what of the run is cut, in words."""
    parts = [f"{part}: {how}" for part, how in tiling.describe(config)]
    return (
        "this run, untiled"
        if not parts
        else "\n".join(f"this run, {part}" if part is parts[0] else part for part in parts)
    )
