"""Being told to stop at any moment: no request is lost, each ends the run soon, and what is said of it is so."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from experiments.commandline import schema
from experiments.runtime import signals
from experiments.runtime.signals import Stop, Stopped
from tests.tiny import MODEL

WORDS = ["data=pydoc", *MODEL, "batch_size=2", "seq_len=16", "eval.batches=1", "hardware=cpu", "steps=100000"]
SOON = 5.0  # seconds from a signal to the end, and from one to the next line of a screen
RUN = [sys.executable, str(schema.CONF.parent / "experiments" / "run.py")]


def test_the_first_signal_is_remembered_and_asked_for():
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        stop.ask()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped, match="interrupted before the training began") as stopped:
            stop.ask()
        assert (stopped.value.status, stopped.value.trained) == (130, False)
        with pytest.raises(Stopped):
            stop.begin()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_is_not_lost_where_exceptions_are_swallowed():
    """As in JAX's callback of the garbage collector, where a KeyboardInterrupt was only printed."""
    callback = lambda phase, _: os.kill(os.getpid(), signal.SIGTERM) if phase == "start" else None
    with Stop() as stop:
        stop.begin()
        gc.callbacks.append(callback)
        gc.collect()
        gc.callbacks.remove(callback)
        assert stop.told(1) is signal.SIGTERM


def test_a_library_that_takes_the_wake_up_takes_no_signal():
    with Stop() as stop:
        stop.begin()
        taken = signal.set_wakeup_fd(-1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.told(1) is signal.SIGINT
        signal.set_wakeup_fd(taken)


@pytest.fixture
def heard():
    """SIGINT as a terminal gives it: what is begun in the background may have inherited to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


COMMANDS = {"run": WORDS, "generate": ["model=tiny", "prompt=x"], "score": [], "plots": []}


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_while_modules_are_read_leaves_no_traceback(name, tmp_path):
    (tmp_path / "numpy.py").write_text("import time; print('reading', flush=True); time.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, str(schema.CONF.parent / "experiments" / f"{name}.py"), *COMMANDS[name]]
    with subprocess.Popen(words, env=environment, **pipes) as process:
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGINT


BUSY = """
import gc, signal, sys, time
sys.modules["__main__"].__file__ = "/somewhere/bin/tiling-zoo"
import experiments.command
gc.callbacks.append(lambda *_: print("ready", flush=True) or time.sleep(60))
gc.collect()
"""


@pytest.mark.usefixtures("heard")
def test_an_interrupt_of_a_command_is_not_lost_where_exceptions_are_swallowed():
    words, pipes = [sys.executable, "-c", BUSY], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=schema.CONF.parent, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGINT


LATE = """
import ctypes, sys
from experiments.runtime.signals import Stop
with Stop(alone=True) as stop:
    if sys.argv[1] == "begin":
        stop.begin()
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # as in a compiler: C code without the lock of Python, in which no handler runs
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(
    ("begins", "count", "says"),
    [("no", 1, "error: interrupted before the training began"), ("begin", 2, "error: ended by a second SIGINT")],
)
def test_c_code_that_goes_on_is_ended(begins, count, says):
    words = [sys.executable, "-c", LATE, begins]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=schema.CONF.parent, **pipes)
    assert process.stdout.readline() == "ready\n"
    for _ in range(count):
        process.send_signal(signal.SIGINT)
        time.sleep(signals.SAME + 0.5)
    began = time.monotonic()
    _, error = process.communicate(timeout=30)
    assert time.monotonic() - began < SOON
    assert process.returncode == 130
    assert says in error


def begin(folder):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XLA_FLAGS": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*RUN, *WORDS, f"out={folder / 'runs'}", "run=cut"], env=environment, **pipes)
    assert process.stdout.readline() == "  starting ...\n"
    return process


def interrupted(folder, delay, number=signal.SIGINT):
    """Start a run, signal it after so many seconds; return its status, its words, and how long it took to end."""
    process = begin(folder)
    time.sleep(delay)
    process.send_signal(number)
    began = time.monotonic()
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error, time.monotonic() - began


def check(folder, delay):
    """Interrupt a run after so many seconds, and see that what it says is so; return whether it had trained."""
    run = folder / "runs" / "cut"
    pictures = {*run.glob("*.png")}  # of a run that this one goes on from
    status, out, error, seconds = interrupted(folder, delay)
    assert status == 130, (delay, status, out, error)
    shared = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # other work on this machine
    assert seconds < SOON * shared, (delay, seconds, out, error)
    assert "Traceback" not in error, error
    trained = "stopped by SIGINT after step" in error
    if trained:
        assert "run=cut goes on from there" in error
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"] is not None
    else:
        assert "error: interrupted before the training began" in error
        assert str(run) not in error
        assert {*run.glob("*.png")} == pictures
    return trained


def test_a_run_that_is_interrupted_at_its_start_says_so(tmp_path):
    assert not check(tmp_path, 0.3)


@pytest.mark.heavy
def test_no_interruption_is_lost_at_any_moment(tmp_path):
    """`INTERRUPTS=40 pytest -m heavy -k no_interruption` for more. Every second run starts with nothing compiled."""
    began, process = time.monotonic(), begin(tmp_path / "first")
    for line in process.stdout:
        if line.startswith("  step "):
            break
    start = time.monotonic() - began
    process.kill()
    process.communicate()
    draw, trained = random.Random(0), 0
    count = int(os.environ.get("INTERRUPTS", "6"))
    for index in range(count):
        delay = draw.uniform(0, 1.4 * start)
        trained += check(tmp_path / (f"cold-{index}" if index % 2 else "warm"), delay)
        print(f"{index}: after {delay:.1f} s of {start:.1f}, {trained} in training", flush=True)
    assert 0 < trained < count
