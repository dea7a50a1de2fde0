"""Compiles a run's real step for hardware that is not here, and prints what it would take there. Nothing is run.

python experiments/run.py compile_for=v5e-8 model=gemma2_2b batch_size=16 seq_len=8192 mesh=fsdp tiling.n=16
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

import zoo.accounting
from experiments import configs
from experiments.commandline import schema
from experiments.commandline.overrides import with_overrides
from experiments.data.corpus import user_cache
from experiments.planning import hlo, table, targets
from experiments.planning.targets import Target, TargetError
from experiments.runtime import hardware, meshes
from experiments.runtime.hardware import HardwareError
from experiments.step import program, tiles
from experiments.step.program import OutOfMemoryError
from experiments.training.session import RunError, check, with_weights
from transforms import TileError

MOST_TRIED = 6  # programs that are compiled in search of one that fits


@dataclass(frozen=True)
class Cost:
    """What a compiled step takes of each device, in bytes, and what it does.

    Attributes:
        arguments: the state and the batch.
        temporary: beside them, at the worst moment.
        peak: all together.
        collectives: what devices exchange, None where the program's text does not tell how often.
        flops: of its matrix products, likewise.
    """

    arguments: int
    temporary: int
    peak: int
    collectives: list[hlo.Collective] | None
    flops: int | None


def start(config: configs.Run, choices: dict[str, str], argv: Sequence[str]) -> int:
    """Compile, print, and return the exit status: 0 it fits, 1 it does not, 2 it cannot be compiled for."""
    jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    try:
        target = targets.find(configs.chosen(config.compile_for))
        config = with_weights(config, argv)
        resolved, chosen = hardware.resolve(config, target.device)
        check(resolved)
    except (RunError, HardwareError, TargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen:
        print(table.choices(chosen), flush=True)
    began = time.perf_counter()
    try:
        cost = measure(resolved, target)
    except OutOfMemoryError as error:
        print(f"\nerror: {choices['model']} does not fit {target.device.name}:\n{error}", file=sys.stderr)
        print(_remedy(argv, resolved, target), file=sys.stderr)
        return 1
    except (TileError, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    print(render(choices["model"], resolved, cost, target))
    print(f"  compiled in {time.perf_counter() - began:.1f} s")
    return 0


def measure(config: configs.Resolved, target: Target) -> Cost:
    """Return what the step of a run takes on a target.

    Raises:
        OutOfMemoryError: more memory than a device has.
    """
    with meshes.spread(config, target.devices[: config.mesh.devices]):
        compiled = program.compile_train(config, program.abstract_state(config)).compiled
    stats, text = compiled.memory_analysis(), compiled.as_text()
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = max(stats.peak_memory_in_bytes, stats.argument_size_in_bytes)
    if target.kind.platform == "gpu":  # XLA lets GPUs run out of memory when they run
        peak = stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes
    if peak > target.device.memory:
        raise OutOfMemoryError(
            f"  its step takes {table.size(peak)}, and a device has {table.size(target.device.memory)}"
        )
    try:
        exchanged, flops = hlo.collectives(text, config.mesh.devices), hlo.dot_flops(text)
    except ValueError:
        exchanged = flops = None
    arguments = stats.argument_size_in_bytes
    return Cost(arguments, peak - arguments, peak, exchanged, flops)


def _remedy(argv: Sequence[str], config: configs.Resolved, target: Target) -> str:
    print("  looking for what would fit ...", file=sys.stderr, flush=True)
    for changes in _changes(config, target):
        try:
            changed, _ = hardware.resolve(schema.compose(with_overrides(argv, changes))[0], target.device)
            check(changed)
            return f"This fits ({table.size(measure(changed, target).peak)} of each device): {' '.join(changes)}"
        except (schema.ConfigError, RunError, HardwareError, OutOfMemoryError, TileError, ValueError):
            continue
    return "None of the smaller settings that were tried fits either."


def _changes(config: configs.Resolved, target: Target) -> Iterator[list[str]]:
    """Yield the sets of overrides to try, those that change least first."""
    tokens = config.tokens_per_step // config.mesh.devices
    numbers = [n for n in (8, 32) if tiles.head_tiles(config) < n <= max(8, tokens // hardware.LEAST_TILE)]
    cut = [f"tiling.n={n}" for n in numbers]
    full = ["remat=full"] if config.remat.policy != "full" else []
    spread = ["mesh=fsdp"] if config.mesh.fsdp == "none" or config.mesh.devices < len(target.devices) else []
    half = [f"batch_size={config.batch_size // 2}"] if config.batch_size % (2 * config.mesh.devices) == 0 else []
    strongest = cut[-1:]
    sets = [
        cut[:1],
        strongest,
        full,
        spread,
        strongest + full,
        strongest + full + spread,
        strongest + full + spread + half,
    ]
    yield from [words for i, words in enumerate(sets) if words and words not in sets[:i]][:MOST_TRIED]


def render(name: str, config: configs.Resolved, cost: Cost, target: Target) -> str:
    """Return the whole table as text."""
    size, device = table.size, target.device
    state = [f"{config.hardware.param_dtype}, computed in {config.hardware.compute_dtype}"]
    lines = [
        f"── {name} for {device.name} ".ljust(table.WIDTH, "─"),
        f"  {'mesh':<18} {f'{config.mesh.devices} devices':>14}   {meshes.describe(config.mesh)}",
        f"  {'parameters':<18} {zoo.accounting.count_params(config.model.config):>14,}   {state[0]}",
        f"  {'tokens per step':<18} {config.tokens_per_step:>14,}   {config.batch_size} x {config.seq_len:,}, "
        f"{config.tokens_per_step // config.mesh.devices:,} of each device",
        "",
        "  each device",
        f"    {'state and batch':<16} {size(cost.arguments):>14}",
        f"    {'temporary':<16} {size(cost.temporary):>14}   tiling.n={config.tiling.n}, remat {config.remat.policy}",
        f"    {'peak':<16} {size(cost.peak):>14}   of {size(device.memory)}",
    ]
    return "\n".join(
        [*lines, *_work(config, cost), *(f"  note: {note}." for note in meshes.notes(config)), "─" * table.WIDTH]
    )


def _work(config: configs.Resolved, cost: Cost) -> list[str]:
    """Return the lines about FLOPs and what devices exchange."""
    useful = zoo.accounting.train_flops(config.model.config, config.batch_size, config.seq_len) / config.mesh.devices
    lines = []
    if cost.flops is not None:
        note = f"{cost.flops / useful:.2f} x those of the mathematics"
        lines.append(f"    {'matrix products':<16} {table.quantity(cost.flops, 'FLOP'):>14}   {note}")
    if cost.collectives is None:
        return [*lines, "    what devices exchange cannot be told: a loop has no known number of turns"]
    lines += ["", f"  {'each device sends':<18} {'bytes':>14}   {'times':>7}   {'in loops':>12}"]
    for kind in sorted({one.kind for one in cost.collectives}):
        found = [one for one in cost.collectives if one.kind == kind]
        total = sum(one.bytes * one.times for one in found)
        looped = sum(one.bytes * one.times for one in found if one.looped)
        times = sum(one.times for one in found)
        lines.append(f"    {kind:<16} {table.size(total):>14}   {times:>7,}   {table.size(looped):>12}")
    return lines if cost.collectives else [*lines, f"    {'nothing':<16}"]
