"""Walks over jaxprs, which JAX's versions write in several ways: bodies of equations, and the equations in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval as pe


def body(node_params: dict[str, Any], key: str) -> ClosedJaxpr:
    """The body of a call-like equation, closed whichever way its JAX version stores it."""
    jaxpr = node_params[key] if key in node_params else node_params["call_jaxpr"]
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def bodies(params: dict[str, Any]) -> list[Jaxpr]:
    """All bodies among an equation's parameters."""
    found = [b for p in params.values() for b in (p if isinstance(p, tuple) else (p,))]
    return [getattr(b, "jaxpr", b) for b in found if isinstance(b, (Jaxpr, ClosedJaxpr))]


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of a program, those of bodies too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in bodies(eqn.params):
            yield from equations(inner)


def trimmed(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without what nobody reads, in bodies too."""
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def counts(params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried, by its parameters, operands and results."""
    (jaxpr,) = bodies({"jaxpr": params["jaxpr"]})
    rank = lambda value: len(value.aval.shape)
    carried = sum(rank(v) == rank(o) for v, o in zip(jaxpr.outvars, outs, strict=True))
    stacked = sum(rank(v) != rank(o) for v, o in zip(jaxpr.invars, ins, strict=True))
    return len(ins) - carried - stacked, carried


def depend(program: Any, given: Sequence[bool], name: Any = None) -> list[bool]:
    """Which results of a jaxpr depend on the inputs `given`, or on where along the axis `name` they are computed."""
    jaxpr = getattr(program, "jaxpr", program)
    found = {v for v, known in zip(jaxpr.invars, given, strict=True) if known}
    for eqn in jaxpr.eqns:
        along = name is not None and any(getattr(e, "name", None) == name for e in eqn.effects)
        if along or any(v in found for v in eqn.invars if not isinstance(v, Literal)):
            found.update(eqn.outvars)
    return [not isinstance(v, Literal) and v in found for v in jaxpr.outvars]
