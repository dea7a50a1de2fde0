"""What a step of the engine takes, computes, reads and sends, compiled for devices that are not here.

    python -m experiments.bench decode                       # every row; writes decode.json beside this file
    python -m experiments.bench decode h100-1 bfloat16       # some; writes nothing

A decode step: 16 rows, each with a text of 2,048 tokens, on pages of 64, of which there are 4 GiB on each device, or 1.
Temporaries are the compiler's own count, beside that pool. Products are those of the program, loops times their turns,
over `2 P T` and attention to the pages that are walked; what a compiler makes no product of, as GPUs' of few queries,
is not in them. Bytes read are counted in the program's text, over those of weights (of a table that is only looked up,
none) and of the texts' pages.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from experiments.bench.made import made_with
from experiments.commandline import schema
from experiments.planning import hlo, targets
from experiments.runtime import meshes
from transforms.sharding import AXES, make_mesh
from zoo import accounting, model_class
from zoo.engine.engine import Settings, lowered
from zoo.engine.sizes import Plan
from zoo.quantised import quantise

FIGURES = Path(__file__).with_suffix(".json")
MIB = 2**20
LIVE, PAGE, ROWS = 2048, 64, 16
KINDS: dict[str, tuple[str | None, str | None]] = {  # what is asked for -> weights, keys and values
    "bfloat16": (None, None),
    "int8 pages": (None, "int8"),
    "int8 weights": ("int8", None),
}
TABLE = [  # hardware, model, what is asked for, MiB of pages of each device
    ("h100-1", "llama3_2_1b", "bfloat16", 4096),
    ("h100-1", "llama3_2_1b", "bfloat16", 1024),
    ("h100-1", "llama3_2_1b", "int8 pages", 4096),
    ("h100-1", "llama3_2_1b", "int8 weights", 4096),
    ("h100-8", "llama3_1_8b", "bfloat16", 4096),
    ("v5e-1", "llama3_2_1b", "bfloat16", 4096),
    ("v5e-8", "llama3_1_8b", "bfloat16", 4096),
    ("v5e-1", "llama3_2_1b", "int8 weights", 4096),
]


@dataclass(frozen=True)
class Step:
    """A compiled step.

    Attributes:
        pool: MiB of pages of each device.
        temporaries: MiB beside them.
        products: FLOPs over those of the mathematics.
        read: bytes of arguments that are read, over those of weights and live pages.
        read_mib: what that is of each device.
        again_mib: what is read of temporaries, as far as they are in main memory: those of GPUs fit their caches.
        sent: what devices exchange: operation, bytes, times.
    """

    pool: float
    temporaries: float
    products: float
    read: float
    read_mib: float
    again_mib: float
    sent: list[tuple[str, float, int]]


def shapes(config: Any, devices: list[Any], weights: str | None) -> Any:
    """Return a model in bfloat16 of mere shapes, on one device or cut over all."""
    init = lambda key: model_class(config).init(config, key=key, dtype=jnp.bfloat16)
    model = eqx.filter_eval_shape(init, jax.random.key(0))
    if weights is not None:
        model = eqx.filter_eval_shape(lambda model: quantise(model, weights), model)
    if len(devices) == 1:
        where = SingleDeviceSharding(devices[0])
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), model)
    with jax.set_mesh(make_mesh(data=1, model=len(devices), devices=devices)):
        return meshes.abstract(model, {letter: axes for letter, axes in AXES.items() if letter != "D"})


def _bytes(tree: Any) -> int:
    """Bytes of a device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def measure(target: str, name: str, kind: str, mib: int, width: int = 1) -> Step:
    """Compile a step whose pool has about so many MiB on each device, and count."""
    weights, kept = KINDS[kind]
    devices = list(targets.find(target).devices)
    config = schema.compose([f"model={name}"], "generate")[0].model.config
    model = shapes(config, devices, weights)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (1 if kept else 2)
    tokens = mib * MIB * len(devices) // per_token // PAGE * PAGE
    settings = Settings(length=4096, rows=ROWS, width=width, page=PAGE, tokens=tokens, kv_dtype=kept)
    plan = Plan.of(model, settings, jnp.bfloat16)
    compiled = lowered(model, settings, dtype=jnp.bfloat16).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    slots = ROWS * width
    turns = {"pages": LIVE // PAGE, "blocks": math.ceil(slots / plan.block), "rows": 0}
    # One token sees one key, itself: in its place come all that are live.
    products = accounting.forward_flops(config, slots, 1)
    products += 4 * slots * (LIVE - 1) * config.num_layers * config.num_heads * config.head_dim
    pool = _bytes(plan.state.pool)
    live = pool * ROWS * LIVE // (tokens + PAGE)
    needed = _bytes(model) - (0 if model.head is None else _bytes(model.embed)) + live
    read = hlo.bytes_read(text, turns, memory.temp_size_in_bytes + 1)
    sent = hlo.collectives(text, len(devices), turns)
    return Step(
        pool=round(pool / MIB, 1),
        temporaries=round(memory.temp_size_in_bytes / MIB, 2),
        products=round(hlo.dot_flops(text, turns) * len(devices) / products, 3),
        read=round(read / needed, 3),
        read_mib=round(read / MIB, 1),
        again_mib=round((hlo.bytes_read(text, turns) - read) / MIB, 1),
        sent=[(one.op, round(one.bytes), one.times) for one in sent],
    )


def main(words: list[str]) -> None:
    """Print each row as it is compiled."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    rows = {}
    print("| | | pool | temporaries | of the pool | products | read | of what is needed | of temporaries | sends |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for target, name, kind, mib in TABLE:
        if not {target, kind, str(mib)} >= set(words):
            continue
        step = measure(target, name, kind, mib)
        rows[f"{target} {name} {kind} {mib}"] = vars(step)
        totals: Counter[tuple[str, float]] = Counter()
        for what, size, times in step.sent:
            totals[what, size] += times
        sent = ", ".join(f"{times} {what} of {size / MIB:.2f}" for (what, size), times in totals.items())
        share = f"{100 * step.temporaries / step.pool:.2f}%"
        print(
            f"| {target} {name} | {kind} | {step.pool} | {step.temporaries} | {share} | {step.products} | "
            f"{step.read_mib} | {step.read} | {step.again_mib} | {sent} |",
            flush=True,
        )
    if not words:
        figures = {"command": "python -m experiments.bench decode", "made": made_with(), "rows": rows}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
