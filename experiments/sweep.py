"""Sweep over values: each combination is a run in a process of its own, by Hydra's own sweepers and launchers.

    python experiments/run.py -m tiling.n=1,8 seed=0,1
    python experiments/sweep.py -m hydra/launcher=submitit_slurm hydra.launcher.timeout_min=60 tiling.n=1,8 seed=0,1

The first carries them out here, one after another; a cluster's launcher needs its package (`.[slurm]`), and its options
are `hydra.launcher.*`.
"""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments.command import ended
from experiments.commandline import console, options, overrides, schema, spelling

MULTIRUN = ("-m", "--multirun")
# What a sweep hears, and what it tells the job that is running.
TOLD = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


def job(_: Any) -> int:
    """Carry out one combination and return its exit status.

    Raises:
        SystemExit: it was told to stop, and so is the sweep.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    words = [spelling.typed(word, options.by_key()) for word in hydra.overrides.task]
    print(f"\n{' '.join(words)}", flush=True)
    run = str(Path(__file__).with_name("run.py"))
    code = _carried_out([sys.executable, run, *overrides.numbered(words, int(hydra.job.num))])
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise SystemExit(code)
    return code


def elsewhere(config: Any) -> int:
    """Carry out one combination for a cluster's launcher, which sees a failure where one is raised."""
    if code := job(config):
        raise RuntimeError(f"the run ended with status {code}")
    return 0


def main(argv: list[str]) -> int:
    """Hand over to Hydra; return the exit status, of several jobs that failed the largest."""
    launched = any(word.startswith("hydra/launcher=") for word in argv)
    if any(word.startswith("hydra/launcher=submitit") for word in argv) and not _has_submitit():
        print(f"error: hydra/launcher=submitit needs the extra: {console.install('slurm')}", file=sys.stderr)
        return 2
    import hydra

    known, before, ended = options.by_key(), sys.argv, [0]
    asked = [word for word in argv if not word.startswith(("-", "hydra"))]
    try:  # what is wrong is said once, in our words
        schema.compose([spelling.swept(word, known)[0] for word in spelling.named(asked)])
    except schema.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counted = lambda config: ended.append(job(config))
    task = hydra.main(version_base="1.3", config_path=str(schema.CONF), config_name="config")
    words = [spelling.swept_by_hydra(word, known) for word in spelling.named(argv) if word not in MULTIRUN]
    flags = {word for word in argv if word.startswith("-")}
    swept = MULTIRUN[:1] if not flags or flags.intersection(MULTIRUN) else ()  # or Hydra's `--info`
    sys.argv = [before[0], *swept, *words]  # a flag comes first, as Hydra reads none between overrides
    try:
        task(elsewhere if launched else counted)()
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 1
    finally:
        sys.argv = before
    return max(ended)


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


def _has_submitit() -> bool:
    try:
        return importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
