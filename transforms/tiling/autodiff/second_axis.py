"""Gradients that are formed piece by piece: a second cut, along the axis that makes an accumulator large.

Cut along the tokens, the gradient of a head `[D, V]` is a sum over the tiles: an accumulator of its size, in float32,
beside the gradient itself. Cut along the vocabulary too, outermost, each piece of it is summed over all tokens, rounded
and written where it belongs. The price is one more product: the statistics of the softmax come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from transforms.tiling.autodiff.program import Options, Program
from transforms.tiling.ir.graph import describe, nbytes
from transforms.tiling.ir.placement import WHOLE, Tiled, TileError, Whole
from transforms.tiling.lower import scan
from transforms.tiling.mesh.layout import like

SMALLEST = 512  # of the second cut's tiles: smaller matrix products run slower
PIECE = 1 << 20  # bytes of a gradient's piece, at least


def cut_again(program: Program, active: Sequence[int]) -> Program:
    """A gradient program with its largest whole argument cut too, along its largest dimension.

    Args:
        program: returns gradients, among others.
        active: numbers of the inputs that are differentiated.

    Raises:
        TileError: the function cannot be tiled along that dimension.
    """
    avals = program.closed.in_avals
    whole = [i for i in active if isinstance(program.placements[i], Whole) and avals[i].ndim]
    if not whole:
        return program  # no gradient is a sum over the tiles
    largest = max(whole, key=lambda i: nbytes(avals[i]))
    shape = avals[largest].shape
    dim = max(range(len(shape)), key=lambda d: shape[d])
    outer = _outer(program, largest, dim)
    try:
        facts = [outer.plan.analysis.fact(v).placement for v in outer.plan.analysis.graph.outputs]
    except TileError as error:
        raise TileError(
            f"cannot tile with lowmem=True, which cuts dimension {dim} of the argument {describe(avals[largest])} too: "
            f"{error}\n  Or pass lowmem=False."
        ) from error
    # A piece is complete when it is written: it needs no more than its own dtype.
    outer = dataclasses.replace(outer, wide=frozenset(i for i in program.wide if not isinstance(facts[i], Tiled)))
    o = outer.options

    def both(*args: Any) -> list[Any]:
        return scan.run(outer.plan, args, o, outer.wide, chunks=False)

    closed = jax.make_jaxpr(both)(*(like(a) for a in avals))
    options = dataclasses.replace(program.options, local=True)
    return Program(closed, program.placements, options, outer.wide)


def _outer(program: Program, argument: int, dim: int) -> Program:
    """The same program cut along a dimension of one argument, in tiles whose gradients are small beside the others."""
    avals = program.closed.in_avals
    total = avals[argument].shape[dim]
    row = 4 * avals[argument].size // total
    others = max((4 * avals[i].size for i, p in enumerate(program.placements) if isinstance(p, Tiled)), default=0)
    size = min(total, max(SMALLEST, max(PIECE, others // 4) // row))
    placements = tuple(Tiled(dim) if i == argument else WHOLE for i in range(len(avals)))
    options = Options(total, size, program.options.gather, program.options.accumulate)
    return Program(program.closed, placements, options, program.wide)
