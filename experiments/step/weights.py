"""Weights: what the folder of a model says of it, and a model that is only run, in the device's number formats."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from experiments import configs
from experiments.commandline import console
from experiments.commandline.console import CommandError
from experiments.configs import DType
from experiments.configs.commands import Generate, Score, Serve
from experiments.data.tokenizer import Bytes, Folder, open_tokenizer
from experiments.runtime import hardware
from experiments.runtime.remote import HUB
from experiments.step.build import load_or_draw
from zoo import adapters, count_params
from zoo.huggingface.config import from_hf

T = TypeVar("T", bound=Any)


def with_weights(config: T, argv: Sequence[str]) -> T:
    """Return a run (or another command) with the architecture that its weights' folder describes.

    Raises:
        CommandError: there are no such weights, or they are another model's than the one asked for.
    """
    if config.model.weights is None:
        return config
    path = Path(config.model.weights).expanduser()
    fetch = "" if path.is_dir() else f". It names a folder; {HUB}ORG/NAME fetches a model by its name on the hub"
    described = _described(path, f"model.weights={path}", fetch)
    beside = "model.weights=", "model.quantise="
    if any(word.startswith("model") and not word.startswith(beside) for word in argv):
        both = config.model.config, described
        ours, theirs = ({"family": type(one).__name__, **dataclasses.asdict(one)} for one in both)
        if wrong := [f"{k}: {ours[k]} here, {theirs[k]} there" for k in ours if ours[k] != theirs.get(k, ours[k])]:
            raise CommandError(f"model.weights={path} holds another model than the one asked for: {'; '.join(wrong)}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, config=described, weights=str(path)))


def reference(config: configs.Run) -> configs.Reference | None:
    """Return the frozen model of a run; None where its objective compares with none.

    Raises:
        CommandError: its folder cannot be read, or it has another vocabulary than the model that learns.
    """
    objective, ours = config.objective, config.model.config
    if isinstance(objective, configs.Distill):
        folder, option = objective.teacher, "objective.teacher"
    elif isinstance(objective, configs.Referenced):
        folder, option = objective.reference, "objective.reference"
    else:
        return None
    if folder is None:
        origin = configs.Origin.base if isinstance(config.adapter, configs.Lora) else configs.Origin.start
        return configs.Reference(origin, ours)
    path = Path(folder).expanduser()
    found = _described(path, f"{option}={folder}")
    if found.vocab_size != ours.vocab_size:
        raise CommandError(
            f"cannot use {option}={folder}: it has a vocabulary of {found.vocab_size}, the model that learns one of "
            f"{ours.vocab_size}. Both must have the same."
        )
    return configs.Reference(configs.Origin.folder, found, folder)


def _described(folder: Path, said: str, remedy: str = "") -> Any:
    """Return the architecture that the `config.json` of a folder describes."""
    try:
        return from_hf(json.loads((folder / "config.json").read_text()))
    except OSError as error:
        raise CommandError(f"cannot read {said}: {error.strerror} ({error.filename}){remedy}") from None
    except ValueError as error:
        raise CommandError(f"cannot use {said}: {error}") from None


@dataclass(frozen=True)
class Opened:
    """A model that is ready to run.

    Attributes:
        model: the model.
        dtype: what it computes in.
        options: XLA's options for its programs.
        tokenizer: what makes its ids.
        widen: whether there is room for its 16-bit weights in float32 too.
    """

    model: Any
    dtype: Any
    options: dict[str, Any]
    tokenizer: Bytes | Folder
    widen: bool = True


def open_model(config: Score | Generate | Serve, argv: list[str], tokenizer: str | None) -> Opened:
    """Return the model that a command names.

    Raises:
        CommandError: the device, the weights or the adapter are not what they should be.
        DataError: there is no such tokenizer.
    """
    encoder = open_tokenizer(tokenizer, config.model.weights)
    try:
        config = with_weights(config, argv)
        device = hardware.prepare(config.hardware.platform)
        roomy = 8 * count_params(config.model.config) < device.memory
        dtype = config.hardware.param_dtype
        if dtype is None and config.model.weights is None:
            dtype = DType.float32 if roomy else DType.bfloat16
        model = load_or_draw(config.model, config.seed, None if dtype is None else jnp.dtype(dtype.value))
        if config.lora is not None:
            model = adapters.load(config.lora, model)
    except (hardware.HardwareError, ValueError) as error:
        raise CommandError(str(error)) from None
    console.note(f"text is {encoder.name}")
    if config.model.weights is None:
        console.note(f"the weights are random (seed={config.seed}): model.weights=FOLDER gives trained ones")
    on_cpu = device.platform == "cpu"
    compute = config.hardware.compute_dtype or (DType.float32 if on_cpu else DType.bfloat16)
    narrow = on_cpu and model.embed.dtype != jnp.float32
    options = {**(hardware.KEEP_CASTS_IN_LOOPS if narrow else {}), **config.hardware.compiler_options}
    return Opened(model, jnp.dtype(compute.value), options, encoder, roomy)
