"""What would fit in place of a run that does not: the smallest change, found by compiling, with nothing allocated."""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import zoo.accounting
from experiments import configs
from experiments.commandline import listing
from experiments.commandline.console import GIB, size
from experiments.planning import cost
from experiments.planning.resolve import LEAST_TILE, resolve
from experiments.runtime import meshes
from experiments.runtime.hardware import Device, HardwareError
from experiments.runtime.memory import OutOfMemoryError
from experiments.step.build import Programs, problem
from transforms import TileError

MOST_COMPILED = 16  # candidates that are compiled in search of one that fits
MOST_WEAKER = 4  # of them, in search of weaker levels once a set is found
SURE, BEYOND = 0.25, 1.5  # of the room: what one that takes more than the first foretells, if more than the second
Ask = Callable[[], None]
Asked = Callable[[Sequence[str]], configs.Run | None]  # the run with some overrides changed; None: there is no such run


def remedy(config: configs.Resolved, asked: Asked, device: Device, ask: Ask) -> str:
    """Return what is said of a run that does not fit: what would, as far as that is found."""
    ask()
    free = cost.available(config, device)
    if (kept := cost.headroom(config)) >= free:
        return f"hardware.headroom_gib={kept / GIB:g} alone keeps all of it free: lower it."
    print("  looking for what would fit ...", flush=True)
    if (found := suggest(config, asked, device, ask)) is not None:
        changes, total = found
        return f"This fits ({size(total)}): {' '.join(changes)}"
    smaller = largest_model(lambda params: 2 * 2 * params * 1.3 < free - kept)
    return "Nothing that leaves the model as it is was found to fit." + (f" Try model={smaller}." if smaller else "")


def suggest(
    config: configs.Resolved, asked: Asked, device: Device, ask: Ask = lambda: None
) -> tuple[list[str], int] | None:
    """Return the smallest set of overrides that makes a run fit, and its bytes; None if no tried set does.

    Sets are tried by size, those that change least first, at their strongest levels, and then each change at the
    weakest level that still does. What cannot fit by its shapes alone is skipped; the rest is compiled, never
    allocated. Nothing is tried where no change can help.

    Args:
        config: the run that does not fit.
        asked: returns it as it would be asked for with some overrides changed.
        device: what it is to fit.
        ask: is called before each set, and may raise.
    """
    if cost.room(config, device) <= 0:
        return None
    trials = _Trials(asked, config.model, device)
    for names in _subsets(config, device):
        ask()
        if trials.compiled >= MOST_COMPILED:
            return None
        levels = [len(one) - 1 for one in names]
        if not trials.fits(_at(names, levels)):
            continue
        most = min(MOST_COMPILED, trials.compiled + MOST_WEAKER)
        for change in range(len(names)):
            levels = _weaker(trials, names, levels, change, most)
        found = _at(names, levels)
        total = trials.bytes(found)
        assert total is not None
        return list(found), total
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
    halves = lambda value, least, by: [one for i in range(1, 20) if (one := value >> i) >= least and one % by == 0]
    if sizes := halves(batch, 1, math.lcm(spread, 1 + config.paired)):
        changes.append([f"batch_size={one}" for one in sizes])
    if not isinstance(config.optimizer, configs.AdafactorLayerwise):
        changes.append(["optimizer=adafactor_layerwise"])
    if config.hardware.param_dtype is not configs.DType.bfloat16:
        changes.append(["hardware.param_dtype=bfloat16"])
    if sizes := halves(seq, 128, config.mesh.context):
        changes.append([f"seq_len={one}" for one in sizes])
    for count in range(1, len(changes) + 1):
        yield from itertools.combinations(changes, count)


@dataclass(frozen=True)
class _Candidate:
    """A run with some overrides changed, what it takes at least, and what there is for it."""

    config: configs.Resolved
    least: cost.Least
    room: int


class _Trials:
    """The changes that were tried, each once.

    Args:
        asked: returns the run as it would be asked for with some overrides changed.
        model: the run's.
        device: what it is to fit.

    Attributes:
        compiled: how many were compiled.
    """

    def __init__(self, asked: Asked, model: configs.Model, device: Device):
        self._asked, self._model, self._device, self.compiled = asked, model, device, 0
        self._known: dict[tuple[str, ...], _Candidate | None] = {}
        self._bytes: dict[tuple[str, ...], int | None] = {}

    def candidate(self, changes: tuple[str, ...]) -> _Candidate | None:
        """Return the run with some overrides changed; None where there is none or it cannot fit by its shapes alone."""
        if changes not in self._known:
            self._known[changes] = self._candidate(changes)
        return self._known[changes]

    def _candidate(self, changes: tuple[str, ...]) -> _Candidate | None:
        run = self._asked(changes)
        if run is None:
            return None
        try:
            config = resolve(replace(run, model=self._model), self._device)
        except HardwareError:
            return None
        if problem(config):
            return None
        with meshes.spread(config.mesh, self._device.described):
            least = cost.least(Programs(config), self._device)
        if least.total > cost.available(config, self._device):
            return None
        return _Candidate(config, least, cost.room(config, self._device))

    def bytes(self, changes: tuple[str, ...]) -> int | None:
        """Return what the compiled step takes; None where there is none."""
        if changes not in self._bytes:
            one = self.candidate(changes)
            self.compiled += one is not None
            self._bytes[changes] = None if one is None else _bytes(one.config, self._device)
        return self._bytes[changes]

    def fits(self, changes: tuple[str, ...]) -> bool:
        """Return whether the compiled step fits."""
        one, found = self.candidate(changes), self.bytes(changes)
        return one is not None and found is not None and found <= one.room

    def likely(self, changes: tuple[str, ...], known: tuple[str, ...]) -> float:
        """Return which share of the room a step takes, if what a compiled one takes grows with the least it could."""
        one, other, found = self.candidate(changes), self.candidate(known), self.bytes(known)
        if one is None or other is None or found is None:
            return math.inf
        grows = (found - other.least.state) * one.least.tokens / other.least.tokens
        return (one.least.state + grows) / one.room


def _at(names: Sequence[list[str]], levels: Sequence[int]) -> tuple[str, ...]:
    return tuple(one[level] for one, level in zip(names, levels, strict=True))


def _weaker(trials: _Trials, names: Sequence[list[str]], levels: Sequence[int], change: int, most: int) -> list[int]:
    """Return the levels of changes that fit, one of them at the weakest level that still does.

    It is looked for between one that does not and one that does; the next to try is where the last one compiled says
    that the room ends. What that says is far beyond the room is not compiled.
    """
    changed = lambda level: _at(names, [*levels[:change], level, *levels[change + 1 :]])
    unfit, fits = -1, levels[change]
    known = changed(fits)
    while fits - unfit > 1 and trials.compiled < most:
        within = lambda level, known=known: trials.likely(changed(level), known) <= 1
        level = bisect.bisect_left(range(fits), True, lo=unfit + 1, key=within)
        level = min(level, fits - 1)
        if trials.likely(known, known) > SURE and trials.likely(changed(level), known) > BEYOND:
            break
        if trials.fits(changed(level)):
            fits = level
        else:
            unfit = level
        if trials.bytes(changed(level)) is not None:
            known = changed(level)
    return [*levels[:change], fits, *levels[change + 1 :]]


def _bytes(config: configs.Resolved, device: Device) -> int | None:
    """Return the bytes of a run's compiled step; None where it cannot be compiled."""
    try:
        with meshes.spread(config.mesh, device.described):
            return cost.total_bytes(Programs(config).train, device)
    except (OutOfMemoryError, TileError, ValueError):
        return None


def largest_model(fits: Callable[[int], bool]) -> str | None:
    """Return the largest model of the zoo whose number of parameters `fits`."""
    sizes = {one.name: zoo.accounting.count_params(one.config) for one in listing.models()}
    within = [name for name in sizes if fits(sizes[name])]
    return max(within, key=sizes.__getitem__, default=None)
