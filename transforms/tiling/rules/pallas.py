"""`pallas_call`: where its grid walks the cut axis block by block, a tile of blocks is the same call, but shorter.

That takes a grid index that numbers the blocks of the cut dimension, in every operand that has it and in every result,
and a kernel that does not ask for it. Other kernels run on whole operands.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from transforms.tiling.ir.dependence import depend
from transforms.tiling.ir.errors import TileError
from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.jaxprs import equations
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Placement, Span, Tiled
from transforms.tiling.rules import Move, first_cut, refuse_partial, register, tiled


class Walk(NamedTuple):
    """Which grid index numbers the blocks of the cut axis, and of each operand and result that dimension, if any."""

    index: int
    dims: tuple[int | None, ...]


def mappings(node: Node) -> tuple[Any, ...]:
    """How blocks are taken from each operand and result; of operands before those, none are."""
    found = node.params["grid_mapping"]
    before = len(node.inputs) - found.num_inputs
    return (*(None,) * before, *found.block_mappings)


def block(mapping: Any, dim: int) -> int:
    """How long a block is in a dimension; 0 where index maps do not number blocks."""
    size = mapping.block_shape[dim]
    return {"Blocked": getattr(size, "block_size", 0), "Squeezed": 1}.get(type(size).__name__, 0)


def index_map(mapping: Any) -> Any:
    """The function from grid indices to the place of a block."""
    return getattr(mapping.index_map_jaxpr, "jaxpr", mapping.index_map_jaxpr)


def walk(node: Node, operand: int, dim: int) -> Walk | str:
    """How the grid walks dimension `dim` of an operand, or why it is not walked block by block."""
    found = mappings(node)
    if node.params["mesh"] is not None:
        return "is a kernel that several cores share"
    if found[operand] is None:
        return "is a kernel that is told by it what to do"
    if not block(found[operand], dim):
        return "is a kernel that does not take it in blocks"
    jaxpr = index_map(found[operand])
    grid = node.params["grid_mapping"].grid
    index = next((i for i, v in enumerate(jaxpr.invars[: len(grid)]) if v is jaxpr.outvars[dim]), None)
    if index is None or not isinstance(grid[index], int):
        return "is a kernel whose blocks along the cut axis are not numbered by an index of its grid"
    dims = []
    for mapping in found:
        moved = [] if mapping is None else moving(mapping, index)
        if len(moved) > 1 or (moved and not follows(mapping, index, moved[0])):
            return "is a kernel that takes other blocks than those that the grid is at along the cut axis"
        dims.append(moved[0] if moved else None)
    if None in dims[len(node.inputs) :]:
        return "is a kernel that writes to one place from several blocks along the cut axis"
    return order(node, index) or Walk(index, tuple(dims))


def moving(mapping: Any, index: int) -> list[int]:
    """The dimensions in which a block's place depends on a grid index."""
    jaxpr = index_map(mapping)
    moved = depend(jaxpr, [i == index for i in range(len(jaxpr.invars))])
    return [dim for dim, found in enumerate(moved) if found]


def follows(mapping: Any, index: int, dim: int) -> bool:
    """Whether a grid index is the number of the block in a dimension."""
    jaxpr = index_map(mapping)
    return jaxpr.outvars[dim] is jaxpr.invars[index] and block(mapping, dim) > 0


def order(node: Node, index: int) -> str | None:
    """Why blocks along a grid index cannot be computed apart, if they cannot."""
    found = node.params["grid_mapping"]
    seen = [i for i in range(len(found.grid)) if i not in found.vmapped_dims]  # those that the kernel knows of
    asks = (e for e in equations(node.params["jaxpr"]) if e.primitive.name in ("program_id", "num_programs"))
    asked = {seen[e.params["axis"]] for e in asks}
    if index in asked:
        return "is a kernel that asks which block along the cut axis it is at"
    if found.scratch_avals and any(axis < index for axis in asked):
        return "is a kernel that may hand something from block to block along the cut axis"
    return None


def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    if (parts := refuse_partial(node, placements, "is a kernel that was written for whole arrays")) is not None:
        return parts
    cut, (first, placement) = tiled(placements), first_cut(placements)
    found = walk(node, first, placement.dim)
    if isinstance(found, str):
        return Complete(cut, found)
    maps, avals = mappings(node), [*(v.aval for v in node.inputs), *(v.aval for v in node.outputs)]
    length, size = avals[first].shape[placement.dim], block(maps[first], placement.dim)
    wanted: list[Placement] = []
    for aval, mapping, dim in zip(avals, maps, found.dims, strict=True):
        if dim is None:
            wanted.append(WHOLE)
            continue
        minor, rest = divmod(aval.shape[dim] * placement.minor, length)
        if rest or placement.group > 1 or aval.shape[dim] * size != length * block(mapping, dim):
            return Complete(cut, "is a kernel whose operands have other numbers of blocks along the cut axis")
        wanted.append(Tiled(dim, placement.major, minor))
    ins, outs = wanted[: len(node.inputs)], wanted[len(node.inputs) :]
    if other := [i for i in cut if placements[i] != ins[i]]:
        return Complete(other, "is a kernel that takes other blocks than those that the grid is at along the cut axis")
    return Move(tuple(outs), tuple(ins))


def unfit(node: Node, move: Move, span: Span) -> str | None:
    """Tiles must begin where blocks do."""
    for mapping, placement in zip(mappings(node), (*move.ins, *move.outs), strict=True):
        if not isinstance(placement, Tiled) or span.length == span.total:
            continue
        size, minor = block(mapping, placement.dim), placement.minor
        last = isinstance(span.start, int) and span.start + span.length == span.total
        steps = (span.start if last else span.length) * minor
        if steps % size or (placement.major > 1 and span.total * minor % size):
            return f"is a kernel whose blocks, {size} long, do not make up tiles that are {span.length * minor} long"
    return None


def localise(node: Node, move: Move, span: Span) -> dict[str, Any]:
    """The same call with a shorter grid."""
    if (why := unfit(node, move, span)) is not None:
        raise TileError(f"cannot tile {node}: it {why}.\n  Pass size=, a multiple of its blocks.")
    places, (first, cut) = (*move.ins, *move.outs), first_cut(move.ins)
    shapes = [span.local_shape(v.shape, p) for v, p in zip((*node.inputs, *node.outputs), places, strict=True)]
    maps = mappings(node)
    both = [(mapping, shape) for mapping, shape in zip(maps, shapes, strict=True) if mapping is not None]
    made = [dataclasses.replace(m, array_aval=m.array_aval.update(shape=shape)) for m, shape in both]
    found = walk(node, first, cut.dim)
    assert isinstance(found, Walk)
    grid = list(node.params["grid_mapping"].grid)
    grid[found.index] = -(-shapes[first][cut.dim] // block(maps[first], cut.dim))
    outs = [a.update(shape=s) for a, s in zip(node.params["out_avals"], shapes[len(node.inputs) :], strict=True)]
    mapping = dataclasses.replace(node.params["grid_mapping"], grid=tuple(grid), block_mappings=tuple(made))
    return node.params | {"grid_mapping": mapping, "out_avals": tuple(outs), "cost_estimate": None}


register("pallas_call", push=push, localise=localise, unfit=unfit, alone=True)
