"""The loop: dispatch a step, read the metrics of the one before, so that the device never waits for Python."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.data.batches import Repeats, Source
from experiments.data.prefetch import Prefetch
from experiments.results.metrics import Progress, Record, Recorder, describe
from experiments.runtime import hardware, meshes
from experiments.runtime.signals import Stop, Stopped
from experiments.step.build import Programs, inputs
from experiments.training.meter import HeldOut, Meter
from experiments.training.saving import Saver
from experiments.training.tracing import Tracer
from transforms.step import State


@dataclass
class Session:
    """What the loop writes to.

    Attributes:
        path: the run's directory.
        known: what its pictures and its last words need of its plan.
        progress: what is shown meanwhile.
        recorder: takes the record of each step.
        meter: makes it.
        saver: writes checkpoints when they are due.
        restored: the step and the state that the run goes on from; None if it begins.
    """

    path: Path
    known: dict[str, Any]
    progress: Progress
    recorder: Recorder
    meter: Meter
    saver: Saver
    restored: tuple[int, Any] | None


def train(programs: Programs, source: Source | Repeats, session: Session, stop: Stop) -> Any:
    """Train from the beginning or the restored step on, measuring what is held out; return the trained model.

    Raises:
        DivergedError: a loss is not finite; every record up to it has been written.
        Stopped: the process was told to end, which `stop` says after each step; everything is saved.
        OutOfMemoryError: the evaluation does not compile.
        CheckpointError: a checkpoint could not be written.
    """
    steps, meter, saver = programs.config.steps, session.meter, session.saver
    held_out = HeldOut(programs, source)
    stop.ask()
    frozen = programs.init_frozen()
    stop.ask()
    first, state = _resumed(programs, session) or _begun(programs, session, held_out, frozen, stop)
    session.progress.start(first)
    feed = _feed(source, first, steps)
    tracer = Tracer(programs.config.profile, session.path, session.progress.say)
    evaluate = lambda record: held_out.measure(programs.measured(state), frozen, record)
    try:
        stop.begin()
        pending = None
        meter.start()
        saver.start(first)
        for step in range(first + 1, steps + 1):
            tracer.begin(step)
            began = time.perf_counter()
            batch = feed.take()
            waited = time.perf_counter() - began
            state, metrics = programs.train(inputs(batch, frozen), state)
            if pending is not None:
                meter.record(*pending)
            pending = step, metrics, waited, saver.seconds
            told, measured, saver.seconds = stop.told(step), held_out.due(step), 0.0
            save = told is not None or saver.due(step)
            if measured or save or tracer.ends(step):
                meter.record(*pending, evaluate=evaluate if measured else None)
                if tracer.ends(step):
                    jax.block_until_ready(state)
                    tracer.close()
                if save:
                    saver.save(step, state, wait=told is not None)
                pending = None
                meter.start()
            if told:
                raise Stopped(f"stopped by {told.name} after step {step} of {steps}", told, trained=True)
        return programs.measured(state)
    finally:
        tracer.close()
        feed.close()


def _feed(source: Source | Repeats, first: int, steps: int) -> Prefetch:
    """Return the batches of the steps after `first`, made while steps are computed."""
    put = meshes.feeder(source.batch_size)  # the mesh is set in this thread alone
    return Prefetch(lambda step: put(lambda rows: source.batch(step, rows).arrays), first, steps)


def _resumed(programs: Programs, session: Session) -> tuple[int, State] | None:
    """Return the step and the state that a run goes on from; None if it begins."""
    if session.restored is None:
        return None
    (step, state), session.restored = session.restored, None  # its memory is about to be reused
    return step, programs.completed(state)


def _begun(programs: Programs, session: Session, held_out: HeldOut, frozen: Any, stop: Stop) -> tuple[int, State]:
    """Return step 0 and the state before training, whose held-out loss is the first record."""
    began, weights = time.perf_counter(), programs.config.model.weights
    model = jax.block_until_ready(programs.init())
    origin = "drawn" if weights is None else f"read from {weights}"
    session.progress.say(f"  weights {origin} in {time.perf_counter() - began:.1f} s")
    memory, peak = hardware.used_memory()
    before = held_out.measure(model, frozen, Record(step=0, memory_bytes=memory, peak_memory_bytes=peak), stop.ask)
    session.recorder.add(before)
    what = "pairs" if programs.config.paired else "text"
    session.progress.say(f"  held-out {what} before training: {describe(before)}")
    return 0, programs.init_state(model)
