"""The devices of a run, and the processes that drive them. JAX is imported only by what asks it for something.

A device has a name, memory that is free and in use, and a speed that it can have at most. Of many processes that carry
out one run each drives its own devices, feeds them their part of every batch, and writes its part of every checkpoint:
here they find each other, agree, stop together, and notice that one is gone. The first one speaks and keeps the
records.
"""

import contextlib
import os
import re
import resource
import signal
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from experiments import configs
from experiments.configs import DType, Platform
from experiments.runtime.manifest import user_cache
from experiments.runtime.signals import Stop

# XLA:CPU hoists the float32 copy of a whole bfloat16 stack of layers out of the loop over them unless this pass is off.
KEEP_CASTS_IN_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


class HardwareError(RuntimeError):
    """The device, or the other processes, that were asked for are not there; in words for the user."""


@dataclass(frozen=True)
class Device:
    """What the run will run on.

    Attributes:
        platform: cpu, gpu or tpu.
        name: for people.
        memory: bytes that are free for this run, on each device.
        count: how many of them there are.
        described: JAX's descriptions of devices that are not here, which hold nothing and run nothing.
        host: bytes of the memory of a machine that has such devices, free for this run; None where that is not known.
        on_host: how many of them a machine has.
        multiplies_bfloat16: whether it multiplies bfloat16 as it is; CPUs of few kinds do.
    """

    platform: str
    name: str
    memory: int
    count: int = 1
    described: Sequence[Any] | None = None
    host: int | None = None
    on_host: int = 1
    multiplies_bfloat16: bool = False


# Dense bfloat16 TFLOP/s of one device, by part of its name; the makers' data sheets.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
    "L40": 181.0,
    "L4": 121.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5p": 459.0,
    "TPU v5": 459.0,
    "TPU v6": 918.0,
    "TPU7x": 2307.0,
}
BFLOAT16 = "avx512_bf16"  # a processor's instructions that multiply it, as Linux calls them
AT_ONCE = 4  # sums and exchanges of a program that may wait for other devices at once: those in a loop, those beside it
CGROUPS = (("memory.current", "memory.max"), ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes"))


def prepare(platform: Platform) -> Device:
    """Import JAX for a platform, quietly and with its compilation cache on; return the device.

    Raises:
        HardwareError: there is no such device.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    import logging

    import jax

    logging.getLogger("jax").setLevel(logging.ERROR)
    jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if platform is Platform.cpu:
        jax.config.update("jax_platforms", "cpu")  # or a GPU would be started too
    _let_cpu_devices_wait(jax.config.jax_num_cpu_devices)  # ty: ignore[missing-attribute]
    try:
        devices = jax.devices(None if platform is Platform.auto else platform.value)
        device = next(one for one in devices if one.process_index == jax.process_index())
    except RuntimeError as error:
        raise HardwareError(
            f"hardware={platform.value} is not there: {str(error).splitlines()[0]}. "
            f"Install JAX for it (the extras cuda and tpu), or use hardware=auto."
        ) from None
    memory = least(free_memory(device))
    multiplies = bool(least(int(_multiplies_bfloat16(device))))  # or processes would compile other programs
    local = jax.local_device_count()
    how: Any = {"host": host_memory(), "on_host": local, "multiplies_bfloat16": multiplies}
    return Device(device.platform, _name(device), memory, jax.device_count(), **how)


def _let_cpu_devices_wait(devices: int) -> None:
    """Give XLA the threads on which several CPU devices can wait for each other: by itself it has one of each.

    Where two sums do not depend on each other, one device may begin with the one and another with the other: without a
    thread for each, both wait until XLA ends the process.
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = max(devices, int(asked[-1]) if asked else 1)
    if devices > 1:
        os.environ.setdefault("NPROC", str(max(AT_ONCE * devices, os.cpu_count() or 1)))  # as XLA calls it


def allow(config: configs.Hardware) -> None:
    """Let JAX compute in float64 if a run asks for it anywhere."""
    import jax

    if DType.float64 in (config.param_dtype, config.compute_dtype, config.grad_dtype):
        jax.config.update("jax_enable_x64", True)


def _name(device: Any) -> str:
    if device.platform != "cpu":
        return device.device_kind
    return f"CPU with {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def _multiplies_bfloat16(device: Any) -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            told = next((line for line in file if line.startswith("flags")), "")
    except OSError:  # another system, which does not tell
        told = ""
    return device.platform != "cpu" or BFLOAT16 in told.split()


def free_memory(device: Any) -> int:
    """Return how many bytes a device has free."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else host_memory()


def host_memory() -> int:
    """Return how many bytes of this machine's memory are free for this process."""
    free = [_meminfo("MemAvailable")]
    for used, limit in CGROUPS:
        try:
            with open(f"/sys/fs/cgroup/{limit}") as file, open(f"/sys/fs/cgroup/{used}") as other:
                free.append(int(file.read()) - int(other.read()))
        except (OSError, ValueError):  # no such controller, or no limit
            continue
    return min(free)


def _meminfo(field: str) -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def used_memory() -> tuple[int, int]:
    """Return (bytes in use now, the most so far): of the process on a CPU, of the device elsewhere."""
    import jax

    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats:
        return stats["bytes_in_use"], stats["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), peak
    except OSError:
        return peak, peak


def peak_tflops() -> float | None:
    """Return the TFLOPs per second that a device can do at most; None: unknown."""
    import jax

    name = jax.devices()[0].device_kind
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def join_processes(config: configs.Distributed, stop: Stop) -> None:
    """Find the other processes; to be called before any device is asked for. `stop` then hears for all of them.

    Raises:
        HardwareError: they are not there.
    """
    if not config.wanted:
        return
    import jax

    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            config.process,
            heartbeat_timeout_seconds=config.timeout,
            shutdown_timeout_seconds=30,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or "what started this one (SLURM, Open MPI, a TPU pod, GKE)"
        raise HardwareError(f"cannot find the other processes through {where}: {_line(error)}") from None
    if not first_process():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if several_processes():
        stop.share(told, forward)


def first_process() -> bool:
    """Return whether this is the process that speaks and keeps the records."""
    import jax

    return jax.process_index() == 0


def several_processes() -> bool:
    """Return whether there are other processes."""
    import jax

    return jax.process_count() > 1


def agreed(number: int) -> int:
    """Return the first process's number, in every process."""
    if not several_processes():
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.array(number, np.int32)))


def least(number: int) -> int:
    """Return the smallest of the processes' numbers, to within a part in a million."""
    if not several_processes():
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.process_allgather(np.array(number, np.float32)).min())


def gathered(tree: Any) -> Any:
    """Return a tree whose arrays are whole, in the memory of every process."""
    if not several_processes():
        return tree
    import jax
    from jax.experimental import multihost_utils

    whole = lambda leaf: multihost_utils.process_allgather(leaf, tiled=True) if isinstance(leaf, jax.Array) else leaf
    return jax.tree.map(whole, tree)


def told(step: int) -> signal.Signals | None:
    """Return SIGTERM if one of the processes got it, at a step at which all of them are told."""
    from jax.experimental import multihost_utils

    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None


def forward(number: int, _: FrameType | None) -> None:
    """Handle SIGINT as SIGTERM, which JAX tells all processes about."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def answering(run: str) -> Generator[None, None, None]:
    """End this process at once where another one of the run does not answer within, and would be waited for.

    JAX cannot tell one that has ended from one that is slow or cannot be reached.
    """
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several_processes() or "RESOURCE_EXHAUSTED" in str(error):
            raise
        sys.stdout.flush()
        print(
            f"\nerror: another process of this run has ended or does not answer ({_line(error)}): process "
            f"{jax.process_index()} of {jax.process_count()} ends too. run={run} goes on from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
