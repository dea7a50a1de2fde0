"""What suits a device: every value that the user left open is chosen here, once, by device and model size."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, TypeVar

from experiments import configs
from experiments.commandline.console import GIB, CommandError, size
from experiments.configs import DType, Platform
from experiments.configs.fields import name_of
from experiments.runtime import memories, meshes
from experiments.runtime.hardware import KEEP_CASTS_IN_LOOPS, Device, HardwareError
from experiments.step import folders
from experiments.step import tiling as cuts
from experiments.step.build import Programs
from zoo.adapters import lora
from zoo.kernels import KERNELS, choose

T = TypeVar("T")


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
FEW_TILES = 16  # of attention: products are a sixteenth more than those of what is visible


def resolve(config: configs.Run, device: Device) -> configs.Resolved:
    """Return the run with every open value chosen for a device, and why.

    Raises:
        HardwareError: there is no such mesh of this many devices, or no number of tiles keeps within the budget.
        CommandError: the frozen model that its objective compares with is not there, or has another vocabulary.
    """
    params, choices = config.params, Choices()
    scale = next(scale for scale in SCALES[device.platform] if params <= scale.params)
    sized = f"{params:,} parameters on a {device.platform}: minutes altogether"
    mesh = _mesh(config, device, choices)
    memory = config.hardware.memory_gib * GIB if config.hardware.memory_gib else device.memory
    kept = 16 * params / (mesh.model * mesh.expert * (1 if mesh.fsdp == "none" else mesh.sizes["data"] or 1))
    roomy = kept < 0.8 * memory  # float32 parameters, gradients and two moments

    batch_size, steps = -(-scale.batch_size // mesh.rows) * mesh.rows, config.steps or scale.steps
    config = choices.fill(config, "", sized, steps=steps, batch_size=batch_size, seq_len=scale.seq_len)
    config = choices.fill(config, "", "twenty lines a run", log_every=max(1, steps // 20))
    hardware = _hardware(config.hardware, device, size(kept), roomy, choices)
    optimizer = _optimizer(
        config.optimizer, config.adapted, params, hardware.param_dtype is DType.float32 and roomy, choices
    )
    parts: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts.update(mesh=mesh, hardware=hardware, optimizer=optimizer, reference=folders.reference(config))
    resolved = _attention(_head(configs.Resolved(**parts), choices), choices)

    remat = _remat(config.remat, resolved.tiling, params > REMAT_ABOVE, device.platform, choices)
    often = max(10, steps // EVALUATIONS) if scale.eval_batches > 1 else 0
    why = f"{EVALUATIONS} in a run" if often else "evaluating costs as much as a step"
    evaluation = choices.fill(config.eval, "eval.", why, every=often)
    evaluation = choices.fill(evaluation, "eval.", sized, batches=scale.eval_batches)
    small = 12 * params <= GIB or config.adapted  # float32 parameters and two moments
    why = f"it takes {'less' if small else 'more'} than 1 GiB"
    checkpoint = choices.fill(config.checkpoint, "checkpoint.", why, last=small)
    return dataclasses.replace(resolved, remat=remat, eval=evaluation, checkpoint=checkpoint, chosen=choices.made)


class Choices:
    """Fills what was left open, and remembers with what and why.

    Attributes:
        made: the choices by their dotted names.
    """

    def __init__(self):
        self.made: dict[str, configs.Choice] = {}

    def fill(self, part: T, group: str, why: str, **values: Any) -> T:
        """Return a part of a run with these values where it has none yet."""
        left = {name: value for name, value in values.items() if getattr(part, name) in (None, "auto")}
        self.add(why, **{f"{group}{name}": value for name, value in left.items()})
        return dataclasses.replace(part, **left)  # ty: ignore[invalid-argument-type]

    def add(self, why: str, **values: Any) -> None:
        """Remember values, by their dotted names."""
        self.made |= {name: configs.Choice(value, why) for name, value in values.items()}


def _hardware(hardware: configs.Hardware, device: Device, kept: str, roomy: bool, choices: Choices) -> configs.Hardware:
    """Return the number formats and the compiler's options that suit a device; `roomy` if float32 fits there."""
    on_cpu, fill = device.platform == "cpu", functools.partial(choices.fill, group="hardware.")
    hardware = fill(hardware, why="the best device that there is", platform=Platform(device.platform))
    dtype, fits = (DType.float32, "fit") if roomy else (DType.bfloat16, "do not fit")
    why = f"float32 parameters, gradients and two moments of {kept} {fits}"
    hardware = fill(hardware, why=why, param_dtype=dtype)
    dtype = DType.float32 if on_cpu else DType.bfloat16
    hardware = fill(hardware, why=f"what a {device.platform} multiplies fastest", compute_dtype=dtype)
    why = "for Python and JAX itself" if on_cpu else "for the device's own use"
    hardware = fill(hardware, why=why, headroom_gib=1.0 if on_cpu else 0.5)
    if not on_cpu or hardware.param_dtype is not DType.bfloat16:
        return hardware
    options = {**KEEP_CASTS_IN_LOOPS, **hardware.compiler_options}
    if options != hardware.compiler_options:
        choices.add("no float32 copy of all bfloat16 layers", **{"hardware.compiler_options": options})
    return dataclasses.replace(hardware, compiler_options=options)


def _optimizer(
    asked: configs.Optimizer, adapted: bool, params: int, roomy: bool, choices: Choices
) -> configs.Optimizer:
    """Return the optimizer that was asked for, or the one whose state fits (`roomy` if AdamW's does), with its rate."""
    if type(asked) is configs.Optimizer:
        cls = configs.AdamW if roomy or adapted else configs.AdafactorLayerwise
        asked = cls(**{field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)})
        why = "its two moments fit" if roomy or adapted else "AdamW's two moments would not fit"
        choices.add(why, optimizer=name_of("optimizer", asked))
    rate, why = asked.peak, "it is relative to the parameters already"
    if adapted and type(asked) is configs.AdamW:
        rate, why = LORA_RATE, "what suits adapters of models of any size"
    elif asked.scales:
        rate = float(f"{asked.peak * min(1.0, (3e6 / params) ** 0.5):.1g}")
        why = "the larger the model, the smaller: with the root of its size"
    return choices.fill(asked, "optimizer.", why, learning_rate=rate)


def _mesh(config: configs.Run, device: Device, choices: Choices) -> configs.Mesh:
    """Return the mesh.

    Raises:
        HardwareError: there is no such mesh of this many devices.
    """
    try:
        mesh = meshes.choose(config.mesh, config.batch_size, config.tiling.heads, device.count, device.platform)
    except ValueError as error:
        raise HardwareError(str(error)) from None
    if device.count > 1 and config.mesh.data is None:
        names = [name for name in ("data", "context") if name == "data" or mesh.context > 1]
        why = f"there are {device.count} devices"
        choices.add(why, **{f"mesh.{name}": mesh.sizes[name] for name in names})
    return mesh


def _head(config: configs.Resolved, choices: Choices) -> configs.Resolved:
    """Return the run with as few tiles of the head as keep within the budget, or have small logits.

    Raises:
        HardwareError: no number of tiles keeps within the budget.
    """
    tiling = config.tiling
    if tiling.size is not None:
        return config
    if tiling.budget is not None:
        try:
            programs = Programs(dataclasses.replace(config, adapter=configs.Adapter()))  # it leaves the head as it is
            why = f"the fewest within {tiling.budget}"
            fewest = cuts.fewest(programs.objective, tiling, *programs.head_args)
        except ValueError as error:
            raise HardwareError(f"cannot use tiling.budget={tiling.budget}: {error}") from None
    else:
        tokens = config.head.rows * config.seq_len // config.mesh.sharing_tokens
        logits = 4 * tokens * config.model.config.vocab_size
        fewest = min(-(-logits // TILE_BYTES), max(1, tokens // LEAST_TILE))
        fewest = min(max(fewest, 2 * tiling.lowmem), config.head.length)
        whose = " of a device" if config.mesh.devices > 1 else ""
        why = f"all logits{whose} are {size(logits)}" + (f", a tile's at most {size(TILE_BYTES)}" if fewest > 1 else "")
    n = fewest if fewest > 1 or tiling.lowmem else "none"
    tiling = choices.fill(dataclasses.replace(tiling, budget=None), "tiling.", why, n=n)
    return dataclasses.replace(config, tiling=tiling)


def _attention(config: configs.Resolved, choices: Choices) -> configs.Resolved:
    """Return the run with its attention chosen, and into how many tiles it is cut where it is."""
    tiling, model = config.tiling, config.model.config
    if config.attention == "auto" and tiling.attention is not None:
        return choices.fill(config, "", f"tiling.attention={tiling.attention} cuts it", attention="tiled")
    if config.attention == "auto":
        name, why = choose(cuts.asked(config, model))
        if name == "plain" and tiling.heads:
            name, why = "tiled", f"{why}, and tiling.heads is for long texts"
        config = choices.fill(config, "", why, attention=name)
    if config.attention == "tiled":
        heads = model.num_heads // (cuts.turns(config) if tiling.heads else 1)
        scores = 4 * config.head.rows * heads * config.seq_len**2 // config.mesh.devices
        tiles = -(-scores // TILE_BYTES)
        if cuts.asked(config, model).spread == 1:  # keys are cut too
            tiles = max(FEW_TILES, math.isqrt(tiles - 1) + 1)
        tiles = max(2, min(tiles, config.seq_len // LEAST_TILE))
        why = f"all scores of a layer are {size(scores)}, a tile's are to be {size(TILE_BYTES)}"
        tiling = choices.fill(tiling, "tiling.", why, attention=tiles)
    return dataclasses.replace(config, tiling=tiling)


def _remat(remat: configs.Remat, tiling: configs.Tiling, large: bool, platform: str, choices: Choices) -> configs.Remat:
    """Return what the backward pass keeps: all of a small model, of a large one or of long texts next to nothing."""
    why = f"{'more' if large else 'no more'} than {REMAT_ABOVE:,.0f} parameters"
    policy = "full" if large else "none"
    if tiling.heads or tiling.tokens:
        why = "what a layer makes of long texts is made again; only what it was given is kept"
        policy = "full" if platform == "cpu" else "offload"
    return choices.fill(remat, "remat.", why, policy=policy)


def problem(config: configs.Resolved) -> str | None:
    """Return why a run cannot be carried out as it is asked for, before anything is compiled; None where it can."""
    if (why := config.problem) is not None:
        return why
    if (why := KERNELS[config.attention].refusal(cuts.asked(config, config.model.config))) is not None:
        return f"cannot run with attention={config.attention}: {config.attention} {why}; or use attention=auto."
    if config.hardware.offloaded and (why := memories.refusal()) is not None:
        return f"cannot use hardware.offload={config.hardware.offload}: {why}."
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
