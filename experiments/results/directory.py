"""A run's directory: a new one, or that of a run to go on with; and what a run writes about itself there.

That is `run.json`: its overrides, by which it goes on, its configuration and hashes of what it reads, by which it is
told what has changed. No JAX here, unless there are several processes.
"""

import dataclasses
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments import configs
from experiments.commandline import console, schema, spelling
from experiments.commandline.overrides import with_overrides
from experiments.runtime import hardware, manifest
from experiments.runtime.remote import Mirror, RemoteError

RUN = "run.json"  # in a run's directory and in each checkpoint: its overrides and its configuration
WHEREABOUTS = ("run", "out", "distributed", "compare")  # where a run is and what is shown of it, not what it is
PINNED = ("steps", "batch_size", "seq_len", "optimizer", "optimizer.learning_rate", "eval.every", "eval.batches")
PINNED += ("hardware.param_dtype", "hardware.compute_dtype")
PINNED += ("model.weights", "objective.reference", "objective.teacher", "data.tokenizer")  # the hub's, by revision


class DirectoryError(RuntimeError):
    """A directory that a run cannot use, in words for the user."""


@dataclass(frozen=True)
class About:
    """What a run writes about itself.

    Attributes:
        path: where.
        told: the overrides that describe it in full, its configuration and hashes, as JSON holds them.
        files: that, and the same for people as YAML, as the text of files by their names.
        changed: what differs from before, where it goes on.
    """

    path: Path
    told: dict[str, Any]
    files: Mapping[str, str]
    changed: Sequence[str] = ()


@dataclass
class Directory:
    """Where a run's results go.

    Attributes:
        path: the directory; None until `open` has made one, if it is to get a number.
        before: what an earlier part of this run wrote about itself; None if this one starts it.
        mirror: copies it to where it is to be, if that is elsewhere.
    """

    base: Path
    path: Path | None
    before: dict[str, Any] | None = None
    mirror: Mirror | None = None
    _held: int | None = None
    _new: bool = False

    @classmethod
    def find(cls, out: str, run: str | None, model: str, mirror: Mirror | None = None) -> "Directory":
        """Return the directory that a run will use; nothing is made yet.

        Args:
            out: where runs are.
            run: its name; None: it gets the model's and a number.
            model: the model's name.
            mirror: copies it to where it is to be, if that is elsewhere; `out` is then made here.

        Raises:
            DirectoryError: there is something else where the run should go.
        """
        base = Path(out).expanduser()
        if mirror is not None:
            base.mkdir(parents=True, exist_ok=True)
        there = next(path for path in (base / (run or ""), base, *base.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "one may not write there" if there.is_dir() else "that is no folder"
            raise DirectoryError(f"cannot use out={out}: {there}: {why}. Give another out=FOLDER")
        if run is None:
            return cls(base / model, None)
        path = base / run
        if path.is_dir() and (before := read(path)) is not None:
            return cls(path, path, before, mirror)
        if path.exists() and not (path.is_dir() and all(name.startswith(".") for name in os.listdir(path))):
            raise DirectoryError(f"there is something at {path} that is no run: choose another run=NAME, or remove it")
        return cls(path, path, mirror=mirror)

    def check(self) -> None:
        """Refuse what can be known once all processes have joined.

        Raises:
            DirectoryError: several processes, and a directory that each would have a copy of.
        """
        if self.mirror is not None and hardware.several_processes():
            raise DirectoryError(
                f"{self.mirror.url} is copied from this disk, and each of several processes would have a part "
                f"of it: give out= a folder that all of them see"
            )

    def written(self) -> None:
        """Copy what there is to where it is to be; what hinders that may pass, and is said."""
        try:
            if self.mirror is not None:
                self.mirror.push()
        except RemoteError as error:
            print(f"  warning: {error}", file=sys.stderr)

    def open(
        self, config: configs.Run, argv: Sequence[str], chosen: Mapping[str, configs.Choice], **hashes: Any
    ) -> About:
        """Make the directory; return what the run writes about itself, and what of it was otherwise before.

        Args:
            config: the run.
            argv: its overrides.
            chosen: what was chosen for the user.
            hashes: of `data` that it reads, and of the other `sources` that it names (`experiments.runtime.own`).

        Raises:
            DirectoryError: it cannot be made, or another run is in it.
        """
        try:
            path = self._make()
            self.hold()
        except OSError as error:
            raise DirectoryError(f"cannot write to {self.path or self.base.parent}: {manifest.reason(error)}") from None
        told = {"overrides": pinned(argv, chosen), "config": plain(config), **hashes}
        files = {RUN: json.dumps(told, indent=1), "config.yaml": dump(config, argv)}
        return About(path, told, files, () if self.before is None else changed(self.before, told))

    def hold(self) -> None:
        """Keep other runs out of the directory, if it is there, until it is left or this process ends.

        Raises:
            DirectoryError: another run is in it.
        """
        if self._held is not None or self.path is None or not self.path.is_dir() or not hardware.first_process():
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise DirectoryError(
                f"another process is carrying out the run at {self.path}: wait until it has ended, stop it, or give "
                f"another run=NAME"
            ) from None
        except OSError:  # a file system that knows no locks
            pass
        self._held = handle

    def __enter__(self) -> "Directory":
        """Keep other runs out until the end; a directory that is not there yet, from `open` on.

        Raises:
            DirectoryError: another run is in it.
        """
        self.hold()
        return self

    def __exit__(self, _: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let others in again, and leave all where it is to be; of a run that never began, nothing.

        Raises:
            RemoteError: it could not be copied there; where another error ends the run, that is raised and this said.
        """
        if self._held is None:
            return
        abandoned = self.path if self._new and self.path and not any(self.path.glob("*")) else None
        try:
            if self.mirror is not None and abandoned is None:
                self.mirror.push()
                print(f"  copied to {self.mirror.url}")
        except RemoteError as late:
            if error is None:
                raise
            print(f"  warning: {late}", file=sys.stderr)
        finally:
            if abandoned is not None and abandoned.is_dir():
                abandoned.rmdir()
            os.close(self._held)
            self._held = None

    def _make(self) -> Path:
        self._new = self.path is None or not self.path.exists()
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            return self.path
        number = self._make_numbered() if hardware.first_process() else 0
        self.path = self._numbered(hardware.agreed(number))
        return self.path

    def _make_numbered(self) -> int:
        for number in range(1, 10**6):
            try:
                self._numbered(number).mkdir(parents=True)
            except FileExistsError:
                continue
            return number
        raise DirectoryError(f"there are too many runs at {self.base}-*: give run=NAME")

    def _numbered(self, number: int) -> Path:
        return self.base.with_name(f"{self.base.name}-{number}")


def resumed(
    overrides: Sequence[str], out: str, folder: Callable[[str, str], Path] = lambda out, run: Path(out) / run
) -> list[str]:
    """Return the overrides of a run that `run=NAME` goes on with, replaced by those that are given now.

    Args:
        overrides: the command line's.
        out: where run directories are, unless the command line says.
        folder: returns a run's directory, given `out` and its name.

    Raises:
        ConfigError: the run's own record of its overrides cannot be read, nor that of a checkpoint.
    """
    said = dict(override.split("=", 1) for override in overrides if "=" in override)
    if "run" not in said:
        return list(overrides)
    before = read(folder(spelling.expanded(said.get("out", out)), said["run"]))
    if before is None:
        return list(overrides)
    kept = [word for word in before["overrides"] if not word.startswith("distributed.")]
    return with_overrides(kept, overrides)


def read(folder: Path) -> dict[str, Any] | None:
    """Return what a run wrote about itself in its directory, or else in its newest checkpoint; None if it never did.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        saved = [path for path in folder.glob(f"checkpoints/*/{RUN}") if path.parent.name.isdecimal()]
    except OSError as error:
        raise schema.ConfigError(f"cannot look for a run at {folder}: {error.strerror}") from None
    files = [folder / RUN, *sorted(saved, key=lambda path: -int(path.parent.name))]
    problems = []
    for file in files:
        try:
            found = json.loads(file.read_text())
            words, config, sources = found["overrides"], found["config"], found.get("sources", {})
            if isinstance(words, list) and all(isinstance(word, str) for word in words) and isinstance(config, dict):
                return {"overrides": words, "config": config, "data": found.get("data"), "sources": sources}
            problems.append(f"{file} is no record of a run")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{file} cannot be read ({error})")
    if problems:
        remedy = "Copy one back, or give another run=NAME"
        raise schema.ConfigError(f"cannot go on with the run at {folder}: {'; '.join(problems[:2])}. {remedy}")
    return None


def changed(before: dict[str, Any], about: dict[str, Any]) -> list[str]:
    """Return what differs from before: the configuration, hashes of what is read: data, weights, the user's own files.

    Args:
        before: what `read` returned.
        about: what the run writes about itself now.
    """
    drop = lambda values: {key: value for key, value in values.items() if key not in WHEREABOUTS}
    lines = differences(drop(before["config"]), drop(json.loads(json.dumps(about["config"]))))
    if about["data"] is not None and before["data"] not in (None, about["data"]):
        lines.append("data: what it reads is not what it was: another text, tokenizer or split")
    for key, source in about["sources"].items():
        if None not in (source, known := before["sources"].get(key)) and source != known:
            file, weights = "the file that the function is in is not what it was", "the weights are not what they were"
            lines.append(f"{key}: {file if key.endswith('.fn') else weights}")
    return lines


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the differences between two configurations, `key: before -> now` for each."""
    lines = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {old} -> {new}")
    return lines


def plain(value: Any) -> Any:
    """Return dataclasses and enumerations as the plain values that YAML and JSON hold; the kind of a part is named."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = isinstance(value, configs.Data | configs.Objective | configs.Optimizer | configs.Adapter)
        fields = [field.name for field in dataclasses.fields(value) if "beside" not in field.metadata]
        made = {name: plain(getattr(value, name)) for name in fields}
        return {"kind": type(value).__name__, **made} if named else made
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.value if isinstance(value, configs.StrEnum) else value


def dump(config: configs.Run, argv: Sequence[str]) -> str:
    """Return a configuration as YAML, under the command that made it."""
    import yaml

    command = f"# {console.called('config')} {shlex.join(argv)}".rstrip().replace("\n", "\n# ")
    return f"{command}\n{yaml.safe_dump(plain(config), sort_keys=False)}"


def pinned(overrides: Sequence[str], chosen: Mapping[str, configs.Choice]) -> list[str]:
    """Return overrides with what was chosen for the user added, where another device would choose otherwise."""
    return [*overrides, *(f"{key}={choice.value}" for key, choice in chosen.items() if key in PINNED)]
