"""Arrays that live in the memory of the host: fetched where they are read, and put back, a layer of a stack at a time.

Where an array lives is part of its type (`jax.memory.Space`), so a program says itself what it moves: a copy to the
device is one of what a layer reads, the gradient of such a copy goes back to the host, and no device holds a stack.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, PyTree, Shaped

Space = jax.memory.Space


def in_host(leaf: Any) -> bool:
    """Return whether an array, concrete, traced or abstract, lives in the memory of the host."""
    return jax.typeof(leaf).memory_space == Space.Host


def fetch(tree: PyTree) -> PyTree:
    """Return a tree on the device: a copy of every leaf that is in the memory of the host, the others as they are."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, Space.Device) if in_host(leaf) else leaf, tree)


def _stow(leaf: Shaped[Array, "..."], like: Any) -> Shaped[Array, "..."]:
    return jax.device_put(leaf, Space.Host) if in_host(like) else leaf


def fetching(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of a scan that fetches its layer itself, so that one that is rematerialised fetches it again."""
    return lambda carry, layer: body(carry, fetch(layer))


def by_layers(
    update: Callable[..., tuple[PyTree, PyTree]],
    init: Callable[[PyTree], PyTree],
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    stacked: PyTree,
) -> tuple[PyTree, PyTree]:
    """Return new parameters and the optimizer's new state, of one layer after the other, each where it lived before.

    The device holds one layer's gradients, parameters and state at a time, and all of what is no stack. Every optimizer
    is right that treats each layer of a stack alike and on its own, such as those that do each element.

    Args:
        update: `update(layer, grads, opt_state, params) -> (params, opt_state)` of the device's arrays, whose stacks
            have the one layer of that number.
        init: makes the state for parameters; tells which of its leaves are stacks.
        grads: gradients; None where nothing is learned, as in `params`.
        opt_state: the optimizer's state.
        params: parameters.
        stacked: which leaves of `params` are stacks of layers, as a tree of bools.
    """
    count = {p.shape[0] for p, stack in zip(jax.tree.leaves(params), jax.tree.leaves(stacked), strict=True) if stack}
    if len(count) != 1:
        raise ValueError(f"cannot update layer by layer: the stacks have {sorted(count)} layers. Give one stack.")
    (layers,) = count
    marks = stacked, _stacks_of_state(init, params, stacked)

    def turn(layer, state):
        cut = lambda leaf, stack: jax.lax.dynamic_slice_in_dim(leaf, layer, 1) if stack else leaf
        part = lambda tree, marks: fetch(jax.tree.map(cut, tree, marks))
        return update(layer, part(grads, stacked), part(state[1], marks[1]), part(state[0], stacked))

    def body(layer, state):
        def put(old, new, stack):
            return jax.lax.dynamic_update_slice_in_dim(old, _stow(new, old), layer, 0) if stack else old

        return jax.tree.map(put, state, turn(layer, state), marks)

    # What is no stack is the same after any layer's turn; of this one nothing else is computed.
    others = turn(0, (params, opt_state))
    moved = jax.lax.fori_loop(0, layers, body, (params, opt_state))
    return jax.tree.map(lambda old, new, stack: old if stack else _stow(new, old), moved, others, marks)


def _stacks_of_state(init, params, stacked):
    """Return which leaves of the state that `init` makes are stacks: those that one layer alone has fewer of."""
    shape = lambda leaf, stack: jax.ShapeDtypeStruct((1, *leaf.shape[1:]) if stack else leaf.shape, leaf.dtype)
    whole = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    one, all_ = (
        jax.eval_shape(init, tree) for tree in (jax.tree.map(shape, params, stacked), jax.tree.map(whole, params))
    )
    return jax.tree.map(lambda a, b: a.shape != b.shape, one, all_)
