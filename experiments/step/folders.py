"""What a run names is found: the models that its folders of weights describe, and functions of the user's."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from experiments import configs
from experiments.commandline.console import CommandError
from experiments.runtime import own
from experiments.runtime.remote import HUB
from zoo.adapters import lora
from zoo.huggingface.config import from_hf

T = TypeVar("T", bound=Any)


def described(config: configs.Run, argv: Sequence[str] = ()) -> configs.Described:
    """Return a run of which what it names is found: the model that learns, a frozen one, and functions of the user's.

    Args:
        config: the run, as it is asked for.
        argv: the words that ask for it, which may name a model.

    Raises:
        CommandError: the weights, or the frozen model that the objective compares with, are not there, or not those of
            such a model; or a function of the user's is not, or cannot be called.
    """
    config = with_weights(config, argv)
    parts: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    try:
        frozen, sources, chosen = reference(config), own.sources(config), {}
    except own.OwnError as error:
        raise CommandError(str(error)) from None
    if isinstance(config.adapter, configs.Lora) and config.adapter.targets in (None, "auto"):
        targets = ",".join(lora.usual(config.model.config))
        parts["adapter"] = dataclasses.replace(config.adapter, targets=targets)
        chosen["adapter.targets"] = configs.Choice(targets, "the model's matrices of attention and of MLPs")
    return configs.Described(**parts, reference=frozen, sources=sources, chosen=chosen)


def with_weights(config: T, argv: Sequence[str]) -> T:
    """Return a run (or another command) with the architecture that its weights' folder describes.

    Raises:
        CommandError: there are no such weights, or they are another model's than the one asked for.
    """
    if config.model.weights is None:
        return config
    path = Path(config.model.weights).expanduser()
    fetch = "" if path.is_dir() else f". It names a folder; {HUB}ORG/NAME fetches a model by its name on the hub"
    found = _described(path, f"model.weights={path}", fetch)
    beside = "model.weights=", "model.quantise="
    if any(word.startswith("model") and not word.startswith(beside) for word in argv):
        both = config.model.config, found
        ours, theirs = ({"family": type(one).__name__, **dataclasses.asdict(one)} for one in both)
        if wrong := [f"{k}: {ours[k]} here, {theirs[k]} there" for k in ours if ours[k] != theirs.get(k, ours[k])]:
            raise CommandError(f"model.weights={path} holds another model than the one asked for: {'; '.join(wrong)}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, config=found, weights=str(path)))


def reference(config: configs.Run) -> configs.Reference | None:
    """Return the frozen model of a run; None where its objective compares with none.

    Raises:
        CommandError: its folder cannot be read, or it has another vocabulary than the model that learns; or a loss of
            the user's does not ask for what the folder is for.
        OwnError: a loss of the user's cannot be found or called.
    """
    objective, ours = config.objective, config.model.config
    if isinstance(objective, configs.Distill):
        folder, option = objective.teacher, "objective.teacher"
    elif isinstance(objective, configs.Referenced) or (
        isinstance(objective, configs.Custom) and config.paired and _compares(objective)
    ):
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


def _compares(objective: configs.Custom) -> bool:
    """Return whether a user's loss of pairs of answers asks what a frozen model makes of them."""
    compares = own.compares(objective)
    if objective.reference is not None and not compares:
        names, said = " nor ".join(f"`{name}`" for name in own.REFERENCE), objective.reference
        raise CommandError(
            f"cannot use objective.reference={said}: objective.fn={objective.fn} asks for neither {names}"
        )
    return compares


def _described(folder: Path, said: str, remedy: str = "") -> Any:
    """Return the architecture that the `config.json` of a folder describes."""
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read {said}: {error.strerror} ({error.filename}){remedy}") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"cannot use {said}: its config.json is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CommandError(f"cannot use {said}: its config.json must hold a JSON object")
    try:
        return from_hf(raw)
    except ValueError as error:
        raise CommandError(f"cannot use {said}: {error}") from None
