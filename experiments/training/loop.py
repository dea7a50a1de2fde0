"""The loop, what is open while it runs, and what it measures.

It dispatches a step, then reads the metrics of the one before: no device waits for Python.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import configs
from experiments.data.batches import Prefetch, Repeats, Source
from experiments.data.rows import Batch
from experiments.planning.cost import Plan
from experiments.results import summary
from experiments.results.directory import About, Directory
from experiments.results.metrics import FACTS, Progress, Record, Recorder, bits_per_byte, open_recorder
from experiments.runtime import hardware
from experiments.runtime.signals import Stop, Stopped
from experiments.step.build import Begun, Programs
from experiments.step.loss import inputs
from experiments.training import DivergedError
from experiments.training.checkpoints import Saver, check_room, open_checkpoints, restore, total_bytes


@dataclass
class Session:
    """What the loop writes to.

    Attributes:
        path: the run's directory.
        known: what its pictures and its last words need of its plan.
        progress: what is shown meanwhile.
        recorder: takes the record of each step.
        saver: writes checkpoints when they are due.
        begun: what training goes on from, until the loop takes it.
    """

    path: Path
    known: dict[str, Any]
    progress: Progress
    recorder: Recorder
    saver: Saver
    begun: Begun | None

    def begin(self, record: Record) -> None:
        """Record and show what was measured before training."""
        self.recorder.add(record)
        self.progress.begin(record)

    def take(self) -> Begun:
        """Return what training goes on from, of which nothing is kept here: its memory is about to be used again."""
        assert self.begun is not None
        begun, self.begun = self.begun, None
        return begun


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
    if hardware.first_process():
        files = {**about.files, FACTS: json.dumps(known, indent=1) + "\n"}
        recorder = open_recorder(path, files, config.save, about.told["config"], done, say)
    with checkpoints or contextlib.nullcontext():
        try:
            with hardware.answering(path.name):
                begun = programs.begun(restored, progress.say, stop.ask)
                session = Session(path, known, progress, recorder, saver, begun)
                del restored, begun  # the loop takes it from the session, and its memory is then used again
                yield session
        finally:
            progress.close()
            summary.leave(path, recorder, known, time.perf_counter() - began)


def train(programs: Programs, source: Source | Repeats, session: Session, stop: Stop) -> Any:
    """Train from the step on that a run begins with, measuring what is held out; return the model at its end.

    Raises:
        DivergedError: a loss is not finite; every record up to it has been written.
        Stopped: the process was told to end, which `stop` says after each step; everything is saved.
        CheckpointError: a checkpoint could not be written.
    """
    steps, saver, carry_out, put = programs.config.steps, session.saver, programs.train, programs.feeder
    tracer = Tracer(programs.config.profile, session.path, session.progress.say)
    held_out, meter = HeldOut(programs, source), Meter(programs, source, session)
    stop.ask()
    first, state, frozen, memory = session.take()
    if memory is not None:
        record = Record(step=0, memory_bytes=memory[0], peak_memory_bytes=memory[1])
        session.begin(held_out.measure(state.model, frozen, record, stop.ask))
    session.progress.start(first)
    feed = Prefetch(lambda step: put(lambda rows: source.batch(step, rows).arrays), first, steps)
    evaluate = lambda record: held_out.measure(programs.measured(state), frozen, record)
    try:
        stop.begin()
        pending = None
        meter.start()
        saver.start(first)
        for step in range(first + 1, steps + 1):
            tracer.begin(step)
            began = time.perf_counter()
            batch = next(feed)
            waited = time.perf_counter() - began
            state, metrics = carry_out(inputs(batch, frozen), state)
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


class Tracer:
    """Traces the steps that the configuration names.

    Args:
        config: which steps.
        directory: the run's; the trace goes below it.
        say: is told where the trace is and what opens it.
    """

    def __init__(self, config: configs.Profile, directory: Path, say: Callable[[str], None]):
        self._first, self._last = config.span or (0, 0)
        self._folder, self._say, self._active = directory / "profile", say, False

    def begin(self, step: int) -> None:
        """Start, if this is the first step that is traced; call it before the step."""
        if step == self._first:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._active = True

    def ends(self, step: int) -> bool:
        """Return whether this is the last step that is traced: it must have been computed before `close`."""
        return self._active and step == self._last

    def close(self) -> None:
        """Write the trace, if there is one."""
        if not self._active:
            return
        self._active = False
        jax.profiler.stop_trace()
        found = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._say(
            f"  steps {self._first} to {self._last} are traced: open {found[-1] if found else self._folder} at "
            f"https://ui.perfetto.dev,\n  or `pip install xprof` and `xprof {self._folder}`"
        )


BESIDE = ("cross_entropy", "accuracy", "margin")  # what an objective may measure that records have a place for
MEASURED = {True: ("loss", "accuracy"), False: ("loss", "objective")}  # of what is held out: of pairs, and of text
MOST_SKIPPED = 100  # updates in a row that on_nan=skip leaves out


class HeldOut:
    """The loss of what is held out, every batch weighted by the tokens that count.

    Args:
        programs: the run's, of which the evaluation is compiled.
        source: its data.
    """

    def __init__(self, programs: Programs, source: Source | Repeats):
        self._evaluate, self._source, self._put = programs.evaluate, source, programs.feeder
        self._every, self._steps = programs.config.eval.every, programs.config.steps
        self._batches = source.held_out_batches(configs.chosen(programs.config.eval.batches))
        self._paired = programs.config.paired

    def due(self, step: int) -> bool:
        """Return whether it is measured after a step."""
        return step == self._steps or bool(self._every and step % self._every == 0)

    def measure(self, model: Any, frozen: Any, record: Record, ask: Callable[[], None] = lambda: None) -> Record:
        """Return a record with what a model was measured at; `ask` is called before each batch, and may raise."""
        count, total = 0.0, dict[str, float]()
        for index in range(self._batches):
            ask()
            batch = self._source.held_out_batch(index, self._batches)
            found = self._evaluate(inputs(self._put(_rows_of(batch)), frozen if self._paired else None), model)
            for name in found.keys() & MEASURED[self._paired]:
                total[name] = total.get(name, 0.0) + float(found[name]) * batch.weight
            count += batch.weight
        mean = {name: one / (count or 1) for name, one in total.items()}
        loss = mean.get("loss", 0.0)
        return dataclasses.replace(
            record,
            held_out_loss=loss,
            held_out_objective=mean.get("objective"),
            held_out_bits_per_byte=bits_per_byte(loss, self._source.bytes_per_token),
            held_out_accuracy=mean.get("accuracy"),
        )


def _rows_of(batch: Batch) -> Callable[[slice], tuple[np.ndarray, ...]]:
    return lambda rows: tuple(array[rows] for array in batch.arrays)


class Meter:
    """Makes a record of what each step returned, and finds out that a run has diverged.

    Args:
        programs: the run's.
        source: its data.
        session: takes the records and shows them, and where the batch of a step without a loss is kept.
    """

    def __init__(self, programs: Programs, source: Source | Repeats, session: Session):
        self._config, self._flops, self._source = programs.config, session.known["flops"], source
        self._recorder, self._progress, self._directory = session.recorder, session.progress, session.path
        tflops = programs.config.hardware.peak_tflops or hardware.peak_tflops()
        self._peak = None if tflops is None else tflops * 1e12 * jax.device_count()
        self._skipped, self._rested = 0, False
        self._left_out = sum(not _finite(record) for record in session.recorder.records if record.step)
        self._rates = programs.rates
        self.start()

    def start(self) -> None:
        """Begin to measure the time that the next step takes."""
        self._clock = time.perf_counter()

    def record(
        self,
        step: int,
        metrics: dict[str, Any],
        waited: float,
        saving: float = 0.0,
        evaluate: Callable[[Record], Record] | None = None,
    ) -> None:
        """Wait for a step, record and show it; where `evaluate` is given, with what it adds.

        Args:
            step: which it is.
            metrics: what it returned, on its way to this machine.
            waited: seconds for its batch.
            saving: seconds before it in which training could not go on.
            evaluate: adds what is held out, where the step has a loss.

        Raises:
            DivergedError: its loss is no finite number, and its update was not left out.
        """
        record = self._read(step, metrics, waited, saving)
        finite = _finite(record)
        record = evaluate(record) if evaluate is not None and finite else record
        self._recorder.add(record)
        diverged, said = (False, self._at_rest(record)) if finite else self._not_finite(record)
        self._skipped = 0 if finite else self._skipped
        self._progress.show(record, None if diverged else said)
        if diverged:
            raise DivergedError(said)

    def _read(self, step: int, metrics: dict[str, Any], waited: float, saving: float) -> Record:
        """Return the record of a step, once it has been computed."""
        loss = float(metrics["loss"])  # waits for the step
        beside = {name: float(metrics[name]) for name in BESIDE if name in metrics}
        extra = {name: float(value) for name, value in metrics.items() if name not in ("loss", "grad_norm", *BESIDE)}
        nats = beside.get("cross_entropy", None if isinstance(self._config.objective, configs.Custom) else loss)
        memory, peak = hardware.used_memory()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return Record(
            step=step,
            loss=loss,
            bits_per_byte=None if nats is None else bits_per_byte(nats, self._source.bytes_per_token),
            **beside,
            extra=extra or None,
            grad_norm=float(metrics["grad_norm"]),
            learning_rate=float(self._rates[step - 1 - self._left_out]),  # the optimizer counts its updates
            seconds=seconds,
            data_seconds=waited,
            save_seconds=saving,
            tokens_per_second=self._config.tokens_per_step / seconds,
            flops_per_second=self._flops / seconds,
            mfu=self._flops / seconds / self._peak if self._peak else None,
            memory_bytes=memory,
            peak_memory_bytes=peak,
        )

    def _at_rest(self, record: Record) -> str | None:
        """Return what is said once of a step that moves nothing; None of any other."""
        if record.grad_norm != 0 or self._rested:
            return None
        self._rested = True
        why = "if it stays so, the loss does not depend on what is trained"
        return f"  note: the gradient of step {record.step} is zero: {why}"

    def _not_finite(self, record: Record) -> tuple[bool, str]:
        """Keep the batch at fault; return whether training stops, and what is said.

        It goes on if the step's update was left out, but for too many in a row.
        """
        file = self._directory / f"nan-step-{record.step}.npz"
        arrays = dataclasses.asdict(self._source.batch(record.step - 1))
        np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
        self._skipped, self._left_out = self._skipped + 1, self._left_out + 1
        what = "loss" if not math.isfinite(record.loss or 0.0) else "gradient's norm"
        value = record.loss if what == "loss" else record.grad_norm
        said = f"the {what} is {value} at step {record.step}"
        skips = self._config.on_nan is configs.OnNan.skip
        if skips and self._skipped < MOST_SKIPPED:
            return False, f"  {said}: its update is left out; its batch is in {file}"
        return True, (
            f"{said}{', as before' if skips else ''}: training has diverged and stops here. "
            f"Lower optimizer.learning_rate (now {self._config.optimizer.learning_rate:g}) or set "
            f"optimizer.clip_norm=1. The step's batch is in {file}."
        )


def _finite(record: Record) -> bool:
    """Return whether a step's loss and gradient norm are finite numbers; in a file, others are None."""
    return all(value is not None and math.isfinite(value) for value in (record.loss, record.grad_norm))
