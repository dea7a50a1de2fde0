"""Adafactor (https://arxiv.org/abs/1804.04235) for models that barely fit: a layer at a time, in place, in bfloat16.

The whole tree's float32 updates never exist: each leaf that stacks layers is walked by one loop, which overwrites the
gradient's memory with the update. A parameter in bfloat16 has 8 significant bits, and most updates are smaller than
half of the last one; rounding up or down at random, in proportion, keeps their mean.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from transforms.bits import bits, numbers

SMALLEST_FACTORED = 128  # as optax.adafactor: shorter dims are not worth factoring
SMALLEST_SCALE = 1e-3  # a parameter's root mean square counts as at least this, so that zeros can move
BLOCK = 2**20  # elements of an unstacked leaf that are updated at a time
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
    layers: Callable[[Any], Any] = lambda model: [*model.stacks.values()],
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
        first = jnp.uint32(extra.get("layer", 0))  # of the layers that this call is given
        beta = 1.0 - count.astype(jnp.float32) ** -decay
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        grads, treedef = jax.tree.flatten(updates)
        stacks = jax.tree.leaves(_stacked(params, layers))
        results, moments = [], []
        for i, (grad, param, moment, stack) in enumerate(
            zip(grads, jax.tree.leaves(params), state.moments, stacks, strict=True)
        ):
            salt = _mix(jnp.uint32(seed * 7919 + i) ^ _mix(count.astype(jnp.uint32)))
            leaf = _Leaf(beta, rate, clip_rms, salt, first, bool(stochastic_rounding and param.dtype == jnp.bfloat16))
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
    """How one leaf is updated: in one piece, in blocks of rows, or layer by layer."""

    beta: jax.Array
    rate: Any
    clip_rms: float
    salt: jax.Array
    first: jax.Array
    rounding: bool

    def each_layer(self, param, grad, moment):
        """Return (update, moment) of a stack, each layer as a leaf of its own."""

        def body(i, carry):
            grad, moment = carry
            take = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
            put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, 0)
            layer = self._replace(salt=_mix(self.salt + self.first + i.astype(jnp.uint32)))
            update, new = layer.whole(take(param), take(grad), jax.tree.map(take, moment))
            return put(grad, update), jax.tree.map(put, moment, new)

        return jax.lax.fori_loop(0, param.shape[0], body, (grad, moment))

    def whole(self, param, grad, moment):
        """Return (update, moment) of one leaf. A large one is read and written block by block, three times."""
        dims = _factored_dims(grad.shape)
        rows = Rows.of(grad.shape, blocked=dims is not None)
        if dims is None:
            moment = Full(self._blend(moment.square, jnp.square(grad.astype(jnp.float32)) + _EPS))
            factors = [jax.lax.rsqrt(moment.square)]
        else:
            second, largest = dims
            means = rows.mean_squares(grad, (largest, second))
            moment = Factored(self._blend(moment.row, means[0]), self._blend(moment.col, means[1]))
            mean = moment.row.mean(second - (second > largest), keepdims=True)
            row = jnp.expand_dims(jax.lax.rsqrt(moment.row / mean), largest)
            factors = [row, jnp.expand_dims(jax.lax.rsqrt(moment.col), second)]

        def step(i):
            result = rows.take(grad, i).astype(jnp.float32)
            for factor in factors:
                result = result * rows.take(factor, i)
            return result

        sizes = rows.each(lambda i, total: total + jnp.sum(jnp.square(step(i))), jnp.float32(0))
        scales = rows.each(lambda i, total: total + jnp.sum(jnp.square(rows.take(param, i).astype(jnp.float32))), 0.0)
        count = float(grad.size)  # more than 2**31 are no integer of JAX's
        clip = jnp.maximum(1.0, jnp.sqrt(sizes / count) / self.clip_rms)
        factors.append(-self.rate * jnp.maximum(SMALLEST_SCALE, jnp.sqrt(scales / count)) / clip)

        def write(grad, i):
            result = grad.astype(jnp.float32)
            for factor in factors:
                result = result * rows.take(factor, i)
            return self._write(rows.take(param, i), result, rows.offset(i))

        # The gradient is read for the last time where the update overwrites it.
        return rows.overwrite(grad, write), moment

    def _blend(self, old, new):
        return self.beta * old + (1 - self.beta) * new

    def _write(self, param, step, offset):
        """Return the update in the parameter's dtype."""
        if not self.rounding:
            return step.astype(param.dtype)
        wide = param.astype(jnp.float32)
        rounded = stochastic_round(wide + step, self.salt, offset)
        return (rounded.astype(jnp.float32) - wide).astype(param.dtype)


class Rows(NamedTuple):
    """A leaf in equal blocks of rows, so that nothing in float32 is larger than a block."""

    shape: tuple[int, ...]
    blocks: int

    @classmethod
    def of(cls, shape: tuple[int, ...], blocked: bool) -> "Rows":
        """Return the fewest blocks of at most about `BLOCK` elements that divide the rows; one for small leaves.

        On a mesh, whose devices may share the rows, there is one block: each holds a part of it.
        """
        least = math.prod(shape) // BLOCK
        if not blocked or least < 2 or not jax.sharding.get_abstract_mesh().empty:
            return cls(shape, 1)
        return cls(shape, next((n for n in range(least, shape[0] + 1) if shape[0] % n == 0), 1))

    def each(self, body, carry):
        """Return what `body(block, carry)` makes of the carry, block after block."""
        return body(0, carry) if self.blocks == 1 else jax.lax.fori_loop(0, self.blocks, body, carry)

    def overwrite(self, x, body):
        """Return `x` with every block replaced by what `body(block, number)` makes of it, in the memory of `x`."""
        if self.blocks == 1:
            return body(x, 0)
        write = lambda i, out: self.put(out, bits(body(numbers(self.take(out, i), x.dtype), i)), i)
        return numbers(jax.lax.fori_loop(0, self.blocks, write, bits(x)), x.dtype)

    def take(self, x, i):
        """Return one block of `x`; what has no rows to cut is every block's."""
        if self.blocks == 1 or not jnp.ndim(x) or x.shape[0] == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, i * (x.shape[0] // self.blocks), x.shape[0] // self.blocks)

    def put(self, x, new, i):
        """Return `x` with one block replaced."""
        return new if self.blocks == 1 else jax.lax.dynamic_update_slice_in_dim(x, new, i * new.shape[0], 0)

    def offset(self, i):
        """Return how many elements come before a block."""
        return i * (math.prod(self.shape) // self.blocks)

    def mean_squares(self, grad, dims):
        """Return the means of the squared gradient over each of `dims`, all in one pass."""

        def body(i, carry):
            square = jnp.square(self.take(grad, i).astype(jnp.float32)) + _EPS
            new = []
            for dim, mean in zip(dims, carry, strict=True):
                part = square.sum(dim) / grad.shape[dim]
                new.append(mean + part if dim == 0 else self.put(mean, part, i))
            return tuple(new)

        zeros = tuple(jnp.zeros(grad.shape[:dim] + grad.shape[dim + 1 :], jnp.float32) for dim in dims)
        return self.each(body, zeros)


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
