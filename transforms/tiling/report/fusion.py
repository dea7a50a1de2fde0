"""Which values of a program are stored, and in what order they are computed: a model of what XLA does on CPU.

Chains of elementwise operations are computed inside what reads them. Matrix products and reductions go to libraries,
which scale what they make and compute what they alone read, but take the rest from memory. What is ready runs first.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.report.simplify import LOOPS, Simplified
from transforms.tiling.rules.elementwise import ELEMENTWISE

# What does not read its operands element by element.
PICKS = frozenset("transpose turn gather slice dynamic_slice rev concatenate pad".split())
LINEAR = "add sub mul div max min neg add_any select_n convert_element_type complex real imag".split()
FUSIBLE = frozenset((*ELEMENTWISE, *LINEAR, *PICKS, "broadcast_in_dim", "iota", "split")) - {"threefry2x32"}
# What the libraries of matrix products and reductions compute on the way.
LIBRARY = frozenset(
    """add sub mul max min neg exp tanh square integer_pow abs broadcast_in_dim add_any dot_general
    convert_element_type""".split()
)
REDUCES = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
# Their first operand's memory becomes their result's.
IN_PLACE = frozenset("dynamic_update_slice scatter scatter-add sort".split())
# Not computed twice to save memory.
EXPENSIVE = frozenset(
    """exp exp2 expm1 log log1p log2 logistic tanh tan sin cos asin acos atan atan2 sinh cosh asinh acosh atanh erf
    erf_inv erfc lgamma digamma pow rsqrt sqrt cbrt div rem igamma igammac""".split()
)


class Fused(Simplified):
    """A graph as it is compiled.

    Attributes:
        order: the nodes whose results are stored, in the order in which they run.
        reads: for each of them the stored values that it reads, and whether it does so element by element.
    """

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._library: set[Node] = set()  # what reductions compute; they take no part in what others read too
        self._repeated: set[Node] = set()  # computed once for each copy that a broadcast makes
        self._stored: set[Node] = set()  # whoever reads these, reads them from memory
        self._roots = self._fuse()
        self.reads = {node: self._read(node) for node in self._roots}
        self.order = self._schedule()

    def _fuse(self) -> set[Node]:
        """The nodes whose results are stored. What is cheap may be computed inside its readers as well."""
        groups: dict[Node, set[Node]] = {}  # for each node the stored ones that compute it inside
        roots = set()
        for node in reversed(self.nodes):
            readers = self._readers_of(node)
            inside = [r for r in readers if self._computes(r, node, len(readers))]
            found = {g for r in inside for g in groups[r]}
            often = len(found) + (len(readers) > len(inside)) > 1 and self._expensive(node)
            if often or not inside or node.name not in (*FUSIBLE, "dot_general"):
                self._stored.add(node)
                found = {node}
            if node in self._stored or len(inside) < len(readers) or any(v in self.outputs for v in node.outputs):
                roots.add(node)
            elif node.name in (*LIBRARY, "dot_general") and all(
                r.name in REDUCES or r in self._library for r in readers
            ):
                self._library.add(node)
            if any(r.name == "broadcast_in_dim" or r in self._repeated for r in inside):
                self._repeated.add(node)
            groups[node] = found
        return roots

    def _computes(self, reader: Node, node: Node, readers: int) -> bool:
        """Whether a reader can compute the node, which so many read, inside itself."""
        if reader.name in REDUCES or reader in self._library:
            return readers == 1 and (
                node.name in LIBRARY or (node.name == "dot_general" and reader.name not in REDUCES)
            )
        if reader.name == "dot_general":
            return node.name == "transpose" or (readers == 1 and self._activation(node))
        if reader.name == "dynamic_update_slice":
            return self.find(reader.inputs[0]) not in node.outputs
        if (reader.name == "broadcast_in_dim" or reader in self._repeated) and self._expensive(node):
            return False
        return reader.name in FUSIBLE and node.name in FUSIBLE

    def _common(self, node: Node) -> bool:
        """Whether libraries compute this on the way."""
        return node.name in LIBRARY or (node.name == "div" and not self._expensive(node))

    def _activation(self, node: Node) -> bool:
        """Whether this is computed, element by element, of one matrix product that nothing else reads."""
        operands = self.operands(node)
        if not self._common(node) or len(operands) != 1 or len(self.readers[operands[0]]) != 1:
            return False
        made = operands[0].producer
        return made is not None and (made.name == "dot_general" or self._activation(made))

    def _expensive(self, node: Node) -> bool:
        if node.name != "div":
            return node.name in EXPENSIVE
        divisor = self.find(node.inputs[1])  # a smaller one becomes a product with its reciprocal
        copied = divisor.producer is not None and divisor.producer.name == "broadcast_in_dim"
        return divisor.const is None and not copied and divisor.aval.size == node.outputs[0].aval.size

    def _read(self, root: Node) -> dict[Value, bool]:
        values: dict[Value, bool] = {}
        stack, seen = [(root, True)], set()
        while stack:
            node, straight = stack.pop()
            straight = straight and node.name not in PICKS
            if (node, straight) in seen:
                continue
            seen.add((node, straight))
            for value in self.operands(node):
                if (made := self._made_inside(value, node)) is None:
                    values[value] = values.get(value, True) and straight
                else:
                    stack.append((made, straight))
        return values

    def _made_inside(self, value: Value, reader: Node) -> Node | None:
        """What computes a value, if the reader does so itself."""
        node = value.producer
        known = value in self.inputs or node is None or node in self._stored
        return node if not known and self._computes(reader, node, len(self._readers_of(node))) else None

    def _readers_of(self, node: Node) -> dict[Node, None]:
        return dict.fromkeys(r for v in node.outputs for r in self.readers.get(v, []))

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
