"""From jaxprs to graphs: nested calls inlined, equations in one form (`frontend.canonical`); and back again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from transforms.layout import like
from transforms.tiling.frontend.canonical import barriers, canonical, reductions
from transforms.tiling.ir.effects import check_pure, loud, silenced
from transforms.tiling.ir.graph import Graph, Node, Value
from transforms.tiling.ir.jaxprs import body, closed
from transforms.tiling.ir.walks import read
from transforms.tiling.primitives import CALLS, CUSTOM_CALLS, IMPLEMENTED, LINEAR, REMAT, SOLVE


def flatten(program: ClosedJaxpr, *, custom: bool = True, remat: bool = False, together: bool = False) -> Graph:
    """Return `program` with nested calls inlined and dead code removed; constants become constant values.

    Args:
        program: a jaxpr.
        custom: inline `custom_jvp` and `custom_vjp` calls too (their rules are lost: for graphs that are only run).
        remat: inline the bodies of `jax.checkpoint` too (their effect on memory is lost).
        together: what devices hold parts of is summed at once.
    """
    calls = {*CALLS, *(CUSTOM_CALLS if custom else ()), *(REMAT if remat else ())}
    nodes: list[Node] = []

    def within(eqn: Any, ins: Sequence[Value]) -> tuple[ClosedJaxpr, Sequence[Value]] | None:
        """The program that is inlined in place of an equation, and what it is given."""
        name = eqn.primitive.name
        if name in calls:
            return body(eqn.params), ins
        if (platforms := eqn.params.get("branches_platforms")) and set(platforms) == {("mosaic",), None}:
            return eqn.params["branches"][platforms.index(None)], ins[1:]  # the other one is for bodies of kernels
        if custom and name in IMPLEMENTED:
            with eqn.ctx.manager:
                made = functools.partial(eqn.primitive.impl, **eqn.params)
                return jax.make_jaxpr(made)(*(like(v.aval) for v in ins)), ins
        return OPENED[name](plain(eqn.params), ins) if custom and name in OPENED else None

    def run(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value], outer: Any) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update(zip(jaxpr.constvars, [Value(jax.typeof(c), const=c) for c in consts], strict=True))

        def read(atom: Any) -> Value:
            return Value(atom.aval, const=as_array(atom.val, atom.aval)) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            check_pure(eqn)
            ins = [read(a) for a in eqn.invars]
            if (called := within(eqn, ins)) is not None:
                inner, ins = called
                outs = run(inner.jaxpr, inner.consts, ins, outer or eqn.source_info)
            else:
                effects = loud(eqn.effects)
                node = Node(eqn.primitive, plain(eqn.params), ins, [], eqn.source_info, outer, eqn.ctx, effects)
                outs = node.make([Value(v.aval) for v in eqn.outvars]).outputs
                node.change(together=together)
                nodes.extend(part for one in reductions(node) for part in barriers(one))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    inputs = [Value(v.aval) for v in program.jaxpr.invars]
    graph = Graph(inputs, nodes, run(program.jaxpr, program.consts, inputs, None))
    return canonical(graph.prune()).prune()


def plain(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with Python's numbers where JAX, under `vmap`, leaves NumPy's."""
    number = lambda x: x.item() if isinstance(x, (np.integer, np.bool_)) else x
    inner = lambda x: jax.tree.map(number, x, is_leaf=lambda x: not isinstance(x, (dict, tuple)))
    return {key: inner(param) for key, param in params.items()}


def as_array(const: Any, aval: Any) -> Any:
    """A literal as an array of its own dtype: JAX writes some as Python numbers."""
    return const if isinstance(const, jax.Array) else np.asarray(const, aval.dtype)


def body_graph(node: Node, key: str, number: int | None = None) -> Graph:
    """A body of an equation as a graph: the parameter `key`, or the entry `number` of it. Flattened once."""
    if (key, number) not in node.bodies:
        jaxpr = node.params[key] if number is None else node.params[key][number]
        node.bodies[key, number] = flatten(closed(jaxpr), together=node.together)
    return node.bodies[key, number]


def solver(params: dict[str, Any], operands: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]]:
    """The body of a `custom_linear_solve` that computes its result, and those of its operands which that takes."""
    counts = params["const_lengths"]
    first = counts.matvec + counts.vecmat
    taken = [*operands[first : first + counts.solve], *operands[sum(counts) :]]
    return closed(params["jaxprs"].solve), taken


def applied(params: dict[str, Any], operands: Sequence[Any]) -> tuple[ClosedJaxpr, Sequence[Any]]:
    """What a `tile` within makes of tangents, which is traced where somebody looks into it."""
    count, forward = params["count"], params["forward"]
    made = lambda *args: forward(args[:count], args[count:])
    return jax.make_jaxpr(made)(*(like(v.aval) for v in operands)), operands


# What is opened as the program that it stands for, if that returns one; rules add to it.
OPENED: dict[str, Callable[..., tuple[ClosedJaxpr, Sequence[Value]] | None]] = {SOLVE: solver, LINEAR: applied}


# ------------------------------------------------------------------------------- back again: a graph's values, computed


def evaluate(env: dict[Value, Any], wanted: Sequence[Value], effects: Collection[Node] = ()) -> list[Any]:
    """Compute `wanted` from the known values in `env`, which is filled along the way.

    Of the side effects run those of the nodes `effects`; what else has any is run without them.
    """

    def run(node: Node) -> list[Any]:
        silent = node.effects and node not in effects
        params = silenced(node.name, node.where, node.params) if silent else None
        return node.bind([read(env, v) for v in node.inputs], params)

    compute(env, [*wanted, *(v for node in effects for v in (node.outputs[:1] or node.inputs))], run)
    for node in (n for n in effects if not n.outputs):
        node.bind([read(env, v) for v in node.inputs])
    return [read(env, v) for v in wanted]


def compute(
    env: dict[Value, Any],
    wanted: Iterable[Value],
    run: Callable[[Node], Sequence[Any]],
    needs: Callable[[Node], Sequence[Value]] = lambda node: node.inputs,
) -> None:
    """Put `wanted` into `env`, and what they are computed from: by `run`, once what a node `needs` is there."""
    stack = [*wanted]
    while stack:
        value = stack[-1]
        node = value.producer
        if value in env or value.const is not None:
            stack.pop()
            continue
        assert node is not None, f"{value} is neither known nor computed"
        if missing := [v for v in needs(node) if v not in env and v.const is None]:
            stack.extend(missing)
            continue
        env.update(zip(node.outputs, run(node), strict=True))
