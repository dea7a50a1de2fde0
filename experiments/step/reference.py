"""The frozen model that an objective compares with, if it does: a reference or a teacher. No JAX here."""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from experiments import configs
from zoo.huggingface.config import from_hf

Origin = Enum("Origin", ["folder", "start", "base"])
Origin.__doc__ = """Where a frozen model is from: a folder; a copy of what the run starts from; or the model that
learns, without its adapter, which takes no memory of its own."""


@dataclass(frozen=True)
class Reference:
    """A frozen model.

    Attributes:
        origin: where it is from.
        config: its architecture.
        path: its folder, where it has one.
    """

    origin: Origin
    config: Any
    path: str | None = None


def find(config: configs.Run) -> Reference | None:
    """Return the frozen model of a run; None where its objective compares with none.

    Raises:
        ValueError: its folder cannot be read, or it has another vocabulary than the model that learns.
    """
    objective, ours = config.objective, config.model.config
    if isinstance(objective, configs.Distill):
        return Reference(Origin.folder, _described(objective.teacher, "teacher", ours), objective.teacher)
    if not isinstance(objective, configs.Referenced):
        return None
    if objective.reference is not None:
        return Reference(Origin.folder, _described(objective.reference, "reference", ours), objective.reference)
    return Reference(Origin.base if isinstance(config.adapter, configs.Lora) else Origin.start, ours)


def _described(folder: str, name: str, ours: Any) -> Any:
    try:
        found = from_hf(json.loads((Path(folder).expanduser() / "config.json").read_text()))
    except OSError as error:
        raise ValueError(f"cannot read objective.{name}={folder}: {error.strerror} ({error.filename})") from None
    except ValueError as error:
        raise ValueError(f"cannot use objective.{name}={folder}: {error}") from None
    if found.vocab_size != ours.vocab_size:
        raise ValueError(
            f"cannot use objective.{name}={folder}: it has a vocabulary of {found.vocab_size}, the model that learns "
            f"one of {ours.vocab_size}. Both must have the same."
        )
    return found
