"""Walks over jaxprs, which JAX's versions write in several ways: bodies of equations, and the equations in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval as pe

from transforms.tiling.primitives import has


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
        own = [not isinstance(v, Literal) and v in found for v in eqn.invars]
        results = [True] * len(eqn.outvars) if along else results_that_depend(eqn, own)
        found.update(v for v, known in zip(eqn.outvars, results, strict=True) if known)
    return [not isinstance(v, Literal) and v in found for v in jaxpr.outvars]


def results_that_depend(eqn: Any, given: Sequence[bool]) -> list[bool]:
    """Which results of an equation depend on its operands `given`: those of a body each for itself."""
    branches, inner = eqn.params.get("branches"), bodies(eqn.params)
    if branches is not None and not given[0]:
        return [any(each) for each in zip(*(depend(branch, given[1:]) for branch in branches), strict=True)]
    if len(inner) == 1 and (len(inner[0].invars), len(inner[0].outvars)) == (len(eqn.invars), len(eqn.outvars)):
        return depend(inner[0], around(eqn, given))
    return [any(given)] * len(eqn.outvars)


def around(eqn: Any, given: Sequence[bool]) -> list[bool]:
    """The operands `given` of an equation, and if it is a scan, what it carries that depends on them sooner or later."""
    if not has(eqn.primitive.name, "steps"):
        return list(given)
    first, carried = counts(eqn.params, eqn.invars, eqn.outvars)
    last = first + carried
    state = settled(bodies(eqn.params)[0], given[:first], given[first:last], given[last:])
    return [*given[:first], *state, *given[last:]]


def settled(body: Any, constants: Sequence[bool], state: Sequence[bool], rest: Sequence[bool] = ()) -> list[bool]:
    """What a loop carries that depends, sooner or later, on some of its operands."""
    while True:  # at most as often as it carries values
        after = [a or b for a, b in zip(state, depend(body, [*constants, *state, *rest]), strict=False)]
        if after == list(state):
            return after
        state = after
