"""What a `jax.checkpoint` policy keeps of a tiled forward pass for the backward pass, as whole arrays.

All else is rematerialised there, tile by tile (Chen et al. 2016, arXiv:1604.06174). So are copies that a policy names
(a maximum, say) and that meet in a comparison what they are copies of, which is computed again: both must be of one
computation (`analysis.rounding`).

What has a name (`checkpoint_name`) has it in derivatives too: a cotangent of a value that is kept by its name is kept
where several loops of the backward pass read it, as those of a model's layers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from transforms.tiling.analysis.rounding import decides
from transforms.tiling.frontend.flatten import evaluate, flatten
from transforms.tiling.ir.effects import loud
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.jaxprs import bodies
from transforms.tiling.primitives import NAMED, has
from transforms.tiling.schedule import Policy, keeps

named_p = Primitive(NAMED)  # linear: the value itself, the cotangent of which has the name
named_p.def_impl(lambda x, name: x)
named_p.def_abstract_eval(lambda aval, name: aval)
mlir.register_lowering(named_p, lambda _, x, name: [x])
ad.deflinear2(named_p, lambda cotangent, _, name: [checkpoint_name(cotangent, name)])
batching.primitive_batchers[named_p] = lambda args, dims, name: (named_p.bind(*args, name=name), dims[0])


@jax.custom_jvp
def swap(computed: Any, kept: Any) -> Any:
    """`kept`, which is what `computed` would be, with `computed`'s derivative."""
    return kept


@swap.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


def _seen(node: Node | None) -> bool:
    """Whether somebody outside sees that a node computes its results."""
    return node is not None and bool(node.effects and node.outputs) and not bodies(node.params)


def _named(node: Node | None, array: Any) -> Any:
    """What a node computes; its cotangents have the name that it gives."""
    return named_p.bind(array, name=node.params["name"]) if node is not None and has(node.name, "names") else array


@dataclasses.dataclass(frozen=True)
class Keeping:
    """A program as a graph, and the values of it that are kept."""

    graph: Graph
    values: tuple[Value, ...]

    def forward(self, *args: Any) -> list[Any]:
        """The outputs, then what is kept."""
        env = dict(zip(self.graph.inputs, args, strict=True))
        effects = [node for node in self.graph.nodes if node.effects]
        return evaluate(env, [*self.graph.outputs, *self.values], effects)

    def outputs(self, args: Sequence[Any], kept: Sequence[Any] | None = None) -> list[Any]:
        """The outputs; from what was kept, only the rest is computed, except for derivatives."""
        env = dict(zip(self.graph.inputs, args, strict=True))
        effects = [node for node in self.graph.nodes if node.effects and kept is None]
        for value, array in zip(self.values, kept or [None] * len(self.values), strict=True):
            node = value.producer
            if node is not None and not _seen(node):
                (computed,) = evaluate(env, [value])
                with node.context.manager:
                    computed = _named(node, computed)
                    env[value] = computed if kept is None else swap(computed, array)
            elif kept is not None:
                env[value] = array
        return evaluate(env, self.graph.outputs, effects)


def keeping(closed: ClosedJaxpr, policy: Policy | None) -> Keeping | None:
    """What `policy` keeps of a program, and the results of what must not run again; None if that is nothing."""
    if policy is None and not loud(closed.effects):
        return None
    graph = flatten(closed, custom=False)
    asked = lambda node, value: keeps(policy, node) and not decides(graph, value)
    values = tuple(v for node in graph.nodes for v in node.outputs if _seen(node) or asked(node, v))
    return Keeping(graph, values) if values else None
