"""Gradient accumulation: any number of micro-batches gives the loss curve of one, however unevenly tokens count."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments.commandline import schema
from experiments.planning.resolve import resolve
from experiments.runtime import hardware
from experiments.step.build import Programs
from tests.zoo.hf_tiny import FAST

MICRO = ["vocab_size=96", "num_layers=1", "embed_dim=32", "mlp_dim=48", "head_dim=16", "num_heads=2", "num_kv_heads=1"]
STEPS = 20
DEVICE = hardware.Device("cpu", "a test", 2**32)
TOLERANCE = {"float32": 1e-6, "float64": 1e-9}


def resolved(n, dtype, *overrides):
    words = [f"model.{size}" for size in MICRO] + [f"hardware.{kind}_dtype={dtype}" for kind in ("param", "compute")]
    words += ["model=tiny_gemma3", "batch_size=10", "seq_len=12", f"steps={STEPS}", f"tiling.batch={n}"]
    return resolve(schema.compose([*words, *overrides])[0], DEVICE)


def batches(paired):
    """Rows of which some count in whole, some in one token, one not at all; other shares in each step."""
    rng = np.random.default_rng(0)
    shape = (5, 2, 12) if paired else (10, 12)
    for _ in range(STEPS):
        share = rng.permutation(np.linspace(0, 1, 10) ** 2).reshape(*shape[:-1], 1)
        mask = (rng.random(shape) < share).astype(np.float32)
        yield rng.integers(0, 96, shape, np.int32), rng.integers(0, 96, shape, np.int32), mask


def curve(n, dtype, *overrides):
    config = resolved(n, dtype, *overrides)
    programs = Programs(dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, **FAST)))
    state, step, losses = programs.init_state(programs.init()), programs.train, []
    for batch in batches(config.paired):
        state, metrics = step(batch, state)
        losses.append(float(metrics["loss"]))
    return np.array(losses)


KINDS = {
    "sgd": ["optimizer=sgd", "optimizer.learning_rate=0.1"],
    "adamw, z-loss": ["optimizer=adamw", "optimizer.learning_rate=1e-3", "objective.z_loss=1e-3", "tiling.n=3"],
    "preferences": ["optimizer=sgd", "objective=simpo", "data=preference", "optimizer.learning_rate=0.01"],
}


@functools.cache
def whole(dtype, kind):
    return curve(1, dtype, *KINDS[kind])


SHORT = {("sgd", "float32"), *((kind, "float64") for kind in KINDS)}
CASES = [
    pytest.param(n, dtype, kind, id=f"{kind}, {n}, {dtype}", marks=[] if n == 5 and short else pytest.mark.heavy)
    for kind in KINDS
    for dtype in TOLERANCE
    for short in [(kind, dtype) in SHORT]
    for n in (5, 2)
]


@pytest.mark.parametrize(("n", "dtype", "kind"), CASES)
def test_micro_batches_give_the_same_loss_curve(n, dtype, kind):
    with jax.enable_x64(dtype == "float64"):
        expected = whole(dtype, kind)
        found = curve(n, dtype, *KINDS[kind])
    assert len(set(expected)) == STEPS
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE[dtype])


def test_a_token_weighs_the_same_wherever_it_falls():
    """The same tokens in other rows, so that micro-batches hold other shares of them: the same gradient."""
    config = resolved(5, "float32", "optimizer=sgd")
    model, loss = Programs(config).init(), Programs(config).loss
    batch = next(batches(False))
    order = np.random.default_rng(1).permutation(10)
    gradients = jax.jit(jax.grad(lambda model, batch: loss(model, batch)[0]), **FAST)
    one, other = (gradients(model, found) for found in (batch, tuple(array[order] for array in batch)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, other)
