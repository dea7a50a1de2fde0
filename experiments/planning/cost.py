"""What a run takes of each device, as its compiled step says, here or on described ones.

Nothing is allocated. A described device is one like any other: its programs only cannot be run.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax

from experiments import configs
from experiments.commandline.console import GIB
from experiments.planning import hlo
from experiments.runtime.hardware import Device
from experiments.runtime.memory import OutOfMemoryError
from experiments.step.build import AT_SCALE, Programs
from transforms.offload import in_host

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


@dataclass(frozen=True)
class Traffic:
    """What a compiled step does on each device.

    Attributes:
        arguments: bytes of the state and the batch.
        peak: bytes of all together, at the worst moment.
        host: bytes of the host's memory, which are no device's.
        collectives: what devices exchange, None where the program's text does not tell how often.
        flops: of its matrix products, likewise.
    """

    arguments: int
    peak: int
    host: int
    collectives: list[hlo.Collective] | None
    flops: int | None


def traffic(programs: Programs, device: Device) -> Traffic:
    """Return what the step of a run does and takes on a device.

    Raises:
        OutOfMemoryError: the compiler finds that the step does not fit the device.
    """
    compiled = programs.train.compiled
    arguments, peak = compiled.memory_analysis().argument_size_in_bytes, total_bytes(programs.train, device)
    host = host_bytes(programs.train)
    try:
        text = compiled.as_text()
        return Traffic(arguments, peak, host, hlo.collectives(text, programs.config.mesh.devices), hlo.dot_flops(text))
    except ValueError:
        return Traffic(arguments, peak, host, None, None)


def device_bytes(tree: Any, device: Device) -> int:
    """Return the bytes that a device holds of every array, abstract ones included, in a tree.

    What is in host memory is no device's but a processor's.
    """
    held = lambda leaf: hasattr(leaf, "dtype") and (device.platform == "cpu" or not in_host(leaf))
    shape = lambda leaf: leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if held(leaf))
