"""Cross-entropy of a linear head with its gradients: this project and what one would otherwise use, taking turns.

    python -m experiments.bench rivals                      # all systems, N=2048 D=512 V=32768 in float32, 8 slices
    python -m experiments.bench rivals --dtype bfloat16 --write rivals_bfloat16
    python -m experiments.bench rivals --only tile "scan + checkpoint" --rounds 9
    python -m experiments.bench rivals --device gpu --tokens 8192 --embed 2304 --vocab 256000 --dtype bfloat16

Each runs in an environment of its own, made on first use, or with `--here` in the one that runs this. Temporary memory
is the compiler's own count for JAX, and for PyTorch how far memory that is held rises in a step beyond what is there
before and its results. Products are counted in the compiled program, or by PyTorch's counter of operations where it
sees them, in units of one (2 N D V); errors are relative to the same loss in float64. Times are ratios of medians, on
CPUs over rounds in which the systems take turns, on a GPU one after the other, each alone on it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.made import made_with
from experiments.bench.rivals import environments
from experiments.bench.rivals.table import SYSTEMS, System
from experiments.planning.hlo import dot_flops

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
RESULTS = FOLDER / "results"
MIB = 2**20


class Worker:
    """A system in a process of its own."""

    def __init__(self, system: System, device: str = "cpu", here: bool = False, **environment: str):
        python = sys.executable if here else environments.python_of(system, device)
        self.versions = environments.versions(python, system)
        inherited = {k: v for k, v in os.environ.items() if here or k != "PYTHONPATH"}
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        environment |= (
            {"JAX_PLATFORMS": "cuda"} if device == "gpu" else {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        )
        if system.environment is None:
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
        self.log = tempfile.NamedTemporaryFile("w+", prefix="worker-", suffix=".log")  # noqa: SIM115
        words = [python, str(FOLDER / "worker.py"), system.side, system.build]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process = subprocess.Popen(words, env=inherited | environment, cwd=tempfile.gettempdir(), **pipes)

    def __call__(self, do: str, **command: Any) -> dict[str, Any]:
        """Carry out a command.

        Raises:
            environments.Missing: the system cannot.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps({"do": do, **command}), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            words = Path(self.log.name).read_text().strip().splitlines() or ["it ended"]
            raise environments.Missing(words[-1][:200])
        answer = json.loads(line)
        if "error" in answer:
            raise environments.Missing(answer["error"])
        return answer

    def close(self) -> None:
        """End it, if it has not been."""
        if self.log.closed:
            return
        self.process.kill()
        self.process.communicate()
        self.log.close()


def started(names: Sequence[str], device: str = "cpu", here: bool = False) -> tuple[dict[str, Worker], dict[str, str]]:
    """The workers of some systems, and why others have none."""
    workers: dict[str, Worker] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            workers[name] = Worker(SYSTEMS[name], device, here)
        except environments.Missing as error:
            missing[name] = str(error)
    return workers, missing


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(path, **arrays)  # ty: ignore[invalid-argument-type]


def draw(tokens: int, embed: int, vocab: int, dtype: str) -> dict[str, np.ndarray]:
    """Hidden states, weights and labels; the first two are numbers of `dtype`."""
    rng = np.random.default_rng(0)
    h = rng.standard_normal((tokens, embed), np.float32)
    w = rng.standard_normal((embed, vocab), np.float32) / np.float32(embed**0.5)
    if dtype == "bfloat16":  # drop half of the digits
        h, w = ((x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in (h, w))
    return {"h": h, "w": w, "y": rng.integers(0, vocab, tokens)}


def error(found: np.ndarray, true: np.ndarray) -> float:
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def of_dtype(dtype: str, names: Sequence[str] = tuple(SYSTEMS), device: str = "cpu") -> list[str]:
    """Those of some systems that are something of their own in a dtype, and run on a device."""
    return [name for name in names if dtype in SYSTEMS[name].dtypes and device in SYSTEMS[name].devices]


def measure(
    names: Sequence[str],
    sizes: tuple[int, int, int],
    dtype: str,
    slices: int,
    rounds: int,
    device: str = "cpu",
    here: bool = False,
) -> dict[str, Any]:
    """All figures of some systems, and what they were measured with.

    Args:
        names: of `SYSTEMS`.
        sizes: tokens, embed, vocab.
        device: where they run: "cpu", where they take turns, or "gpu", which each has for itself.
        here: whether all run in the environment that runs this.

    Raises:
        environments.Missing: JAX cannot compute on the device.
    """
    tokens, embed, vocab = sizes
    workers, missing = started(names, device, here)
    rows: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        problem = Problem(Path(folder), sizes, dtype, slices)
        where = problem.solve(device)
        for name, worker in workers.items():
            try:
                row = problem.counted(worker)
                seconds[name] = [worker("step")["seconds"] for _ in range(rounds if device == "gpu" else 0)]
                rows[name] = row
            except (environments.Missing, ValueError) as reason:
                missing[name] = str(reason)
            if device == "gpu" or name in missing:
                worker.close()
        for _ in range(0 if device == "gpu" else rounds):
            for name in seconds:
                seconds[name].append(workers[name]("step")["seconds"])
    for worker in workers.values():
        worker.close()
    medians = {name: statistics.median(each) for name, each in seconds.items() if each}
    for name, row in rows.items():
        one = medians.get("JAX, untiled")
        row["time"] = None if one is None else round(medians[name] / one, 2)
        row |= {"milliseconds": round(1000 * medians[name], 1)} if rounds and device == "gpu" else {}
    made = {"tokens": tokens, "embed": embed, "vocab": vocab, "dtype": dtype, "slices": slices, "rounds": rounds}
    where = where if device == "gpu" else f"{os.cpu_count()} cores"
    return {"made": made_with(), **made, "where": where, "systems": rows, "missing": missing}


class Problem:
    """A head's operands, and what its loss and gradients are, in a folder that workers read."""

    def __init__(self, folder: Path, sizes: tuple[int, int, int], dtype: str, slices: int):
        self.inputs, self.outputs = folder / "inputs.npz", folder / "outputs.npz"
        self.dtype, self.slices, self.product = dtype, slices, 2 * math.prod(sizes)
        tokens, _, vocab = sizes
        self.every = max(1, tokens * vocab // 2**27)  # of a large gradient some words are compared
        save(self.inputs, draw(*sizes, dtype))

    def solve(self, device: str) -> str:
        """Compute in float64 what is right, on a device, and return which it is."""
        exact = Worker(SYSTEMS["JAX, untiled"], device, JAX_ENABLE_X64="1")
        try:
            told = exact("oracle", inputs=str(self.inputs), to=str(self.outputs), every=self.every)
        except environments.Missing as reason:
            raise environments.Missing(f"JAX cannot compute on a {device} here: {reason}") from None
        finally:
            exact.close()
        self.true = dict(np.load(self.outputs))
        return told["device"]

    def counted(self, worker: Worker) -> dict[str, Any]:
        """What is counted of a system: memory, products, and errors."""
        told = worker("load", inputs=str(self.inputs), dtype=self.dtype, slices=self.slices)
        flops = dot_flops(told["hlo"]) if "hlo" in told else told["flops"]
        worker("step")
        worker("results", to=str(self.outputs), every=self.every)
        found = np.load(self.outputs)
        return {
            "temporaries": told["temporaries"],
            "products": None if flops is None else round(flops / self.product, 3),
            **{f"error of {what}": error(found[what], true) for what, true in self.true.items()},
            "versions": worker.versions,
        }


def table(figures: dict[str, Any]) -> str:
    """The figures as a table in Markdown, the least memory first."""
    what = "N={tokens} D={embed} V={vocab} {dtype}, {slices} slices, {where}".format(**figures)
    lines = [f"{what}.", "", "| | temporary MiB | products | time | error of the loss | of dH | of dW |"]
    lines += ["|---|---|---|---|---|---|---|"]
    dash = lambda value, text: "-" if value is None else format(value, text)
    for name, row in sorted(figures["systems"].items(), key=lambda item: item[1]["temporaries"]):
        errors = " | ".join(f"{row[f'error of {what}']:.1e}" for what in ("loss", "dh", "dw"))
        bold = f"**{name}**" if name.startswith("tile") else name
        time = f"{row['milliseconds']:.0f} ms" if "milliseconds" in row else dash(row["time"], ".2f")
        figure = f"{row['temporaries'] / MIB:.1f} | {dash(row['products'], '.2f')} | {time}"
        lines.append(f"| {bold} | {figure} | {errors} |")
    lines += [f"\nNot measured: {name}: {why}" for name, why in figures["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 2048), ("embed", 512), ("vocab", 32768), ("slices", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, metavar="SYSTEM", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--here", action="store_true", help="run all in this environment, and install nothing")

    def asked(args):
        sizes = (args.tokens, args.embed, args.vocab)
        names = args.only or of_dtype(args.dtype, device=args.device)
        try:
            return measure(names, sizes, args.dtype, args.slices, args.rounds, args.device, args.here)
        except environments.Missing as error:
            parser.error(str(error))

    told(parser, asked, table, "rivals")


def told(parser: argparse.ArgumentParser, measure: Callable[..., Any], table: Callable[..., str], word: str) -> None:
    """Measure what a command line asks for, print it as a table, and write the figures where that is asked for."""
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--write", metavar="NAME", help="write results/NAME.json beside this file")
    args = parser.parse_args()
    figures = measure(args)
    print(table(figures))
    if args.write:
        figures = {"command": f"python -m experiments.bench {word} {shlex.join(sys.argv[1:])}", **figures}
        (RESULTS / f"{args.write}.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
