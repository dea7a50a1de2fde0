"""Losses that are nonlinear in a sum over the tiles (a perplexity, the log of a mean) in one loop.

The gradient of `g(p)`, `p` a sum over tiles, is `g'(p)` times that of `p`. Only the first factor needs the whole sum:
the loop forms the gradient of `p` itself and the factor is applied afterwards, with no second loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transforms.layout import like, times, varying
from transforms.tiling.analysis.limits import Limits
from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.autodiff.custom_rules import replaced
from transforms.tiling.frontend.flatten import evaluate, flatten
from transforms.tiling.ir.graph import Graph, Value
from transforms.tiling.ir.obstacles import Obstacle
from transforms.tiling.ir.placement import Partial
from transforms.tiling.ir.walks import ancestors, closure, depends, mixes, operands


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
            return dict(zip(inputs, replaced(args, active, chosen), strict=True))

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
                gradients[k] = times(slope.astype(part.dtype), part) + gradients[k].astype(part.dtype)
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
    if isinstance(found, Obstacle) or not found.is_whole(graph.outputs[out]):
        return None
    outer = closure([graph.outputs[out]], lambda value: operands(value) if found.is_whole(value) else ())
    frontier = [v for v in outer if not found.is_whole(v) and v not in found.inputs]
    reached = {i: depends(graph, {graph.inputs[i]}, differentiably=True) for i in active}
    reach = {v: tuple(i for i in active if v in reached[i]) for v in frontier}
    inner = tuple(v for v in frontier if reach[v])
    if not inner or any(v.shape != () or not isinstance(found.fact(v).placement, Partial) for v in inner):
        return None
    if _exchanged(graph, inner, set().union(*reached.values())):
        return None
    others = tuple(v for v in frontier if not reach[v])
    if not _nonlinear(graph, out, inner, others):
        return None
    return Separation(graph, out, inner, tuple(reach[v] for v in inner), others)


def _exchanged(graph: Graph, inner: Sequence[Value], reached: set[Value]) -> bool:
    """Whether devices add up derivatives of `inner` on the way to an input: of sums whose slopes differ among them."""
    before, differing = ancestors(inner), frozenset().union(*(varying(v.aval) for v in inner))
    within = (n for n in graph.nodes if not before.isdisjoint(n.outputs) and not reached.isdisjoint(n.inputs))
    return any(mixes(node, differing) for node in within)


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
