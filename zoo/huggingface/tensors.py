"""Tensors on disk, of which only headers have been read, and how their bytes are. Free of JAX."""

import hashlib
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

# What parameters may be; the rest stand for some (`zoo.huggingface.quantised`).
DTYPES = {"F32": np.dtype("f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("f2"), "F64": np.dtype("f8")}
_NUMPY = DTYPES | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),  # powers of two, of which some folders' scales are
    **{f"{letter}{bits}": np.dtype(f"{letter.lower()}{bits // 8}") for letter in "IU" for bits in (8, 16, 32, 64)},
}
_CHUNK = 2**26  # elements of one tensor on the host at a time


class DamagedError(ValueError):
    """A file is not what it was when it was saved."""


def mapped(file: Path, start: int, size: int) -> mmap.mmap:
    """Return some bytes of a file as memory that is read when it is looked at, and nobody copies: with what is before
    them on their page.

    Raises:
        ValueError: the file is shorter.
    """
    how = {"flags": mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), "prot": mmap.PROT_READ}
    begin = start - start % mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), start + size - begin, offset=begin, **how)


@dataclass(frozen=True)
class Tensor:
    """A tensor on disk, of which only the header has been read.

    Attributes:
        file: where it is.
        name: what it is called there.
        shape: its dimensions.
        dtype: its type, as safetensors calls it.
        digest: SHA-256 of its bytes, where the file tells.
        start: where its bytes begin in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str | None
    start: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has in the file; of a type that nobody here reads, at least so many."""
        return math.prod(self.shape) * (_NUMPY[self.dtype].itemsize if self.dtype in _NUMPY else 1)

    def pieces(self, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Yield `(first row, rows)` in order; nothing may be written to them.

        Args:
            whole: all rows at once.

        Raises:
            DamagedError: the bytes are not those that the file's own digest was made of.
        """
        count, digest, dtype = self.shape[0], hashlib.sha256(), _NUMPY[self.dtype]
        row = math.prod(self.shape[1:])
        step = count if whole else max(1, _CHUNK // row)
        for start in range(0, count, step):
            rows = min(step, count - start)
            offset, size = self.start + start * row * dtype.itemsize, rows * row * dtype.itemsize
            try:
                memory = mapped(self.file, offset, size)
            except ValueError:
                raise DamagedError(f"{self.file.name}: `{self.name}` ends before its last row") from None
            piece = np.frombuffer(memory, dtype, rows * row, len(memory) - size).reshape(rows, *self.shape[1:])
            if self.digest is not None:
                digest.update(as_bytes(piece))
            yield start, piece
            memory.madvise(mmap.MADV_DONTNEED)  # or it would count as this process's until it is unmapped
        if self.digest is not None and digest.hexdigest() != self.digest:
            raise DamagedError(f"{self.file.name}: `{self.name}` is not what was saved: its SHA-256 differs")

    def array(self) -> np.ndarray:
        """Return the whole tensor, of whatever type it is."""
        if not self.shape:
            return np.fromfile(self.file, _NUMPY[self.dtype], 1, offset=self.start).reshape(())
        return next(piece.copy() for _, piece in self.pieces(whole=True))

    def part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return some of the tensor, and read no more than that; it cannot be checked."""
        with safe_open(self.file, "np") as opened:
            return opened.get_slice(self.name)[index]


class Slice(Tensor):
    """Some numbers of a tensor, one after the other on disk, as a tensor of its own."""

    @classmethod
    def of(cls, tensor: Tensor, first: int, shape: tuple[int, ...]) -> "Slice":
        """Return those from number `first` on, in a shape."""
        start = tensor.start + first * _NUMPY[tensor.dtype].itemsize
        return cls(tensor.file, tensor.name, shape, tensor.dtype, None, start)

    def part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return some of the tensor."""
        return self.array()[index]


@dataclass(frozen=True)
class Turned(Tensor):
    """Some columns of a matrix on disk, as rows.

    Attributes:
        whole: the matrix.
        columns: which of them.
    """

    whole: Tensor
    columns: slice

    @classmethod
    def of(cls, whole: Tensor, columns: slice) -> "Turned":
        """Return those columns of a matrix."""
        rows = len(range(*columns.indices(whole.shape[1])))
        return cls(whole.file, whole.name, (rows, whole.shape[0]), whole.dtype, None, whole.start, whole, columns)

    def pieces(self, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all rows at once."""
        for _, piece in self.whole.pieces(whole=True):
            yield 0, piece[:, self.columns].T

    def part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return some of the rows."""
        return self.array()[index]


def as_bytes(array: np.ndarray) -> memoryview:
    """Return an array's bytes in order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
