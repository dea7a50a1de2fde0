"""Says what a run will cost before anything is allocated, and refuses one that does not fit, with what would."""

import textwrap
import time
from collections.abc import Callable, Mapping

import zoo.accounting
from experiments import configs
from experiments.planning import cost, table
from experiments.planning.cost import Plan
from experiments.planning.suggest import Asked, largest_model, suggest
from experiments.runtime.hardware import Device
from experiments.runtime.numbers import GIB, size
from experiments.step.build import OutOfMemoryError, Programs


class DoesNotFitError(RuntimeError):
    """The compiled step needs more memory than there is."""


def report(programs: Programs, model: str, asked: Asked, device: Device, ask: Callable[[], None]) -> Plan:
    """Print what a run will cost, and return it.

    Args:
        programs: the run's, not compiled yet.
        model: its name.
        asked: returns the run as it would be asked for with some overrides changed.
        device: what it is to fit.
        ask: may raise, where the process was told to end.

    Raises:
        DoesNotFitError: with overrides that would fit; nothing has been allocated.
    """
    config = programs.config
    began = time.perf_counter()
    params = zoo.accounting.count_params(config.model.config)
    itemsize = 2 if config.hardware.param_dtype is configs.DType.bfloat16 else 4
    least, free = 2 * params * itemsize // config.mesh.devices, cost.available(config, device)
    if least > 4 * free:  # compiling would only waste time
        need = f"its weights and gradients alone take {size(least)}.\n"
    else:
        print("  compiling ...", flush=True)
        try:
            plan = cost.plan(programs, device)
        except OutOfMemoryError as error:
            need = f"the compiler says\n{error}\n"
        else:
            print(table.render(model, config, plan, device))
            print(f"  compiled in {time.perf_counter() - began:.1f} s", flush=True)
            if plan.fits:
                return plan
            total, free_too = size(plan.memory.total), size(plan.headroom)
            need = f"the compiled step takes {total} and {free_too} must stay free.\n"
    ask()
    raise DoesNotFitError(f"{model} does not fit in {size(free)}: {need}{_remedy(config, asked, device, free, ask)}")


def say(text: str | None, chosen: Mapping[str, configs.Choice]) -> None:
    """Print what the ids that are read stand for, where that is known, and what was chosen for the user."""
    if text is not None:
        print("\n".join(textwrap.wrap(f"text: {text}", table.width(), **table.INDENT)), flush=True)
    if chosen:
        print(table.choices(chosen), flush=True)


def _remedy(config: configs.Resolved, asked: Asked, device: Device, free: int, ask: Callable[[], None]) -> str:
    if (kept := cost.headroom(config)) >= free:
        return f"hardware.headroom_gib={kept / GIB:g} alone keeps all of it free: lower it."
    print("  looking for what would fit ...", flush=True)
    if (found := suggest(config, asked, device, ask)) is not None:
        changes, total = found
        return f"This fits ({size(total)}): {' '.join(changes)}"
    smaller = largest_model(lambda params: 2 * 2 * params * 1.3 < free - kept)
    return "Nothing that leaves the model as it is was found to fit." + (f" Try model={smaller}." if smaller else "")
