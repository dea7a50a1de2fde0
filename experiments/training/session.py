"""A run's results while it is carried out: its directory opened, what it goes on from, and what is left at its end."""

import contextlib
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import configs
from experiments.commandline import usage
from experiments.commandline.console import CommandError
from experiments.data import batches
from experiments.planning import table
from experiments.planning.cost import Plan
from experiments.results import plots, summary
from experiments.results.directory import Directory
from experiments.results.loggers import open_loggers
from experiments.results.metrics import Progress, Recorder
from experiments.runtime import distributed, own
from experiments.runtime.numbers import size
from experiments.step.build import OutOfMemoryError, Programs, out_of_memory
from experiments.training.loop import Session
from experiments.training.meter import Meter
from experiments.training.saving import Saver, open_checkpoints, restore


@contextlib.contextmanager
def opened(
    directory: Directory,
    programs: Programs,
    plan: Plan,
    source: Any,
    words: Sequence[str],
    argv: Sequence[str],
    began: float,
) -> Generator[Session, None, None]:
    """Open a run's directory for as long as it is carried out; at its end, however that comes, write what it was.

    Args:
        directory: the run's, or where it gets one.
        programs: the run's.
        plan: what it costs.
        source: what it reads.
        words: the overrides that describe it in full.
        argv: those that the user gave.
        began: the time at which the run did.

    Raises:
        CommandError: what went wrong within, in words for the user.
    """
    config = programs.config
    progress = Progress(config.steps, config.log_every)
    hashes = {"data": batches.fingerprint(source), "sources": own.sources(config)}
    about = {"overrides": list(words), "config": usage.plain(config), **hashes}
    restored = _restored(directory, programs, about, plan, progress)
    path = directory.open(about, usage.dump(config, argv))
    known = table.facts(plan, config)
    checkpoints = None
    if config.checkpoint.wanted:
        checkpoints = open_checkpoints(programs, path, about, plan, progress.say, directory.written)
    recorder = _recorder(config, known, path, progress, restored and restored[0])
    try:
        with _in_words(plan, path.name):
            meter = Meter(config, plan.flops, source, recorder, progress, path)
            yield Session(path, known, progress, recorder, meter, Saver(programs, checkpoints), restored)
    finally:
        progress.close()
        summary.leave(path, recorder, known, time.perf_counter() - began)
        if checkpoints is not None:
            checkpoints.close()


def _restored(
    directory: Directory, programs: Programs, about: dict[str, Any], plan: Plan, progress: Progress
) -> tuple[int, Any] | None:
    """Return the step and the state that a run goes on from, and say what it has that it had not; None: it begins."""
    if directory.path is None or directory.before is None:
        return None
    for change in directory.changes(about):
        progress.say(f"  changed  {change}")
    return restore(programs, directory.path, about, plan, progress.say)


@contextlib.contextmanager
def _in_words(plan: Plan, run: str) -> Generator[None, None, None]:
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
    except jax.errors.JaxRuntimeError as error:
        if distributed.several():
            distributed.abandon(error, run)
        raise


def _recorder(
    config: configs.Resolved, known: dict[str, Any], path: Path, progress: Progress, done: int | None
) -> Recorder:
    """Return what takes the records; `done` is the step after which the run goes on."""
    if not distributed.first():
        return Recorder(None)
    plots.remember(path, known)
    recorder = Recorder(path, open_loggers(path, config.save, usage.plain(config), done), done)
    if done is not None and len(recorder.records) <= done:
        progress.say(
            f"  warning: metrics.jsonl has {len(recorder.records)} of the {done + 1} records up to step {done}"
        )
    return recorder
