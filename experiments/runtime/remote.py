"""Files that are elsewhere: `gs://` and `s3://` by fsspec, models by their name on the Hugging Face hub, `hf://ORG/NAME`.

What a run reads is brought here once for each version of it, and read from here. What a run writes is written here and
copied there: after each checkpoint, and at its end. A store of objects cannot rename a folder, so that of a checkpoint
the manifest goes last and is removed first: one without it was cut short, and is not brought back.
"""

import dataclasses
import hashlib
import json
import posixpath
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, TypeVar

from experiments import configs
from experiments.commandline.console import CommandError, install
from experiments.runtime.manifest import FILE, reason, user_cache

T = TypeVar("T")
HUB = "hf://"
WRITTEN = ("out", "cache")  # options whose folders are written to
# Of a model's files on the hub; templates stand in a folder, too.
WEIGHTS = ["*.json", "*.safetensors", "*.model", "*.txt"]
KINDS = [*WEIGHTS, "*.jinja"]


class RemoteError(CommandError):
    """Something that is elsewhere cannot be read or written, in words for the user."""


def is_remote(path: str | None) -> bool:
    """Return whether a path names something that is not on this machine's disks."""
    return path is not None and "://" in path


def fetched(config: T, prefix: str = "") -> tuple[T, dict[str, configs.Choice]]:
    """Return a configuration whose inputs are all here, and the exact versions of what the hub has by their options.

    Raises:
        RemoteError: something is not there, cannot be reached, or an extra is missing.
    """
    new: dict[str, Any] = {}
    exact: dict[str, configs.Choice] = {}
    for field in dataclasses.fields(config):  # ty: ignore[invalid-argument-type]
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            new[field.name], more = fetched(value, f"{name}.")
            exact |= more
        elif field.metadata.get("path") and is_remote(value):
            if field.name in WRITTEN:
                raise RemoteError(f"cannot write to {name}={value}: give a folder on this machine, and copy it there")
            if value.startswith(HUB) and value.count("/") == 3:
                path, revision = _from_hub(name, value)
                exact[name] = configs.Choice(revision, "the revision that the hub has now")
            else:
                path = _copied(name, value)
            new[field.name] = str(path)
    return (dataclasses.replace(config, **new) if new else config), exact  # ty: ignore[invalid-argument-type]


def _from_hub(option: str, url: str) -> tuple[Path, str]:
    """Return the folder of a model's files, and its name with the revision that they are of."""
    repository, _, revision = url.removeprefix(HUB).partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise RemoteError(f"{option}={url} needs huggingface_hub: {install('hf')}") from None
    try:
        inner = [f"*/{kind}" for kind in WEIGHTS]
        found = snapshot_download(repository, revision=revision or None, allow_patterns=KINDS, ignore_patterns=inner)
    except Exception as error:  # one of a dozen, of three libraries
        raise RemoteError(
            f"cannot fetch {option}={url} from the hub: {reason(error).rstrip('.')}. Where the hub can be reached (and "
            f"after `hf auth login`, if the model asks who you are), `hf download {repository} --local-dir FOLDER` "
            f"gets its files; bring that folder here and give {option}=FOLDER."
        ) from error
    return Path(found), f"{HUB}{repository}@{Path(found).name}"


def _copied(option: str, url: str) -> Path:
    """Return the copy of a file, a folder or what a pattern matches; it is made where this version has none yet."""
    files, root = _open(url, option)
    try:
        single, pattern = files.isfile(root), any(mark in root for mark in "*?[")
        base = posixpath.dirname(root) if single or pattern else root.rstrip("/")
        names = [root] if single else files.glob(root) if pattern else files.find(root)
        found = {posixpath.relpath(name, base): files.ukey(name) for name in sorted(names)}
        if not found or any(name.startswith("..") for name in found):
            raise RemoteError(f"cannot read {option}={url}: there is nothing")
        digest = hashlib.sha256(json.dumps([url, found]).encode()).hexdigest()
        folder = user_cache() / "remote" / digest[:24]
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                for name in found:
                    (whole := Path(made) / "whole" / name).parent.mkdir(parents=True, exist_ok=True)
                    files.get_file(posixpath.join(base, name), str(whole))
                if not folder.exists():
                    (Path(made) / "whole").rename(folder)
    except RemoteError:
        raise
    except Exception as error:  # each kind of store has its own
        raise RemoteError(f"cannot read {option}={url}: {reason(error)}") from error
    return folder / posixpath.basename(root) if single or pattern else folder


def _open(url: str, option: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise RemoteError(f"{option}={url} needs fsspec: {install('remote')}") from None
    try:
        return url_to_fs(url)
    except ImportError as error:
        raise RemoteError(f"{option}={url} needs what reads it: {install('remote')} ({reason(error)})") from None
    except Exception as error:
        raise RemoteError(f"cannot use {option}={url}: {reason(error)}") from error


class Mirror:
    """A run's directory here, and the one elsewhere that it is to be like.

    Args:
        out: where runs are, elsewhere.
        run: the run's name.

    Attributes:
        url: the run's directory there.
        folder: the one here.

    Raises:
        RemoteError: the run has no name, or there is no reaching `out`.
    """

    def __init__(self, out: str, run: str | None):
        if run is None:
            raise RemoteError(f"cannot number a run in out={out}: others may be doing so there. Give run=NAME")
        self.url = f"{out.rstrip('/')}/{run}"
        self.folder = user_cache() / "runs" / hashlib.sha256(out.encode()).hexdigest()[:16] / run
        self._files, self._root = _open(self.url, "out")
        self._sent: dict[str, tuple[int, int]] = {}
        self._one_at_a_time = threading.Lock()

    def pull(self) -> None:
        """Make the directory here what the one there is, if there is one: its records and its checkpoints.

        Raises:
            RemoteError: it cannot be read.
        """
        try:
            self._files.invalidate_cache()
            there = sorted(self._files.find(self._root)) if self._files.exists(self._root) else []
            names = [posixpath.relpath(name, self._root) for name in there]
            whole = {name.split("/")[1] for name in names if _is_manifest(name)}
            if not names:
                return
            for folder in (self.folder / "checkpoints").glob("*"):
                if folder.name not in whole or not self._is_there(folder):
                    shutil.rmtree(folder, ignore_errors=True)
            for name in names:
                wanted = "/" not in name or (name.startswith("checkpoints/") and name.split("/")[1] in whole)
                here = self.folder / name
                if wanted and not (here.exists() and name.startswith("checkpoints/")):
                    here.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(posixpath.join(self._root, name), str(here))
        except Exception as error:
            raise RemoteError(f"cannot read the run at {self.url}: {reason(error)}") from error

    def push(self) -> None:
        """Make the directory there what the one here is. What begins with a dot at its top stays here.

        Raises:
            RemoteError: it cannot be written; what it had before may be partly replaced, a checkpoint never is.
        """
        try:
            with self._one_at_a_time:
                self._push()
        except Exception as error:
            raise RemoteError(
                f"cannot write the run to {self.url}: {reason(error)}. It is whole in {self.folder}; given the same "
                f"out= and run= on a machine that can, training goes on from what was copied before."
            ) from error

    def _push(self) -> None:
        steps = {path.name for path in (self.folder / "checkpoints").glob("[0-9]*")}
        self._files.invalidate_cache()
        checkpoints = posixpath.join(self._root, "checkpoints")
        for path in self._files.ls(checkpoints, detail=False) if self._files.exists(checkpoints) else ():
            if posixpath.basename(path.rstrip("/")) not in steps:
                self._remove(path)
        for step in sorted(steps, key=int):
            folder = self.folder / "checkpoints" / step
            if not self._is_there(folder):
                self._remove(posixpath.join(checkpoints, step))
                for file in sorted(_files(folder), key=lambda file: file.name == FILE):
                    self._send(file)
        for file in _files(self.folder):
            said = file.stat()
            name, state = str(file.relative_to(self.folder)), (said.st_size, said.st_mtime_ns)
            if not name.startswith("checkpoints/") and self._sent.get(name) != state:
                self._send(file)
                self._sent[name] = state

    def _is_there(self, folder: Path) -> bool:
        """Return whether a checkpoint is there whole, and is the one that is here."""
        path = f"{self._root}/checkpoints/{folder.name}/{FILE}"
        here = folder / FILE
        return here.exists() and self._files.exists(path) and self._files.cat_file(path) == here.read_bytes()

    def _remove(self, folder: str) -> None:
        if self._files.exists(posixpath.join(folder, FILE)):
            self._files.rm_file(posixpath.join(folder, FILE))
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)

    def _send(self, file: Path) -> None:
        there = posixpath.join(self._root, file.relative_to(self.folder).as_posix())
        self._files.makedirs(posixpath.dirname(there), exist_ok=True)
        self._files.put_file(str(file), there)


def run_folder(out: str, run: str) -> Path:
    """Return the directory of a run here: of one that is elsewhere, what it has come to there.

    Raises:
        RemoteError: it cannot be read.
    """
    if not is_remote(out):
        return Path(out) / run
    mirror = Mirror(out, run)
    mirror.pull()
    return mirror.folder


def here(config: configs.Run) -> tuple[configs.Run, dict[str, configs.Choice], Mirror | None]:
    """Return a run that reads and writes here, what `fetched` says, and what copies it to where it is to be.

    Raises:
        RemoteError: something that it reads is not there, it has no name, or its directory there cannot be read.
    """
    mirror = None
    if is_remote(config.out):
        mirror = Mirror(config.out, config.run)
        mirror.pull()
        config = dataclasses.replace(config, out=str(mirror.folder.parent))
    return *fetched(config), mirror


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder, but for those at its top, and in folders there, that begin with a dot."""
    return sorted(file for path in folder.glob("[!.]*") for file in (path, *path.rglob("*")) if file.is_file())


def _is_manifest(name: str) -> bool:
    return name.startswith("checkpoints/") and name.count("/") == 2 and name.endswith(f"/{FILE}")
