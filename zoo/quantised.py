"""Matrices that are more than an array: what they have in common, and those kept in fewer bits.

`Quantised` holds integers or floats of 8 or 4 bits with scales, and stands where a model has a matrix. It is
frozen: gradients go through it to its input, and none to itself, so that what learns is a `LowRank` over it (QLoRA,
https://arxiv.org/abs/2305.14314). `quantise` makes them of a model's matrices; `zoo.load(..., quantise="as_stored")`
keeps those that a folder has.

Dimensions: `O` outputs `I` inputs of a matrix, each flat `G` groups of inputs that share a scale.
"""

import abc
import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Int8, PyTree, UInt8

from transforms.bits import numbers
from transforms.sharding import einsum
from zoo.config import rows
from zoo.formats import MXFP4, NF4, Format
from zoo.parameters import Row


class AbstractMatrix(eqx.Module):
    """What stands where a model has a matrix, with a `dtype` too, and multiplies by it in a way of its own."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""

    @abc.abstractmethod
    def astype(self, dtype: DTypeLike) -> "AbstractMatrix":
        """Return the matrix as one that counts as another dtype."""

    @abc.abstractmethod
    def einsum(self, pattern: str, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `jnp.einsum(pattern, x, matrix)` in a dtype; None is that of the operands."""


def product(
    pattern: str, x: Float[Array, "..."], weight: Float[Array, "..."] | AbstractMatrix, dtype: DTypeLike | None = None
) -> Float[Array, "..."]:
    """Return `jnp.einsum(pattern, x, weight)` in a dtype, whatever the weight is."""
    return weight.einsum(pattern, x, dtype) if isinstance(weight, AbstractMatrix) else einsum(pattern, x, weight, dtype)


def whole(weight: "Float[Array, '...'] | Quantised") -> Float[Array, "..."]:
    """Return the numbers of a matrix as an array, where it is one or is kept in fewer bits."""
    return weight.dequantised() if isinstance(weight, Quantised) else weight


class Quantised(AbstractMatrix):
    """A frozen matrix in fewer bits: integers, or what a table says of them, times the scale of their group.

    In memory there is one matrix more while it multiplies, in the dtype of its input; of eight bits with one scale for
    each output there is none where the compiler converts as it multiplies. On a mesh it lies whole on every device.

    Attributes:
        values: integers or floats; of four bits two in a byte, the first in its lower half.
        scale: of each output's groups of inputs.
        format: what the integers stand for.
        letters: the matrix's dimensions without those that tell matrices apart, such as `DNH`.
        sizes: of these dimensions.
        inputs: those that products sum over.
        dtype: what the matrix counts as.
        zero: of each output's groups, the integer that stands for zero; None is 0.
    """

    values: Int8[Array, "*lead O I"] | Float8e4m3fn[Array, "*lead O I"] | UInt8[Array, "*lead O half"]
    scale: Float[Array, "*lead O G"]
    format: Format = eqx.field(static=True)
    letters: str = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)
    inputs: str = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)
    zero: Int8[Array, "*lead O G"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return (*self.values.shape[:-2], *self.sizes)

    @property
    def ndim(self) -> int:
        """How many dimensions the matrix has."""
        return len(self.shape)

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self._size(self.inputs) // self.scale.shape[-1]

    def astype(self, dtype: DTypeLike) -> "Quantised":
        """Return the matrix as one that counts as another dtype; its integers and scales stay."""
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def dequantised(self) -> Float[Array, "..."]:
        """Return the matrix as an array: computed in float32, and rounded once."""
        numbers = self._numbers(jnp.float32)
        scale = jax.lax.stop_gradient(self.scale).astype(jnp.float32)
        grouped = numbers.reshape(*scale.shape, self.group)
        grouped = (grouped if self.zero is None else grouped - self.zero[..., None]) * scale[..., None]
        return self._turned(grouped.reshape(numbers.shape).astype(self.dtype))

    def einsum(self, pattern: str, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `jnp.einsum(pattern, x, matrix)` in a dtype; None is that of `x`.

        The backward pass makes the matrix again, or the copies of all layers would wait for it.
        """
        return jax.checkpoint(lambda x, weight: weight._einsum(pattern, x, dtype), prevent_cse=False)(x, self)

    def _einsum(self, pattern, x, dtype):
        output, right = pattern.split("->")[1], pattern.split("->")[0].split(",")[1]
        outputs = "".join(letter for letter in right if letter in output)
        if self.scale.shape[-1] > 1 or self.zero is not None or not output.endswith(outputs) or self.values.ndim > 2:
            return einsum(pattern, x, self.dequantised(), dtype)
        numbers = self._turned(self._numbers(x.dtype))
        total = einsum(pattern, x, numbers, jnp.promote_types(x.dtype, jnp.float32))
        scale = jax.lax.stop_gradient(self.scale).astype(total.dtype)
        return (total * scale.reshape(total.shape[-len(outputs) :])).astype(x.dtype if dtype is None else dtype)

    def _numbers(self, dtype):
        """Return what the integers stand for, before they are scaled `[*lead, O, I]`."""
        if self.format is Format.fp8:
            return numbers(jax.lax.stop_gradient(self.values), jnp.float8_e4m3fn).astype(dtype)
        if self.format.bits == 8:
            return jax.lax.stop_gradient(self.values).astype(dtype)
        halves = (self.values[..., None] >> jnp.array([0, 4], jnp.uint8)) & jnp.uint8(15)
        codes = halves.reshape(*self.values.shape[:-1], -1)
        if self.format is Format.int4:
            return codes.astype(dtype) - 8
        return _looked_up(codes, NF4 if self.format is Format.nf4 else MXFP4).astype(dtype)

    def _turned(self, flat):
        """Return an array `[*lead, O, I]` as the model has it."""
        outputs = "".join(letter for letter in self.letters if letter not in self.inputs)
        split = flat.reshape(*flat.shape[:-2], *(self._of(letter) for letter in outputs + self.inputs))
        lead = len(flat.shape) - 2
        order = [lead + (outputs + self.inputs).index(letter) for letter in self.letters]
        return split.transpose(*range(lead), *order)

    def _of(self, letter):
        return self.sizes[self.letters.index(letter)]

    def _size(self, letters):
        return math.prod(map(self._of, letters))


def _looked_up(codes, table):
    """Return the numbers of a table by selections, which fuse with what reads them: TPUs look up slowly."""
    found: list[Any] = [jnp.float32(value) for value in table]
    for bit in (1, 2, 4, 8):
        high = (codes & jnp.uint8(bit)) != 0
        found = [jnp.where(high, two, one) for one, two in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def encode(
    matrix: Float[Array, "*lead O I"], format: Format, group: int | None, dtype: DTypeLike
) -> tuple[Array, Float[Array, "*lead O G"]]:
    """Return the integers that are nearest to a matrix, and their scales in a dtype.

    Scales are rounded before the integers are chosen. The largest number of a group is its scale times 127, 7.5 (of
    four bits from -8 to 7) or 1.

    Args:
        matrix: outputs by inputs.
        format: what integers stand for.
        group: how many inputs share a scale, which it divides; None is all of them.
        dtype: of scales; those of nf4 are float32.
    """
    wide = matrix.astype(jnp.float32)
    grouped = wide.reshape(*wide.shape[:-1], -1, wide.shape[-1] if group is None else group)
    most = jnp.abs(grouped).max(-1)
    scale = most / {Format.int8: 127.0, Format.int4: 7.5, Format.nf4: 1.0}[format]
    scale = jnp.where(scale == 0, 1.0, scale).astype(jnp.float32 if format is Format.nf4 else dtype)
    ratio = (grouped / scale[..., None].astype(jnp.float32)).reshape(wide.shape)
    if format is Format.int8:
        return jnp.clip(jnp.round(ratio), -127, 127).astype(jnp.int8), scale
    if format is Format.int4:
        codes = (jnp.clip(jnp.round(ratio), -8, 7) + 8).astype(jnp.uint8)
    else:
        above = ((ratio > (low + high) / 2).astype(jnp.uint8) for low, high in itertools.pairwise(NF4))
        codes = functools.reduce(operator.add, above)
    return codes[..., ::2] | (codes[..., 1::2] << 4), scale


def outputs_by_inputs(row: Row) -> bool:
    """Return whether a parameter is a matrix that lies on disk as outputs by inputs, so that groups are of inputs."""
    return bool(row.fan_in) and len(row.disk) == 2 and row.disk[1] == row.fan_in and not row.alternate


def quantisable(row: Row) -> bool:
    """Return whether a parameter is one of those that `quantise` changes: not embeddings, heads and routers."""
    other = row.looked_up or row.leaf == "head" or row.leaf.endswith("router")
    return outputs_by_inputs(row) and not other


def layout(row: Row, dims: dict[str, int], format: Format, dtype: DTypeLike) -> dict[str, Any]:
    """Return what a `Quantised` of a row has beside its arrays."""
    letters = "".join(row.letters[len(row.lead) :])
    sizes = tuple(dims[letter] for letter in letters)
    return {"format": format, "letters": letters, "sizes": sizes, "inputs": row.fan_in, "dtype": jnp.dtype(dtype)}


def quantise(model: PyTree, format: Format | str, *, group: int | None = None) -> PyTree:
    """Return the model with its matrices in fewer bits: all but embedding, head and routers.

    Args:
        model: any model of the zoo whose matrices are arrays.
        format: `int8`, `int4` or `nf4`.
        group: how many inputs share a scale; None is what is usual: all of them in int8, 128 in int4, 64 in nf4.

    Raises:
        ValueError: the group does not divide the inputs of a matrix, or the model has no matrix for it.
    """
    format, dims = Format(format), model.config.dims
    if not format.made:
        raise ValueError(f"cannot quantise to {format}: such matrices are kept where a folder has them, and not made.")
    group = format.group if group is None else group
    found = [row for row in rows(model.config) if quantisable(row)]
    if not found:
        raise ValueError(f"cannot quantise a {type(model.config).__name__}: none of its matrices is outputs by inputs.")
    inputs = {row.leaf: math.prod(dims[letter] for letter in row.fan_in) for row in found}
    if wrong := [
        f"{leaf} has {size}" for leaf, size in inputs.items() if size % (group or 1) or size % (8 // format.bits)
    ]:
        raise ValueError(
            f"cannot quantise to {format} in groups of {group} inputs, which must divide those of every matrix: "
            f"{', '.join(wrong)}. Pass a group that does."
        )
    leaves = [operator.attrgetter(row.leaf)(model) for row in found]
    parts = [_quantised(leaf, row, tuple(dims.items()), format, group) for leaf, row in zip(leaves, found, strict=True)]
    return eqx.tree_at(lambda m: [operator.attrgetter(row.leaf)(m) for row in found], model, parts)


@eqx.filter_jit
def _quantised(leaf, row, dims, format, group):
    """Return one leaf in fewer bits, a layer of its stack at a time."""
    sizes = dict(dims)
    outputs = [letter for letter in row.inner if letter not in row.fan_in]
    order = [row.inner.index(letter) for letter in (*outputs, *row.fan_in)]
    flat = math.prod(sizes[letter] for letter in outputs), math.prod(sizes[letter] for letter in row.fan_in)

    def one(matrix):
        lead = matrix.ndim - len(order)
        turned = matrix.transpose(*range(lead), *(lead + dim for dim in order))
        return encode(turned.reshape(*matrix.shape[:lead], *flat), format, group, leaf.dtype)

    values, scale = jax.lax.map(one, leaf) if row.stack else one(leaf)
    return Quantised(values, scale, **layout(row, sizes, format, leaf.dtype))
