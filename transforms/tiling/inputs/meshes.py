"""Which mesh a tiled function is called on; and, for meshes whose axes are Auto, how its arguments are spread.

Types of arrays on such a mesh say nothing of how they are spread: the compiler decides that, and what it makes of tiles
of a dimension that is spread is every tile on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, PartitionSpec, get_abstract_mesh

from transforms.layout import named
from transforms.tiling.inputs.axes import is_array, of_leaves
from transforms.tiling.ir.errors import TileError

ROUTES = (
    "  Make its axes Explicit: jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Explicit,) * number_of_axes);\n"
    "  or leave them Auto and pass in_sharding=, a jax.sharding.PartitionSpec for each argument;\n"
    "  or call it inside jax.shard_map over the axes that the cut dimension is spread over."
)


Run = Callable[[Sequence[Any], dict[str, Any]], Any]  # of a call's arguments


def call(run: Run, in_sharding: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a call of a tiled function on the current mesh.

    Raises:
        TileError: the mesh is partly Auto and partly Explicit; or it is Auto, and `in_sharding` is not given.
        ValueError: `in_sharding` is given where types say it or there is no mesh; or it does not fit the arguments.
    """
    mesh = get_abstract_mesh()
    if mesh.empty and (typed := _mesh_of(args, kwargs)) is not None:
        with jax.sharding.use_abstract_mesh(typed):  # as `jax.jit` does with arguments that bring their mesh
            return call(run, in_sharding, args, kwargs)
    kinds = {kind for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True) if size > 1} if mesh else set()
    if kinds >= {AxisType.Auto, AxisType.Explicit}:
        raise TileError(
            f"cannot tile on a mesh some of whose axes are Explicit and some Auto: {_axes(mesh)}.\n{ROUTES}"
        )
    if in_sharding is not None:
        if mesh.empty:
            raise ValueError("tile: in_sharding= needs a mesh. Call it under jax.set_mesh(mesh).")
        if AxisType.Explicit in kinds:
            raise ValueError(
                f"tile: in_sharding= is for meshes whose axes are Auto, and this one has {_axes(mesh)}: the arguments' "
                "types say how they are spread. Leave in_sharding out."
            )
        return _explicit(run, in_sharding, args, kwargs) if kinds else run(args, kwargs)
    if kinds == {AxisType.Auto}:
        raise TileError(
            f"cannot tile on a mesh whose axes are Auto ({_axes(mesh)}): nothing tells how the cut dimension is "
            f"spread, and if it is, every device would compute every tile.\n{ROUTES}"
        )
    if AxisType.Explicit in kinds:
        args, kwargs = jax.tree.map(_typed, (args, kwargs))
    return run(args, kwargs)


def _typed(x: Any) -> Any:
    """An array whose type names no mesh, for it was made before there was one: whole on every device, by type."""
    plain = eqx.is_array(x) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    return jax.sharding.reshard(x, PartitionSpec()) if plain and named(jax.typeof(x)) is None else x


def _mesh_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any | None:
    """The mesh that the arguments' types name."""
    avals = (jax.typeof(x) for x in jax.tree.leaves((args, kwargs)) if eqx.is_array(x))
    return next((sharding.mesh for aval in avals if (sharding := named(aval)) is not None), None)


def _axes(mesh: Any) -> str:
    return ", ".join(f"{name}: {kind.name}" for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True))


def _explicit(run: Run, in_sharding: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a call with its arguments spread by type."""
    given = tuple(args), dict(kwargs)
    specs = jax.tree.unflatten(jax.tree.structure(given), _specs(in_sharding, args, kwargs))
    chosen = jax.tree.map(lambda x, spec: spec if is_array(x) else None, given, specs)
    arrays, static = eqx.partition(given, is_array)
    found: list[Any] = []

    def typed(arrays: Any) -> Any:
        made, rest = eqx.partition(run(*eqx.combine(arrays, static)), is_array)
        found.append(rest)
        return made

    return eqx.combine(jax.sharding.explicit_axes(typed, in_sharding=(chosen,))(arrays), found[0])


def entries(in_sharding: Any, args: Sequence[Any]) -> Sequence[Any]:
    """`in_sharding` with an entry for each positional argument: a bare one stands for all."""
    several = isinstance(in_sharding, (tuple, list)) and not isinstance(in_sharding, PartitionSpec)
    return in_sharding if several else (in_sharding,) * len(args)


def _specs(in_sharding: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[PartitionSpec]:
    """One spec for each leaf: None, and keyword arguments, are whole on every device."""
    in_sharding = entries(in_sharding, args)
    if len(in_sharding) != len(args):
        raise ValueError(
            f"tile: in_sharding={in_sharding!r} has {len(in_sharding)} entries, but the call has {len(args)} "
            "positional arguments. Give one for each, None for those that are whole on every device."
        )
    specs: list[PartitionSpec] = []
    for entry, arg in zip(in_sharding, args, strict=True):
        try:
            specs += [PartitionSpec() if s is None else s for s in of_leaves(entry, arg, PartitionSpec)]
        except ValueError as error:
            raise ValueError(f"tile: in_sharding has {entry!r} for an argument {jax.tree.structure(arg)}.") from error
    return specs + [PartitionSpec() for _ in jax.tree.leaves(dict(kwargs))]
