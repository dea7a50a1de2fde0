"""Compiles a run's real step for hardware that is not here, and prints what it would take there. Nothing is run.

python experiments/run.py compile_for=v5e-8 model=gemma2_2b batch_size=16 seq_len=8192 mesh=fsdp tiling.n=16
"""

import sys
import time
from collections.abc import Sequence

import jax

from experiments import configs
from experiments.commandline.console import CommandError
from experiments.commandline.overrides import variations
from experiments.planning import cost, table, targets
from experiments.planning.resolve import checked, resolve
from experiments.planning.suggest import suggest
from experiments.planning.targets import TargetError
from experiments.runtime import meshes
from experiments.runtime.hardware import Device, HardwareError
from experiments.runtime.manifest import user_cache
from experiments.runtime.numbers import size
from experiments.runtime.remote import fetched
from experiments.step.build import OutOfMemoryError, Programs
from experiments.step.weights import with_weights
from transforms import TileError


def start(config: configs.Run, choices: dict[str, str], argv: Sequence[str]) -> int:
    """Compile, print, and return the exit status: 0 it fits, 1 it does not, 2 it cannot be compiled for."""
    jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    try:
        device = targets.find(configs.chosen(config.compile_for)).device
        resolved = resolve(with_weights(fetched(config)[0], argv), device)
        with meshes.spread(resolved.mesh, device.described):
            programs = checked(resolved)
    except (CommandError, HardwareError, TargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if resolved.chosen:
        print(table.choices(resolved.chosen), flush=True)
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
    print(table.render_described(choices["model"], resolved, found, device))
    print(f"  compiled in {time.perf_counter() - began:.1f} s")
    return 0


def measure(programs: Programs, device: Device) -> cost.Traffic:
    """Return what the step of a run takes on described devices, and does there.

    Raises:
        OutOfMemoryError: more memory than a device has.
    """
    with meshes.spread(programs.config.mesh, device.described):
        found = cost.traffic(programs, device)
    if found.peak > device.memory:  # XLA lets GPUs run out of memory when they run
        raise OutOfMemoryError(f"  its step takes {size(found.peak)}, and a device has {size(device.memory)}")
    return found
