"""Virtual environments that are made when they are first needed, and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from experiments.bench.rivals.table import System


class Missing(Exception):
    """A system that cannot be installed here, and why."""


def folder() -> Path:
    """Where environments are kept: `$XDG_CACHE_HOME/tiling-zoo/rivals`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tiling-zoo" / "rivals"


def python_of(system: System, device: str = "cpu") -> str:
    """The interpreter that a system runs with; its environment is made if it is not there.

    Raises:
        Missing: pip could not install it, in pip's own words.
    """
    if system.environment is None:
        return sys.executable
    jax = [word.replace("jax==", "jax[cuda13]==") for word in system.requires]
    requires = tuple(jax) if device == "gpu" else system.requires  # PyTorch has both in one
    asked = repr((sys.version_info[:2], requires, system.alone))
    home = folder() / f"{system.environment}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
    python, done = home / "bin" / "python", home / "complete"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        _install(python, *requires)
        if system.alone:
            _install(python, "--no-deps", *system.alone)
        done.touch()
    return str(python)


def versions(python: str, system: System) -> dict[str, str]:
    """The versions of what was asked for, and of JAX or PyTorch, as they are installed."""
    names = {word.split("=")[0].split(">")[0] for word in (*system.requires, *system.alone) if not word.startswith("-")}
    names |= {"jax"} if system.side == "with_jax" else {"torch"}
    program = "import sys, importlib.metadata as m\nfor n in sys.argv[1:]:\n  print(n, m.version(n))"
    told = subprocess.run([python, "-c", program, *sorted(names)], capture_output=True, text=True)
    return dict(line.split() for line in told.stdout.splitlines())


def _install(python: Path, *words: str) -> None:
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    pip = [python, "-m", "pip", "install", "--quiet", *words]
    told = subprocess.run(pip, env=environment, capture_output=True, text=True)
    if told.returncode:
        raise Missing((told.stderr.strip().splitlines() or ["pip failed"])[-1])
