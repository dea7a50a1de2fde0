"""Which arrays among a call's arguments are cut, and along which dimension: `axis` read like `jax.vmap`'s `in_axes`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from transforms.graph import describe
from transforms.placement import WHOLE, Placement, Tiled


def is_array(leaf: Any) -> bool:
    """Arrays of JAX and NumPy, tracers and their abstract stand-ins; everything else is static."""
    return eqx.is_array(leaf) or isinstance(leaf, (np.ndarray, np.generic, jax.ShapeDtypeStruct))


def place(
    fn: Callable[..., Any], axis: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Placement], int]:
    """Return the placement of each array leaf of `(args, kwargs)`, in order, and the length of the cut axis.

    Raises:
        ValueError: `axis` does not fit the arguments, is out of range, cuts nothing, or cuts different lengths.
        TypeError: `axis` holds something that is neither an int nor None.
    """
    entries = _entries(fn, axis, args, kwargs)
    cut: list[tuple[str, Any, int]] = []
    placements: list[Placement] = []
    for name, arg, prefix, lenient in entries:
        leaves = jax.tree_util.tree_leaves_with_path(arg)
        dims = _spread(name, prefix, arg, len(leaves))
        for (path, leaf), dim in zip(leaves, dims, strict=True):
            if not is_array(leaf):
                continue
            found = _dim(f"{name}{jax.tree_util.keystr(path)}", leaf, dim, lenient)
            placements.append(WHOLE if found is None else Tiled(found))
            if found is not None:
                cut.append((f"{name}{jax.tree_util.keystr(path)}", leaf, found))
    if not cut:
        raise ValueError(f"tile: axis={axis!r} cuts none of the arguments. Name at least one dimension to cut.")
    lengths = {leaf.shape[dim] for _, leaf, dim in cut}
    if len(lengths) > 1:
        found = "\n".join(
            f"  {name}: dimension {dim} of {_type(leaf)} has {leaf.shape[dim]}" for name, leaf, dim in cut
        )
        raise ValueError(
            f"tile: the arguments that axis={axis!r} cuts differ in length.\n{found}\n"
            "  Give `axis` one entry for each argument, None for those that every tile sees whole."
        )
    return placements, lengths.pop()


Entry = tuple[str, Any, Any, bool]  # name, argument, its prefix, whether arrays without that dimension stay whole


def _entries(fn: Callable[..., Any], axis: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Entry]:
    """Pair each argument with its part of `axis`."""
    names = _names(fn, len(args))
    rest = [(name, kwargs[name], None, False) for name in sorted(kwargs)]
    if isinstance(axis, dict):
        known = [*names, *kwargs]
        if unknown := [k for k in axis if k not in known]:
            raise ValueError(f"tile: axis names {unknown}, but the call has the arguments {known}.")
        pairs = [*zip(names, args, strict=True), *((k, kwargs[k]) for k in sorted(kwargs))]
        return [(name, arg, axis.get(name), False) for name, arg in pairs]
    if isinstance(axis, (tuple, list)):
        if len(axis) != len(args):
            raise ValueError(
                f"tile: axis={axis!r} has {len(axis)} entries, but the call has {len(args)} positional arguments. "
                "Give one entry for each, None for those that every tile sees whole."
            )
        return [*((n, a, p, False) for n, a, p in zip(names, args, axis, strict=True)), *rest]
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(
            f"tile: axis must be an int, or a tuple or a dict of ints and None for each argument, not {axis!r}."
        )
    return [*((n, a, axis, True) for n, a in zip(names, args, strict=True)), *rest]


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """The positional arguments' names, as far as the signature tells them."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]


def _spread(name: str, prefix: Any, arg: Any, count: int) -> list[Any]:
    """One entry of `axis` for each leaf of an argument."""
    if prefix is None or isinstance(prefix, (int, np.integer)):
        module = [isinstance(arg, eqx.Module)] * count
        return [(prefix, inside) for inside in module]
    leaf = lambda x: x is None or isinstance(x, (int, np.integer))
    try:
        spread = jax.tree.broadcast(prefix, arg, is_leaf=leaf)
    except ValueError as error:
        raise ValueError(
            f"tile: the part of `axis` for argument `{name}` does not fit it: {prefix!r} is no prefix of "
            f"{jax.tree.structure(arg)}. It must be an int, None, or a pytree of those that the argument begins with."
        ) from error
    dims = jax.tree.leaves(spread, is_leaf=leaf)
    if len(dims) != count:  # a None in the argument itself is no leaf
        dims = [
            d for d, x in zip(dims, jax.tree.leaves(arg, is_leaf=lambda x: x is None), strict=True) if x is not None
        ]
    return [(d, False) for d in dims]


def _dim(name: str, leaf: Any, entry: tuple[Any, bool], lenient: bool) -> int | None:
    """The dimension of one array to cut, counted from the front."""
    dim, in_module = entry
    if dim is None:
        return None
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)):
        raise TypeError(f"tile: axis has {dim!r} for `{name}`; only an int or None can stand there.")
    if lenient:
        key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if in_module or key or leaf.ndim == 0:
            return None
    if not -leaf.ndim <= dim < leaf.ndim:
        if lenient:
            return None
        raise ValueError(
            f"tile: axis {dim} is out of range for `{name}`, {_type(leaf)}, which has {leaf.ndim} dimensions. "
            "Use None for arrays that every tile sees whole."
        )
    return int(dim) % leaf.ndim


def _type(leaf: Any) -> str:
    return describe(leaf)
