"""Walks over jaxprs, which JAX's versions write in several ways: bodies of equations, and the equations in them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
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


def rewritten(param: Any, change: Callable[[Any], Sequence[Any]]) -> Any:
    """A parameter whose programs are made of what `change` makes of their equations; itself, if those stay."""
    if type(param) is tuple:
        items = tuple(rewritten(item, change) for item in param)
        return param if all(map(operator.is_, items, param)) else items
    if not isinstance(param, (Jaxpr, ClosedJaxpr)):
        return param
    return rebuilt(param, [new for eqn in getattr(param, "jaxpr", param).eqns for new in change(eqn)])


def rebuilt(program: Any, eqns: Sequence[Any]) -> Any:
    """A program of other equations, closed as it is (newer versions of JAX do not tell the two apart)."""
    jaxpr = getattr(program, "jaxpr", program)
    if len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns)):
        return program
    before, now = ({e for eqn in some for e in eqn.effects} for some in (jaxpr.eqns, eqns))
    made = jaxpr.replace(eqns=list(eqns), effects=jaxpr.effects - (before - now))
    return made if jaxpr is program else ClosedJaxpr(made, program.consts)


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
    return followed(program, given, name)[1]


def followed(program: Any, given: Sequence[bool], name: Any = None) -> tuple[list[list[bool]], list[bool]]:
    """Which operands of each equation depend on them, and which results."""
    jaxpr = getattr(program, "jaxpr", program)
    found = {v for v, known in zip(jaxpr.invars, given, strict=True) if known}
    among = lambda atoms: [not isinstance(v, Literal) and v in found for v in atoms]
    operands = []
    for eqn in jaxpr.eqns:
        along = name is not None and any(getattr(e, "name", None) == name for e in eqn.effects)
        operands.append(among(eqn.invars))
        results = [True] * len(eqn.outvars) if along else results_that_depend(eqn, operands[-1])
        found.update(v for v, known in zip(eqn.outvars, results, strict=True) if known)
    return operands, among(jaxpr.outvars)


def results_that_depend(eqn: Any, given: Sequence[bool]) -> list[bool]:
    """Which results of an equation depend on its operands `given`: those of a body each for itself."""
    inside = given_inside(eqn, given)
    chosen = "cond_jaxpr" in inside or ("branches" in inside and given[0])  # by a test, or an index
    if not inside or chosen:
        return [any(given)] * len(eqn.outvars)
    found = [depend(body, own) for key, own in inside.items() for body in bodies({key: eqn.params[key]})]
    return [any(each) for each in zip(*found, strict=True)]


def given_inside(eqn: Any, given: Sequence[bool]) -> dict[str, Sequence[bool]]:
    """For the parameters of an equation that hold bodies, the inputs of these that are, or depend on, `given` operands.

    What a loop carries depends on them sooner or later.
    """
    params = eqn.params
    if "branches" in params:
        return {"branches": given[1:]}
    if "body_jaxpr" in params:
        tests = params["cond_nconsts"]
        first = tests + params["body_nconsts"]
        state = settled(params["body_jaxpr"], given[tests:first], given[first:])
        return {"cond_jaxpr": [*given[:tests], *state], "body_jaxpr": [*given[tests:first], *state]}
    if has(eqn.primitive.name, "steps"):
        first, carried = counts(params, eqn.invars, eqn.outvars)
        last = first + carried
        state = settled(params["jaxpr"], given[:first], given[first:last], given[last:])
        given = [*given[:first], *state, *given[last:]]
    shape = len(eqn.invars), len(eqn.outvars)
    alone = {key: inner for key in params if len(inner := bodies({key: params[key]})) == 1}
    return {key: given for key, (body,) in alone.items() if (len(body.invars), len(body.outvars)) == shape}


def settled(body: Any, constants: Sequence[bool], state: Sequence[bool], rest: Sequence[bool] = ()) -> list[bool]:
    """What a loop carries that depends, sooner or later, on some of its operands."""
    while True:  # at most as often as it carries values
        after = [a or b for a, b in zip(state, depend(body, [*constants, *state, *rest]), strict=False)]
        if after == list(state):
            return after
        state = after
