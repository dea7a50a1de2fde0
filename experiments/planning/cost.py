"""What a run takes of each device, as its compiled step says, here or on described ones.

Nothing is allocated. A described device is one like any other: its programs only cannot be run.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax

import zoo.accounting
from experiments import configs
from experiments.commandline.console import GIB, size
from experiments.planning import hlo
from experiments.runtime.hardware import Device
from experiments.step import tiling
from experiments.step.build import OutOfMemoryError, Programs
from transforms.offload import in_host

AT_SCALE = 8192  # tokens: where tiling the head of a large vocabulary pays
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
    head_untiled: int | None = None  # bytes of the untiled head, estimated; None where the run's own head is not cut
    untiled: Memory | None = None  # of the untiled step, where a tiled run compares
    refused: str | None = None  # why that could not be compiled
    at_scale: tuple[int, int] | None = None  # bytes of the head at AT_SCALE, tiled and untiled, where few save none

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


def plan(programs: Programs, device: Device) -> Plan:
    """Return what a run costs. Compiles its step, and the untiled one if it compares; allocates nothing.

    Raises:
        OutOfMemoryError: the compiler finds that the step does not fit the device.
    """
    config = programs.config
    cuts = tiling.describe(config)
    tiled, whole = tiling.head_bytes(programs.objective, config.tiling, config.head, *programs.head_args)
    made = Plan(
        params=config.params,
        flops=flops(programs),
        memory=measure(programs, device, compiled_head_bytes(programs) if config.compare else tiled),
        available=available(config, device),
        headroom=headroom(config),
        host=host_bytes(programs.train),
        cuts=cuts,
        head_untiled=whole if config.tiling.n != "none" and whole else None,
    )
    if config.tiling.cuts and config.compare:
        attention = "plain" if config.attention == "tiled" else config.attention
        untiled = Programs(replace(config, tiling=configs.Tiling(n="none"), attention=attention))
        try:
            made = replace(made, untiled=measure(untiled, device, compiled_head_bytes(untiled)))
        except OutOfMemoryError as error:
            made = replace(made, refused=str(error).strip())
    few = config.tokens_per_step < AT_SCALE and made.saved is not None
    if few and made.saved <= 0.02 * made.memory.total:
        longer = replace(config, batch_size=1, seq_len=AT_SCALE)
        args = Programs(longer).head_args
        tiled, whole = tiling.head_bytes(programs.objective, longer.tiling, longer.head, *args)
        made = replace(made, at_scale=(tiled, whole) if tiled < whole else None)
    return made


def flops(programs: Programs) -> int:
    """Return the FLOPs of a step, as utilisation counts them: nothing for what is frozen but passing gradients on."""
    config, other = programs.config, programs.config.reference
    size = config.batch_size, config.seq_len
    frozen = 0 if other is None else zoo.accounting.forward_flops(other.config, *size)
    if not config.adapted:
        return frozen + zoo.accounting.train_flops(config.model.config, *size)
    adapters = sum(leaf.size for leaf in jax.tree.leaves(programs.kept_state.model))
    passed = 2 * zoo.accounting.forward_flops(config.model.config, *size)
    return frozen + passed + 6 * config.tokens_per_step * adapters


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
    temp = programs.train.compiled.memory_analysis().temp_size_in_bytes
    trained = eqx.filter_eval_shape(lambda model: eqx.filter(model, programs.trainable(model)), state.model)
    gradients = min(device_bytes(trained, device), temp)
    head = min(head, temp - gradients)
    weights = device_bytes(state.model, device) + device_bytes(programs.frozen, device)
    rest = temp - gradients - head
    moments = device_bytes(state.opt_state, device)
    return Memory(weights, moments, gradients, head, rest, total_bytes(programs.train, device))


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


def compiled_head_bytes(programs: Programs) -> int:
    """Return the temporary memory of the objective's value and gradients, compiled alone."""
    loss = tiling.head(programs.objective, programs.config.tiling, programs.config.head)
    models, args = programs.head_args

    @eqx.filter_jit
    def head(models, hiddens, *args):
        # Only what the head reads is differentiated: gradients of the layers would be arrays of zeros.
        read = eqx.tree_at(lambda m: m.layers, programs.trainable(models[0]), False)
        used, rest = eqx.partition(models[0], read)
        value = lambda x: loss((eqx.combine(x[0], rest), *models[1:]), (x[1], *hiddens[1:]), *args)
        return eqx.filter_value_and_grad(value, has_aux=True)((used, hiddens[0]))

    return programs.compiled(head, models, *args).compiled.memory_analysis().temp_size_in_bytes


def device_bytes(tree: Any, device: Device) -> int:
    """Return the bytes that a device holds of every array, abstract ones included, in a tree.

    What is in host memory is no device's but a processor's.
    """
    held = lambda leaf: hasattr(leaf, "dtype") and (device.platform == "cpu" or not in_host(leaf))
    shape = lambda leaf: leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if held(leaf))
