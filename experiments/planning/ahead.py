"""Compiles a run's real step for hardware that is not here, and prints what it would take there. Nothing is run.

python experiments/run.py compile_for=v5e-8 model=gemma2_2b batch_size=16 seq_len=8192 mesh=fsdp tiling.n=16
"""

import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from experiments import configs
from experiments.commandline.console import CommandError, quantity, size
from experiments.commandline.overrides import variations
from experiments.planning import cost, hlo, targets
from experiments.planning.resolve import resolve
from experiments.planning.suggest import suggest
from experiments.planning.targets import TargetError
from experiments.runtime import meshes
from experiments.runtime.hardware import Device, HardwareError
from experiments.runtime.manifest import user_cache
from experiments.runtime.memory import OutOfMemoryError
from experiments.runtime.remote import fetched
from experiments.step.build import Programs, checked
from transforms import TileError


def start(config: configs.Run, choices: dict[str, str], argv: Sequence[str]) -> int:
    """Compile, print, and return the exit status: 0 it fits, 1 it does not, 2 it cannot be compiled for."""
    jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    try:
        device = targets.find(configs.chosen(config.compile_for)).device
        resolved = resolve(fetched(config)[0], device, argv)
        with meshes.spread(resolved.mesh, device.described):
            programs = checked(resolved)
    except (CommandError, HardwareError, TargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if resolved.chosen:
        print(cost.choices(resolved.chosen), flush=True)
    began = time.perf_counter()
    try:
        found = measure(programs, device)
    except OutOfMemoryError as error:
        print(f"\nerror: {choices['model']} does not fit {device.name}:\n{error}", file=sys.stderr)
        print("  looking for what would fit ...", file=sys.stderr, flush=True)
        remedy = suggest(resolved, variations(argv), device)
        fits = remedy and f"This fits ({size(remedy[1])} of each device): {' '.join(remedy[0])}"
        print(fits or "None of the smaller settings that were tried fits either.", file=sys.stderr)
        return 1
    except (TileError, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    print(_table(choices["model"], programs, found, device))
    print(f"  compiled in {time.perf_counter() - began:.1f} s")
    return 0


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
    arguments, peak = compiled.memory_analysis().argument_size_in_bytes, cost.total_bytes(programs.train, device)
    host = cost.host_bytes(programs.train)
    try:
        text = compiled.as_text()
        return Traffic(arguments, peak, host, hlo.collectives(text, programs.config.mesh.devices), hlo.dot_flops(text))
    except ValueError:
        return Traffic(arguments, peak, host, None, None)


def measure(programs: Programs, device: Device) -> Traffic:
    """Return what the step of a run takes on described devices, and does there.

    Raises:
        OutOfMemoryError: more memory than a device has.
    """
    with meshes.spread(programs.config.mesh, device.described):
        found = traffic(programs, device)
    if found.peak > device.memory:  # XLA lets GPUs run out of memory when they run
        raise OutOfMemoryError(f"  its step takes {size(found.peak)}, and a device has {size(device.memory)}")
    return found


def _table(name: str, programs: Programs, traffic: Traffic, device: Device) -> str:
    """Return the whole table of a run on described devices as text."""
    config = programs.config
    cut = f"tiling.n={config.tiling.n}, remat {config.remat.policy}, attention {config.attention}"
    notes = [f"note: {note}." for note in programs.whole]
    if (crowded := cost.crowded(traffic.host, config, device)) is not None:
        notes.append(f"note: {crowded}")
    state = [f"{config.hardware.param_dtype}, computed in {config.hardware.compute_dtype}"]
    lines = [
        f"── {name} for {device.name} ".ljust(cost.WIDTH, "─"),
        f"  {'mesh':<18} {f'{config.mesh.devices} devices':>14}   {config.mesh.words}",
        f"  {'parameters':<18} {config.params:>14,}   {state[0]}",
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
            *_work(programs, traffic),
            *(line for note in notes for line in textwrap.wrap(note, cost.WIDTH, **cost.INDENT)),
            "─" * cost.WIDTH,
        ]
    )


def _work(programs: Programs, traffic: Traffic) -> list[str]:
    """Return the lines about FLOPs and what devices exchange."""
    useful = programs.flops / programs.config.mesh.devices
    lines = []
    if traffic.flops is not None:
        note = f"{traffic.flops / useful:.2f} x those of the mathematics"
        lines.append(f"    {'matrix products':<16} {quantity(traffic.flops, 'FLOP'):>14}   {note}")
    if traffic.collectives is None:
        return [*lines, "    what devices exchange cannot be told: a loop has no known number of turns"]
    lines += ["", f"  {'each device sends':<18} {'bytes':>14}   {'times':>7}   {'in loops':>12}"]
    for op in sorted({one.op for one in traffic.collectives}):
        found = [one for one in traffic.collectives if one.op == op]
        total = sum(one.bytes * one.times for one in found)
        looped = sum(one.bytes * one.times for one in found if one.looped)
        times = sum(one.times for one in found)
        lines.append(f"    {op:<16} {size(total):>14}   {times:>7,}   {size(looped):>12}")
    return lines if traffic.collectives else [*lines, f"    {'nothing':<16}"]
