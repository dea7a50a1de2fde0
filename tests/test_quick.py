"""Programs are compiled quickly where tests say so, and nowhere else."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.extend.backend import get_compile_options
from jax.interpreters.mlir import make_ir_context

from tests import quick


def told(options=None):
    """The optimisation level that XLA's flags say, and the options beside them, of a program that names `options`."""
    made = inspect.getmodule(get_compile_options).get_compile_options(1, 1, env_options_overrides=options)
    return made.executable_build_options.debug_options.xla_backend_optimization_level, dict(made.env_option_overrides)


def test_what_is_not_asked_for_is_not_done():
    """Nor in a process that pytest starts, whose environment is that of processes that tests start."""
    assert told() == (3, {})


def test_options_of_its_own_come_first():
    with quick.by_default():
        assert told() == (3, quick.QUICK["compiler_options"])
        assert told({"xla_cpu_enable_fast_math": "True"})[1].items() > quick.QUICK["compiler_options"].items()
        assert told(quick.OPTIMISED) == (3, quick.OPTIMISED)
        with quick.by_default({}):
            assert told() == (3, {})
    assert told() == (3, {})


def test_operations_outside_of_jit_are_compiled_so_too():
    with quick.by_default({"xla_no_such_option": "1"}), pytest.raises(jax.errors.JaxRuntimeError, match="No such"):
        jnp.tanh(jnp.ones((3, 5, 7, 11)))


def test_programs_of_a_thread_are_lowered_in_one_context():
    context = lambda: jax.jit(lambda x: x + 1).lower(1.0).compiler_ir().context
    before = context()
    with quick.one_context():
        inside = context()
        assert context() is inside
        assert (inside is before) == (make_ir_context() is make_ir_context())  # the newest JAX has but one
    assert context() is before  # that of this module
