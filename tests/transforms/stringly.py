"""Annotations as text, for `test_names`."""

# ruff: noqa: UP037

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from nowhere import Missing  # ty: ignore[import-not-found]


class Batch(NamedTuple):
    hidden: Float[Array, "tokens embed"]
    labels: Int[Array, "tokens"]
    other: Missing | None = None


def loss(h: Float[Array, "tokens embed"], w: Float[Array, "embed vocab"], y: Int[Array, "tokens"], z: Missing = None):
    return (h @ w).sum() + y.sum()
