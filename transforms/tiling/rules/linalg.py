"""Factorisations and solves of many matrices at once, or of many right-hand sides: one of these is cut."""

from __future__ import annotations

from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.ir.flatten import flatten, solver
from transforms.tiling.ir.graph import SOLVE, Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Tiled, Whole
from transforms.tiling.rules import Move, by_cut, register, tiled

# How many of each operand's last dimensions one matrix or vector takes.
CORE = {
    "cholesky": (2,),
    "cholesky_update": (2, 1),
    "eig": (2,),
    "eigh": (2,),
    "geqp3": (2, 1),
    "geqrf": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "symmetric_product": (2, 2),
    "triangular_solve": (2, 2),
    "tridiagonal": (2,),
    "tridiagonal_solve": (1, 1, 1, 2),
}


@by_cut()
def push(node: Node, placements: tuple[Placement, ...], cut: Tiled) -> Move | Obstacle:
    if any(cut.dim >= len(v.shape) - core for v, core in zip(node.inputs, CORE[node.name], strict=True)):
        return Complete(tiled(placements), "takes whole matrices along the cut axis")
    return Move((cut,) * len(node.outputs), (cut,) * len(node.inputs))


def push_triangular(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """The columns of the right-hand sides (rows, where the matrix stands to their right) are solved one by one."""
    matrix, sides = placements
    if isinstance(matrix, Whole) and isinstance(sides, Tiled) and sides.dim == columns(node):
        return Move((sides,), placements)
    linear = isinstance(matrix, Whole) and sides == Partial("sum")
    return Move((sides,), placements) if linear else push(node, placements)


def pull_triangular(node: Node, want: Tiled) -> tuple[Placement, ...] | None:
    rank = len(node.outputs[0].shape)
    if want.dim < rank - 2:
        return (want, want)
    return (WHOLE, want) if want.dim == columns(node) else None


def columns(node: Node) -> int:
    """The dimension of a triangular solve's right-hand sides that counts them."""
    return len(node.inputs[1].shape) - (1 if node.params["left_side"] else 2)


def push_tridiagonal(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """The last operand holds right-hand sides as columns."""
    *diagonals, sides = placements
    one = all(isinstance(p, Whole) for p in diagonals) and isinstance(sides, Tiled)
    if one and sides.dim == len(node.inputs[3].shape) - 1:
        return Move((sides,), placements)
    return push(node, placements)


def push_solve(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """A solve with a derivative rule of its own, in a graph that is yet to be differentiated: placed, never run."""
    closed, taken = solver(node.params, placements)
    graph = flatten(closed)
    found = analyse(graph, taken, None)
    if isinstance(found, Obstacle):
        return found
    return Move(tuple(found.fact(v).placement for v in graph.outputs), placements)


COLUMNS = ("triangular_solve", "tridiagonal_solve")
register(*(name for name in CORE if name not in COLUMNS), push=push)
register("triangular_solve", push=push_triangular, pull=pull_triangular, heavy=True)
register("tridiagonal_solve", push=push_tridiagonal)
register(SOLVE, push=push_solve)
