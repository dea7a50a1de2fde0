"""What is said where memory runs out: of the device while it computes, or as its compiler finds before."""

import contextlib
import re
from collections.abc import Generator

import jax


class OutOfMemoryError(RuntimeError):
    """The compiler, or the device while it computes, says that a program does not fit, in its own words."""


@contextlib.contextmanager
def out_of_memory() -> Generator[None, None, None]:
    """Turn what JAX raises where memory runs out into an OutOfMemoryError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (lacks := lacking(error)) is None:
            raise
        raise OutOfMemoryError(lacks) from None


def lacking(error: BaseException) -> str | None:
    """Return what the compiler or the device says where memory ran out; None of any other error."""
    if isinstance(error, OutOfMemoryError):
        return str(error)
    out = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return _shortened(str(error)) if out else None


def _shortened(text: str) -> str:
    """Return the compiler's message without what each buffer is, and without the stack."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    end = next((i for i, line in enumerate(lines) if re.match(r"\s*(Largest program allocations|=====)", line)), 12)
    return "\n".join(f"  {line}" for line in lines[: min(end, 12)])
