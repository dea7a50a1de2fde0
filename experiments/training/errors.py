"""What goes wrong in a run, where that was to be expected, in words for the user."""

import sys
from types import TracebackType

from experiments import configs
from experiments.commandline.console import CommandError, size
from experiments.data import DataError
from experiments.planning.cost import DoesNotFitError, Plan
from experiments.results.directory import Directory, DirectoryError
from experiments.runtime import manifest
from experiments.runtime.hardware import HardwareError
from experiments.runtime.memory import lacking
from experiments.runtime.own import OwnError
from experiments.runtime.signals import Stopped
from experiments.training import DivergedError
from experiments.training.checkpoints import CheckpointError
from transforms import TileError

BEFORE = (CommandError, DirectoryError, HardwareError, DataError, CheckpointError)
WITHIN = (CommandError, DirectoryError, DoesNotFitError, DivergedError, CheckpointError, TileError, OwnError, OSError)


class Errors:
    """While entered, says what goes wrong, where that was to be expected.

    Attributes:
        status: the exit status: 0 all went well, 2 it was asked for something that cannot be, 1 it failed later.
        begun: whether what was asked for is known to be possible.
        run: the run, once it is resolved.
        directory: its directory, once that is known.
        plan: what it costs, once it is known to fit.
    """

    status = 0
    begun = False
    run: configs.Resolved | None = None
    directory: Directory | None = None
    plan: Plan | None = None

    def __enter__(self) -> "Errors":
        return self

    def __exit__(self, cls: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, Stopped):
            self.status = error.status
            self._say(f"\n{error}; {self._then()}" if error.trained else f"\nerror: {error}")
            return True
        said = None if error is None else self._said(error)
        if said is None:
            return False
        self.status = 1 if self.begun else 2
        self._say(f"\nerror: {said}" if self.begun else f"error: {said}")
        return True

    def _said(self, error: BaseException) -> str | None:
        """Return an error in words for the user; None where it was not to be expected."""
        plan = self.plan
        if plan is not None and (lacks := lacking(error)) is not None:
            return (
                f"out of memory, where {size(plan.memory.total)} were planned for the step and {size(plan.headroom)} "
                f"kept free:\n{lacks}\nGive more tiles (tiling.n), a smaller batch_size or remat=full. "
                f"hardware.headroom_gib is what must stay free."
            )
        if plan is not None and isinstance(error, ValueError):
            return str(error)
        if isinstance(error, DivergedError) and self.run and self.run.on_nan is configs.OnNan["raise"]:
            return None
        if not isinstance(error, WITHIN if self.begun else BEFORE):
            return None
        return self._in_the_way(error) if isinstance(error, OSError) else str(error)

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        print(text, file=sys.stderr)

    def _then(self) -> str:
        if not (self.run and self.run.checkpoint.wanted and self.directory and self.directory.path):
            return "nothing is saved, as there are no checkpoints"
        return f"run={self.directory.path.name} goes on from there"

    def _in_the_way(self, error: OSError) -> str:
        path = None if self.directory is None else self.directory.path
        again = f"; run={path.name} then goes on from the last checkpoint" if path else ""
        return f"cannot go on: {manifest.reason(error)}. Make room or change what is in the way{again}."
