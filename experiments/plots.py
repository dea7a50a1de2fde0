"""The pictures of a run: `python experiments/plots.py RUN_DIRECTORY` draws them anew, while it runs or afterwards.

matplotlib is imported only to draw.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] != str(ROOT):  # as a script, Python puts this file's own folder first
    sys.path.insert(0, str(ROOT))

from experiments import commands, configs, usage  # noqa: E402
from experiments.hardware import GIB  # noqa: E402
from experiments.metrics import Record, read  # noqa: E402
from experiments.preflight import Plan  # noqa: E402

FACTS = "plan.json"

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
    "axes.titlepad": 12,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.dpi": 150,
}


def facts(plan: Plan, config: configs.Resolved) -> dict[str, Any]:
    """Return what the pictures need of a plan and a configuration, as JSON holds it."""
    bars = {f"this run\n({_tiling(config)})": plan.memory}
    if plan.untiled is not None:
        bars["untiled"] = plan.untiled
    return {
        "bars": {label: memory.parts for label, memory in bars.items()},
        "total": plan.memory.total,
        "available": plan.available,
        "process": config.hardware.platform is configs.Platform.cpu,
    }


def draw(directory: Path, records: list[Record], known: dict[str, Any]) -> None:
    """Write loss.png, memory.png, speed.png and rate.png; what was not measured is not drawn.

    Args:
        directory: the run's, which names the pictures.
        records: what it measured.
        known: what `facts` said of it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        for name, figure in (
            ("loss.png", _loss(plt, records, directory.name)),
            ("memory.png", _memory(plt, records, known, directory.name)),
            ("speed.png", _speed(plt, records, directory.name)),
            ("rate.png", _rate(plt, records, directory.name)),
        ):
            figure.savefig(directory / name, bbox_inches="tight", pad_inches=0.2)
            plt.close(figure)


def remember(directory: Path, known: dict[str, Any]) -> None:
    """Write what the pictures need beside the metrics, so that they can be drawn again at any time."""
    (directory / FACTS).write_text(json.dumps(known, indent=1) + "\n")


def main(argv: list[str]) -> int:
    """Draw the pictures of runs, in progress or over, anew; return the exit status."""
    if not argv or {"-h", "--help"}.intersection(argv):
        print(
            f"Draw loss.png, memory.png, speed.png and rate.png of runs: {commands.called('plots')} RUN_DIRECTORY ..."
        )
        return 0 if argv else 2
    for directory in map(Path, argv):
        try:
            known = json.loads((directory / FACTS).read_text())
            draw(directory, read(directory), known)
        except (OSError, ValueError) as error:
            print(f"error: cannot draw the run at {directory}: {error}", file=sys.stderr)
            return 1
        print(f"{directory}/: loss.png, memory.png, speed.png, rate.png")
    return 0


def _loss(plt: Any, records: list[Record], name: str) -> Any:
    in_bits = any(record.bits_per_byte is not None for record in records)
    field, unit = ("bits_per_byte", "bits per byte") if in_bits else ("loss", "nats per token")
    train = _series(records, field)
    held_out = _series(records, f"held_out_{field}")
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    if len(train[0]):
        smooth = len(train[0]) >= 40
        axes.plot(*train, color=BLUE, alpha=0.25 if smooth else 1, lw=1 if smooth else 1.8, label="each step")
        if smooth:
            axes.plot(train[0], _smoothed(train[1]), color=BLUE, lw=2, label="smoothed")
    if len(held_out[0]):
        line = (0, (4, 3)) if len(held_out[0]) > 2 else "none"  # two points far apart are no curve
        axes.plot(*held_out, color=ORANGE, lw=1.2, ls=line, marker="o", ms=6, label="held-out text")
        for step, value in {held_out[0][0]: held_out[1][0], held_out[0][-1]: held_out[1][-1]}.items():
            axes.annotate(f"{value:.2f}", (step, value), (0, 10), textcoords="offset points", color=ORANGE, ha="center")
    _whole_steps(axes, records)
    axes.margins(y=0.12)
    axes.set(title=name, xlabel="step", ylabel=unit)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")
    return figure


def _tiling(config: configs.Resolved) -> str:
    """Return what of the run is cut, as overrides."""
    values = usage.plain(config.tiling).items()
    said = [f"tiling.{key}={value}" for key, value in values if value not in (None, False, "auto")]
    return "\n".join(said[:1] if said == ["tiling.n=none"] else [s for s in said if s != "tiling.n=none"])


def _memory(plt: Any, records: list[Record], known: dict[str, Any], name: str) -> Any:
    totals = [sum(parts.values()) for parts in known["bars"].values()]
    used = _series(records, "memory_bytes")
    size, unit = (GIB, "GiB") if max(totals) > GIB else (2**20, "MiB")
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=(3, 4), gridspec_kw={"wspace": 0.06}
    )
    _stacks(left, known["bars"], size, unit)
    top = max(totals)
    if known["available"] < 4 * top:
        left.axhline(known["available"] / size, color=INK, lw=1.2, ls=(0, (4, 3)))
        left.annotate("available", (1, known["available"] / size), (-2, 4), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", color=INK, fontsize=9)  # fmt: skip
    left.set(title=f"{name}: the compiled step", ylabel=unit)
    if len(used[0]):
        right.plot(used[0], used[1] / size, color=BLUE, lw=1.8, marker="o" if len(used[0]) < 40 else None, ms=4)
        right.set_ylim(0, 1.15 * max(known["total"], used[1].max()) / size)
        right.axhline(known["total"] / size, color=ORANGE, lw=1.2, ls=(0, (4, 3)))
        words = {"textcoords": "offset points", "ha": "right", "color": ORANGE, "fontsize": 9}
        place = (1, known["total"] / size)
        right.annotate("the compiled step alone", place, (-2, -12), xycoords=("axes fraction", "data"), **words)
    _whole_steps(right, records)
    right.set(
        title="the whole process, Python included" if known["process"] else "in use on the device",
        xlabel="step",
        ylabel=unit,
    )
    return figure


def _speed(plt: Any, records: list[Record], name: str) -> Any:
    """Draw the throughput, and where the time went, per step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
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
        right.legend(loc="upper right", ncols=3, fontsize=9)
    for axes in (left, right):
        _whole_steps(axes, records)
    left.set(title=f"{name}: throughput", xlabel="step", ylabel="tokens per second")
    right.set(title="time of a step", xlabel="step", ylabel="seconds")
    return figure


def _rate(plt: Any, records: list[Record], name: str) -> Any:
    """Draw the learning rate and the gradient's norm."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for axes, field in ((left, "learning_rate"), (right, "grad_norm")):
        steps, values = _series(records, field)
        axes.plot(steps, values, color=BLUE, lw=1.5, marker="o" if len(steps) < 40 else None, ms=4)
        axes.set_ylim(bottom=0)
        _whole_steps(axes, records)
    left.set(title=f"{name}: learning rate", xlabel="step")
    left.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    right.set(title="norm of the gradient", xlabel="step")
    return figure


def _stacks(axes: Any, bars: dict[str, dict[str, int]], size: int, unit: str) -> None:
    """Draw one stacked bar per memory, its parts labelled once and its total on top."""
    labels = list(bars)
    bottom = np.zeros(len(labels))
    for part, colour in PARTS.items():
        heights = np.array([bar[part] / size for bar in bars.values()])
        axes.bar(labels, heights, 0.55, bottom, color=colour, label=part, edgecolor="white", lw=0.8)
        bottom += heights
    for x, height in enumerate(bottom):
        axes.annotate(
            f"{height:,.1f} {unit}", (x, height), (0, 4), textcoords="offset points", ha="center", weight="bold"
        )
    axes.margins(y=0.18)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.grid(axis="x", visible=False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
