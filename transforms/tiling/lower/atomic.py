"""A call that JAX's partial evaluation takes or leaves whole: known only where all of its inputs are.

Partial evaluation (by the `scan`, `jax.checkpoint` or `linearize` around) splits the equations of a `jax.jit` and the
body of a `lax.scan` into what is known early and what is not. From the loop of a tiled attention it would split off the
masks, which depend on positions alone, and keep them for every tile: the array that tiling was to avoid. A primitive
without a rule of that kind is not looked into. Everything else that JAX does with a call works as for `closed_call`:
results that nobody needs are not computed, `vmap` maps the program, and its effects are those of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from transforms.tiling.ir.dependence import depend


class Atomic(Primitive):
    """A primitive with a body, which JAX's `checkify`, as for every call, replaces by one that carries its checks."""

    def bind(self, *args: Any, subfuns: Sequence[Any] = (), **params: Any) -> Any:
        return subfuns[0].call_wrapped(*args) if subfuns else super().bind(*args, **params)

    def to_lojax(self, *args: Any, call_jaxpr: ClosedJaxpr) -> list[Any]:
        """What newer versions of JAX lower, where the program holds an equation that they write in simpler ones."""
        return _run(*args, call_jaxpr=call_jaxpr)


tiled_p = Atomic("tiled")
tiled_p.multiple_results = True


def call(jitted: Any, *args: Any) -> list[Any]:
    """Return what a function made by `jax.jit` returns, a list of arrays, in one equation that is never split."""
    return _bind(jitted.trace(*args).jaxpr, args)


def _bind(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    return tiled_p.bind(*args, call_jaxpr=program)


@functools.partial(jax.jit, static_argnames="call_jaxpr")
def _run(*args: Any, call_jaxpr: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(call_jaxpr)(*args)


@functools.partial(jax.jit, static_argnames=("call_jaxpr", "dims", "outs", "axis"))
def _mapped(*args: Any, call_jaxpr: ClosedJaxpr, dims: Any, outs: Any, axis: Any) -> list[Any]:
    name, size, spread = axis
    fn = jaxpr_as_fun(call_jaxpr)
    return jax.vmap(fn, list(dims), list(outs), axis_name=name, axis_size=size, spmd_axis_name=spread)(*args)


def _batch(axis: Any, args: Any, dims: Any, *, call_jaxpr: ClosedJaxpr) -> Any:
    outs = tuple(0 if found else None for found in depend(call_jaxpr, [d is not None for d in dims], axis.name))
    axis = (axis.name, axis.size, axis.spmd_name)
    mapped = _mapped.trace(*args, call_jaxpr=call_jaxpr, dims=tuple(dims), outs=outs, axis=axis).jaxpr
    return _bind(mapped, args), outs


def _jvp(primals: Any, tangents: Any, *, call_jaxpr: ClosedJaxpr) -> Any:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(jaxpr_as_fun(call_jaxpr), tuple(primals), tuple(tangents))


def _abstract(*_: Any, call_jaxpr: ClosedJaxpr) -> Any:
    return call_jaxpr.out_avals, call_jaxpr.effects


tiled_p.def_impl(_run)
tiled_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[tiled_p] = _jvp
batching.fancy_primitive_batchers[tiled_p] = _batch
mlir.register_lowering(tiled_p, functools.partial(mlir.core_call_lowering, name="tiled"))
pe.dce_rules[tiled_p] = pe.dce_jaxpr_closed_call_rule
