"""Train and eval steps for any loss and any optax transformation: donated, compiled ahead of time, asynchronous.

`eqx.filter_jit` blocks on every call; the executable that `compile_step` returns does not, reports its memory before
anything runs, and never retraces: another shape is an error, not a recompilation. On an explicit mesh what a step
returns lies where what it was given lay.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from transforms.offload import by_layers, fetch, in_host
from transforms.products import narrowed
from transforms.sharding import explicit, partitions

Loss = Callable[..., tuple[Float[Array, ""], dict[str, Any]]]


def all_parameters(model: PyTree) -> PyTree:
    """Return which leaves of a model are trained, unless told otherwise: every inexact array."""
    return jax.tree.map(eqx.is_inexact_array, model)


def numbers_as_arrays(tree: PyTree) -> PyTree:
    """Return a tree whose numbers are arrays, as `jax.jit` makes them: what is none is compiled in, and never moves."""
    number = lambda leaf: isinstance(leaf, bool | int | float | complex)
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(type(leaf))) if number(leaf) else leaf, tree)


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
        opt_state = numbers_as_arrays(optimizer.init(eqx.filter(model, trainable(model))))
        return cls(model, opt_state, jnp.zeros((), jnp.int32))


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    trainable: Callable[[PyTree], PyTree] = all_parameters,
    grad_dtype: DTypeLike | None = None,
    stacks: Callable[[PyTree], PyTree] | None = None,
) -> Callable[..., Any]:
    """Return the jitted step `(batch, state) -> (state, metrics)`; the state's memory is reused for the new state.

    Args:
        loss: `loss(model, batch) -> (scalar, dict of scalars)`.
        optimizer: any optax transformation; it is given the parameters and the loss value.
        trainable: which leaves of a model are trained, as a tree of bools; the others have no gradient and no state.
        grad_dtype: what the optimizer is given gradients in; None is the parameters' own. Wider ones than these take
            the memory of a wide copy of the parameters.
        stacks: which of the parameters are stacks of layers, as a tree of bools, where the optimizer is to move one
            layer after the other (`transforms.offload`): it is told `layer`, and `grad_norm` of all gradients.

    Returns:
        A function whose metrics are the loss's own with `loss` and `grad_norm` added.
    """
    transformation = optax.with_extra_args_support(optimizer)

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, state):
        params, frozen = eqx.partition(state.model, trainable(state.model))
        objective = lambda params: loss(eqx.combine(params, frozen), batch)
        wide = params if grad_dtype is None else jax.tree.map(lambda p: p.astype(_wider(p, grad_dtype)), params)
        (value, aux), grads = eqx.filter_value_and_grad(objective, has_aux=True)(wide)
        grads = grads if grad_dtype is None else jax.tree.map(lambda grad: grad.astype(grad_dtype), grads)
        metrics = {**aux, "loss": value, "grad_norm": norm(grads, None if stacks is None else stacks(params))}
        if stacks is None:
            updates, opt_state = _update(transformation, grads, state.opt_state, params, value=value)
            return State(eqx.apply_updates(state.model, updates), opt_state, state.step + 1), metrics

        def update(layer, grads, opt_state, params):
            extra = {"value": value, "layer": layer, "grad_norm": metrics["grad_norm"]}
            updates, opt_state = _update(transformation, grads, opt_state, params, **extra)
            return eqx.apply_updates(params, updates), opt_state

        params, opt_state = by_layers(update, transformation.init, grads, state.opt_state, params, stacks(params))
        return State(eqx.combine(params, frozen), opt_state, state.step + 1), metrics

    return train_step


def _update(transformation, grads, opt_state, params, **extra):
    """Return (updates, state). On an explicit mesh the compiler places what an optimizer computes in between."""
    update = lambda grads, opt_state, params, extra: transformation.update(grads, opt_state, params, **extra)
    if explicit():
        lies = lambda tree: jax.tree.map(lambda leaf: PartitionSpec(*partitions(leaf)), tree)
        update = jax.sharding.auto_axes(update, out_sharding=(lies(params), lies(opt_state)))
    return update(grads, opt_state, params, extra)


def _wider(leaf, dtype):
    return jnp.promote_types(leaf.dtype, dtype)


def make_eval_step(loss: Loss) -> Callable[..., Any]:
    """Return the jitted step `(batch, model) -> metrics`, without gradients."""

    @eqx.filter_jit
    def eval_step(batch, model):
        value, aux = loss(model, batch)
        return {**aux, "loss": value}

    return eval_step


class Executable:
    """A compiled step: called with arrays where it was compiled for abstract ones.

    Attributes:
        compiled: what JAX compiled; `memory_analysis()` says what it will use, of each device.
    """

    def __init__(self, compiled: jax.stages.Compiled, static: PyTree):
        self.compiled, self._static = compiled, static

    def __call__(self, *args: PyTree) -> Any:
        """Return what the step returns, without waiting for it."""
        return eqx.combine(self.compiled(*eqx.filter(args, eqx.is_array)), self._static)


def compile_step(step: Any, *args: PyTree, compiler_options: dict[str, Any] | None = None) -> Executable:
    """Return `step` compiled for the shapes of `args`, which may be `jax.ShapeDtypeStruct`s: nothing is allocated.

    Its products of what is or was bfloat16 are made of bfloat16 (`transforms.products`).

    Args:
        step: what `make_train_step` or `make_eval_step` returned.
        args: arrays or abstract arrays, in any mixture with static leaves. Where they lie on a mesh is compiled in.
        compiler_options: XLA options for this program alone.

    Returns:
        An executable with the signature of `step`.
    """
    arrays, static = eqx.partition(args, lambda leaf: eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))
    returned = []

    def run(*arrays):
        out, rest = eqx.partition(step.__wrapped__(*eqx.combine(arrays, static)), eqx.is_array)
        returned.append(rest)
        return out

    donated = tuple(range(not step.donate_first, len(args))) if step.donate_rest else ()
    program = narrowed(run, kernels=_one_cpu(arrays))
    lowered = jax.jit(program, donate_argnums=donated).lower(*arrays)
    return Executable(lowered.compile(compiler_options=compiler_options or None), returned[0])


def _one_cpu(arrays: PyTree) -> bool:
    """Whether a program of these arrays runs on one device, a CPU."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arrays)]
    devices = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    alone = not explicit() and jax.sharding.get_abstract_mesh().size < 2 and len(devices) < 2
    return alone and {d.platform for d in devices or jax.devices()[:1]} == {"cpu"}


def norm(grads: PyTree, stacked: PyTree | None = None) -> Float[Array, ""]:
    """Global norm in float32, without a float32 copy of any gradient; of the stacks in host memory, layer by layer."""
    leaves, square = jax.tree.leaves(grads), lambda leaf: jnp.sum(jnp.square(fetch(leaf).astype(jnp.float32)))
    stacks = [False] * len(leaves) if stacked is None else jax.tree.leaves(stacked)
    by_layer = lambda leaf: jax.lax.map(square, leaf).sum()
    both = zip(leaves, stacks, strict=True)
    squares = [(by_layer if stack and in_host(leaf) else square)(leaf) for leaf, stack in both]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
