"""Train a model: `python experiments/run.py model=gemma2b tiling.n=8`. `--help` lists the groups and options.

JAX is imported only once the configuration is known to be right.
"""

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are read, Ctrl-C ends the process without a traceback
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments import configs
from experiments.command import ended
from experiments.commandline import overrides, schema
from experiments.commandline.console import CommandError, write_any_text
from experiments.commandline.usage import tell
from experiments.results.directory import Directory, dump, resumed
from experiments.results.metrics import check_loggers
from experiments.runtime import remote
from experiments.runtime.signals import Stop, Stopped


def main(argv: list[str]) -> int:
    """Return the exit status: 0 trained; 1 did not fit, diverged or could not run; 2 wrong configuration."""
    write_any_text()
    if {"-h", "--help"}.intersection(argv):
        return tell("config", argv)
    if "--models" in argv:
        from experiments.commandline import listing

        print(listing.plain())
        return 0
    if {"-m", "--multirun"}.intersection(argv):
        from experiments import sweep

        return sweep.main(argv)
    with Stop(alone=True) as stop:
        return carry_out(argv, stop)


def carry_out(argv: list[str], stop: Stop) -> int:
    """Do what a command line asks for, but to help; return the exit status, as `main` does."""
    if "--cfg" not in argv:
        print("  starting ...", flush=True)  # JAX takes seconds to be imported
    try:
        words = resumed([word for word in argv if word != "--cfg"], configs.Run.out, remote.run_folder)
        config, choices = schema.compose(words)
        if "--cfg" in argv:
            print(dump(config, words), end="")
            return 0
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own log: errors only
        stop.ask()
        if config.compile_for is not None:
            from experiments.planning import ahead

            return ahead.start(config, choices, words)
        check_loggers(config.save)
        config, exact, mirror = remote.here(config)
        return start(config, choices, words, stop, exact, mirror)
    except (schema.ConfigError, CommandError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"\nerror: {stopped}", file=sys.stderr)
        return stopped.status


def start(
    config: configs.Run,
    choices: Mapping[str, str],
    argv: Sequence[str],
    stop: Stop,
    exact: Mapping[str, configs.Choice] = MappingProxyType({}),
    mirror: remote.Mirror | None = None,
) -> int:
    """Carry out a run that reads and writes on this machine. JAX is imported from here on.

    Args:
        config: the run.
        choices: each group's option.
        argv: the overrides that say so.
        stop: entered already, hears of an end.
        exact: the versions of what it reads that comes from the hub.
        mirror: copies its directory to where it is to be, if that is elsewhere.

    Returns:
        The exit status; every expected error is said in one message.
    """
    from experiments.data.batches import open_source
    from experiments.planning import cost, resolve, suggest
    from experiments.results import summary
    from experiments.runtime import hardware, meshes, own
    from experiments.step import build
    from experiments.training import checkpoints, errors, loop

    began, name = time.perf_counter(), choices["model"]
    with contextlib.ExitStack() as held:
        outcome = held.enter_context(errors.Errors())
        stop.ask()  # JAX has been imported meanwhile
        # Where it goes, and the machine.
        directory = Directory.find(config.out, config.run, name, mirror)
        outcome.directory = directory
        hardware.join_processes(config.distributed, stop)
        directory.check()
        stop.ask()
        device = hardware.prepare(config.hardware.platform)
        hardware.allow(config.hardware)
        # Every open value, the programs, the data: whatever is wrong with what was asked for is found here.
        run = resolve.chosen_for(own.described(config, argv), device)
        outcome.run, chosen = run, {**run.chosen, **exact}
        held.enter_context(meshes.spread(run.mesh))
        programs = build.checked(run)
        stop.ask()
        source = open_source(run)
        stop.ask()
        held.enter_context(directory)
        checkpoints.check_begun(directory.path, programs.kept_state, run.steps)
        outcome.begun = True
        # What it costs: refused here, or trained.
        cost.say(source.text, chosen)
        remedy = functools.partial(suggest.remedy, run, overrides.variations(argv), device, stop.ask)
        plan = cost.report(cost.estimate(programs, device), run, name, device, remedy)
        stop.ask()
        if not run.plan:
            about = directory.open(run, argv, chosen, data=source.fingerprint, sources=run.sources)
            outcome.plan = plan
            with loop.opened(directory, programs, plan, about, stop, began) as opened:
                model = loop.train(programs, source, opened, stop)
            outcome.plan = None
            saved = summary.save_weights(model, run, opened.path)
            print(summary.words(opened.path, opened.recorder, opened.known, saved, time.perf_counter() - began))
    return outcome.status


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
