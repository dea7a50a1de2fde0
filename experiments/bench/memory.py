"""Temporary memory of a head and its loss against the number of tokens: the README's first picture.

    python -m experiments.bench memory                # compiles, prints the table, writes memory.json beside this file
    python -m experiments.bench memory --draw FILE    # draws the committed figures

Gemma-2 2B's head, D=2304 and V=256,000, in float32 with plain cross-entropy: value and gradients of hidden states and
table. What is counted is the compiler's own `memory_analysis()`, beyond arguments and results; nothing is run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from experiments.bench.made import made_with
from transforms import tile

Array = jax.Array
EMBED, VOCAB, ROWS = 2304, 256_000, 512
TOKENS = [1024 << i for i in range(8)]
FIGURES = Path(__file__).with_suffix(".json")


def loss(hidden: Array, table: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, labels).mean()


PROGRAMS: dict[str, Callable[..., Array]] = {
    "untiled": loss,
    f"tile, {ROWS} tokens at a time": tile(loss, (0, None, 0), size=ROWS),
}


def temporaries(fn: Callable[..., Array], tokens: int) -> int:
    """Bytes that the compiled value and gradients take beyond arguments and results."""
    shapes = (
        jax.ShapeDtypeStruct((tokens, EMBED), jnp.float32),
        jax.ShapeDtypeStruct((VOCAB, EMBED), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    analysis = jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def measure() -> dict:
    """All figures, with what they were made by."""
    found = {name: [temporaries(fn, tokens) for tokens in TOKENS] for name, fn in PROGRAMS.items()}
    return {"command": "python -m experiments.bench memory", "made": made_with(), "tokens": TOKENS, "bytes": found}


def draw(figures: dict, path: Path) -> None:
    """Draw memory against tokens, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "memory"  # the same picture has the same bytes
    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    colors = ["#b0413e", "#2c6e9b"]
    for (name, sizes), color in zip(figures["bytes"].items(), colors, strict=True):
        sizes = [size / 2**30 for size in sizes]
        axes.plot(figures["tokens"], sizes, marker="o", markersize=4, color=color)
        axes.annotate(
            name, (figures["tokens"][-1], sizes[-1]), (-8, 8), textcoords="offset points", ha="right", color=color
        )
    axes.axhline(80, color="0.6", linewidth=0.8, linestyle="--")
    axes.annotate(
        "80 GiB card", (figures["tokens"][0], 80), (0, 3), textcoords="offset points", color="0.4", fontsize=8
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(figures["tokens"], [f"{tokens // 1024}k" for tokens in figures["tokens"]])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.set_xlabel("tokens")
    axes.set_ylabel("GiB")
    axes.set_title("Cross-entropy over 256,000 words with its gradients: temporary memory", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(FIGURES.read_text()), args.draw)
        return
    figures = measure()
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{'tokens':>8}" + "".join(f"{name:>32}" for name in figures["bytes"]))
    for i, tokens in enumerate(figures["tokens"]):
        print(f"{tokens:8}" + "".join(f"{sizes[i] / 2**20:28.0f} MiB" for sizes in figures["bytes"].values()))


if __name__ == "__main__":
    main()
