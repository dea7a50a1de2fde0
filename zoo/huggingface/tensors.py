"""Tensors on disk, of which only headers have been read, and how their bytes are. Free of JAX."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

# What parameters may be; the rest stand for some (`zoo.huggingface.quantised`).
DTYPES = {"F32": np.dtype("f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("f2"), "F64": np.dtype("f8")}
_KINDS = DTYPES | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    **{f"{letter}{bits}": np.dtype(f"{letter.lower()}{bits // 8}") for letter in "IU" for bits in (8, 16, 32, 64)},
}
_CHUNK = 2**26  # elements of one tensor on the host at a time


class DamagedError(ValueError):
    """A file is not what it was when it was saved."""


class Scratch:
    """Memory that tensors are read into, one after another: the system takes longer to give it than a disk to fill."""

    def __init__(self):
        self._memory = np.empty(0, np.uint8)

    def take(self, count: int) -> np.ndarray:
        """Return so many bytes, which hold something; those taken before are overwritten."""
        if count > len(self._memory):
            self._memory = np.empty(count, np.uint8)
        return self._memory[:count]


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

    def pieces(self, whole: bool = False, scratch: "Scratch | None" = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield `(first row, rows)` in order; the rows of each are gone when the next are asked for.

        Args:
            whole: all rows at once.
            scratch: memory to read into; None is some of its own.

        Raises:
            DamagedError: the bytes are not those that the file's own digest was made of.
        """
        count, digest, scratch = self.shape[0], hashlib.sha256(), Scratch() if scratch is None else scratch
        step, kind = count if whole else max(1, _CHUNK // math.prod(self.shape[1:])), _KINDS[self.dtype]
        row = math.prod(self.shape[1:]) * kind.itemsize
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start)
            for start in range(0, count, step):
                rows = min(step, count - start)
                memory = scratch.take(rows * row)
                if file.readinto(memory.data) != rows * row:
                    raise DamagedError(f"{self.file.name}: `{self.name}` ends before its last row")
                if self.digest is not None:
                    digest.update(memory.data)
                yield start, memory.view(kind).reshape(rows, *self.shape[1:])
        if self.digest is not None and digest.hexdigest() != self.digest:
            raise DamagedError(f"{self.file.name}: `{self.name}` is not what was saved: its SHA-256 differs")

    def array(self) -> np.ndarray:
        """Return the whole tensor, of whatever type it is."""
        if not self.shape:
            return np.fromfile(self.file, _KINDS[self.dtype], 1, offset=self.start).reshape(())
        return next(piece.copy() for _, piece in self.pieces(whole=True))

    def part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return some of the tensor, and read no more than that; it cannot be checked."""
        with safe_open(self.file, "np") as opened:
            return opened.get_slice(self.name)[index]


def as_bytes(array: np.ndarray) -> memoryview:
    """Return an array's bytes in order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
