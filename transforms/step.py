"""Train and eval steps for any loss and any optax transformation: donated, compiled ahead of time, asynchronous.

`eqx.filter_jit` blocks on every call; the executable that `compile_step` returns does not, reports its memory before
anything runs, and never retraces: another shape is an error, not a recompilation.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

Loss = Callable[..., tuple[Float[Array, ""], dict[str, Any]]]


def all_parameters(model: PyTree) -> PyTree:
    """Return which leaves of a model are trained, unless told otherwise: every inexact array."""
    return jax.tree.map(eqx.is_inexact_array, model)


class State(eqx.Module):
    """Everything that a step changes."""

    model: PyTree
    opt_state: PyTree
    step: Int[Array, ""]

    @classmethod
    def init(
        cls,
        model: PyTree,
        optimizer: optax.GradientTransformation,
        trainable: Callable[[PyTree], PyTree] = all_parameters,
    ) -> "State":
        """Return the state before the first step. Works on abstract models under `eqx.filter_eval_shape`."""
        return cls(model, optimizer.init(eqx.filter(model, trainable(model))), jnp.zeros((), jnp.int32))


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, trainable: Callable[[PyTree], PyTree] = all_parameters
) -> Callable[..., Any]:
    """Return the jitted step `(batch, state) -> (state, metrics)`; the state's memory is reused for the new state.

    Args:
        loss: `loss(model, batch) -> (scalar, dict of scalars)`.
        optimizer: any optax transformation; it is given the parameters and the loss value.
        trainable: which leaves of a model are trained, as a tree of bools; the others have no gradient and no state.

    Returns:
        A function whose metrics are the loss's own with `loss` and `grad_norm` added.
    """
    transformation = optax.with_extra_args_support(optimizer)

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, state):
        params, frozen = eqx.partition(state.model, trainable(state.model))
        objective = lambda params: loss(eqx.combine(params, frozen), batch)
        (value, aux), grads = eqx.filter_value_and_grad(objective, has_aux=True)(params)
        metrics = {**aux, "loss": value, "grad_norm": _norm(grads)}
        updates, opt_state = transformation.update(grads, state.opt_state, params, value=value)
        return State(eqx.apply_updates(state.model, updates), opt_state, state.step + 1), metrics

    return train_step


def make_eval_step(loss: Loss) -> Callable[..., Any]:
    """Return the jitted step `(batch, model) -> metrics`, without gradients."""

    @eqx.filter_jit
    def eval_step(batch, model):
        value, aux = loss(model, batch)
        return {**aux, "loss": value}

    return eval_step


def compile_step(step: Any, *args: PyTree, compiler_options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return `step` compiled for the shapes of `args`, which may be `jax.ShapeDtypeStruct`s: nothing is allocated.

    Args:
        step: what `make_train_step` or `make_eval_step` returned.
        args: arrays or abstract arrays, in any mixture with static leaves.
        compiler_options: XLA options for this program alone.

    Returns:
        An executable with the signature of `step`; `.compiled.memory_analysis()` says what it will use.
    """
    return step.lower(*jax.tree.map(_stand_in, args)).compile(compiler_options=compiler_options or None)


def _stand_in(leaf: Any) -> Any:
    """Replace an abstract array by a NumPy one without memory: `eqx.filter_jit` takes abstract ones for static."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


def _norm(grads: PyTree) -> Float[Array, ""]:
    """Global norm in float32, without a float32 copy of any gradient."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
