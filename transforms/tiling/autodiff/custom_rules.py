"""Functions with derivative rules of their own, `jax.custom_vjp` and `jax.custom_jvp`, as JAX would apply them.

Two questions: do cotangents enter gradients linearly, so that these may be formed in the forward loops and scaled
afterwards (`scales`, `narrow`); and does a rule compute something else than its function does, which is what
derivatives of its value are derivatives of (`ruled`, `differentiated`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from transforms.cotangents import promised
from transforms.layout import like
from transforms.tiling.frontend.flatten import flatten
from transforms.tiling.frontend.trace import there
from transforms.tiling.ir.graph import Graph
from transforms.tiling.ir.jaxprs import bodies, equations, trimmed
from transforms.tiling.ir.walks import constant
from transforms.tiling.primitives import PRODUCTS, summed


def scales(jaxpr: Any) -> bool:
    """Whether cotangents enter the gradients of a program linearly.

    Only a `jax.custom_vjp` rule can do anything else with a cotangent, such as clipping it: each is traced alone, but
    those of which it is promised (`transforms.cotangents`).
    """
    return all(_linear(_pulled(rule)) for rule in own_rules(jaxpr, skip=promised) if _is_vjp(rule))


def replaced(args: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Arguments, those of these numbers replaced by values."""
    given = dict(enumerate(args)) | dict(zip(numbers, values, strict=True))
    return [given[i] for i in range(len(args))]


def differentiated(fn: Callable[..., Any], active: Sequence[int], args: Sequence[Any]) -> Any:
    """What a function returns where its arguments of these numbers are differentiated: what rules compute, if any."""
    primal = lambda *chosen: ((), fn(*replaced(args, active, chosen)))
    return jax.vjp(primal, *(args[i] for i in active), has_aux=True)[2]


def _pulled(eqn: Any) -> tuple[Graph, int]:
    """The gradients of one equation as a graph of its operands and then of cotangents, and how many those are."""
    params = eqn.primitive.get_bind_params(eqn.params)
    count = len(eqn.invars)
    floats, outs = ([i for i, v in enumerate(vs) if _is_float(v)] for vs in (eqn.invars, eqn.outvars))

    def pull(*values: Any) -> list[Any]:
        def call(*chosen: Any) -> list[Any]:
            made = eqn.primitive.bind(*replaced(values[:count], floats, chosen), **params)
            return [made[i] for i in outs]

        return list(jax.vjp(call, *(values[i] for i in floats))[1](list(values[count:])))

    closed = _traced(pull, [*eqn.invars, *(eqn.outvars[i] for i in outs)], eqn)
    return flatten(closed, remat=True), len(outs)


def _traced(run: Callable[..., Any], given: Sequence[Any], eqn: Any) -> ClosedJaxpr:
    """`run`, of what `given` stands for, traced where an equation stands."""

    def trace() -> ClosedJaxpr:
        with eqn.ctx.manager:
            return jax.make_jaxpr(run)(*(v.val if isinstance(v, Literal) else like(v.aval) for v in given))

    return there(eqn.ctx, [v.aval for v in (*eqn.invars, *eqn.outvars)], trace)


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _linear(found: tuple[Graph, int]) -> bool:
    """Whether the last inputs of a graph, so many, enter all its outputs linearly together."""
    graph, count = found
    reached = set(graph.inputs[len(graph.inputs) - count :])
    for node in graph.nodes:
        cut = {i for i, v in enumerate(node.inputs) if v in reached}
        if not cut:
            continue
        added = summed(node.name, len(node.inputs))
        together = cut <= added and all(constant(node.inputs[i]) == 0 for i in added - cut)
        if not together and not (len(cut) == 1 and cut <= {*PRODUCTS.get(node.name, ())}):
            return False
        reached.update(node.outputs)
    return True


def own_rules(jaxpr: Any, skip: Callable[[Any], bool] = lambda eqn: False) -> Iterator[Any]:
    """The equations of a program that are functions with a rule.

    None in what is to be skipped, nor in those with a `jax.custom_vjp` rule.
    """
    for eqn in jaxpr.eqns:
        if skip(eqn):
            continue
        if eqn.primitive.name.startswith(("custom_vjp", "custom_jvp")):
            yield eqn
        if not _is_vjp(eqn):
            for inner in bodies(eqn.params):
                yield from own_rules(inner, skip)


def _is_vjp(eqn: Any) -> bool:
    return eqn.primitive.name.startswith("custom_vjp")


def has_custom_vjp(jaxpr: Any) -> bool:
    """Whether a program holds functions with a `jax.custom_vjp` rule."""
    return any(map(_is_vjp, own_rules(jaxpr)))


def ruled(jaxpr: Any) -> bool:
    """Whether a program holds functions of which a rule computes something else than they do, or may."""
    return any(_is_vjp(rule) or not _itself(rule) for rule in own_rules(jaxpr))


def _itself(eqn: Any) -> bool:
    """Whether a rule's result is its function's, called again, as most have it: its derivatives are by the rule too."""
    params = eqn.primitive.get_bind_params(eqn.params)
    floats = [i for i, v in enumerate(eqn.invars) if _is_float(v) and i >= eqn.params["num_consts"]]

    def results(*values: Any) -> Any:
        return differentiated(lambda *args: eqn.primitive.bind(*args, **params), floats, values)

    found = trimmed(_traced(results, eqn.invars, eqn)).jaxpr
    again = [one for one in found.eqns if one.primitive is eqn.primitive]
    bodies_ = [str(one.params["call_jaxpr"]) for one in (eqn, *again)]
    return len(found.eqns) == 1 == len(again) and again[0].invars == found.invars and bodies_[0] == bodies_[1]


def narrow(jaxpr: Any) -> bool:
    """Whether a program holds an array whose exponent has a narrower range than float32's."""
    avals = [v.aval for v in (*jaxpr.invars, *(v for eqn in equations(jaxpr) for v in eqn.outvars))]
    dtypes = {v.dtype for v in avals if hasattr(v, "dtype") and jnp.issubdtype(v.dtype, jnp.floating)}
    range_ = jnp.finfo(jnp.float32)
    return any(jnp.finfo(d).maxexp < range_.maxexp or jnp.finfo(d).minexp > range_.minexp for d in dtypes)
