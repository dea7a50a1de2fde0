"""What a run takes of each device, as its compiled step says, here or on described ones; and how that is told.

Nothing is allocated. A described device is one like any other: its programs only cannot be run. What is told before the
first step are tables of what the run is, what it takes, and whether that fits; one that does not is refused.
"""

import dataclasses
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax

from experiments import configs
from experiments.commandline.console import GIB, quantity, size
from experiments.runtime.hardware import Device
from experiments.runtime.memory import OutOfMemoryError
from experiments.step.build import AT_SCALE, Programs
from transforms.offload import in_host

INDENT: Any = {"initial_indent": "  ", "subsequent_indent": " " * 8}
WIDTH = 80  # at most: a narrower terminal has narrower tables
SHORT_TILE = 64  # tokens: below, a tile's matrix products run at half their speed or less


@dataclass(frozen=True)
class Memory:
    """Bytes of a compiled training step on each device; `total` is the compiler's, the parts share it out.

    The head is what `tile` estimates at most, or of a run that compares what the compiler says of it alone.
    """

    weights: int
    optimizer: int
    gradients: int
    head: int
    activations: int
    total: int

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name, in the order of the table."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "total"}


@dataclass(frozen=True)
class Plan:
    """What a run costs."""

    params: int
    flops: int
    memory: Memory
    available: int
    headroom: int
    host: int = 0  # bytes of the host's memory that the step holds, which are no device's
    cuts: Sequence[tuple[str, str]] = ()  # each part that is cut, and how
    whole: Sequence[str] = ()  # what every device has whole, although the mesh has an axis for it
    head_untiled: int | None = None  # bytes of the untiled head, estimated; None where the run's own head is not cut
    untiled: Memory | None = None  # of the untiled step, where a tiled run compares
    refused: str | None = None  # why that could not be compiled
    at_scale: tuple[int, int] | None = None  # bytes of the head at AT_SCALE, tiled and untiled, where few save none
    seconds: float = 0.0  # what it took to find out
    process: bool = False  # whether the memory is that of the process, as on a CPU
    paired: bool = False  # whether a batch is made of pairs of sequences

    @property
    def left(self) -> int:
        """Bytes that are free beside the step and the headroom; fewer than none where these do not fit."""
        return self.available - self.memory.total - self.headroom

    @property
    def fits(self) -> bool:
        """Whether the step and the headroom are within what is available."""
        return self.left >= 0

    @property
    def saved(self) -> int | None:
        """Bytes that tiling saves, as far as is known; None of an untiled run."""
        if self.untiled is not None:
            return self.untiled.total - self.memory.total
        return None if self.head_untiled is None else self.head_untiled - self.memory.head

    @property
    def facts(self) -> dict[str, Any]:
        """What the pictures and the summary of a run need of its plan, as JSON holds it."""
        said = "\n".join(f"{part}: {how}" for part, how in self.cuts) or "untiled"
        bars, estimated = {f"this run, {said}": self.memory.parts}, []
        if self.untiled is not None:
            bars["untiled"] = self.untiled.parts
        elif self.head_untiled is not None:
            bars["untiled"] = {**self.memory.parts, "head": self.head_untiled}
            estimated.append("untiled")
        return {
            "bars": bars,
            "estimated": estimated,
            "params": self.params,
            "flops": self.flops,
            "total": self.memory.total,
            "total_untiled": self.untiled and self.untiled.total,
            "available": self.available,
            "process": self.process,
            "weights": self.memory.weights,
            "paired": self.paired,
        }


@dataclass(frozen=True)
class Lacking:
    """A step that does not fit, as is known before it is compiled or from the compiler.

    Attributes:
        available: bytes that the run may plan with.
        least: what it takes at the very least, where that is by far too much; else None.
        compiler: what the compiler says.
    """

    available: int
    least: "Least | None" = None
    compiler: str = ""


def estimate(programs: Programs, device: Device) -> Plan | Lacking:
    """Return what a run costs, or why it does not fit as far as no plan can be made of it; says that it compiles."""
    began = time.perf_counter()
    free, lowest = available(programs.config, device), least(programs, device)
    if lowest.total > 4 * free:  # compiling would only waste time
        return Lacking(free, lowest)
    print("  compiling ...", flush=True)
    try:
        return replace(plan(programs, device), seconds=time.perf_counter() - began)
    except OutOfMemoryError as error:
        return Lacking(free, compiler=str(error))


def plan(programs: Programs, device: Device) -> Plan:
    """Return what a run costs. Compiles its step, and the untiled one if it compares; allocates nothing.

    Raises:
        OutOfMemoryError: the compiler finds that the step does not fit the device.
    """
    config = programs.config
    tiled, whole = programs.head_bytes
    made = Plan(
        params=config.params,
        flops=programs.flops,
        memory=measure(programs, device, temporary(programs.compiled_head) if config.compare else tiled),
        available=available(config, device),
        headroom=headroom(config),
        host=host_bytes(programs.train),
        cuts=programs.cuts,
        whole=programs.whole,
        head_untiled=whole if config.tiling.n != "none" and whole else None,
        process=config.hardware.platform is configs.Platform.cpu,
        paired=config.paired,
    )
    if config.tiling.cuts and config.compare:
        untiled = programs.untiled
        try:
            made = replace(made, untiled=measure(untiled, device, temporary(untiled.compiled_head)))
        except OutOfMemoryError as error:
            made = replace(made, refused=str(error).strip())
    few = config.tokens_per_step < AT_SCALE and made.saved is not None
    if few and made.saved <= 0.02 * made.memory.total:
        tiled, whole = programs.longer.head_bytes
        made = replace(made, at_scale=(tiled, whole) if tiled < whole else None)
    return made


def available(config: configs.Resolved, device: Device) -> int:
    """Return the bytes that the run may plan with."""
    limit = config.hardware.memory_gib
    shared = config.mesh.devices if device.platform == "cpu" else 1  # the devices of a CPU have one memory
    return device.memory // shared if limit is None else int(limit * GIB)


def headroom(config: configs.Resolved) -> int:
    """Return the bytes that must stay free beside the step."""
    return int(configs.chosen(config.hardware.headroom_gib) * GIB)


def room(config: configs.Resolved, device: Device) -> int:
    """Return the bytes that a step may take: of described devices all that a program may, as nothing else is there."""
    return device.memory if device.described is not None else available(config, device) - headroom(config)


def measure(programs: Programs, device: Device, head: int) -> Memory:
    """Return the memory of a compiled step, told its head's. Weights, optimizer and gradients are exact."""
    state = programs.state
    temp = temporary(programs.train)
    trained = eqx.filter_eval_shape(lambda model: eqx.filter(model, programs.trainable(model)), state.model)
    gradients = min(device_bytes(trained, device), temp)
    head = min(head, temp - gradients)
    weights = device_bytes(state.model, device) + device_bytes(programs.frozen, device)
    rest = temp - gradients - head
    moments = device_bytes(state.opt_state, device)
    return Memory(weights, moments, gradients, head, rest, total_bytes(programs.train, device))


def temporary(compiled: Any) -> int:
    """Return the bytes that a compiled program holds of a device while it runs, beside what it is given and returns."""
    return compiled.compiled.memory_analysis().temp_size_in_bytes


def total_bytes(compiled: Any, device: Device) -> int:
    """Return what a compiled step holds of a device at its peak: arguments, what it returns beside them, temporaries.

    A compiler for TPUs says what that is, but counts what is in the host's memory too; of others the sum is known.
    """
    stats = compiled.compiled.memory_analysis()
    if device.platform == "tpu" and not host_bytes(compiled):
        return max(stats.peak_memory_in_bytes, stats.argument_size_in_bytes)
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes


def host_bytes(compiled: Any) -> int:
    """Return what a compiled step holds of the host's memory for each device: what was offloaded."""
    stats = compiled.compiled.memory_analysis()
    outputs = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    return stats.host_argument_size_in_bytes + outputs + stats.host_temp_size_in_bytes


@dataclass(frozen=True)
class Least:
    """Bytes that a step takes of a device at the very least, as shapes alone tell: nothing is compiled.

    Attributes:
        state: weights, optimizer, gradients.
        tokens: what there is for each token: its batch, its hidden states that layers keep, the scores of one layer.
    """

    state: int
    tokens: int

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.tokens


def least(programs: Programs, device: Device) -> Least:
    """Return what a step takes at the very least; to be called on the run's mesh."""
    config, model, state = programs.config, programs.config.model.config, programs.state
    trained = eqx.filter_eval_shape(lambda model: eqx.filter(model, programs.trainable(model)), state.model)
    kept = sum(device_bytes(tree, device) for tree in (state.model, programs.frozen, trained, state.opt_state))
    itemsize, rows = programs.compute_dtype.itemsize, config.head.rows
    apart = any(sign in config.remat.policy for sign in ("offload", "sqrt", "/"))  # not every layer's are kept here
    values = rows * config.seq_len * model.embed_dim * (1 if apart else model.num_layers)
    if config.attention == "plain":
        values += rows * model.num_heads * config.seq_len**2
    batch = 3 * 4 * config.tokens_per_step  # tokens, targets, mask
    return Least(kept, (batch + values * itemsize) // config.mesh.devices)


def device_bytes(tree: Any, device: Device) -> int:
    """Return the bytes that a device holds of every array, abstract ones included, in a tree.

    What is in host memory is no device's but a processor's.
    """
    held = lambda leaf: hasattr(leaf, "dtype") and (device.platform == "cpu" or not in_host(leaf))
    shape = lambda leaf: leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if held(leaf))


class DoesNotFitError(RuntimeError):
    """The compiled step needs more memory than there is."""


def report(
    found: Plan | Lacking, config: configs.Resolved, model: str, device: Device, remedy: Callable[[], str]
) -> Plan:
    """Print what a run will cost, and return it.

    Args:
        found: what that is.
        config: the run.
        model: its name.
        device: what it is to fit.
        remedy: finds out what would fit in its place, where it does not.

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
    raise DoesNotFitError(f"{model} does not fit in {size(found.available)}: {need}{remedy()}")


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
    if config.tiling.n != "none" and config.head.tokens < SHORT_TILE <= length * each:
        steps = -(-SHORT_TILE // each)
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
