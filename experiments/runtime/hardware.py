"""The device, and what suits it: every value that the user left open is chosen here, by device and model size."""

import dataclasses
import os
import resource
from dataclasses import dataclass
from typing import Any

import zoo.accounting
from experiments import configs
from experiments.configs import DType, Platform
from experiments.configs.registry import name_of
from experiments.step import tiles

GIB = 2**30
# XLA:CPU hoists the float32 copy of a whole bfloat16 stack of layers out of the loop over them unless this pass is off.
KEEP_CASTS_IN_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


class HardwareError(RuntimeError):
    """The device that was asked for is not there."""


@dataclass(frozen=True)
class Device:
    """What the run will run on.

    Attributes:
        platform: cpu, gpu or tpu.
        name: for people.
        memory: bytes that are free for this run, on each device.
        count: how many of them there are.
    """

    platform: str
    name: str
    memory: int
    count: int = 1


@dataclass(frozen=True)
class Scale:
    """Sizes that suit models of up to `params` parameters: about a second a step, and minutes altogether."""

    params: float
    batch_size: int
    seq_len: int
    steps: int
    eval_batches: int


SCALES = {
    "cpu": (
        Scale(6e6, 8, 256, 160, 8),
        Scale(6e7, 8, 256, 50, 4),
        Scale(6e8, 2, 256, 10, 2),
        Scale(float("inf"), 1, 512, 3, 1),
    ),
    "gpu": (
        Scale(6e6, 64, 512, 1000, 16),
        Scale(6e8, 32, 1024, 500, 16),
        Scale(float("inf"), 8, 2048, 100, 8),
    ),
}
SCALES["tpu"] = SCALES["gpu"]
RATES: dict[type, float] = {
    configs.AdamW: 3e-3,
    configs.Muon: 3e-3,
    configs.Adafactor: 2e-2,
    configs.AdafactorLayerwise: 2e-2,
    configs.Sgd: 1e-1,
    configs.CustomOptimizer: 1e-3,
}
LORA_RATE = 1e-3  # AdamW's, for adapters of models of any size
REMAT_ABOVE = 2e7  # parameters: below, activations are small and recomputing them is time lost
TILE_BYTES = 2**28  # largest float32 logits of one tile under tiling.n=auto
# Dense bfloat16 TFLOP/s of one device, by part of its name; the makers' data sheets.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5p": 459.0,
    "TPU v5": 459.0,
    "TPU v6": 918.0,
    "TPU7x": 2307.0,
}
CGROUPS = (("memory.current", "memory.max"), ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes"))
EVALUATIONS = 5  # in a run, after the first; where one costs little
LEAST_TILE = 128  # tokens: shorter tiles make matrix products slow


def prepare(platform: Platform) -> Device:
    """Import JAX for a platform, quietly and with its compilation cache on; return the device.

    Raises:
        HardwareError: there is no such device.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    import logging

    import jax

    from experiments.data.corpus import user_cache
    from experiments.runtime import distributed

    logging.getLogger("jax").setLevel(logging.ERROR)
    jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if platform is Platform.cpu:
        jax.config.update("jax_platforms", "cpu")  # or a GPU would be started too
    try:
        devices = jax.devices(None if platform is Platform.auto else platform.value)
        device = next(one for one in devices if one.process_index == jax.process_index())
    except RuntimeError as error:
        raise HardwareError(
            f"hardware={platform.value} is not there: {str(error).splitlines()[0]}. "
            f"Install JAX for it (the extras cuda and tpu), or use hardware=auto."
        ) from None
    memory = distributed.least(free_memory(device))
    return Device(device.platform, _name(device), memory, jax.device_count())


def allow(config: configs.Hardware) -> None:
    """Let JAX compute in float64 if a run asks for it anywhere."""
    import jax

    if DType.float64 in (config.param_dtype, config.compute_dtype, config.grad_dtype):
        jax.config.update("jax_enable_x64", True)


def _name(device: Any) -> str:
    if device.platform != "cpu":
        return device.device_kind
    return f"CPU with {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


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


def peak_flops(config: configs.Hardware) -> float | None:
    """Return the FLOPs per second that all devices can do at most; None where nobody knows, as on CPUs."""
    import jax

    kind = jax.devices()[0].device_kind
    known = next((peak for name, peak in PEAKS.items() if name in kind), None)
    peak = known if config.peak_tflops is None else config.peak_tflops
    return None if peak is None else peak * 1e12 * jax.device_count()


def resolve(config: configs.Run, device: Device) -> tuple[configs.Resolved, dict[str, Any]]:
    """Return the configuration with every open value chosen, and the choices by their dotted names."""
    params = zoo.accounting.count_params(config.model.config)
    scale = next(scale for scale in SCALES[device.platform] if params <= scale.params)
    mesh, chosen = _mesh(config, device)
    memory = config.hardware.memory_gib * GIB if config.hardware.memory_gib else device.memory
    kept = 16 * params / (mesh.model * mesh.expert * (1 if mesh.fsdp == "none" else mesh.sizes["data"] or 1))
    roomy = kept < 0.8 * memory  # float32 parameters, gradients and two moments

    def choose(part: Any, group: str, **values: Any) -> Any:
        open_values = {name: value for name, value in values.items() if getattr(part, name) in (None, "auto")}
        chosen.update({f"{group}{name}": value for name, value in open_values.items()})
        return dataclasses.replace(part, **open_values)

    rows = configs.chosen(mesh.data) * mesh.expert
    batch_size = -(-scale.batch_size // rows) * rows
    config = choose(
        dataclasses.replace(config, mesh=mesh), "", steps=scale.steps, batch_size=batch_size, seq_len=scale.seq_len
    )
    config = dataclasses.replace(config, log_every=config.log_every or max(1, config.steps // 20))
    resolved = configs.Resolved(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    hardware = choose(
        config.hardware,
        "hardware.",
        platform=Platform(device.platform),
        param_dtype=DType.float32 if roomy else DType.bfloat16,
        compute_dtype=DType.float32 if device.platform == "cpu" else DType.bfloat16,
        headroom_gib=1.0 if device.platform == "cpu" else 0.5,
    )
    if device.platform == "cpu" and hardware.param_dtype is DType.bfloat16:
        options = {**KEEP_CASTS_IN_LOOPS, **hardware.compiler_options}
        if options != hardware.compiler_options:
            chosen["hardware.compiler_options"] = options
        hardware = dataclasses.replace(hardware, compiler_options=options)
    optimizer = config.optimizer
    if type(optimizer) is configs.Optimizer:
        full = hardware.param_dtype is DType.float32 and roomy
        cls = configs.AdamW if full or isinstance(config.adapter, configs.Lora) else configs.AdafactorLayerwise
        optimizer = cls(**{field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)})
        chosen["optimizer"] = name_of("optimizer", optimizer)
    optimizer = choose(optimizer, "optimizer.", learning_rate=_rate(type(optimizer), params, config.adapter))
    resolved = dataclasses.replace(resolved, hardware=hardware)
    tiling = config.tiling
    if tiling.size is None:
        tiling = choose(dataclasses.replace(tiling, budget=None), "tiling.", n=_tiles(resolved))
    remat = choose(config.remat, "remat.", policy="full" if params > REMAT_ABOVE else "none")
    often = max(10, resolved.steps // EVALUATIONS) if scale.eval_batches > 1 else 0
    evaluation = choose(config.eval, "eval.", every=often, batches=scale.eval_batches)
    small = 12 * params <= GIB or isinstance(config.adapter, configs.Lora)  # float32 parameters and two moments
    checkpoint = choose(config.checkpoint, "checkpoint.", last=small)
    parts = {"tiling": tiling, "hardware": hardware, "optimizer": optimizer, "remat": remat, "eval": evaluation}
    return dataclasses.replace(resolved, **parts, checkpoint=checkpoint), chosen


def _mesh(config: configs.Run, device: Device) -> tuple[configs.Mesh, dict[str, Any]]:
    """Return the mesh, and what of it was chosen for the user.

    Raises:
        HardwareError: there is no such mesh of this many devices.
    """
    from experiments.runtime import meshes

    try:
        mesh = meshes.choose(config, device.count, device.platform)
    except ValueError as error:
        raise HardwareError(str(error)) from None
    if device.count == 1 or config.mesh.data is not None:
        return mesh, {}
    return mesh, {
        f"mesh.{name}": mesh.sizes[name] for name in ("data", "context") if name == "data" or mesh.context > 1
    }


def _tiles(config: configs.Resolved) -> int | str:
    """Return how many tiles suit the head: as few as keep within the budget, or have small logits.

    Raises:
        HardwareError: no number of tiles keeps within the budget.
    """
    if config.tiling.budget is not None:
        from experiments.step import program

        try:
            fewest = program.fewest_tiles(config)
        except ValueError as error:
            raise HardwareError(f"cannot use tiling.budget={config.tiling.budget}: {error}") from None
    else:
        tokens = tiles.micro_batch(config) * config.seq_len
        fewest = min(-(-4 * tokens * config.model.config.vocab_size // TILE_BYTES), max(1, tokens // LEAST_TILE))
        fewest = min(max(fewest, 2 * config.tiling.lowmem), tiles.head_axis(config)[0])
    return fewest if fewest > 1 or config.tiling.lowmem else "none"


def _rate(optimizer: type, params: int, adapter: configs.Adapter) -> float:
    """Return a peak learning rate: AdamW's falls with the root of the model's size, Adafactor's is relative already."""
    rate = RATES[optimizer]
    if isinstance(adapter, configs.Lora) and optimizer is configs.AdamW:
        return LORA_RATE
    scaled = float(f"{rate * min(1.0, (3e6 / params) ** 0.5):.1g}")
    return scaled if optimizer in (configs.AdamW, configs.Muon, configs.CustomOptimizer) else rate
