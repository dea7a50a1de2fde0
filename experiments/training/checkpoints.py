"""Checkpoints: everything that a step changes, written by orbax while training goes on, whole or not at all.

    checkpoints/30/state/          one file per array and shard, its plain bytes
    checkpoints/30/run.json        what made it: overrides, configuration, the shape and type of each array
    checkpoints/30/manifest.json   the size and the SHA-256 of every other file

A directory named by a step is complete: it is written under another name, and renamed when all of it is on the disk.

Memory: arrays are written from where they are, uncompressed, so that saving itself copies nothing. Written in the
background on a CPU, the saved arrays stay until they are on the disk beside those of the next steps: one more copy of
the state; on other devices that copy is in the host's memory. Otherwise at most `STREAM_GB` leave a device at a time.
`Saver` says when one is due.
"""

import functools
import json
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import configs
from experiments.commandline.console import CommandError, size
from experiments.runtime import hardware, manifest

FOLDER = "checkpoints"  # in a run's directory
RUN = "run.json"
STREAM_GB = 1
logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells all of its work, and every error that it raises


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, in words for the user."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made with the first one.
        about: goes into each one, as JSON.
        keep: how many of the newest stay.
        keep_every: those whose step is a multiple of this stay as well.
        verify: hash every file, and read all of them before what they hold is used; otherwise their sizes tell.
        background: return from `save` as soon as the arrays may be overwritten.
        warn: is told, in a line of text, about each checkpoint that cannot be used.
        written: is called when one is on the disk, by the thread that wrote it.
    """

    def __init__(
        self,
        folder: Path,
        about: dict[str, Any],
        *,
        keep: int = 2,
        keep_every: int | None = None,
        verify: bool = True,
        background: bool = True,
        warn: Callable[[str], None] = print,
        written: Callable[[], None] = lambda: None,
    ):
        self._folder, self._about, self._warn = folder.absolute(), about, warn
        self._keep, self._keep_every, self._background, self._written = keep, keep_every, background, written
        self._verify, self._primary = verify, hardware.first_process()
        stream = None if background else STREAM_GB
        # A file per array: OCDBT, and compression, would hold a compressed copy of all arrays in memory.
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False,
            use_compression=False,
            save_device_host_concurrent_gb=stream,
            restore_concurrent_gb=STREAM_GB,
        )
        self._orbax = ocp.AsyncCheckpointer(handler)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None

    def steps(self) -> list[int]:
        """Return the steps of which there is a checkpoint, in order."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(int(path.name) for path in found if path.name.isdecimal())

    def save(self, step: int, state: Any) -> None:
        """Write a checkpoint; the one before is finished first.

        Raises:
            CheckpointError: it, or the one before, could not be written. Those that were there still are.
        """
        self.wait()
        arrays = {name: _plain(leaf) for name, leaf in named(state).items()}
        saving = self._folder / f".saving-{step}"
        try:
            if self._primary:
                self._folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(saving, ignore_errors=True)
            self._orbax.save(saving / "state", args=ocp.args.PyTreeSave(arrays))
        except Exception as error:
            raise self._failed(step, error) from error
        self._pending = self._thread.submit(self._commit, step, saving, describe(state))
        if not self._background:
            self.wait()

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Finish the last checkpoint.

        Raises:
            CheckpointError: it could not be written; where another error ends the run, that is raised, this said.
        """
        try:
            self.wait()
        except CheckpointError as late:
            if error is None:
                raise
            self._warn(str(late))
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def restore(self, template: Any) -> tuple[int, Any] | None:
        """Return (step, state) of the newest checkpoint whose files are as they were written; None if there is none.

        Args:
            template: a tree of arrays or abstract arrays; what is read gets their shardings, whatever it had before.

        Raises:
            CheckpointError: every checkpoint is damaged, or the newest has other arrays than the template.
        """
        step = self._newest_sound()
        if step is None:
            return None
        path = self._folder / str(step)
        _check_arrays(path, json.loads((path / RUN).read_text())["arrays"], template)
        wanted = {name: _plain(leaf) for name, leaf in named(template).items()}
        args = {name: _restore_args(leaf) for name, leaf in wanted.items()}
        read = self._orbax.restore(path / "state", args=ocp.args.PyTreeRestore(item=wanted, restore_args=args))
        return step, _put(template, read)

    def _newest_sound(self) -> int | None:
        """Return the newest step whose files are sound, None if there never was one. One process looks for all."""
        step, damaged = self._look() if self._primary else (0, [])
        step, lost = hardware.agreed(step), hardware.agreed(len(damaged))
        if step < 0 and lost:
            whys = "; ".join(damaged)
            raise CheckpointError(
                f"every checkpoint in {self._folder} is damaged: {whys}. Nothing is begun anew in their place: copy "
                f"one back, remove that folder to begin from the start, or give another run=NAME."
            )
        return None if step < 0 else step

    def _look(self) -> tuple[int, list[str]]:
        """Return the newest sound step (-1: there is none), and what is wrong with the others.

        Damaged ones newer than it are set aside, as training will reach their steps again. Where none is sound all stay
        as they are, so that this is found as often as somebody looks.
        """
        damaged = {path: "set aside" for path in self._folder.glob(".damaged-*")}
        for name in (path for path in self._folder.glob(".*-*") if path.name.startswith((".saving-", ".deleting-"))):
            shutil.rmtree(name, ignore_errors=True)  # left by a run that was killed
        for step in reversed(self.steps()):
            path = self._folder / str(step)
            why = manifest.damage(path, self._verify)
            if why is None:
                for bad in (bad for bad in damaged if bad.name.isdecimal()):
                    aside = self._folder / f".damaged-{bad.name}"
                    self._warn(
                        f"the checkpoint of step {bad.name} is damaged: {damaged[bad]}. It is set aside as {aside}"
                    )
                    shutil.rmtree(aside, ignore_errors=True)
                    bad.rename(aside)
                return step, []
            damaged[path] = why
        return -1, [f"that of step {path.name.removeprefix('.damaged-')} ({why})" for path, why in damaged.items()]

    def _commit(self, step: int, saving: Path, arrays: dict[str, Any]) -> None:
        """Wait until orbax has written all; then say what it is, hash it, give it its name and drop older ones."""
        try:
            self._orbax.wait_until_finished()
            if self._primary:
                (saving / RUN).write_text(json.dumps({**self._about, "step": step, "arrays": arrays}, indent=1))
                manifest.write(saving, self._verify)
                final = self._folder / str(step)
                if final.exists():  # this step has been here before, and went on from an older one
                    self._drop(final)
                saving.rename(final)
                manifest.sync(self._folder)
                self._prune()
                self._written()
        except Exception as error:
            raise self._failed(step, error) from error

    def _prune(self) -> None:
        old = self.steps()[: -self._keep]
        for step in old:
            if not (self._keep_every and step % self._keep_every == 0):
                self._drop(self._folder / str(step))

    def _drop(self, path: Path) -> None:
        away = self._folder / f".deleting-{path.name}"
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        if self._primary:
            for path in self._folder.glob(f".saving-{step}*"):
                shutil.rmtree(path, ignore_errors=True)
        steps = self.steps()
        last = f"The one of step {steps[-1]} is whole" if steps else "There is no earlier one"
        return CheckpointError(
            f"cannot save the checkpoint of step {step} in {self._folder}: {manifest.reason(error)}. {last}. "
            f"Make room or change what is in the way, and give the same run=NAME to go on from it."
        )


def named(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree, abstract ones included, by their dotted names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): leaf for path, leaf in leaves if _is_array(leaf)}


def describe(tree: Any) -> dict[str, str]:
    """Return the type and shape of each array by name, such as `float32[2,3]`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}".replace(" ", "") for name, leaf in named(tree).items()}


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _plain(leaf: Any) -> Any:
    """Return a random key as the numbers it is made of, which is what a file can hold."""
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    return jax.eval_shape(jax.random.key_data, leaf) if abstract else jax.random.key_data(leaf)


def _generator(leaf: Any) -> Any:
    """Return which generator a random key, abstract or not, belongs to."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def _restore_args(leaf: Any) -> ocp.ArrayRestoreArgs:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _put(template: Any, read: dict[str, Any]) -> Any:
    """Return the template with its arrays replaced by those of the same names."""
    found = iter(read[name] for name in named(template))

    def replace(leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        array = next(found)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(array, impl=_generator(leaf))
        return array

    return jax.tree.map(replace, template)


def _compare(wanted: dict[str, str], there: dict[str, str]) -> str:
    """Return every difference between the arrays that are wanted and those that are there, in words."""
    problems = [f"{name} is not there" for name in wanted if name not in there]
    problems += [f"{name} is there, and not wanted" for name in there if name not in wanted]
    both = [name for name in wanted if name in there and wanted[name] != there[name]]
    problems += [f"{name} is {there[name]} there, {wanted[name]} here" for name in both]
    more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
    return "; ".join(problems[:8]) + more


AGREE_AFTER = 10  # steps: from then on, it is known how long one takes


class Saver:
    """Writes a run's checkpoints when they are due.

    Args:
        how: when.
        steps: of the run.
        kept: returns what of its state has to be kept.
        checkpoints: where they go; None where there are none.

    Attributes:
        seconds: how long training waited for the last one, until it is asked for.
    """

    def __init__(
        self, how: configs.Checkpoint, steps: int, kept: Callable[[Any], Any], checkpoints: Checkpoints | None
    ):
        self._how, self._steps, self._kept = how, steps, kept
        self._checkpoints, self._every, self.seconds = checkpoints, None, 0.0

    def start(self, first: int) -> None:
        """Begin to count, after step `first`."""
        self._first, self._has_saved, self._saved = first, first > 0, time.perf_counter()

    def due(self, step: int) -> bool:
        """Return whether a step is followed by a checkpoint."""
        how = self._how
        if self._checkpoints is None:
            return False
        if step == self._steps and (how.last or self._has_saved):
            return True
        if how.every is not None:
            return step % how.every == 0
        if how.minutes is None:
            return False
        passed = time.perf_counter() - self._saved
        if not hardware.several_processes():
            return passed >= 60 * how.minutes
        # The clocks of processes differ: the first one says once how many steps it will be.
        if self._every is None and step == self._first + AGREE_AFTER:
            self._every = hardware.agreed(max(1, round(60 * how.minutes * (step - self._first) / passed)))
        return self._every is not None and step % self._every == 0

    def save(self, step: int, state: Any, *, wait: bool) -> None:
        """Write a checkpoint, and return as soon as training may go on; or, to `wait`, when it is on the disk.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        if self._checkpoints is None:
            return
        began = time.perf_counter()
        self._checkpoints.save(step, self._kept(state))
        if wait:
            self._checkpoints.wait()
        self._has_saved, self._saved = True, time.perf_counter()
        self.seconds = self._saved - began


def restore(path: Path, how: configs.Checkpoint, template: Any, steps: int) -> tuple[int, Any] | None:
    """Return the step and the state that a run of `steps` at `path` goes on from, and say so; None: its beginning.

    Raises:
        CheckpointError: every checkpoint is damaged, or the newest has other arrays than the template.
    """
    say = functools.partial(print, flush=True)
    warn = lambda text: say(f"  warning: {text}")
    with Checkpoints(path / FOLDER, {}, verify=how.verify, warn=warn) as checkpoints:
        found = checkpoints.restore(template)
    if found is None:
        say(f"  {path} has no checkpoint yet: from the beginning")
    elif found[0] >= steps:
        say(f"  {path} has all its {found[0]} steps; give steps=MORE for more")
    else:
        say(f"  {path} goes on after step {found[0]} of {steps}")
    return found


def check_begun(path: Path | None, template: Any, steps: int) -> None:
    """Raise where the newest checkpoint of a run cannot be gone on from; what is damaged `restore` finds.

    Raises:
        CheckpointError: it has other arrays than the template, or more steps than are asked for.
    """
    done = [] if path is None else [int(one.name) for one in (path / FOLDER).glob("*") if one.name.isdecimal()]
    if path is None or not done:
        return
    newest = max((step for step in done if manifest.intact(path / FOLDER / str(step), RUN)), default=None)
    if newest is None:
        return
    there = path / FOLDER / str(newest)
    _check_arrays(there, json.loads((there / RUN).read_text())["arrays"], template)
    if newest > steps:
        raise CheckpointError(
            f"{path} has done {newest} steps, and steps={steps} asks for fewer: leave that out, or give another "
            f"run=NAME"
        )


def _check_arrays(path: Path, there: dict[str, str], template: Any) -> None:
    if problem := _compare(describe(template), there):
        raise CheckpointError(
            f"the checkpoint at {path} has other arrays than this run: {problem}. Leave out what changes them, or "
            f"give another run=NAME"
        )


def check_room(path: Path, how: configs.Checkpoint, steps: int, need: int) -> None:
    """Raise a CommandError unless a run's directory has room for the checkpoints that it will have at a time.

    Args:
        path: the directory, or where it will be.
        how: how many are kept.
        steps: of the run.
        need: bytes of each.
    """
    folder = path / FOLDER
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"checkpoints go to {folder}, and that is no folder: move it, or give another run=NAME.")
    there = sum(name.name.isdecimal() for name in folder.glob("*"))
    more = max(1, min(how.keep + 1, steps) - there)  # the one that is written stands beside those kept
    room = shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free
    if room < more * need:
        kept = f"checkpoint.keep={how.keep}, and one more while it is written"
        several = "" if more == 1 else f", {more} of them {size(more * need)} ({kept})"
        raise CommandError(
            f"a checkpoint takes {size(need)}{several}, and there is room for {size(room)} at {path}: "
            f"free some, keep fewer, give out=FOLDER on another disk, or checkpoint=none."
        )


def total_bytes(template: Any) -> int:
    """Return the bytes of a tree's arrays, abstract ones included; of what devices share, the whole."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in named(template).values())


def open_checkpoints(
    path: Path,
    how: configs.Checkpoint,
    about: dict[str, Any],
    fits: bool,
    say: Callable[[str], None],
    written: Callable[[], None],
) -> Checkpoints:
    """Return what writes a run's checkpoints.

    Args:
        path: the run's directory.
        how: how many are kept, and how they are written.
        about: goes into each one, as JSON.
        fits: whether a copy of the state may be in memory while it is written: then that is done in the background.
        say: is told about each one that cannot be used.
        written: is called after each.
    """
    return Checkpoints(
        path / FOLDER,
        about,
        keep=how.keep,
        keep_every=how.keep_every,
        verify=how.verify,
        background=fits if how.background is None else how.background,
        warn=lambda text: say(f"  warning: {text}"),
        written=written,
    )
