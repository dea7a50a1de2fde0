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
import warnings
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Int8, Int32, PyTree, UInt8

from transforms.bits import numbers
from transforms.sharding import AXES, Axes, axes_of, einsum, partitions, sharding_of, uncut
from zoo.config import rows
from zoo.formats import MXFP4, NF4, Format
from zoo.parameters import Row

_LEAST = 16  # inputs: in smaller groups scales take more than the bits that they save


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
    each output there is none where the compiler converts as it multiplies. On a mesh it is cut as the matrix is
    (`shardings`), and what is gathered to multiply is gathered in few bits.

    Attributes:
        values: integers or floats; of four bits two in a byte, the first in its lower half.
        scale: of each output's groups of inputs.
        format: what the integers stand for.
        letters: the matrix's dimensions without those that tell matrices apart, such as `DNH`.
        sizes: of these dimensions; of the first outputs and the first inputs, the arrays tell.
        inputs: those that products sum over.
        dtype: what the matrix counts as.
        zero: of each output's groups, the integer that stands for zero; None is 0.
        order: where each input stands among the stored ones, of which those of a group are neighbours; None is there.
    """

    values: Int8[Array, "*lead O I"] | Float8e4m3fn[Array, "*lead O I"] | UInt8[Array, "*lead O half"]
    scale: Float[Array, "*lead O G"]
    format: Format = eqx.field(static=True)
    letters: str = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)
    inputs: str = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)
    zero: Int8[Array, "*lead O G"] | None = None
    order: Int32[Array, "*lead I"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return (*self.values.shape[:-2], *map(self._of, self.letters))

    @property
    def ndim(self) -> int:
        """How many dimensions the matrix has."""
        return len(self.shape)

    @property
    def outputs(self) -> str:
        """The dimensions that products make."""
        return "".join(letter for letter in self.letters if letter not in self.inputs)

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.values.shape[-1] * 8 // self.format.bits // self.scale.shape[-1]

    def astype(self, dtype: DTypeLike) -> "Quantised":
        """Return the matrix as one that counts as another dtype; its integers and scales stay."""
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def dequantised(self) -> Float[Array, "..."]:
        """Return the matrix as an array: computed in float32, and rounded once."""
        numbers = self._numbers(jnp.float32)
        scale = jax.lax.stop_gradient(self.scale).astype(jnp.float32)
        *rest, cut = partitions(self.values)
        cuts = (*rest, None, cut) if scale.shape[-1] == 1 else (*rest, cut, None)
        grouped = _reshaped(numbers, (*scale.shape, self.group), cuts)
        grouped = (grouped if self.zero is None else grouped - self.zero[..., None]) * scale[..., None]
        return self._turned(self._ordered(_reshaped(grouped, numbers.shape, (*rest, cut)).astype(self.dtype)))

    def einsum(self, pattern: str, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `jnp.einsum(pattern, x, matrix)` in a dtype; None is that of `x`.

        The backward pass makes the matrix again, or the copies of all layers would wait for it.
        """
        multiply = lambda x, weight: weight._beside(pattern, x)._einsum(pattern, x, dtype)
        return jax.checkpoint(multiply, prevent_cse=False)(x, self)

    def uncut(self, *dims: int) -> "Quantised":
        """Return the matrix with some dimensions whole on every device: gathered, where the explicit mesh cuts them."""
        lead = self.values.ndim - 2
        named = {self.letters[dim - lead] for dim in dims if dim >= lead}
        flat = [dim for dim in dims if dim < lead]
        flat += [lead] * (self.outputs[0] in named) + [lead + 1] * (self.inputs[0] in named)
        inner = lambda part: [dim for dim in flat if dim < part.ndim]  # an order is of inputs alone, never cut there
        return jax.tree.map(lambda part: uncut(part, *inner(part)), self)

    @property
    def partitions(self) -> tuple[Any, ...]:
        """The axes that cut each dimension on the explicit mesh that is set."""
        *lead, of_outputs, of_inputs = partitions(self.values)
        of = {self.outputs[0]: of_outputs, self.inputs[0]: of_inputs}
        return (*lead, *map(of.get, self.letters))

    def _beside(self, pattern, x):
        """Return the matrix with the dimensions gathered whose devices have another dimension of `x` apart."""
        taken = set(axes_of(partitions(x)))
        left, right = pattern.split("->")[0].split(",")
        named = left.rpartition("...")[2]
        of_x = dict(zip(named, partitions(x)[x.ndim - len(named) :], strict=True))
        dims = range(len(right))
        return self.uncut(
            *(
                dim
                for dim in dims
                if (cut := self.partitions[dim]) != of_x.get(right[dim]) and taken & {*axes_of([cut])}
            )
        )

    def _einsum(self, pattern, x, dtype):
        output, right = pattern.split("->")[1], pattern.split("->")[0].split(",")[1]
        outputs = "".join(letter for letter in right if letter in output)
        if self.scale.shape[-1] > 1 or self.zero is not None or not output.endswith(outputs) or self.values.ndim > 2:
            return einsum(pattern, x, self.dequantised(), dtype)
        numbers = self._turned(self._numbers(x.dtype))
        total = einsum(pattern, x, numbers, jnp.promote_types(x.dtype, jnp.float32))
        scale = jax.lax.stop_gradient(self.scale).astype(total.dtype)
        cuts = partitions(numbers)[right.index(outputs[0])], *(None,) * (len(outputs) - 1)
        scale = _reshaped(scale, total.shape[-len(outputs) :], cuts)
        return (total * scale).astype(x.dtype if dtype is None else dtype)

    def _numbers(self, dtype):
        """Return what the integers stand for, before they are scaled `[*lead, O, I]`."""
        if self.format is Format.fp8:
            return numbers(jax.lax.stop_gradient(self.values), jnp.float8_e4m3fn).astype(dtype)
        if self.format.bits == 8:
            return jax.lax.stop_gradient(self.values).astype(dtype)
        halves = (self.values[..., None] >> jnp.array([0, 4], jnp.uint8)) & jnp.uint8(15)
        shape = *self.values.shape[:-1], 2 * self.values.shape[-1]
        codes = _reshaped(halves, shape, partitions(self.values))
        if self.format is Format.int4:
            return codes.astype(dtype) - 8
        return _looked_up(codes, NF4 if self.format is Format.nf4 else MXFP4).astype(dtype)

    def _ordered(self, flat):
        """Return an array `[*lead, O, I]` with its inputs where they belong."""
        if self.order is None:
            return flat
        put = lambda flat, order: jnp.take_along_axis(flat, order[..., None, :], -1)
        if any(parts := partitions(flat)):
            put = jax.sharding.auto_axes(put, out_sharding=PartitionSpec(*parts))
        return put(flat, self.order)

    def _turned(self, flat):
        """Return an array `[*lead, O, I]` as the model has it."""
        flatly, lead = self.outputs + self.inputs, flat.ndim - 2
        *cuts, of_outputs, of_inputs = partitions(flat)
        cuts += [{self.outputs[0]: of_outputs, self.inputs[0]: of_inputs}.get(letter) for letter in flatly]
        split = _reshaped(flat, (*flat.shape[:-2], *map(self._of, flatly)), cuts)
        return split.transpose(*range(lead), *(lead + flatly.index(letter) for letter in self.letters))

    def _of(self, letter):
        """Return the size of a dimension; of the first ones, that which the arrays have (a device may have a part)."""
        sizes = dict(zip(self.letters, self.sizes, strict=True))
        *_, outputs, inputs = self.values.shape
        for letters, size in ((self.outputs, outputs), (self.inputs, inputs * 8 // self.format.bits)):
            if letter == letters[0]:
                return size // math.prod(sizes[other] for other in letters[1:])
        return sizes[letter]


def _reshaped(x, shape, cuts):
    """Return `x` in another shape, which lies so on the explicit mesh that is set."""
    return (
        jax.lax.reshape(x, tuple(shape), out_sharding=PartitionSpec(*cuts)) if any(partitions(x)) else x.reshape(shape)
    )


def shardings(weight: "Quantised", letters: Sequence[str], mesh: Mesh, axes: Axes = AXES) -> "Quantised":
    """Return where the arrays of a matrix in fewer bits lie on a mesh: cut as the matrix would be.

    Its first outputs and its first inputs can be cut, inputs where groups are whole on every device; and what tells
    matrices apart.

    Args:
        weight: the matrix; its arrays may be shapes.
        letters: of its dimensions, those that tell matrices apart too.
        mesh: the devices.
        axes: which axes of the mesh cut each letter.
    """
    parts = sharding_of(mesh, letters, weight.shape, axes).spec
    sizes = weight.values.shape[-1], weight.scale.shape[-1]
    spec, of_groups = _cuts(parts, weight.letters, weight.inputs, sizes, mesh.shape)
    of_order = PartitionSpec(*spec[:-2], None)
    if weight.order is not None:  # each device's inputs come from all groups
        spec, of_groups = (PartitionSpec(*one[:-1], None) for one in (spec, of_groups))
    of = {"values": spec, "scale": of_groups, "zero": of_groups, "order": of_order}
    of = {name: one for name, one in of.items() if getattr(weight, name) is not None}
    return eqx.tree_at(
        lambda m: [getattr(m, name) for name in of], weight, [NamedSharding(mesh, one) for one in of.values()]
    )


def _cuts(parts, letters, inputs, sizes, axes):
    """Return how values and scales are cut, given the axes that cut each dimension of the matrix.

    Sizes are of the last dimensions of both, and of the mesh's axes.
    """
    lead = parts[: len(parts) - len(letters)]
    of, (last, groups) = dict(zip(letters, parts[len(lead) :], strict=True)), sizes
    of_outputs, of_inputs = of[next(letter for letter in letters if letter not in inputs)], of[inputs[0]]
    count = math.prod(axes[axis] for axis in axes_of([of_inputs]))
    of_inputs = None if (last if groups == 1 else groups) % count else of_inputs
    return PartitionSpec(*lead, of_outputs, of_inputs), PartitionSpec(
        *lead, of_outputs, None if groups == 1 else of_inputs
    )


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
    return bool(row.fan_in) and not (row.looked_up or row.leaf == "head" or row.leaf.endswith("router"))


def layout(row: Row, dims: dict[str, int], format: Format, dtype: DTypeLike) -> dict[str, Any]:
    """Return what a `Quantised` of a row has beside its arrays."""
    letters = "".join(row.letters[len(row.lead) :])
    sizes = tuple(dims[letter] for letter in letters)
    return {"format": format, "letters": letters, "sizes": sizes, "inputs": row.fan_in, "dtype": jnp.dtype(dtype)}


def quantise(model: PyTree, format: Format | str, *, group: int | None = None, to_be_saved: bool = False) -> PyTree:
    """Return the model with its matrices in fewer bits: all but embedding, head and routers.

    Args:
        model: any model of the zoo whose matrices are arrays.
        format: `int8`, `int4` or `nf4`.
        group: how many inputs share a scale; None is what is usual, all of them in int8, 128 in int4, 64 in nf4, or
            where that does not divide those of every matrix, the largest part of it that does, at least 16.
        to_be_saved: leave whole, and warn of, what no format of files has in fewer bits: matrices that lie on disk as
            inputs by outputs, and experts that one tensor holds.

    Raises:
        ValueError: the group does not divide the inputs of a matrix, or no matrix of the model could be saved so.
    """
    format, dims = Format(format), model.config.dims
    if not format.made:
        raise ValueError(f"cannot quantise to {format}: such matrices are kept where a folder has them, and not made.")
    found = [row for row in rows(model.config) if quantisable(row)]
    if to_be_saved:
        found = _saveable(found, model.config)
    inputs = {row.leaf: math.prod(dims[letter] for letter in row.fan_in) for row in found}
    if group is None and (usual := format.group) is not None:
        fits = math.gcd(usual, *inputs.values())  # one for all: a folder names one
        group = fits if fits >= _LEAST else usual
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


def _saveable(found: list[Row], config: Any) -> list[Row]:
    """Return the parameters that a folder can have in fewer bits, and warn of the others."""
    left, name = [row for row in found if not outputs_by_inputs(row)], type(config).__name__
    if len(left) == len(found):
        raise ValueError(f"cannot quantise a {name} to be saved: none of its matrices is outputs by inputs on disk.")
    if left:
        numbers = sum(math.prod(row.shape(config.dims)) for row in left)
        warnings.warn(
            f"{name}: {', '.join(row.leaf for row in left)} stay whole, {numbers:,} numbers: no format of files has in "
            "fewer bits what one tensor holds of all experts. `zoo.load(..., quantise=...)` makes them in memory.",
            stacklevel=3,
        )
    return [row for row in found if row not in left]


@eqx.filter_jit
def _quantised(leaf, row, dims, format, group):
    """Return one leaf in fewer bits, a layer of its stack at a time."""
    sizes = dict(dims)
    own = row.letters[len(row.lead) :]
    outputs = [letter for letter in own if letter not in row.fan_in]
    order = [own.index(letter) for letter in (*outputs, *row.fan_in)]
    flat = math.prod(sizes[letter] for letter in outputs), math.prod(sizes[letter] for letter in row.fan_in)

    def one(matrix):
        lead = matrix.ndim - len(order)
        turned = matrix.transpose(*range(lead), *(lead + dim for dim in order))
        return encode(turned.reshape(*matrix.shape[:lead], *flat), format, group, leaf.dtype)

    encoded = lambda leaf: jax.lax.map(one, leaf) if row.stack else one(leaf)
    if any(parts := partitions(leaf)):  # where several dimensions become one, no type follows
        how = layout(row, sizes, format, leaf.dtype)
        last = flat[1] * format.bits // 8, flat[1] // (group or flat[1])
        cuts = _cuts(parts, how["letters"], how["inputs"], last, jax.sharding.get_abstract_mesh().shape)
        encoded = jax.sharding.auto_axes(encoded, out_sharding=cuts)
    values, scale = encoded(leaf)
    return Quantised(values, scale, **layout(row, sizes, format, leaf.dtype))
