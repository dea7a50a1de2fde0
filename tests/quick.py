"""Compiling in a third of the time, for what is equal in symbols: never where the last bits of float32 are judged."""

import functools
from typing import Any

import jax

UNOPTIMISED = {"xla_backend_optimization_level": "0"}
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
UNOPTIMISED_RUN = [f"hardware.compiler_options.{key}={value}" for key, value in QUICK["compiler_options"].items()]
