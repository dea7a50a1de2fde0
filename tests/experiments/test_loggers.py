"""Records reach the loggers that were asked for; one that is not installed is an error before anything runs."""

import sys
import types

import pytest

from experiments import configs
from experiments.commandline.console import CommandError
from experiments.results import metrics
from experiments.results.metrics import Record, Recorder


class Sink:
    def __init__(self):
        self.seen, self.closed = [], False

    def add(self, record):
        self.seen.append(record.step)

    def close(self):
        self.closed = True


def test_every_record_reaches_every_logger(tmp_path):
    sinks = [Sink(), Sink()]
    recorder = Recorder(tmp_path, sinks)
    for step in (0, 1):
        recorder.add(Record(step=step, loss=1.0))
    recorder.close()
    assert [(s.seen, s.closed) for s in sinks] == [([0, 1], True)] * 2


def test_a_logger_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    metrics.check_loggers(configs.Save())
    with pytest.raises(CommandError, match=r"needs the package tensorboardX: pip install -e '\.\[tb\]'"):
        metrics.check_loggers(configs.Save(tensorboard=True))
    with pytest.raises(CommandError, match=r"'\.\[wandb\]'"):
        metrics.check_loggers(configs.Save(wandb=True))


def test_tensorboard_gets_what_was_measured(tmp_path, monkeypatch):
    written = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *item: written.append(item), close=lambda: written.append("closed")
    )
    module = types.SimpleNamespace(SummaryWriter=lambda folder: written.append(folder) or writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    logger = metrics.TensorBoard(tmp_path)
    logger.add(Record(step=3, loss=2.0))
    logger.close()
    assert written == [str(tmp_path / "tensorboard"), ("loss", 2.0, 3), "closed"]


@pytest.mark.parametrize("option", ["tensorboard", "wandb"])
def test_options_are_off_by_default(option):
    assert getattr(configs.Save(), option) is False
