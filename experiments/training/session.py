"""What surrounds the loop: a run's results opened before it and closed behind it, and what went wrong in words."""

import contextlib
import json
import sys
import time
from collections.abc import Generator
from types import TracebackType

from experiments import configs
from experiments.commandline.console import CommandError, size
from experiments.data import DataError
from experiments.planning.cost import Plan
from experiments.planning.report import DoesNotFitError
from experiments.results import summary
from experiments.results.directory import About, Directory, DirectoryError
from experiments.results.metrics import FACTS, Progress, Recorder, open_recorder
from experiments.runtime import distributed, hardware, manifest
from experiments.runtime.distributed import DistributedError
from experiments.runtime.hardware import HardwareError
from experiments.runtime.own import OwnError
from experiments.runtime.signals import Stop, Stopped
from experiments.step.build import Programs, lacking
from experiments.training.checkpoints import CheckpointError, Saver, check_room, open_checkpoints, restore, total_bytes
from experiments.training.loop import DivergedError, Session
from transforms import TileError


@contextlib.contextmanager
def opened(
    directory: Directory, programs: Programs, plan: Plan, about: About, stop: Stop, began: float
) -> Generator[Session, None, None]:
    """Open a run's directory for as long as it is carried out; at its end, however that comes, write what it was.

    What training goes on from is in memory then.

    Args:
        directory: the run's, or where it gets one.
        programs: the run's.
        plan: what it costs.
        about: what it writes about itself.
        stop: may be told that the process is to end.
        began: the time at which the run did.
    """
    config, how = programs.config, programs.config.checkpoint
    path = about.path
    say = lambda text: progress.say(text)  # above the bar, once there is one
    for change in about.changed:
        print(f"  changed  {change}", flush=True)
    begins = directory.before is None
    restored = None if begins else restore(path, how, programs.kept_state, config.steps)
    done = None if restored is None else restored[0]
    need, saves = total_bytes(programs.kept_state), how.wanted and (done or 0) < config.steps
    if saves:
        check_room(path, how, config.steps, need)
    free = plan.left if config.hardware.platform is configs.Platform.cpu else hardware.host_memory() // 2
    checkpoints = open_checkpoints(path, how, about.told, need <= free, say, directory.written) if saves else None
    saver = Saver(how, config.steps, programs.kept, checkpoints)
    progress = Progress(config.steps, config.log_every, paired=config.paired)
    recorder, known = Recorder(None), plan.facts
    if distributed.first():
        files = {**about.files, FACTS: json.dumps(known, indent=1) + "\n"}
        recorder = open_recorder(path, files, config.save, about.told["config"], done, say)
    with checkpoints or contextlib.nullcontext():
        try:
            with distributed.answering(path.name):
                begun = programs.begun(restored, progress.say, stop.ask)
                session = Session(path, known, progress, recorder, saver, begun)
                del restored, begun  # the loop takes it from the session, and its memory is then used again
                yield session
        finally:
            progress.close()
            summary.leave(path, recorder, known, time.perf_counter() - began)


BEFORE = (CommandError, DirectoryError, DistributedError, HardwareError, DataError)
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
