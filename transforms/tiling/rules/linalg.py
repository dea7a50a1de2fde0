"""Factorisations and solves of many matrices at once, or of many right-hand sides: one of these is cut."""

from __future__ import annotations

import dataclasses

from transforms.tiling.ir.graph import Node
from transforms.tiling.rules.factors import Factors, register_factors

# How many of each operand's last dimensions one matrix or vector takes.
CORE = {
    **dict.fromkeys("cholesky eig eigh geqrf hessenberg lu qr schur svd tridiagonal".split(), (2,)),
    **dict.fromkeys("cholesky_update geqp3 householder_product".split(), (2, 1)),
    **dict.fromkeys(["symmetric_product", "triangular_solve"], (2, 2)),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "tridiagonal_solve": (1, 1, 1, 2),
}


def factors(node: Node) -> Factors:
    """`([b i j], [b i k]) -> [b i k]`: matrices are whole, and `b` counts them."""
    count = min(len(v.shape) - core for v, core in zip(node.inputs, CORE[node.name], strict=True))
    ins = [range(len(v.shape)) for v in node.inputs]
    core, outs = range(count, max(map(len, ins))), [range(count)] * len(node.outputs)
    return Factors(ins, outs, blocked=dict.fromkeys(core, "takes whole matrices along the cut axis"))


def solved(node: Node) -> Factors:
    """The same, but the last operand's columns (rows, if the matrix is to their right) may be cut: right-hand sides."""
    found, sides = factors(node), len(node.inputs[-1].shape)
    column = sides - (1 if node.params.get("left_side", True) else 2)
    dims = ["side" if d == column else d for d in range(sides)]
    return dataclasses.replace(found, ins=[*found.ins[:-1], dims], outs=[dims])


SOLVED = ("triangular_solve", "tridiagonal_solve")
register_factors(*(name for name in CORE if name not in SOLVED), factors=factors, pull=None)
register_factors("triangular_solve", factors=solved, heavy=True)
register_factors("tridiagonal_solve", factors=solved, pull=None)
