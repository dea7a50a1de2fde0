"""Which arrays among a call's arguments are cut, and along which dimension: `axis` read like `jax.vmap`'s `in_axes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from transforms.tiling.inputs import annotations as names
from transforms.tiling.ir.graph import describe, elements
from transforms.tiling.ir.placement import WHOLE, Placement, Tiled


def is_array(leaf: Any) -> bool:
    """Arrays of JAX and NumPy, tracers and their abstract stand-ins; everything else is static."""
    return eqx.is_array(leaf) or isinstance(leaf, (np.ndarray, np.generic, jax.ShapeDtypeStruct))


def place(
    fn: Callable[..., Any], axis: Any, args: Sequence[Any], kwargs: Mapping[str, Any], whole: int = 0
) -> tuple[list[Placement], int]:
    """Return the placement of each array leaf of `(args, kwargs)`, in order, and the length of the cut axis.

    The first `whole` arguments are not cut, and `axis` has no entries for them.

    Raises:
        ValueError: `axis` does not fit the arguments, is out of range, cuts nothing, or cuts different lengths.
        TypeError: `axis` holds something that is neither an int nor None.
    """
    read = names.find if isinstance(axis, str) else _leaves
    leaves = [(name, leaf, dim) for name, leaf, dim in read(fn, axis, args, kwargs, whole) if is_array(leaf)]
    cut = [(name, leaf, dim) for name, leaf, dim in leaves if dim is not None]
    if not cut:
        raise ValueError(f"tile: axis={axis!r} cuts none of the arguments. Name at least one dimension to cut.")
    lengths = {leaf.shape[dim] for _, leaf, dim in cut}
    if len(lengths) > 1:
        found = "\n".join(
            f"  {name}: dimension {dim} of {describe(leaf)} has {leaf.shape[dim]}" for name, leaf, dim in cut
        )
        remedy = "Give `axis` one entry for each argument, None for those that every tile sees whole."
        if isinstance(axis, str):
            remedy = "One name stands for one length: pass arrays that agree, or name their dimensions differently."
        raise ValueError(f"tile: the arguments that axis={axis!r} cuts differ in length.\n{found}\n  {remedy}")
    total = lengths.pop()
    if not isinstance(total, int):
        name, leaf, dim = cut[0]
        raise ValueError(
            f"tile: the axis to cut is dimension {dim} of `{name}`, {describe(leaf)}, whose length is left open "
            f"({total}), and tiles need to know it. Export one function for each length, or cut an axis that is known."
        )
    return [WHOLE if dim is None else Tiled(dim) for _, _, dim in leaves], total


def rows(args: Any, placements: Sequence[Placement]) -> int:
    """How many rows of a matrix one step along the cut axis is: 1 for tokens, their number for a batch of sequences.

    Features, the last dimension of arrays of floats, are not rows.
    """
    found = [1]
    arrays = [x for x in jax.tree.leaves(args) if is_array(x)]
    for leaf, placement in zip(arrays, placements, strict=True):
        if isinstance(placement, Tiled):
            others = [*leaf.shape[: placement.dim], *leaf.shape[placement.dim + 1 :]]
            features = jax.dtypes.issubdtype(leaf.dtype, np.inexact)
            found.append(elements(others[:-1] if features else others))
    return max(found)


def _leaves(
    fn: Callable[..., Any], axis: Any, args: Sequence[Any], kwargs: Mapping[str, Any], whole: int
) -> Iterator[names.Leaf]:
    """Every leaf with the dimension that `axis`, read like `in_axes`, gives it."""
    lenient = not isinstance(axis, (dict, tuple, list))  # arrays without that dimension stay whole
    for name, arg, prefix in _entries(fn, axis, args, kwargs, whole):
        leaves = jax.tree_util.tree_leaves_with_path(arg)
        for (path, leaf), dim in zip(leaves, _broadcast(name, prefix, arg), strict=True):
            label = f"{name}{jax.tree_util.keystr(path)}"
            yield label, leaf, _dim(label, leaf, dim, lenient) if is_array(leaf) else None


def _entries(
    fn: Callable[..., Any], axis: Any, args: Sequence[Any], kwargs: Mapping[str, Any], whole: int
) -> list[tuple[str, Any, Any]]:
    """Each argument's name, itself, and its part of `axis`."""
    given = list(zip(_names(fn, len(args)), args, strict=True))
    first, given = [(name, arg, None) for name, arg in given[:whole]], given[whole:]
    rest = [(name, kwargs[name], None) for name in sorted(kwargs)]
    if isinstance(axis, dict):
        pairs = [*given, *((k, kwargs[k]) for k in sorted(kwargs))]
        known = [name for name, _ in pairs]
        if unknown := [k for k in axis if k not in known]:
            raise ValueError(f"tile: axis names {unknown}, but the call has the arguments {known}.")
        return first + [(name, arg, axis.get(name)) for name, arg in pairs]
    if isinstance(axis, (tuple, list)):
        if len(axis) != len(given):
            raise ValueError(
                f"tile: axis={axis!r} has {len(axis)} entries, but the call has {len(given)} positional arguments. "
                "Give one entry for each, None for those that every tile sees whole."
            )
        return [*first, *((n, a, p) for (n, a), p in zip(given, axis, strict=True)), *rest]
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(
            "tile: axis must be an int, a tuple or a dict of ints and None for each argument, or the name of a "
            f"dimension in their annotations, not {axis!r}."
        )
    return [*first, *((n, a, None if isinstance(a, eqx.Module) else axis) for n, a in given), *rest]


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """The positional arguments' names, as far as the signature tells them."""
    known = names.positional(names.parameters_of(fn))
    return [known[i] if i < len(known) else f"args[{i}]" for i in range(count)]


def _broadcast(name: str, prefix: Any, arg: Any) -> list[Any]:
    """One entry of `axis` for each leaf of an argument."""
    try:
        return of_leaves(prefix, arg, (int, np.integer))
    except ValueError as error:
        raise ValueError(
            f"tile: the part of `axis` for argument `{name}` does not fit it: {prefix!r} is no prefix of "
            f"{jax.tree.structure(arg)}. It must be an int, None, or a pytree of those that the argument begins with."
        ) from error


def of_leaves(prefix: Any, arg: Any, kinds: Any) -> list[Any]:
    """What a prefix of a tree, made of some kinds and None, says of each leaf.

    Raises:
        ValueError: it is no prefix.
    """
    leaf = lambda x: x is None or isinstance(x, kinds)
    found = jax.tree.leaves(jax.tree.broadcast(prefix, arg, is_leaf=leaf), is_leaf=leaf)
    there = jax.tree.leaves(arg, is_leaf=lambda x: x is None)  # a None in the argument itself is no leaf
    return [one for one, x in zip(found, there, strict=True) if x is not None]


def _dim(name: str, leaf: Any, dim: Any, lenient: bool) -> int | None:
    """The dimension of one array to cut, counted from the front."""
    if dim is None:
        return None
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)):
        raise TypeError(f"tile: axis has {dim!r} for `{name}`; only an int or None can stand there.")
    within = -leaf.ndim <= dim < leaf.ndim
    if lenient and (not within or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
        return None
    if not within:
        raise ValueError(
            f"tile: axis {dim} is out of range for `{name}`, {describe(leaf)}, which has {leaf.ndim} dimensions. "
            "Use None for arrays that every tile sees whole."
        )
    return int(dim) % leaf.ndim
