"""Where else a run's records go: TensorBoard and Weights & Biases, each an extra that is imported only if asked for."""

import importlib
import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from experiments import configs
from experiments.metrics import Record

PACKAGES = {"tensorboard": ("tensorboardX", "tb"), "wandb": ("wandb", "wandb")}


class Logger(Protocol):
    """Something that takes a run's records as they come."""

    def add(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's directory."""

    def __init__(self, directory: Path):
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(str(directory / "tensorboard"))

    def add(self, record: Record) -> None:
        for name, value in _measured(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run; `WANDB_MODE=offline` keeps it in the run's directory."""

    def __init__(self, directory: Path, config: configs.Resolved):
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(dir=str(directory), name=directory.name, config=asdict(config))

    def add(self, record: Record) -> None:
        self._run.log(_measured(record), step=record.step)

    def close(self) -> None:
        self._run.finish()


def missing(save: configs.Save) -> str | None:
    """Return what to do about the first logger that was asked for and is not installed."""
    for option, (package, extra) in PACKAGES.items():
        if getattr(save, option) and importlib.util.find_spec(package) is None:
            return f"save.{option}=true needs the package {package}: pip install -e '.[{extra}]'"
    return None


def open_loggers(directory: Path, config: configs.Resolved) -> list[Logger]:
    """Return the loggers that the configuration asks for, ready to take records."""
    found: list[Logger] = []
    if config.save.tensorboard:
        found.append(TensorBoard(directory))
    if config.save.wandb:
        found.append(Wandb(directory, config))
    return found


def _measured(record: Record) -> dict[str, Any]:
    return {k: v for k, v in asdict(record).items() if v is not None and k != "step"}
