"""Joined gathers: what devices gather as a dimension of theirs, and a reshape then puts behind each other, is whole.

`lax.all_gather(x, "data").reshape(-1, x.shape[-1])`, as it is written for negatives of other devices, has a tile's rows
of every device: another cut than its rows have, where all pairs meet. Gathered with `tiled=True` it has none.
"""

from __future__ import annotations

import math

from transforms.tiling.analysis.limits import Limits
from transforms.tiling.frontend.trace import Made, rewrite_all
from transforms.tiling.ir.graph import Graph, Node, Value


def join(graph: Graph, limits: Limits) -> bool:
    """Gather in one piece what a reshape joins. Returns whether any was.

    A device's share has to be small enough to be whole, as it then is.
    """

    def gathered(node: Node) -> Made:
        before = node.inputs[0].producer if node.name == "reshape" else None
        if before is None or not _apart(before, node.outputs[0]):
            return None
        if before.inputs[0].nbytes > max(limits.largest, limits.together):
            return None
        how = {"primitive": before.primitive, "params": before.params | {"tiled": True}, "source": before.source}
        made = node.like(before.inputs, [node.outputs[0].aval], **how)
        return [made], made.outputs

    return rewrite_all(graph, gathered)


def _apart(node: Node, joined: Value) -> bool:
    """Whether an equation gathers `joined`, but with a dimension of the devices."""
    dim = None if node.params.get("tiled", True) else node.params.get("all_gather_dimension")
    shape = node.outputs[0].shape
    return dim is not None and joined.shape == (*shape[:dim], math.prod(shape[dim : dim + 2]), *shape[dim + 2 :])
