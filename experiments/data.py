"""Batches: a pure function of (seed, step), so that a run can continue anywhere and on any number of machines.

`B` batch `S` sequence. A training batch takes `B` windows of a permutation of all windows, another permutation in each
epoch: every window comes once per epoch, and nothing needs to be remembered. Held-out batches are spread evenly.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments import configs, corpus
from experiments.corpus import DataError
from experiments.tokenizer import open_tokenizer


@dataclasses.dataclass(frozen=True)
class Batch:
    """Token ids, the ids that follow them, and 1 where the prediction counts; all `[B, S]`."""

    tokens: np.ndarray
    targets: np.ndarray
    mask: np.ndarray


@dataclasses.dataclass(frozen=True)
class Windows:
    """Every window of `seq_len` tokens (and the one after) that arrays of tokens hold."""

    arrays: Sequence[np.ndarray]
    seq_len: int

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


@dataclasses.dataclass(frozen=True)
class Source:
    """Text in windows: training batches by step, held-out batches by index."""

    train: Windows
    held_out: Windows
    batch_size: int
    seed: int
    boundary: int | None  # an id whose prediction does not count
    bytes_per_token: float | None

    def batch(self, step: int) -> Batch:
        """Return the training batch of a step; the same for the same seed and step, always."""
        count = len(self.train)
        position = step * self.batch_size + np.arange(self.batch_size)
        rows = []
        for epoch in np.unique(position // count):
            indices = permute(position[position // count == epoch] % count, count, (self.seed, int(epoch)))
            shift = _round_keys((self.seed, int(epoch)))[-1] % self.train.seq_len  # later epochs cut elsewhere
            rows.append(self.train.read(indices, shift if epoch else 0))
        return self._cut(np.concatenate(rows))

    def held_out_batch(self, index: int, batches: int) -> Batch:
        """Return one of `batches` held-out batches, spread evenly over what is held out."""
        count = len(self.held_out)
        wanted = np.arange(self.batch_size) + index * self.batch_size
        return self._cut(self.held_out.read(wanted * count // (batches * self.batch_size) % count))

    def held_out_batches(self, most: int) -> int:
        """Return how many batches an evaluation takes: at most `most`, and no window twice where that is possible."""
        return max(1, min(most, len(self.held_out) // self.batch_size))

    def _cut(self, windows: np.ndarray) -> Batch:
        targets = windows[:, 1:]
        counts = np.ones(targets.shape) if self.boundary is None else targets != self.boundary
        return Batch(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(targets), counts.astype(np.float32))


@dataclasses.dataclass(frozen=True)
class Repeats:
    """The synthetic task: random ids, then the same ids again."""

    vocab: int
    batch_size: int
    seq_len: int
    seed: int
    bytes_per_token: float | None = None

    def batch(self, step: int) -> Batch:
        """Return the training batch of a step."""
        return self._make(0, step)

    def held_out_batch(self, index: int, batches: int) -> Batch:
        """Return a batch that no training step sees."""
        return self._make(1, index)

    def held_out_batches(self, most: int) -> int:
        """There is no end to random batches."""
        return most

    def _make(self, stream: int, step: int) -> Batch:
        draw = np.random.Generator(np.random.Philox(key=[self.seed, step * 2 + stream]))
        half = draw.integers(0, self.vocab, (self.batch_size, self.seq_len // 2 + 1))
        windows = np.tile(half, 2)[:, : self.seq_len + 1].astype(np.int32)
        mask = np.ones((self.batch_size, self.seq_len), np.float32)
        return Batch(windows[:, :-1].copy(), windows[:, 1:].copy(), mask)


def open_source(config: configs.Resolved) -> Source | Repeats:
    """Return the run's data, checked: it exists, it is long enough, and every id is in the model's vocabulary.

    Raises:
        DataError: what is wrong with the data, before anything is compiled or allocated.
    """
    data, vocab_size = config.data, config.model.config.vocab_size
    if isinstance(data, configs.Synthetic):
        _check_vocab(data.vocab - 1, 0, vocab_size, "data=synthetic")
        return Repeats(data.vocab, config.batch_size, config.seq_len, config.seed)
    if isinstance(data, configs.Tokens):
        train, held_out = corpus.mapped_blocks(data)
        for array in (*train, *held_out):
            _check_vocab(int(array.max()), int(array.min()), vocab_size, data.path)
        boundary, bytes_per_token = None, data.bytes_per_token
    else:
        encoder = open_tokenizer(data.tokenizer, config.model.weights)
        *parts, bytes_per_token = corpus.token_files(data, encoder)
        # Ids that are used: a tokenizer may have more than its model, for pictures say. Of bytes, all are.
        used = max(int(part.max(initial=0)) for part in parts)
        _check_vocab(max(used, encoder.separator), 0, vocab_size, encoder.name)
        train, held_out = ([part] for part in parts)
        boundary = encoder.separator
    parts = {"training": Windows(train, config.seq_len), "held-out": Windows(held_out, config.seq_len)}
    for name, windows in parts.items():
        if not len(windows):
            size = sum(map(len, windows.arrays))
            raise DataError(
                f"too little text for seq_len={config.seq_len}: the {name} part has {size} tokens. "
                f"Use a shorter seq_len or more text."
            )
    return Source(parts["training"], parts["held-out"], config.batch_size, config.seed, boundary, bytes_per_token)


def _check_vocab(largest: int, smallest: int, vocab_size: int, where: str) -> None:
    if largest >= vocab_size or smallest < 0:
        bad = largest if largest >= vocab_size else smallest
        raise DataError(
            f"token id {bad} in {where} is outside the vocabulary: ids must lie in [0, {vocab_size}). "
            f"Choose a model whose model.vocab_size is larger, or other data."
        )


def permute(indices: np.ndarray, count: int, key: tuple[int, ...]) -> np.ndarray:
    """Return where a keyed permutation of `range(count)` sends each index, in constant memory.

    A Feistel network over the next even number of bits, walked until it lands inside.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    rounds = np.array(_round_keys(key), np.uint64)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> np.uint64(half), values[outside] & low
        for salt in rounds:
            left, right = right, left ^ (_mix(right ^ salt) & low)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= count
    return values.astype(np.int64)


def _round_keys(key: tuple[int, ...]) -> list[int]:
    return [int(word) for word in np.random.SeedSequence([k & 0xFFFFFFFF for k in key]).generate_state(6, np.uint64)]


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words (the finalizer of SplitMix64, https://prng.di.unimi.it/splitmix64.c)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
