"""The two ways in which a tiled function is run, as jaxprs: for its value, and for its value and all its gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from transforms.tiling.autodiff.program import NO_REVERSE, Program
from transforms.tiling.mesh.layout import like


@dataclasses.dataclass(frozen=True)
class Pass:
    """One way to run it: the tiled programs that do so, one after the other; all of it as one function, or untiled."""

    programs: tuple[Program, ...]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    avals: Sequence[Any]  # of the arguments of both

    @functools.cached_property
    def tiled(self) -> ClosedJaxpr:
        return self._trace(self.run)

    @functools.cached_property
    def untiled(self) -> ClosedJaxpr:
        return self._trace(self.plain)

    def _trace(self, fn: Callable[..., Any]) -> ClosedJaxpr:
        return jax.make_jaxpr(fn)(*(like(a) for a in self.avals))


def value(program: Program) -> Pass:
    """The function without derivatives."""
    plain = jaxpr_as_fun(program.closed)
    if program.is_one_tile:
        return Pass((), plain, plain, program.closed.in_avals)
    return Pass((program,), program.run, plain, program.closed.in_avals)


def gradient(program: Program) -> Pass | None:
    """The function with the gradients of all its inexact inputs; None where it has none to give.

    Those of one scalar; otherwise the cotangents of the results that have any are further arguments.
    """
    try:
        return _untiled(program) if program.is_one_tile else _gradient(program)
    except ValueError as error:
        if NO_REVERSE in str(error):
            return None
        raise


def _untiled(program: Program) -> Pass | None:
    """One tile: the function's own gradients."""
    avals = program.closed.in_avals
    outs, active = program.differentiable([i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)])
    if not active:
        return None
    plain = _plain(program, active, outs)
    cotangents = [] if program.is_scalar(outs, active) else [program.closed.out_avals[i] for i in outs]
    found = Pass((), plain, plain, [*avals, *cotangents])
    return found if found.untiled else None


def _gradient(program: Program) -> Pass | None:
    avals = program.closed.in_avals
    outs, active = program.differentiable([i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)])
    if not active:
        return None
    if not program.is_scalar(outs, active):
        back = program.cotangent(tuple(active), tuple(outs))
        cotangents = [program.closed.out_avals[i] for i in outs]
        return Pass((program.forward, back), _both(program, back), _plain(program, active, outs), [*avals, *cotangents])
    if not program.in_one_pass(outs, active):
        back = program.cotangent(tuple(active), tuple(outs))
        unit = jnp.ones((), program.closed.out_avals[outs[0]].dtype)
        both = lambda *args: _both(program, back)(*args, unit)
        return Pass((program.forward, back), both, _plain(program, active, outs), avals)
    joint = program.gradient(tuple(active), outs[0])

    def run(*args: Any) -> Any:
        results, found = joint.combine(joint.program.run(*args))
        return results, [g.astype(avals[i].dtype) for i, g in zip(active, found, strict=True)]

    return Pass((joint.program,), run, _plain(program, active, outs), avals)


def _both(program: Program, back: Program) -> Callable[..., Any]:
    """A program and its backward pass, from the inputs and the cotangents."""
    inputs, outputs = len(program.closed.in_avals), len(program.closed.out_avals)

    def run(*args: Any) -> Any:
        found = program.forward.run(*args[:inputs])
        return found[:outputs], back.run(*args[:inputs], *found[outputs:], *args[inputs:])

    return run


def _plain(program: Program, active: Sequence[int], outs: Sequence[int]) -> Callable[..., Any]:
    """The untiled function with its gradients."""
    fn, count = jaxpr_as_fun(program.closed), len(program.closed.in_avals)

    def run(*args: Any) -> Any:
        def primal(*chosen: Any) -> tuple[list[Any], list[Any]]:
            full = list(args[:count])
            for i, x in zip(active, chosen, strict=True):
                full[i] = x
            results = fn(*full)
            return [results[i] for i in outs], results

        chosen, vjp, results = jax.vjp(primal, *(args[i] for i in active), has_aux=True)
        return results, vjp(list(args[count:]) or [jnp.ones_like(c) for c in chosen])

    return run
