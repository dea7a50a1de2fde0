"""Rows of a batch, each `seq_len` tokens long: windows of a text, conversations with padding, pairs of answers.

Or made elsewhere: by a Grain pipeline (https://github.com/google/grain, the extra `.[grain]`), or anyhow.

`B` rows `S` sequence. Every kind of row can be read by its index alone, in any order and on any machine.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
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
    documents: Sequence[np.ndarray] | None = None  # like `arrays`, the number of each id's: to pack without a boundary

    def counts(self) -> np.ndarray:
        """Windows per array."""
        return np.array([max(0, (len(array) - 1) // self.seq_len) for array in self.arrays])

    def __len__(self) -> int:
        return int(self.counts().sum())

    def read(self, indices: np.ndarray, shift: int = 0) -> np.ndarray:
        """Return windows `[B, S + 1]`, moved by `shift` tokens where the array is long enough."""
        return self._read(self.arrays, indices, shift)

    def _read(self, arrays: Sequence[np.ndarray], indices: np.ndarray, shift: int) -> np.ndarray:
        ends = np.cumsum(self.counts())
        rows = []
        for index in indices:
            which = int(np.searchsorted(ends, index, side="right"))
            array = arrays[which]
            start = int(index - (ends[which - 1] if which else 0)) * self.seq_len
            start = min(start + shift, len(array) - self.seq_len - 1)
            rows.append(array[start : start + self.seq_len + 1])
        return np.stack(rows).astype(np.int32)

    def batch(self, indices: np.ndarray, shift: int = 0) -> Batch:
        """Return windows as a batch."""
        windows = self.read(indices, shift)
        tokens, targets = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
        if self.packed and self.documents is not None:
            numbers = self._read(self.documents, indices, shift)
            counts, segments = numbers[:, 1:] == numbers[:, :-1], numbers[:, :-1] - numbers[:, :1]
        else:
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
        """Return how many predictions of each one count among its first `seq_len`."""
        starts = self.ends - self.lengths() - 1
        reach = np.minimum(self.ends, starts + seq_len + 1)
        total = np.concatenate([[0], np.cumsum(self.counted, dtype=np.int64)])
        return total[reach] - total[starts + 1]

    def kept(self, seq_len: int, together: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each has a prediction that counts among its first `seq_len`, and whether it has others too.

        With `together`, of so many at a time: whether each of them has, and whether one of these has others.
        """
        within, whole = (self.counts_within(length) for length in (seq_len, int(self.lengths().max(initial=0))))
        kept = np.logical_and.reduce((within > 0).reshape(-1, together), axis=1)
        return kept, kept & np.logical_or.reduce((within < whole).reshape(-1, together), axis=1)

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
        kept = np.flatnonzero(self.examples.kept(self.seq_len)[0])
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
        object.__setattr__(self, "kept", np.flatnonzero(self.examples.kept(self.seq_len, 2)[0]))

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


FIELDS = ("tokens", "mask", "segments")  # of a row that was made elsewhere


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Some elements of a random-access data set: each `{"tokens": [S + 1]}`, `mask` and `segments` where it has them.

    A batch is read by index, so it depends on seed and step alone; the order within an epoch is the run's.
    """

    dataset: Any
    start: int
    stop: int
    seq_len: int
    vocab_size: int
    packed: bool
    where: str

    @property
    def arrays(self) -> tuple[()]:
        """What the elements are made from is not known."""
        return ()

    def __len__(self) -> int:
        return self.stop - self.start

    def batch(self, indices: np.ndarray, shift: int = 0) -> Batch:
        """Return some elements as a batch; all of an element without a mask counts.

        Raises:
            DataError: an element is not what it should be.
        """
        rows = [self._row(self.start + int(index)) for index in indices]
        windows, mask, segments = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        return Batch(
            windows[:, :-1].astype(np.int32),
            windows[:, 1:].astype(np.int32),
            mask[:, 1:].astype(np.float32),
            segments[:, :-1].astype(np.int32) if self.packed else None,
        )

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens, the mask and the segments of an element, each `[S + 1]`."""
        element, row = self.dataset[number], f"row {number:,} of {self.where}"
        needed = ("tokens", "segments") if self.packed else ("tokens",)
        for name in needed:
            if not isinstance(element, Mapping) or name not in element:
                raise DataError(f"{row} has no {name!r}: give {{{', '.join(f'{one!r}: ids' for one in needed)}, ...}}")
        self._check_names(list(element), row)
        tokens = self._field(element["tokens"], "iu", f"'tokens' of {row}", "whole numbers")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self.vocab_size)][0]
            raise DataError(f"token id {bad} in {row} is outside the vocabulary: it must lie in [0, {self.vocab_size})")
        mask = segments = np.ones(len(tokens))
        if "mask" in element:
            mask = self._field(element["mask"], "biuf", f"'mask' of {row}", "numbers from 0 to 1")
            if not ((mask >= 0) & (mask <= 1)).all():
                bad = mask[~((mask >= 0) & (mask <= 1))][0]
                raise DataError(f"'mask' of {row} holds {bad}: it must lie between 0 and 1, how much a token counts")
        if self.packed:
            segments = self._field(element["segments"], "iu", f"'segments' of {row}", "whole numbers")
        return tokens, mask, segments

    def _check_names(self, names: list[Any], row: str) -> None:
        """Raise a DataError if an element has what is meant to be read, and would not be; others may be beside it."""
        for name in (name for name in names if name not in FIELDS):
            if close := difflib.get_close_matches(str(name), FIELDS, n=1):
                raise DataError(
                    f"{row} has {name!r}, and only {', '.join(map(repr, FIELDS))} are read. Did you mean {close[0]!r}?"
                )
        if "segments" in names and not self.packed:
            raise DataError(
                f"{row} has 'segments', which are read with data.packed=true alone: set it, or leave them out"
            )

    def _field(self, given: Any, kinds: str, what: str, wanted: str) -> np.ndarray:
        """Return one field of an element, of numbers of some of NumPy's kinds."""
        try:
            found = np.asarray(given)
        except (TypeError, ValueError) as error:
            raise DataError(f"{what} is no array: {error}") from None
        if found.shape != (self.seq_len + 1,):
            raise DataError(
                f"{what} has shape {found.shape}: seq_len={self.seq_len} needs ({self.seq_len + 1},), the last id "
                "being a target alone"
            )
        if found.dtype.name == "bfloat16" and "f" in kinds:  # which NumPy has no kind for
            return found.astype(np.float32)
        if found.dtype.kind not in kinds:
            raise DataError(f"{what} is of type {found.dtype}: it must hold {wanted}")
        return found


def parted(dataset: Any, data: configs.Data, seq_len: int, vocab_size: int, where: str) -> tuple[Pipeline, Pipeline]:
    """Return the elements of anything that has a length and is read by index: to train on and (the last) held out."""
    count = len(dataset)
    kept = count - max(1, round(count * data.val_fraction))
    if kept < 1:
        raise DataError(f"too few elements in {where}: {count}, to train on and to hold out")
    how = seq_len, vocab_size, data.packed, where
    train, held_out = Pipeline(dataset, 0, kept, *how), Pipeline(dataset, kept, count, *how)
    train.batch(np.array([0]))
    return train, held_out
