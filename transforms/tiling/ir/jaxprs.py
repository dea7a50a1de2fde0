"""Walks over jaxprs, which JAX's versions write in several ways: bodies of equations, and the equations in them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval as pe

# The parameter that holds the body of a call, or that of a loop, in the versions of JAX.
BODY = "jaxpr call_jaxpr fun_jaxpr fwd_jaxpr body_jaxpr call callee".split()


def body_key(params: dict[str, Any]) -> str:
    """The parameter that holds the one body that an equation runs."""
    return next(key for key in BODY if key in params)


def body(params: dict[str, Any]) -> ClosedJaxpr:
    """The one body that an equation runs."""
    return closed(params[body_key(params)])


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A program closed, whichever way its JAX version stores it."""
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


def axis_names(params: dict[str, Any]) -> frozenset[Any]:
    """The names of axes, of a mesh or a `jax.vmap` around, along which an equation of these parameters computes."""
    named = [params.get(key, ()) for key in ("axes", "axis_name")]
    own = {name for some in named for name in (some if isinstance(some, tuple) else (some,))}
    inside = frozenset().union(*(axis_names(eqn.params) for inner in bodies(params) for eqn in inner.eqns))
    inside -= {*params.get("newly_manual_axes", ())}  # which a `jax.shard_map` has for its body alone
    return inside.union(name for name in own if not isinstance(name, numbers.Integral | None))


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
    return ClosedJaxpr(reaching(closed.jaxpr, range(len(closed.out_avals))), closed.consts)


def reaching(jaxpr: Jaxpr, outs: Sequence[int]) -> Jaxpr:
    """The part of a program that makes the results of these numbers, of all its inputs."""
    return pe.dce_jaxpr(jaxpr, [i in outs for i in range(len(jaxpr.outvars))], instantiate=True)[0]


def counts(params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried, by its parameters, operands and results."""
    (jaxpr,) = bodies({"jaxpr": params["jaxpr"]})
    rank = lambda value: len(value.aval.shape)
    carried = sum(rank(v) == rank(o) for v, o in zip(jaxpr.outvars, outs, strict=True))
    stacked = sum(rank(v) != rank(o) for v, o in zip(jaxpr.invars, ins, strict=True))
    return len(ins) - carried - stacked, carried
