"""Rows of a batch, each `seq_len` tokens long: windows of a text, conversations with padding, pairs of answers.

Or made elsewhere: by a Grain pipeline (https://github.com/google/grain, the extra `.[grain]`), or anyhow.

`B` rows `S` sequence. Every kind of row can be read by its index alone, in any order and on any machine.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from experiments import configs
from experiments.data import DataError


@dataclasses.dataclass(frozen=True)
class Batch:
    """Token ids, the ids that follow them, and 1 where the prediction counts; all `[B, S]`.

    Where rows hold several documents that do not see each other, `segments` numbers them. A batch of preferences is
    `[B/2, 2, S]`: of each pair the chosen row, then the rejected one.
    """

    tokens: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    segments: np.ndarray | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What a step is given."""
        parts = self.tokens, self.targets, self.mask
        return parts if self.segments is None else (*parts, self.segments)

    @property
    def weight(self) -> float:
        """How much the batch counts in a mean over batches: its tokens that count, or its pairs."""
        return float(self.mask.sum()) if self.tokens.ndim == 2 else len(self.tokens)

    @classmethod
    def concatenate(cls, batches: Sequence["Batch"]) -> "Batch":
        """Return the rows of several batches as one."""
        return cls(*(np.concatenate(parts) for parts in zip(*(batch.arrays for batch in batches), strict=True)))


class Rows(Protocol):
    """What a batch is made of."""

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        ...

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """What all rows are read from, where that is known."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, shift: int = 0) -> Batch:
        """Return some rows; a later epoch's `shift` may cut them elsewhere."""
        ...


@dataclasses.dataclass(frozen=True)
class Windows:
    """Every window of `seq_len` tokens (and the one after) that arrays of tokens hold."""

    arrays: Sequence[np.ndarray]
    seq_len: int
    boundary: int | None = None  # the id that starts each document; its prediction does not count
    packed: bool = False  # whether the documents of a window are kept apart

    def counts(self) -> np.ndarray:
        """Windows per array."""
        return np.array([max(0, (len(array) - 1) // self.seq_len) for array in self.arrays])

    def __len__(self) -> int:
        return int(self.counts().sum())

    def read(self, indices: np.ndarray, shift: int = 0) -> np.ndarray:
        """Return windows `[B, S + 1]`, moved by `shift` tokens where the array is long enough."""
        ends = np.cumsum(self.counts())
        rows = []
        for index in indices:
            which = int(np.searchsorted(ends, index, side="right"))
            array = self.arrays[which]
            start = int(index - (ends[which - 1] if which else 0)) * self.seq_len
            start = min(start + shift, len(array) - self.seq_len - 1)
            rows.append(array[start : start + self.seq_len + 1])
        return np.stack(rows).astype(np.int32)

    def batch(self, indices: np.ndarray, shift: int = 0) -> Batch:
        """Return windows as a batch."""
        windows = self.read(indices, shift)
        tokens, targets = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
        counts = np.ones(targets.shape) if self.boundary is None else targets != self.boundary
        segments = np.cumsum(tokens == self.boundary, axis=1, dtype=np.int32) if self.packed else None
        return Batch(tokens, targets, counts.astype(np.float32), segments)


@dataclasses.dataclass(frozen=True)
class Examples:
    """Conversations, one after another: their ids, which of these count when predicted, and where each one ends."""

    ids: np.ndarray
    counted: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        return self.ids, self.counted, self.ends

    def lengths(self) -> np.ndarray:
        """Return how many tokens each one has that something follows."""
        return np.diff(self.ends, prepend=0) - 1

    def counts_within(self, seq_len: int) -> np.ndarray:
        """Return whether each one has a prediction that counts among its first `seq_len`."""
        starts = self.ends - self.lengths() - 1
        reach = np.minimum(self.ends, starts + seq_len + 1)
        total = np.concatenate([[0], np.cumsum(self.counted, dtype=np.int64)])
        return total[reach] > total[starts + 1]

    def write(self, index: int, row: tuple[np.ndarray, ...], at: int) -> int:
        """Write one, as far as it goes, into (tokens, targets, mask) from a place on; return where it ends."""
        tokens, targets, mask = row
        end = int(self.ends[index])
        start = end - int(self.lengths()[index]) - 1
        length = min(end - start - 1, len(tokens) - at)
        tokens[at : at + length] = self.ids[start : start + length]
        targets[at : at + length] = self.ids[start + 1 : start + length + 1]
        mask[at : at + length] = self.counted[start + 1 : start + length + 1]
        return at + length


@dataclasses.dataclass(frozen=True)
class Conversations:
    """Rows of whole conversations, padded; longer ones lose their end. `packed` puts several into a row."""

    examples: Examples
    seq_len: int
    packed: bool
    bins: list[list[int]] = dataclasses.field(init=False)

    def __post_init__(self):
        lengths = np.minimum(self.examples.lengths(), self.seq_len)
        kept = np.flatnonzero(self.examples.counts_within(self.seq_len))
        bins = best_fit(lengths[kept], self.seq_len) if self.packed else [[i] for i in range(len(kept))]
        object.__setattr__(self, "bins", [[int(kept[i]) for i in one] for one in bins])

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        return self.examples.arrays

    def __len__(self) -> int:
        return len(self.bins)

    def batch(self, indices: np.ndarray, shift: int = 0) -> Batch:
        """Return rows of conversations; only what the assistant says counts."""
        shape = len(indices), self.seq_len
        tokens, targets, segments = np.zeros((3, *shape), np.int32)
        mask = np.zeros(shape, np.float32)
        for row, index in enumerate(indices):
            at = 0
            for number, example in enumerate(self.bins[index], 1):
                begin, at = at, self.examples.write(example, (tokens[row], targets[row], mask[row]), at)
                segments[row, begin:at] = number
        return Batch(tokens, targets, mask, segments if self.packed else None)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of conversations of which one is preferred: examples `2i` (chosen) and `2i + 1` (rejected)."""

    examples: Examples
    seq_len: int
    kept: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self):
        both = self.examples.counts_within(self.seq_len).reshape(-1, 2).all(1)
        object.__setattr__(self, "kept", np.flatnonzero(both))

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        return self.examples.arrays

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, indices: np.ndarray, shift: int = 0) -> Batch:
        """Return pairs `[B, 2, S]`; only the answers count."""
        shape = len(indices), 2, self.seq_len
        tokens, targets = np.zeros((2, *shape), np.int32)
        mask = np.zeros(shape, np.float32)
        for row, index in enumerate(indices):
            for side in (0, 1):
                row_arrays = tokens[row, side], targets[row, side], mask[row, side]
                self.examples.write(2 * int(self.kept[index]) + side, row_arrays, 0)
        return Batch(tokens, targets, mask)


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return which items share a bin: the longest first, each into the fullest bin that has room for it."""
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: some bin has room for exactly r more
    for item in np.argsort(-lengths, kind="stable"):
        length = int(lengths[item])
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[room].pop()
            rooms ^= (not by_room[room]) << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(int(item))
        by_room.setdefault(room - length, []).append(chosen)
        rooms |= 1 << (room - length)
    return bins


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Elements of a random-access data set: each `{"tokens": [S + 1]}`, with `mask` and `segments` where it has them.

    A batch is read by index, so it depends on seed and step alone; the order within an epoch is the run's.
    """

    dataset: Any
    seq_len: int
    vocab_size: int
    packed: bool
    where: str

    @property
    def arrays(self) -> tuple[()]:
        """What the elements are made from is not known."""
        return ()

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: np.ndarray, shift: int = 0) -> Batch:
        """Return some elements as a batch.

        Raises:
            DataError: an element is not what it should be.
        """
        elements = [self.dataset[int(index)] for index in indices]
        windows = self._field(elements, "tokens").astype(np.int32)
        if windows.min() < 0 or windows.max() >= self.vocab_size:
            raise DataError(
                f"a token id in {self.where} is outside the vocabulary: it must lie in [0, {self.vocab_size})"
            )
        mask = self._field(elements, "mask") if "mask" in elements[0] else np.ones_like(windows)
        segments = self._field(elements, "segments").astype(np.int32)[:, :-1] if self.packed else None
        return Batch(windows[:, :-1].copy(), windows[:, 1:].copy(), mask[:, 1:].astype(np.float32), segments)

    def _field(self, elements: list[Any], name: str) -> np.ndarray:
        """Return one field of every element `[B, S + 1]`."""
        for element in elements:
            if not isinstance(element, dict) or name not in element:
                raise DataError(f"an element of {self.where} has no {name!r}: give {{'tokens': ids, ...}}")
            if np.shape(element[name]) != (self.seq_len + 1,):
                shape = np.shape(element[name])
                raise DataError(
                    f"{name!r} of an element of {self.where} has shape {shape}: seq_len={self.seq_len} needs "
                    f"({self.seq_len + 1},), the last id being a target alone"
                )
        return np.stack([np.asarray(element[name]) for element in elements])


def parted(dataset: Any, data: configs.Data, seq_len: int, vocab_size: int, where: str) -> tuple[Pipeline, Pipeline]:
    """Return the elements of anything that has a length and is read by index: to train on and (the last) held out."""
    count = len(dataset)
    kept = count - max(1, round(count * data.val_fraction))
    if kept < 1:
        raise DataError(f"too few elements in {where}: {count}, to train on and to hold out")
    how = seq_len, vocab_size, data.packed, where
    train, held_out = Pipeline(Part(dataset, 0, kept), *how), Pipeline(Part(dataset, kept, count), *how)
    train.batch(np.array([0]))
    return train, held_out


@dataclasses.dataclass(frozen=True)
class Part:
    """Some elements of a data set."""

    dataset: Any
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.start + index]
