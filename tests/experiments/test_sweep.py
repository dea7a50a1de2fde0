"""A sweep's jobs, when the sweep is told to stop."""

import os
import signal
import sys
import threading
import time

import pytest

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
