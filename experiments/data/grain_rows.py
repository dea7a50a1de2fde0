"""Rows made elsewhere: by a Grain pipeline (https://github.com/google/grain, the extra `.[grain]`), or anyhow."""

import dataclasses
import importlib
from typing import Any

import numpy as np

from experiments import configs
from experiments.commandline import console
from experiments.data.corpus import DataError
from experiments.data.rows import Batch

ENDLESS = 2**48  # elements: what repeats itself claims more


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


def open_pipeline(data: configs.Grain, seq_len: int, vocab_size: int) -> tuple[Pipeline, Pipeline]:
    """Return the elements of a user's data set, to train on and (the last ones) held out.

    Raises:
        DataError: Grain is not there, or the function, or what it returns is no finite random-access data set.
    """
    try:
        import grain
    except ImportError:
        raise DataError(f"data=grain needs the extra: {console.install('grain')}") from None
    module, colon, name = data.dataset.partition(":")
    try:
        dataset = getattr(importlib.import_module(module), name)() if colon else None
    except (ImportError, AttributeError) as error:
        raise DataError(f"cannot call data.dataset={data.dataset}: {error}") from None
    if not isinstance(dataset, grain.MapDataset) or len(dataset) > ENDLESS:
        what = "one that repeats itself" if isinstance(dataset, grain.MapDataset) else type(dataset).__name__
        raise DataError(
            f"cannot use data.dataset={data.dataset}: it must be MODULE:FUNCTION, which returns a finite "
            f"grain.MapDataset, not {what}. The run itself repeats and shuffles."
        )
    return parted(dataset, data, seq_len, vocab_size, f"data.dataset={data.dataset}")


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
