"""Factorisations and solves of many matrices at once: the cut is one of the leading dimensions, or they wait for it."""

from __future__ import annotations

from transforms.graph import SOLVE, Node, flatten, solver
from transforms.placement import Placement
from transforms.propagate import analyse
from transforms.rules import Complete, Move, one_cut, register, tiled

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


def push(node: Node, placements: tuple[Placement, ...]) -> Move:
    cut = one_cut(node, placements)
    if any(cut.dim >= len(v.shape) - core for v, core in zip(node.inputs, CORE[node.name], strict=True)):
        raise Complete(tiled(placements), "takes whole matrices along the cut axis")
    return Move((cut,) * len(node.outputs), (cut,) * len(node.inputs))


def push_solve(node: Node, placements: tuple[Placement, ...]) -> Move:
    """A solve with a derivative rule of its own, in a graph that is yet to be differentiated: placed, never run."""
    closed, taken = solver(node.params, placements)
    graph = flatten(closed)
    found = analyse(graph, taken, None)
    return Move(tuple(found.fact(v).placement for v in graph.outputs), placements)


register(*CORE, push=push)
register(SOLVE, push=push_solve)
