"""Hardware to compile for that is not here: TPU slices and GPU hosts, by name.

A TPU slice is called as its cloud calls it: `v5e-8` has eight chips, `v5p-16` sixteen cores, which are eight chips, and
each of the eight cores of `v7x-8` is a device. `h100-8` is a host of eight GPUs, `l4-1` one of them.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.commandline import console
from experiments.commandline.console import GIB
from experiments.runtime.hardware import Device

FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {
    1: "1x1x1",
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
}
INSTALL = {
    "tpu": f"the compiler for TPUs: {console.install('compile-tpu')}",
    "gpu": f"XLA's compiler for GPUs: {console.install('compile-gpu')}",
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA asks a GPU about itself, as devices answer; see `xla/backends/gpu/target_config` in its repository.

    Attributes:
        name: its own.
        capability: CUDA's.
        cores: multiprocessors.
        clock: in GHz.
        bandwidth: of its memory, in bytes a second.
        cache: of the second level, in bytes.
        threads: that a core holds.
        shared: bytes of memory that the threads of a core share.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    clock: float
    bandwidth: int
    cache: int
    threads: int
    shared: int

    def described(self, memory: float) -> str:
        """Return what XLA reads, of a device with so many GiB."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared - 1024}
  core_count: {self.cores} fpus_per_core: 128 clock_rate_ghz: {self.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache} device_memory_size: {int(memory * GIB)}
  cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{self.name}"
"""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """What devices are.

    Attributes:
        platform: tpu or gpu.
        memory: GiB of one device that a program may use.
        shapes: the topology of a slice by its number of chips; of hosts, by nothing.
        host: GiB of the memory of a host, as those that clouds lend have; None is not known.
        chips: how many a host has.
        cores: how many of the number in its name make one chip.
        topology: what libtpu calls it, where that is not its name here.
        gpu: of a GPU, what it is.
    """

    platform: str
    memory: float
    host: float | None = None
    chips: int = 8
    shapes: dict[int, str] | None = None
    cores: int = 1
    topology: str | None = None
    gpu: Gpu | None = None


_HOPPER: Any = {"capability": (9, 0), "cores": 132, "clock": 1.98, "cache": 52428800, "threads": 2048, "shared": 233472}
_ADA: Any = {"capability": (8, 9), "threads": 1536, "shared": 102400}
_H100 = Gpu(name="NVIDIA H100 80GB HBM3", bandwidth=3352320000000, **_HOPPER)
_H200 = Gpu(name="NVIDIA H200", bandwidth=4800000000000, **_HOPPER)
_B200 = Gpu(
    name="NVIDIA B200",
    capability=(10, 0),
    cores=148,
    clock=1.965,
    bandwidth=7672320000000,
    cache=132644864,
    threads=2048,
    shared=233472,
)
_L4 = Gpu(name="NVIDIA L4", cores=58, clock=2.04, bandwidth=300000000000, cache=50331648, **_ADA)
_4090 = Gpu(name="NVIDIA GeForce RTX 4090", cores=128, clock=2.52, bandwidth=1008000000000, cache=75497472, **_ADA)
_GB = 1e9 / GIB  # what clouds count hosts' memory in
ACCELERATORS = {
    "v4": Accelerator(
        platform="tpu", memory=15.25, host=407 * _GB, chips=4, shapes=CUBES, cores=2
    ),  # cores are devices
    "v5e": Accelerator(platform="tpu", memory=15.75, host=384 * _GB, shapes=FLAT),
    "v5p": Accelerator(platform="tpu", memory=95.74, host=448 * _GB, chips=4, shapes=CUBES, cores=2),
    "v6e": Accelerator(platform="tpu", memory=31.25, host=1440 * _GB, shapes=FLAT),
    "v7x": Accelerator(platform="tpu", memory=94.75, host=960 * _GB, chips=4, shapes=CUBES, cores=2, topology="tpu7x"),
    "h100": Accelerator(platform="gpu", memory=79.1, host=2048, gpu=_H100),
    "h200": Accelerator(platform="gpu", memory=139.0, host=2048, gpu=_H200),
    "b200": Accelerator(platform="gpu", memory=178.3, host=2048, gpu=_B200),
    "l4": Accelerator(platform="gpu", memory=22.0, host=384 * _GB, gpu=_L4),
    "rtx4090": Accelerator(platform="gpu", memory=23.6, gpu=_4090),
}


class TargetError(RuntimeError):
    """Hardware that cannot be compiled for, in words for the user."""


@dataclass(frozen=True)
class Target:
    """What is compiled for.

    Attributes:
        name: as the user wrote it.
        accelerator: what its devices are.
        devices: JAX's descriptions of them; they hold nothing and run nothing.
    """

    name: str
    accelerator: Accelerator
    devices: Sequence[Any]

    @property
    def device(self) -> Device:
        """What a run is planned with."""
        count, found = len(self.devices), self.accelerator
        name = f"{self.name}, {count} x {self.devices[0].device_kind}"
        host = None if found.host is None else int(found.host * GIB)
        return Device(
            found.platform, name, int(found.memory * GIB), count, self.devices, host, min(count, self._on_host)
        )

    @property
    def _on_host(self) -> int:
        """How many devices a host has: of chips whose cores are devices, those."""
        number = int(self.name.rpartition("-")[2])
        return self.accelerator.chips * max(1, len(self.devices) * self.accelerator.cores // number)


def find(name: str) -> Target:
    """Return the hardware of a name.

    Raises:
        TargetError: there is none, or its compiler is not installed.
    """
    found = re.fullmatch(r"([a-z]+\d+[a-z]*)-(\d+)", name)
    accelerator = ACCELERATORS.get(found.group(1)) if found else None
    if found is None or accelerator is None:
        raise TargetError(f"cannot compile_for={name}: there is no such hardware. {_known()}")
    number = int(found.group(2))
    if accelerator.shapes is None:
        if number < 1 or (number > 8 and number % 8):
            raise TargetError(f"cannot compile_for={name}: hosts have 8 devices. Use up to 8, or a multiple of 8.")
        return Target(name, accelerator, _gpus(name, accelerator, number))
    shape = accelerator.shapes.get(number // accelerator.cores) if number % accelerator.cores == 0 else None
    if shape is None:
        sizes = ", ".join(f"{found.group(1)}-{chips * accelerator.cores}" for chips in accelerator.shapes)
        raise TargetError(f"cannot compile_for={name}: there is no slice of that size. There are {sizes}.")
    return Target(
        name, accelerator, _tpus(name, f"{accelerator.topology or found.group(1)}:{shape}", number == accelerator.cores)
    )


def _known() -> str:
    names = [f"{name}-{8 * accelerator.cores}" for name, accelerator in ACCELERATORS.items()]
    return f"Known are {', '.join(names)}, and other sizes of them."


def _tpus(name: str, topology: str, one: bool) -> Sequence[Any]:
    # libtpu would ask its host which slice it is part of.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,4,1")
    hosts: Any = {"chips_per_host_bounds": (1, 1, 1)} if one else {}  # else hosts have four chips or more
    return _described(name, INSTALL["tpu"], topology_name=topology, platform="tpu", **hosts)


def _gpus(name: str, accelerator: Accelerator, count: int) -> Sequence[Any]:
    assert accelerator.gpu is not None
    shape, told = f"1x{max(1, count // 8)}x{min(count, 8)}", accelerator.gpu.described(accelerator.memory)
    return _described(name, INSTALL["gpu"], topology_name="", platform="cuda", target_config=told, topology=shape)


def _described(name: str, needs: str, **topology: Any) -> Sequence[Any]:
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # what is not compiled for the target runs here
    try:
        return topologies.get_topology_desc(**topology).devices
    except Exception as error:  # each plugin has its own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(f"cannot compile_for={name}: {reason}. It takes {needs}") from None
