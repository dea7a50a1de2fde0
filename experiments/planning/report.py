"""Says what a run will cost before anything is allocated, and refuses one that does not fit, with what would.

The tables printed before the first step: what the run is, what it takes, and whether that fits.
"""

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from experiments import configs
from experiments.commandline.console import GIB, quantity, size
from experiments.planning import cost
from experiments.planning.cost import Lacking, Memory, Plan
from experiments.planning.suggest import Asked, largest_model, suggest
from experiments.runtime.hardware import Device
from experiments.step.build import AT_SCALE


class DoesNotFitError(RuntimeError):
    """The compiled step needs more memory than there is."""


def report(
    found: Plan | Lacking, config: configs.Resolved, model: str, asked: Asked, device: Device, ask: Callable[[], None]
) -> Plan:
    """Print what a run will cost, and return it.

    Args:
        found: what that is.
        config: the run.
        model: its name.
        asked: returns the run as it would be asked for with some overrides changed.
        device: what it is to fit.
        ask: may raise, where the process was told to end.

    Raises:
        DoesNotFitError: with overrides that would fit; nothing has been allocated.
    """
    if isinstance(found, Plan):
        print(render(model, config, found, device))
        print(f"  compiled in {found.seconds:.1f} s", flush=True)
        why = crowded(found.host, config, device)
        if found.fits and why is None:
            return found
        if found.fits:
            raise DoesNotFitError(f"{model} does not fit: {why}")
        need = f"the compiled step takes {size(found.memory.total)} and {size(found.headroom)} must stay free.\n"
    elif (least := found.least) is not None:
        what = "weights, gradients and optimizer" if least.state > least.tokens else "hidden states and scores"
        need = f"its {what} alone take {size(max(least.state, least.tokens))}.\n"
    else:
        need = f"the compiler says\n{found.compiler}\n"
    ask()
    free = found.available
    raise DoesNotFitError(f"{model} does not fit in {size(free)}: {need}{_remedy(config, asked, device, free, ask)}")


def say(text: str | None, chosen: Mapping[str, configs.Choice]) -> None:
    """Print what the ids that are read stand for, where that is known, and what was chosen for the user."""
    if text is not None:
        print("\n".join(textwrap.wrap(f"text: {text}", width(), **INDENT)), flush=True)
    if chosen:
        print(choices(chosen), flush=True)


def crowded(host: int, config: configs.Resolved, device: Device) -> str | None:
    """Return why a machine's own memory does not hold what so many bytes for each of its devices are, and what to do.

    None where it does, or where its size is not known; of a CPU, that is the device's memory.
    """
    if device.host is None or device.platform == "cpu" or host * device.on_host <= device.host:
        return None
    has = "a host has" if device.described is not None else "this machine has free"
    ways = ["remat.policy=offload/2, which keeps the input of every second layer"] * (config.remat.policy == "offload")
    ways += ["hardware.offload=none"] * bool(config.hardware.offloaded)
    every = f" for its {device.on_host} devices" if device.on_host > 1 else ""
    return (
        f"its step holds {size(host * device.on_host)} in host memory{every}, and {has} {size(device.host)}. "
        f"Use {', '.join([*ways, 'fewer tokens, or a machine with more'])}."
    )


def _remedy(config: configs.Resolved, asked: Asked, device: Device, free: int, ask: Callable[[], None]) -> str:
    if (kept := cost.headroom(config)) >= free:
        return f"hardware.headroom_gib={kept / GIB:g} alone keeps all of it free: lower it."
    print("  looking for what would fit ...", flush=True)
    if (found := suggest(config, asked, device, ask)) is not None:
        changes, total = found
        return f"This fits ({size(total)}): {' '.join(changes)}"
    smaller = largest_model(lambda params: 2 * 2 * params * 1.3 < free - kept)
    return "Nothing that leaves the model as it is was found to fit." + (f" Try model={smaller}." if smaller else "")


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
            config.optimizer.name,
            f"learning rate {config.optimizer.learning_rate:g}, {config.optimizer.schedule}",
        ),
    ]
    if config.mesh.devices > 1:
        rows.append(("mesh", f"{config.mesh.devices} devices", config.mesh.words))
    lines = [_rule(f"{name} on {device.name}")]
    rows += [("tiled" * (i == 0), part, how) for i, (part, how) in enumerate(plan.cuts)]
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
    if plan.host:
        lines.append(f"    {'in host memory':<14} {size(plan.host):>{cell}}")
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


def _name(config: configs.Resolved) -> str:
    """Return how the run is tiled, where one word says it."""
    if not config.tiling.cuts:
        return "untiled"
    alone = configs.Tiling(n=config.tiling.n) == config.tiling and config.tiling.n != "none"
    return f"tiled, n={config.tiling.n}" if alone else "tiled"


def _advice(config: configs.Resolved, plan: Plan) -> list[str]:
    """Return what a user of tiling should know: whether it helps at this size, and whether its tiles are too short."""
    notes = [f"{note}." for note in plan.whole]
    tokens, longest = config.tokens_per_step, config.model.config.context_length
    if config.seq_len > longest:
        notes.append(f"seq_len={config.seq_len:,} is beyond the {longest:,} tokens that this model was made for.")
    if plan.refused is not None:
        notes.append(f"untiled, this step does not compile here: {plan.refused.splitlines()[0].strip()}.")
    if plan.saved is not None and plan.saved <= 0.02 * plan.memory.total:
        small = f"at {tokens:,} tokens per step tiling saves nothing: what it cuts is small."
        if plan.at_scale is not None:
            tiled, untiled = (size(bytes, digits=1) for bytes in plan.at_scale)
            small += f" At {AT_SCALE:,} the head would take at most {tiled} tiled, {untiled} untiled."
        notes.append(small)
    length, each = config.head.length, config.head.each
    if config.tiling.n != "none" and config.head.tokens < cost.SHORT_TILE <= length * each:
        steps = -(-cost.SHORT_TILE // each)
        notes.append(
            f"tiles of {config.head.tokens} tokens make slow matrix products; "
            f"tiling.n={length // steps} has {steps * each} in each."
        )
    return [line for note in notes for line in textwrap.wrap(f"note: {note}", width(), **INDENT)]


def _head(config: configs.Resolved, plan: Plan) -> str:
    logits = 4 * config.head.tokens * config.model.config.vocab_size
    if config.head.tokens >= config.tokens_per_step:
        return f"logits {size(logits)}"
    if plan.head_untiled is None or plan.untiled is not None:
        return f"logits {size(logits)} per tile"
    return f"at most {size(plan.head_untiled)} if it were untiled"


def choices(chosen: Mapping[str, configs.Choice]) -> str:
    """Return the lines that say what was chosen for the user, as overrides, and why."""
    reason = lambda choice: choice.why.format(*map(size, choice.sizes)) if choice.sizes else choice.why
    reasons = {key: reason(choice) for key, choice in chosen.items()}
    lines = ["  chosen:"]
    for why in dict.fromkeys(reasons.values()):
        words = " ".join(f"{key}={_plain(choice.value)}" for key, choice in chosen.items() if reasons[key] == why)
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
