"""What temporary memory a program will take, before it is compiled.

Neither arguments nor results are counted, as in `compiled.memory_analysis().temp_size_in_bytes`. An operand that is
read for the last time is overwritten where that is possible, and a loop's body works in place on what it carries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jax import lax
from jax.extend.core import ClosedJaxpr

from transforms.tiling.ir.flatten import flatten
from transforms.tiling.ir.graph import Graph, Node, Value, body
from transforms.tiling.report.fusion import FUSIBLE, IN_PLACE, Fused
from transforms.tiling.report.simplify import LOOPS, NESTED


def temp_bytes(closed: ClosedJaxpr) -> int:
    """Return the peak of the temporary memory that the compiled program will need, in bytes."""
    return _peak(flatten(closed), False)


# ------------------------------------------------------------------------------------------------------------- liveness


@dataclasses.dataclass(eq=False)
class _Buffer:
    """Memory that one or more values share, one after the other; not counted if whoever runs the graph provides it."""

    size: int
    provided: bool
    start: int
    end: int


def _peak(graph: Graph, loop: bool) -> int:
    """The most that is alive at once. A loop's body may overwrite its inputs, and its outputs have memory already."""
    program = Fused(graph)
    last = program.last
    held = {v: _Buffer(0, True, 0, 0) for v in program.inputs} if loop else {}
    for t, node in enumerate(program.order):
        reusable = {v for v, straight in program.reads[node].items() if last[v] == t and straight and v in held}
        for value, source in list(_results(program, node, reusable)):
            provided = value in program.outputs
            if source is None or (loop and provided):
                held[value] = _Buffer(value.nbytes, provided, t, t)
            else:
                held[value] = held[source]
            held[value].provided |= provided
            held[value].end = max(t, last.get(value, t))
    hoisted = _hoisted(program, held) if loop else 0
    buffers = [b for b in set(held.values()) if not b.provided]
    peaks = [
        sum(b.size for b in buffers if b.start <= t <= b.end) + (_inside(node) if node.name in NESTED else 0)
        for t, node in enumerate(program.order)
    ]
    return max(peaks, default=0) + hoisted


def _hoisted(program: Fused, held: dict[Value, _Buffer]) -> int:
    """Bytes of the loop's inputs that are converted to wider floats before it, once, for all matrix products in it."""
    found: dict[Value, int] = {}
    for node in program.order:
        read = list(program.reads[node])
        if node.name != "convert_element_type" or not read or read[0] not in program.inputs:
            continue
        wide, narrow = node.outputs[0], node.inputs[0]
        if wide.dtype.itemsize > narrow.dtype.itemsize and read[0].dtype == narrow.dtype:
            found[read[0]] = read[0].aval.size * wide.dtype.itemsize
            held[wide].provided |= read[0].aval.size == wide.aval.size
    return sum(found.values())


def _results(program: Fused, node: Node, reusable: set[Value]) -> Iterator[tuple[Value, Value | None]]:
    """Each result of a node, and the operand in whose memory it is written."""
    if node.name in LOOPS:
        for value, carry in zip(node.outputs, _carries(node), strict=True):
            source = None if carry is None else program.find(carry)
            yield value, source if source in reusable else None
        return
    if node.name in IN_PLACE:
        reusable = reusable & {program.find(node.inputs[0])}
    elif node.name not in FUSIBLE and node.name != "cond":
        reusable = set()
    for value in node.outputs:
        readers = program.readers.get(value, [])
        # The memory of what will be overwritten is settled first: it is not that of an operand.
        settled = any(r.name in IN_PLACE and program.find(r.inputs[0]) is value for r in readers)
        fits = (v for v in program.reads[node] if v in reusable and v.nbytes == value.nbytes)
        source = None if settled and node.name in FUSIBLE else next(fits, None)
        reusable = reusable - {source}
        yield value, source


def _carries(node: Node) -> list[Value | None]:
    """For each result of a loop the operand that it overwrites; None where results are stacked."""
    inner = _bodies(node)[0]
    carried = [a.shape == v.aval.shape for a, v in zip(inner.out_avals, node.outputs, strict=True)]
    operands = node.inputs
    if node.name == "scan":  # what is scanned over comes last
        operands = operands[: sum(a.shape == v.aval.shape for a, v in zip(inner.in_avals, operands, strict=True))]
    given = iter(operands[len(operands) - sum(carried) :])
    return [next(given) if c else None for c in carried]


def _inside(node: Node) -> int:
    """The peak inside a loop's body, or the largest among branches."""
    return max(_peak(_sliced(node, inner), node.name != "shard_map") for inner in _bodies(node))


def _sliced(node: Node, inner: ClosedJaxpr) -> Graph:
    """A body as a graph. That of a scan takes slices of what it scans over, and puts what it stacks into place."""
    graph = flatten(inner)
    if node.name != "scan":
        return graph
    for i, whole in enumerate(node.inputs):
        if (part := graph.inputs[i]).shape != whole.shape:
            graph.inputs[i] = Value(whole.aval)
            part.producer = Node(lax.dynamic_slice_p, {}, [graph.inputs[i]], [part], None, None, None)
            graph.nodes.insert(0, part.producer)
    for i, whole in enumerate(node.outputs):
        if (part := graph.outputs[i]).shape != whole.shape:
            graph.inputs.append(Value(whole.aval))
            put = Node(lax.dynamic_update_slice_p, {}, [graph.inputs[-1], part], [], None, None, None)
            put.outputs.append(Value(whole.aval, put))
            graph.outputs[i] = put.outputs[0]
            graph.nodes.append(put)
    return graph


def _bodies(node: Node) -> Sequence[ClosedJaxpr]:
    if node.name == "cond":
        return node.params["branches"]
    return [body(node.params, "body_jaxpr" if node.name == "while" else "jaxpr")]
