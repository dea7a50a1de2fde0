"""One run from a configuration to a directory of results: choose, check, show the cost, train, draw."""

import dataclasses
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

import zoo.accounting
from experiments import configs
from experiments.commandline import overrides, usage
from experiments.configs.registry import name_of
from experiments.data import batches
from experiments.planning import preflight, table
from experiments.planning.preflight import DoesNotFitError, Plan
from experiments.results.directory import Directory, DirectoryError
from experiments.results.loggers import missing, open_loggers
from experiments.results.metrics import Progress, Recorder
from experiments.runtime import distributed, hardware, manifest, meshes
from experiments.runtime.distributed import DistributedError
from experiments.runtime.hardware import GIB, Device, HardwareError
from experiments.runtime.signals import Stop, Stopped
from experiments.step import own, program, reference, tiles
from experiments.step.own import OwnError
from experiments.step.program import OutOfMemoryError
from experiments.training.checkpoints import CheckpointError, Checkpoints
from transforms import TileError
from zoo.adapters import lora

T = TypeVar("T", bound=Any)


class RunError(RuntimeError):
    """A run that cannot start or go on, in words for the user."""


def check_options(options: dict[str, Any]) -> None:
    """Find out whether XLA knows the options of a run, on a program of nothing.

    Raises:
        RunError: it does not, or not with such a value.
    """
    try:
        if options:  # a run without any compiles nothing for this
            jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        raise RunError(f"cannot use hardware.compiler_options={options}: {str(error).splitlines()[0]}") from None


def start(config: configs.Run, choices: dict[str, str], argv: Sequence[str], stop: Stop | None = None) -> int:
    """Carry out a run and return its exit status, every expected error in one message.

    Args:
        config: the run.
        choices: the option of each group.
        argv: the overrides that say so.
        stop: what hears that the run is to end, entered already; None: from here on.
    """
    if stop is None:
        with Stop() as stop:
            return start(config, choices, argv, stop)
    began = time.perf_counter()
    try:
        stop.ask()  # JAX has been imported meanwhile
        if problem := missing(config.save):
            raise RunError(problem)
        config = with_weights(config, argv)
        directory = Directory.find(config, choices["model"])
        distributed.join(config.distributed)
        if distributed.several():
            stop.share()
        stop.ask()
        device = hardware.prepare(config.hardware.platform)
        hardware.allow(config.hardware)
        config, chosen = hardware.resolve(config, device)
        check(config)
        check_options(config.hardware.compiler_options)
        stop.ask()
        source = batches.open_source(config)
        stop.ask()
        directory.hold()
    except Stopped as stopped:
        return _fail(stopped, stopped.status)
    except (RunError, DirectoryError, DistributedError, HardwareError, batches.DataError) as error:
        return _fail(error, 2)
    from experiments.training.loop import DivergedError

    if source.text is not None:
        print("\n".join(textwrap.wrap(f"text: {source.text}", table.width(), **table.INDENT)), flush=True)
    try:
        with meshes.spread(config):
            plan = _preflight(config, choices["model"], chosen, argv, device, stop)
            stop.ask()
            if config.plan:
                return 0
            _train(config, directory, plan, source, overrides.pinned(argv, chosen), argv, began, stop)
    except (RunError, DirectoryError, DoesNotFitError, DivergedError, CheckpointError, TileError, OwnError) as error:
        if isinstance(error, DivergedError) and config.on_nan is configs.OnNan["raise"]:
            raise
        return _fail(error, 1)
    except OSError as error:
        return _fail(_in_the_way(error, directory), 1)
    except Stopped as stopped:
        if not stopped.trained:
            return _fail(stopped, stopped.status)
        name, saved = configs.chosen(directory.path).name, config.checkpoint.wanted
        then = f"run={name} goes on from there" if saved else "nothing is saved, as there are no checkpoints"
        print(f"\n{stopped}; {then}", file=sys.stderr)
        return stopped.status
    finally:
        directory.release()
    return 0


def _in_the_way(error: OSError, directory: Directory) -> RunError:
    again = "" if directory.path is None else f"; run={directory.path.name} then goes on from the last checkpoint"
    return RunError(f"cannot go on: {manifest.reason(error)}. Make room or change what is in the way{again}.")


def _fail(error: Exception, status: int) -> int:
    sys.stdout.flush()
    print(f"error: {error}" if status == 2 else f"\nerror: {error}", file=sys.stderr)
    return status


def with_weights(config: T, argv: Sequence[str]) -> T:
    """Return a run (or another command) with the architecture that its weights' folder describes.

    Raises:
        RunError: there are no such weights, or they are another model's than the one asked for.
    """
    if config.model.weights is None:
        return config
    from zoo.huggingface.config import from_hf

    path = Path(config.model.weights).expanduser()
    try:
        described = from_hf(json.loads((path / "config.json").read_text()))
    except OSError as error:
        fetch = "" if path.is_dir() else ". It names a folder: nothing is fetched. Download the files of a model first"
        raise RunError(f"cannot read model.weights={path}: {error.strerror} ({error.filename}){fetch}") from None
    except ValueError as error:
        raise RunError(f"cannot use model.weights={path}: {error}") from None
    if any(word.startswith("model") and not word.startswith("model.weights=") for word in argv):
        both = config.model.config, described
        ours, theirs = ({"family": type(one).__name__, **dataclasses.asdict(one)} for one in both)
        if wrong := [f"{k}: {ours[k]} here, {theirs[k]} there" for k in ours if ours[k] != theirs.get(k, ours[k])]:
            raise RunError(f"model.weights={path} holds another model than the one asked for: {'; '.join(wrong)}")
    return dataclasses.replace(config, model=configs.Model(config=described, weights=str(path)))


def check(config: configs.Resolved) -> None:
    """Raise a RunError if a run cannot be carried out as it is asked for, before anything is compiled."""
    if problem := meshes.problem(config) or tiles.problem(config):
        raise RunError(problem)
    try:
        reference.described(config)
        program.check_names(config)
    except ValueError as error:
        raise RunError(str(error)) from None
    if config.profile.span is not None and config.profile.span[1] > config.steps:
        raise RunError(f"bad value profile.steps={config.profile.steps}: the run has {config.steps} steps")
    if isinstance(config.adapter, configs.Lora):
        try:
            lora.match(config.model.config, config.adapter.patterns)
        except ValueError as error:
            said = str(error).replace(":\n  ", ": ").replace("\n  ", ", ")
            raise RunError(f"bad value adapter.targets={config.adapter.targets}: {said}") from None


def _preflight(
    config: configs.Resolved, model: str, chosen: dict, argv: Sequence[str], device: Device, stop: Stop
) -> Plan:
    """Print what was chosen and what the run will cost.

    Raises:
        DoesNotFitError: with overrides that would fit; nothing has been allocated.
        Stopped: the process was told to end.
    """
    if chosen:
        print(table.choices(chosen), flush=True)
    began = time.perf_counter()
    params = zoo.accounting.count_params(config.model.config)
    itemsize = 2 if config.hardware.param_dtype is configs.DType.bfloat16 else 4
    least, free = 2 * params * itemsize // config.mesh.devices, preflight.available(config, device)
    if least > 4 * free:  # compiling would only waste time
        need = f"its weights and gradients alone take {table.size(least)}.\n"
    else:
        print("  compiling ...", flush=True)
        try:
            plan = preflight.plan(config, device)
        except OutOfMemoryError as error:
            need = f"the compiler says\n{error}\n"
        else:
            name = name_of("optimizer", config.optimizer)
            print(table.render(model, config, plan, device, name))
            print(f"  compiled in {time.perf_counter() - began:.1f} s", flush=True)
            if plan.fits:
                return plan
            total, free_too = table.size(plan.memory.total), table.size(plan.headroom)
            need = f"the compiled step takes {total} and {free_too} must stay free.\n"
    stop.ask()
    remedy = _remedy(config, argv, device, free, stop)
    raise DoesNotFitError(f"{model} does not fit in {table.size(free)}: {need}{remedy}")


def _remedy(config: configs.Resolved, argv: Sequence[str], device: Device, free: int, stop: Stop) -> str:
    if (kept := preflight.headroom(config)) >= free:
        return f"hardware.headroom_gib={kept / GIB:g} alone keeps all of it free: lower it."
    print("  looking for what would fit ...", flush=True)
    found = preflight.suggest(argv, config, device, stop.ask)
    if found is not None:
        changes, total = found
        return f"This fits ({table.size(total)}): {' '.join(changes)}"
    smaller = preflight.largest_model(lambda params: 2 * 2 * params * 1.3 < free - preflight.headroom(config))
    return "Nothing that leaves the model as it is was found to fit." + (f" Try model={smaller}." if smaller else "")


def _train(
    config: configs.Resolved,
    directory: Directory,
    plan: Plan,
    source: Any,
    words: Sequence[str],
    argv: Sequence[str],
    began: float,
    stop: Stop,
) -> None:
    from experiments.results import plots, summary
    from experiments.training.loop import Trainer

    progress = Progress(config.steps, config.log_every)
    hashes = {"data": batches.fingerprint(source), "sources": own.sources(config)}
    about = {"overrides": list(words), "config": usage.plain(config), **hashes}
    restored = None
    if directory.path is not None and directory.before is not None:
        restored = _restore(config, directory, plan, about, progress)
    path = directory.open(about, config, argv)
    checkpoints = _checkpoints(config, path, plan, about, progress) if config.checkpoint.wanted else None
    done = restored[0] if restored is not None else None
    if distributed.first():
        plots.remember(path, plots.facts(plan, config))
        recorder = Recorder(path, open_loggers(path, config, done), done)
        if done is not None and len(recorder.records) <= done:
            progress.say(
                f"  warning: metrics.jsonl has {len(recorder.records)} of the {done + 1} records up to step {done}"
            )
    else:
        recorder = Recorder(None)
    try:
        with program.out_of_memory():
            model = Trainer(config, plan, source, recorder, progress, checkpoints, path, stop, restored).run()
    except OutOfMemoryError as error:
        raise RunError(_ran_out(error, plan)) from None
    except ValueError as error:
        raise RunError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        if distributed.several():
            distributed.abandon(error, path.name)
        raise
    finally:
        progress.close()
        summary.leave(path, recorder, plan, config, time.perf_counter() - began)
        if checkpoints is not None:
            checkpoints.close()
    if config.save.final:
        summary.save_weights(model, config, path)
    print(summary.words(path, recorder, plan, config, time.perf_counter() - began))


def _ran_out(error: OutOfMemoryError, plan: Plan) -> str:
    return (
        f"out of memory, where {table.size(plan.memory.total)} were planned for the step and "
        f"{table.size(plan.headroom)} kept free:\n{error}\n"
        "Give more tiles (tiling.n), a smaller batch_size or remat=full. hardware.headroom_gib is what must stay free."
    )


def _restore(
    config: configs.Resolved, directory: Directory, plan: Plan, about: dict[str, Any], progress: Progress
) -> tuple[int, Any] | None:
    """Return the step and the state that a run goes on from, saying what has changed since; None: its beginning."""
    for change in directory.changes(config, about["data"], about["sources"]):
        progress.say(f"  changed  {change}")
    assert directory.path is not None
    checkpoints = _checkpoints(config, directory.path, plan, about, progress)
    try:
        found = checkpoints.restore(program.kept(config, plan.state))
    finally:
        checkpoints.close()
    if found is None:
        progress.say(f"  {directory.path} has no checkpoint yet: from the beginning")
    elif found[0] >= config.steps:
        progress.say(f"  {directory.path} has all its {found[0]} steps; give steps=MORE for more")
    else:
        progress.say(f"  {directory.path} goes on after step {found[0]} of {config.steps}")
    return found


def _checkpoints(
    config: configs.Resolved, path: Path, plan: Plan, about: dict[str, Any], progress: Progress
) -> Checkpoints:
    """Return what writes a run's checkpoints: in the background where that fits into memory.

    Raises:
        RunError: there is no room on the disk for one.
    """
    how = config.checkpoint
    need = preflight.bytes_of(program.kept(config, plan.state))
    there = sum(name.name.isdecimal() for name in (path / "checkpoints").glob("*"))
    more = max(1, min(how.keep + 1, config.steps) - there)  # the one that is written stands beside those that are kept
    room = shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists())).free
    if how.wanted and room < more * need:
        kept = f"checkpoint.keep={how.keep}, and one more while it is written"
        several = "" if more == 1 else f", {more} of them {table.size(more * need)} ({kept})"
        raise RunError(
            f"a checkpoint takes {table.size(need)}{several}, and there is room for {table.size(room)} at {path}: "
            f"free some, keep fewer, give out=FOLDER on another disk, or checkpoint=none."
        )
    on_host = config.hardware.platform is configs.Platform.cpu
    free = plan.available - plan.memory.total - plan.headroom if on_host else hardware.host_memory() // 2
    background = need <= free if how.background is None else how.background
    return Checkpoints(
        path / "checkpoints",
        about,
        keep=how.keep,
        keep_every=how.keep_every,
        background=background,
        warn=lambda text: progress.say(f"  warning: {text}"),
    )
