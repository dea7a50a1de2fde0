"""With what figures were made: versions and the processor, on which a compiler's counts depend."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import jax

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def made_with() -> dict[str, Any]:
    """Versions of Python and JAX, the machine, and what vectors its processor has."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.is_file() else set()
    vectors = [name for name in FEATURES if name in words]
    return {"python": platform.python_version(), "jax": jax.__version__, "machine": platform.machine(), "has": vectors}


def comparable(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a compiler should count the same bytes: JAX and the processor's vectors are those of then."""
    return all(then.get(key) == now.get(key) for key in ("jax", "machine", "has"))
