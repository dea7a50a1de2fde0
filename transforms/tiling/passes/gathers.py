"""Joined gathers: what devices gather as a dimension of theirs, and a reshape then puts behind each other, is whole.

`lax.all_gather(x, "data").reshape(-1, x.shape[-1])`, as it is written for negatives of other devices, has a tile's rows
of every device: another cut than its rows have, where all pairs meet. Gathered with `tiled=True` it has none.
"""

from __future__ import annotations

import math

from transforms.tiling.analysis.limits import Limits
from transforms.tiling.frontend.trace import Made
from transforms.tiling.ir.graph import Node, Value


def join(limits: Limits, node: Node) -> Made:
    """A reshape that joins what is gathered, as a gather in one piece.

    A device's share has to be small enough to be whole, as it then is.
    """
    before = node.inputs[0].producer if node.name == "reshape" else None
    if before is None or not _apart(before, node.outputs[0]):
        return None
    if before.inputs[0].nbytes > max(limits.largest, limits.together):
        return None
    how = {"primitive": before.primitive, "params": before.params | {"tiled": True}, "source": before.source}
    made = node.like(before.inputs, [node.outputs[0].aval], **how)
    return [made], made.outputs


def _apart(node: Node, joined: Value) -> bool:
    """Whether an equation gathers `joined`, but with a dimension of the devices."""
    dim = None if node.params.get("tiled", True) else node.params.get("all_gather_dimension")
    shape = node.outputs[0].shape
    return dim is not None and joined.shape == (*shape[:dim], math.prod(shape[dim : dim + 2]), *shape[dim + 2 :])
