"""Derivatives of a tiled program, in both modes and to any order, each of them a tiled program again.

`jax.custom_vjp` has no forward mode. A `jax.custom_jvp` rule whose tangent is one linear primitive, with a transpose of
our own, has both: the primitive's transpose is the tiled backward program, its evaluation the tiled forward-mode one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from transforms.layout import dual, stacked, times, typed
from transforms.tiling.autodiff.custom_rules import has_custom_vjp, shares
from transforms.tiling.autodiff.program import Program
from transforms.tiling.ir.dependence import UNNAMED
from transforms.tiling.ir.errors import TileError
from transforms.tiling.ir.jaxprs import reaching
from transforms.tiling.lower import atomic
from transforms.tiling.lower.atomic import any_of
from transforms.tiling.primitives import LINEAR

# ------------------------------------------------------------------------------------- a linear map with a transpose

linear_p = Primitive(LINEAR)
linear_p.multiple_results = True

Forward = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # jaxprs that hold one are printed without its program
class Batched:
    """What `jax.vmap` has to know of a linear map: the program that it is the derivative of.

    Attributes:
        program: the program.
        outs: its results, of which the map gives the tangents.
        active: its inputs that the map is given the tangents of.
        first: which of the residuals is the program's first input.
        mapped: the axes of `jax.vmap` that it has been mapped along.
    """

    program: Program
    outs: tuple[int, ...]
    active: tuple[int, ...]
    first: int
    mapped: frozenset[Any] = frozenset()

    @property
    def named(self) -> set[Any]:
        """The axes of `jax.vmap` around that the program names: of two of one name it is the inner one's."""
        return {*dict(self.program.options.named)} - self.mapped

    def part(self, chosen: Sequence[int]) -> Batched:
        """The same of some of the results."""
        return dataclasses.replace(self, outs=tuple(self.outs[i] for i in chosen))

    def results(self, dims: Sequence[int | None], count: int, name: Any) -> tuple[list[bool], list[bool]]:
        """Which results are mapped, as the program's own are, where residuals and tangents are along `dims`.

        And which depend on what is: sums over the axis of that name do, and are not mapped.
        """
        last = self.first + len(self.program.closed.in_avals)
        given = [d is not None for d in dims[self.first : last]]
        for number, d in zip(self.active, dims[count:], strict=True):
            given[number] |= d is not None
        name = UNNAMED if name in self.mapped else name
        mapped, reached = (self.program.mapped(given, name, differing) for differing in (True, False))
        return [mapped[i] for i in self.outs], [reached[i] for i in self.outs]

    def check(self, dims: Sequence[int | None], count: int, name: Any) -> None:
        """Refuse rules that JAX would give the sum of the cotangents of all elements of a `jax.vmap`.

        Raises:
            TileError: the program has one.
        """
        closed = self.program.closed
        jaxpr, last = reaching(closed.jaxpr, self.outs), self.first + len(closed.in_avals)
        shared = [i for i, d in zip(self.active, dims[count:], strict=True) if d is None]
        mapped = [i for i, d in enumerate(dims[self.first : last]) if d is not None]
        named = name in self.named and has_custom_vjp(jaxpr, self.active)
        if named or (shared and shares(jaxpr, shared, mapped)):
            raise TileError(
                "cannot differentiate a tiled function outside of a `jax.vmap` whose axis it names, or that maps not "
                "all of its arguments: it calls a `jax.custom_vjp` rule, of which elements share the cotangents.\n"
                "  Take the derivative within, jax.vmap(jax.grad(fn)), and sum what belongs to all of them."
            )


def linear(
    residuals: Sequence[Any],
    tangents: Sequence[Any],
    forward: Forward,
    transpose: Forward,
    avals: Sequence[Any],
    batched: Batched,
) -> list[Any]:
    """Return `forward(residuals, tangents)`, of types `avals`; its transpose is `transpose(residuals, cotangents)`.

    A cotangent is None where nobody reads the result: its slope may be infinite there, which zeros do not undo.
    """
    params = {"forward": forward, "transpose": transpose, "count": len(residuals), "avals": tuple(avals)}
    return linear_p.bind(*residuals, *tangents, **params, batched=batched)


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


def _batch(axis: Any, args: Any, dims: Any, *, batched: Batched, **params: Any) -> Any:
    """Results that depend on nothing that is mapped are not, as those of the function are not."""
    mapped, reached = batched.results(dims, params["count"], axis.name)
    known: dict[int, Any] = {}
    if apart := [i for i, each in enumerate(reached) if not each]:
        alone = [a if d is None else any_of(jnp.moveaxis(a, d, 0)) for a, d in zip(args, dims, strict=True)]
        found = linear_p.bind(*alone, **_part(params, apart), batched=batched.part(apart))
        known |= dict(zip(apart, found, strict=True))
    if together := [i for i, each in enumerate(reached) if each]:
        found = _together(axis, args, dims, batched.part(together), **_part(params, together))
        known |= {
            i: out if mapped[i] else any_of(out) for i, out in zip(together, found, strict=True)
        }  # all are the same
    return [known[i] for i in range(len(reached))], [0 if each else None for each in mapped]


def _part(params: dict[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """The map to some of the results."""
    if len(chosen) == len(params["avals"]):
        return params
    forward, transpose, count = params["forward"], params["transpose"], len(params["avals"])

    def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        known = dict(zip(chosen, cotangents, strict=True))
        return transpose(residuals, [known.get(i) for i in range(count)])

    return {
        "forward": lambda residuals, tangents: [forward(residuals, tangents)[i] for i in chosen],
        "transpose": pull,
        "count": params["count"],
        "avals": tuple(params["avals"][i] for i in chosen),
    }


def _together(axis: Any, args: Any, dims: Any, batched: Batched, **params: Any) -> list[Any]:
    count, size = params["count"], axis.size
    batched.check(dims, count, axis.name)
    args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    # All tangents are batched, so that no cotangent has to be summed over the batch.
    moved = [jnp.broadcast_to(a, (size, *a.shape)) if d is None else a for a, d in zip(args, dims, strict=True)]
    axes = (tuple(None if d is None else 0 for d in dims[:count]), 0)
    name = {"axis_name": axis.name} if axis.name in batched.named else {}
    forward, transpose = (jax.vmap(params[way], axes, axis_size=size, **name) for way in ("forward", "transpose"))
    avals = [stacked(a, size) for a in params["avals"]]
    further = dataclasses.replace(batched, mapped=batched.mapped | {axis.name})
    return linear(args[:count], moved[count:], forward, transpose, avals, further)


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
        again, mapped = lambda *args: call(program, *args), lambda given, name: program.mapped(given, name)
        together = lambda: program.together.traced(*args)
        how = atomic.How(again, lambda: program.scales, mapped, together)
        return tuple(atomic.call(program.traced(*args), how, *args))

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
        return [times(scale.astype(g.dtype), g).astype(d) for g, d in zip(residuals[:count], dtypes, strict=True)]

    with jax.numpy_dtype_promotion("standard"):  # these sums are ours
        aval = program.closed.out_avals[out].update(dtype=jnp.result_type(*found, outs[out]))
    batched = Batched(program, (out,), active, count)
    return outs, linear((*found, *primals), [given[i] for i in active], forward, transpose, [aval], batched)


def _general(
    program: Program, outs: tuple[int, ...], active: tuple[int, ...], primals: Any, kept: Sequence[Any], given: Any
) -> Any:
    """Any outputs: the forward keeps the inputs and what the policy says, the backward runs each tile once more."""
    count = len(primals)

    def forward(residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        return call(program.tangent(active, outs), *residuals[:count], *tangents)

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        read = [(i, typed(c, dual(a))) for i, c, a in zip(outs, cotangents, avals, strict=True) if c is not None]
        numbers, spread = zip(*read, strict=True)
        return call(program.cotangent(active, numbers), *residuals, *spread)

    avals = [program.closed.out_avals[i] for i in outs]
    return linear(
        (*primals, *kept), [given[i] for i in active], forward, transpose, avals, Batched(program, outs, active, 0)
    )
