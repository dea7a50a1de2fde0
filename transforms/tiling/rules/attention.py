"""cuDNN's attention, `jax.nn.dot_product_attention(implementation="cudnn")`: batch and heads are cut, forward and back.

Query heads are cut together with the kv heads that they read. Where a tile has some query heads of a kv head that all
read, gradients of keys and values are parts of a sum. Along the sequence, and for rows of several documents or pages,
the kernel takes whole arrays.

Letters: `B` batch `T` queries `S` keys `N` query heads `K` kv heads `H` head size.
"""

from __future__ import annotations

import dataclasses

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import WHOLE, Partial, Placement
from transforms.tiling.rules import Move, first_cut, refuse_partial, register, tiled, unlike

REASON = "is a kernel that was written for whole arrays"
OPERANDS = "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v".split()
OFFSETS = slice(OPERANDS.index("q_offsets"), len(OPERANDS))  # of documents and of pages, where there are any


def letters(node: Node) -> tuple[list[str], list[str]]:
    """The dimensions of each operand, and of each result; of operands that a call does without, none."""
    query, key = ("BTNH", "BSKH") if node.params["layout"] == 0 else ("BNTH", "BKSH")
    optional = ["BNTS", "B", "B", "", "", "", ""]
    others = zip(optional, node.inputs[3 : len(OPERANDS)], strict=True)
    first = [query, key, key, *("" if 0 in v.shape else name for name, v in others)]
    if "bwd" in node.name:
        return [*first, "BNT", query, query], [query, key, key, "BNTS"][: len(node.outputs)]
    return first, [query, "BNT"][: len(node.outputs)]


def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    if (parts := refuse_partial(node, placements, REASON)) is not None:
        return parts
    cuts, (ins, outs), (first, cut) = tiled(placements), letters(node), first_cut(placements)
    names = ins[first]
    letter = names[cut.dim] if cut.dim < len(names) else ""
    if letter not in ("B", "N", "K") or cut.group > 1 or any(0 not in v.shape for v in node.inputs[OFFSETS]):
        return Complete(cuts, REASON if letter != "T" else "attends along the cut axis")
    sizes = {name: node.inputs[i].shape[ins[i].index(name)] for i in (0, 1) for name in ins[i]}
    each = sizes["N"] // sizes["K"]
    if letter == "B":
        minors = {"B": cut.minor}
    else:
        heads = cut.minor if letter == "N" else cut.minor * each
        minors = {"N": heads} if heads % each else {"N": heads, "K": heads // each}
        if heads % each and sizes["K"] > 1:
            return Complete(cuts, "reads one kv head for several query heads, some of which are in other tiles")

    def stands(names: str, shape: tuple[int, ...]) -> Placement:
        for dim, name in enumerate(names):
            if name in minors and shape[dim] == sizes[name]:
                return dataclasses.replace(cut, dim=dim, minor=minors[name])
        return WHOLE

    wanted = tuple(stands(names, v.shape) for names, v in zip(ins, node.inputs, strict=True))
    if any(placements[i] != wanted[i] for i in cuts):
        return unlike(node, cuts)
    made = [stands(names, v.shape) for names, v in zip(outs, node.outputs, strict=True)]
    return Move(tuple(Partial("sum") if place == WHOLE else place for place in made), wanted)


NAMES = [f"dot_product_attention_{way}{wrapper}" for way in ("fwd", "bwd") for wrapper in ("", "_wrapper")]
register(*NAMES, push=push, alone=True)
