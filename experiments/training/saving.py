"""When a run is saved, what of it, and how it goes on from there."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import configs
from experiments.commandline.console import CommandError
from experiments.planning.cost import Plan, bytes_of
from experiments.runtime import distributed, hardware
from experiments.runtime.numbers import size
from experiments.step.build import Programs
from experiments.training.checkpoints import Checkpoints

AGREE_AFTER = 10  # steps: from then on, it is known how long one takes


class Saver:
    """Writes a run's checkpoints when they are due.

    Args:
        programs: the run's, which say what of its state has to be kept.
        checkpoints: where they go; None where there are none.

    Attributes:
        seconds: how long training waited for the last one, until it is asked for.
    """

    def __init__(self, programs: Programs, checkpoints: Checkpoints | None):
        self._how, self._steps, self._kept = programs.config.checkpoint, programs.config.steps, programs.kept
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
        if not distributed.several():
            return passed >= 60 * how.minutes
        # The clocks of processes differ: the first one says once how many steps it will be.
        if self._every is None and step == self._first + AGREE_AFTER:
            self._every = distributed.agreed(max(1, round(60 * how.minutes * (step - self._first) / passed)))
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


def restore(
    programs: Programs, path: Path, about: dict[str, Any], plan: Plan, say: Callable[[str], None]
) -> tuple[int, Any] | None:
    """Return the step and the state that a run goes on from; None: its beginning.

    Raises:
        CheckpointError: every checkpoint is damaged, or the newest has other arrays.
    """
    checkpoints = open_checkpoints(programs, path, about, plan, say)
    try:
        found = checkpoints.restore(programs.kept(programs.state))
    finally:
        checkpoints.close()
    steps = programs.config.steps
    if found is None:
        say(f"  {path} has no checkpoint yet: from the beginning")
    elif found[0] >= steps:
        say(f"  {path} has all its {found[0]} steps; give steps=MORE for more")
    else:
        say(f"  {path} goes on after step {found[0]} of {steps}")
    return found


def open_checkpoints(
    programs: Programs,
    path: Path,
    about: dict[str, Any],
    plan: Plan,
    say: Callable[[str], None],
    written: Callable[[], None] = lambda: None,
) -> Checkpoints:
    """Return what writes a run's checkpoints, and calls `written` after each: in the background where that fits.

    Raises:
        CommandError: there is no room on the disk for one.
    """
    how, need = programs.config.checkpoint, bytes_of(programs.kept(programs.state))
    there = sum(name.name.isdecimal() for name in (path / "checkpoints").glob("*"))
    more = max(1, min(how.keep + 1, programs.config.steps) - there)  # the one that is written stands beside those kept
    room = shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free
    if how.wanted and room < more * need:
        kept = f"checkpoint.keep={how.keep}, and one more while it is written"
        several = "" if more == 1 else f", {more} of them {size(more * need)} ({kept})"
        raise CommandError(
            f"a checkpoint takes {size(need)}{several}, and there is room for {size(room)} at {path}: "
            f"free some, keep fewer, give out=FOLDER on another disk, or checkpoint=none."
        )
    on_host = programs.config.hardware.platform is configs.Platform.cpu
    free = plan.available - plan.memory.total - plan.headroom if on_host else hardware.host_memory() // 2
    return Checkpoints(
        path / "checkpoints",
        about,
        keep=how.keep,
        keep_every=how.keep_every,
        verify=how.verify,
        background=need <= free if how.background is None else how.background,
        warn=lambda text: say(f"  warning: {text}"),
        written=written,
    )
