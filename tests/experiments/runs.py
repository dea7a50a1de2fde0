"""What tests of whole runs share: a run that takes a second and what it leaves behind; conftest.py has `start`."""

import json

from tests.quick import UNOPTIMISED_RUN

MICRO = [
    "data=pydoc",
    "model.vocab_size=300",
    "model.num_layers=1",
    "model.embed_dim=32",
    "model.mlp_dim=64",
    "model.num_heads=2",
    "model.head_dim=16",
    "batch_size=4",
    "seq_len=32",
    "steps=4",
    "eval.batches=2",
    *UNOPTIMISED_RUN,
]
# Several runs in one process, which reads JAX once: the words of each are one argument of `python -c`.
SEVERAL = "import sys; from experiments.run import main; sys.exit(any(main(run.split()) for run in sys.argv[1:]))"
FILES = ["config.yaml", "loss.png", "memory.png", "metrics.csv", "metrics.jsonl", "plan.json", "rate.png", "run.json"]
FILES += ["speed.png", "summary.json"]


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
