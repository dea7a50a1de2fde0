"""A tensor that others on disk stand for. Free of JAX."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.huggingface.tensors import Tensor

MEND = "mend the settings, or copy the tensors again"  # where they contradict each other


@dataclass(frozen=True)
class Kept:
    """How a matrix `[out, in]` can stay in fewer bits, as `zoo.quantised` has it.

    Attributes:
        format: what they stand for: one of `zoo.formats.Format`.
        groups: how many scales an output has.
        scale: the type of scales.
        read: returns integers `[out, in]`, of four bits two in a byte with the first in its lower half, and scales
            `[out, groups]`, given the parts of the tensor; and zeros, less 8, where groups have them.
        zeros: whether they have.
        turned: they lie as `[E, out, in]` where the tensor is `[E, in, out]`, of all experts.
        apart: `read` returns the inputs of a group as neighbours, which they are not, and last where each then stands.
    """

    format: str
    groups: int
    scale: np.dtype
    read: Callable[..., tuple[np.ndarray, ...]]
    zeros: bool = False
    turned: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Decoded(Tensor):
    """A tensor whose values are made of others when they are read: in float32, whatever type it counts as.

    Attributes:
        parts: what it is made of.
        decode: returns its values, given theirs.
        kept: how it can stay in fewer bits; None where it cannot.
    """

    parts: tuple[Tensor, ...]
    decode: Callable[..., np.ndarray]
    kept: Kept | None = None

    def array(self) -> np.ndarray:
        """Return the whole tensor."""
        return self.decode(*(part.array() for part in self.parts)).astype(np.float32).reshape(self.shape)

    def pieces(self, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all rows at once."""
        yield 0, self.array()

    def part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return some of the tensor."""
        return self.array()[index]


def made(
    name: str,
    shape: tuple[int, ...],
    label: str,
    parts: tuple[Tensor, ...],
    decode: Callable[..., np.ndarray],
    kept: Kept | None = None,
) -> Decoded:
    """Return the tensor of a name, shape and type that parts stand for."""
    first = parts[0]
    return Decoded(first.file, name, shape, label, None, first.start, parts, decode, kept)


def nibbles(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers that each integer holds, lowest bits first, along a new last dimension."""
    unsigned = packed.view(f"u{packed.itemsize}")
    shifts = np.arange(0, 8 * packed.itemsize, bits, dtype=unsigned.dtype)
    return (unsigned[..., None] >> shifts) & unsigned.dtype.type(2**bits - 1)


def ends(tensors: Mapping[str, Any], suffix: str) -> list[str]:
    """Return the modules that have a tensor of an ending."""
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def count(shape: tuple[int, ...]) -> int:
    """Return how many values a shape has."""
    return math.prod(shape)


def group_of(
    name: str, inputs: int, groups: int, sizes: Iterable[int | None], index: Tensor | None = None
) -> np.ndarray:
    """Return the group of each input of a matrix, which share scales.

    Args:
        name: of the matrix.
        inputs: how many there are.
        groups: how many of these.
        sizes: what groups may be large, of which the first that makes so many counts, since the last may be smaller;
            where none is told they are equal.
        index: the group of each input, where a folder tells; -1 stands for neighbours.

    Raises:
        ValueError: none of the sizes makes so many.
    """
    named = [size for size in sizes if size and size > 0]
    size = next((size for size in named if -(-inputs // size) == groups), -(-inputs // groups))
    if groups > 1 and named and size not in named:
        raise ValueError(
            f"`{name}` has scales of {groups} groups of {inputs} inputs, and `quantization_config` says group_size="
            f"{' or '.join(map(str, named))}: {MEND}."
        )
    usual, told = _neighbours(inputs, size), None if index is None else index.array()
    return usual if told is None or (told < 0).any() or np.array_equal(told, usual) else told


@functools.cache  # one for all matrices of a size: of experts there are thousands
def _neighbours(inputs: int, size: int) -> np.ndarray:
    return np.arange(inputs, dtype=np.int32) // size


def equal(group: np.ndarray, groups: int) -> bool:
    """Return whether groups are equally many neighbours, in order."""
    return len(group) % groups == 0 and np.array_equal(group, np.arange(len(group)) // (len(group) // groups))


def together(kept: Kept | None, group: np.ndarray) -> Kept | None:
    """Return how a matrix stays given how it would if the inputs of each group were neighbours; None if it cannot.

    Where they stand apart they are sorted by their groups, which must be equally large.
    """
    if kept is None or equal(group, kept.groups):
        return kept
    if (np.bincount(group, minlength=kept.groups) * kept.groups != len(group)).any():
        return None
    order = np.argsort(group, kind="stable")

    def read(*parts):
        values, *rest = kept.read(*parts)
        if values.shape[-1] == len(order):
            return values[:, order], *rest, np.argsort(order).astype(np.int32)
        codes = nibbles(values, 4).reshape(len(values), -1)[:, order]
        return codes[:, ::2] | (codes[:, 1::2] << np.uint8(4)), *rest, np.argsort(order).astype(np.int32)

    return dataclasses.replace(kept, read=read, apart=True)
