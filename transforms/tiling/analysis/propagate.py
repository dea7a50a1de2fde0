"""The forward walk: a placement and a stage for every value of a graph, and what had to be completed on the way.

It is sharding propagation, as in GSPMD (Xu et al. 2021, arXiv:2105.04663) and Shardy, over time in place of devices:
Tiled, Partial and Whole are Shard, Partial and Replicate of PyTorch's DTensor.

Stage `k` of a Tiled or Partial value: loop `k` is the first that can compute it. Stage `k` of a Whole value: loops
before `k` must have run. A value that has to be whole for a reader is *completed*: stored by the loop that computes it,
for the loops after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from transforms.layout import Apart, named
from transforms.tiling.analysis import halo
from transforms.tiling.analysis.fits import unfit
from transforms.tiling.analysis.limits import Limits, check_size
from transforms.tiling.analysis.recut import recut
from transforms.tiling.analysis.rounding import compares_inside
from transforms.tiling.frontend.trace import any_platform, inline, split
from transforms.tiling.ir.facts import Analysis, Completion, Fact, Outlined, Region, grain
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.obstacles import Along, Beside, Complete, Inline, Obstacle, Promote, Refusal, Sink, Split
from transforms.tiling.ir.placement import WHOLE, Partial, Placement, Stacked, Tiled, Whole
from transforms.tiling.ir.walks import closure, operands
from transforms.tiling.mesh.sums import FLOWS, flowing
from transforms.tiling.mesh.unreduced import keep_apart, postpone
from transforms.tiling.primitives import REMAT, has, having
from transforms.tiling.rules import RULES, Move, partial, pulled, resumes, tiled, wait

BESIDE = having("beside")
DEEPEST = 64  # regions within one another: a part of a region that is not apart would be taken out of itself for ever


def analyse(
    graph: Graph,
    placements: Sequence[Placement],
    limits: Limits | None,
    promoted: Mapping[Value, Tiled] | None = None,
    apart: Mapping[Value, Apart] | None = None,
) -> Analysis | Obstacle:
    """Walk `graph` from the `placements` of its inputs; it is changed so that no region mixes what depends on the tile.

    Args:
        graph: the program.
        placements: one for each input.
        limits: which completions are allowed; None inside a region, where none is.
        promoted: values that would be Whole, but are made tile by tile.
        apart: of a region, the inputs that devices hold parts of; None where it may return no such value.

    Returns:
        What is known then; or the first obstacle:
            Refusal: a primitive has no rule, or an array that is too large would have to be whole.
            Complete: in a region, a Partial operand that it needs whole.
            Along: a node can hand a state from tile to tile.
            Inline: in a region, it needs a cut operand whole.
            Sink: a region can make what it reads, rather than to have that whole.
    """
    known = dict(promoted or {})
    depth: dict[Node, int] = {}  # out of how many regions, one within another, a node was taken
    while True:
        facts = {v: Fact(p) for v, p in zip(graph.inputs, placements, strict=True)}
        found = Analysis(graph, facts, limits)
        if limits is None:
            found.flowing = set() if apart is None else flowing(graph)
            found.apart.update(apart or {})
        obstacle = _walk(found, known)
        if obstacle is None:
            return found
        if isinstance(obstacle, Promote):
            known |= obstacle.placements
        elif isinstance(obstacle, Split):
            part, within = RULES[obstacle.node.name].part, depth.get(obstacle.node, 0) + 1
            assert part is not None
            assert within <= DEEPEST, f"what is apart of {obstacle.node} still depends on the tile"
            depth |= dict.fromkeys(split(graph, obstacle.node, obstacle.wanted, part), within)
        else:
            return obstacle


def _walk(found: Analysis, promoted: Mapping[Value, Tiled]) -> Obstacle | None:
    for node in found.graph.nodes:
        if ordered := [e for e in node.effects if "Ordered" in type(e).__name__]:
            return Refusal(
                f"cannot tile {node}: its side effect is ordered ({ordered[0]}), and tiles "
                "have an order of their own. Pass ordered=False, or leave it out of the tiled function."
            )
        if (obstacle := _place(found, node, promoted)) is not None:
            return obstacle
    _place_states(found)
    if found.limits is not None:
        postpone(found)
    return None


def _place_states(found: Analysis) -> None:
    """Place the arrays of states that loops may store for loops that go the other way."""
    for node in found.graph.nodes:
        if (state := node.state) is None or state.yielded is None:
            continue
        stage, begun = max(found.fact(v).stage for v in (node.outputs[0], state.yielded)), state.checkpoints.maker
        placement = Stacked(begun.params["size"])
        found.facts[state.checkpoints] = Fact(placement, found.turned(stage, state.reverse), direction=state.reverse)
        found.moves[begun] = Move((placement,), (WHOLE,))


def _place(found: Analysis, node: Node, promoted: Mapping[Value, Tiled]) -> Obstacle | None:
    """Find where the results of one node stand, completing operands until its rule is content."""
    limits = found.limits
    want = next((promoted[v] for v in node.outputs if v in promoted), None)
    facts = [found.fact(v) for v in node.inputs]
    while True:
        stage = max((f.stage for f in facts), default=0)
        move = _tried(found, node, facts, stage, want)
        if isinstance(move, Move):
            break
        if not isinstance(move, Complete):
            return move
        if limits is None and move.otherwise is not None:
            move = move.otherwise
            break
        placements = tuple(f.placement for f in facts)
        if limits is not None and (other := recut(found, node, placements, move.operands, promoted)):
            return other
        for i in move.operands:
            fact = _complete(found, node, i, move.reason)
            if isinstance(fact, Obstacle):
                return fact
            facts[i] = fact
    if isinstance(move, Outlined):
        if (obstacle := _check_reads(found, node, move)) is not None:
            return obstacle
        stage = 0
        for i in move.reads:
            fact = _store(found, node, i, move.reason)
            if isinstance(fact, Obstacle):
                return fact
            stage = max(stage, fact.stage)
        found.resident.update(v for v, p in zip(node.outputs, move.outs, strict=True) if isinstance(p, Tiled))
    if isinstance(move, Region) and (mixed := _mixed(found, node, move)):
        return Split(node, mixed)
    found.moves[node] = move
    read = [found.fact(v) for i, v in enumerate(node.inputs) if (node, i) not in found.completed]
    moving = resumes(node) or any(f.moving for f in read)
    keep_apart(found, node, move, moving)
    _note(found, node, move, stage, moving)
    return None


def _note(found: Analysis, node: Node, move: Move, stage: int, moving: bool) -> None:
    """Note what is known of a node's results: where they stand, and what goes from tile to tile in what direction."""
    facts = [found.fact(v) for v in node.inputs]
    varies = resumes(node) or any(f.varies for f in facts)
    way = next((f.direction for f in facts if f.varies and f.direction is not None), None)
    if way is not None:
        stage = found.turned(stage, way)
    way = way if node.state is None else node.state.reverse
    last = next((f.direction for f in facts if not f.varies and f.direction is not None), None) if way is None else way
    reach, fixed = halo.taken(found, node, move)
    for value, placement in zip(node.outputs, move.outs, strict=True):
        fact = Fact(placement, stage, moving=moving)
        if isinstance(placement, Whole) and varies:
            fact = fact._replace(varies=True, direction=way)
        elif placement == Partial("last"):
            fact = fact._replace(direction=last)
        elif isinstance(placement, Tiled) and value not in found.resident:
            fact = fact._replace(reach=reach, fixed=fixed)
        found.facts[value] = fact


def _tried(found: Analysis, node: Node, facts: Sequence[Fact], stage: int, want: Tiled | None) -> Move | Obstacle:
    """How a node moves whose operands stand so."""
    placements = tuple(f.placement for f in facts)
    # A partial sum that meets something of a later loop is finished at once, not carried into that loop.
    if late := [i for i, f in enumerate(facts) if isinstance(f.placement, Partial) and f.stage < stage]:
        return Complete(late, "meets a value that a later loop computes")
    if node.name not in FLOWS and (held := _held(found, node, placements)):
        return Complete(held, "needs what each device holds a part of")
    move = _move(node, placements, found.limits) if want is None else _pulled(node, placements, want)
    if isinstance(move, Obstacle):
        return move
    if (obstacle := halo.check(found, node, move)) is not None:
        return obstacle
    if (why := unfit(found, node, move)) is not None:
        return Complete(tiled(placements), why)
    return _group(found, node, move) or _check_picked(node, move, found.limits) or move


def _group(found: Analysis, node: Node, move: Move) -> Obstacle | None:
    """Note how many rows of the axis a node's operands and results keep together. They make no tile twice as long."""
    limits, together = found.limits, math.lcm(found.grain, grain(move))
    if limits is not None and together > found.grain:
        size = limits.options.size
        if -(-size // together) * together > limits.longest:
            if node.name in REMAT:
                return Inline(node)
            why = f"keeps {grain(move)} rows together, and tiles have {size}"
            cut = [i for i, v in enumerate(node.inputs) if found.is_cut(v)]
            if cut:
                return Complete(cut, why)
            return Refusal(f"cannot tile {node}: it {why}.\n  Take fewer, longer tiles.")
    found.grain = together
    return None


def _check_picked(node: Node, move: Move, limits: Limits | None) -> Obstacle | None:
    """Refuse rows picked out of the cut axis, each from the tile that has it, if they take more than a tile."""
    source, out = move.ins[0] if move.ins else WHOLE, move.outs[0] if move.outs else WHOLE
    if limits is None or not isinstance(source, Tiled) or not isinstance(out, Partial) or node.name not in PICKS:
        return None
    tile = node.inputs[0].nbytes * limits.options.size // limits.options.total
    if not limits.accumulate(node.outputs[0], tile, picked=True):
        return Complete([0], "takes rows of the cut axis that are together larger than a tile")
    return None


PICKS = having("picks")


def _check_reads(found: Analysis, node: Node, move: Outlined) -> Sink | None:
    """Have the body of a loop make for itself what it reads, if there is anything, rather than to have that whole."""
    limits = found.limits
    if limits is None or limits.gather == "any":
        return None
    cut = [i for i in move.constants if found.is_cut(node.inputs[i])]
    large = [i for i in cut if not (found.is_there(node.inputs[i]) or limits.allow(node.inputs[i]))]
    wanted = [node.inputs[i] for i in large]

    def is_source(value: Value) -> bool:
        cut = value.producer is not None and found.is_cut(value)
        return not cut or value in found.resident or (limits.allow(value) and value not in wanted)

    made = closure(wanted, lambda value: () if is_source(value) else operands(value))
    made = [v for v in made if v.const is None]
    if any(v.producer is not None and v.producer.effects for v in made if not is_source(v)):
        return None
    if large and has(node.name, "steps") and compares_inside(node, large):
        return None
    return Sink(node, large, tuple(filter(is_source, made))) if large else None


def _held(found: Analysis, node: Node, placements: Sequence[Placement]) -> list[int]:
    """The operands that are partial sums of which each device holds a part."""
    return [i for i, v in enumerate(node.inputs) if v in found.apart and isinstance(placements[i], Partial)]


def _mixed(found: Analysis, node: Node, move: Move) -> list[int]:
    return [i for i, v in enumerate(node.outputs) if v in found.used and isinstance(move.outs[i], Whole)]


def _store(found: Analysis, node: Node, operand: int, reason: str) -> Fact | Obstacle:
    """Have an operand whole before the loops, however large: the untiled program holds it too."""
    fact = found.fact(node.inputs[operand])
    if isinstance(fact.placement, Whole) or found.limits is None:
        return fact
    return _complete(found, node, operand, reason, any_size=found.limits.gather == "small")


def _pulled(node: Node, placements: tuple[Placement, ...], want: Tiled) -> Move | Obstacle:
    """How a node makes the tile `want` of its result, whichever way its operands are cut."""
    move = pulled(node, want)
    assert move is not None
    if other := [i for i, (p, q) in enumerate(zip(placements, move.ins, strict=True)) if p not in (WHOLE, q)]:
        return Complete(other, "makes its result along another dimension than it is cut")
    return move


def _move(node: Node, placements: tuple[Placement, ...], limits: Limits | None) -> Move | Obstacle:
    if all(isinstance(p, Whole) for p in placements):
        return Move((WHOLE,) * len(node.outputs), placements)
    rule = RULES[node.name]
    outlines = limits is not None and rule.outline is not None
    parts = partial(placements)
    if outlines and limits.options.outline:
        if parts:
            return Complete(parts, "runs on whole operands")
        if (move := rule.outline(node, placements, limits)) is not None:
            return move
    move = rule.push(node, placements)
    if not isinstance(move, Complete):
        return move
    if move.along and limits is not None and (not node.params.get("reverse") or node in limits.backward):
        return Along(node)
    return move if not outlines or parts else rule.outline(node, placements, limits) or move


def _complete(found: Analysis, node: Node, operand: int, reason: str, any_size: bool = False) -> Fact | Obstacle:
    """Make operand number `operand` of `node` whole, if it may be."""
    value, limits = node.inputs[operand], found.limits
    fact = found.fact(value)
    assert not isinstance(fact.placement, Whole), (node, operand, reason)
    if found.is_there(value) and isinstance(fact.placement, Tiled) and limits is not None:
        found.completed[node, operand] = reason
        return Fact(WHOLE, fact.stage)  # it is whole to begin with
    if limits is None:
        partials = [i for i, v in enumerate(found.graph.inputs) if isinstance(found.fact(v).placement, Partial)]
        if partials:
            return Complete(partials, f"needs it whole for its `{node.name}`")
        return Inline(node)
    if isinstance(fact.placement, Tiled) and not any_size:
        refusal = check_size(value, fact.placement, node, reason, limits, [(node, fact.placement.dim)])
        if refusal is not None:
            return refusal
        if limits.beside and node.name in BESIDE and node not in limits.granted and named(value.aval) is None:
            return Beside(reason, [(node, fact.placement.dim)])
    found.completions.append(Completion(value, node, reason, fact.placement))
    found.completed[node, operand] = reason
    return Fact(WHOLE, fact.stage + 1)


def analyse_body(
    graph: Graph, ins: Sequence[Placement], apart: Mapping[Value, Apart] | None = None
) -> Analysis | Obstacle:
    """`analyse` a body, in which what depends on the platform may become what every platform can run."""
    while True:
        found = analyse(graph, ins, None, apart=apart)
        if not isinstance(found, Inline) or found.node not in graph.nodes or any_platform(found.node) is None:
            return found
        inline(graph, found.node)


def body_of(
    graph: Graph,
    ins: Sequence[Placement],
    given: Sequence[Placement],
    offset: int = 0,
    apart: Mapping[Value, Apart] | None = None,
) -> Analysis | Obstacle:
    """Analyse a body; what it needs to be whole is asked of the region's own operands, `given`, from `offset` on."""
    found = analyse_body(graph, ins, apart)
    if isinstance(found, Complete):
        operands = [i + offset for i in found.operands]
        if any(isinstance(given[i], Whole) for i in operands):
            return wait(given, f"carries what its body needs whole: it {found.reason}")
        return Complete(operands, found.reason)
    if isinstance(found, Inline):
        return wait(given, f"needs a cut array whole inside, for {found.node}")
    return found
