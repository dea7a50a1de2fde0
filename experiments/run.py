"""Train a model: `python experiments/run.py model=gemma2b tiling.n=8`. `--help` lists the groups and options.

JAX is imported only once the configuration is known to be right.
"""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] != str(ROOT):  # as a script, Python puts this file's own folder first
    sys.path.insert(0, str(ROOT))

from experiments import configs  # noqa: E402
from experiments.command import ended  # noqa: E402
from experiments.commandline import options, overrides, schema, spelling  # noqa: E402
from experiments.commandline.usage import dump, tell  # noqa: E402
from experiments.runtime.signals import Stop, Stopped  # noqa: E402

# What a sweep hears, and what it tells the job that is running.
TOLD = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


def main(argv: list[str]) -> int:
    """Return the exit status: 0 trained; 1 did not fit, diverged or could not run; 2 wrong configuration."""
    if {"-h", "--help"}.intersection(argv):
        return tell("config", argv)
    if "--models" in argv:
        from experiments.commandline import listing

        print(listing.plain())
        return 0
    if {"-m", "--multirun"}.intersection(argv):
        return _sweep([word for word in argv if word not in ("-m", "--multirun")])
    with Stop(alone=True) as stop:
        return _run(argv, stop)


def _run(argv: list[str], stop: Stop) -> int:
    if "--cfg" not in argv:
        print("  starting ...", flush=True)  # JAX takes seconds to be imported
    try:
        words = overrides.resumed([word for word in argv if word != "--cfg"], configs.Run.out)
        config, choices = schema.compose(words)
        if "--cfg" in argv:
            print(dump(config, words), end="")
            return 0
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own log: errors only
        stop.ask()
        if config.compile_for is not None:
            from experiments.planning import ahead

            return ahead.start(config, choices, words)
        from experiments.training import session  # from here on JAX may be imported

        return session.start(config, choices, words, stop)
    except schema.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"\nerror: {stopped}", file=sys.stderr)
        return stopped.status


def _sweep(words: list[str]) -> int:
    """Run every combination of comma-separated values, each in a process and a run directory of its own."""
    choices = [spelling.swept(word, options.by_key()) for word in words]
    status = 0
    for number, combination in enumerate(itertools.product(*choices)):
        print(f"\n{' '.join(combination)}", flush=True)
        code = _carried_out([sys.executable, __file__, *overrides.numbered(combination, number)])
        status = max(status, code)
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):  # it was told to stop, and so is the sweep
            break
    return status


def _carried_out(command: list[str]) -> int:
    """Return a job's exit status; it is told what this process is told, and waited for while it saves."""
    # A session of its own: Ctrl-C comes to this process alone, which passes it on once.
    job = subprocess.Popen(command, start_new_session=True)
    tell = lambda number, _: job.send_signal(TOLD[number])
    heard = [number for number in TOLD if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, tell) for number in heard}
    try:
        code = job.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
