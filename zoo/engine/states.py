"""What layers hand on from token to token in place of keys and values, on the device: a state for each text that runs.

A state belongs to a text's slot, and its tokens change it one after the other: so it does not depend on chunks, nor on
who else is in a pass. At position 0 it is zeros, whoever had the slot before; so a text that was preempted, and is read
from its beginning, needs nothing else. Of other positions nothing is kept, so no text goes on from another's beginning.

How many drafts are right is known when a pass is over: what they change is not the text's state but that on the last
slot, and those that were right are read again (`zoo.engine.scheduler.Limits.again`).

Dimensions: `R` rows `W` slots of a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from transforms.sharding import uncut
from zoo.engine.sampling import Either
from zoo.models.layers import accumulator

States = dict[str, Array]  # by name, of all such layers: `[layers, slots + 1, ...]`


def empty(config: Any, slots: int, dtype: DTypeLike) -> States:
    """Return the states of a model's layers (`Config.recurrent_state`) for so many texts, in float32 or wider."""
    lead = len(config.recurrent_layers), slots + 1
    return {name: jnp.zeros(lead + shape, accumulator(dtype)) for name, shape in config.recurrent_state.items()}


def recurrence(
    states: States,
    layer: Int[Array, ""],
    step: Callable[[States, Any], tuple[States, Array]],
    parts: Any,
    *,
    positions: Int[Either, "R W"],
    slots: Int[Either, " R"],
    drafted: Bool[Either, "R W"],
) -> tuple[Array, States]:
    """Return what a recurrence finds at each token `[R W ...]`, zeros at padding; and the states behind all of them.

    A loop over the tokens that there are, in place. On a mesh every device goes through it.

    Args:
        states: of all layers.
        layer: which of them.
        step: of a layer's state of one text and one token's parts, the state behind it and what is found.
        parts: what the layer made of each token, arrays `[R W ...]`.
        positions: of each token in its text, -1 at padding. A text's rows are neighbours, in order.
        slots: of each row's text.
        drafted: which tokens are drafts; each stands behind one of its text that is none, or another draft.
    """
    rows, width = positions.shape
    flat = jax.tree.map(lambda part: uncut(part, *range(part.ndim)).reshape(-1, *part.shape[2:]), parts)
    place, draft, slot = jnp.ravel(positions), jnp.ravel(drafted), jnp.repeat(jnp.asarray(slots), width)
    (live,) = jnp.nonzero(place >= 0, size=rows * width)
    last = jax.tree.leaves(states)[0].shape[1] - 1

    def token(n, carry):
        states, found = carry
        at = live[n]
        before = jnp.where(draft[at] & draft[live[n - 1]], last, slot[at])
        state = jax.tree.map(lambda all: jnp.where(place[at] == 0, 0, all[layer, before]), states)
        state, new = step(state, jax.tree.map(lambda part: part[at], flat))
        behind = jnp.where(draft[at], last, slot[at])
        states = jax.tree.map(lambda all, own: all.at[layer, behind].set(own), states, state)
        return states, found.at[at].set(new)

    own = jax.tree.map(lambda all: all[0, 0], states), jax.tree.map(lambda part: part[0], flat)
    _, made = jax.eval_shape(step, *own)
    with jax.named_scope("states"):
        nothing = jnp.zeros((rows * width, *made.shape), made.dtype)
        states, found = jax.lax.fori_loop(0, (place >= 0).sum(), token, (states, nothing))
    return found.reshape(rows, width, *made.shape), states
