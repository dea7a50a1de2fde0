"""Errors: `TileError`, and what is said of those that JAX raises while a function is traced."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax


class TileError(ValueError):
    """A function cannot be tiled along the chosen axis. Says what, where, why, and what to do."""


# Raised where Python wants a value that is only known when the program runs: `if x > 0`, `float(x)`, `x[mask]`.
UNKNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
OURS = (str(Path(jax.__file__).parent), str(Path(__file__).parents[1]))
REMEDIES = {
    "dot_general": (
        "Both operands bring the same mesh axis to the result. Gather the weight for this product first: "
        "w = jax.sharding.reshard(w, jax.P(None, None)); or pass out_sharding= to the product."
    ),
    ".at[": (
        "Pick labels by comparison, which runs on each device's share: "
        "jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0).sum(-1); "
        "or look rows up by table.at[ids].get(out_sharding=jax.P(...))."
    ),
    "acts as an assert": (
        "The axes of this mesh are Explicit while it is tiled: leave the constraint out, and spread the argument by "
        "in_sharding=; or write x = jax.sharding.reshard(x, jax.P(...)) in its place, which needs Explicit axes."
    ),
    "carry input and": (
        "Types say how arrays are spread while it is tiled: begin with one that is spread as what the body returns, "
        "jax.sharding.reshard(init, jax.P(...)), or jnp.zeros_like of such an array."
    ),
    "": "Bring one operand into the form of the other first: x = jax.sharding.reshard(x, jax.P(...)).",
}


@contextlib.contextmanager
def explained() -> Generator[None]:
    """Say of an error of sharding types where it is and what to write.

    Raises:
        TileError: JAX refused to type what the function, or its derivative, does on this mesh.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        named = type(error).__name__ in ("ShardingTypeError", "DuplicateSpecError")  # which have no public name
        if not named and "acts as an assert" not in text and not ("carry input and" in text and "@" in text):
            raise
        remedy = next(remedy for part, remedy in REMEDIES.items() if part in text)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
        where = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else "its derivative"
        raise TileError(f"cannot run on this mesh, at {where}: {error}\n  {remedy}") from error


@contextlib.contextmanager
def rules_explained() -> Generator[None]:
    """Say of an axis that nothing but the rule of a derivative names what to write.

    Raises:
        TileError: the derivative is taken outside of the `jax.vmap` that has the name.
    """
    try:
        yield
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise TileError(
            f"cannot differentiate a tiled function here: {error}\n  Its value does without that axis, and the rule of "
            "a derivative names it. Take the derivative within the map: jax.vmap(jax.grad(fn), axis_name=...)."
        ) from error


@contextlib.contextmanager
def tracing(fn: Any) -> Generator[None]:
    """Add to JAX's errors about values that nobody knows yet that it is `tile` that traces, and which function."""
    try:
        yield
    except UNKNOWN as error:
        code = getattr(inspect.unwrap(fn), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        error.add_note(
            f"`tile` traces `{getattr(fn, '__qualname__', fn)}`{where} once, as `jax.jit` does, to find out how to cut "
            "it: the values of arrays are not known then. Write jax.lax.cond or jnp.where for an `if`, and leave out "
            "float(), int(), bool() and numpy of what is computed from arrays."
        )
        raise
