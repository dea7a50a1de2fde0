"""What a compiler simplifies before it fuses: other names for the same memory, equal computations, sums in place."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from transforms.tiling.ir.flatten import flatten
from transforms.tiling.ir.graph import REMAT, Graph, Node, Value, body, constant, nbytes
from transforms.tiling.ir.numbering import constant_key, parameter_key

# Other names for the same memory; the second kind only if the size is the same.
ALIAS = frozenset("reshape squeeze copy copy_p stop_gradient name expand_dims bitcast_convert_type".split())
COPIES = frozenset("broadcast_in_dim slice dynamic_slice reduce_sum reduce_max reduce_min reduce_prod".split())
turn_p = Primitive("turn")  # the copy of an operand that a product takes in another order of its dimensions
LOOPS = frozenset(["scan", "while"])
NESTED = LOOPS | {"cond", "shard_map"}


class Simplified:
    """A graph without what costs nothing.

    Attributes:
        nodes: what is left, operands first.
        inputs, outputs: of the graph, which whoever runs it provides.
        readers: the nodes that read each value.
    """

    def __init__(self, graph: Graph):
        self.same: dict[Value, Value] = {}  # values that stand in the memory of others
        self.nodes: list[Node] = []
        self._expand(graph)
        self.inputs = {self.find(v) for v in graph.inputs}
        for simplify in (self._merge, self._scatter, self._softmax):
            self.outputs = {self.find(v) for v in graph.outputs}
            simplify()
        self.outputs = {self.find(v) for v in graph.outputs}
        self._prune()
        self.readers = self._count()

    def find(self, value: Value) -> Value:
        while value in self.same:
            value = self.same[value]
        return value

    def operands(self, node: Node) -> list[Value]:
        return [v for v in map(self.find, node.inputs) if v.const is None]

    def _expand(self, graph: Graph) -> None:
        """Take the branch of this platform, and leave out what is only another name for the same memory."""
        for node in graph.nodes:
            inner = self._inlined(node)
            if inner is not None:
                self.same.update(zip(inner.inputs, node.inputs[len(node.inputs) - len(inner.inputs) :], strict=True))
                self._expand(inner)
                self.same.update(zip(node.outputs, inner.outputs, strict=True))
            elif node.name in ("max", "min") and (kept := _other_than_infinity(node)) is not None:
                self.same[node.outputs[0]] = kept
            elif node.name in ALIAS or (node.name in COPIES and _size(node.inputs[0]) == _size(node.outputs[0])):
                self.same[node.outputs[0]] = node.inputs[0]
            elif (wide := self._not_narrowed(node)) is not None:
                self.same[node.outputs[0]] = wide
            elif node.name == "dot_general" and jax.default_backend() == "cpu":
                self.nodes += [*_turned(node), *_widened(node)]
            else:
                self.nodes.append(node)

    def _not_narrowed(self, node: Node) -> Value | None:
        """What a conversion undoes another of."""
        made = self.find(node.inputs[0]).producer if node.name == "convert_element_type" else None
        if made is None or made.name != "convert_element_type" or made.inputs[0].dtype != node.outputs[0].dtype:
            return None
        return made.inputs[0] if jax.dtypes.issubdtype(made.outputs[0].dtype, np.floating) else None

    def _inlined(self, node: Node) -> Graph | None:
        if node.name in REMAT:
            return flatten(body(node.params, "jaxpr"))
        index = self.find(node.inputs[0]).producer if node.name == "cond" else None
        if index is None or index.name != "platform_index":
            return None
        ours = jax.default_backend()
        chosen = (i for i, names in enumerate(index.params["platforms"]) if names is None or ours in names)
        return flatten(node.params["branches"][next(chosen)])

    def _merge(self) -> None:
        """Let equal computations of equal operands be one."""
        known: dict[Any, Node] = {}
        kept = []
        for node in self.nodes:
            key = (node.name, parameter_key(node), tuple(self._key(v) for v in node.inputs))
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
        return value if value.const is None or value.shape != () else constant_key(value.const)

    def _prune(self) -> None:
        """Drop what is no longer read."""
        alive, kept = set(self.outputs), []
        for node in reversed(self.nodes):
            if node.effects or not alive.isdisjoint(node.outputs):
                alive.update(self.operands(node))
                kept.append(node)
        self.nodes = kept[::-1]

    def _count(self) -> dict[Value, list[Node]]:
        """The readers of each value."""
        readers: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(self.operands(node)):
                readers.setdefault(value, []).append(node)
        return readers

    def _scatter(self) -> None:
        """A scatter into zeros that is only added to something is done in place of the sum."""
        readers, moved = self._count(), {}
        for node in self.nodes:
            if node.name not in ("add", "add_any") or _size(node.inputs[0]) != _size(node.inputs[1]):
                continue
            for value, other in (node.inputs, node.inputs[::-1]):
                value = self.find(value)
                made = value.producer
                zeros = made is not None and made.name == "scatter-add" and constant(made.inputs[0]) == 0
                if zeros and readers[value] == [node] and value not in self.outputs and made not in moved.values():
                    made.inputs = [other, *made.inputs[1:]]
                    moved[node] = made
                    self.same[node.outputs[0]] = value
                    break
        dropped = set(moved.values())
        self.nodes = [moved.get(n, n) for n in self.nodes if n not in dropped]

    def _softmax(self) -> None:
        """A matrix product goes through `exp(scale * x - max)` before it is stored, as far as only that reads it."""
        readers, kept = self._count(), set(self.nodes)
        for node in self.nodes:
            if node.name != "reduce_max":
                continue
            scores = self.find(node.inputs[0])
            shift = [n for n in readers.get(scores, []) if n is not node]
            if len(shift) != 1 or shift[0].name != "sub" or self._peeled(shift[0].inputs[1]) not in node.outputs:
                continue
            after = readers.get(shift[0].outputs[0], [])
            chain = shift + [n for n in after if len(after) == 1 and n.name == "exp"]
            if scores.producer is not None and scores.producer.name in ("mul", "div"):
                operands = self.operands(scores.producer)
                if len(operands) == 1 and len(readers[operands[0]]) == 1:
                    chain.append(scores.producer)
                    scores = operands[0]
            if scores.producer is None or scores.producer.name != "dot_general" or scores in self.outputs:
                continue
            chain = [n for n in chain if n.outputs[0] not in self.outputs]
            self.same.update((n.outputs[0], scores) for n in chain)
            kept -= set(chain)
        self.nodes = [n for n in self.nodes if n in kept]

    def _peeled(self, value: Value) -> Value:
        """What a value is broadcast from."""
        node = self.find(value).producer
        copied = node is not None and node.name == "broadcast_in_dim"
        return self._peeled(node.inputs[0]) if copied else self.find(value)


def _turned(node: Node) -> list[Node]:
    """The copies of a product's operands that put what is batched first, then rows, then columns."""
    contract, batch = node.params["dimension_numbers"]
    nodes = []
    for side in (0, 1) if batch[0] else ():
        value = node.inputs[side]
        free = [d for d in range(len(value.shape)) if d not in contract[side] and d not in batch[side]]
        order = [*batch[side], *(free if side == 0 else contract[side]), *(contract[side] if side == 0 else free)]
        order = [d for d in order if value.shape[d] > 1]
        if order != sorted(order):
            turn = Node(turn_p, {"order": order}, [value], [], node.source, node.caller, node.context)
            turn.outputs.append(Value(value.aval, turn))
            node.inputs = [*node.inputs[:side], turn.outputs[0], *node.inputs[side + 1 :]]
            nodes.append(turn)
    return nodes


def _widened(node: Node) -> list[Node]:
    """A matrix product of narrow floats as XLA runs it on CPU: in float32, converted before and after.

    Newer compilers have a library that takes them as they are, where the first operand's rows are contracted.
    """
    narrow = lambda v: jax.dtypes.issubdtype(v.dtype, np.floating) and v.dtype.itemsize < 4
    (contract, _), _ = node.params["dimension_numbers"]
    if jax.__version_info__ >= (0, 12) and tuple(contract) == (len(node.inputs[0].shape) - 1,):
        return [node]
    context = (node.source, node.caller, node.context)
    params = {"new_dtype": np.dtype("float32")}
    nodes, inputs = [], []
    for value in node.inputs:
        if narrow(value):
            convert = Node(lax.convert_element_type_p, params, [value], [], *context)
            value = Value(value.aval.update(dtype=np.dtype("float32")), convert)
            convert.outputs = [value]
            nodes.append(convert)
        inputs.append(value)
    node.inputs = inputs
    nodes.append(node)
    (result,) = node.outputs
    if narrow(result):
        node.outputs = [Value(result.aval.update(dtype=np.dtype("float32")), node)]
        result.producer = Node(
            lax.convert_element_type_p, {"new_dtype": result.dtype}, node.outputs, [result], *context
        )
        nodes.append(result.producer)
    return nodes


def _other_than_infinity(node: Node) -> Value | None:
    """The operand that a maximum with -inf, or a minimum with inf, returns."""
    bound = -np.inf if node.name == "max" else np.inf
    for value, other in (node.inputs, node.inputs[::-1]):
        if (
            jax.dtypes.issubdtype(value.dtype, np.floating)
            and _size(other) == _size(node.outputs[0])
            and constant(value) == bound
        ):
            return other
    return None


def _size(value: Value) -> int:
    return nbytes(value.aval)
