"""Many processes that carry out one run: how they find each other, agree, stop together, and notice that one is gone.

Each drives its own devices, feeds them their part of every batch, and writes its part of every checkpoint. The first
one speaks and keeps the records.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any

import numpy as np

from experiments import configs
from experiments.runtime.signals import Stop


class DistributedError(RuntimeError):
    """Processes that cannot find each other, in words for the user."""


def initialize(config: configs.Distributed, stop: Stop) -> None:
    """Find the other processes; to be called before any device is asked for. `stop` then hears for all of them.

    Raises:
        DistributedError: they are not there.
    """
    if not config.wanted:
        return
    import jax

    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            config.process,
            heartbeat_timeout_seconds=config.timeout,
            shutdown_timeout_seconds=30,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or "what started this one (SLURM, Open MPI, a TPU pod, GKE)"
        raise DistributedError(f"cannot find the other processes through {where}: {_line(error)}") from None
    if not first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if several():
        stop.share(told, forward)


def first() -> bool:
    """Return whether this is the process that speaks and keeps the records."""
    import jax

    return jax.process_index() == 0


def several() -> bool:
    """Return whether there are other processes."""
    import jax

    return jax.process_count() > 1


def agreed(number: int) -> int:
    """Return the first process's number, in every process."""
    if not several():
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.array(number, np.int32)))


def least(number: int) -> int:
    """Return the smallest of the processes' numbers, to within a part in a million."""
    if not several():
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.process_allgather(np.array(number, np.float32)).min())


def gathered(tree: Any) -> Any:
    """Return a tree whose arrays are whole, in the memory of every process."""
    if not several():
        return tree
    import jax
    from jax.experimental import multihost_utils

    whole = lambda leaf: multihost_utils.process_allgather(leaf, tiled=True) if isinstance(leaf, jax.Array) else leaf
    return jax.tree.map(whole, tree)


def told(step: int) -> signal.Signals | None:
    """Return SIGTERM if one of the processes got it, at a step at which all of them are told."""
    from jax.experimental import multihost_utils

    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None


def forward(number: int, _: FrameType | None) -> None:
    """Handle SIGINT as SIGTERM, which JAX tells all processes about."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def answering(run: str) -> Generator[None, None, None]:
    """End this process at once where another one of the run does not answer within, and would be waited for.

    JAX cannot tell one that has ended from one that is slow or cannot be reached.
    """
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several() or "RESOURCE_EXHAUSTED" in str(error):
            raise
        sys.stdout.flush()
        print(
            f"\nerror: another process of this run has ended or does not answer ({_line(error)}): process "
            f"{jax.process_index()} of {jax.process_count()} ends too. run={run} goes on from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
