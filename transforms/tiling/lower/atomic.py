"""A call that JAX's partial evaluation takes or leaves whole: known only where all of its inputs are.

Partial evaluation (by the `scan`, `jax.checkpoint` or `linearize` around) splits the equations of a `jax.jit` and the
body of a `lax.scan` into what is known early and what is not. From the loop of a tiled attention it would split off the
masks, which depend on positions alone, and keep them for every tile: the array that tiling was to avoid. A primitive
without a rule of that kind is not looked into. Everything else that JAX does with a call works as for `closed_call`:
results that nobody needs are not computed, `vmap` maps the program, and its effects are those of the call. Where it is
linear it is transposed, as `jax.linear_transpose` and solvers like GMRES ask for, by the derivative that it comes with.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from transforms.layout import TOGETHER, full, like, unreduced
from transforms.tiling.ir.dependence import UNNAMED
from transforms.tiling.ir.jaxprs import equations


class Atomic(Primitive):
    """A primitive with a body, which JAX's `checkify`, as for every call, replaces by one that carries its checks."""

    def bind(self, *args: Any, subfuns: Sequence[Any] = (), **params: Any) -> Any:
        return subfuns[0].call_wrapped(*args) if subfuns else super().bind(*args, **params)

    def to_lojax(self, *args: Any, call_jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
        """What newer versions of JAX lower, where the program holds an equation that they write in simpler ones."""
        return _run(*args, call_jaxpr=call_jaxpr)


tiled_p = Atomic("tiled")
tiled_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class How:
    """What JAX's transformations ask of a call.

    Attributes:
        differentiable: returns what the call does, with derivatives of its own.
        scales: whether cotangents enter these linearly.
        mapped: which results a `jax.vmap` of this name maps, by whether it maps each argument, and which it leaves as
            they are: derivatives have it alike.
        together: makes what it maps, a program that does the same and leaves no sum over devices for later: those JAX
            cannot map.
    """

    differentiable: Callable[..., Sequence[Any]]
    scales: Callable[[], bool]
    mapped: Callable[[Sequence[bool], Any], list[bool]]
    together: Callable[[], ClosedJaxpr]


def call(program: ClosedJaxpr, how: How, *args: Any) -> list[Any]:
    """Return what a program does, a list of arrays, in one equation that is never split."""
    return tiled_p.bind(*args, call_jaxpr=program, how=how)


@functools.partial(jax.jit, static_argnames="call_jaxpr")
def _run(*args: Any, call_jaxpr: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(call_jaxpr)(*args)


@functools.partial(jax.jit, static_argnames=("call_jaxpr", "dims", "outs", "axis"))
def _mapped(*args: Any, call_jaxpr: ClosedJaxpr, dims: Any, outs: Any, axis: Any) -> list[Any]:
    name, size, spread = axis
    how = {"axis_name": name, "axis_size": size, "spmd_axis_name": spread}
    axes = [0 if out == 0 or size else None for out in outs]
    made = jax.vmap(jaxpr_as_fun(call_jaxpr), list(dims), axes, **how)(*args)
    # What is the same for all elements is that of any, though loops may have it for each.
    return [array if out == 0 or not size else any_of(array) for array, out in zip(made, outs, strict=True)]


def any_of(arrays: Any) -> Any:
    """One of equal arrays; of none, zeros."""
    return arrays[0] if len(arrays) else jnp.zeros(arrays.shape[1:], arrays.dtype)


def _batch(axis: Any, args: Any, dims: Any, *, call_jaxpr: ClosedJaxpr, how: How) -> Any:
    if any(unreduced(v.aval) for eqn in equations(call_jaxpr.jaxpr) for v in eqn.outvars):
        call_jaxpr = how.together()
    outs = tuple(0 if found else None for found in how.mapped([d is not None for d in dims], axis.name))
    names = {"axis_name": axis.name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    one = (axis.name, axis.size, axis.spmd_name)
    made = _mapped.trace(*args, call_jaxpr=call_jaxpr, dims=tuple(dims), outs=outs, axis=one).jaxpr
    # Of two maps of one name it is the inner one's.
    around = lambda given, name: how.mapped(given, UNNAMED if name == axis.name else name)
    again = jax.vmap(how.differentiable, tuple(dims), list(outs), **names)
    return call(made, How(again, how.scales, around, lambda: made), *args), outs


def _jvp(primals: Any, tangents: Any, *, call_jaxpr: ClosedJaxpr, **_: Any) -> Any:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(jaxpr_as_fun(call_jaxpr), tuple(primals), tuple(tangents))


def _transpose(cotangents: Any, *args: Any, call_jaxpr: ClosedJaxpr, how: How) -> list[Any]:
    """The cotangents of the arguments that the call is linear in: its derivative is the same wherever it is taken."""
    given = {i: x for i, x in enumerate(args) if not ad.is_undefined_primal(x)}
    unknown = [i for i in range(len(args)) if i not in given]

    def linear(*values: Any) -> list[Any]:
        known = given | dict(zip(unknown, values, strict=True))
        return list(how.differentiable(*(known[i] for i in range(len(args)))))

    pull = jax.vjp(linear, *(_zeros(call_jaxpr.in_avals[i]) for i in unknown))[1]
    found = dict(zip(unknown, pull([ad.instantiate_zeros(c) for c in cotangents]), strict=True))
    return [found.get(i) for i in range(len(args))]


def _eliminate(used: list[bool], *last: Any) -> Any:
    """Without the results that nobody needs, and the arguments that only these need."""
    eqn = last[-1]  # newer versions of JAX tell before it which arguments are live
    read, made = pe.dce_jaxpr_closed_call_rule(used, *last)
    if made is None or (all(used) and all(read)):
        return read, made
    how, avals = eqn.params["how"], eqn.params["call_jaxpr"].in_avals
    needed = lambda results: [one for one, own in zip(results, used, strict=True) if own]

    def rest(*args: Any, whole: Callable[..., Sequence[Any]] = how.differentiable) -> list[Any]:
        given = iter(args)
        return needed(whole(*(next(given) if own else _zeros(aval) for own, aval in zip(read, avals, strict=True))))

    def part() -> ClosedJaxpr:
        some = functools.partial(rest, whole=jaxpr_as_fun(how.together()))
        return jax.make_jaxpr(some)(*(like(aval) for own, aval in zip(read, avals, strict=True) if own))

    def left(given: Sequence[bool], name: Any) -> list[bool]:
        known = iter(given)
        return needed(how.mapped([own and next(known) for own in read], name))

    return read, made.replace(params=made.params | {"how": How(rest, how.scales, left, part)})


def _zeros(aval: Any) -> Any:
    return full(aval, 0, aval.dtype, TOGETHER)


def _abstract(*_: Any, call_jaxpr: ClosedJaxpr, **__: Any) -> Any:
    return call_jaxpr.out_avals, call_jaxpr.effects


def _lower(ctx: Any, *args: Any, call_jaxpr: ClosedJaxpr, **_: Any) -> Any:
    return mlir.core_call_lowering(ctx, *args, name="tiled", call_jaxpr=call_jaxpr)


tiled_p.def_impl(lambda *args, call_jaxpr, **_: _run(*args, call_jaxpr=call_jaxpr))
tiled_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[tiled_p] = _jvp
ad.primitive_transposes[tiled_p] = _transpose
batching.fancy_primitive_batchers[tiled_p] = _batch
mlir.register_lowering(tiled_p, _lower)
pe.dce_rules[tiled_p] = _eliminate
