"""What a run will cost, from its compiled step, before anything is allocated; and what to change if it does not fit."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

import zoo.accounting
from experiments import configs
from experiments.commandline import listing, schema
from experiments.commandline.overrides import with_overrides
from experiments.runtime import hardware
from experiments.runtime.hardware import GIB, Device
from experiments.step import program, reference, tiles

AT_SCALE = 8192  # tokens: where tiling the head of a large vocabulary pays
SHORT_TILE = 64  # tokens: below, a tile's matrix products run at half their speed or less
MOST_COMPILED = 16  # candidates that are compiled in search of one that fits


@dataclass(frozen=True)
class Memory:
    """Bytes of a compiled training step on each device; `total` is the compiler's, the parts share it out.

    The head is what `tile` estimates, or of a run that compares what the compiler says of it alone.
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
    """A run's cost, and the executable that will carry it out."""

    params: int
    flops: int
    memory: Memory
    available: int
    headroom: int
    compiled: Any
    state: Any
    head_untiled: int | None = None  # bytes of the untiled head, estimated; None where the run's own head is not cut
    untiled: Memory | None = None  # of the untiled step, where a tiled run compares
    refused: str | None = None  # why that could not be compiled
    at_scale: tuple[int, int] | None = (
        None  # bytes of the head at AT_SCALE tokens, tiled and untiled, where few save none
    )

    @property
    def fits(self) -> bool:
        """Whether the step and the headroom are within what is available."""
        return self.memory.total + self.headroom <= self.available

    @property
    def saved(self) -> int | None:
        """Bytes that tiling saves, as far as is known; None of an untiled run."""
        if self.untiled is not None:
            return self.untiled.total - self.memory.total
        return None if self.head_untiled is None else self.head_untiled - self.memory.head


class DoesNotFitError(RuntimeError):
    """The compiled step needs more memory than there is."""


def plan(config: configs.Resolved, device: Device) -> Plan:
    """Return what a resolved run costs. Compiles its step, and the untiled one if it compares; allocates nothing.

    Raises:
        OutOfMemoryError: the compiler finds that the step does not fit the device.
    """
    state = program.abstract_state(config)
    compiled = program.compile_train(config, state)
    tiled, whole = head_bytes(config, state)
    made = Plan(
        params=zoo.accounting.count_params(config.model.config),
        flops=train_flops(config, state) + reference.flops(config),
        memory=measure(config, state, compiled, compiled_head_bytes(config, state) if config.compare else tiled),
        available=available(config, device),
        headroom=headroom(config),
        compiled=compiled,
        state=state,
        head_untiled=whole if config.tiling.n != "none" and whole else None,
    )
    if config.tiling.cuts and config.compare:
        made = _compared(made, config)
    few = config.tokens_per_step < AT_SCALE and made.saved is not None
    if few and made.saved <= 0.02 * made.memory.total:
        tiled, whole = head_bytes(dataclasses.replace(config, batch_size=1, seq_len=AT_SCALE), state)
        made = dataclasses.replace(made, at_scale=(tiled, whole) if tiled < whole else None)
    return made


def _compared(made: Plan, config: configs.Resolved) -> Plan:
    """Return a plan with the memory of the untiled step, or with the compiler's reason why there is none."""
    plain = dataclasses.replace(config, tiling=configs.Tiling(n="none"))
    try:
        compiled = program.compile_train(plain, made.state)
        untiled = measure(plain, made.state, compiled, compiled_head_bytes(plain, made.state))
    except program.OutOfMemoryError as error:
        return dataclasses.replace(made, refused=str(error).strip())
    return dataclasses.replace(made, untiled=untiled)


def train_flops(config: configs.Resolved, state: Any) -> int:
    """Return the FLOPs of a step, as utilisation counts them: nothing for what is frozen but passing gradients on."""
    size = config.model.config, config.batch_size, config.seq_len
    if not isinstance(config.adapter, configs.Lora):
        return zoo.accounting.train_flops(*size)
    adapters = sum(leaf.size for leaf in jax.tree.leaves(program.kept(config, state).model))
    return 2 * zoo.accounting.forward_flops(*size) + 6 * config.tokens_per_step * adapters


def available(config: configs.Resolved, device: Device) -> int:
    """Return the bytes that the run may plan with."""
    limit = config.hardware.memory_gib
    shared = config.mesh.devices if device.platform == "cpu" else 1  # the devices of a CPU have one memory
    return device.memory // shared if limit is None else int(limit * GIB)


def headroom(config: configs.Resolved) -> int:
    """Return the bytes that must stay free beside the step."""
    return int(configs.chosen(config.hardware.headroom_gib) * GIB)


def measure(config: configs.Resolved, state: Any, compiled: Any, head: int) -> Memory:
    """Return the memory of a compiled step, told its head's. Weights, optimizer and gradients are exact."""
    weights = device_bytes(state.model) + device_bytes(program.abstract_frozen(config))
    optimizer = device_bytes(state.opt_state)
    temp = compiled.compiled.memory_analysis().temp_size_in_bytes
    trained = eqx.filter_eval_shape(lambda model: eqx.filter(model, program.trainable(config)(model)), state.model)
    gradients = min(device_bytes(trained), temp)
    head = min(head, temp - gradients)
    return Memory(weights, optimizer, gradients, head, temp - gradients - head, total_bytes(compiled))


def total_bytes(compiled: Any) -> int:
    """Return what a compiled step holds at its peak: arguments, what it returns beside them, and temporaries."""
    stats = compiled.compiled.memory_analysis()
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes


def head_bytes(config: configs.Resolved, state: Any) -> tuple[int, int]:
    """Return the temporary memory that the head's loss and gradients take, and take untiled: estimates, not compiled.

    Zero where the objective cannot be cut, and so cannot be told apart from the rest.
    """
    found = program.plan_head(config, state)
    return (0, 0) if found is None or found.gradient is None else (found.gradient.temp, found.gradient.untiled_temp)


def compiled_head_bytes(config: configs.Resolved, state: Any) -> int:
    """Return the temporary memory of the head's loss and gradients, compiled alone."""
    return program.compile_head(config, state).compiled.memory_analysis().temp_size_in_bytes


def bytes_of(tree: Any) -> int:
    """Return the bytes of every array, abstract ones included, in a tree: the whole of those that devices share."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def device_bytes(tree: Any) -> int:
    """Return the bytes that a device holds of every array, abstract ones included, in a tree."""
    shape = lambda leaf: leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def suggest(
    overrides: Sequence[str], config: configs.Resolved, device: Device, ask: Callable[[], None] = lambda: None
) -> tuple[list[str], int] | None:
    """Return the smallest set of overrides that makes a run fit, and its bytes; None if no tried set does.

    Sets are tried by size, those that change least first. What cannot fit by its weights, gradients and optimizer alone
    is skipped; the rest is compiled, never allocated. Nothing is tried where no change can help. `ask` is called before
    each set, and may raise.
    """
    if headroom(config) >= available(config, device):
        return None
    compiled = 0
    for names in _subsets(config):
        strongest = [levels[-1] for levels in names]
        ask()
        if compiled >= MOST_COMPILED:
            return None
        if not _could_fit(overrides, strongest, device):
            continue
        compiled += 1
        found = _try(overrides, strongest, device)
        if found is None:
            continue
        for levels in itertools.product(*names):  # the weakest levels that still do
            if list(levels) == strongest or compiled >= MOST_COMPILED:
                break
            compiled += 1
            if weaker := _try(overrides, levels, device):
                return list(levels), weaker
        return strongest, found
    return None


def _subsets(config: configs.Resolved) -> Iterator[tuple[list[str], ...]]:
    """Yield sets of changes, each a list of levels from weak to strong; small sets first."""
    changes = []
    batch, seq = config.batch_size, config.seq_len
    most = tiles.micro_batch(config) * seq
    numbers = [n for n in (8, 32, 128) if tiles.head_tiles(config) < n <= most // hardware.LEAST_TILE]
    if numbers:
        changes.append([f"tiling.n={n}" for n in numbers])
    if config.remat.policy != "full":
        changes.append(["remat=full"])
    halves = lambda value, least: [value >> i for i in range(1, 20) if value >> i >= least]
    if batch > 1:
        changes.append([f"batch_size={size}" for size in halves(batch, 1)])
    if not isinstance(config.optimizer, configs.AdafactorLayerwise):
        changes.append(["optimizer=adafactor_layerwise"])
    if config.hardware.param_dtype is not configs.DType.bfloat16:
        changes.append(["hardware.param_dtype=bfloat16"])
    if seq > 128:
        changes.append([f"seq_len={size}" for size in halves(seq, 128)])
    for size in range(1, len(changes) + 1):
        yield from itertools.combinations(changes, size)


def _changed(overrides: Sequence[str], changes: Sequence[str], device: Device) -> configs.Resolved | None:
    try:
        config = hardware.resolve(schema.compose(with_overrides(overrides, changes))[0], device)[0]
    except (schema.ConfigError, hardware.HardwareError):
        return None
    return None if tiles.problem(config) else config


def _could_fit(overrides: Sequence[str], changes: Sequence[str], device: Device) -> bool:
    config = _changed(overrides, changes, device)
    if config is None:
        return False
    state = program.abstract_state(config)
    return 2 * device_bytes(state.model) + device_bytes(state.opt_state) <= available(config, device)


def _try(overrides: Sequence[str], changes: Sequence[str], device: Device) -> int | None:
    """Return the bytes of the changed run's compiled step if it fits."""
    config = _changed(overrides, changes, device)
    if config is None:
        return None
    try:
        total = total_bytes(program.compile_train(config, program.abstract_state(config)))
    except program.OutOfMemoryError:
        return None
    return total if total + headroom(config) <= available(config, device) else None


def largest_model(fits: Callable[[int], bool]) -> str | None:
    """Return the largest model of the zoo whose number of parameters `fits`."""
    sizes = {one.name: zoo.accounting.count_params(one.config) for one in listing.models()}
    within = [name for name in sizes if fits(sizes[name])]
    return max(within, key=sizes.__getitem__, default=None)
