"""What temporary memory a program takes, from the live ranges of its values, before it is compiled.

A value lives from the equation that makes it to the last that reads it. Only what every compiler does is taken for
granted: views take nothing, what is made element by element for one reader is computed there, updates are written in
place, and a loop works in place on what it carries. What is ready is taken to run first, as on CPU, so that as much as
possible is alive. Neither arguments nor results are counted, as in `compiled.memory_analysis().temp_size_in_bytes`.

It is meant as an upper bound, and is no model of a compiler: one that fuses more takes less. Of the programs of
megabytes in the tests XLA on CPU takes 0.45 to 1.25 times as much, and an eighth where it makes one of two products.
Programs of a few KiB take up to 1.8 times as much, for what a compiler keeps of each loop. `Run.compile` asks it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from graphlib import TopologicalSorter

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from transforms import products
from transforms.tiling.frontend.flatten import flatten
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.jaxprs import body
from transforms.tiling.ir.walks import scan_counts
from transforms.tiling.primitives import REMAT, has, having

VIEWS, FUSED = having("view", "alias", "apart"), having("elementwise", "fused")
REDUCES, CHEAP, IN_PLACE, NESTED = (having(word) for word in ("reducing", "cheap", "in_place", "nested"))
ALIGNED = 64  # bytes that arrays begin at multiples of


def temp_bytes(closed: ClosedJaxpr) -> int:
    """Return the temporary memory that the compiled program is expected to need at most, in bytes."""
    return _peak(flatten(closed), False)


def _peak(graph: Graph, loop: bool) -> int:
    """The most that is alive at once; a loop's body has memory for its inputs and outputs, and may overwrite these."""
    same: dict[Value, Value] = {}  # views, and the values that they are of

    def find(value: Value) -> Value:
        while value in same:
            value = same[value]
        return value

    nodes = list(_expanded(graph, same))
    outputs = {find(v) for v in graph.outputs}
    barred = {find(v) for n in graph.nodes if has(n.name, "apart") for v in n.inputs}  # is stored before its barrier
    inside = _inside(nodes, find, outputs | barred)

    def stored(node: Node) -> Iterator[Value]:
        """What a node reads from memory, itself or in what is computed inside it."""
        for value in map(find, node.inputs):
            if value.producer in inside:
                yield from stored(value.producer)
            elif value.const is None:
                yield value

    reads = {n: dict.fromkeys(stored(n)) for n in nodes if n not in inside}
    order = _ordered(reads)
    last = {v: t for t, n in enumerate(order) for v in reads[n]} | dict.fromkeys(outputs, len(order))
    given = {find(v) for v in graph.inputs}
    owner: dict[Value, Value] = {}  # in whose memory a value is
    begins, ends = dict.fromkeys(given, 0), dict[Value, int]()
    spans: list[tuple[int, int, int]] = []  # of memory: when it begins and ends to be used, and how much it is
    for t, node in enumerate(order):
        for value in node.outputs:
            place = _overwritten(node, value.index)
            place = None if place is None else find(place)
            if place is None or last.get(place) != t or (place in given and not loop):
                place = value
            owner[value], begins[value] = owner.get(place, place), t
            ends[owner[value]] = max(t, last.get(value, t))
        if has(node.name, "product"):
            spans += [(begins.get(v := find(operand), 0), t, _copied(node, v)) for operand in node.inputs]
            spans += [(t, ends[v], _widened(node, v)) for v in node.outputs]
    provided = given if loop else given | {o for v, o in owner.items() if v in outputs}
    spans += [(begins[v], end, v.nbytes) for v, end in ends.items() if v not in provided]
    changes = [0] * (len(order) + 2)
    for start, end, size in spans:
        changes[start] += -(-size // ALIGNED) * ALIGNED
        changes[min(end, len(order)) + 1] -= -(-size // ALIGNED) * ALIGNED
    alive = itertools.accumulate(changes)
    return max((size + _within(node) for size, node in zip(alive, order, strict=False)), default=0)


def _ordered(reads: dict[Node, dict[Value, None]]) -> list[Node]:
    """What is ready runs first, so that as much as possible is alive."""
    sorter = TopologicalSorter({n: {v.producer for v in read if v.producer in reads} for n, read in reads.items()})
    sorter.prepare()
    ready, order, late = deque(sorter.get_ready()), [], set()
    while ready:
        node = ready.popleft()
        if node.name in NESTED and node not in late:
            late.add(node)
            ready.append(node)
            continue
        order.append(node)
        sorter.done(node)
        ready.extend(sorter.get_ready())
    return order


def _expanded(graph: Graph, same: dict[Value, Value]) -> Iterator[Node]:
    """A graph's equations without views; checkpointed bodies, and the branch of this platform, in their place."""
    for node in graph.nodes:
        inner = _body_in_place(node)
        if inner is not None:
            same.update(zip(inner.inputs, node.inputs[len(node.inputs) - len(inner.inputs) :], strict=True))
            yield from _expanded(inner, same)
            same.update(zip(node.outputs, inner.outputs, strict=True))
        elif node.name in VIEWS:  # of the first operand; but a barrier's results of all
            same.update(zip(node.outputs, node.inputs, strict=False))
        elif not has(node.name, "platform"):
            yield node


def _body_in_place(node: Node) -> Graph | None:
    if node.name in REMAT:
        return flatten(body(node.params))
    index = node.inputs[0].producer if has(node.name, "branches") else None
    if index is None or not has(index.name, "platform"):
        return None
    ours = jax.default_backend()
    chosen = (i for i, known in enumerate(index.params["platforms"]) if known is None or ours in known)
    return flatten(node.params["branches"][next(chosen)])


def _inside(nodes: Sequence[Node], find: Callable[[Value], Value], kept: set[Value]) -> set[Node]:
    """The nodes that their readers compute themselves, so that their results are never stored."""
    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in dict.fromkeys(map(find, node.inputs)):
            readers.setdefault(value, []).append(node)

    def is_inside(node: Node) -> bool:
        read = [r for v in node.outputs for r in readers.get(v, [])]
        alone = node.name in CHEAP or (node.name in FUSED and len(read) == 1)
        fused = alone and all(r.name in FUSED or r.name in REDUCES for r in read)
        return fused and kept.isdisjoint(node.outputs) and not _is_rounded_product(node)

    return {node for node in nodes if is_inside(node)}


def _is_rounded_product(node: Node) -> bool:
    """Whether a node makes a product's result narrower: that is stored, beside the wide one."""
    made = node.inputs[0].producer if len(node.inputs) == 1 else None
    narrower = made is not None and node.outputs[0].dtype.itemsize < node.inputs[0].dtype.itemsize
    return narrower and has(made.name, "product")


def _overwritten(node: Node, result: int) -> Value | None:
    """The operand in whose memory a result is written, if nothing reads that any more."""
    if has(node.name, "steps"):
        constants, carried = scan_counts(node)
        return node.inputs[constants + result] if result < carried else None
    if has(node.name, "tested"):
        return node.inputs[node.params["cond_nconsts"] + node.params["body_nconsts"] + result]
    return node.inputs[result] if node.name in IN_PLACE else None


def _within(node: Node) -> int:
    """Bytes that a node takes while it runs: the most of its bodies."""
    if node.name not in NESTED:
        return 0
    bodies = node.params["branches"] if has(node.name, "branches") else [body(node.params)]
    return max(_peak(_sliced(node, inner), not has(node.name, "devices")) for inner in bodies)


def _copied(node: Node, operand: Value) -> int:
    """Bytes of a product's operand as XLA on CPU multiplies it: in another order if there is a batch, or wider."""
    (_, _), (batch, _) = node.params["dimension_numbers"]
    return _widened(node, operand) or (operand.nbytes if batch else 0)


def _widened(node: Node, value: Value) -> int:
    """Bytes of a product's narrow float in the dtype that XLA on CPU multiplies, 0 of what it multiplies as it is."""
    narrow = jax.dtypes.issubdtype(value.dtype, np.floating) and value.dtype.itemsize < 4
    dims, dtype = node.params["dimension_numbers"], node.outputs[0].dtype
    as_it_is = products.usual(node.params["precision"]) and products.is_kernel(*node.inputs, dims, dtype)
    copied = narrow and not as_it_is and jax.default_backend() == "cpu"
    return value.nbytes // value.dtype.itemsize * 4 if copied else 0


def _sliced(node: Node, inner: ClosedJaxpr) -> Graph:
    """A body as a graph. That of a scan takes slices of what it scans over, and puts what it stacks into place."""
    graph = flatten(inner)
    if not has(node.name, "steps"):
        return graph
    inputs, nodes, outputs = list(graph.inputs), list(graph.nodes), list(graph.outputs)
    for i, whole in enumerate(node.inputs):
        if (part := inputs[i]).shape != whole.shape:
            inputs[i] = Value(whole.aval)
            nodes.insert(0, Node(lax.dynamic_slice_p, {}, [inputs[i]], [], None, None, None).make([part]))
    for i, whole in enumerate(node.outputs):
        if (part := outputs[i]).shape != whole.shape:
            inputs.append(Value(whole.aval))
            put = Node(lax.dynamic_update_slice_p, {}, [inputs[-1], part], [], None, None, None)
            nodes.append(put.make([Value(whole.aval)]))
            outputs[i] = put.outputs[0]
    return Graph(inputs, nodes, outputs)
