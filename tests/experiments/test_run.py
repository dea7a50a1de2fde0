"""Whole runs of a micro model: what is left behind, what is printed, and how they go on."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import yaml
from safetensors.numpy import load_file, save_file

import zoo
from experiments import run, sweep
from experiments.commandline import schema
from experiments.results import summary
from tests.experiments.runs import FILES, MICRO, rows
from tests.quick import FLAGS
from tests.tiny import same
from zoo import adapters
from zoo.adapters import lora
from zoo.quantised import quantise


def test_the_command_trains_and_leaves_everything(tmp_path, cache):
    """The command itself, in its own process: tiled, saved, quiet on stderr."""
    words = [*MICRO, "steps=12", "tiling.n=4", "run=one", f"out={tmp_path}", "save.final=true", "hardware=cpu"]
    command = [sys.executable, str(schema.CONF.parent / "experiments" / "run.py"), *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "XLA_FLAGS": FLAGS, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = tmp_path / "one"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "checkpoints", "weights"])
    lines = done.stdout.splitlines()
    assert lines[-1].startswith(f"Everything is in {folder}/: metrics.jsonl, metrics.csv")
    assert lines[0] == "  starting ..."
    steps = [line for line in lines if line.startswith("  step ")]
    assert max(len(line) for line in lines[:-1] if line not in steps) <= 80
    assert all(re.search(r"s/step  lr \S+  grad \S+  ", line) for line in steps)
    measured = [line.split(":")[0] for line in lines if line.startswith("  held-out, ")]
    assert measured == ["  held-out, step 10", "  held-out, step 12"]
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
    for words, why in (
        (["model.mlp_dim=48"], "has other arrays than this run: model.layers.gate is"),
        (["optimizer=sgd"], "has other arrays than this run: opt_state"),
        (["steps=3"], "has done 6 steps, and steps=3 asks for fewer"),
    ):
        assert start("run=short", *words) == 2
        said = capsys.readouterr()
        assert why in said.err and "plan" not in said.out  # before anything is compiled
        assert json.loads((tmp_path / "short" / "run.json").read_text())["config"]["steps"] == 6


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(start, tmp_path, capsys):
    assert start("run=hurt") == 0
    before = rows(tmp_path / "hurt")
    for file in (tmp_path / "hurt" / "checkpoints").glob("*/manifest.json"):
        file.unlink()
    for _ in range(2):
        assert start("run=hurt", "steps=6") == 1
        assert "manifest.json is missing). Nothing is begun anew in their place" in capsys.readouterr().err
        assert rows(tmp_path / "hurt") == before
    shutil.rmtree(tmp_path / "hurt" / "checkpoints")
    assert start("run=hurt", "steps=6") == 0


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
    settings = json.loads((tmp_path / "low" / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base" / "weights")  # which PEFT opens it with
    plain = zoo.load(tmp_path / "base" / "weights")
    merged = lora.merge(adapters.load(tmp_path / "low" / "adapter", plain))
    saved = zoo.load(tmp_path / "low" / "weights")
    assert same(merged, saved)
    assert not same(saved.layers.q, plain.layers.q)
    assert same(saved.embed, plain.embed)
    assert start(weights, "adapter=lora", "adapter.targets=query") == 2
    assert (
        "bad value adapter.targets=query: LoRA cannot be attached: `query` matches no matrix" in capsys.readouterr().err
    )


def test_an_adapter_is_trained_over_weights_in_fewer_bits(start, tmp_path, capsys):
    """QLoRA: the folder's integers are kept, what is saved by itself is the adapter, and merged it is whole again."""
    assert start("run=base", "save.final=true", "steps=1") == 0
    kept = tmp_path / "kept"
    zoo.save(quantise(zoo.load(tmp_path / "base" / "weights"), "int8"), kept)
    words = [f"model.weights={kept}", "model.quantise=as_stored"]
    assert start("run=low", "save.final=true", *words, "adapter=lora", "optimizer.learning_rate=0.01") == 0
    low = json.loads((tmp_path / "low" / "summary.json").read_text())
    assert low["held_out_bits_per_byte_after"] < low["held_out_bits_per_byte_before"]
    base = zoo.load(kept, quantise="as_stored")
    merged, saved = (
        lora.merge(adapters.load(tmp_path / "low" / "adapter", base)),
        zoo.load(tmp_path / "low" / "weights"),
    )
    assert same(merged, saved)
    capsys.readouterr()
    assert start(*words) == 2
    assert "model.quantise=as_stored: matrices in fewer bits do not move. Train an adapter" in capsys.readouterr().err
    assert start("model.quantise=as_stored", "adapter=lora") == 2
    assert "it keeps what a folder has: give model" in capsys.readouterr().err


def test_a_sweep_runs_every_combination_under_a_name_of_its_own(monkeypatch, capsys, tmp_path):
    started = []
    monkeypatch.chdir(tmp_path)

    class Job:
        def __init__(self, command, start_new_session):
            started.append(command[2:])

        def wait(self):
            return {2: 1, 3: -signal.SIGSEGV, 6: -signal.SIGINT}.get(len(started), 0)

    monkeypatch.setattr(sweep.subprocess, "Popen", Job)
    assert (
        run.main(["-m", "run=x", "tiling.n=1,8", "adapter=lora", "adapter.targets=q,v", "seed=0,1"])
        == 128 + signal.SIGSEGV
    )
    lists = "adapter.targets=q,v"
    assert started[1] == ["run=x-1", "tiling.n=1", "adapter=lora", lists, "seed=1"]
    assert started[3] == ["run=x-3", "tiling.n=8", "adapter=lora", lists, "seed=1"]
    assert run.main(["-m", "seed=0,1,2"]) == 130
    assert len(started) == 6
    assert run.main(["-m", "sede=0,1"]) == 2
    assert len(started) == 6
    assert "\nrun=x tiling.n=1 adapter=lora adapter.targets=q,v seed=1\n" in capsys.readouterr().out


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


def test_a_change_of_weights_that_are_read_again_is_said(start, tmp_path, capsys):
    """Not of those that a run only began with: a checkpoint holds what became of them."""
    assert start("run=first", "save.final=true") == 0
    folder = tmp_path / "first" / "weights"
    words = f"model.weights={folder}", "checkpoint.every=2", "optimizer.schedule=constant"
    teacher = f"objective.teacher={folder}"
    runs = {
        "model.weights": ("run=adapted", "adapter=lora", *words),
        "objective.teacher": ("run=taught", "objective=distill", teacher, "tiling.n=4", *words[1:]),
        None: ("run=plain", *words),
    }
    said = lambda: [line for line in capsys.readouterr().out.splitlines() if "changed  " in line and "weights" in line]
    for key, words in runs.items():
        assert start(*words, "steps=2") == 0
        assert key is None or start(*words, "steps=4") == 0
    assert not said()
    (file,) = folder.glob("*.safetensors")
    save_file({name: array + 0.01 for name, array in load_file(file).items()}, file)
    for key, words in runs.items():
        assert start(*words, "steps=6") == 0
        expected = [f"{key}: the weights are not what they were"] if key else []
        assert [line.partition("changed  ")[2] for line in said()] == expected


def test_preferences_are_learned_from_what_the_run_starts_from(start, tmp_path, capsys):
    words = ["objective=dpo", "data=preference", "seq_len=64", "tiling.n=4", "batch_size=16", "steps=20"]
    assert start("run=pairs", *words, "optimizer=adamw", "optimizer.learning_rate=0.01") == 0
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["held_out_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert rows[0]["held_out_accuracy"] == pytest.approx(
        0.5, abs=0.3
    )  # policy and reference are the same: ties, or noise
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


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        (None, None),
        ("/there/hub/models--org--a--b/snapshots/1f2e", "org/a--b"),
        ("/there/models--org--a", "/there/models--org--a"),
        ("/there/snapshots/1f2e", "/there/snapshots/1f2e"),
    ],
)
def test_an_adapter_names_its_model_as_the_hub_does(weights, name):
    assert summary.base_name(weights) == name
