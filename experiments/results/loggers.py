"""Where else a run's records go: TensorBoard and Weights & Biases, each an extra that is imported only if asked for."""

import importlib
import importlib.util
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from experiments import configs
from experiments.commandline import console
from experiments.results.metrics import Record

PACKAGES = {"tensorboard": ("tensorboardX", "tb"), "wandb": ("wandb", "wandb")}


class Logger(Protocol):
    """Something that takes a run's records as they come."""

    def add(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's directory; what came later than the step that a run goes on from is hidden."""

    def __init__(self, directory: Path, after: int | None = None):
        again = {} if after is None else {"purge_step": after + 1}
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(str(directory / "tensorboard"), **again)

    def add(self, record: Record) -> None:
        for name, value in _measured(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run, the same one after a resumption; `WANDB_MODE=offline` keeps it in the run's directory."""

    def __init__(self, directory: Path, about: dict[str, Any]):
        wandb = importlib.import_module("wandb")
        file = directory / "wandb-id.txt"
        if not file.exists():
            file.write_text(secrets.token_hex(8))
        words = {"dir": str(directory), "name": directory.name, "id": file.read_text(), "resume": "allow"}
        self._run: Any = wandb.init(**words, config=about)

    def add(self, record: Record) -> None:
        self._run.log(_measured(record), step=record.step)

    def close(self) -> None:
        self._run.finish()


def check(save: configs.Save) -> None:
    """Raise a CommandError if a logger that was asked for is not installed."""
    for option, (package, extra) in PACKAGES.items():
        if getattr(save, option) and importlib.util.find_spec(package) is None:
            raise console.CommandError(f"save.{option}=true needs the package {package}: {console.install(extra)}")


def open_loggers(directory: Path, save: configs.Save, about: dict[str, Any], after: int | None = None) -> list[Logger]:
    """Return the loggers that are asked for, ready to take the records after a step; `about` is the run in words."""
    found: list[Logger] = []
    if save.tensorboard:
        found.append(TensorBoard(directory, after))
    if save.wandb:
        found.append(Wandb(directory, about))
    return found


def _measured(record: Record) -> dict[str, Any]:
    found = asdict(record)
    found |= found.pop("extra") or {}
    return {name: value for name, value in found.items() if value is not None and name != "step"}
