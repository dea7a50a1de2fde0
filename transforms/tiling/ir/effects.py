"""Side effects (`jax.debug.print`, callbacks) of a function whose programs are several, and run its parts repeatedly.

An effect belongs to the forward pass: it runs once for each tile, or once in all if no tile changes its operands. So
one program bears it, one loop of that, and everything else that computes the same values again does so in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr

from transforms.tiling.ir.dependence import followed, given_inside
from transforms.tiling.ir.errors import TileError
from transforms.tiling.ir.jaxprs import bodies, rebuilt, rewritten


def check_pure(eqn: Any) -> None:
    """Refuse mutable arrays: the loops run when their results are needed, not in the order of the program."""
    if any("RefEffect" in c.__name__ or "MutableArray" in c.__name__ for e in eqn.effects for c in type(e).__mro__):
        where = source_info_util.summarize(eqn.source_info)
        raise TileError(
            f"cannot tile `{eqn.primitive.name}` at {where}: it reads or writes a mutable array, and tiles have an "
            "order of their own. Return the new value instead, or leave it out of the tiled function."
        )


def loud(effects: Any) -> set[Any]:
    """The effects that somebody outside sees: not that of a collective, which is to need a name."""
    return {e for e in effects if type(e).__name__ != "NamedAxisEffect"}


def sources(name: str, where: str, params: dict[str, Any]) -> list[tuple[str, str]]:
    """The primitives with side effects in an equation that has some: themselves, not what holds them, and where."""
    found = []
    for eqn in (e for body in bodies(params) for e in body.eqns if loud(e.effects)):
        found += sources(eqn.primitive.name, source_info_util.summarize(eqn.source_info), eqn.params)
    return list(dict.fromkeys(found)) or [(name, where)]


def silenced(name: str, where: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation whose bodies have no side effects any more.

    Raises:
        TileError: a side effect has results, so that leaving it out changes what is computed.
    """
    made = {key: rewritten(value, _quiet) for key, value in params.items()}
    if any(made[key] is not params[key] for key in params):
        return made
    raise TileError(
        f"cannot tile `{name}` at {where}: its result is needed again where its side effect must not run again.\n"
        "  Call it outside the tiled function and pass the result in, or use jax.pure_callback, which has none."
    )


def silence(closed: ClosedJaxpr, given: int) -> ClosedJaxpr:
    """A program without side effects, but those that depend on its last inputs, `given` in number.

    These are the tangents or cotangents: the derivative of a function that was run with its side effects repeats only
    its values, and what a derivative rule of the user's does is its own.
    """
    count = len(closed.in_avals) - given
    return _part(closed, [i >= count for i in range(len(closed.in_avals))])


def silence_recomputed(value: Any) -> Any:
    """A program of values and gradients (or a parameter of an equation) where no `jax.checkpoint` repeats effects."""

    def inside(eqn: Any) -> list[Any]:
        if eqn.params.get("differentiated"):
            return _quiet(eqn)
        return [_with(eqn, {k: silence_recomputed(p) for k, p in eqn.params.items()})] if loud(eqn.effects) else [eqn]

    return rewritten(value, inside)


def _part(value: Any, given: Sequence[bool]) -> Any:
    """A program, or each of several, without the side effects that do not depend on the inputs `given`."""
    if isinstance(value, tuple):
        return tuple(_part(branch, given) for branch in value)
    if not loud(value.effects):
        return value
    eqns: list[Any] = []
    for eqn, own in zip(getattr(value, "jaxpr", value).eqns, followed(value, given)[0], strict=True):
        if not any(own) or not loud(eqn.effects):
            eqns += _quiet(eqn)
        else:
            inside = {key: _part(eqn.params[key], known) for key, known in given_inside(eqn, own).items()}
            eqns.append(_with(eqn, eqn.params | inside))
    return rebuilt(value, eqns)


def _quiet(eqn: Any) -> list[Any]:
    """An equation without its side effects: none, if it is nothing else."""
    if not loud(eqn.effects):
        return [eqn]
    if not eqn.outvars and not bodies(eqn.params):
        return []
    return [_with(eqn, silenced(eqn.primitive.name, source_info_util.summarize(eqn.source_info), eqn.params))]


def _with(eqn: Any, params: dict[str, Any]) -> Any:
    """An equation with other bodies, and so with their side effects."""
    if params == eqn.params:
        return eqn
    found = {e for body in bodies(params) for e in loud(body.effects)}
    return eqn.replace(params=params, effects=set(eqn.effects) - loud(eqn.effects) | found)
