"""Compiling in a fifth of the time, for what is equal in symbols: never where the last bits of float32 are judged."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend.backend import get_compile_options
from jax.interpreters.mlir import make_ir_context

LEVEL = "xla_backend_optimization_level"
UNOPTIMISED, OPTIMISED = {LEVEL: "0"}, {LEVEL: "3"}  # the latter is what XLA does where nothing is said
IN_ONE_PIECE = {"xla_cpu_parallel_codegen_split_count": "1"}  # small programs are compiled faster so
OTHER_EMITTERS = {"xla_cpu_use_fusion_emitters": "False"}  # on a JAX that still has them


def _known(options: dict[str, str]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


QUICK: dict[str, Any] = {"compiler_options": UNOPTIMISED}
for options in (OTHER_EMITTERS, IN_ONE_PIECE):
    QUICK["compiler_options"] |= options if _known(options) else {}
jit: Any = functools.partial(jax.jit, **QUICK)
unoptimised: Any = functools.partial(jax.jit, compiler_options=UNOPTIMISED)
FLAGS = " ".join(f"--{name}={value}" for name, value in QUICK["compiler_options"].items())  # of XLA_FLAGS
UNOPTIMISED_RUN = [f"hardware.compiler_options.{key}={value}" for key, value in QUICK["compiler_options"].items()]


@contextlib.contextmanager
def by_default(chosen: dict[str, str] = QUICK["compiler_options"]) -> Iterator[None]:
    """Compile what names no optimisation level of its own like that, every operation outside of `jax.jit` among it.

    JAX has a setting for the level alone; without the other options, compiling takes five times as long.
    """

    def get(*args: Any, env_options_overrides: Any = None, **how: Any) -> Any:
        options = dict(env_options_overrides or {})
        options = options if LEVEL in options else chosen | options
        return get_compile_options(*args, env_options_overrides=options, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect.getmodule(get_compile_options), get_compile_options.__name__, get)
        yield


@contextlib.contextmanager
def one_context() -> Iterator[None]:
    """Lower all programs of a thread in one MLIR context, as the newest JAX does.

    To make one takes as long as to lower a small program.
    """
    made = threading.local()

    def get() -> Any:
        made.context = getattr(made, "context", None) or make_ir_context()
        return made.context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect.getmodule(make_ir_context), make_ir_context.__name__, get)
        yield
