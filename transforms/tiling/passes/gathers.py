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
    changed = False
    for node in graph.nodes[:]:
        before = node.inputs[0].producer if node.inputs else None
        if before is None or "reshape" not in (node.name, before.name):
            continue
        if _apart(before, "all_gather_dimension", node.inputs[0], node.outputs[0]) and small(before.inputs[0]):
            params = before.params | {"tiled": True}
            node.change(primitive=before.primitive, params=params, inputs=before.inputs, source=before.source)
        elif _apart(node, "scatter_dimension", node.inputs[0], before.inputs[0]) and small(node.outputs[0]):
            node.change(params=node.params | {"tiled": True}, inputs=before.inputs)
        else:
            continue
        changed = True
    graph.prune()
    return changed


def _apart(node: Node, name: str, apart: Value, joined: Value) -> bool:
    """Whether an equation gathers to, or sums and scatters, `apart`: `joined`, but with a dimension of the devices."""
    dim = None if node.params.get("tiled", True) else node.params.get(name)
    shape = apart.shape
    return dim is not None and joined.shape == (*shape[:dim], math.prod(shape[dim : dim + 2]), *shape[dim + 2 :])
