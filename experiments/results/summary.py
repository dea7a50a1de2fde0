"""What is left of a run at its end: its weights, summary.json, its last words and its pictures.

All but the weights are made of its records and of what was known at its start. matplotlib is imported only to draw, and
JAX only for weights.
"""

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from experiments import configs
from experiments.commandline import console
from experiments.commandline.console import GIB
from experiments.data.tokenizer import BYTES, FILE, SENTENCES, SETTINGS, files_of
from experiments.results.metrics import Record, Recorder, describe, finite
from experiments.runtime import hardware, manifest

INK, FAINT, GRID = "#1f2430", "#8a91a0", "#e6e8ee"
BLUE, ORANGE = "#2f6fde", "#e07a1f"
PARTS = {
    "weights": "#27407a",
    "optimizer": "#7a4fa3",
    "gradients": "#4d8fd1",
    "head": "#e07a1f",
    "activations": "#f2c46d",
}
TIMES = ("#4d8fd1", "#f2c46d", "#e07a1f")
STYLE: Any = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.titlepad": 10,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.dpi": 150,
}


def leave(directory: Path, recorder: Recorder, known: dict[str, Any], seconds: float) -> None:
    """Close the records, and of a run that has trained write the summary and draw the pictures, however it ended."""
    if not hardware.first_process():
        return
    actions = [recorder.close]
    if any(record.loss is not None for record in recorder.records):
        actions.append(lambda: _summarise(directory, recorder, known, seconds))
        actions.append(lambda: draw(directory, recorder.records, known))
    for action in actions:
        try:
            action()
        except OSError as error:  # what ended the run may be the very same
            print(f"warning: cannot write to {directory}: {manifest.reason(error)}", file=sys.stderr)


def _summarise(directory: Path, recorder: Recorder, known: dict[str, Any], seconds: float) -> None:
    """Write summary.json: what one would compare between runs."""
    steps = [record for record in recorder.records if record.loss is not None]
    speeds = sorted(record.tokens_per_second for record in steps if record.tokens_per_second is not None)
    held_out = [record for record in recorder.records if record.held_out_loss is not None]
    summary = {
        "params": known["params"],
        "flops_per_step": known["flops"],
        "planned_bytes": known["total"],
        "planned_bytes_untiled": known["total_untiled"],
        "peak_bytes": hardware.used_memory()[1],
        "steps": len(steps),
        "seconds": round(seconds, 2),
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
        "held_out_bits_per_byte_before": held_out[0].held_out_bits_per_byte if held_out else None,
        "held_out_bits_per_byte_after": held_out[-1].held_out_bits_per_byte if held_out else None,
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
    }
    (directory / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n")


def save_weights(model: Any, config: configs.Resolved, directory: Path) -> list[str]:
    """Write the model that was trained, if that is wanted, any adapter merged and also by itself; return the folders.

    Args:
        model: with its adapter, if it has one.
        config: the run.
        directory: the run's.
    """
    if not config.save.final:
        return []
    folders = ["weights/", "adapter/"] if config.adapted else ["weights/"]
    model = hardware.gathered(model)
    if not hardware.first_process():
        return folders
    model = _merged(config.adapter, model, directory, base_name(config.model.weights))
    zoo.save(model, directory / "weights", source=config.model.weights)
    if not isinstance(config.data, configs.Tokens):  # of ids nobody says what they are
        copy_tokenizer(config.data.tokenizer, directory / "weights")
    return folders


def base_name(weights: str | None) -> str | None:
    """Return what PEFT is to call the model that an adapter is for: its name on the hub, or its folder."""
    if weights is None:
        return None
    folder = Path(weights).expanduser().resolve()
    name = folder.parents[1].name if folder.parent.name == "snapshots" else ""  # as the hub's cache calls it
    return name.removeprefix("models--").replace("--", "/", 1) if name.startswith("models--") else str(folder)


@functools.singledispatch
def _merged(adapter: configs.Adapter, model: Any, directory: Path, base: str | None) -> Any:
    """Write an adapter by itself; return the model with it merged."""
    return model


@_merged.register
def _(adapter: configs.Lora, model: Any, directory: Path, base: str | None) -> Any:
    from zoo import adapters
    from zoo.adapters import lora

    adapters.save(model, directory / "adapter", base=base)
    return lora.merge(model)


def copy_tokenizer(source: str | Path | None, out: Path) -> None:
    """Copy a tokenizer's files into a folder of weights; or say there that they are of bytes, where it has none."""
    if source in (None, BYTES):
        if not any((out / name).is_file() for name in (FILE, SENTENCES, SETTINGS)):
            (out / SETTINGS).write_text(json.dumps({"tokenizer_class": BYTES}, indent=2) + "\n")
        return
    folder = Path(source).expanduser()
    if folder.resolve() == out.resolve():
        return
    for file in files_of(out):  # of the weights' own tokenizer: what of them would be read first is none of this one
        file.unlink()
    for file in files_of(folder):
        there = out / file.relative_to(folder)
        there.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, there)


def words(directory: Path, recorder: Recorder, known: dict[str, Any], saved: list[str], seconds: float) -> str:
    """Return what is said at the end: how well it went, and where everything is.

    Args:
        directory: the run's.
        recorder: has its records.
        known: what the plan says of it (`Plan.facts`).
        saved: the folders of weights.
        seconds: how long it took.
    """
    held_out = [record for record in recorder.records if record.held_out_loss is not None]
    lines = []
    if len(held_out) > 1:
        what = "pairs" if known["paired"] else "text"
        before, after = (describe(held_out[i], known["paired"]) for i in (0, -1))
        lines.append(f"  held-out {what} before: {before}, after: {after}")
    lines.append(f"  peak memory {console.size(hardware.used_memory()[1])}, {seconds:.0f} s altogether")
    if (other := beside(recorder.records, known["weights"])) and known["process"]:
        lines.append(f"  of it about {console.size(other)} of Python, JAX and its compiler")
        lines.append(f"  and {console.size(known['total'])} as planned of a step")
    files = ", ".join(["metrics.jsonl", "metrics.csv", "summary.json", "config.yaml", "*.png", *saved])
    return "\n".join([*lines, f"Everything is in {directory}/: {files}"])


def beside(records: list[Record], weights: int) -> int:
    """Return the bytes in use beside the weights before the first step: on a CPU Python, JAX and its compiler."""
    first = next((record.memory_bytes for record in records if record.step == 0 and record.memory_bytes), None)
    return 0 if first is None else max(0, first - weights)


def draw(directory: Path, records: list[Record], known: dict[str, Any]) -> list[str]:
    """Write loss.png, memory.png, speed.png and rate.png, of what was measured; return their names.

    Args:
        directory: the run's, which names the pictures.
        records: what it measured; without a training step there is nothing to draw.
        known: what its plan says of it (`Plan.facts`).
    """
    if all(record.loss is None for record in records):
        return []
    import matplotlib

    pictures = {
        "loss.png": lambda: _loss(records, known, directory.name),
        "memory.png": lambda: _memory(records, known, directory.name),
        "speed.png": lambda: _speed(records, directory.name),
        "rate.png": lambda: _rate(records, directory.name),
    }
    with matplotlib.rc_context(STYLE):
        for name, make in pictures.items():
            make().savefig(directory / name)
    return list(pictures)


def _figure(width: float, height: float, columns: int = 1, **spaces: float) -> Any:
    """Return a figure with fixed margins, as to find the best ones takes longer than to draw; and of no window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.subplots(1, columns)
    inches = {"left": 0.85, "right": 0.3, "bottom": 0.65, "top": 0.65, "between": 0.9} | spaces
    left, right = inches["left"] / width, 1 - inches["right"] / width
    each = (right - left - (columns - 1) * inches["between"] / width) / columns
    figure.subplots_adjust(
        left, inches["bottom"] / height, right, 1 - inches["top"] / height, wspace=inches["between"] / width / each
    )
    return figure, axes


def _loss(records: list[Record], known: dict[str, Any], name: str) -> Any:
    in_bits = any(record.bits_per_byte is not None for record in records)
    field, unit = ("bits_per_byte", "bits per byte") if in_bits else ("loss", "nats per token")
    own = not in_bits and any(record.held_out_objective is not None for record in records)
    unit = "loss of a pair of answers" if known["paired"] else "the objective" if own else unit
    text = "pairs" if known["paired"] else "text"
    train = _series(records, field)
    held_out = _series(records, "held_out_objective" if own else f"held_out_{field}")
    figure, axes = _figure(7.2, 4.4)
    if len(train[0]):
        smooth = len(train[0]) >= 40
        axes.plot(*train, color=BLUE, alpha=0.25 if smooth else 1, lw=1 if smooth else 1.8, label="each step")
        if smooth:
            axes.plot(train[0], _smoothed(train[1]), color=BLUE, lw=2, label="smoothed")
    if len(held_out[0]):
        line = (0, (4, 3)) if len(held_out[0]) > 2 else "none"  # two points far apart are no curve
        axes.plot(*held_out, color=ORANGE, lw=1.2, ls=line, marker="o", ms=6, label=f"held-out {text}")
        steps, values = held_out
        words = {"textcoords": "offset points", "color": ORANGE, "weight": "bold"}
        for end in (0, -1)[: len(steps)]:  # on the side where the other line is not
            over = not len(train[0]) or values[end] >= train[1][end]
            along = {"xytext": (-6 if end == 0 else 6, 9 if over else -17), "ha": "left" if end == 0 else "right"}
            axes.annotate(f"{values[end]:.2f}", (steps[end], values[end]), **along, **words)
    _whole_steps(axes, records)
    axes.margins(y=0.12)
    axes.set(title=name, xlabel="step", ylabel=unit)
    _above(axes)
    return figure


def _above(axes: Any) -> None:
    """Put the legend over the axes, at the right, where no line is."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=4, fontsize=9, columnspacing=1.4, handlelength=1.6)


def _below(axes: Any) -> None:
    """Put the legend below the axes, at the left."""
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.17)}
    axes.legend(**below, ncols=5, fontsize=9, columnspacing=1.2, handlelength=1.2)


def _memory(records: list[Record], known: dict[str, Any], name: str) -> Any:
    """Draw what the compiled step takes, part by part, beside the untiled one; and what the process was seen to use."""
    totals = [sum(parts.values()) for parts in known["bars"].values()]
    figure, (left, right) = _figure(11, 4.4, 2, left=0.4, bottom=1.1)
    size, unit = _unit(max(totals))
    _bars(left, known, size, unit)
    left.set_title(f"{name}: the step as compiled" if len(totals) == 1 else f"{name}: the step, tiled and not")
    _used(right, records, known)
    _whole_steps(right, records)
    return figure


def _unit(most: float) -> tuple[int, str]:
    return (GIB, "GiB") if most > GIB else (2**20, "MiB")


def _bars(axes: Any, known: dict[str, Any], size: int, unit: str) -> None:
    """Draw one bar per memory, its parts in a row, its total at the end, and what the tiled one saves."""
    labels, bars = list(known["bars"]), [*known["bars"].values()]
    shown = [f"{label}, as tile estimates it" if label in known["estimated"] else label for label in labels]
    heights, start = np.arange(len(bars))[::-1], np.zeros(len(bars))
    for part, colour in PARTS.items():
        widths = np.array([bar[part] / size for bar in bars])
        if widths.any():
            made = axes.barh(heights, widths, 0.5, start, color=colour, label=part, edgecolor="white", lw=0.8)
            for one, label in zip(made, labels, strict=True):
                one.set_alpha(0.55 if label in known["estimated"] else 1)
        start += widths
    words = {"textcoords": "offset points", "weight": "bold"}
    for height, total, label, text in zip(heights, start, labels, shown, strict=True):
        about = "at most " if label in known["estimated"] else ""
        axes.annotate(f"{about}{total:,.3g} {unit}", (total, height), (6, 0), va="center", **words)
        axes.annotate(text, (0, height + 0.28), (1, 3), textcoords="offset points", va="bottom", fontsize=9)
    if len(bars) > 1:
        less = _less(start, about=bool(known["estimated"]))
        axes.annotate(less, (start[0], heights[0]), (6, -15), va="center", color=BLUE, **words)
    most, room = start.max(), known["available"] / size
    axes.set_yticks([])
    axes.set_ylim(-0.45 if len(bars) > 1 else -0.9, max(len(bars) - 0.2, 1.0))
    axes.set_xlim(0, 1.5 * most)
    if room < 1.3 * most:
        axes.axvline(room, color=INK, lw=1.2, ls=(0, (4, 3)))
        axes.annotate("available", (room, 1), (-4, -10), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    _below(axes)


def _less(totals: np.ndarray, about: bool) -> str:
    """Return how the first bar compares with the second."""
    share = 1 - totals[0] / totals[1]
    if abs(share) < 0.02:
        return "as much as untiled"
    return f"{'up to ' * about}{abs(share):.0%} {'less' if share > 0 else 'more'} than untiled"


def _used(axes: Any, records: list[Record], known: dict[str, Any]) -> None:
    """Draw what was in use, over what was there before the run's arrays and what was planned on top of it."""
    used, peak = _series(records, "memory_bytes"), _series(records, "peak_memory_bytes")
    before = beside(records, known["weights"])
    planned = before + known["total"]
    most = max([planned, *used[1], *peak[1]])
    size, unit = _unit(most)
    axes.axhspan(0, before / size, color=GRID, lw=0)
    words = {"textcoords": "offset points", "fontsize": 9, "xycoords": ("axes fraction", "data")}
    if before > 0.08 * most:
        axes.annotate("Python, JAX and its compiler", (0, before / size), (6, -12), color=FAINT, **words)
    if len(used[0]):
        few = "o" if len(used[0]) < 40 else None
        axes.plot(peak[0], peak[1] / size, color=BLUE, lw=5, alpha=0.25, label="most so far")
        axes.plot(used[0], used[1] / size, color=BLUE, lw=1.8, marker=few, ms=4, label="after each step")
    text = f"{'+ ' * bool(before)}the step as planned: {known['total'] / size:,.3g} {unit}"
    axes.axhline(planned / size, color=ORANGE, lw=1.2, ls=(0, (4, 3)), label=text)
    _below(axes)
    axes.set_ylim(0, 1.15 * most / size)
    axes.set(title="used by the process" if known["process"] else "in use on the device", xlabel="step", ylabel=unit)


def _speed(records: list[Record], name: str) -> Any:
    """Draw the throughput, and where the time went, per step."""
    figure, (left, right) = _figure(11, 3.8, 2)
    steps, speed = _series(records, "tokens_per_second")
    if len(steps):
        steady = steps > steps[0] if len(steps) > 2 else steps > 0  # in a run's first step much happens once
        typical = np.median(speed[steady])
        left.plot(steps, speed, color=BLUE, lw=1.2, marker="o" if len(steps) < 40 else None, ms=4)
        left.set_ylim(0, 1.25 * np.quantile(speed[steady], 0.98))
        left.axhline(typical, color=ORANGE, lw=1.2, ls=(0, (4, 3)))
        words = {"textcoords": "offset points", "ha": "right", "color": ORANGE, "fontsize": 9}
        left.annotate(f"median {typical:,.0f}", (1, typical), (-2, 5), xycoords=("axes fraction", "data"), **words)
        data, save = (_series(records, field)[1] for field in ("data_seconds", "save_seconds"))
        parts = {"step": _series(records, "seconds")[1] - data, "waiting for data": data, "saving": save}
        right.stackplot(steps, *parts.values(), labels=list(parts), colors=TIMES, lw=0, step="mid")
        right.set_ylim(0, 1.6 * np.quantile(np.sum([*parts.values()], axis=0)[steady], 0.98))
        _above(right)
    for axes in (left, right):
        _whole_steps(axes, records)
    left.set(title=f"{name}: throughput", xlabel="step", ylabel="tokens per second")
    right.set(title="time of a step", xlabel="step", ylabel="seconds")
    return figure


def _rate(records: list[Record], name: str) -> Any:
    """Draw the learning rate and the gradient's norm."""
    figure, (left, right) = _figure(11, 3.4, 2)
    for axes, field in ((left, "learning_rate"), (right, "grad_norm")):
        steps, values = _series(records, field)
        axes.plot(steps, values, color=BLUE, lw=1.5, marker="o" if len(steps) < 40 else None, ms=4)
        axes.set_ylim(bottom=0)
        _whole_steps(axes, records)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set(title=f"{name}: learning rate", xlabel="step", ylabel="learning rate")
    right.set(title="norm of the gradient", xlabel="step", ylabel="norm")
    return figure


def _series(records: list[Record], field: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values at which a field was measured."""
    pairs = [(record.step, getattr(record, field)) for record in records if getattr(record, field) is not None]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs], float)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Exponential average over about a fortieth of the run, without the bias of its start."""
    keep = 1 - 40 / max(len(values), 80)
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        result.append(total / weight)
    return np.array(result)


def _whole_steps(axes: Any, records: list[Record]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.02 * records[-1].step - 0.2 if records else 0, 1.03 * max(1, records[-1].step if records else 1))
