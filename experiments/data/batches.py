"""Batches: a pure function of (seed, step), so that a run can continue anywhere and on any number of machines.

`B` batch `S` sequence. A training batch takes `B` rows of a permutation of all rows, another permutation in each epoch:
every row comes once per epoch, and nothing needs to be remembered. Held-out batches are spread evenly. A machine may
read only its own rows of a batch.
"""

import dataclasses
import functools
import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from experiments import configs
from experiments.data import DataError, conversations, corpus
from experiments.data.rows import Batch, Rows, Windows, parted
from experiments.data.tokenizer import Bytes, Folder, open_tokenizer
from experiments.runtime import manifest, own

LOOKED_AT = 2**24  # tokens of an array, evenly spread


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows of text: training batches by step, held-out batches by index."""

    train: Rows
    held_out: Rows
    batch_size: int  # rows, or pairs of them
    seed: int
    bytes_per_token: float | None
    text: str | None = None  # what its ids stand for, in words; None where nobody knows

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """A hash of what is read, of long arrays of a part of it."""
        found = hashlib.sha256()
        for rows in (self.train, self.held_out):
            for array in rows.arrays:
                found.update(f"{array.dtype}{array.shape}".encode())
                found.update(array[:: len(array) // LOOKED_AT + 1].tobytes())
        return found.hexdigest()[:16]

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the training batch of a step, or some of its rows; the same for the same seed and step, always."""
        count = len(self.train)
        position = step * self.batch_size + np.arange(self.batch_size)[rows]
        parts = []
        for epoch in np.unique(position // count):
            indices = permute(position[position // count == epoch] % count, count, (self.seed, int(epoch)))
            shift = _round_keys((self.seed, int(epoch)))[-1] % self.train.seq_len  # later epochs cut elsewhere
            parts.append(self.train.batch(indices, shift if epoch else 0))
        return Batch.concatenate(parts)

    def held_out_batch(self, index: int, batches: int, rows: slice = slice(None)) -> Batch:
        """Return one of `batches` held-out batches, spread evenly over what is held out, or some of its rows."""
        count = len(self.held_out)
        wanted = np.arange(self.batch_size)[rows] + index * self.batch_size
        return self.held_out.batch(wanted * count // (batches * self.batch_size) % count)

    def held_out_batches(self, most: int) -> int:
        """Return how many batches an evaluation takes: at most `most`, and no row twice where that is possible."""
        return max(1, min(most, len(self.held_out) // self.batch_size))


@dataclasses.dataclass(frozen=True)
class Repeats:
    """The synthetic task: random ids, then the same ids again."""

    vocab: int
    batch_size: int
    seq_len: int
    seed: int
    bytes_per_token: float | None = None
    text: None = None
    fingerprint: None = None

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the training batch of a step, or some of its rows."""
        return self._make(0, step, rows)

    def held_out_batch(self, index: int, batches: int, rows: slice = slice(None)) -> Batch:
        """Return a batch that no training step sees, or some of its rows."""
        return self._make(1, index, rows)

    def held_out_batches(self, most: int) -> int:
        """There is no end to random batches."""
        return most

    def _make(self, stream: int, step: int, rows: slice) -> Batch:
        draw = np.random.Generator(np.random.Philox(key=[self.seed, step * 2 + stream]))
        half = draw.integers(0, self.vocab, (self.batch_size, self.seq_len // 2 + 1))[rows]
        windows = np.tile(half, 2)[:, : self.seq_len + 1].astype(np.int32)
        return Batch(windows[:, :-1].copy(), windows[:, 1:].copy(), np.ones((len(windows), self.seq_len), np.float32))


def open_source(config: configs.Resolved) -> Source | Repeats:
    """Return the run's data, checked: it exists, it is long enough, and every id is in the model's vocabulary.

    Raises:
        DataError: what is wrong with the data, before anything is compiled or allocated.
    """
    try:
        return _open(config.data, config)
    except own.OwnError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(
            f"cannot read the data or keep its tokens: {manifest.reason(error)}. data.path=... says where it is, "
            f"data.cache=FOLDER where its tokens go."
        ) from error


@functools.singledispatch
def _open(data: configs.Data, config: configs.Resolved) -> Source | Repeats:
    """Return a run's data, of its kind."""
    raise TypeError(f"no data is registered for {type(data).__name__}")


@_open.register
def _(data: configs.Documents, config: configs.Resolved) -> Source:
    encoder = _encoder(data, config)
    return _windows(corpus.text_ids(data, encoder, config.model.config.vocab_size), config)


@_open.register
def _(data: configs.Tokens, config: configs.Resolved) -> Source:
    return _windows(corpus.token_ids(data, config.model.config.vocab_size), config)


@_open.register
def _(data: configs.Synthetic, config: configs.Resolved) -> Repeats:
    corpus.check_vocab(data.vocab - 1, 0, config.model.config.vocab_size, "data=synthetic")
    return Repeats(data.vocab, config.batch_size, config.seq_len, config.seed)


@_open.register
def _(data: configs.Chat | configs.Preference, config: configs.Resolved) -> Source:
    encoder, vocab_size = _encoder(data, config), config.model.config.vocab_size
    train, held_out, text = conversations.open_rows(data, encoder, config.seq_len, vocab_size)
    return Source(train, held_out, config.batch_size // (1 + config.paired), config.seed, None, text)


@_open.register
def _(data: configs.Grain, config: configs.Resolved) -> Source:
    return _elements(own.pipeline(data.dataset), f"data.dataset={data.dataset}", config)


@_open.register
def _(data: configs.CustomData, config: configs.Resolved) -> Source:
    encoder, vocab_size = _encoder(data, config), config.model.config.vocab_size
    made = own.documents(data, tokenizer=encoder, vocab_size=vocab_size, seq_len=config.seq_len, seed=config.seed)
    if isinstance(made[0], Mapping):
        return _elements(made, f"data.fn={data.fn}", config)
    return _windows(corpus.own_ids(data, made, encoder, vocab_size), config)


def _encoder(data: configs.Data, config: configs.Resolved) -> Bytes | Folder:
    return open_tokenizer(data.tokenizer, config.model.weights)


def _elements(rows: Any, where: str, config: configs.Resolved) -> Source:
    """Return rows that were made elsewhere."""
    parts = parted(rows, config.data, config.seq_len, config.model.config.vocab_size, where)
    return Source(*parts, config.batch_size, config.seed, None)


def _windows(ids: corpus.Ids, config: configs.Resolved) -> Source:
    """Return windows of ids.

    Raises:
        DataError: there is none of that length, to train on or held out.
    """
    seq_len, packed = config.seq_len, config.data.packed
    train, held_out = (
        Windows(part, seq_len, ids.boundary, packed, documents)
        for part, documents in zip((ids.train, ids.held_out), ids.documents or (None, None), strict=True)
    )
    for name, part in (("training", train), ("held-out", held_out)):
        if not len(part):
            raise DataError(
                f"too little text for seq_len={seq_len}: the {name} part has {sum(map(len, part.arrays))} tokens. "
                f"Use a shorter seq_len or more text."
            )
    return Source(train, held_out, config.batch_size, config.seed, ids.bytes_per_token, ids.text)


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


T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `make(step)` for the steps to come, in their order, and hands the results out.

    Args:
        make: makes a batch from the number of its step.
        first: the first step.
        end: the step after the last.
        ahead: how many batches are made before they are wanted.
    """

    def __init__(self, make: Callable[[int], T], first: int, end: int, ahead: int = 2):
        self._make, self._next, self._end = make, first, end
        self._thread = ThreadPoolExecutor(1, "data")
        self._made: deque[Future[T]] = deque()
        for _ in range(ahead):
            self._start()

    def __next__(self) -> T:
        """Return the next step's batch; what went wrong in making it is raised here."""
        self._start()
        return self._made.popleft().result()

    def close(self) -> None:
        """Make no more."""
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> None:
        if self._next < self._end:
            self._made.append(self._thread.submit(self._make, self._next))
            self._next += 1
