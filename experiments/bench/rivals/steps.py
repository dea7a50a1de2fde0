"""A small Llama's training step and its decoding: run.py's, one's own in JAX, and other frameworks', taking turns.

    python -m experiments.bench steps
    python -m experiments.bench steps --dtype bfloat16      # parameters in float32, computed in bfloat16

All begin with the same weights and train on the same tokens with AdamW, so their losses are the same. Temporary memory
is the compiler's count for JAX, gradients included, and for PyTorch how far resident memory rises in a step. Start-up
is from an empty process to the loss of the first step. Decoding is greedy text after a prompt of 32 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.made import made_with
from experiments.bench.rivals import environments
from experiments.bench.rivals.compare import MIB, Worker, told
from experiments.bench.rivals.table import SYSTEMS, System
from experiments.planning.hlo import dot_flops

HERE = "by hand in JAX"
STEPS = {
    "run.py, untiled": System(None, "step_jax", "run_untiled"),
    "run.py, tile": System(None, "step_jax", "run_tiled"),
    HERE: System(None, "step_jax", "by_hand"),
    "Levanter": SYSTEMS["Levanter"]._replace(side="step_jax", build="levanter"),
    "transformers": SYSTEMS["TRL"]._replace(side="step_torch", build="eager"),
    "transformers, compiled": SYSTEMS["TRL"]._replace(side="step_torch", build="compiled"),
}
DECODERS = ("run.py, untiled", "transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 32768,
    "num_layers": 4,
    "embed_dim": 256,
    "mlp_dim": 768,
    "num_heads": 4,
    "num_kv_heads": 2,
}
SIZES |= {"head_dim": 64, "context_length": 512}
ROWS, LENGTH = 4, 256
TRAINED, TOKENS = 3, 64


def saved(folder: str) -> None:
    """Write a small Llama with random weights as a Hugging Face folder."""
    import jax

    import zoo

    config = zoo.LlamaConfig(**SIZES)
    zoo.save(zoo.Llama.init(config, key=jax.random.key(0)), folder)


def measure(dtype: str, rounds: int) -> dict[str, Any]:
    """All figures, and what they were measured with."""
    rows: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as home:
        folder, ids, prompt = _inputs(home)
        for name, system in STEPS.items():
            try:
                environments.python_of(system)
                began = time.perf_counter()
                worker = Worker(system)
                told = worker("load", folder=folder, ids=ids, dtype=dtype)
                losses = [worker("step")["loss"]]
                startup = time.perf_counter() - began
                losses += [worker("step")["loss"] for _ in range(TRAINED - 1)]
                if "hlo" not in told:
                    told |= worker("memory")
            except environments.Missing as problem:
                missing[name] = str(problem)
                continue
            workers[name] = worker
            flops = dot_flops(told["hlo"]) if "hlo" in told else None
            rows[name] = {"temporaries": told["temporaries"], "flops": flops, "losses": losses, "startup": startup}
            rows[name]["versions"] = worker.versions
        seconds = _in_turn({name: lambda w=worker: w("step") for name, worker in workers.items()}, rounds)
        how = {"folder": folder, "ids": prompt, "dtype": dtype, "tokens": TOKENS}
        decoders = {name: workers[name] for name in DECODERS if name in workers}
        text = {name: worker("decode", **how)["ids"] for name, worker in decoders.items()}
        speeds = _in_turn({name: lambda w=worker: w("decode", **how) for name, worker in decoders.items()}, rounds)
    for worker in workers.values():
        worker.close()
    for name, row in rows.items():
        row["time"] = round(seconds[name] / seconds[HERE], 3)
        row["startup"] = round(row["startup"] / rows[HERE]["startup"], 2)
    decode: dict[str, Any] = {"same text": len({json.dumps(one) for one in text.values()}) == 1}
    decode |= {"speed": round(speeds[DECODERS[1]] / speeds[DECODERS[0]], 2)} if len(speeds) == 2 else {}
    sizes = {**SIZES, "batch_size": ROWS, "seq_len": LENGTH, "dtype": dtype, "rounds": rounds, "cores": os.cpu_count()}
    return {"made": made_with(), **sizes, "systems": rows, "decode": decode, "missing": missing}


def counted(dtype: str) -> dict[str, dict[str, int]]:
    """What compilers count of the steps that need no environment of their own."""
    found = {}
    with tempfile.TemporaryDirectory() as home:
        folder, ids = _inputs(home)[:2]
        for name, system in STEPS.items():
            if system.environment is None:
                worker = Worker(system)
                told = worker("load", folder=folder, ids=ids, dtype=dtype)
                found[name] = {"temporaries": told["temporaries"], "flops": dot_flops(told["hlo"])}
                worker.close()
    return found


def _inputs(home: str) -> tuple[str, str, str]:
    """Write a model, what it is trained on and a prompt to a folder; return where they are."""
    folder, ids, prompt = (str(Path(home) / name) for name in ("model", "ids.npy", "prompt.npy"))
    saved(folder)
    drawn = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, LENGTH)).astype(np.int32)
    np.save(ids, drawn)
    np.save(prompt, drawn[:1, :32])
    return folder, ids, prompt


def _in_turn(calls: dict[str, Any], rounds: int) -> dict[str, float]:
    """Medians of the seconds that each tells, over rounds in which they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(call()["seconds"])
    return {name: statistics.median(some) for name, some in seconds.items()}


def table(figures: dict[str, Any]) -> str:
    """The figures as a table in Markdown."""
    what = (
        "{num_layers} layers, D={embed_dim} V={vocab_size}, {batch_size} sequences of {seq_len}, {dtype}, {cores} cores"
    )
    lines = [
        f"{what.format(**figures)}.",
        "",
        "| | time | temporary MiB | GFLOP of products | start-up | loss of step 3 |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, row in figures["systems"].items():
        flops = "-" if row["flops"] is None else f"{row['flops'] / 1e9:.1f}"
        bold = f"**{name}**" if name.startswith("run.py") else name
        cells = f"{row['time']:.2f} | {row['temporaries'] / MIB:.0f} | {flops} | {row['startup']:.1f}"
        lines.append(f"| {bold} | {cells} | {row['losses'][-1]:.5f} |")
    decode = figures["decode"]
    if "speed" in decode:
        same = "the same text" if decode["same text"] else "another text"
        lines.append(f"\nDecoding: {decode['speed']:.2f} times the tokens per second of transformers, {same}.")
    lines += [f"\nNot measured: {name}: {why}" for name, why in figures["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    told(parser, lambda args: measure(args.dtype, args.rounds), table, "steps")


if __name__ == "__main__":
    main()
