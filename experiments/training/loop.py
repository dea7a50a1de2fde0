"""The loop: dispatch a step, read the metrics of the one before, so that the device never waits for Python."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from experiments import configs
from experiments.data.batches import Repeats, Source
from experiments.data.prefetch import Prefetch
from experiments.data.rows import Batch
from experiments.planning.preflight import Plan
from experiments.results.metrics import Progress, Record, Recorder, bits_per_byte, describe
from experiments.runtime import distributed, hardware, meshes
from experiments.runtime.signals import Stop, Stopped
from experiments.step import optimizer, program
from experiments.training.checkpoints import Checkpoints
from experiments.training.tracing import Tracer
from transforms.step import State

AGREE_AFTER = 10  # steps: from then on, it is known how long one takes
BESIDE = ("cross_entropy", "accuracy", "margin")  # what an objective may measure that records have a place for
MOST_SKIPPED = 100  # updates in a row that on_nan=skip leaves out


class DivergedError(RuntimeError):
    """The loss is no longer a finite number."""


@dataclass
class Trainer:
    """A run in progress."""

    config: configs.Resolved
    plan: Plan
    source: Source | Repeats
    recorder: Recorder
    progress: Progress
    checkpoints: Checkpoints | None
    directory: Path
    stop: Stop
    restored: tuple[int, State] | None = None

    def __post_init__(self):
        self._peak, self._skipped = hardware.peak_flops(self.config.hardware), 0
        self._left_out = sum(not _finite(record) for record in self.recorder.records if record.step)
        rate = optimizer.schedule(self.config.optimizer, self.config.steps)
        self._rates = np.asarray(jax.vmap(lambda step: jnp.asarray(rate(step)))(jnp.arange(self.config.steps)))

    def run(self) -> Any:
        """Train from the beginning or the restored step on, measuring held-out text; return the trained model.

        Raises:
            DivergedError: a loss is not finite; every record up to it has been written.
            Stopped: the process was told to end; everything is saved.
            OutOfMemoryError: the evaluation does not compile.
            CheckpointError: a checkpoint could not be written.
        """
        evaluate = program.compile_eval(self.config, self.plan.state)
        self.stop.ask()
        self._frozen = program.init_frozen(self.config)
        self.stop.ask()
        first, state = self._start(evaluate)
        self.progress.start(first)
        put = meshes.feeder(self.source.batch_size)  # the mesh is set in this thread alone
        read = lambda step: put(lambda rows: self.source.batch(step, rows).arrays)
        feed = Prefetch(read, first, self.config.steps)
        self._tracer = Tracer(self.config.profile, self.directory, self.progress.say)
        try:
            self.stop.begin()
            return self._loop(first, state, feed, evaluate)
        finally:
            self._tracer.close()
            feed.close()

    def _start(self, evaluate: Any) -> tuple[int, State]:
        """Return the first step and the state that it starts from."""
        if self.restored is not None:
            step, state = self.restored
            self.restored = None  # its memory is about to be reused
            return step, program.completed(self.config, state)
        began = time.perf_counter()
        model = jax.block_until_ready(program.init_model(self.config))
        self.progress.say(f"  weights {self._origin()} in {time.perf_counter() - began:.1f} s")
        memory, peak = hardware.used_memory()
        before = Record(step=0, memory_bytes=memory, peak_memory_bytes=peak)
        before = self._held_out(evaluate, model, before, self.stop.ask)
        self.recorder.add(before)
        self.progress.say(f"  held-out {'pairs' if self.config.paired else 'text'} before training: {describe(before)}")
        transformation = program.build_optimizer(self.config)
        init = eqx.filter_jit(lambda m: transformation.init(eqx.filter(m, program.trainable(self.config)(m))))
        return 0, State(model, init(model), jnp.zeros((), jnp.int32))

    def _loop(self, first: int, state: State, feed: Prefetch, evaluate: Any) -> Any:
        pending, self._saving = None, 0.0
        self._clock = self._saved = time.perf_counter()
        self._first, self._every, self._has_saved = first, None, first > 0
        for step in range(first + 1, self.config.steps + 1):
            self._tracer.begin(step)
            began = time.perf_counter()
            batch = feed.take()
            waited = time.perf_counter() - began
            state, metrics = self.plan.compiled(program.inputs(batch, self._frozen), state)
            if pending is not None:
                self._record(*pending)
            pending = (step, metrics, waited)
            told, measure = self.stop.told(step), self._measures(step)
            save = told is not None or self._saves(step)
            if measure or save or self._tracer.ends(step):
                weigh = partial(self._held_out, evaluate, program.measured(self.config, state)) if measure else None
                self._record(*pending, evaluate=weigh)
                if self._tracer.ends(step):
                    jax.block_until_ready(state)
                    self._tracer.close()
                if save:
                    self._save(step, state, wait=told is not None)
                pending, self._clock = None, time.perf_counter()
            if told:
                raise Stopped(f"stopped by {told.name} after step {step} of {self.config.steps}", told, trained=True)
        return program.measured(self.config, state)

    def _measures(self, step: int) -> bool:
        return step == self.config.steps or bool(self.config.eval.every and step % self.config.eval.every == 0)

    def _saves(self, step: int) -> bool:
        """Return whether a step is followed by a checkpoint."""
        how = self.config.checkpoint
        if self.checkpoints is None:
            return False
        if step == self.config.steps and (how.last or self._has_saved):
            return True
        if how.every is not None:
            return step % how.every == 0
        if how.minutes is None:
            return False
        passed = time.perf_counter() - self._saved
        if distributed.several():  # their clocks differ: the first one says once how many steps it will be
            self._agreed_every(step, passed / max(1, step - self._first), 60 * how.minutes)
            return self._every is not None and step % self._every == 0
        return passed >= 60 * how.minutes

    def _agreed_every(self, step: int, seconds: float, wanted: float) -> None:
        if self._every is None and step == self._first + AGREE_AFTER:
            self._every = distributed.agreed(max(1, round(wanted / seconds)))

    def _save(self, step: int, state: State, wait: bool) -> None:
        if self.checkpoints is None:
            return
        began = time.perf_counter()
        self.checkpoints.save(step, program.kept(self.config, state))
        if wait:
            self.checkpoints.wait()
        self._has_saved, self._saved = True, time.perf_counter()
        self._saving = self._saved - began

    def _origin(self) -> str:
        return "drawn" if self.config.model.weights is None else f"read from {self.config.model.weights}"

    def _record(
        self,
        step: int,
        metrics: dict[str, Any],
        waited: float,
        evaluate: Callable[[Record], Record] | None = None,
    ) -> None:
        loss = float(metrics["loss"])  # waits for the step
        beside = {name: float(metrics[name]) for name in BESIDE if name in metrics}
        extra = {name: float(value) for name, value in metrics.items() if name not in ("loss", "grad_norm", *BESIDE)}
        nats = beside.get("cross_entropy", None if isinstance(self.config.objective, configs.Custom) else loss)
        memory, peak = hardware.used_memory()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        record = Record(
            step=step,
            loss=loss,
            bits_per_byte=None if nats is None else bits_per_byte(nats, self.source.bytes_per_token),
            **beside,
            extra=extra or None,
            grad_norm=float(metrics["grad_norm"]),
            learning_rate=float(self._rates[step - 1 - self._left_out]),  # the optimizer counts its updates
            seconds=seconds,
            data_seconds=waited,
            save_seconds=self._saving,
            tokens_per_second=self.config.tokens_per_step / seconds,
            flops_per_second=self.plan.flops / seconds,
            mfu=self.plan.flops / seconds / self._peak if self._peak else None,
            memory_bytes=memory,
            peak_memory_bytes=peak,
        )
        self._saving = 0.0
        finite = _finite(record)
        record = evaluate(record) if evaluate is not None and finite else record
        self.recorder.add(record)
        self.progress.show(record)
        if finite:
            self._skipped = 0
        else:
            self._not_finite(record)

    def _not_finite(self, record: Record) -> None:
        """Keep the batch at fault, and go on if the step's update was left out.

        Raises:
            DivergedError: it was not, or there have been too many in a row.
        """
        file = self.directory / f"nan-step-{record.step}.npz"
        arrays = dataclasses.asdict(self.source.batch(record.step - 1))
        np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
        self._skipped, self._left_out = self._skipped + 1, self._left_out + 1
        what = "loss" if not math.isfinite(record.loss or 0.0) else "gradient's norm"
        value = record.loss if what == "loss" else record.grad_norm
        said = f"the {what} is {value} at step {record.step}"
        skips = self.config.on_nan is configs.OnNan.skip
        if skips and self._skipped < MOST_SKIPPED:
            self.progress.say(f"  {said}: its update is left out; its batch is in {file}")
            return
        raise DivergedError(
            f"{said}{', as before' if skips else ''}: training has diverged and stops here. "
            f"Lower optimizer.learning_rate (now {self.config.optimizer.learning_rate:g}) or set "
            f"optimizer.clip_norm=1. The step's batch is in {file}."
        )

    def _held_out(
        self, evaluate: Callable[..., Any], model: Any, record: Record, ask: Callable[[], None] = lambda: None
    ) -> Record:
        """Return the record with the mean held-out loss, every batch weighted by the tokens that count.

        `ask` is called before each batch, and may raise.
        """
        batches = self.source.held_out_batches(configs.chosen(self.config.eval.batches))
        count, put, total = 0.0, meshes.feeder(self.source.batch_size), {"loss": 0.0, "accuracy": 0.0}
        for index in range(batches):
            ask()
            batch = self.source.held_out_batch(index, batches)
            inputs = program.inputs(put(_rows_of(batch)), self._frozen if self.config.paired else None)
            found = evaluate(inputs, model)
            total = {name: total[name] + float(found.get(name, 0)) * batch.weight for name in total}
            count += batch.weight
        loss, accuracy = (total[name] / max(count, 1) for name in ("loss", "accuracy"))
        bits = bits_per_byte(loss, self.source.bytes_per_token)
        accuracy = accuracy if self.config.paired else None
        return replace(record, held_out_loss=loss, held_out_bits_per_byte=bits, held_out_accuracy=accuracy)


def _finite(record: Record) -> bool:
    """Return whether a step's loss and gradient norm are finite numbers; in a file, others are None."""
    return all(value is not None and math.isfinite(value) for value in (record.loss, record.grad_norm))


def _rows_of(batch: Batch) -> Callable[[slice], tuple[np.ndarray, ...]]:
    return lambda rows: tuple(array[rows] for array in batch.arrays)
