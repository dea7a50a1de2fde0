"""What suits a device: every value that the user left open is chosen here, once, by device and model size."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from experiments import configs
from experiments.commandline.console import GIB, CommandError
from experiments.configs import DType, Platform
from experiments.runtime import meshes
from experiments.runtime.hardware import KEEP_CASTS_IN_LOOPS, Device, HardwareError, several_processes
from experiments.runtime.own import described
from experiments.step import tiling as cuts
from experiments.step.build import Programs, adapter_problem, shape_of
from transforms import sharding
from zoo import kernels
from zoo.adapters import lora
from zoo.config import learned_positions
from zoo.families.mixture import MixtureLike

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
EVALUATIONS = 5  # in a run at most, after the first; where one costs little
PLAIN_SHARE = 1 / 16  # of the memory: largest float32 scores of a layer at once; a step has several of them
LEAST_TILE = 128  # tokens: shorter tiles make matrix products slow
FEW_TILES = 16  # of attention: products are a sixteenth more than those of what is visible


def resolve(config: configs.Run, device: Device, argv: Sequence[str] = ()) -> configs.Resolved:
    """Return a run with its models known (`own.described`) and every open value chosen (`chosen_for`)."""
    return chosen_for(described(config, argv), device)


def chosen_for(config: configs.Described, device: Device) -> configs.Resolved:
    """Return the run with every open value chosen for a device, and why.

    Raises:
        HardwareError: there is no such mesh of this many devices, or no number of tiles keeps within the budget.
        CommandError: there is no such adapter of the model, or it cannot be kept in so few bits.
    """
    params, choices = config.params, Choices()
    scale = next(scale for scale in SCALES[device.platform] if params <= scale.params)
    sized = f"{params:,} parameters on a {device.platform}: minutes altogether"
    mesh = _mesh(config, device, choices)
    memory = config.hardware.memory_gib * GIB if config.hardware.memory_gib else device.memory
    adapter = _adapter(config.adapter, config.model.config, choices)
    precision = _precision(config, adapter, mesh, 0.8 * memory)

    batch_size, steps = -(-scale.batch_size // mesh.rows) * mesh.rows, config.steps or scale.steps
    seq_len = min(scale.seq_len, learned_positions(config.model.config) or scale.seq_len)
    config = choices.settle(config, "", sized, steps=steps, batch_size=batch_size, seq_len=seq_len)
    config = choices.settle(config, "", "twenty lines a run", log_every=max(1, steps // 20))
    hardware = _hardware(config.hardware, device, precision, choices)
    roomy = precision.value is DType.float32 and hardware.param_dtype is DType.float32
    optimizer = _optimizer(config.optimizer, config.adapted, params, roomy, choices)
    parts: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts |= {"mesh": mesh, "hardware": hardware, "optimizer": optimizer, "adapter": adapter, "axes": _axes(mesh)}
    resolved = _head(configs.Resolved(**parts), choices)
    resolved = _experts(_attention(resolved, PLAIN_SHARE * memory, choices), choices)

    remat = _remat(config.remat, resolved.tiling, params > REMAT_ABOVE, device.platform, choices)
    often = max(10, steps // EVALUATIONS) if scale.eval_batches > 1 else 0
    why = f"at most {EVALUATIONS} in a run" if often else "evaluating costs as much as a step"
    evaluation = choices.settle(config.eval, "eval.", why, every=often)
    evaluation = choices.settle(evaluation, "eval.", sized, batches=scale.eval_batches)
    small = 12 * params <= GIB or config.adapted  # float32 parameters and two moments
    why = f"it takes {'less' if small else 'more'} than 1 GiB"
    checkpoint = choices.settle(config.checkpoint, "checkpoint.", why, last=small)
    made = {"remat": remat, "eval": evaluation, "checkpoint": checkpoint, "chosen": choices.made}
    return dataclasses.replace(resolved, **made)


class Choices:
    """Settles what was left open, and remembers with what and why.

    Attributes:
        made: the choices by their dotted names.
    """

    def __init__(self):
        self.made: dict[str, configs.Choice] = {}

    def settle(self, part: T, group: str, why: str, sizes: tuple[float, ...] = (), **values: Any) -> T:
        """Return a part of a run with these values where it has none yet."""
        left = {name: value for name, value in values.items() if getattr(part, name) in (None, "auto")}
        self.add(why, sizes, **{f"{group}{name}": value for name, value in left.items()})
        return dataclasses.replace(part, **left)  # ty: ignore[invalid-argument-type]

    def add(self, why: str, sizes: tuple[float, ...] = (), **values: Any) -> None:
        """Remember values, by their dotted names."""
        self.made |= {name: configs.Choice(value, why, sizes) for name, value in values.items()}


def _precision(config: configs.Described, adapter: configs.Adapter, mesh: configs.Mesh, room: float) -> configs.Choice:
    """Return what parameters are to be stored in: float32 where a device has room for all that a step changes in it.

    Raises:
        CommandError: there is no such adapter of the model, or it cannot be kept in so few bits.
    """
    needed, what = _float32_bytes(config, adapter, mesh), "float32 parameters"
    what += "" if config.model.quantise is None else ", matrices in fewer bits"
    what += ", and gradients and two moments of an adapter" if config.adapted else ", gradients and two moments"
    dtype, fits = (DType.float32, "fit") if needed < room else (DType.bfloat16, "do not fit")
    return configs.Choice(dtype, f"{what} of {{}} {fits}", (needed,))


def _float32_bytes(config: configs.Described, adapter: configs.Adapter, mesh: configs.Mesh) -> int:
    """Return the bytes of a device's share of float32 parameters, and of gradients and two moments of what learns."""
    if (why := adapter_problem(adapter, config.model.config)) is not None:
        raise CommandError(why)
    try:
        model = shape_of(config.model, adapter, jnp.float32, config.seed)
    except ValueError as error:
        raise CommandError(str(error)) from None
    devices = AbstractMesh(tuple(size or 1 for size in mesh.sizes.values()), tuple(mesh.sizes))
    axes = _axes(mesh)

    def share(letters, leaf):
        cut = sharding.axes_of(sharding.spec_of(letters, leaf.shape, devices, axes))
        stored = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(leaf))
        return stored // math.prod(devices.shape[axis] for axis in cut)

    parameters = meshes.by_leaf(model, share)
    learning = eqx.filter(parameters, lora.trainable(parameters)) if config.adapted else parameters
    return sum(jax.tree.leaves(parameters)) + 3 * sum(jax.tree.leaves(learning))


def _hardware(
    hardware: configs.Hardware, device: Device, precision: configs.Choice, choices: Choices
) -> configs.Hardware:
    """Return the number formats and the compiler's options that suit a device, with parameters in what suits them."""
    on_cpu, filled = device.platform == "cpu", functools.partial(choices.settle, group="hardware.")
    hardware = filled(hardware, why="the best device that there is", platform=Platform(device.platform))
    hardware = filled(hardware, why=precision.why, sizes=precision.sizes, param_dtype=precision.value)
    narrow = device.multiplies_bfloat16 and device.count == 1 and hardware.param_dtype is DType.bfloat16
    dtype = DType.bfloat16 if narrow or not on_cpu else DType.float32
    best = f"what most {device.platform}s multiply best"
    why = "what parameters are kept in, and this CPU multiplies" if narrow else best
    hardware = filled(hardware, why=why, compute_dtype=dtype)
    why = "for Python and JAX itself" if on_cpu else "for the device's own use"
    hardware = filled(hardware, why=why, headroom_gib=1.0 if on_cpu else 0.5)
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
        choices.add(why, optimizer=asked.name)
    rate, why = asked.peak, "it is relative to the parameters already"
    if adapted and type(asked) is configs.AdamW:
        rate, why = LORA_RATE, "what suits adapters of models of any size"
    elif asked.scales:
        rate = float(f"{asked.peak * min(1.0, (3e6 / params) ** 0.5):.1g}")
        why = "the larger the model, the smaller: with the root of its size"
    return choices.settle(asked, "optimizer.", why, learning_rate=rate)


@functools.singledispatch
def _adapter(adapter: configs.Adapter, model: Any, choices: Choices) -> configs.Adapter:
    """Return the adapter with the matrices that it is for."""
    return adapter


@_adapter.register
def _(adapter: configs.Lora, model: Any, choices: Choices) -> configs.Adapter:
    why = "the model's matrices of attention and of MLPs"
    return choices.settle(adapter, "adapter.", why, targets=",".join(lora.usual(model)))


def _mesh(config: configs.Run, device: Device, choices: Choices) -> configs.Mesh:
    """Return the mesh with every size known.

    Where `mesh.data` is left open, accelerators share the batch as far as it divides, and sequences beyond that; the
    devices of a CPU share its cores, so one is used, unless several processes bring theirs. Long texts (`tiling.heads`)
    are then read by Ulysses.

    Raises:
        HardwareError: the sizes do not multiply to the number of devices.
    """
    asked, count = config.mesh, device.count
    sizes, context_by = dict[str, Any](asked.sizes), asked.context_by
    if asked.data is None:
        others = {name: size for name, size in sizes.items() if name != "data"}
        alone = device.platform == Platform.cpu and asked.devices == 1 and not several_processes()
        sizes["data"] = 1 if -1 in others.values() or alone else -1
        if sizes["data"] == -1 and asked.devices == 1 and config.batch_size is not None:
            sizes["data"] = math.gcd(config.batch_size, count)
            sizes["context"] = count // sizes["data"]
            context_by = "ulysses" if config.tiling.heads and sizes["context"] > 1 else context_by
    if set(sizes.values()) != {1} or several_processes():
        try:
            sizes.update(sharding.fill({name: size or 1 for name, size in sizes.items()}, count))
        except ValueError:
            raise HardwareError(_sizes(sizes, count)) from None
    if count > 1 and asked.data is None:
        names = [name for name in ("data", "context") if name == "data" or sizes["context"] > 1]
        choices.add(f"there are {count} devices", **{f"mesh.{name}": sizes[name] for name in names})
    return configs.Mesh(**sizes, fsdp=asked.fsdp, context_by=context_by)


def _sizes(sizes: dict[str, int | None], count: int) -> str:
    """Return what is said of sizes that are no mesh of so many devices."""
    said = " x ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size != 1)
    several = [name for name, size in sizes.items() if size == -1]
    if len(several) > 1:
        return f"cannot make a mesh of {said}: one axis can take the rest. Give mesh.{several[-1]} a size."
    known = math.prod(size for size in sizes.values() if size and size > 0)
    fits = next(n for n in range(min(known, count), 0, -1) if count % n == 0)
    need = f"a multiple of {known} devices" if several else f"{known} devices"
    return (
        f"cannot make a mesh of {said}: it takes {need}, and there are {count}. The sizes must multiply to {count} "
        f"(such as mesh.data={count // fits} with {fits} for the others), or mesh=one uses one device."
    )


def _axes(mesh: configs.Mesh) -> sharding.Axes:
    """Return which mesh axes cut which letter, of everything in a run."""
    if mesh.fsdp == "none":
        return {letter: named for letter, named in sharding.AXES.items() if letter != "D"}
    shared = ("data", "context") if mesh.context_by == "ulysses" else ("data",)
    return {**sharding.AXES, "D": shared} | ({"V": ("model", *shared)} if mesh.fsdp == "V" else {})


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
            fewest, sizes = cuts.fewest(programs.objective, tiling, *programs.head_args), ()
        except ValueError as error:
            raise HardwareError(f"cannot use tiling.budget={tiling.budget}: {error}") from None
    else:
        tokens = config.head.rows * config.seq_len // config.mesh.sharing_tokens
        words, devices = config.model.config.vocab_size, config.mesh.model
        logits = 4 * tokens * (words if words % devices else words // devices)
        fewest = min(-(-logits // TILE_BYTES), max(1, tokens // LEAST_TILE))
        fewest = min(max(fewest, 2 * tiling.lowmem), config.head.length)
        whose = " of a device" if config.mesh.devices > 1 else ""
        why = f"all logits{whose} are {{}}" + (", a tile's at most {}" if fewest > 1 else "")
        sizes = (logits, TILE_BYTES)[: 1 + (fewest > 1)]
    n = fewest if fewest > 1 or tiling.lowmem else "none"
    tiling = choices.settle(dataclasses.replace(tiling, budget=None), "tiling.", why, sizes, n=n)
    return dataclasses.replace(config, tiling=tiling)


def _attention(config: configs.Resolved, most: float, choices: Choices) -> configs.Resolved:
    """Return the run with its attention chosen, and into how many tiles it is cut where it is.

    Args:
        config: the run.
        most: bytes of a layer's scores that are made at once unless that is asked for.
        choices: remembers why.
    """
    tiling, model = config.tiling, config.model.config
    if config.attention == "auto" and tiling.attention is not None:
        return choices.settle(config, "", f"tiling.attention={tiling.attention} cuts it", attention="tiled")
    heads = model.num_heads // (cuts.turns(config) if tiling.heads else 1)
    whole = config.mesh.model if model.num_heads % config.mesh.model else 1
    scores = 4 * config.head.rows * heads * config.seq_len**2 * whole // config.mesh.devices
    if config.attention == "auto":
        name, why = kernels.attention.choose(cuts.asked(config, model))
        if name == "plain" and (tiling.heads or scores > most):
            long = "tiling.heads is for long texts" if tiling.heads else "plain attention makes all scores at once"
            name, why = "tiled", f"{why}, and {long}"
        config = choices.settle(config, "", why, attention=name)
    if config.attention == "tiled":
        tiles = -(-scores // TILE_BYTES)
        if cuts.asked(config, model).spread == 1:  # keys are cut too
            tiles = max(FEW_TILES, math.isqrt(tiles - 1) + 1)
        tiles = max(2, min(tiles, config.seq_len // LEAST_TILE))
        why = "all scores of a layer are {}, a tile's are to be {}"
        tiling = choices.settle(tiling, "tiling.", why, (scores, TILE_BYTES), attention=tiles)
    return dataclasses.replace(config, tiling=tiling)


def _experts(config: configs.Resolved, choices: Choices) -> configs.Resolved:
    """Return the run with the products of its experts chosen, where it has any."""
    if not isinstance(config.model.config, MixtureLike):
        return config
    name, why = kernels.experts.choose(config.hardware.platform.value)
    return choices.settle(config, "", why, experts=name)


def _remat(remat: configs.Remat, tiling: configs.Tiling, large: bool, platform: str, choices: Choices) -> configs.Remat:
    """Return what the backward pass keeps: all of a small model, of a large one or of long texts next to nothing."""
    why = f"{'more' if large else 'no more'} than {REMAT_ABOVE:,.0f} parameters"
    policy = "full" if large else "none"
    if tiling.heads or tiling.tokens:
        why = "what a layer makes of long texts is made again; only what it was given is kept"
        policy = "full" if platform == "cpu" else "offload"
    return choices.settle(remat, "remat.", why, policy=policy)
