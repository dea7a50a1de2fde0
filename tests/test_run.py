"""Whole runs of a micro model: what is left behind, what is printed, and how they fail."""

import csv
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from jax.experimental.compilation_cache import compilation_cache

import zoo
from experiments import data, directory, hardware, run, schema, session, train
from zoo import adapters, lora

MICRO = [
    "data=pydoc",
    "model.vocab_size=300",
    "model.num_layers=1",
    "model.embed_dim=32",
    "model.mlp_dim=64",
    "model.num_heads=2",
    "model.head_dim=16",
    "batch_size=4",
    "seq_len=32",
    "steps=4",
    "eval.batches=2",
]
FILES = ["config.yaml", "loss.png", "memory.png", "metrics.csv", "metrics.jsonl", "plan.json", "rate.png", "run.json"]
FILES += ["speed.png", "summary.json"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def compile_once(cache):
    """Most runs here compile the same programs."""
    jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def start(tmp_path, cache, monkeypatch):
    """Run in this process, without touching its JAX configuration; return the exit status."""
    device = hardware.Device("cpu", "a test", 2**32)
    monkeypatch.setattr(hardware, "prepare", lambda platform: device)

    def begin(*overrides):
        words = [*MICRO, f"out={tmp_path}", f"data.cache={cache}", *overrides]
        return session.start(*schema.compose(words), words)

    return begin


def test_the_command_trains_and_leaves_everything(tmp_path, cache):
    """The command itself, in its own process: tiled, saved, quiet on stderr."""
    words = [*MICRO, "steps=12", "tiling.n=4", "run=one", f"out={tmp_path}", "save.final=true", "hardware=cpu"]
    command = [sys.executable, str(schema.CONF.parent / "experiments" / "run.py"), *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "XLA_FLAGS": "", "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = tmp_path / "one"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "checkpoints", "weights"])
    lines = done.stdout.splitlines()
    assert lines[-1].startswith(f"Everything is in {folder}/: metrics.jsonl, metrics.csv")
    assert max(len(line) for line in lines[:-1]) <= 80
    assert sum(line.lstrip().startswith("step ") for line in lines) == 12
    assert "tiled, n=4" in done.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(13))
    assert len(list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))) == 13
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["held_out_bits_per_byte_after"] < summary["held_out_bits_per_byte_before"] - 0.3
    assert summary["last_loss"] < summary["first_loss"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["tiling"]["n"] == 4
    assert config["optimizer"]["kind"] == "AdamW"
    assert (folder / "weights" / "config.json").exists()
    assert any((cache / "tiling-zoo" / "tokens").iterdir())


def test_runs_are_reproducible_and_get_their_own_directories(start, tmp_path):
    assert start() == start() == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["tiny-1", "tiny-2"]
    losses = []
    for name in names:
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1]


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_where_it_ended_and_says_what_changed(start, tmp_path, capsys):
    assert start("run=long", "steps=6", "optimizer.schedule=constant") == 0
    assert start("run=short", "steps=4", "optimizer.schedule=constant") == 0
    with (tmp_path / "short" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    capsys.readouterr()
    assert start("run=short", "steps=6", "optimizer.schedule=constant") == 0
    out = capsys.readouterr().out
    assert "changed  steps: 4 -> 6" in out
    assert "short goes on after step 4 of 6" in out
    drop = lambda row: {key: row[key] for key in ("step", "loss", "grad_norm")}
    assert [*map(drop, rows(tmp_path / "short"))] == [*map(drop, rows(tmp_path / "long"))]
    assert start("run=short", "steps=6", "optimizer.schedule=constant") == 0
    assert "short has all its 6 steps; give steps=MORE for more" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "short")] == list(range(7))
    assert start("run=short", "model.mlp_dim=48") == 1
    assert "has other arrays than this run: model.layers.gate is" in capsys.readouterr().err


def test_an_adapter_goes_on_without_the_weights_that_never_move(start, tmp_path):
    words = ["adapter=lora", "adapter.targets=q", "adapter.rank=2", "optimizer.schedule=constant"]
    assert start("run=long", "steps=6", *words) == 0
    assert start("run=short", "steps=3", *words) == 0
    assert start("run=short", "steps=6", *words) == 0
    assert [row["loss"] for row in rows(tmp_path / "short")] == [row["loss"] for row in rows(tmp_path / "long")]
    files = [path.name for path in (tmp_path / "short" / "checkpoints" / "6" / "state").iterdir()]
    assert "model.layers.q.a" in files
    assert "model.embed" not in files


def test_what_is_no_run_is_never_overwritten(start, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert start("run=mine") == 2
    assert "that is no run: choose another run=NAME" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_saved_weights_go_on_where_the_run_ended(start, tmp_path, capsys):
    assert start("run=first", "save.final=true") == 0
    assert start("run=second", f"model.weights={tmp_path / 'first' / 'weights'}") == 0
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("first", "second"))
    assert second["held_out_bits_per_byte_before"] == pytest.approx(first["held_out_bits_per_byte_after"], abs=1e-4)
    assert start(f"model.weights={tmp_path / 'first' / 'weights'}", "model.num_layers=2") == 2
    assert "holds another model than the one asked for: num_layers: 2 here, 1 there" in capsys.readouterr().err


def test_an_adapter_is_trained_alone_and_saved_by_itself_and_merged(start, tmp_path, capsys):
    assert start("run=base", "save.final=true", "steps=1") == 0
    weights = f"model.weights={tmp_path / 'base' / 'weights'}"
    words = [weights, "adapter=lora", "adapter.targets=q,*_proj", "adapter.rank=2", "optimizer.learning_rate=0.01"]
    assert start("run=low", "save.final=true", *words) == 0
    assert "adapter/" in capsys.readouterr().out
    low, base = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("low", "base"))
    assert low["held_out_bits_per_byte_before"] == pytest.approx(base["held_out_bits_per_byte_after"], abs=1e-4)
    assert low["held_out_bits_per_byte_after"] < low["held_out_bits_per_byte_before"]
    plain = zoo.load(tmp_path / "base" / "weights")
    merged = lora.merge(adapters.load(tmp_path / "low" / "adapter", plain))
    saved = zoo.load(tmp_path / "low" / "weights")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), merged, saved))
    assert not bool((saved.layers.q == plain.layers.q).all())
    assert bool((saved.embed == plain.embed).all())
    assert start(weights, "adapter=lora", "adapter.targets=query") == 2
    assert (
        "bad value adapter.targets=query: LoRA cannot be attached: `query` matches no matrix" in capsys.readouterr().err
    )


def test_a_sweep_runs_every_combination_under_a_name_of_its_own(monkeypatch, capsys):
    started = []

    class Job:
        def __init__(self, command, start_new_session):
            started.append(command[2:])

        def wait(self):
            return {2: 1, 3: -signal.SIGSEGV, 6: -signal.SIGINT}.get(len(started), 0)

    monkeypatch.setattr(run.subprocess, "Popen", Job)
    assert run.main(["-m", "run=x", "tiling.n=1,8", "adapter.targets=q,v", "seed=0,1"]) == 128 + signal.SIGSEGV
    lists = "adapter.targets=q,v"
    assert started[1] == ["run=x-1", "tiling.n=1", lists, "seed=1"]
    assert started[3] == ["run=x-3", "tiling.n=8", lists, "seed=1"]
    assert run.main(["-m", "seed=0,1,2"]) == 130
    assert len(started) == 6
    assert "\nrun=x tiling.n=1 adapter.targets=q,v seed=1\n" in capsys.readouterr().out


def test_weights_that_are_not_there(start, tmp_path, capsys):
    assert start(f"model.weights={tmp_path / 'nothing'}") == 2
    assert "error: cannot read model.weights=" in capsys.readouterr().err


def test_a_diverged_run_stops_after_writing_what_it_had(start, tmp_path, capsys):
    status = start("run=bad", "optimizer=sgd", "optimizer.learning_rate=1e30", "optimizer.warmup=0")
    error = capsys.readouterr().err
    assert status == 1
    assert "training has diverged and stops here. Lower optimizer.learning_rate (now 1e+30)" in error
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
    batch = data.Source.batch

    def poisoned(self, step, *rows):
        made = batch(self, step, *rows)
        return dataclasses.replace(made, mask=made.mask * np.float32(np.nan)) if step == 2 else made

    monkeypatch.setattr(data.Source, "batch", poisoned)


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


def test_a_change_of_what_is_read_is_said(start, tmp_path, capsys):
    texts = [{"text": f"{i} is followed by {i + 1}. " * 20} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    words = "run=reads", f"data.path={tmp_path / 'a.jsonl'}", "data=text", "checkpoint.every=2"
    assert start(*words) == 0
    assert start(*words, "steps=6") == 0
    assert "changed  data" not in capsys.readouterr().out
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts[1:]))
    assert start(*words, "steps=8") == 0
    assert "changed  data: what it reads is not what it was" in capsys.readouterr().out


def test_a_directory_has_one_run_at_a_time(start, tmp_path, capsys):
    (tmp_path / "held").mkdir()
    other = directory.Directory(tmp_path, tmp_path / "held")
    other.hold()
    assert start("run=held") == 2
    assert f"another process is carrying out the run at {tmp_path / 'held'}: wait" in capsys.readouterr().err
    other.release()
    assert start("run=held", "steps=1") == 0


def test_a_step_without_a_loss_can_be_raised(start, tmp_path, poison):
    with pytest.raises(train.DivergedError, match="the loss is nan at step 3: training has diverged"):
        start("run=raises", "on_nan=raise", "checkpoint.every=1")
    assert sorted(path.name for path in (tmp_path / "raises" / "checkpoints").iterdir()) == ["1", "2"]


def test_an_interrupted_run_leaves_what_it_had(start, tmp_path, capsys, monkeypatch):
    batch = data.Source.batch

    def interrupt(self, step, *rows):
        if step == 2:
            raise KeyboardInterrupt
        return batch(self, step, *rows)

    monkeypatch.setattr(data.Source, "batch", interrupt)
    assert start("run=cut", "checkpoint=none") == 130
    assert "interrupted; what was measured is in" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == FILES


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tiling.n=129"], "cannot cut into tiling.n=129 tiles: a step has 128 tokens"),
        (["model.vocab_size=200"], "token id 256 in bytes"),
        (["seq_len=1000000"], "too little text for seq_len=1000000"),
        (["profile.steps=3:9"], "bad value profile.steps=3:9: the run has 4 steps"),
        (["hardware.compiler_options.xla_such=1"], "cannot use hardware.compiler_options={'xla_such': 1}: "),
        (["out=/dev/null/x"], "cannot use out=/dev/null/x: /dev/null: that is no folder"),
    ],
)
def test_what_cannot_run_says_so_before_compiling(start, overrides, message, capsys):
    assert start(*overrides) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_missing_device_is_named(monkeypatch, capsys):
    def devices(platform):
        raise RuntimeError("Unable to initialize backend 'tpu'\nlong story")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(hardware.HardwareError, match=r"hardware=tpu is not there: Unable to initialize backend 'tpu'"):
        hardware.prepare(hardware.Platform.tpu)


def test_preferences_are_learned_from_what_the_run_starts_from(start, tmp_path, capsys):
    words = ["objective=dpo", "data=preference", "seq_len=64", "tiling.n=4", "batch_size=16", "steps=20"]
    assert start("run=pairs", *words, "optimizer=adamw", "optimizer.learning_rate=0.01") == 0
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["held_out_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert rows[-1]["loss"] < 0.6 and rows[-1]["accuracy"] > 0.6 and rows[-1]["margin"] > 0
    assert rows[-1]["bits_per_byte"] is None
    assert "of pairs right" in capsys.readouterr().out


def test_a_student_learns_from_a_teacher_and_says_how_well_it_predicts(start, tmp_path, capsys):
    assert start("run=teacher", "save.final=true", "optimizer.ema=0.9") == 0
    teacher = f"objective.teacher={tmp_path / 'teacher' / 'weights'}"
    assert start("run=student", "objective=distill", teacher, "model.embed_dim=16", "tiling.n=4", "seed=3") == 0
    rows = [json.loads(line) for line in (tmp_path / "student" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[1]["loss"] < rows[1]["cross_entropy"]
    assert rows[-1]["bits_per_byte"] == pytest.approx(rows[-1]["cross_entropy"] / math.log(2))
    assert start("objective=distill", teacher, "model.vocab_size=301") == 2
    assert "it has a vocabulary of 300, the model that learns one of 301" in capsys.readouterr().err
