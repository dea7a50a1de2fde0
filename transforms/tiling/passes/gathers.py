"""Joined gathers: what devices gather as a dimension of theirs, and a reshape then puts behind each other, is whole.

`lax.all_gather(x, "data").reshape(-1, x.shape[-1])`, as it is written for negatives of other devices, has a tile's rows
of every device: another cut than its rows have, where all pairs meet. Gathered with `tiled=True` it has none.
"""

from __future__ import annotations

import math

from transforms.tiling.analysis.limits import Limits
from transforms.tiling.ir.graph import Graph, Node, Value


def join(graph: Graph, limits: Limits) -> bool:
    """Gather, or sum and scatter, in one piece what a reshape joins, or parts. Returns whether any was.

    A device's share has to be small enough to be whole, as it then is.
    """
    small = lambda share: share.nbytes <= max(limits.largest, limits.together)
    readers: dict[Value, list[Node | None]] = {v: [None] for v in graph.outputs}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    changed = False
    for node in [node for node in graph.nodes if node.name == "reshape"]:
        (whole,), (out,) = node.inputs, node.outputs
        before, (after, *others) = whole.producer, readers.get(out, [None])
        if before and _apart(before, "all_gather_dimension", whole, out):
            if len(readers[whole]) > 1 or not small(before.inputs[0]):
                continue
            made = before.like(before.inputs, [out.aval], params=before.params | {"tiled": True})
            graph.replace(node, [made], {out: made.outputs[0]})
            changed = True
        elif after and not others and _apart(after, "scatter_dimension", out, whole) and small(after.outputs[0]):
            after.change(inputs=[whole], params=after.params | {"tiled": True})
            changed = True
    graph.prune()
    return changed


def _apart(node: Node, name: str, apart: Value, joined: Value) -> bool:
    """Whether an equation gathers to, or sums and scatters, `apart`: `joined`, but with a dimension of the devices."""
    dim = None if node.params.get("tiled", True) else node.params.get(name)
    shape = apart.shape
    return dim is not None and joined.shape == (*shape[:dim], math.prod(shape[dim : dim + 2]), *shape[dim + 2 :])
