"""A Grain pipeline as data: read by index, in any slice, and errors in one line."""

import sys
import types

import numpy as np
import pytest

from experiments import configs
from experiments.commandline import schema
from experiments.data import batches
from experiments.data.rows import Batch

grain = pytest.importorskip("grain")


def element(i, length=17):
    return {"tokens": (np.arange(length) + i) % 100, "mask": np.arange(length) > 5, "segments": np.arange(length) // 9}


@pytest.fixture
def make(monkeypatch):
    """Open a source over what a function returns."""

    def open_source(dataset, *overrides):
        module = types.ModuleType("users")
        module.rows = lambda: dataset
        monkeypatch.setitem(sys.modules, "users", module)
        config, _ = schema.compose(["data=grain", "data.dataset=users:rows", *overrides])
        fields = {f: getattr(config, f) for f in config.__dataclass_fields__}
        sizes = {"steps": 1, "log_every": 1, "batch_size": 4, "seq_len": 16}
        return batches.open_source(configs.Resolved(**{**fields, **sizes}))

    return open_source


def test_elements_are_rows(make):
    source = make(grain.MapDataset.source(range(50)).map(element), "data.packed=true", "data.val_fraction=0.1")
    assert (len(source.train), len(source.held_out)) == (45, 5)
    batch = source.batch(7)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    np.testing.assert_array_equal(batch.mask, np.tile(np.arange(1, 17) > 5, (4, 1)))
    np.testing.assert_array_equal(batch.segments, np.tile(np.arange(16) // 9, (4, 1)))
    halves = Batch.concatenate([source.batch(7, slice(0, 2)), source.batch(7, slice(2, 4))])
    np.testing.assert_array_equal(halves.tokens, batch.tokens)
    firsts = {int(row[0]) for step in range(11) for row in source.batch(step).tokens}
    assert len(firsts) == 44  # no element twice in an epoch
    assert {int(row[0]) for row in source.held_out_batch(0, 1).tokens} <= set(range(45, 50))


BAD = {
    "length": (
        lambda: grain.MapDataset.source(range(9)).map(lambda i: element(i, 9)),
        r"shape \(9,\): seq_len=16 needs \(17,\)",
    ),
    "ids": (lambda: grain.MapDataset.source(range(9)).map(lambda i: {"tokens": np.full(17, 999)}), "outside the voca"),
    "no tokens": (lambda: grain.MapDataset.source(range(9)), "has no 'tokens'"),
    "endless": (lambda: grain.MapDataset.source(range(9)).map(element).repeat(), "not one that repeats itself"),
    "no data set": (lambda: [element(0)], "a finite grain.MapDataset, not list"),
    "one": (lambda: grain.MapDataset.source(range(1)).map(element), "too few elements"),
}


@pytest.mark.parametrize(("dataset", "message"), BAD.values(), ids=BAD)
def test_what_is_no_pipeline_is_refused(make, dataset, message):
    with pytest.raises(batches.DataError, match=message):
        make(dataset(), *(["data.packed=true"] if message.startswith("shape") else []))


def test_a_function_that_is_not_there(make):
    with pytest.raises(batches.DataError, match=r"cannot find data.dataset=nowhere:rows: there is no module `nowhere`"):
        make(None, "data.dataset=nowhere:rows")
