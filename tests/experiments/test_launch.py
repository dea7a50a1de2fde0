"""Several processes: one run between them, ended together when one is gone, gone on with by any number of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import configs, launch
from experiments.commandline import schema
from experiments.results import directory
from tests.experiments.runs import SEVERAL
from tests.quick import FLAGS
from tests.tiny import MODEL

MICRO = [
    "data=pydoc",
    *MODEL,
    "batch_size=8",
    "seq_len=16",
    "eval.batches=1",
    "eval.every=0",
    "tiling=none",
    "hardware=cpu",
    "mesh.data=4",
    "optimizer.schedule=constant",
    "optimizer.warmup=0",
    "checkpoint.every=5",
]
ROOT = schema.CONF.parent


def begin(folder, *command, devices):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    environment["XLA_FLAGS"] = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], env=environment, cwd=ROOT, **pipes)


def rows(folder, name):
    try:
        return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    except (FileNotFoundError, ValueError):
        return []


def children(process):
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def two_processes(folder, enough, number, which=None):
    """Start a run in two processes of two devices, give it (or one of them) a signal; return its status and words."""
    words = ["steps=100000", "run=both", *MICRO, f"out={folder}"]
    process = begin(folder, "experiments/launch.py", "-n", "2", "--devices", "2", *words, devices=1)
    end = time.monotonic() + 120
    while len(rows(folder, "both")) < enough and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(process.pid if which is None else int(children(process)[which]), number)
    _, error = process.communicate(timeout=20)  # the one that is left has so long
    return process.returncode, error


def test_a_run_whose_process_dies_ends_and_goes_on_in_another_number_of_them(tmp_path):
    status, error = two_processes(tmp_path, 8, signal.SIGKILL, which=1)
    assert status == 128 + signal.SIGKILL, error
    assert "error: process 1 of 2 was ended by SIGKILL, and the run with it." in error
    runs = (" ".join([f"run={name}", "steps=20", *MICRO, f"out={tmp_path}"]) for name in ("both", "alone"))
    process = begin(tmp_path, "-c", SEVERAL, *runs, devices=4)
    assert process.communicate(timeout=240)[1] == ""
    assert process.returncode == 0
    both, alone = rows(tmp_path, "both"), rows(tmp_path, "alone")
    assert [row["step"] for row in both] == list(range(21))
    assert [row["loss"] for row in both[1:]] == pytest.approx([row["loss"] for row in alone[1:]], rel=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("which", [None, 1])
def test_one_that_is_told_to_stop_stops_all_after_the_same_step(tmp_path, which):
    status, error = two_processes(tmp_path, 8, signal.SIGTERM, which)
    assert status == 128 + signal.SIGTERM, error
    steps = set(re.findall(r"stopped by SIGTERM after step (\d+) of 100000", error))
    assert steps == {str(rows(tmp_path, "both")[-1]["step"])}
    assert (tmp_path / "both" / "checkpoints" / steps.pop() / "manifest.json").exists()


@pytest.mark.heavy
def test_the_death_of_the_first_process_ends_the_others(tmp_path):
    status, error = two_processes(tmp_path, 8, signal.SIGKILL, which=0)
    assert status == 128 + signal.SIGKILL
    assert "error: process 0 of 2 was ended by SIGKILL, and the run with it." in error


def test_what_is_wrong_is_said_once_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr(launch, "Processes", None)  # would fail if it were reached
    assert launch.main(["-n", "2", "tiling.nn=3"]) == 2
    assert capsys.readouterr().err.count("there is no `tiling.nn`") == 1
    with pytest.raises(SystemExit):
        launch.main(["-n", "0"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coordinator": "a:1"}, r"distributed.processes=... and distributed.process=... must be given as well"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "there are 2, counted from 0"),
        ({"coordinator": "a:1", "processes": 2, "process": 0, "auto": True}, "says already which processes"),
    ],
)
def test_processes_are_named_in_full(values, message):
    with pytest.raises(ValueError, match=message):
        configs.Distributed(**values)


def test_a_run_that_goes_on_forgets_the_processes_it_had(tmp_path):
    (tmp_path / "x").mkdir()
    before = {"overrides": ["seed=1", "steps=3", "distributed.process=1", f"out={tmp_path}", "run=x"], "config": {}}
    (tmp_path / "x" / "run.json").write_text(json.dumps(before))
    words = ["run=x", f"out={tmp_path}", "steps=4"]
    assert sorted(directory.resumed(words, "runs")) == sorted(["seed=1", *words])
