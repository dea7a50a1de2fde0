"""Which of a model's training steps fit a TPU slice that is not here: untiled, and with its head cut into tiles.

    python -m experiments.bench slice               # Gemma-2 2B on a v5e-8, 16,384 tokens of each chip; needs jax[tpu]
    python -m experiments.bench slice compile_for=h100-8 batch_size=128     # any override of run.py

Each row is the real step (AdamW, FSDP, layers checkpointed) compiled ahead of time: the compiler's peak of each device,
or its own words. A row takes minutes.
"""

from __future__ import annotations

import sys

from experiments.commandline import schema
from experiments.commandline.console import size
from experiments.commandline.overrides import with_overrides
from experiments.planning import ahead, targets
from experiments.planning.resolve import resolve
from experiments.runtime import meshes
from experiments.step.build import checked
from transforms import TileError

SETTING = ["compile_for=v5e-8", "model=gemma2_2b", "mesh=fsdp", "batch_size=64", "seq_len=2048", "remat=full"]
SETTING += ["optimizer=adamw"]
ROWS = {"untiled": "tiling.n=none", "n=8": "tiling.n=8", "n=16": "tiling.n=16", "n=32": "tiling.n=32"}


def main(overrides: list[str]) -> None:
    """Print the table, a row as soon as it is compiled."""
    words = with_overrides(SETTING, overrides)
    config, _ = schema.compose(words)
    device = targets.find(config.compile_for).device
    print(" ".join(words))
    print(f"\n| head | peak of each device, of {size(device.memory)} | each device sends |\n|---|---|---|")
    for name, change in ROWS.items():
        run = resolve(schema.compose([*words, change])[0], device)
        with meshes.spread(run.mesh, device.described):
            programs = checked(run)
        try:
            cost = ahead.measure(programs, device)
            sent = "" if cost.collectives is None else size(sum(one.bytes * one.times for one in cost.collectives))
            row = f"{size(cost.peak)} | {sent}"
        except (ahead.OutOfMemoryError, TileError) as error:
            row = f"{str(error).strip().splitlines()[0]} | "
        print(f"| {name} | {row} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
