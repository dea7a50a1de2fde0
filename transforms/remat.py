"""Named `jax.checkpoint` policies: what the backward pass keeps of each layer's forward pass.

One table, used as `model.hidden(tokens, remat=remat("full"))`: the wrapper goes around the body of the scan over layers
(around the whole scan it would save nothing).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

_policies = jax.checkpoint_policies

POLICIES: dict[str, Any] = {
    "full": _policies.nothing_saveable,
    "dots": _policies.dots_saveable,
    "dots_no_batch": _policies.dots_with_no_batch_dims_saveable,
    "offload": _policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def remat(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return the wrapper for a layer's body, or None where everything is kept.

    Gradients are the same under every policy. From most memory and least arithmetic to the reverse: `none` keeps every
    intermediate, `dots` the results of matrix products, `dots_no_batch` those without batch dims (not attention's),
    `full` the layer's input alone, for a second forward pass. `offload` is `dots_no_batch` in host memory.

    Raises:
        ValueError: there is no policy of that name.
    """
    if name == "none":
        return None
    if name not in POLICIES:
        raise ValueError(f"cannot remat by {name!r}: it is not a policy. Choose one of none, {', '.join(POLICIES)}.")
    # Inside a scan nothing can merge the recomputation with the original, so the guard against it only costs code.
    return functools.partial(jax.checkpoint, policy=POLICIES[name], prevent_cse=False)
