"""What suits a device: every value that the user left open is chosen here, once, by device and model size."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zoo.accounting
from experiments import configs
from experiments.commandline.console import CommandError
from experiments.configs import DType, Platform
from experiments.configs.registry import name_of
from experiments.runtime import meshes
from experiments.runtime.hardware import KEEP_CASTS_IN_LOOPS, Device, HardwareError
from experiments.runtime.numbers import GIB
from experiments.step import tiling as cuts
from experiments.step.build import Programs
from zoo.adapters import lora


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
LORA_RATE = 1e-3  # AdamW's, for adapters of models of any size
REMAT_ABOVE = 2e7  # parameters: below, activations are small and recomputing them is time lost
TILE_BYTES = 2**28  # largest float32 logits of one tile under tiling.n=auto
EVALUATIONS = 5  # in a run, after the first; where one costs little
LEAST_TILE = 128  # tokens: shorter tiles make matrix products slow


def resolve(config: configs.Run, device: Device) -> tuple[configs.Resolved, dict[str, Any]]:
    """Return the configuration with every open value chosen, and the choices by their dotted names.

    Raises:
        HardwareError: there is no such mesh of this many devices, or no number of tiles keeps within the budget.
    """
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
    config = dataclasses.replace(config, mesh=mesh)
    config = choose(config, "", steps=scale.steps, batch_size=batch_size, seq_len=scale.seq_len)
    config = dataclasses.replace(config, log_every=config.log_every or max(1, config.steps // 20))
    hardware = _hardware(config.hardware, device, roomy, choose, chosen)
    optimizer = _optimizer(config, hardware.param_dtype is DType.float32 and roomy, chosen)
    optimizer = choose(optimizer, "optimizer.", learning_rate=_rate(type(optimizer), params, config.adapter))
    parts: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts.update(hardware=hardware, optimizer=optimizer)
    resolved = configs.Resolved(**parts)
    tiling = config.tiling
    if tiling.size is None:
        tiling = choose(dataclasses.replace(tiling, budget=None), "tiling.", n=_tiles(resolved))
    remat = choose(config.remat, "remat.", policy="full" if params > REMAT_ABOVE else "none")
    often = max(10, resolved.steps // EVALUATIONS) if scale.eval_batches > 1 else 0
    evaluation = choose(config.eval, "eval.", every=often, batches=scale.eval_batches)
    small = 12 * params <= GIB or isinstance(config.adapter, configs.Lora)  # float32 parameters and two moments
    checkpoint = choose(config.checkpoint, "checkpoint.", last=small)
    return dataclasses.replace(resolved, tiling=tiling, remat=remat, eval=evaluation, checkpoint=checkpoint), chosen


def _hardware(
    hardware: configs.Hardware, device: Device, roomy: bool, choose: Callable[..., Any], chosen: dict[str, Any]
) -> configs.Hardware:
    """Return the number formats and the compiler's options that suit a device; `roomy` if float32 fits there."""
    on_cpu = device.platform == "cpu"
    hardware = choose(
        hardware,
        "hardware.",
        platform=Platform(device.platform),
        param_dtype=DType.float32 if roomy else DType.bfloat16,
        compute_dtype=DType.float32 if on_cpu else DType.bfloat16,
        headroom_gib=1.0 if on_cpu else 0.5,
    )
    if not on_cpu or hardware.param_dtype is not DType.bfloat16:
        return hardware
    options = {**KEEP_CASTS_IN_LOOPS, **hardware.compiler_options}
    if options != hardware.compiler_options:
        chosen["hardware.compiler_options"] = options
    return dataclasses.replace(hardware, compiler_options=options)


def _optimizer(config: configs.Run, roomy: bool, chosen: dict[str, Any]) -> configs.Optimizer:
    """Return the optimizer that was asked for, or the one whose state fits: `roomy` if AdamW's does."""
    if type(config.optimizer) is not configs.Optimizer:
        return config.optimizer
    cls = configs.AdamW if roomy or isinstance(config.adapter, configs.Lora) else configs.AdafactorLayerwise
    made = cls(**{field.name: getattr(config.optimizer, field.name) for field in dataclasses.fields(config.optimizer)})
    chosen["optimizer"] = name_of("optimizer", made)
    return made


def _mesh(config: configs.Run, device: Device) -> tuple[configs.Mesh, dict[str, Any]]:
    """Return the mesh, and what of it was chosen for the user.

    Raises:
        HardwareError: there is no such mesh of this many devices.
    """
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
        try:
            fewest = Programs(config).fewest_tiles()
        except ValueError as error:
            raise HardwareError(f"cannot use tiling.budget={config.tiling.budget}: {error}") from None
    else:
        tokens = config.head.rows * config.seq_len
        fewest = min(-(-4 * tokens * config.model.config.vocab_size // TILE_BYTES), max(1, tokens // LEAST_TILE))
        fewest = min(max(fewest, 2 * config.tiling.lowmem), config.head.length)
    return fewest if fewest > 1 or config.tiling.lowmem else "none"


def _rate(optimizer: type[configs.Optimizer], params: int, adapter: configs.Adapter) -> float:
    """Return a peak learning rate: AdamW's falls with the root of the model's size, Adafactor's is relative already."""
    if isinstance(adapter, configs.Lora) and optimizer is configs.AdamW:
        return LORA_RATE
    return float(f"{optimizer.peak * min(1.0, (3e6 / params) ** 0.5):.1g}") if optimizer.scales else optimizer.peak


def problem(config: configs.Resolved) -> str | None:
    """Return why a run cannot be carried out as it is asked for, before anything is compiled; None where it can."""
    if found := meshes.problem(config) or cuts.problem(config):
        return found
    if config.profile.span is not None and config.profile.span[1] > config.steps:
        return f"bad value profile.steps={config.profile.steps}: the run has {config.steps} steps"
    if isinstance(config.adapter, configs.Lora):
        try:
            lora.match(config.model.config, config.adapter.patterns)
        except ValueError as error:
            said = str(error).replace(":\n  ", ": ").replace("\n  ", ", ")
            return f"bad value adapter.targets={config.adapter.targets}: {said}"
    return None


def checked(config: configs.Resolved) -> Programs:
    """Return the programs of a run that can be carried out as it is asked for; to be called on its mesh.

    Raises:
        CommandError: it cannot, or something that it names is not there.
    """
    if why := problem(config):
        raise CommandError(why)
    try:
        programs = Programs(config)
        programs.check()
    except ValueError as error:
        raise CommandError(str(error)) from None
    return programs
