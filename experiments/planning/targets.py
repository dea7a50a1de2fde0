"""Hardware to compile for that is not here: TPU slices and GPU hosts, by name.

A TPU slice is called as its cloud calls it: `v5e-8` has eight chips, `v5p-16` sixteen cores, which are eight chips.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.commandline import console
from experiments.runtime.hardware import Device
from experiments.runtime.numbers import GIB

FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
INSTALL = {
    "tpu": f"the compiler for TPUs: {console.install('compile-tpu')}",
    "gpu": f"XLA's compiler for GPUs: {console.install('compile-gpu')}",
}


@dataclass(frozen=True)
class Kind:
    """A kind of accelerator.

    Attributes:
        platform: tpu or gpu.
        memory: GiB of one device that a program may use.
        shapes: the topology of a slice by its number of chips; of hosts, by nothing.
        cores: how many of the number in its name make one chip.
    """

    platform: str
    memory: float
    shapes: dict[int, str] | None = None
    cores: int = 1


KINDS = {
    "v4": Kind("tpu", 30.75, CUBES, 2),
    "v5e": Kind("tpu", 15.75, FLAT),
    "v5p": Kind("tpu", 95.74, CUBES, 2),
    "v6e": Kind("tpu", 31.25, FLAT),
    "h100": Kind("gpu", 79.1),
}


class TargetError(RuntimeError):
    """Hardware that cannot be compiled for, in words for the user."""


@dataclass(frozen=True)
class Target:
    """What is compiled for.

    Attributes:
        name: as the user wrote it.
        kind: of its devices.
        devices: JAX's descriptions of them; they hold nothing and run nothing.
    """

    name: str
    kind: Kind
    devices: Sequence[Any]

    @property
    def device(self) -> Device:
        """What a run is planned with."""
        count = len(self.devices)
        name = f"{self.name}, {count} x {self.devices[0].device_kind}"
        return Device(self.kind.platform, name, int(self.kind.memory * GIB), count, self.devices)


def find(name: str) -> Target:
    """Return the hardware of a name.

    Raises:
        TargetError: there is none, or its compiler is not installed.
    """
    found = re.fullmatch(r"([a-z]+\d+[a-z]*)-(\d+)", name)
    kind = KINDS.get(found.group(1)) if found else None
    if found is None or kind is None:
        raise TargetError(f"cannot compile_for={name}: there is no such hardware. {_known()}")
    number = int(found.group(2))
    if kind.shapes is None:
        if number < 1 or (number > 8 and number % 8):
            raise TargetError(f"cannot compile_for={name}: hosts have 8 devices. Use up to 8, or a multiple of 8.")
        return Target(name, kind, _gpus(name, number))
    shape = kind.shapes.get(number // kind.cores) if number % kind.cores == 0 else None
    if shape is None:
        sizes = ", ".join(f"{found.group(1)}-{chips * kind.cores}" for chips in kind.shapes)
        raise TargetError(f"cannot compile_for={name}: there is no slice of that size. There are {sizes}.")
    return Target(name, kind, _tpus(name, f"{found.group(1)}:{shape}"))


def _known() -> str:
    names = [f"{name}-{8 * kind.cores}" for name, kind in KINDS.items()]
    return f"Known are {', '.join(names)}, and other sizes of them."


def _tpus(name: str, topology: str) -> Sequence[Any]:
    # libtpu would ask its host which slice it is part of.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,4,1")
    return _described(name, INSTALL["tpu"], topology_name=topology, platform="tpu")


def _gpus(name: str, count: int) -> Sequence[Any]:
    shape = f"1x{max(1, count // 8)}x{min(count, 8)}"
    return _described(name, INSTALL["gpu"], topology_name="", platform="cuda", target_config=H100, topology=shape)


def _described(name: str, needs: str, **topology: str) -> Sequence[Any]:
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # what is not compiled for the target runs here
    try:
        return topologies.get_topology_desc(**topology).devices
    except Exception as error:  # each plugin has its own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(f"cannot compile_for={name}: {reason}. It takes {needs}") from None


# What XLA asks a GPU about itself; an H100 with 80 GB.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {
    major: 9
  }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info {
  major: 9
  minor: 8
}
runtime_version {
  major: 12
  minor: 9
  patch: 0
}
device_description_str: "NVIDIA H100 80GB HBM3"
"""
