"""A trace of some steps by JAX's profiler: what ran when, on the host and on the device."""

from collections.abc import Callable
from pathlib import Path

import jax

from experiments import configs


class Tracer:
    """Traces the steps that the configuration names.

    Args:
        config: which steps.
        directory: the run's; the trace goes below it.
        say: is told where the trace is and what opens it.
    """

    def __init__(self, config: configs.Profile, directory: Path, say: Callable[[str], None]):
        self._first, self._last = config.span or (0, 0)
        self._folder, self._say, self._active = directory / "profile", say, False

    def begin(self, step: int) -> None:
        """Start, if this is the first step that is traced; call it before the step."""
        if step == self._first:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._active = True

    def ends(self, step: int) -> bool:
        """Return whether this is the last step that is traced: it must have been computed before `close`."""
        return self._active and step == self._last

    def close(self) -> None:
        """Write the trace, if there is one."""
        if not self._active:
            return
        self._active = False
        jax.profiler.stop_trace()
        found = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._say(
            f"  steps {self._first} to {self._last} are traced: open {found[-1] if found else self._folder} at "
            f"https://ui.perfetto.dev,\n  or `pip install xprof` and `xprof {self._folder}`"
        )
