"""Runs that are killed, stopped and gone on with: the same bytes as one that never was, no step twice or missing."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from experiments.commandline import schema
from tests.experiments.runs import SEVERAL
from tests.quick import FLAGS
from tests.tiny import MODEL

ROOT = schema.CONF.parent
MICRO = [
    "data=pydoc",
    *MODEL,
    "batch_size=2",
    "seq_len=16",
    "eval.batches=1",
    "eval.every=25",
    "tiling=none",
    "hardware=cpu",
    "checkpoint.every=4",
]
MEASURED = ("step", "loss", "grad_norm", "learning_rate", "held_out_loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def environment(folder):
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XLA_FLAGS": FLAGS}


def launch(folder, *words):
    command = [sys.executable, str(ROOT / "experiments" / "run.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *words, f"out={folder}"], env=environment(folder), **pipes)


def finish(folder, *runs):
    """Carry out several runs in one process."""
    command = [sys.executable, "-c", SEVERAL, *(" ".join([*words, f"out={folder}"]) for words in runs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(folder), cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


def lines(folder, name):
    try:
        return (folder / name / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []


def measured(folder, name):
    return [{key: row[key] for key in MEASURED} for row in map(json.loads, lines(folder, name))]


def arrays(folder, name, step):
    """The hash of every array's file in a checkpoint."""
    listed = json.loads((folder / name / "checkpoints" / str(step) / "manifest.json").read_text())["files"]
    return {file: entry["sha256"] for file, entry in listed.items() if file.split("/")[-1][0].isdigit()}


def wait_for(process, enough):
    """Wait until something is so, or the process has ended by itself; no longer than a minute."""
    end = time.monotonic() + 60
    while not enough() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


def kill_again_and_again(folder, kills, steps):
    """Run a run, killing it at random moments; return how often that was in the middle of it."""
    draw, happened = random.Random(0), 0
    for _ in range(kills):
        before = len(lines(folder, "killed"))
        process = launch(folder, *MICRO, f"steps={steps}", "run=killed")
        wait_for(process, lambda before=before: before != len(lines(folder, "killed")))
        time.sleep(draw.uniform(0, 0.8))
        process.kill()
        process.communicate()
        happened += process.returncode == -signal.SIGKILL
    return happened


def stop(folder, steps, number):
    """Tell a run to stop in the middle, and see that it does, and has saved the step that it had reached."""
    before = len(lines(folder, "killed"))
    process = launch(folder, *MICRO, f"steps={steps}", "run=killed")
    wait_for(process, lambda: len(lines(folder, "killed")) > before + 1)
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 128 + number, error
    last = measured(folder, "killed")[-1]["step"]
    assert f"stopped by {number.name} after step {last} of {steps}; run=killed goes on from there" in error
    assert arrays(folder, "killed", last)


def check(folder, kills, steps):
    happened = kill_again_and_again(folder, kills, steps)
    stop(folder, steps, signal.SIGTERM)
    words = [*MICRO, f"steps={steps}"]
    finish(folder, [*words, "run=killed"], [*words, "run=whole", f"checkpoint.every={steps}"])
    assert happened > kills * 0.9
    assert [row["step"] for row in measured(folder, "killed")] == list(range(steps + 1))
    assert measured(folder, "killed") == measured(folder, "whole")
    assert len(arrays(folder, "whole", steps)) > 30
    assert arrays(folder, "killed", steps) == arrays(folder, "whole", steps)


def test_a_killed_run_goes_on_to_the_same_bytes(folder):
    check(folder, 1, 120)


@pytest.mark.heavy
def test_a_run_killed_all_the_time_goes_on_to_the_same_bytes(tmp_path):
    """`KILLS=20 pytest -m heavy tests/experiments/test_resume.py` for fewer."""
    kills = int(os.environ.get("KILLS", "200"))
    check(tmp_path, kills, 40 * kills)
