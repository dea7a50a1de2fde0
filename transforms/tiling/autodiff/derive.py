"""Derivatives of a tiled program, in both modes and to any order, each of them a tiled program again.

`jax.custom_vjp` has no forward mode. A `jax.custom_jvp` rule whose tangent is one linear primitive, with a transpose of
our own, has both: the primitive's transpose is the tiled backward program, its evaluation the tiled forward-mode one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from transforms.layout import stacked, typed
from transforms.tiling.autodiff.custom_rules import has_custom_vjp
from transforms.tiling.autodiff.program import Program
from transforms.tiling.lower import atomic
from transforms.tiling.primitives import LINEAR

# ------------------------------------------------------------------------------------- a linear map with a transpose

linear_p = Primitive(LINEAR)
linear_p.multiple_results = True

Forward = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def linear(
    residuals: Sequence[Any],
    tangents: Sequence[Any],
    forward: Forward,
    transpose: Forward,
    avals: Sequence[Any],
    named: Collection[Any],
) -> list[Any]:
    """Return `forward(residuals, tangents)`, of types `avals`; its transpose is `transpose(residuals, cotangents)`.

    A cotangent is None where nobody reads the result: its slope may be infinite there, which zeros do not undo.
    `named`: the axes of `jax.vmap` that both name.
    """
    params = {"forward": forward, "transpose": transpose, "count": len(residuals), "avals": tuple(avals)}
    return linear_p.bind(*residuals, *tangents, **params, named=frozenset(named))


def _apply(*args: Any, forward: Forward, count: int, **_: Any) -> list[Any]:
    return list(forward(args[:count], args[count:]))


def _abstract(*args: Any, avals: Sequence[Any], **_: Any) -> list[Any]:
    return list(avals)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    count = params["count"]
    if all(isinstance(t, ad.Zero) for t in tangents[:count]):
        moved = [ad.instantiate_zeros(t) for t in tangents[count:]]
        return linear_p.bind(*primals, **params), linear_p.bind(*primals[:count], *moved, **params)
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_apply, **params), tuple(primals), tuple(tangents))


def _transpose(cotangents: Any, *args: Any, transpose: Forward, count: int, **_: Any) -> list[Any]:
    cotangents = [None if isinstance(c, ad.Zero) else jnp.asarray(c) for c in cotangents]
    return [None] * count + list(transpose(args[:count], cotangents))


def _batch(axis: Any, args: Any, dims: Any, *, named: frozenset[Any], **params: Any) -> Any:
    if all(d is None for d in dims) and axis.name not in named:
        outs = linear_p.bind(*args, **params, named=named)
        return outs, [None] * len(outs)
    count, size = params["count"], axis.size
    args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    # All tangents are batched, so that no cotangent has to be summed over the batch.
    moved = [jnp.broadcast_to(a, (size, *a.shape)) if d is None else a for a, d in zip(args, dims, strict=True)]
    axes = (tuple(None if d is None else 0 for d in dims[:count]), 0)
    name = {"axis_name": axis.name} if axis.name in named else {}
    forward, transpose = (jax.vmap(params[way], axes, axis_size=size, **name) for way in ("forward", "transpose"))
    batched = [stacked(a, size) for a in params["avals"]]
    outs = linear(args[:count], moved[count:], forward, transpose, batched, named - {axis.name})
    return outs, [0] * len(outs)


linear_p.def_impl(_apply)
linear_p.def_abstract_eval(_abstract)
mlir.register_lowering(linear_p, mlir.lower_fun(_apply, multiple_results=True))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.fancy_primitive_batchers[linear_p] = _batch

# ------------------------------------------------------------------------------------------- the derivative of a call


def call(program: Program, *args: Any) -> list[Any]:
    """Run a tiled program, differentiable in either mode to any order."""

    @jax.custom_jvp
    def value(*args: Any) -> tuple[Any, ...]:
        again = lambda *args: call(program, *args)
        return tuple(atomic.call(program.traced(*args), again, lambda: program.scales, *args))

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        given = {i: t for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and _floats(primals[i])}
        outs, active = program.differentiable(tuple(given))
        if active and program.in_one_pass(outs, active):
            values, moved = _scalar(program, outs[0], tuple(active), primals, given)
        else:
            found = call(program.forward(tuple(active)) if active else program, *primals)
            values, kept = found[: program.count], found[len(program.closed.out_avals) :]
            moved = _general(program, tuple(outs), tuple(active), primals, kept, given) if active else []
        if program.wide:  # another plan may have rounded what is wide in this one
            values = [v.astype(a.dtype) for v, a in zip(values, program.traced(*primals).out_avals, strict=True)]
        known = dict(zip(outs, moved, strict=True)) if active else {}
        return tuple(values), tuple(_tangent(v, known.get(i)) for i, v in enumerate(values))

    value.defjvp(rule, symbolic_zeros=True)
    return list(value(*args))


def _floats(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _tangent(value: Any, tangent: Any) -> Any:
    if not _floats(value):
        return SymbolicZero(jax.typeof(value).to_tangent_aval())
    return jnp.zeros_like(value) if tangent is None else tangent.astype(value.dtype)


def _scalar(program: Program, out: int, active: tuple[int, ...], primals: Any, given: dict[int, Any]) -> Any:
    """One scalar output: its gradients come out of the forward loops, to be scaled by its cotangent.

    The tangent is not their inner product: a condition guards a tangent from what is infinite and not taken, a gradient
    it does not. But where a rule has a reverse mode alone, or the loops of the forward mode are refused, it is.
    """
    joint, combine = program.gradient(active, out)
    outs, found = combine(call(joint, *primals))
    dtypes, count = [primals[i].dtype for i in active], len(found)

    def forward(residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        known = not has_custom_vjp(program.closed.jaxpr, active)
        if known and (moved := program.tangent(active, (out,))).refusal is None:
            return [call(moved, *residuals[count:], *tangents)[0].astype(aval.dtype)]
        both = zip(residuals[:count], tangents, strict=True)
        return [jnp.asarray(sum(jnp.vdot(g, t.astype(g.dtype)).astype(aval.dtype) for g, t in both), aval.dtype)]

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        (scale,) = cotangents
        return [(scale.astype(g.dtype) * g).astype(d) for g, d in zip(residuals[:count], dtypes, strict=True)]

    with jax.numpy_dtype_promotion("standard"):  # these sums are ours
        aval = program.closed.out_avals[out].update(dtype=jnp.result_type(*found, outs[out]))
    return outs, linear(
        (*found, *primals), [given[i] for i in active], forward, transpose, [aval], dict(program.options.named)
    )


def _general(
    program: Program, outs: tuple[int, ...], active: tuple[int, ...], primals: Any, kept: Sequence[Any], given: Any
) -> Any:
    """Any outputs: the forward keeps the inputs and what the policy says, the backward runs each tile once more."""
    count = len(primals)

    def forward(residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        return call(program.tangent(active, outs), *residuals[:count], *tangents)

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        read = [(i, typed(c, a)) for i, c, a in zip(outs, cotangents, avals, strict=True) if c is not None]
        numbers, spread = zip(*read, strict=True)
        return call(program.cotangent(active, numbers), *residuals, *spread)

    avals = [program.closed.out_avals[i] for i in outs]
    return linear((*primals, *kept), [given[i] for i in active], forward, transpose, avals, dict(program.options.named))
