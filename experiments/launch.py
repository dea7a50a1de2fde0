"""Start one run in several processes on this machine: `python experiments/launch.py -n 2 mesh.data=-1 ...`.

Clusters start processes themselves: there, `run.py distributed.auto=true` is all.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

GRACE = 8.0  # seconds that processes have to end by themselves once one of them is gone


def main(argv: list[str]) -> int:
    """Return the exit status: that of the first process that failed."""
    parser = argparse.ArgumentParser("launch.py", description="Start one run in several processes on this machine.")
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many")
    parser.add_argument("--devices", type=int, default=1, help="devices that each makes of the CPU (default 1)")
    options, words = parser.parse_known_args(argv)
    if options.processes < 1 or options.devices < 1:
        parser.error("there must be one process at least, with one device")
    from experiments import configs
    from experiments.commandline import schema
    from experiments.results import directory

    try:
        schema.compose(directory.resumed(words, configs.Run.out))  # what is wrong is said once
    except schema.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return Processes(options.processes, options.devices, words).wait()


class Processes:
    """The processes of one run."""

    def __init__(self, count: int, devices: int, words: Sequence[str]):
        self._told = 0
        handler = lambda number, _: self._tell()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "XLA_FLAGS": flags.strip()}
        coordinator = f"distributed.coordinator=127.0.0.1:{_free_port()}"
        command = [sys.executable, str(Path(__file__).with_name("run.py")), *words, coordinator]
        self._processes = []
        for index in range(count):
            which = [f"distributed.processes={count}", f"distributed.process={index}"]
            said = None if index == 0 else subprocess.PIPE
            # A session of its own: Ctrl-C comes to this process alone, which passes it on once.
            one = subprocess.Popen([*command, *which], env=environment, stderr=said, text=True, start_new_session=True)
            self._processes.append(one)
            if one.stderr is not None:
                threading.Thread(target=_repeat, args=(one.stderr, index), daemon=True).start()

    def wait(self) -> int:
        """Return the exit status once all have ended; when one fails, the others are ended."""
        while True:
            running = any(one.poll() is None for one in self._processes)
            failed = [index for index, one in enumerate(self._processes) if one.returncode not in (None, 0)]
            if failed:  # of several, one that a signal ended: the others noticed that it was gone
                return self._end(min(failed, key=lambda index: self._processes[index].returncode))
            if not running:
                return 0
            time.sleep(0.1)

    def _end(self, index: int) -> int:
        first = _status(self._processes[index].returncode)
        patience = time.monotonic() + (GRACE if not self._told else 600)
        while any(one.poll() is None for one in self._processes) and time.monotonic() < patience:
            time.sleep(0.1)
        for one in self._processes:
            if one.poll() is None:
                one.kill()
                one.wait()
        if not self._told:
            count, code = len(self._processes), self._processes[index].returncode
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            print(
                f"error: process {index} of {count} {how}, and the run with it. "
                f"The same command with run=NAME goes on from the last checkpoint.",
                file=sys.stderr,
            )
        return first

    def _tell(self) -> None:
        """Tell all to stop; the second time, end them."""
        self._told += 1
        for one in self._processes:
            if one.poll() is None:
                one.send_signal(signal.SIGTERM if self._told == 1 else signal.SIGKILL)


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _repeat(stream: IO[str], index: int) -> None:
    for line in stream:
        print(f"[process {index}] {line}", end="", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
