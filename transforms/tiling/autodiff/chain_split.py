"""Losses that are nonlinear in a sum over the tiles (a perplexity, the log of a mean) in one loop.

The gradient of `g(p)`, `p` a sum over tiles, is `g'(p)` times that of `p`. Only the first factor needs the whole sum:
the loop forms the gradient of `p` itself and the factor is applied afterwards, with no second loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import NamedSharding, PartitionSpec

from transforms.cotangents import promised
from transforms.layout import like, varying
from transforms.tiling.analysis.limits import Limits
from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.frontend.flatten import evaluate, flatten
from transforms.tiling.ir.graph import Graph, Value
from transforms.tiling.ir.jaxprs import bodies, equations, trimmed
from transforms.tiling.ir.obstacles import Obstacle
from transforms.tiling.ir.placement import Partial, Whole
from transforms.tiling.ir.walks import closure, constant, depends, operands
from transforms.tiling.primitives import PRODUCTS, summed


@dataclasses.dataclass(frozen=True)
class Separation:
    """`graph.outputs[out]` as an outer function, outside the loops, of the scalar partial sums `inner`."""

    graph: Graph
    out: int
    inner: tuple[Value, ...]
    reach: tuple[tuple[int, ...], ...]  # for each of `inner`, the numbers of the inputs that it depends on
    others: tuple[Value, ...]  # further results of the loops that the outer function reads

    def joint(self, args: Sequence[Any], active: Sequence[int]) -> tuple[Any, ...]:
        """All outputs; the outer function's derivatives, in `inner` and direct ones; then each inner sum's own."""
        inputs = self.graph.inputs

        def known(chosen: Sequence[Any]) -> dict[Value, Any]:
            return dict(zip(inputs, args, strict=True)) | {inputs[i]: x for i, x in zip(active, chosen, strict=True)}

        def primal(*chosen: Any) -> Any:
            wanted = [*self.inner, *self.others, *self.graph.outputs]
            found = evaluate(known(chosen), wanted, [node for node in self.graph.nodes if node.effects])
            return found[: len(self.inner)], found[len(self.inner) :]

        inner, vjp, rest = jax.vjp(primal, *(args[i] for i in active), has_aux=True)
        others, outs = rest[: len(self.others)], rest[len(self.others) :]

        def outer(inner: Any, *chosen: Any) -> Any:
            env = known(chosen) | dict(zip((*self.inner, *self.others), (*inner, *others), strict=True))
            return evaluate(env, [self.graph.outputs[self.out]])[0]

        value, back = jax.vjp(outer, inner, *(args[i] for i in active))
        slopes, *direct = back(jnp.ones_like(value))
        parts = []
        for k, reach in enumerate(self.reach):
            found = vjp([jnp.ones_like(x) if i == k else jnp.zeros_like(x) for i, x in enumerate(inner)])
            parts += [found[active.index(i)] for i in reach]
        return (*outs, *slopes, *direct, *parts)

    def combine(self, results: Sequence[Any], active: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """The outputs and the gradients in the inputs `active`, from what `joint` returns."""
        given = iter(results)
        take = lambda count: [next(given) for _ in range(count)]
        outs, slopes, gradients = take(len(self.graph.outputs)), take(len(self.inner)), take(len(active))
        for slope, reach in zip(slopes, self.reach, strict=True):
            for i in reach:
                part = next(given)
                k = active.index(i)
                gradients[k] = slope.astype(part.dtype) * part + gradients[k].astype(part.dtype)
        return outs, gradients

    def wide(self, active: Sequence[int]) -> range:
        """The numbers of the inner sums' gradients among the results."""
        start = len(self.graph.outputs) + len(self.inner) + len(active)
        return range(start, start + sum(map(len, self.reach)))


def separate(closed: Any, placements: Any, limits: Limits, active: Sequence[int], out: int) -> Separation | None:
    """Find the scalar sums that a loss is nonlinear in; None where there are none, or other results are in between."""
    graph = flatten(closed, custom=False)
    if any(node.effects and node.outputs for node in graph.nodes):
        return None  # the outer function would run it again
    found = analyse(graph, placements, limits)
    if isinstance(found, Obstacle) or not isinstance(found.fact(graph.outputs[out]).placement, Whole):
        return None
    whole = lambda value: isinstance(found.fact(value).placement, Whole)
    outer = closure([graph.outputs[out]], lambda value: operands(value) if whole(value) else ())
    frontier = [v for v in outer if not whole(v) and v not in found.inputs]
    reached = {i: depends(graph, {graph.inputs[i]}, differentiably=True) for i in active}
    reach = {v: tuple(i for i in active if v in reached[i]) for v in frontier}
    inner = tuple(v for v in frontier if reach[v])
    if not inner or any(v.shape != () or not isinstance(found.fact(v).placement, Partial) for v in inner):
        return None
    others = tuple(v for v in frontier if not reach[v])
    if not _nonlinear(graph, out, inner, others):
        return None
    return Separation(graph, out, inner, tuple(reach[v] for v in inner), others)


def _nonlinear(graph: Graph, out: int, inner: Sequence[Value], others: Sequence[Value]) -> bool:
    """Whether the outer function's derivatives in `inner` depend on `inner`: else they are known before the loop."""
    leaves, count = [*inner, *others, *graph.inputs], len(inner)

    def slopes(*values: Any) -> Any:
        def outer(*inner: Any) -> Any:
            return evaluate(dict(zip(leaves, (*inner, *values[count:]), strict=True)), [graph.outputs[out]])[0]

        value, back = jax.vjp(outer, *values[:count])
        return back(jnp.ones_like(value))

    traced = flatten(jax.make_jaxpr(slopes)(*(like(v.aval) for v in leaves)))
    return not depends(traced, set(traced.inputs[:count])).isdisjoint(traced.outputs)


def scales(jaxpr: Any) -> bool:
    """Whether cotangents enter the gradients of a program linearly.

    Only a `jax.custom_vjp` rule can do anything else with a cotangent, such as clipping it: each is traced alone, but
    those of which it is promised (`transforms.cotangents`).
    """
    rules = custom_vjps(jaxpr, skip=promised)
    return all(len(around) < 2 and _linear(_pulled(rule, around)) for rule, around in rules)


def _pulled(eqn: Any, around: Sequence[Any]) -> tuple[Graph, int]:
    """The gradients of one equation as a graph of its operands and then of cotangents, and how many those are.

    `around`: the `jax.shard_map` in whose body it stands, if it does.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    count = len(eqn.invars)
    floats, outs = ([i for i, v in enumerate(vs) if _is_float(v)] for vs in (eqn.invars, eqn.outvars))

    def pull(*values: Any) -> list[Any]:
        def call(*chosen: Any) -> list[Any]:
            given = dict(enumerate(values[:count])) | dict(zip(floats, chosen, strict=True))
            made = eqn.primitive.bind(*(given[i] for i in range(count)), **params)
            return [made[i] for i in outs]

        return list(jax.vjp(call, *(values[i] for i in floats))[1](list(values[count:])))

    given = [*eqn.invars, *(eqn.outvars[i] for i in outs)]
    with (around[0] if around else eqn).ctx.manager:
        if around:
            closed = _in_body(pull, around[0], [v.aval for v in given], [eqn.invars[i].aval for i in floats])
        else:
            closed = jax.make_jaxpr(pull)(*(v.val if isinstance(v, Literal) else like(v.aval) for v in given))
    return flatten(closed, remat=True), len(outs)


def _in_body(run: Callable[..., Any], region: Any, given: Sequence[Any], made: Sequence[Any]) -> ClosedJaxpr:
    """`run` traced in the body of a `jax.shard_map` like `region`, of what each device has of these types."""
    mesh = region.params["mesh"]
    axes = lambda aval: tuple(sorted(varying(aval)))
    spec = lambda aval: PartitionSpec(axes(aval) or None)

    def whole(aval: Any) -> ShapeDtypeStruct:
        """What devices have, one behind the other."""
        shape = math.prod(mesh.shape[axis] for axis in axes(aval)), *aval.shape
        return ShapeDtypeStruct(shape, aval.dtype, sharding=NamedSharding(mesh, spec(aval)))

    body = jax.shard_map(
        lambda *shares: [x[None] for x in run(*(x[0] for x in shares))],
        mesh=mesh,
        in_specs=tuple(map(spec, given)),
        out_specs=list(map(spec, made)),
        axis_names=set(region.params["newly_manual_axes"]),
        check_vma=region.params["check_vma"],
    )
    [eqn] = jax.make_jaxpr(body)(*map(whole, given)).eqns
    return ClosedJaxpr(eqn.params["jaxpr"], ())


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


def custom_vjps(
    jaxpr: Any, around: tuple[Any, ...] = (), skip: Callable[[Any], bool] = lambda eqn: False
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The equations of a program that are functions with a `jax.custom_vjp` rule, and each `jax.shard_map` around.

    None in what is to be skipped.
    """
    for eqn in jaxpr.eqns:
        if skip(eqn):
            continue
        if eqn.primitive.name.startswith("custom_vjp"):
            yield eqn, around
            continue
        for inner in bodies(eqn.params):
            yield from custom_vjps(inner, (*around, eqn) if "newly_manual_axes" in eqn.params else around, skip)


def has_custom_vjp(jaxpr: Any) -> bool:
    """Whether a program holds functions with a `jax.custom_vjp` rule."""
    return next(custom_vjps(jaxpr), None) is not None


def ruled(jaxpr: Any) -> bool:
    """Whether a program holds functions of which a rule computes something else than they do, or may.

    Those in the body of a `jax.shard_map` are not asked.
    """
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith("custom_vjp") or (name.startswith("custom_jvp") and not _itself(eqn)):
            return True
        if "newly_manual_axes" not in eqn.params and any(map(ruled, bodies(eqn.params))):
            return True
    return False


def _itself(eqn: Any) -> bool:
    """Whether a rule's result is its function's, called again, as most have it: its derivatives are by the rule too."""
    params, count = eqn.primitive.get_bind_params(eqn.params), len(eqn.invars)
    floats = [i for i, v in enumerate(eqn.invars) if _is_float(v) and i >= eqn.params["num_consts"]]

    def results(*values: Any) -> Any:
        def call(*chosen: Any) -> tuple[Any, Any]:
            given = dict(enumerate(values)) | dict(zip(floats, chosen, strict=True))
            return (), eqn.primitive.bind(*(given[i] for i in range(count)), **params)

        return jax.vjp(call, *(values[i] for i in floats), has_aux=True)[2]

    with eqn.ctx.manager:
        found = trimmed(jax.make_jaxpr(results)(*(like(v.aval) for v in eqn.invars))).jaxpr
    again = [one for one in found.eqns if one.primitive is eqn.primitive]
    bodies_ = [str(one.params["call_jaxpr"]) for one in (eqn, *again)]
    return len(found.eqns) == 1 == len(again) and again[0].invars == found.invars and bodies_[0] == bodies_[1]


def narrow(jaxpr: Any) -> bool:
    """Whether a program holds an array whose exponent has a narrower range than float32's."""
    avals = [v.aval for v in (*jaxpr.invars, *(v for eqn in equations(jaxpr) for v in eqn.outvars))]
    dtypes = {v.dtype for v in avals if hasattr(v, "dtype") and jnp.issubdtype(v.dtype, jnp.floating)}
    range_ = jnp.finfo(jnp.float32)
    return any(jnp.finfo(d).maxexp < range_.maxexp or jnp.finfo(d).minexp > range_.minexp for d in dtypes)
