"""The model of a command that only runs one: read or drawn, with its adapter, in the device's number formats."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from experiments.commandline import console
from experiments.commandline.console import CommandError
from experiments.configs import DType
from experiments.configs.commands import Generate, Score
from experiments.data.tokenizer import Bytes, Folder, open_tokenizer
from experiments.runtime import hardware
from experiments.step import program
from experiments.training.session import RunError, with_weights
from zoo import adapters, count_params


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


def open_model(config: Score | Generate, argv: list[str], tokenizer: str | None) -> Opened:
    """Return the model that a command names.

    Raises:
        CommandError: the device, the weights or the adapter are not what they should be.
        DataError: there is no such tokenizer.
    """
    encoder = open_tokenizer(tokenizer, config.model.weights)
    try:
        config = with_weights(config, argv)
        device = hardware.prepare(config.hardware.platform)
        model = _model(config, device)
        if config.lora is not None:
            model = adapters.load(config.lora, model)
    except (RunError, hardware.HardwareError, ValueError) as error:
        raise CommandError(str(error)) from None
    console.note(f"text is {encoder.name}")
    if config.model.weights is None:
        console.note(f"the weights are random (seed={config.seed}): model.weights=FOLDER gives trained ones")
    on_cpu = device.platform == "cpu"
    compute = config.hardware.compute_dtype or (DType.float32 if on_cpu else DType.bfloat16)
    narrow = on_cpu and model.embed.dtype != jnp.float32
    options = {**(hardware.KEEP_CASTS_IN_LOOPS if narrow else {}), **config.hardware.compiler_options}
    roomy = 8 * count_params(model.config) < device.memory
    return Opened(model, jnp.dtype(compute.value), options, encoder, roomy)


def _model(config: Score | Generate, device: hardware.Device) -> Any:
    import zoo

    asked = config.hardware.param_dtype
    if config.model.weights is not None:
        return zoo.load(config.model.weights, dtype=None if asked is None else jnp.dtype(asked.value))
    roomy = 8 * zoo.count_params(config.model.config) < device.memory
    return program.draw_model(config.model.config, config.seed, asked or (DType.float32 if roomy else DType.bfloat16))
