"""The frozen model that an objective compares with, if it does: a reference or a teacher. No JAX here."""

import json
from pathlib import Path
from typing import Any

from experiments import configs
from zoo.accounting import forward_flops
from zoo.huggingface.config import from_hf


def path(config: configs.Run) -> str | None:
    """Return the folder of the frozen model, where one is named."""
    objective = config.objective
    if isinstance(objective, configs.Distill):
        return objective.teacher
    return objective.reference if isinstance(objective, configs.Referenced) else None


def is_start(config: configs.Run) -> bool:
    """Return whether it is a copy of what the run starts from."""
    unnamed = isinstance(config.objective, configs.Referenced) and config.objective.reference is None
    return unnamed and not isinstance(config.adapter, configs.Lora)


def is_base(config: configs.Run) -> bool:
    """Return whether it is the model that learns, without its adapter: it takes no memory of its own."""
    unnamed = isinstance(config.objective, configs.Referenced) and config.objective.reference is None
    return unnamed and isinstance(config.adapter, configs.Lora)


def flops(config: configs.Resolved) -> int:
    """Return the FLOPs of its forward pass over a step's tokens."""
    found = config.model.config if is_base(config) else described(config)
    return 0 if found is None else forward_flops(found, config.batch_size, config.seq_len)


def described(config: configs.Run) -> Any:
    """Return the architecture of the frozen model, or None where there is none with weights of its own.

    Raises:
        ValueError: its folder cannot be read, or it has another vocabulary than the model that learns.
    """
    ours, folder = config.model.config, path(config)
    if folder is None:
        return ours if is_start(config) else None
    name = "teacher" if isinstance(config.objective, configs.Distill) else "reference"
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
