"""How whole runs of a micro model fail: what they were asked, losses that are no numbers, interruptions, other runs."""

import dataclasses
import errno
import functools
import gc
import json
import math
import os
import re
import shutil
import signal
import time
import weakref

import jax
import numpy as np
import pytest

from experiments.data import batches
from experiments.planning import cost
from experiments.results import directory
from experiments.runtime import hardware, manifest
from experiments.step.build import Programs
from experiments.training import loop
from tests.experiments.runs import FILES, rows


def test_weights_that_are_not_there(start, tmp_path, capsys):
    assert start(f"model.weights={tmp_path / 'nothing'}") == 2
    assert "error: cannot read model.weights=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [("{bad", "is not valid JSON: Expecting"), ("[1]", "must hold a JSON object")],
    ids=["damaged", "list"],
)
def test_weights_whose_description_is_damaged(text, why, start, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert start(f"model.weights={tmp_path}") == 2
    assert f"error: cannot use model.weights={tmp_path}: its config.json {why}" in capsys.readouterr().err


def test_what_no_folder_can_describe_is_not_trained_to_be_saved(start, capsys):
    assert start("model.window=4", "save.final=true") == 2
    said = r"cannot save what is trained, as save.final=true asks: .*window needs Gemma 2.* Or leave save.final out"
    assert re.search(said, capsys.readouterr().err)


def test_a_diverged_run_stops_after_writing_what_it_had(start, tmp_path, capsys):
    status = start("run=bad", "optimizer=sgd", "optimizer.learning_rate=1e30", "optimizer.warmup=0")
    error = capsys.readouterr().err
    assert status == 1
    assert "training has diverged and stops here. Lower optimizer.learning_rate (now 1e+30)" in error
    assert "NaN" not in (tmp_path / "bad" / "summary.json").read_text()
    rows = [json.loads(line) for line in (tmp_path / "bad" / "metrics.jsonl").read_text().splitlines()]
    assert 1 < len(rows) < 5
    assert None in (rows[-1]["loss"], rows[-1]["grad_norm"])
    assert all(math.isfinite(row["loss"]) for row in rows[1:-1])
    batch = next((tmp_path / "bad").glob("nan-step-*.npz"))
    assert f"The step's batch is in {batch}" in error
    assert np.load(batch)["tokens"].shape == (4, 32)
    assert sorted(path.name for path in (tmp_path / "bad").iterdir()) == sorted([*FILES, batch.name])


@pytest.fixture
def poison(monkeypatch):
    """The batch of step 3 gives a loss that is no number."""
    batch = batches.Source.batch

    def poisoned(self, step, *rows):
        made = batch(self, step, *rows)
        return dataclasses.replace(made, mask=made.mask * np.float32(np.nan)) if step == 2 else made

    monkeypatch.setattr(batches.Source, "batch", poisoned)


def test_a_step_without_a_loss_can_be_left_out(start, tmp_path, capsys, poison):
    assert start("run=skips", "steps=5", "on_nan=skip", "checkpoint.every=1", "checkpoint.keep=9") == 0
    assert "the loss is nan at step 3: its update is left out; its batch is in" in capsys.readouterr().out
    losses = [row["loss"] for row in rows(tmp_path / "skips")][1:]
    assert [loss is None for loss in losses] == [False, False, True, False, False]
    files = "2/state/model.embed/0.0", "3/state/model.embed/0.0", "4/state/model.embed/0.0"
    two, three, four = ((tmp_path / "skips" / "checkpoints" / file).read_bytes() for file in files)
    assert two == three != four


def test_what_is_left_out_does_not_move_the_schedule(start, tmp_path, poison):
    words = "optimizer=sgd", "optimizer.warmup=0", "optimizer.schedule=linear", "optimizer.final=0", "on_nan=skip"
    start = functools.partial(start, "run=skips", "optimizer.learning_rate=1", *words, "checkpoint.every=4")
    assert start("steps=5") == 0
    rates = [round(row["learning_rate"], 4) for row in rows(tmp_path / "skips")[1:]]
    assert rates == [1.0, 0.8, 0.6, 0.6, 0.4]
    assert start("steps=6") == 0
    assert round(rows(tmp_path / "skips")[-1]["learning_rate"], 4) == round(1 - 4 / 6, 4)


def test_a_run_that_met_a_bad_step_goes_on_as_its_error_says(start, tmp_path, capsys, poison):
    words = "run=bad", "checkpoint.every=1", "steps=5"
    assert start(*words) == 1
    assert start(*words, "optimizer.clip_norm=1", "on_nan=skip") == 0
    assert "changed  optimizer.clip_norm: None -> 1.0" in capsys.readouterr().out
    losses = [row["loss"] for row in rows(tmp_path / "bad")][1:]
    assert [loss is None for loss in losses] == [False, False, True, False, False]


def test_a_directory_has_one_run_at_a_time(start, tmp_path, capsys):
    (tmp_path / "held").mkdir()
    with directory.Directory(tmp_path, tmp_path / "held"):
        assert start("run=held") == 2
    assert f"another process is carrying out the run at {tmp_path / 'held'}: wait" in capsys.readouterr().err
    assert start("run=held", "steps=1") == 0


def test_there_is_room_for_a_checkpoint_more_than_are_kept(start, tmp_path, monkeypatch, capsys):
    room = shutil.disk_usage("/")._replace(free=500_000)  # one takes 0.23 MB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    assert start("checkpoint.every=1") == 1
    assert not list(tmp_path.iterdir())
    error = capsys.readouterr().err
    assert ", 3 of them" in error and "(checkpoint.keep=2, and one more while it is written)" in error
    assert start("run=full", "checkpoint.every=1", "checkpoint.keep=1") == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room._replace(free=0))
    assert start("run=full") == 0  # it has all its steps, and writes none
    assert start("run=full", "steps=5") == 1


def test_a_file_where_checkpoints_go_is_found_before_training(start, tmp_path, capsys):
    assert start("run=file", "steps=1", "checkpoint=none") == 0
    (tmp_path / "file" / "checkpoints").touch()
    assert start("run=file", "steps=2", "checkpoint.every=1") == 1
    assert f"checkpoints go to {tmp_path / 'file' / 'checkpoints'}, and that is no folder" in capsys.readouterr().err


def test_a_checkpoint_that_fails_does_not_hide_what_ended_the_run(start, monkeypatch, capsys, poison):
    def fails(*_):
        time.sleep(1)  # when the run has ended
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(manifest, "write", fails)
    assert start("checkpoint.every=2") == 1
    said = capsys.readouterr()
    assert "error: the loss is nan at step 3: training has diverged" in said.err
    assert "warning: cannot save the checkpoint of step 2" in said.out


def test_the_state_that_a_run_goes_on_from_is_the_loops_alone(start, monkeypatch):
    assert start("run=on", "checkpoint.every=2") == 0
    freed = []

    def train(programs, source, session, stop):
        held = weakref.ref(session.begun.state.step)
        session.begun = None
        gc.collect()
        freed.append(held() is None)
        raise loop.DivergedError("as far as this test goes")

    monkeypatch.setattr(loop, "train", train)
    assert start("run=on", "steps=6") == 1
    assert freed == [True]


def test_a_step_without_a_loss_can_be_raised(start, tmp_path, poison):
    with pytest.raises(loop.DivergedError, match="the loss is nan at step 3: training has diverged"):
        start("run=raises", "on_nan=raise", "checkpoint.every=1")
    assert sorted(path.name for path in (tmp_path / "raises" / "checkpoints").iterdir()) == ["1", "2"]


def test_an_interrupted_run_leaves_what_it_had(start, tmp_path, capsys, monkeypatch):
    batch = batches.Source.batch

    def interrupt(self, step, *rows):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, step, *rows)

    monkeypatch.setattr(batches.Source, "batch", interrupt)
    assert start("run=cut", "checkpoint=none", "steps=400") == 130
    error = capsys.readouterr().err
    assert "stopped by SIGINT after step" in error and "nothing is saved, as there are no checkpoints" in error
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == FILES


@pytest.mark.parametrize("stage", ["plan", "evaluate", "init"])
def test_an_interruption_before_the_first_step_draws_nothing(start, tmp_path, capsys, monkeypatch, stage):
    place = cost if stage == "plan" else Programs
    real = getattr(place, stage)

    def interrupt(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return real.func(*args) if stage == "evaluate" else real(*args)

    monkeypatch.setattr(place, stage, property(interrupt) if stage == "evaluate" else interrupt)
    assert start("run=cut") == 130
    assert capsys.readouterr().err == "\nerror: interrupted before the training began\n"
    assert (tmp_path / "cut").exists() == (stage != "plan")
    assert not [*tmp_path.glob("cut/*.png")]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.vocab_size=200"], "token id 256 in bytes"),
        (["seq_len=1000000"], "too little text for seq_len=1000000"),
        (["profile.steps=3:9"], "bad value profile.steps=3:9: the run has 4 steps"),
        (["hardware.compiler_options.xla_such=1"], "No such compile option: 'xla_such'"),
        (["out=/dev/null/x"], "cannot use out=/dev/null/x: /dev/null: that is no folder"),
    ],
)
def test_what_cannot_run_says_so_before_compiling(start, overrides, message, capsys):
    assert start(*overrides) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == "  starting ...\n"


def test_a_missing_device_is_named(monkeypatch, capsys):
    def devices(platform):
        raise RuntimeError("Unable to initialize backend 'tpu'\nlong story")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(hardware.HardwareError, match=r"hardware=tpu is not there: Unable to initialize backend 'tpu'"):
        hardware.prepare(hardware.Platform.tpu)
