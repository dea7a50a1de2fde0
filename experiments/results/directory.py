"""A run's directory: a new one, or that of a run to go on with; and what a run writes about itself there."""

import fcntl
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.commandline import overrides
from experiments.commandline.overrides import RUN
from experiments.runtime import distributed, manifest
from experiments.runtime.remote import Mirror, RemoteError


class DirectoryError(RuntimeError):
    """A directory that a run cannot use, in words for the user."""


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
        if path.is_dir() and (before := overrides.read(path)) is not None:
            return cls(path, path, before, mirror)
        if path.exists() and not (path.is_dir() and all(name.startswith(".") for name in os.listdir(path))):
            raise DirectoryError(f"there is something at {path} that is no run: choose another run=NAME, or remove it")
        return cls(path, path, mirror=mirror)

    def check(self) -> None:
        """Refuse what can be known once all processes have joined.

        Raises:
            DirectoryError: several processes, and a directory that each would have a copy of.
        """
        if self.mirror is not None and distributed.several():
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

    def open(self, about: dict[str, Any], said: str) -> Path:
        """Make the directory, write what the run is, and return the path.

        Args:
            about: the overrides that describe the run in full, and the configuration, for when it goes on.
            said: the same for people, as YAML.

        Raises:
            DirectoryError: it cannot be made or written to.
        """
        try:
            path = self._make()
            self.hold()
            if distributed.first():
                _write(path / RUN, json.dumps(about, indent=1))
                _write(path / "config.yaml", said)
        except OSError as error:
            raise DirectoryError(f"cannot write to {self.path or self.base.parent}: {manifest.reason(error)}") from None
        return path

    def hold(self) -> None:
        """Keep other runs out of the directory, if it is there, until it is left or this process ends.

        Raises:
            DirectoryError: another run is in it.
        """
        if self._held is not None or self.path is None or not self.path.is_dir() or not distributed.first():
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
        """Let others in again, and leave all where it is to be.

        Raises:
            RemoteError: it could not be copied there; where another error ends the run, that is raised and this said.
        """
        if self._held is None:
            return
        try:
            if self.mirror is not None:
                self.mirror.push()
                print(f"  copied to {self.mirror.url}")
        except RemoteError as late:
            if error is None:
                raise
            print(f"  warning: {late}", file=sys.stderr)
        finally:
            os.close(self._held)
            self._held = None

    def _make(self) -> Path:
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            return self.path
        number = self._make_numbered() if distributed.first() else 0
        self.path = self._numbered(distributed.agreed(number))
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


def _write(path: Path, text: str) -> None:
    """Write whole or not at all."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.replace(path)
