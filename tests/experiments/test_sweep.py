"""A sweep's jobs, when the sweep is told to stop."""

import os
import signal
import sys
import threading
import time

import pytest
from hydra.core.hydra_config import HydraConfig

from experiments import sweep

JOB = """
import pathlib, signal, sys, time
def told(*_):
    time.sleep(0.5)  # it saves
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, told)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""


@pytest.fixture
def hears_ctrl_c():
    """A shell's background jobs ignore it, and so would these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_a_sweep_that_is_interrupted_lets_its_job_save(tmp_path):
    def interrupt():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert sweep._carried_out([sys.executable, "-c", JOB, str(tmp_path)]) == 130
    thread.join()
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("flag", [["-m"], ["--multirun"], []])
def test_the_flag_may_stand_anywhere_or_be_left_out(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr(sweep, "job", lambda _: ran.append(list(HydraConfig.get().overrides.task)) or 0)
    assert sweep.main(["model=tiny", *flag, "seed=0,1", f"hydra.sweep.dir={tmp_path}"]) == 0
    assert ran == [["model=tiny", "seed=0"], ["model=tiny", "seed=1"]]
