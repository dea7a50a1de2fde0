"""Which values of a program are stored, and in what order they are computed: a model of what XLA does on CPU.

Chains of elementwise operations are computed inside what reads them. Matrix products and reductions go to libraries,
which scale what they make and compute what they alone read, but take the rest from memory. What is ready runs first.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import jax

from transforms.graph import REMAT, Graph, Node, Value, body, constant, flatten, nbytes
from transforms.rules.elementwise import ELEMENTWISE

# Other names for the same memory; the second kind only if the size is the same.
ALIAS = frozenset("reshape squeeze copy copy_p stop_gradient name expand_dims bitcast_convert_type".split())
COPIES = frozenset("broadcast_in_dim slice dynamic_slice".split())
# What does not read its operands element by element.
PICKS = frozenset("transpose gather slice dynamic_slice rev concatenate pad".split())
LINEAR = "add sub mul div max min neg add_any select_n convert_element_type complex real imag".split()
FUSIBLE = frozenset((*ELEMENTWISE, *LINEAR, *PICKS, "broadcast_in_dim", "iota", "split")) - {"threefry2x32"}
REDUCES = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
# Their first operand's memory becomes their result's.
IN_PLACE = frozenset("dynamic_update_slice scatter scatter-add sort".split())
# Not computed twice to save memory.
EXPENSIVE = frozenset(
    """exp exp2 expm1 log log1p log2 logistic tanh tan sin cos asin acos atan atan2 sinh cosh asinh acosh atanh erf
    erf_inv erfc lgamma digamma pow rsqrt sqrt cbrt div rem igamma igammac""".split()
)
LOOPS = frozenset(["scan", "while"])
NESTED = LOOPS | {"cond"}


class Fused:
    """A graph as it is compiled.

    Attributes:
        order: the nodes whose results are stored, in the order in which they run.
        reads: for each of them the stored values that it reads, and whether it does so element by element.
        inputs, outputs: of the graph, which whoever runs it provides.
    """

    def __init__(self, graph: Graph):
        self.same: dict[Value, Value] = {}  # values that stand in the memory of others
        self.nodes: list[Node] = []
        self._expand(graph)
        self._merge()
        self._scale()
        self.inputs, self.outputs = ({self.find(v) for v in values} for values in (graph.inputs, graph.outputs))
        self.readers: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(self.operands(node)):
                self.readers.setdefault(value, []).append(node)
        self._library: set[Node] = set()  # what reductions compute; they take no part in what others read too
        self._repeated: set[Node] = set()  # computed once for each copy that a broadcast makes
        self._stored: set[Node] = set()  # whoever reads these, reads them from memory
        self._roots = self._fuse()
        self.reads = {node: self._read(node) for node in self._roots}
        self.order = self._schedule()

    def find(self, value: Value) -> Value:
        while value in self.same:
            value = self.same[value]
        return value

    def operands(self, node: Node) -> list[Value]:
        return [v for v in map(self.find, node.inputs) if v.const is None]

    # ------------------------------------------------------------------------------------------------- simplification

    def _expand(self, graph: Graph) -> None:
        """Take the branch of this platform, and leave out what is only another name for the same memory."""
        for node in graph.nodes:
            inner = self._inlined(node)
            if inner is not None:
                self.same.update(zip(inner.inputs, node.inputs[len(node.inputs) - len(inner.inputs) :], strict=True))
                self._expand(inner)
                self.same.update(zip(node.outputs, inner.outputs, strict=True))
            elif (scatter := self._scattered(node)) is not None:
                self.nodes.remove(scatter)
                other = node.inputs[scatter is self.find(node.inputs[0]).producer]
                scatter.inputs = [other, *scatter.inputs[1:]]
                self.same[node.outputs[0]] = scatter.outputs[0]
                self.nodes.append(scatter)
            elif node.name in ALIAS or (node.name in COPIES and _size(node.inputs[0]) == _size(node.outputs[0])):
                self.same[node.outputs[0]] = node.inputs[0]
            elif node.name != "platform_index":
                self.nodes.append(node)

    def _inlined(self, node: Node) -> Graph | None:
        if node.name in REMAT:
            return flatten(body(node.params, "jaxpr"))
        index = self.find(node.inputs[0]).producer if node.name == "cond" else None
        if index is None or index.name != "platform_index":
            return None
        ours = jax.default_backend()
        chosen = (i for i, names in enumerate(index.params["platforms"]) if names is None or ours in names)
        return flatten(node.params["branches"][next(chosen)])

    def _scattered(self, node: Node) -> Node | None:
        """The scatter into zeros whose result a node adds to something: it is done in place of the sum."""
        if node.name not in ("add", "add_any") or _size(node.inputs[0]) != _size(node.inputs[1]):
            return None
        found = (self.find(v).producer for v in node.inputs)
        zeros = (n for n in found if n is not None and n.name == "scatter-add" and constant(n.inputs[0]) == 0)
        return next(zeros, None)

    def _merge(self) -> None:
        """Let equal computations of equal operands be one."""
        known: dict[Any, Node] = {}
        kept = []
        for node in self.nodes:
            key = (node.name, str(node.params), tuple(self._key(v) for v in node.inputs))
            alone = node.effects or node.name in NESTED or not self.operands(node)
            if not alone and key in known:
                self.same.update(zip(node.outputs, known[key].outputs, strict=True))
                continue
            known[key] = node
            kept.append(node)
        self.nodes = kept

    def _key(self, value: Value) -> Any:
        """What identifies an operand: for one that is filled with a number, that."""
        value = self.find(value)
        node = value.producer
        if node is not None and node.name == "broadcast_in_dim" and not self.operands(node):
            return str(value), self._key(node.inputs[0])
        return value if value.const is None or value.shape != () else str(value.const)

    def _scale(self) -> None:
        """A matrix product that is read once, to be scaled, is scaled as it is made."""
        counts: dict[Value, int] = {}
        for node in self.nodes:
            for value in self.operands(node):
                counts[value] = counts.get(value, 0) + 1
        kept = []
        for node in self.nodes:
            operands = self.operands(node)
            made = operands[0].producer if len(operands) == 1 and counts[operands[0]] == 1 else None
            cheap = node.name in FUSIBLE and not self._expensive(node) and len(node.outputs) == 1
            if (
                made is not None
                and made.name == "dot_general"
                and cheap
                and _size(operands[0]) == _size(node.outputs[0])
            ):
                self.same[node.outputs[0]] = operands[0]
            else:
                kept.append(node)
        self.nodes = kept

    # --------------------------------------------------------------------------------------------------------- fusion

    def _fuse(self) -> set[Node]:
        """The nodes whose results are stored. What is cheap may be computed inside its readers as well."""
        groups: dict[Node, set[Node]] = {}  # for each node the stored ones that compute it inside
        roots = set()
        for node in reversed(self.nodes):
            readers = dict.fromkeys(r for v in node.outputs for r in self.readers.get(v, []))
            inside = [r for r in readers if self._computes(r, node, len(readers))]
            found = {g for r in inside for g in groups[r]}
            often = len(found) + (len(readers) > len(inside)) > 1 and self._expensive(node)
            if node.name not in FUSIBLE or often or not inside:
                self._stored.add(node)
                found = {node}
            if node in self._stored or len(inside) < len(readers) or any(v in self.outputs for v in node.outputs):
                roots.add(node)
            elif node.name not in PICKS and all(r.name in REDUCES or r in self._library for r in readers):
                self._library.add(node)
            if any(r.name == "broadcast_in_dim" or r in self._repeated for r in inside):
                self._repeated.add(node)
            groups[node] = found
        return roots

    def _computes(self, reader: Node, node: Node, readers: int) -> bool:
        """Whether a reader can compute the node, which so many read, inside itself."""
        if reader.name in REDUCES or reader in self._library:
            return readers == 1 and node.name in FUSIBLE
        if reader.name == "dot_general":
            return node.name == "transpose"
        if reader.name == "dynamic_update_slice":
            return self.find(reader.inputs[0]) not in node.outputs
        if (reader.name == "broadcast_in_dim" or reader in self._repeated) and self._expensive(node):
            return False
        return reader.name in FUSIBLE

    def _expensive(self, node: Node) -> bool:
        if node.name != "div":
            return node.name in EXPENSIVE
        divisor = self.find(node.inputs[1])  # a smaller one becomes a product with its reciprocal
        copied = divisor.producer is not None and divisor.producer.name == "broadcast_in_dim"
        return divisor.const is None and not copied and divisor.aval.size == node.outputs[0].aval.size

    def _read(self, root: Node) -> dict[Value, bool]:
        values: dict[Value, bool] = {}
        stack = [(root, True)]
        while stack:
            node, straight = stack.pop()
            straight = straight and node.name not in PICKS
            for value in self.operands(node):
                if (made := self._made_inside(value, node)) is None:
                    values[value] = values.get(value, True) and straight
                else:
                    stack.append((made, straight))
        return values

    def _made_inside(self, value: Value, reader: Node) -> Node | None:
        """What computes a value, if the reader does so itself."""
        node = value.producer
        if value in self.inputs or node is None or node in self._stored:
            return None
        readers = {r for v in node.outputs for r in self.readers.get(v, [])}
        return node if self._computes(reader, node, len(readers)) else None

    # ---------------------------------------------------------------------------------------------------------- order

    def _schedule(self) -> list[Node]:
        """First come, first served among those whose operands are there. A loop's are gathered first."""
        roots = [n for n in self.nodes if n in self._roots]
        waiting = {n: {v.producer for v in self.reads[n] if v not in self.inputs} for n in roots}
        readers: dict[Any, list[Node]] = {}
        for node in roots:
            for before in waiting[node]:
                readers.setdefault(before, []).append(node)
        queue = deque((n, n.name in LOOPS) for n in roots if not waiting[n])
        order = []
        while queue:
            node, gathers = queue.popleft()
            if gathers:
                queue.append((node, False))
                continue
            order.append(node)
            for reader in readers.get(node, []):
                waiting[reader].discard(node)
                if not waiting[reader]:
                    queue.append((reader, reader.name in LOOPS))
        assert len(order) == len(roots)
        return order

    @functools.cached_property
    def last(self) -> dict[Value, int]:
        """When a stored value is read for the last time, as a number in `order`; outputs: after everything."""
        found: dict[Value, int] = {}
        for t, node in enumerate(self.order):
            found.update(dict.fromkeys(self.reads[node], t))
        return found | dict.fromkeys(self.outputs, len(self.order))


def _size(value: Value) -> int:
    return nbytes(value.aval)
