"""The loop: dispatch a step, read the metrics of the one before, so that the device never waits for Python."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from experiments import configs, hardware, optimizer, program
from experiments.data import Batch, Repeats, Source
from experiments.metrics import Progress, Record, Recorder, bits_per_byte, describe
from experiments.preflight import Plan
from transforms.step import State


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

    def __post_init__(self):
        self._rate = optimizer.schedule(self.config.optimizer, self.config.steps)

    def run(self) -> Any:
        """Train, measuring held-out text before and after; return the trained model.

        Raises:
            DivergedError: a loss is not finite; every record up to it has been written.
        """
        steps = self.config.steps
        began = time.perf_counter()
        model = jax.block_until_ready(program.init_model(self.config))
        self.progress.say(f"  weights {self._origin()} in {time.perf_counter() - began:.1f} s")
        evaluate = program.compile_eval(self.config, self.plan.state)
        before = self._held_out(evaluate, model, Record(step=0))
        self.recorder.add(before)
        self.progress.say(f"  held-out text before training: {describe(before)}")
        self.progress.start()
        transformation = program.build_optimizer(self.config)
        init = eqx.filter_jit(lambda m: transformation.init(eqx.filter(m, program.trainable(self.config)(m))))
        state = State(model, init(model), jnp.zeros((), jnp.int32))
        del model  # its memory is about to be reused
        pending, self._clock = None, time.perf_counter()
        for step in range(steps):
            state, metrics = self.plan.compiled(_arrays(self.source.batch(step)), state)
            if pending is not None:
                self._record(*pending)
            pending = (step + 1, metrics)
            if step + 1 == steps or (self.config.eval.every and (step + 1) % self.config.eval.every == 0):
                self._record(*pending, evaluate=partial(self._held_out, evaluate, state.model))
                pending, self._clock = None, time.perf_counter()
        return state.model

    def _origin(self) -> str:
        return "drawn" if self.config.model.weights is None else f"read from {self.config.model.weights}"

    def _record(self, step: int, metrics: dict[str, Any], evaluate: Callable[[Record], Record] | None = None) -> None:
        loss = float(metrics["loss"])  # waits for the step
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        record = Record(
            step=step,
            loss=loss,
            bits_per_byte=bits_per_byte(loss, self.source.bytes_per_token),
            grad_norm=float(metrics["grad_norm"]),
            learning_rate=float(jnp.asarray(self._rate(step - 1))),
            seconds=seconds,
            tokens_per_second=self.config.tokens_per_step / seconds,
            flops_per_second=self.plan.flops / seconds,
            memory_bytes=hardware.used_memory()[0],
        )
        finite = math.isfinite(loss)
        self.recorder.add(evaluate(record) if evaluate is not None and finite else record)
        self.progress.show(record)
        if not finite:
            raise DivergedError(
                f"the loss is {loss} at step {step}: training has diverged and stops here. Lower "
                f"optimizer.learning_rate (now {self.config.optimizer.learning_rate:g}) or set optimizer.clip_norm=1."
            )

    def _held_out(self, evaluate: Callable[..., Any], model: Any, record: Record) -> Record:
        """Return the record with the mean held-out loss, every batch weighted by the tokens that count."""
        batches = self.source.held_out_batches(configs.chosen(self.config.eval.batches))
        total = count = 0.0
        for index in range(batches):
            batch = self.source.held_out_batch(index, batches)
            total += float(evaluate(_arrays(batch), model)["loss"]) * batch.mask.sum()
            count += batch.mask.sum()
        loss = float(total / max(count, 1))
        bits = bits_per_byte(loss, self.source.bytes_per_token)
        return replace(record, held_out_loss=loss, held_out_bits_per_byte=bits)


def _arrays(batch: Batch) -> tuple[Any, Any, Any]:
    return batch.tokens, batch.targets, batch.mask
