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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _product(x: Any, axis: int) -> Any:
    return jnp.prod(x, axis)


@_product.defjvp
def _product_jvp(axis: int, primals: Any, tangents: Any) -> Any:
    (x,), (moved,) = primals, tangents
    before, behind = (_beside(lax.cumprod(_wide(x), axis, reverse=way), axis, way, 1) for way in (False, True))
    return jnp.prod(x, axis), (before * behind * moved).sum(axis).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _cumprod(x: Any, axis: int, reverse: bool) -> Any:
    return lax.cumprod(x, axis, reverse)


@_cumprod.defjvp
def _cumprod_jvp(axis: int, reverse: bool, primals: Any, tangents: Any) -> Any:
    (x,), (moved,) = primals, tangents
    made = lax.cumprod(_wide(x), axis, reverse)
    along = _run(_wide(x), _beside(made, axis, reverse, 1) * moved, axis, reverse)
    return lax.cumprod(x, axis, reverse), along.astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _cumlogsumexp(x: Any, axis: int, reverse: bool) -> Any:
    return lax.cumlogsumexp(x, axis, reverse)


@_cumlogsumexp.defjvp
def _cumlogsumexp_jvp(axis: int, reverse: bool, primals: Any, tangents: Any) -> Any:
    (x,), (moved,) = primals, tangents
    made = lax.cumlogsumexp(_wide(x), axis, reverse)
    share = lambda part: jnp.where(made == -jnp.inf, 0, jnp.exp(part - made))
    along = _run(share(_beside(made, axis, reverse, -jnp.inf)), share(x) * moved, axis, reverse)
    return lax.cumlogsumexp(x, axis, reverse), along.astype(x.dtype)


def _wide(array: Any) -> Any:
    """An array in float32, or what is wider: each of its numbers is multiplied as often as there are rows."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _beside(array: Any, axis: int, reverse: bool, fill: float) -> Any:
    """Of each place what stands one before it, or one behind it in `reverse`."""
    low = -1 if reverse else 1
    return lax.pad(
        array, jnp.asarray(fill, array.dtype), [(low, -low, 0) if d == axis else (0, 0, 0) for d in range(array.ndim)]
    )


def _run(factors: Any, terms: Any, axis: int, reverse: bool) -> Any:
    """`y[t] = factors[t] * y[t - 1] + terms[t]`."""

    def step(before: Any, given: Any) -> Any:
        factor, term = given
        after = factor * before + term
        return after, after

    both = [jnp.moveaxis(part, axis, 0) for part in (factors, terms)]
    _, made = lax.scan(step, jnp.zeros_like(both[1][0]), both, reverse=reverse)
    return jnp.moveaxis(made, 0, axis)
