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
from transforms.tiling.ir.dependence import followed, given_inside, results_that_depend
from transforms.tiling.ir.graph import Graph, Node
from transforms.tiling.ir.jaxprs import bodies, equations, trimmed
from transforms.tiling.ir.walks import constant
from transforms.tiling.primitives import PRODUCTS, has, summed


def scales(jaxpr: Any, active: Sequence[int]) -> bool:
    """Whether cotangents enter the gradients of a program by its inputs `active` linearly.

    A `jax.custom_vjp` rule can do anything else with a cotangent, such as clipping it: each is traced alone, but those
    of which it is promised (`transforms.cotangents`). Of a `tile` within, it is known (`lower.atomic`). Beside these,
    only what rounds a value to fewer bits than it has does so with its cotangent.
    """
    if not all(map(_scales, equations(jaxpr))):
        return False
    return all(_linear(_pulled(*rule)) for rule in _rules(jaxpr, active, skip=promised) if _is_vjp(rule[0]))


def _scales(eqn: Any) -> bool:
    """Whether an equation is neither a `tile` with a rule in it that does not scale, nor rounds cotangents."""
    if has(eqn.primitive.name, "rounds"):
        (out,) = eqn.outputs if isinstance(eqn, Node) else eqn.outvars
        known = jnp.finfo(out.aval.dtype)
        return eqn.params["mantissa_bits"] >= known.nmant and eqn.params["exponent_bits"] >= known.nexp
    return "how" not in eqn.params or eqn.params["how"].scales()


def follows_rules(node: Node) -> bool:
    """Whether an equation, or one in it, has a `jax.custom_vjp` rule: its cotangents may not be added up afterwards."""
    inside = [node, *(eqn for body in bodies(node.params) for eqn in equations(body))]
    return any(_is_vjp(eqn) or not _scales(eqn) for eqn in inside)


def replaced(args: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Arguments, those of these numbers replaced by values."""
    given = dict(enumerate(args)) | dict(zip(numbers, values, strict=True))
    return [given[i] for i in range(len(args))]


def differentiated(fn: Callable[..., Any], active: Sequence[int], args: Sequence[Any]) -> Any:
    """What a function returns where its arguments of these numbers are differentiated: what rules compute, if any."""
    primal = lambda *chosen: ((), fn(*replaced(args, active, chosen)))
    return jax.vjp(primal, *(args[i] for i in active), has_aux=True)[2]


def _pulled(eqn: Any, numbers: Sequence[int]) -> tuple[Graph, int]:
    """One equation's gradients by some operands, as a graph of all and then of cotangents; and how many those are."""
    params = eqn.primitive.get_bind_params(eqn.params)
    count, outs = len(eqn.invars), [i for i, v in enumerate(eqn.outvars) if _is_float(v)]

    def pull(*values: Any) -> list[Any]:
        def call(*chosen: Any) -> list[Any]:
            made = eqn.primitive.bind(*replaced(values[:count], numbers, chosen), **params)
            return [made[i] for i in outs]

        return list(jax.vjp(call, *(values[i] for i in numbers))[1](list(values[count:])))

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


def _rules(
    jaxpr: Any, active: Sequence[int], skip: Callable[[Any], bool] = lambda eqn: False
) -> Iterator[tuple[Any, list[int]]]:
    """The functions with a rule that derivatives of a program by its inputs `active` apply, and by which operands.

    None in what is to be skipped, nor in those with a `jax.custom_vjp` rule. What a function closes over no rule
    differentiates, and `jax.vmap` forgets what that is: it depends on no such input.
    """
    given = [i in active for i in range(len(jaxpr.invars))]
    for eqn, own in _reached(jaxpr, given, closed=lambda eqn: skip(eqn) or _is_vjp(eqn)):
        if eqn.primitive.name.startswith(("custom_vjp", "custom_jvp")) and not skip(eqn):
            floats = [i for i, v in enumerate(eqn.invars) if own[i] and _is_float(v)]
            if numbers := [i for i in floats if i >= eqn.params["num_consts"]]:
                yield eqn, numbers


def _is_vjp(eqn: Any) -> bool:
    return eqn.primitive.name.startswith("custom_vjp")


def has_custom_vjp(jaxpr: Any, active: Sequence[int]) -> bool:
    """Whether derivatives of a program by its inputs `active` apply a `jax.custom_vjp` rule."""
    return any(_is_vjp(eqn) for eqn, _ in _rules(jaxpr, active))


def ruled(jaxpr: Any, active: Sequence[int]) -> bool:
    """Whether derivatives by inputs `active` apply a rule that computes something else than its function, or may."""
    return any(_is_vjp(eqn) or not _itself(eqn, numbers) for eqn, numbers in _rules(jaxpr, active))


def shares(jaxpr: Any, shared: Sequence[int], mapped: Sequence[int]) -> bool:
    """Whether a rule of inputs `shared` has results that are not `mapped`, and that matters.

    `jax.vmap` applies it to the sum of the cotangents of all elements; it may not be linear, or reads what is mapped.
    """
    found = {id(eqn): own for eqn, own in _reached(jaxpr, [i in mapped for i in range(len(jaxpr.invars))])}
    for eqn, numbers in _rules(jaxpr, shared, skip=promised):
        own = found[id(eqn)]
        makes = any(results_that_depend(eqn, own))
        if _is_vjp(eqn) and not makes and (any(own) or not _linear(_pulled(eqn, numbers))):
            return True
    return False


def _reached(
    jaxpr: Any, given: Sequence[bool], closed: Callable[[Any], bool] = lambda eqn: False
) -> Iterator[tuple[Any, list[bool]]]:
    """Each equation, and which of its operands depend on inputs `given`: those of bodies too, but of what is closed."""
    for eqn, own in zip(jaxpr.eqns, followed(jaxpr, given)[0], strict=True):
        yield eqn, own
        if closed(eqn):
            continue
        inside = given_inside(eqn, own)
        for key, param in eqn.params.items():
            for inner in bodies({key: param}):
                yield from _reached(inner, inside.get(key, [any(own)] * len(inner.invars)), closed)


def _itself(eqn: Any, numbers: Sequence[int]) -> bool:
    """Whether a rule's result is its function's, called again, as most have it: its derivatives are by the rule too."""
    params = eqn.primitive.get_bind_params(eqn.params)

    def results(*values: Any) -> Any:
        return differentiated(lambda *args: eqn.primitive.bind(*args, **params), numbers, values)

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
