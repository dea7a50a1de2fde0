"""A promise that `tile` cannot find out by itself: of rules written for kernels and loops."""

from collections.abc import Callable
from typing import Any

import jax


def linear_rules(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with the promise that its `jax.custom_vjp` rules are linear in cotangents, as gradients are.

    The gradient of a scalar loss is made in the loop that makes the loss, and multiplied by the loss's cotangent when
    that is known; of a rule that clips cotangents, say, two loops are needed. `tile` looks into rules, but not into the
    loops and kernels of theirs: without this promise a loss that has such takes its forward pass twice.
    """

    def linear_in_cotangents(*args: Any) -> Any:
        return fn(*args)

    return jax.jit(linear_in_cotangents)


def promised(eqn: Any) -> bool:
    """Whether an equation is a function of which that was promised."""
    return eqn.params.get("name") == "linear_in_cotangents"
