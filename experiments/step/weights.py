"""A model that is only run, not trained: its weights in the device's number formats, and its tokenizer."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.commandline import console
from experiments.commandline.console import CommandError
from experiments.configs import DType
from experiments.configs.commands import Generate, Score, Serve
from experiments.data.tokenizer import GENERATION, Bytes, Folder, open_tokenizer, read_json
from experiments.runtime import hardware, meshes
from experiments.runtime.own import with_weights
from experiments.step.build import load_or_draw
from transforms.sharding import AXES, make_mesh
from zoo import adapters, count_params
from zoo.engine.sampling import Sampling

# What a folder may say of how tokens are picked.
PICKS = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
# What else changes which tokens are picked, in transformers, and with which value it does not.
UNREAD = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "top_h"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id"), None),
    **dict.fromkeys(("forced_eos_token_id", "sequence_bias", "stop_strings", "exponential_decay_length_penalty"), None),
}


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
        mesh = _mesh(config, device)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            model = _model(config, device)
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
    return Opened(model, jnp.dtype(compute.value), options, encoder, _roomy(config, device))


def read_sampling(folder: str | None) -> dict[str, Any]:
    """Return how the `generation_config.json` of a folder, if it has one, says that tokens are picked.

    Where it says `"do_sample": false`, the most likely token is.

    Raises:
        DataError: the file is no JSON object.
        CommandError: it says what cannot be.
    """
    if folder is None:
        return {}
    said = read_json(file := Path(folder).expanduser() / GENERATION)
    found: dict[str, Any] = {name: said[name] for name in PICKS if said.get(name) is not None}
    if unread := [
        f"{name}={said[name]!r}" for name, idle in UNREAD.items() if said.get(name) not in (None, idle, [], {})
    ]:
        console.note(f"{GENERATION} also says {', '.join(unread)}, which is not done here: texts may be others")
    if wrong := [f"{name}={one!r}" for name, one in found.items() if type(one) not in (int, float)]:
        raise CommandError(f"cannot sample as {file} says: {', '.join(wrong)} must be numbers")
    if found.get("top_k") == 0:  # as transformers says that there is no such limit
        del found["top_k"]
    if said.get("do_sample") is False:
        found = {name: one for name, one in found.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    try:
        Sampling(**found)
    except ValueError as error:
        raise CommandError(f"{file}: {error}") from None
    return found


def show_sampling(said: Mapping[str, Any]) -> str:
    """Return how tokens are picked, for people."""
    return f"{GENERATION} says {', '.join(f'{name}={one:g}' for name, one in said.items())}"


def open_drafter(path: str | None) -> Any:
    """Return the smaller model in a folder, or None.

    Raises:
        CommandError: there is none that can be read.
    """
    import zoo

    try:
        return None if path is None else zoo.load(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot draft with drafter={path}: {error}") from None


def _mesh(config: Score | Generate | Serve, device: hardware.Device) -> jax.sharding.Mesh | None:
    """Return the devices that a model is cut over, if there are several.

    Raises:
        CommandError: there are not so many, or an adapter would lie elsewhere.
    """
    found = jax.devices()
    size = len(found) if config.mesh.model == -1 else config.mesh.model
    if size > len(found):
        raise CommandError(f"cannot cut a model over mesh.model={size}: there are {len(found)} devices ({device.name})")
    if size > 1 and config.lora is not None:
        raise CommandError("cannot apply lora= on a mesh: merge it first, with convert.py lora=FOLDER")
    return None if size == 1 else make_mesh(data=1, model=size, devices=found[:size])


def _model(config: Score | Generate | Serve, device: hardware.Device) -> Any:
    dtype = config.hardware.param_dtype
    if dtype is None and config.model.weights is None:
        dtype = DType.float32 if _roomy(config, device) else DType.bfloat16
    lies = meshes.where({letter: axes for letter, axes in AXES.items() if letter != "D"})
    made = load_or_draw(config.model, config.seed, None if dtype is None else jnp.dtype(dtype.value), **lies)
    return meshes.placed(made, meshes.abstract(made, lies["axes"]))


def _roomy(config: Score | Generate | Serve, device: hardware.Device) -> bool:
    """Return whether there is room for a model's weights in float32 beside themselves."""
    return 8 * count_params(config.model.config) < device.memory
