"""What depends on what in a jaxpr, each result of a body and what loops carry for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from transforms.tiling.ir.jaxprs import bodies, counts
from transforms.tiling.primitives import has

UNNAMED = object()  # an axis of a `jax.vmap` whose name, if it has one, means another one


@dataclasses.dataclass(frozen=True)
class Dependence:
    """What depends on some inputs of a jaxpr; or, with their tangents, on where along the axis `name`.

    `differing`: what differs along that axis, if these inputs do: not what is a sum, or another whole, over it.
    """

    name: Any = None
    differing: bool = False

    def of(self, program: Any, given: Sequence[bool]) -> list[bool]:
        """Which results of a jaxpr depend on the inputs `given`."""
        return self.followed(program, given)[1]

    def followed(self, program: Any, given: Sequence[bool]) -> tuple[list[list[bool]], list[bool]]:
        """Which operands of each equation depend on them, and which results."""
        jaxpr = getattr(program, "jaxpr", program)
        found = {v for v, known in zip(jaxpr.invars, given, strict=True) if known}
        among = lambda atoms: [not isinstance(v, Literal) and v in found for v in atoms]
        operands = []
        for eqn in jaxpr.eqns:
            operands.append(among(eqn.invars))
            results = self.results(eqn, operands[-1])
            found.update(v for v, known in zip(eqn.outvars, results, strict=True) if known)
        return operands, among(jaxpr.outvars)

    def results(self, eqn: Any, given: Sequence[bool]) -> list[bool]:
        """Which results of an equation depend on its operands `given`: those of a body each for itself."""
        along = self.name is not None and any(getattr(e, "name", None) == self.name for e in eqn.effects)
        if self.differing and has(eqn.primitive.name, "unites") and along:
            return [False] * len(eqn.outvars)
        if self.name is not None and eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
            return [along or any(given)] * len(eqn.outvars)  # a rule may read what the function does not
        if has(eqn.primitive.name, "apart"):
            return list(given)
        inside = self.inside(eqn, given)
        test = "cond_jaxpr" in inside and self.of(eqn.params["cond_jaxpr"], inside["cond_jaxpr"])[0]
        chosen = "branches" in inside and given[0]  # by the index
        if not inside or test or chosen or (along and not self.differing):
            return [along or any(given)] * len(eqn.outvars)
        makes = [(eqn.params[key], own) for key, own in inside.items() if key != "cond_jaxpr"]
        found = [self.of(body, own) for param, own in makes for body in bodies({"": param})]
        return [any(each) for each in zip(*found, strict=True)]

    def inside(self, eqn: Any, given: Sequence[bool]) -> dict[str, Sequence[bool]]:
        """For the parameters of an equation that hold bodies, which inputs of these are, or depend on, those `given`.

        What a loop carries depends on them sooner or later.
        """
        params = eqn.params
        if "branches" in params:
            return {"branches": given[1:]}
        if "body_jaxpr" in params:
            tests = params["cond_nconsts"]
            first = tests + params["body_nconsts"]
            state = self._settled(params["body_jaxpr"], given[tests:first], given[first:], ())
            return {"cond_jaxpr": [*given[:tests], *state], "body_jaxpr": [*given[tests:first], *state]}
        if has(eqn.primitive.name, "steps"):
            first, carried = counts(params, eqn.invars, eqn.outvars)
            last = first + carried
            state = self._settled(params["jaxpr"], given[:first], given[first:last], given[last:])
            given = [*given[:first], *state, *given[last:]]
        shape = len(eqn.invars), len(eqn.outvars)
        alone = {key: inner for key in params if len(inner := bodies({key: params[key]})) == 1}
        return {key: given for key, (body,) in alone.items() if (len(body.invars), len(body.outvars)) == shape}

    def _settled(self, body: Any, *given: Sequence[bool]) -> Sequence[bool]:
        """What a loop carries, of its constants, that and what it goes over, that depends on some sooner or later."""
        constants, state, rest = given
        while True:  # at most as often as it carries values
            after = [a or b for a, b in zip(state, self.of(body, [*constants, *state, *rest]), strict=False)]
            if after == list(state):
                return after
            state = after


# Of inputs alone, whichever axes there are.
_INPUTS = Dependence()
depend, followed, results_that_depend, given_inside = _INPUTS.of, _INPUTS.followed, _INPUTS.results, _INPUTS.inside
