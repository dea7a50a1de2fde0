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
from experiments import configs, frozen, hardware, listing, program, schema, tiles
from experiments.hardware import GIB, Device
from experiments.overrides import with_overrides

AT_SCALE = 8192  # tokens: where tiling the head of a large vocabulary pays
SHORT_TILE = 64  # tokens: below, a tile's matrix products run at half their speed or less
MOST_COMPILED = 16  # candidates that are compiled in search of one that fits


@dataclass(frozen=True)
class Memory:
    """Bytes of a compiled training step on each device; `total` is measured, the parts share it out."""

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
    untiled: Memory | None  # None where the run itself is untiled
    available: int
    headroom: int
    at_scale: tuple[int, int] | None  # bytes of the head at AT_SCALE tokens, tiled and untiled, where tiling saves none
    compiled: Any
    state: Any

    @property
    def fits(self) -> bool:
        """Whether the step and the headroom are within what is available."""
        return self.memory.total + self.headroom <= self.available


class DoesNotFitError(RuntimeError):
    """The compiled step needs more memory than there is."""


def plan(config: configs.Resolved, device: Device) -> Plan:
    """Return what a resolved run costs. Compiles its step, and the untiled one for comparison; allocates nothing."""
    state = program.abstract_state(config)
    compiled = program.compile_train(config, state)
    memory, untiled, at_scale = measure(config, state, compiled), None, None
    if config.tiling.cuts:
        plain = dataclasses.replace(config, tiling=configs.Tiling(n="none"))
        untiled = measure(plain, state, program.compile_train(plain, state))
        if untiled.total <= memory.total * 1.02 and config.tokens_per_step < AT_SCALE:
            large = [dataclasses.replace(c, batch_size=1, seq_len=AT_SCALE) for c in (config, plain)]
            tiled, whole = (head_bytes(c, state) for c in large)
            at_scale = (tiled, whole) if tiled < whole else None
    return Plan(
        params=zoo.accounting.count_params(config.model.config),
        flops=train_flops(config, state) + frozen.flops(config),
        memory=memory,
        untiled=untiled,
        at_scale=at_scale,
        available=available(config, device),
        headroom=headroom(config),
        compiled=compiled,
        state=state,
    )


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


def measure(config: configs.Resolved, state: Any, compiled: Any) -> Memory:
    """Return the memory of a compiled step. Weights, optimizer and gradients are exact; the head is compiled alone."""
    weights = device_bytes(state.model) + device_bytes(program.abstract_frozen(config))
    optimizer = device_bytes(state.opt_state)
    temp = compiled.compiled.memory_analysis().temp_size_in_bytes
    trained = eqx.filter_eval_shape(lambda model: eqx.filter(model, program.trainable(config)(model)), state.model)
    gradients = min(device_bytes(trained), temp)
    head = min(head_bytes(config, state), temp - gradients)
    return Memory(weights, optimizer, gradients, head, temp - gradients - head, total_bytes(compiled))


def total_bytes(compiled: Any) -> int:
    """Return what a compiled step holds at its peak: arguments, what it returns beside them, and temporaries."""
    stats = compiled.compiled.memory_analysis()
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes


def head_bytes(config: configs.Resolved, state: Any) -> int:
    """Return the temporary memory of the head's loss and gradients, compiled alone."""
    return program.compile_head(config, state).compiled.memory_analysis().temp_size_in_bytes


def bytes_of(tree: Any) -> int:
    """Return the bytes of every array, abstract ones included, in a tree: the whole of those that devices share."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def device_bytes(tree: Any) -> int:
    """Return the bytes that a device holds of every array, abstract ones included, in a tree."""
    shape = lambda leaf: leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def suggest(overrides: Sequence[str], config: configs.Resolved, device: Device) -> tuple[list[str], int] | None:
    """Return the smallest set of overrides that makes a run fit, and its bytes; None if no tried set does.

    Sets are tried by size, those that change least first. What cannot fit by its weights, gradients and optimizer alone
    is skipped; the rest is compiled, never allocated.
    """
    compiled = 0
    for names in _subsets(config):
        strongest = [levels[-1] for levels in names]
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
    total = total_bytes(program.compile_train(config, program.abstract_state(config)))
    return total if total + headroom(config) <= available(config, device) else None


def largest_model(fits: Callable[[int], bool]) -> str | None:
    """Return the largest model of the zoo whose number of parameters `fits`."""
    sizes = {one.name: zoo.accounting.count_params(one.config) for one in listing.models()}
    within = [name for name in sizes if fits(sizes[name])]
    return max(within, key=sizes.__getitem__, default=None)
