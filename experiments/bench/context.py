"""The longest sequence that a model can be trained on, on hardware that is not here: layers cut, kernels by config.

    python -m experiments.bench context             # compiles, prints the table, writes context.json beside this file
    python -m experiments.bench context h100-1      # some rows anew, the others as they are there
    python -m experiments.bench context h100-1 model=qwen3_8b    # with overrides of run.py; writes nothing

Llama-3.1-8B, all of its parameters, one sequence, exact dense attention: the real step, compiled ahead of time. What
counts is the compiler's own memory of each device, and that of the host apart, no more than hosts have, as far as
`planning.targets` knows. Lengths are multiples of 131,072, of which one fits and the next does not. Products are those
of the compiled step and its kernels, over those of two forward passes and a backward pass. A length takes some minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments.bench.made import made_with
from experiments.commandline import schema
from experiments.commandline.console import GIB
from experiments.commandline.overrides import with_overrides
from experiments.planning import ahead, targets
from experiments.planning.cost import crowded
from experiments.planning.resolve import resolve
from experiments.planning.targets import TargetError
from experiments.runtime import meshes
from experiments.step.build import checked
from transforms import TileError
from zoo.accounting import recomputed_flops

FIGURES = Path(__file__).with_suffix(".json")
STEP = 2**17  # tokens
SETTING = ["model=llama3_1_8b", "batch_size=1", "tiling=long", "optimizer=sgd", "hardware.param_dtype=bfloat16"]
ROWS: dict[str, tuple[str, list[str], int]] = {  # what it is, with which words, and a guess in steps
    "h100-1": ("one H100, 80 GB", [], 12),
    "h200-1": ("one H200, 141 GB", [], 26),
    "h100-8": ("eight H100, 80 GB", [], 64),
    "h100-8-half": ("eight H100, every second layer's input", ["remat.policy=offload/2"], 80),
    "h100-1-lora": ("one H100, LoRA", ["adapter=lora"], 15),
    "h100-1-sqrt": ("one H100, nothing in host memory", ["remat=sqrt"], 3),
    "h100-1-host": ("one H100, parameters in host memory", ["hardware.offload=params"], 18),
    "v5p-2": ("one TPU v5p", [], 4),
    "v5e-8": ("eight TPU v5e", [], 3),
}
STATED = {  # by their authors, of Llama-8B, full fine-tuning, exact attention
    "one H100, 80 GB": "ALST 0.5M (https://arxiv.org/abs/2506.13996), parameters and optimizer in host memory too",
}


def measure(target: str, tokens: int, words: list[str]) -> dict[str, float | None] | None:
    """Return the GiB of a device and of the host that a step of so many tokens takes; None where it does not fit.

    And its products: as many times those of two forward passes and a backward pass.
    """
    device = targets.find(target).device
    found, _ = schema.compose(with_overrides([*SETTING, f"compile_for={target}", f"seq_len={tokens}"], words))
    config = resolve(found, device)
    with meshes.spread(config.mesh, device.described):
        programs = checked(config)
    try:
        cost = ahead.measure(programs, device)
    except ahead.OutOfMemoryError:
        return None
    devices = config.mesh.devices
    if crowded(cost.host, config, device) is not None:
        return None
    least = recomputed_flops(config.model.config, config.batch_size, config.seq_len)
    products = None if cost.flops is None else round(cost.flops * devices / least, 2)
    return {"device": round(cost.peak / GIB, 2), "host": round(cost.host * devices / GIB, 1), "products": products}


def longest(fits: Callable[[int], Any], guess: int) -> tuple[int, Any]:
    """Return the longest sequence that fits, and what `fits` says of it; 0 and None where the shortest does not.

    Args:
        fits: of a number of tokens, None if it does not fit.
        guess: in steps, about how many do: the nearer, the fewer lengths are tried.
    """
    good, found, bad, stride = 0, None, None, 1
    now = guess
    while bad is None or bad - good > 1:
        if (said := fits(now * STEP)) is not None:
            good, found = now, said
        else:
            bad = now
        if bad is None:
            now, stride = good + stride, 2 * stride
        elif good:
            now = (good + bad) // 2
        else:
            now, stride = max(bad - stride, bad // 2), 2 * stride
    return good * STEP, found


def table(figures: dict[str, Any]) -> str:
    """Return the README's table."""
    lines = ["| | tokens | of a device | in host memory | products | others state |", "|---|---|---|---|---|---|"]
    for name, row in figures["rows"].items():
        about, *_ = ROWS[name]
        cells = f"**{row['tokens']:,}**", f"{row['device']} GiB", f"{row['host']} GiB", row["products"]
        lines.append(f"| {about} | {' | '.join(map(str, cells))} | {STATED.get(about, '')} |")
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """Print each length as it is tried, then the table."""
    asked = [word for word in words if word in ROWS]
    overrides = [word for word in words if word not in ROWS]
    others: dict[str, Any] = json.loads(FIGURES.read_text()) if asked and not overrides else {}
    if others and others["made"]["jax"] != jax.__version__:
        sys.exit(f"error: the other rows were made with JAX {others['made']['jax']}. Make all of them anew.")
    rows = {}
    for name in asked or ROWS:
        target, own = "-".join(name.split("-")[:2]), [*ROWS[name][1], *overrides]

        def fits(tokens: int, target: str = target, own: list[str] = own) -> dict[str, float | None] | None:
            try:
                found = measure(target, tokens, own)
            except (TileError, TargetError) as error:
                sys.exit(f"error: {error}")
            said = "does not fit" if found is None else f"{found['device']} GiB, of the host {found['host']}"
            print(f"{target} {' '.join(own)} {tokens:,}: {said}", flush=True)
            return found

        tokens, found = longest(fits, ROWS[name][2])
        if found is not None:
            rows[name] = {"tokens": tokens, **found}
    command = "python -m experiments.bench context"
    figures = {"command": command, "setting": SETTING, "made": made_with(), "rows": rows}
    if others:
        merged = others["rows"] | rows
        figures = others | {"rows": {name: merged[name] for name in ROWS if name in merged}}
    print(table(figures))
    if not overrides:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
