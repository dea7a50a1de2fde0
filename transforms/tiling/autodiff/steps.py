"""Derivatives that compute the steps of scans again, where to keep what each step makes would take too much.

JAX's reverse mode keeps the intermediates of every step, and adds up, from step to step, the cotangent of what a scan
reads. Cut arrays among these have to be whole, which may be more than inputs and outputs are (Sinkhorn's iterations
over a cost matrix, soft k-means). Where that is refused, derivatives are taken of the same program with the body of
each scan in `jax.checkpoint`, which keeps the state of each step alone, and with large cut values that it reads made
in the body: their cotangents end there in those of what they are made from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from transforms.layout import like
from transforms.tiling.analysis.rounding import compares_inside
from transforms.tiling.autodiff.custom_rules import follows_rules
from transforms.tiling.frontend.flatten import evaluate, flatten
from transforms.tiling.frontend.trace import Made, called, rewrite_all
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.walks import closure, depends, operands, scan_counts
from transforms.tiling.passes.sink import sink
from transforms.tiling.primitives import SCAN
from transforms.tiling.rules.running import recurrent


def computed_again(closed: ClosedJaxpr, given: Sequence[bool], largest: int) -> ClosedJaxpr | None:
    """The same program, of whose scans derivatives keep the state of each step and no more; None if it has no scan.

    Nor a product along an axis, whose derivatives are recurrences in it (`rules.running`).

    Args:
        closed: the program; scans within its scans are the same again.
        given: which of its inputs are cut.
        largest: bytes of a cut value that a scan may read as it is.
    """
    graph = flatten(closed, custom=False, remat=True)
    scans = [node for node in graph.nodes if node.name == SCAN]
    if not rewrite_all(graph, _recurrence) and not scans:
        return None
    cut = depends(graph, {v for v, one in zip(graph.inputs, given, strict=True) if one})
    large = {v for v in cut if v.producer is not None and v.nbytes > largest and not follows_rules(v.producer)}
    for node in scans:
        made = [i for i, v in enumerate(node.inputs[: scan_counts(node)[0]]) if v in large]
        made = [] if compares_inside(node, made) else made
        needed = closure([node.inputs[i] for i in made], lambda v: operands(v) if v in large else ())
        sources = [v for v in needed if v not in large and v.const is None]
        inner = node.params["jaxpr"]
        body = jaxpr_as_fun(computed_again(inner, [v in cut for v in node.inputs], largest) or inner)
        sink(graph, node, made, sources, lambda inner, body=body: body(*inner), REMAT)
    effects = [node for node in graph.nodes if node.effects]
    run = lambda *args: evaluate(dict(zip(graph.inputs, args, strict=True)), graph.outputs, effects)
    return jax.make_jaxpr(run)(*(like(a) for a in closed.in_avals))


def _recurrence(node: Node) -> Made:
    """Products and cumulative products, of which derivatives run along the axis."""
    if (run := recurrent(node)) is None:
        return None
    made = flatten(jax.make_jaxpr(run)(like(node.inputs[0].aval)), custom=False)
    return made.nodes, called(made, node.inputs)


REMAT: Any = functools.partial(jax.checkpoint, prevent_cse=False)  # a loop keeps steps apart by itself
