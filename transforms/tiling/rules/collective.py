"""Collectives, for `tile` inside `jax.shard_map`, and where arrays live: a tile is moved as the whole would be."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from transforms.tiling.ir.graph import Node
from transforms.tiling.ir.obstacles import Complete, Obstacle
from transforms.tiling.ir.placement import Partial, Placement, Span, Tiled, Whole
from transforms.tiling.rules import Move, complete, each, register, shrinks
from transforms.tiling.rules.factors import Factors, elementwise, register_factors

# Element by element over the devices, and the reduction over the tiles that each commutes with.
OVER_DEVICES = {
    **dict.fromkeys("psum psum_invariant unreduced_psum preduced ppermute pbroadcast".split(), "sum"),
    **dict.fromkeys("reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p".split(), "sum"),
    **dict.fromkeys(["pmax", "unreduced_pmax"], "max"),
    **dict.fromkeys(["pmin", "unreduced_pmin"], "min"),
}


def push(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Each operand by itself; sums over the tiles are summed over the devices, and maxima likewise."""
    own = Partial(OVER_DEVICES[node.name])
    if other := [i for i, p in enumerate(placements) if not isinstance(p, (Whole, Tiled)) and p != own]:
        return Complete(other, "combines it otherwise over the devices")
    return Move(placements, placements)


def gathered_sum(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle | None:
    if placements != (Partial("sum"),):
        return None
    move = Move(placements, placements)
    return move if shrinks(node, 0) else Complete([0], "makes several copies of it", otherwise=move)


def exchanged(node: Node) -> Factors:
    """`([i j]) -> [i j]`: parts of some dimensions change their device; or one dimension goes, or one comes."""
    p, dims = node.params, range(len(node.inputs[0].shape))
    removed, added = (p.get(a, p.get(b)) for a, b in (REMOVED, ADDED))
    kept = p["tiled"] or node.name == "all_to_all"  # which keeps its dimensions, whatever `tiled` says
    outs: list[Any] = [d for d in dims if kept or d != removed]
    if added is not None and not kept:
        outs.insert(added, None)
    moved = {removed, added} if kept else {removed}
    return Factors([dims], [outs], blocked=dict.fromkeys(moved, "moves parts of the cut axis between devices"))


REMOVED, ADDED = ("split_axis", "scatter_dimension"), ("concat_axis", "all_gather_dimension")


# ------------------------------------------------------------------------------------------------ where arrays live


def is_spread(sharding: Any, dim: int) -> bool:
    """Whether a sharding spreads a dimension over devices, or might; all others that JAX has are of one device."""
    known = isinstance(sharding, NamedSharding) and dim < len(sharding.spec)
    return known and sharding.spec[dim] not in (None, PartitionSpec.UNCONSTRAINED)


def push_put(node: Node, placements: tuple[Placement, ...]) -> Move | Obstacle:
    """Arrays are put somewhere one by one."""
    for i, (p, target) in enumerate(zip(placements, node.params["devices"], strict=True)):
        if isinstance(p, Tiled) and is_spread(target, p.dim):
            return Complete([i], "spreads the cut axis over devices")
        if isinstance(p, Partial):
            return Complete([i], "puts it somewhere")
    return Move(placements, placements)


def localise_constraint(node: Node, move: Move, span: Span) -> dict[str, Any]:
    """A tile's own length need not divide by the devices: along the cut axis it is left to the compiler."""
    (cut,) = move.outs
    sharding = node.params["sharding"]
    if not isinstance(cut, Tiled) or not is_spread(sharding, cut.dim):
        return node.params
    free = PartitionSpec.UNCONSTRAINED
    spec = [free if dim == cut.dim else entry for dim, entry in enumerate(sharding.spec)]
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
    return node.params | {"sharding": sharding, "unconstrained_dims": node.params["unconstrained_dims"] | {cut.dim}}


register(*OVER_DEVICES, push=push, emit=each)
EXCHANGES = "all_gather all_gather_invariant all_gather_reduced all_to_all reduce_scatter unreduced_reduce_scatter"
register_factors(*EXCHANGES.split(), factors=exchanged, sums=gathered_sum, pull=None)
complete("pbroadcast_dynamic", "ragged_all_to_all", reason="sends each device what it asks for")
register("device_put", push=push_put)
# Spread otherwise over the devices: a tile holds a share of each, in the order of the whole, so it moves alike.
register_factors("reshard", "mesh_cast", factors=elementwise)
register_factors("sharding_constraint", factors=elementwise, localise=localise_constraint)
