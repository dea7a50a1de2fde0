"""The end of a run: its summary, its pictures, its weights, and the last words."""

import json
import sys
from pathlib import Path
from typing import Any

from experiments import configs
from experiments.results import plots
from experiments.results.metrics import Recorder, describe
from experiments.runtime import distributed, hardware, manifest
from experiments.runtime.numbers import size
from zoo.adapters import lora


def save_weights(model: Any, config: configs.Resolved, directory: Path) -> list[str]:
    """Write the trained weights where they are wanted, any adapter merged and also by itself; return the folders."""
    if not config.save.final:
        return []
    adapted = isinstance(config.adapter, configs.Lora)
    folders = ["weights/", "adapter/"] if adapted else ["weights/"]
    model = distributed.gathered(model)
    if not distributed.first():
        return folders
    import zoo
    from experiments.data.tokenizer import copy_tokenizer
    from zoo import adapters

    if adapted:
        adapters.save(model, directory / "adapter")
        model = lora.merge(model)
    zoo.save(model, directory / "weights", source=config.model.weights)
    if not isinstance(config.data, configs.Tokens):  # of ids nobody says what they are
        copy_tokenizer(config.data.tokenizer, directory / "weights")
    return folders


def leave(directory: Path, recorder: Recorder, known: dict[str, Any], seconds: float) -> None:
    """Close the records, and of a run that has trained draw the pictures and write the summary, however it ended."""
    if not distributed.first():
        return
    actions = [recorder.close]
    if any(record.loss is not None for record in recorder.records):
        actions.append(lambda: plots.draw(directory, recorder.records, known))
        actions.append(lambda: _summarise(directory, recorder, known, seconds))
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
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def words(directory: Path, recorder: Recorder, known: dict[str, Any], saved: list[str], seconds: float) -> str:
    """Return what is said at the end: how well it went, and where everything is.

    Args:
        directory: the run's.
        recorder: has its records.
        known: what `planning.table.facts` said of it.
        saved: the folders of weights.
        seconds: how long it took.
    """
    held_out = [record for record in recorder.records if record.held_out_loss is not None]
    lines = []
    if len(held_out) > 1:
        what = "pairs" if known["paired"] else "text"
        lines.append(f"  held-out {what} before: {describe(held_out[0])}, after: {describe(held_out[-1])}")
    lines.append(f"  peak memory {size(hardware.used_memory()[1])}, {seconds:.0f} s altogether")
    if (other := plots.beside(recorder.records, known["weights"])) and known["process"]:
        lines.append(f"  of it about {size(other)} of Python, JAX and its compiler")
        lines.append(f"  and {size(known['total'])} as planned of a step")
    files = ", ".join(["metrics.jsonl", "metrics.csv", "summary.json", "config.yaml", "*.png", *saved])
    return "\n".join([*lines, f"Everything is in {directory}/: {files}"])
