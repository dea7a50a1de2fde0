"""Adafactor (https://arxiv.org/abs/1804.04235) for models that barely fit: a layer at a time, in place, in bfloat16.

The whole tree's float32 updates never exist: each leaf that stacks layers is walked by one loop, which overwrites the
gradient's memory with the update. A parameter in bfloat16 has 8 significant bits, and most updates are smaller than half
of the last one; rounding up or down at random, in proportion, keeps their mean.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

SMALLEST_FACTORED = 128  # as optax.adafactor: shorter dims are not worth factoring
SMALLEST_SCALE = 1e-3  # a parameter's root mean square counts as at least this, so that zeros can move
BLOCK = 2**24  # elements of an unstacked leaf that are updated at a time
_EPS = 1e-30


class Factored(NamedTuple):
    """Running means of the squared gradient over the largest dim (`row`) and over the second largest (`col`)."""

    row: jax.Array
    col: jax.Array


class Full(NamedTuple):
    """The running mean of the squared gradient itself, where a leaf is too small to factor."""

    square: jax.Array


class AdafactorState(NamedTuple):
    """How many updates there were, and the second moments in the order of the tree's leaves."""

    count: jax.Array
    moments: tuple[Factored | Full, ...]


def adafactor_layerwise(
    learning_rate: float | Callable[[jax.Array], jax.Array],
    *,
    layers: Callable[[Any], Any] = lambda model: model.layers,
    decay: float = 0.8,
    clip_rms: float = 1.0,
    stochastic_rounding: bool = True,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return Adafactor without momentum whose temporary memory is that of one layer, not of the model.

    On float32 parameters it equals `optax.adafactor` applied to each layer's slice as a leaf of its own. On bfloat16
    parameters the update is `stochastic_round(p + step) - p`, so that adding it gives the rounded parameter.

    Args:
        learning_rate: relative to the root mean square of each parameter; a number or a schedule of the step.
        layers: picks the part of the tree whose leaves are stacked over a leading dim of layers.
        decay: the second moments decay by `1 - step**-decay`.
        clip_rms: updates (before the learning rate) are scaled down to this root mean square.
        stochastic_rounding: False rounds bfloat16 parameters to nearest.
        seed: of the rounding.
    """

    def init(params):
        stacked = _stacked(params, layers)
        moments = jax.tree.map(lambda p, is_stack: _init(p.shape, is_stack), params, stacked)
        is_moments = lambda x: isinstance(x, Factored | Full)
        return AdafactorState(jnp.zeros((), jnp.int32), tuple(jax.tree.leaves(moments, is_leaf=is_moments)))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("adafactor_layerwise needs the parameters: call update(grads, state, params).")
        count = state.count + 1
        beta = 1.0 - count.astype(jnp.float32) ** -decay
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        grads, treedef = jax.tree.flatten(updates)
        stacks = jax.tree.leaves(_stacked(params, layers))
        results, moments = [], []
        for i, (grad, param, moment, stack) in enumerate(
            zip(grads, jax.tree.leaves(params), state.moments, stacks, strict=True)
        ):
            salt = _mix(jnp.uint32(seed * 7919 + i) ^ _mix(count.astype(jnp.uint32)))
            leaf = _Leaf(beta, rate, clip_rms, salt, stochastic_rounding and param.dtype == jnp.bfloat16)
            result, moment = leaf.each_layer(param, grad, moment) if stack else leaf.whole(param, grad, moment)
            results.append(result)
            moments.append(moment)
        return jax.tree.unflatten(treedef, results), AdafactorState(count, tuple(moments))

    return optax.GradientTransformationExtraArgs(init, update)


def stochastic_round(x: jax.Array, salt: jax.Array, offset: jax.Array | int = 0) -> jax.Array:
    """Return float32 numbers in bfloat16, rounded up or down with probabilities that keep the mean.

    The random bits are a hash of each element's position (plus `offset`) and `salt`: no keys, no memory.
    """
    position, stride = jnp.uint32(offset), 1
    for dim in reversed(range(x.ndim)):
        position = position + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    noise = _mix(position * jnp.uint32(0x9E3779B1) ^ salt) & jnp.uint32(0xFFFF)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


class _Leaf(NamedTuple):
    """One leaf's update, whole or in parts."""

    beta: jax.Array
    rate: jax.Array | float
    clip_rms: float
    salt: jax.Array
    rounding: bool

    def whole(self, param, grad, moment):
        """Return (update, moment). A large leaf is written block by block; its statistics are reductions."""
        step, scale, moment = self._step(param, grad, moment)
        rows = param.shape[0] if param.ndim else 1
        blocks = next((n for n in range(max(1, param.size // BLOCK), rows + 1) if rows % n == 0), 1)
        if blocks == 1 or param.size < 2 * BLOCK:
            return self._write(param, step(grad, None) * scale), moment
        size = rows // blocks

        def body(i, grad):
            cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size)
            new = self._write(cut(param), step(cut(grad), (i * size, size)) * scale, i * size * (param.size // rows))
            return jax.lax.dynamic_update_slice_in_dim(grad, new, i * size, 0)

        return jax.lax.fori_loop(0, blocks, body, grad), moment

    def each_layer(self, param, grad, moment):
        """Return (update, moment) of a stack, each layer as a leaf of its own."""

        def body(i, carry):
            grad, moment = carry
            take = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
            put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), i, 0)
            layer = self._replace(salt=_mix(self.salt + i.astype(jnp.uint32)))
            step, scale, new = layer._step(take(param), take(grad), jax.tree.map(take, moment))
            update = layer._write(take(param), step(take(grad), None) * scale)
            return put(grad, update), jax.tree.map(put, moment, new)

        return jax.lax.fori_loop(0, param.shape[0], body, (grad, moment))

    def _step(self, param, grad, moment):
        """Return the function from (rows of the) gradient to its step, the factor of all steps, and the new moment."""
        square = jnp.square(grad.astype(jnp.float32)) + _EPS
        mix = lambda old, new: self.beta * old + (1 - self.beta) * new
        dims = _factored_dims(grad.shape)
        if dims is None:
            moment = Full(mix(moment.square, square))
            factors = [jax.lax.rsqrt(moment.square)]
        else:
            second, largest = dims
            moment = Factored(mix(moment.row, square.mean(largest)), mix(moment.col, square.mean(second)))
            mean = moment.row.mean(second - (second > largest), keepdims=True)
            row = jnp.expand_dims(jax.lax.rsqrt(moment.row / mean), largest)
            factors = [row, jnp.expand_dims(jax.lax.rsqrt(moment.col), second)]

        def step(grad, rows):
            result = grad.astype(jnp.float32)
            for factor in factors:
                cut = rows is not None and factor.shape[0] > 1
                result = result * (jax.lax.dynamic_slice_in_dim(factor, *rows) if cut else factor)
            return result

        size = jnp.sqrt(jnp.mean(jnp.square(step(grad, None))))
        scale = jnp.maximum(SMALLEST_SCALE, jnp.sqrt(jnp.mean(jnp.square(param.astype(jnp.float32)))))
        return step, -self.rate * scale / jnp.maximum(1.0, size / self.clip_rms), moment

    def _write(self, param, step, offset=0):
        """Return the update in the parameter's dtype."""
        if not self.rounding:
            return step.astype(param.dtype)
        wide = param.astype(jnp.float32)
        rounded = stochastic_round(wide + step, self.salt, offset)
        return (rounded.astype(jnp.float32) - wide).astype(param.dtype)


def _stacked(params, layers):
    """Return a tree of bools like `params`: True for the leaves of `layers(params)`."""
    mask = jax.tree.map(lambda _: False, params)
    return eqx.tree_at(layers, mask, replace_fn=lambda part: jax.tree.map(lambda _: True, part))


def _factored_dims(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the (second largest, largest) dims if both are worth factoring."""
    order = sorted(range(len(shape)), key=lambda dim: shape[dim])
    if len(shape) < 2 or shape[order[-2]] < SMALLEST_FACTORED:
        return None
    return order[-2], order[-1]


def _init(shape: tuple[int, ...], is_stack: bool) -> Factored | Full:
    lead, inner = (shape[:1], shape[1:]) if is_stack else ((), shape)
    dims = _factored_dims(inner)
    zeros = lambda dim: jnp.zeros((*lead, *inner[:dim], *inner[dim + 1 :]), jnp.float32)
    return Full(jnp.zeros(shape, jnp.float32)) if dims is None else Factored(zeros(dims[1]), zeros(dims[0]))


def _mix(x: jax.Array) -> jax.Array:
    """Scramble 32-bit words (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
