"""Metrics files that parse, one row per step; lines that read well; the two pictures."""

import csv
import dataclasses
import fcntl
import io
import json
import math
import os
import select
import struct
import termios

import pytest

from experiments import configs
from experiments import plots as plots_command
from experiments.commandline import console, schema
from experiments.planning import cost
from experiments.planning.resolve import resolve
from experiments.results import metrics
from experiments.results import summary as plots
from experiments.results.metrics import Progress, Record, Recorder
from experiments.runtime import hardware
from experiments.step import tiling

PICTURES = ("loss.png", "memory.png", "speed.png", "rate.png")


def records(steps=50):
    made = [Record(step=0, held_out_loss=5.6, held_out_bits_per_byte=8.0)]
    for step in range(1, steps + 1):
        loss = 2 + 3 * math.exp(-step / 10)
        words = {"held_out_loss": loss, "held_out_bits_per_byte": loss / math.log(2)} if step % 25 == 0 else {}
        rates = {"tokens_per_second": 4096.0, "flops_per_second": 1e10, "seconds": 0.5, "learning_rate": 1e-3}
        rates |= {"data_seconds": 0.001, "save_seconds": 0.1 if step % 10 == 0 else 0.0}
        words |= {"bits_per_byte": loss / math.log(2), "grad_norm": 1.0, "memory_bytes": 2**30}
        made.append(Record(step=step, loss=loss, **rates, **words))
    return made


def test_every_record_is_a_line_of_both_files(tmp_path):
    recorder = Recorder(tmp_path)
    for record in records():
        recorder.add(record)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]  # before closing
    recorder.close()
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert len(lines) == len(rows) == 51
    assert list(lines[0]) == list(rows[0]) == list(Record.__dataclass_fields__)
    assert lines[0]["loss"] is None
    assert rows[0]["loss"] == ""
    assert float(rows[7]["loss"]) == lines[7]["loss"]


def test_only_damaged_lines_are_lost(tmp_path):
    recorder = Recorder(tmp_path)
    for record in records(4):
        recorder.add(record)
    recorder.close()
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(
        b"".join([lines[0], lines[1].replace(b"{", b"\xff", 1), b"{}\n", lines[2], lines[3], lines[4][:20]])
    )
    assert [record.step for record in metrics.read(tmp_path)] == [0, 2, 3]
    assert [record.step for record in metrics.read(tmp_path, 2)] == [0, 2]


def test_a_loss_that_is_no_number_is_valid_json(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.add(Record(step=1, loss=math.nan, grad_norm=math.inf))
    recorder.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text)["loss"] is None
    assert "nan" in (tmp_path / "metrics.csv").read_text()


def test_bits_per_byte():
    assert metrics.bits_per_byte(math.log(256), 1.0) == pytest.approx(8.0)
    assert metrics.bits_per_byte(math.log(256), 4.0) == pytest.approx(2.0)
    assert metrics.bits_per_byte(1.0, None) is None


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress(50, 20, stream)
    progress.start()
    for record in records()[1:]:
        progress.show(record)
    progress.close()
    lines = stream.getvalue().splitlines()
    held_out = [line for line in lines if "held-out" in line]
    assert held_out == ["  held-out, step 25: 3.241 bits per byte", "  held-out, step 50: 2.915 bits per byte"]
    lines = [line for line in lines if line not in held_out]
    assert [line.split()[1] for line in lines] == ["1/50", "20/50", "40/50", "50/50"]
    words = "loss 4.715  6.802 bits/byte  4.10k tok/s  0.500 s/step  lr 0.001  grad 1.00  1.0 GiB"
    assert words in lines[0]


class Terminal(io.StringIO):
    def isatty(self):
        return True


BARS = {
    40: "50/50  2.915 bits/byte  00:00 left",
    80: "50/50  2.915 bits/byte  0.500 s/step  lr 0.001  grad 1.00  00:00 left",
    130: "2.915 bits/byte  4.10k tok/s  0.500 s/step  lr 0.001  grad 1.00  1.0 GiB  held-out 2.915  00:00 left",
}


@pytest.mark.parametrize("columns", BARS)
def test_a_bar_on_a_terminal_fits_and_names_its_fields(columns):
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    with os.fdopen(writer, "w") as stream:
        progress = Progress(50, 1, stream)
        progress.start()
        progress.show(records()[25])
        progress.show(records()[50])
        progress.close()
        stream.flush()
        written = b""
        while select.select([reader], [], [], 0.2)[0]:
            written += os.read(reader, 10_000)
    os.close(reader)
    lines = written.decode().replace("\n", "\r").split("\r")
    assert max(map(len, lines)) <= columns
    assert BARS[columns] in [line for line in lines if line][-1]
    assert "  held-out, step 25: 3.241 bits per byte" in lines


def test_a_table_is_as_narrow_as_the_terminal(monkeypatch):
    monkeypatch.setattr(cost.sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    config = resolved("tiling.n=8", "batch_size=1", "seq_len=128")
    text = cost.render("tiny", config, plan(), hardware.Device("cpu", "a test", 2**33))
    chosen = {"optimizer.learning_rate": 0.003, "hardware.param_dtype": "float32", "steps": 3}
    text += "\n" + cost.choices({key: configs.Choice(value, "as I say") for key, value in chosen.items()})
    assert max(map(len, text.splitlines())) <= 40
    assert "tiles of 16 tokens make" in " ".join(text.split())


def plan(untiled=True):
    small = cost.Memory(2**30, 2**28, 2**30, 2**27, 2**28, 3 * 2**30)
    large = cost.Memory(2**30, 2**28, 2**30, 2**30, 2**28, 4 * 2**30)
    return cost.Plan(10**9, 10**12, small, 8 * 2**30, 2**30, untiled=large if untiled else None, process=True)


def resolved(*overrides):
    config, _ = schema.compose(list(overrides))
    return resolve(config, hardware.Device("cpu", "a test", 2**33))


@pytest.mark.parametrize("made", [records(), records(3)], ids=["long", "short"])
def test_pictures_are_drawn_of_what_was_measured(made, tmp_path):
    assert plots.draw(tmp_path, made, plan(untiled=len(made) > 3).facts) == list(PICTURES)
    for name in PICTURES:
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("made", [records()[:1], []], ids=["untrained", "none"])
def test_no_picture_is_drawn_of_nothing(made, tmp_path):
    assert plots.draw(tmp_path, made, plan().facts) == []
    assert not [*tmp_path.iterdir()]


def drawn(draw, *args):
    """The texts of a picture; those that are cut off, and those that lie over others."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    with matplotlib.rc_context(plots.STYLE):
        figure = draw(*args)
        FigureCanvasAgg(figure).draw()
    found = [text for axes in figure.axes for text in axes.findobj(Text) if text.get_text() and text.get_visible()]
    words = " ".join(text.get_text().replace("\n", " ") for text in found)
    ticks = {id(label) for axes in figure.axes for label in [*axes.get_xticklabels(), *axes.get_yticklabels()]}
    boxes = {text.get_text(): text.get_window_extent() for text in found if id(text) not in ticks}
    width, height = figure.canvas.get_width_height()
    outside = [text for text, b in boxes.items() if not (min(b.x0, b.y0) >= 0 and b.x1 <= width and b.y1 <= height)]
    over = [(one, other) for one in boxes for other in boxes if one < other and boxes[one].overlaps(boxes[other])]
    return words, outside, over


@pytest.mark.parametrize(
    ("overrides", "untiled", "says"),
    [
        ((), False, "this run, untiled"),
        (("tiling.n=8",), True, "this run, head: 8 tiles of 256 tokens"),
        (("tiling.n=8", "tiling.mlp=4", "tiling.attention=2", "tiling.batch=2"), True, "each MLP: 4 tiles"),
    ],
)
def test_the_picture_of_memory_says_what_is_cut_and_nothing_lies_over_another(overrides, untiled, says):
    config = resolved(*overrides)
    known = dataclasses.replace(plan(untiled), cuts=tiling.describe(config)).facts
    words, outside, over = drawn(plots._memory, records(), known, "a-run-1")
    assert says in words and "sync" not in words
    assert ("less than untiled" in words) == untiled
    assert not outside and not over


def test_the_picture_explains_what_is_beside_the_step():
    known = dataclasses.replace(plan(False), head_untiled=2**30).facts
    made = [dataclasses.replace(records()[0], memory_bytes=2**31), *records(9)[1:]]
    assert plots.beside(made, 2**30) == 2**30
    words, outside, over = drawn(plots._memory, made, known, "a-run-1")
    assert "Python, JAX and its compiler" in words and "+ the step as planned: 3 GiB" in words
    assert "untiled, as tile estimates it" in words and "up to 25% less than untiled" in words
    assert not outside and not over


def test_the_loss_of_pairs_is_not_of_text():
    known = {**plan().facts, "paired": True}
    made = [dataclasses.replace(record, bits_per_byte=None, held_out_bits_per_byte=None) for record in records()]
    words, outside, over = drawn(plots._loss, made, known, "dpo")
    assert "loss of a pair of answers" in words and "held-out pairs" in words and "nats" not in words
    assert not outside and not over


def test_a_loss_of_ones_own_is_drawn_beside_the_same_of_what_is_held_out():
    made = [
        dataclasses.replace(record, bits_per_byte=None, held_out_objective=7.5 if record.held_out_loss else None)
        for record in records()
    ]
    words, outside, over = drawn(plots._loss, made, plan().facts, "own")
    assert "the objective" in words and "7.50" in words and "nats" not in words
    assert not outside and not over
    assert metrics.describe(made[0]) == "8.000 bits per byte, objective 7.5"


def test_pictures_are_drawn_again_from_what_the_run_left(tmp_path, capsys):
    assert plots_command.main([str(tmp_path)]) == 1
    assert f"error: there is no run at {tmp_path}: it has no plan.json" in capsys.readouterr().err
    recorder = Recorder(tmp_path)
    for record in records(5):
        recorder.add(record)
    recorder.close()
    (tmp_path / metrics.FACTS).write_text(json.dumps(plan().facts))
    assert plots_command.main([str(tmp_path)]) == 0
    assert all((tmp_path / name).exists() for name in PICTURES)


def test_table_is_aligned_and_complete():
    config = resolved("tiling.n=8", "batch_size=8", "seq_len=256")
    text = cost.render("tiny", config, plan(), hardware.Device("cpu", "a test", 2**33))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    words = ["parameters", "tokens per step", "FLOPs per step", "weights", "optimizer", "gradients", "head"]
    words += ["activations", "compiled step", "available", "tiled, n=8", "untiled", "3.00 GiB", "4.00 GiB"]
    for word in words:
        assert word in text, word
    assert "fits, 1.00 GiB kept free" in text


def test_table_says_when_tiles_are_short():
    config = resolved("tiling.n=8", "batch_size=1", "seq_len=128")
    text = cost.render("tiny", config, plan(), hardware.Device("cpu", "a test", 2**33))
    assert "note: tiles of 16 tokens make slow matrix products; tiling.n=2 has 64 in each." in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.0 MiB"), (2**20, "1.0 MiB"), (2**30, "1.00 GiB"), (5 * 2**40, "5,120.00 GiB")]
)
def test_sizes(count, text):
    assert console.size(count) == text


def test_choices_can_be_pasted_back():
    device = hardware.Device("cpu", "a test", 2**33)
    text = cost.choices(resolve(schema.compose([])[0], device).chosen)
    again = resolve(schema.compose([word for word in text.split() if "=" in word])[0], device)
    assert again.chosen == {}
    assert again.optimizer == configs.AdamW(learning_rate=3e-3)


def test_every_choice_has_its_reason():
    device = hardware.Device("cpu", "a test", 2**33)
    lines = cost.choices(resolve(schema.compose(["model=gemma2b"])[0], device).chosen).splitlines()
    assert lines[0] == "  chosen:" and all(len(line) <= 80 for line in lines if "compiler_options" not in line)
    text = " ".join(" ".join(lines).split())
    for said in (
        "hardware.param_dtype=bfloat16 float32 parameters, gradients and two moments of 37.34 GiB do not fit",
        "optimizer=adafactor_layerwise AdamW's two moments would not fit",
        "tiling.n=2 all logits are 500.0 MiB, a tile's at most 256.0 MiB",
        "remat.policy=full more than 20,000,000 parameters",
    ):
        assert said in text, said


def test_pairs_that_tie_are_half_right():
    from types import SimpleNamespace

    import jax.numpy as jnp

    from experiments.step import objectives

    model = SimpleNamespace(logits=lambda hidden: hidden)
    hidden = jnp.zeros((3, 2, 4, 5)).at[0, 0, :, 1].set(1.0)  # the first pair's chosen answer is likelier
    targets, mask = jnp.ones((3, 2, 4), int), jnp.ones((3, 2, 4))
    how = configs.Simpo(beta=1.0)
    compare = lambda *sums: objectives.simpo(*sums, how=how)
    _, aux = objectives.preference((model,), (hidden,), targets, mask, compare=compare)
    assert aux["accuracy"] == pytest.approx((1 + 0.5 + 0.5) / 3)
