"""What is measured of a run: each step's record, and the loss of what is held out."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import configs
from experiments.data.batches import Repeats, Source
from experiments.data.rows import Batch
from experiments.results.metrics import Progress, Record, Recorder, bits_per_byte
from experiments.runtime import hardware, meshes
from experiments.step import optimizer
from experiments.step.build import Programs, inputs

BESIDE = ("cross_entropy", "accuracy", "margin")  # what an objective may measure that records have a place for
MEASURED = ("loss", "accuracy", "objective")  # of what is held out
MOST_SKIPPED = 100  # updates in a row that on_nan=skip leaves out


class DivergedError(RuntimeError):
    """The loss is no longer a finite number."""


class HeldOut:
    """The loss of what is held out, every batch weighted by the tokens that count.

    Args:
        programs: the run's, of which the evaluation is compiled.
        source: its data.
    """

    def __init__(self, programs: Programs, source: Source | Repeats):
        self._evaluate, self._source = programs.evaluate, source
        self._every, self._steps = programs.config.eval.every, programs.config.steps
        self._batches = source.held_out_batches(configs.chosen(programs.config.eval.batches))
        self._paired, self._own = programs.config.paired, isinstance(programs.config.objective, configs.Custom)

    def due(self, step: int) -> bool:
        """Return whether it is measured after a step."""
        return step == self._steps or bool(self._every and step % self._every == 0)

    def measure(self, model: Any, frozen: Any, record: Record, ask: Callable[[], None] = lambda: None) -> Record:
        """Return a record with what a model was measured at; `ask` is called before each batch, and may raise."""
        count, put, total = 0.0, meshes.feeder(self._source.batch_size), dict.fromkeys(MEASURED, 0.0)
        for index in range(self._batches):
            ask()
            batch = self._source.held_out_batch(index, self._batches)
            found = self._evaluate(inputs(put(_rows_of(batch)), frozen if self._paired else None), model)
            total = {name: total[name] + float(found.get(name, 0)) * batch.weight for name in total}
            count += batch.weight
        loss, accuracy, objective = (total[name] / max(count, 1) for name in MEASURED)
        return dataclasses.replace(
            record,
            held_out_loss=loss,
            held_out_objective=objective if self._own else None,
            held_out_bits_per_byte=bits_per_byte(loss, self._source.bytes_per_token),
            held_out_accuracy=accuracy if self._paired else None,
        )


def _rows_of(batch: Batch) -> Callable[[slice], tuple[np.ndarray, ...]]:
    return lambda rows: tuple(array[rows] for array in batch.arrays)


class Meter:
    """Makes a record of what each step returned, and finds out that a run has diverged.

    Args:
        config: the run.
        flops: of a step.
        source: its data.
        recorder: takes the records.
        progress: shows them.
        directory: the run's, where the batch of a step without a loss is kept.
    """

    def __init__(
        self,
        config: configs.Resolved,
        flops: int,
        source: Source | Repeats,
        recorder: Recorder,
        progress: Progress,
        directory: Path,
    ):
        self._config, self._flops, self._source = config, flops, source
        self._recorder, self._progress, self._directory = recorder, progress, directory
        self._peak, self._skipped = hardware.peak_flops(config.hardware), 0
        self._left_out = sum(not _finite(record) for record in recorder.records if record.step)
        rate = optimizer.schedule(config.optimizer, config.steps)
        self._rates = np.asarray(jax.vmap(lambda step: jnp.asarray(rate(step)))(jnp.arange(config.steps)))
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
        self._progress.show(record)
        if finite:
            self._skipped = 0
        else:
            self._not_finite(record)

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

    def _not_finite(self, record: Record) -> None:
        """Keep the batch at fault, and go on if the step's update was left out.

        Raises:
            DivergedError: it was not, or there have been too many in a row.
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
            self._progress.say(f"  {said}: its update is left out; its batch is in {file}")
            return
        raise DivergedError(
            f"{said}{', as before' if skips else ''}: training has diverged and stops here. "
            f"Lower optimizer.learning_rate (now {self._config.optimizer.learning_rate:g}) or set "
            f"optimizer.clip_norm=1. The step's batch is in {file}."
        )


def _finite(record: Record) -> bool:
    """Return whether a step's loss and gradient norm are finite numbers; in a file, others are None."""
    return all(value is not None and math.isfinite(value) for value in (record.loss, record.grad_norm))
