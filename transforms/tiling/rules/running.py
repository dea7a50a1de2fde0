"""Derivatives of products along an axis, and of cumulative products, as recurrences along it.

JAX differentiates these through a tree of halves of the axis, strided slices of which no tile holds its part. Here a
product's derivative is what stands before each factor times what stands behind it, both cumulative products, and a
cumulative operation's is a scan. Both run along the cut axis, and are exact where factors are 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from transforms.tiling.ir.graph import Node


def recurrent(node: Node) -> Callable[[Any], list[Any]] | None:
    """What an equation does, with such a derivative; None where it has another."""
    p = node.params
    if not node.outputs or not jnp.issubdtype(node.outputs[0].dtype, jnp.floating):
        return None
    if node.name == "reduce_prod":
        return lambda x: [functools.reduce(_product, sorted(p["axes"], reverse=True), x)]
    made = {"cumprod": _cumprod, "cumlogsumexp": _cumlogsumexp}.get(node.name)
    return None if made is None else lambda x: [made(x, p["axis"], p["reverse"])]


def _derived(fn: Callable[[Any], Any], tangent: Callable[[Any, Any], Any], x: Any) -> Any:
    """`fn(x)`, whose tangent is `tangent` of the array and its own.

    Of the array in float32, or what is wider: each of its numbers is multiplied as often as there are rows.
    """
    made = jax.custom_jvp(fn)

    @made.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (moved,) = primals, tangents
        along = tangent(x.astype(jnp.promote_types(x.dtype, jnp.float32)), moved)
        return fn(x), along.astype(x.dtype)

    return made(x)


def _product(x: Any, axis: int) -> Any:
    def tangent(x: Any, moved: Any) -> Any:
        before, behind = (_beside(lax.cumprod(x, axis, reverse=way), axis, way, 1) for way in (False, True))
        return (before * behind * moved).sum(axis)

    return _derived(lambda x: jnp.prod(x, axis), tangent, x)


def _cumprod(x: Any, axis: int, reverse: bool) -> Any:
    def tangent(x: Any, moved: Any) -> Any:
        return _run(x, _beside(lax.cumprod(x, axis, reverse), axis, reverse, 1) * moved, axis, reverse)

    return _derived(lambda x: lax.cumprod(x, axis, reverse), tangent, x)


def _cumlogsumexp(x: Any, axis: int, reverse: bool) -> Any:
    def tangent(x: Any, moved: Any) -> Any:
        made = lax.cumlogsumexp(x, axis, reverse)
        share = lambda part: jnp.where(made == -jnp.inf, 0, jnp.exp(part - made))
        return _run(share(_beside(made, axis, reverse, -jnp.inf)), share(x) * moved, axis, reverse)

    return _derived(lambda x: lax.cumlogsumexp(x, axis, reverse), tangent, x)


def _beside(array: Any, axis: int, reverse: bool, fill: float) -> Any:
    """Of each place what stands one before it, or one behind it in `reverse`."""
    low = -1 if reverse else 1
    config = [(low, -low, 0) if d == axis else (0, 0, 0) for d in range(array.ndim)]
    return lax.pad(array, jnp.asarray(fill, array.dtype), config)


def _run(factors: Any, terms: Any, axis: int, reverse: bool) -> Any:
    """`y[t] = factors[t] * y[t - 1] + terms[t]`."""

    def step(before: Any, given: Any) -> Any:
        factor, term = given
        after = factor * before + term
        return after, after

    both = [jnp.moveaxis(part, axis, 0) for part in (factors, terms)]
    _, made = lax.scan(step, jnp.zeros_like(both[1][0]), both, reverse=reverse)
    return jnp.moveaxis(made, 0, axis)
