"""Pictures of how this project and the other ways compare, and what they are drawn from.

    python -m experiments.bench figures             # draws `.github/compare_*.svg` from the committed results
    python -m experiments.bench figures --measure   # measures memory against tokens, and errors against slices, anew

Memory: value and gradients of a linear head's cross-entropy in float32, slices of 256 tokens each. Errors: of the
weights' gradient in bfloat16, against float64, relative.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.made import made_with
from experiments.bench.rivals import compare, environments
from experiments.bench.rivals.losses import KIND
from experiments.bench.rivals.oracle import oracle
from experiments.bench.rivals.table import SYSTEMS

TOKENS = [1024, 2048, 4096, 8192]
EMBED, VOCAB, ROWS = 512, 32768, 256
SLICES = [1, 4, 16, 64]
SIZES = (1024, 256, 8192)  # of the errors: tokens, embed, vocab
PICTURES = Path(__file__).parents[3] / ".github"
BLUE, RED, GREY = "#1f5f99", "#b0413e", "0.62"
WHOLE = {"JAX, untiled": "-", "PyTorch, eager": "--"}  # what is not sliced, and how it is drawn


Point = tuple[tuple[int, int, int], int]  # (tokens, embed, vocab), slices


def swept(names: Sequence[str], points: Sequence[Point], dtype: str, of: str | None) -> dict[str, list[float | None]]:
    """Bytes of temporary memory of each system at each point, or the relative error `of` a result; None: it cannot."""
    workers, found = compare.started(names)[0], {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        for sizes, slices in points:
            given = compare.draw(*sizes, dtype)
            compare.save(inputs, given)
            true = oracle(np, **given) if of is not None else {}
            for name, worker in workers.items():
                value = None
                with contextlib.suppress(environments.Missing):
                    value = worker("load", inputs=str(inputs), dtype=dtype, slices=slices)["temporaries"]
                    if of is not None:
                        worker("step")
                        worker("results", to=str(outputs), every=1)
                        value = float(f"{compare.error(np.load(outputs)[of], true[of]):.2g}")
                found[name].append(value)
    for worker in workers.values():
        worker.close()
    return found


def memory(names: Sequence[str], tokens: Sequence[int] = TOKENS) -> dict[str, list[float | None]]:
    return swept(names, [((n, EMBED, VOCAB), n // ROWS) for n in tokens], "float32", None)


def errors(names: Sequence[str], slices: Sequence[int] = SLICES) -> dict[str, list[float | None]]:
    return swept(names, [(SIZES, n) for n in slices], "bfloat16", "dw")


def measure() -> dict[str, Any]:
    """What the pictures show, of all systems, with what it was made by."""
    slicing = [name for name in compare.of_dtype("bfloat16") if SYSTEMS[name].tiles]
    of_memory = {
        "tokens": TOKENS,
        "embed": EMBED,
        "vocab": VOCAB,
        "rows": ROWS,
        "bytes": memory(compare.of_dtype("float32")),
    }
    of_errors = {"slices": SLICES, "sizes": SIZES, "errors": errors(slicing)}
    command = "python -m experiments.bench figures --measure"
    return {"command": command, "made": made_with(), "memory": of_memory, "errors": of_errors}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "compare", "font.size": 13, "axes.titlesize": 13})  # the same bytes again
    return pyplot


def _finish(figure: Any, axes: Any, title: str, path: Path) -> None:
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def draw_memory(figures: dict[str, Any], path: Path) -> None:
    """Draw memory against tokens on logarithmic axes: `tile`, what is untiled, and all others in grey."""
    figure, axes = _pyplot().subplots(figsize=(7.2, 4.2), layout="constrained")
    words = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    for name, sizes in figures["bytes"].items():
        at = [(n, size / 2**20) for n, size in zip(figures["tokens"], sizes, strict=True) if size]
        color = BLUE if name.startswith("tile") else RED if name in WHOLE else GREY
        shown = name in ("tile", "tile, lowmem", *WHOLE)
        style = {"color": color, "lw": 2.6 if shown else 1, "zorder": 3 if shown else 1}
        axes.plot(*zip(*at, strict=True), marker="o" if shown else None, ls=WHOLE.get(name, "-"), **style)
        if shown:
            axes.annotate(
                name,
                at[-1],
                (9, {"PyTorch, eager": 6, "JAX, untiled": -6}.get(name, 0)),
                color=color,
                weight="bold",
                **words,
            )
    others = len(figures["bytes"]) - len(WHOLE) - 3
    axes.annotate(f"{others} other ways", (figures["tokens"][-1], 330), (9, 0), color="0.35", **words)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MiB")
    _ticks(axes.xaxis, figures["tokens"])
    _ticks(axes.yaxis, [1, 10, 100, 1000])
    _finish(figure, axes, f"Memory of cross-entropy and its gradients, {figures['vocab']:,} words", path)


def draw_errors(figures: dict[str, Any], path: Path) -> None:
    """Draw the error of the weights' gradient against the number of slices."""
    figure, axes = _pyplot().subplots(figsize=(7.2, 4.2), layout="constrained")
    last: dict[float, list[tuple[float, str]]] = {}
    for name, values in figures["errors"].items():
        percent = [value and 100 * value for value in values]
        ours, narrow = name.startswith("tile"), "sums in" in name
        thick = ours and not narrow
        style = {"color": BLUE if ours else GREY, "lw": 3 if thick else 1.2, "ls": "--" if narrow else "-"}
        axes.plot(figures["slices"], percent, zorder=3 if ours else 1, **style)
        last.setdefault(round(percent[-1], 1), []).append((percent[-1], name.partition(",")[0] if thick else name))
    for ends in last.values():
        names = list(dict.fromkeys(name for _, name in ends))
        height, ours = statistics.mean(end for end, _ in ends), "tile" in names
        text = "\n".join(textwrap.wrap(", ".join(names), 30))
        color = BLUE if ours else "0.3"
        axes.annotate(
            text,
            (figures["slices"][-1], height),
            (9, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=10,
        )
    axes.set(xscale="log", ylim=(0, 0.55), xlabel="slices", ylabel="%")
    _ticks(axes.xaxis, figures["slices"])
    _finish(figure, axes, "Relative error of the weights' gradient in bfloat16", path)


def _ticks(axis: Any, values: Sequence[int]) -> None:
    axis.set_ticks(values, [f"{n:,}" for n in values])
    axis.set_ticks([], minor=True)


def draw_losses(figures: dict[str, Any], path: Path) -> None:
    """Draw how many of the ordinary losses each system slices and gets right, and what becomes of the others."""
    figure, axes = _pyplot().subplots(figsize=(7.2, 2.6), layout="constrained")
    kinds = {"right": ("sliced and right", BLUE), "whole": ("right, all logits made", "0.75")}
    kinds |= {"failed": ("fails", "0.45"), "wrong": ("wrong", RED)}
    rows = list(figures["losses"].items())[::-1]
    counted = [Counter(result.partition(":")[0] for result in results.values()) for _, results in rows]
    left = [0] * len(rows)
    for kind, (label, color) in kinds.items():
        bars = axes.barh(
            [name for name, _ in rows], [one[kind] for one in counted], left=left, color=color, label=label
        )
        axes.bar_label(bars, [str(one[kind] or "") for one in counted], label_type="center", color="white")
        left = [a + one[kind] for a, one in zip(left, counted, strict=True)]
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.12), frameon=False, fontsize=10)
    axes.set_xlim(0, len(KIND))
    _finish(figure, axes, f"{len(KIND)} ordinary losses of one's own", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="write results/figures.json beside this file")
    file = compare.RESULTS / "figures.json"
    if parser.parse_args().measure:
        file.write_text(json.dumps(measure(), indent=1) + "\n")
    figures = json.loads(file.read_text())
    draw_memory(figures["memory"], PICTURES / "compare_memory.svg")
    draw_errors(figures["errors"], PICTURES / "compare_errors.svg")
    draw_losses(json.loads((compare.RESULTS / "losses.json").read_text()), PICTURES / "compare_losses.svg")


if __name__ == "__main__":
    main()
