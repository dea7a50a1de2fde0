"""What would fit in place of a run that does not: the smallest change, found by compiling, with nothing allocated."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import zoo.accounting
from experiments import configs
from experiments.commandline import listing
from experiments.planning import cost
from experiments.planning.resolve import LEAST_TILE, resolve
from experiments.runtime import meshes
from experiments.runtime.hardware import Device, HardwareError
from experiments.step.build import OutOfMemoryError, Programs, problem
from transforms import TileError

MOST_COMPILED = 16  # candidates that are compiled in search of one that fits
Ask = Callable[[], None]
Asked = Callable[[Sequence[str]], configs.Run | None]  # the run with some overrides changed; None: there is no such run


def suggest(
    config: configs.Resolved, asked: Asked, device: Device, ask: Ask = lambda: None
) -> tuple[list[str], int] | None:
    """Return the smallest set of overrides that makes a run fit, and its bytes; None if no tried set does.

    Sets are tried by size, those that change least first. What cannot fit by its weights, gradients and optimizer alone
    is skipped; the rest is compiled, never allocated. Nothing is tried where no change can help.

    Args:
        config: the run that does not fit.
        asked: returns it as it would be asked for with some overrides changed.
        device: what it is to fit.
        ask: is called before each set, and may raise.
    """
    if cost.room(config, device) <= 0:
        return None
    compiled = 0
    for names in _subsets(config, device):
        strongest = [levels[-1] for levels in names]
        ask()
        if compiled >= MOST_COMPILED:
            return None
        changed = _resolved(asked, strongest, config.model, device)
        if changed is None or _least(changed, device) > cost.available(changed, device):
            continue
        compiled += 1
        found = _bytes(changed, device)
        if found is None:
            continue
        for levels in itertools.product(*names):  # the weakest levels that still do
            if list(levels) == strongest or compiled >= MOST_COMPILED:
                break
            compiled += 1
            weaker = _resolved(asked, levels, config.model, device)
            if weaker is not None and (total := _bytes(weaker, device)):
                return list(levels), total
        return strongest, found
    return None


def _subsets(config: configs.Resolved, device: Device) -> Iterator[tuple[list[str], ...]]:
    """Yield sets of changes, each a list of levels from weak to strong; small sets first."""
    changes = []
    batch, seq, spread = config.batch_size, config.seq_len, config.mesh.devices
    most = config.head.rows * seq // spread
    if numbers := [n for n in (8, 32, 128) if config.head.tiles < n <= max(8 * (spread > 1), most // LEAST_TILE)]:
        changes.append([f"tiling.n={n}" for n in numbers])
    if config.remat.policy != "full":
        changes.append(["remat=full"])
    if device.platform != "cpu" and device.count > 1 and (config.mesh.fsdp == "none" or spread < device.count):
        changes.append(["mesh=fsdp"])
    halves = lambda value, least: [value >> i for i in range(1, 20) if value >> i >= least]
    if sizes := [size for size in halves(batch, 1) if size % spread == 0]:
        changes.append([f"batch_size={size}" for size in sizes])
    if not isinstance(config.optimizer, configs.AdafactorLayerwise):
        changes.append(["optimizer=adafactor_layerwise"])
    if config.hardware.param_dtype is not configs.DType.bfloat16:
        changes.append(["hardware.param_dtype=bfloat16"])
    if seq > 128:
        changes.append([f"seq_len={size}" for size in halves(seq, 128)])
    for size in range(1, len(changes) + 1):
        yield from itertools.combinations(changes, size)


def _resolved(asked: Asked, changes: Sequence[str], model: configs.Model, device: Device) -> configs.Resolved | None:
    run = asked(changes)
    if run is None:
        return None
    try:
        changed = resolve(replace(run, model=model), device)
    except HardwareError:
        return None
    return None if problem(changed) else changed


def _least(config: configs.Resolved, device: Device) -> int:
    """Return the bytes that a step takes at the very least: weights, gradients and the optimizer's state."""
    with meshes.spread(config.mesh, device.described):
        state = Programs(config).state
        return 2 * cost.device_bytes(state.model, device) + cost.device_bytes(state.opt_state, device)


def _bytes(config: configs.Resolved, device: Device) -> int | None:
    """Return the bytes of a run's compiled step if it fits."""
    try:
        with meshes.spread(config.mesh, device.described):
            total = cost.total_bytes(Programs(config).train, device)
    except (OutOfMemoryError, TileError, ValueError):
        return None
    return total if total <= cost.room(config, device) else None


def largest_model(fits: Callable[[int], bool]) -> str | None:
    """Return the largest model of the zoo whose number of parameters `fits`."""
    sizes = {one.name: zoo.accounting.count_params(one.config) for one in listing.models()}
    within = [name for name in sizes if fits(sizes[name])]
    return max(within, key=sizes.__getitem__, default=None)
