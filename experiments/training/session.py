"""What surrounds the loop: a run's results opened, what went wrong in words, what is left at the end."""

import contextlib
import functools
import json
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments import configs
from experiments.commandline.console import CommandError, size
from experiments.commandline.overrides import About
from experiments.data.corpus import DataError
from experiments.planning.cost import Plan
from experiments.planning.report import DoesNotFitError
from experiments.results import plots
from experiments.results.directory import Directory, DirectoryError
from experiments.results.metrics import Progress, Recorder, describe, finite, open_recorder
from experiments.runtime import distributed, hardware, manifest
from experiments.runtime.distributed import DistributedError
from experiments.runtime.hardware import HardwareError
from experiments.runtime.own import OwnError
from experiments.runtime.signals import Stopped
from experiments.step.build import OutOfMemoryError, Programs, out_of_memory
from experiments.training.checkpoints import CheckpointError, Saver, check_room, open_checkpoints, restore, total_bytes
from experiments.training.loop import DivergedError, Session
from transforms import TileError
from zoo.adapters import lora


@contextlib.contextmanager
def opened(
    directory: Directory, programs: Programs, plan: Plan, about: About, began: float
) -> Generator[Session, None, None]:
    """Open a run's directory for as long as it is carried out; at its end, however that comes, write what it was.

    Args:
        directory: the run's, or where it gets one.
        programs: the run's.
        plan: what it costs.
        about: what it writes about itself.
        began: the time at which the run did.

    Raises:
        CommandError: what went wrong within, in words for the user.
    """
    config, how = programs.config, programs.config.checkpoint
    say, restored = functools.partial(print, flush=True), None
    for change in about.changed:
        say(f"  changed  {change}")
    if directory.path is not None and directory.before is not None:
        restored = restore(directory.path, how, programs.kept_state, config.steps, say)
    done = None if restored is None else restored[0]
    need, saves = total_bytes(programs.kept_state), how.wanted and (done or 0) < config.steps
    if saves:
        check_room(directory.path or directory.base.parent, how, config.steps, need)
    path = directory.open(about.told, about.text)
    free = plan.left if config.hardware.platform is configs.Platform.cpu else hardware.host_memory() // 2
    progress = Progress(config.steps, config.log_every, paired=config.paired)
    recorder, known = Recorder(None), plan.facts
    if distributed.first():
        plots.remember(path, known)
        recorder = open_recorder(path, config.save, about.told["config"], done, progress.say)
    into = path, how, about.told, need <= free, progress.say, directory.written
    checkpoints = open_checkpoints(*into) if saves else None
    saver = Saver(how, config.steps, programs.kept, checkpoints)
    session = Session(path, known, progress, recorder, saver, restored)
    del restored  # the loop takes it from the session, whose memory it then is
    with checkpoints or contextlib.nullcontext():
        try:
            with distributed.answering(path.name), _in_words(plan):
                yield session
        finally:
            progress.close()
            leave(path, recorder, known, time.perf_counter() - began)


@contextlib.contextmanager
def _in_words(plan: Plan) -> Generator[None, None, None]:
    """Say what goes wrong within in words for the user, as a `CommandError`."""
    try:
        with out_of_memory():
            yield
    except OutOfMemoryError as error:
        raise CommandError(
            f"out of memory, where {size(plan.memory.total)} were planned for the step and {size(plan.headroom)} kept "
            f"free:\n{error}\nGive more tiles (tiling.n), a smaller batch_size or remat=full. "
            f"hardware.headroom_gib is what must stay free."
        ) from None
    except ValueError as error:
        raise CommandError(str(error)) from error


def save_weights(model: Any, config: configs.Resolved, directory: Path) -> list[str]:
    """Write the trained weights where they are wanted, any adapter merged and also by itself; return the folders."""
    if not config.save.final:
        return []
    folders = ["weights/", "adapter/"] if config.adapted else ["weights/"]
    model = distributed.gathered(model)
    if not distributed.first():
        return folders
    import zoo
    from experiments.data.tokenizer import copy_tokenizer
    from zoo import adapters

    if config.adapted:
        adapters.save(model, directory / "adapter")
        model = lora.merge(model)
    zoo.save(model, directory / "weights", source=config.model.weights)
    if not isinstance(config.data, configs.Tokens):  # of ids nobody says what they are
        copy_tokenizer(config.data.tokenizer, directory / "weights")
    return folders


def leave(directory: Path, recorder: Recorder, known: dict[str, Any], seconds: float) -> None:
    """Close the records, and of a run that has trained write the summary and draw the pictures, however it ended."""
    if not distributed.first():
        return
    actions = [recorder.close]
    if any(record.loss is not None for record in recorder.records):
        actions.append(lambda: _summarise(directory, recorder, known, seconds))
        actions.append(lambda: plots.draw(directory, recorder.records, known))
    for action in actions:
        try:
            action()
        except OSError as error:  # what ended the run may be the very same
            print(f"warning: cannot write to {directory}: {manifest.reason(error)}", file=sys.stderr)


def _summarise(directory: Path, recorder: Recorder, known: dict[str, Any], seconds: float) -> None:
    """Write summary.json: what one would compare between runs."""
    steps = [record for record in recorder.records if record.loss is not None]
    speeds = sorted(record.tokens_per_second for record in steps if record.tokens_per_second is not None)
    held_out = [record for record in recorder.records if record.held_out_loss is not None]
    summary = {
        "params": known["params"],
        "flops_per_step": known["flops"],
        "planned_bytes": known["total"],
        "planned_bytes_untiled": known["total_untiled"],
        "peak_bytes": hardware.used_memory()[1],
        "steps": len(steps),
        "seconds": round(seconds, 2),
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
        "held_out_bits_per_byte_before": held_out[0].held_out_bits_per_byte if held_out else None,
        "held_out_bits_per_byte_after": held_out[-1].held_out_bits_per_byte if held_out else None,
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
    }
    (directory / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n")


def words(directory: Path, recorder: Recorder, known: dict[str, Any], saved: list[str], seconds: float) -> str:
    """Return what is said at the end: how well it went, and where everything is.

    Args:
        directory: the run's.
        recorder: has its records.
        known: what the plan says of it (`Plan.facts`).
        saved: the folders of weights.
        seconds: how long it took.
    """
    held_out = [record for record in recorder.records if record.held_out_loss is not None]
    lines = []
    if len(held_out) > 1:
        what = "pairs" if known["paired"] else "text"
        before, after = (describe(held_out[i], known["paired"]) for i in (0, -1))
        lines.append(f"  held-out {what} before: {before}, after: {after}")
    lines.append(f"  peak memory {size(hardware.used_memory()[1])}, {seconds:.0f} s altogether")
    if (other := plots.beside(recorder.records, known["weights"])) and known["process"]:
        lines.append(f"  of it about {size(other)} of Python, JAX and its compiler")
        lines.append(f"  and {size(known['total'])} as planned of a step")
    files = ", ".join(["metrics.jsonl", "metrics.csv", "summary.json", "config.yaml", "*.png", *saved])
    return "\n".join([*lines, f"Everything is in {directory}/: {files}"])


BEFORE = (CommandError, DirectoryError, DistributedError, HardwareError, DataError)
WITHIN = (CommandError, DirectoryError, DoesNotFitError, DivergedError, CheckpointError, TileError, OwnError, OSError)


class Errors:
    """While entered, says what goes wrong, where that was to be expected.

    Attributes:
        status: the exit status: 0 all went well, 2 it was asked for something that cannot be, 1 it failed later.
        begun: whether what was asked for is known to be possible.
        run: the run, once it is resolved.
        directory: its directory, once that is known.
    """

    status = 0
    begun = False
    run: configs.Resolved | None = None
    directory: Directory | None = None

    def __enter__(self) -> "Errors":
        return self

    def __exit__(self, cls: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, Stopped):
            self.status = error.status
            self._say(f"\n{error}; {self._then()}" if error.trained else f"\nerror: {error}")
            return True
        if not isinstance(error, WITHIN if self.begun else BEFORE):
            return False
        if isinstance(error, DivergedError) and self.run and self.run.on_nan is configs.OnNan["raise"]:
            return False
        self.status = 1 if self.begun else 2
        said = self._in_the_way(error) if isinstance(error, OSError) else error
        self._say(f"\nerror: {said}" if self.begun else f"error: {said}")
        return True

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
