"""What depends on what in a jaxpr, each result of a body and what loops carry for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from transforms.tiling.ir.jaxprs import bodies, counts
from transforms.tiling.primitives import has

UNNAMED = object()  # an axis of a `jax.vmap` whose name, if it has one, means another one


def depend(program: Any, given: Sequence[bool], name: Any = None, differing: bool = False) -> list[bool]:
    """Which results of a jaxpr depend on the inputs `given`; or, with their tangents, on where along the axis `name`.

    `differing`: which differ along that axis, if these do: not those that are sums, or other wholes, over it.
    """
    return followed(program, given, name, differing)[1]


def followed(
    program: Any, given: Sequence[bool], name: Any = None, differing: bool = False
) -> tuple[list[list[bool]], list[bool]]:
    """Which operands of each equation depend on them, and which results."""
    jaxpr = getattr(program, "jaxpr", program)
    found = {v for v, known in zip(jaxpr.invars, given, strict=True) if known}
    among = lambda atoms: [not isinstance(v, Literal) and v in found for v in atoms]
    operands = []
    for eqn in jaxpr.eqns:
        operands.append(among(eqn.invars))
        results = results_that_depend(eqn, operands[-1], name, differing)
        found.update(v for v, known in zip(eqn.outvars, results, strict=True) if known)
    return operands, among(jaxpr.outvars)


def results_that_depend(eqn: Any, given: Sequence[bool], name: Any = None, differing: bool = False) -> list[bool]:
    """Which results of an equation depend on its operands `given`: those of a body each for itself."""
    along = name is not None and any(getattr(e, "name", None) == name for e in eqn.effects)
    if differing and has(eqn.primitive.name, "unites") and along:
        return [False] * len(eqn.outvars)
    if name is not None and eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
        return [along or any(given)] * len(eqn.outvars)  # a rule may read what the function does not
    if has(eqn.primitive.name, "apart"):
        return list(given)
    inside = given_inside(eqn, given, name, differing)
    test = "cond_jaxpr" in inside and depend(eqn.params["cond_jaxpr"], inside["cond_jaxpr"], name, differing)[0]
    if not inside or test or ("branches" in inside and given[0]) or (along and not differing):  # given[0] is the index
        return [along or any(given)] * len(eqn.outvars)
    makes = [(eqn.params[key], own) for key, own in inside.items() if key != "cond_jaxpr"]
    found = [depend(body, own, name, differing) for param, own in makes for body in bodies({"": param})]
    return [any(each) for each in zip(*found, strict=True)]


def given_inside(
    eqn: Any, given: Sequence[bool], name: Any = None, differing: bool = False
) -> dict[str, Sequence[bool]]:
    """For the parameters of an equation that hold bodies, the inputs of these that are, or depend on, `given` operands.

    What a loop carries depends on them sooner or later.
    """
    params = eqn.params
    if "branches" in params:
        return {"branches": given[1:]}
    if "body_jaxpr" in params:
        tests = params["cond_nconsts"]
        first = tests + params["body_nconsts"]
        state = settled(params["body_jaxpr"], given[tests:first], given[first:], (), name, differing)
        return {"cond_jaxpr": [*given[:tests], *state], "body_jaxpr": [*given[tests:first], *state]}
    if has(eqn.primitive.name, "steps"):
        first, carried = counts(params, eqn.invars, eqn.outvars)
        last = first + carried
        state = settled(params["jaxpr"], given[:first], given[first:last], given[last:], name, differing)
        given = [*given[:first], *state, *given[last:]]
    shape = len(eqn.invars), len(eqn.outvars)
    alone = {key: inner for key in params if len(inner := bodies({key: params[key]})) == 1}
    return {key: given for key, (body,) in alone.items() if (len(body.invars), len(body.outvars)) == shape}


def settled(
    body: Any,
    constants: Sequence[bool],
    state: Sequence[bool],
    rest: Sequence[bool] = (),
    name: Any = None,
    differing: bool = False,
) -> list[bool]:
    """What a loop carries that depends, sooner or later, on some of its operands."""
    while True:  # at most as often as it carries values
        inside = depend(body, [*constants, *state, *rest], name, differing)
        after = [a or b for a, b in zip(state, inside, strict=False)]
        if after == list(state):
            return after
        state = after
