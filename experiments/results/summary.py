"""The end of a run: its summary, its pictures, its weights, and the last words."""

import json
import sys
from pathlib import Path
from typing import Any

from experiments import configs
from experiments.planning import table
from experiments.planning.preflight import Plan
from experiments.results import plots
from experiments.results.metrics import Recorder, describe
from experiments.runtime import distributed, hardware, manifest
from zoo.adapters import lora


def save_weights(model: Any, config: configs.Resolved, directory: Path) -> None:
    """Write the trained weights, any adapter merged into them and also by itself, with their tokenizer."""
    model = distributed.gathered(model)
    if not distributed.first():
        return
    import zoo
    from experiments.data.tokenizer import copy_tokenizer
    from zoo import adapters

    if isinstance(config.adapter, configs.Lora):
        adapters.save(model, directory / "adapter")
        model = lora.merge(model)
    zoo.save(model, directory / "weights", source=config.model.weights)
    if not isinstance(config.data, configs.Tokens):  # of ids nobody says what they are
        copy_tokenizer(config.data.tokenizer, directory / "weights")


def leave(directory: Path, recorder: Recorder, plan: Plan, config: configs.Resolved, seconds: float) -> None:
    """Close the records, and of a run that has trained draw the pictures and write the summary, however it ended."""
    if not distributed.first():
        return
    actions = [recorder.close]
    if any(record.loss is not None for record in recorder.records):
        actions.append(lambda: plots.draw(directory, recorder.records, plots.facts(plan, config)))
        actions.append(lambda: _summarise(directory, recorder, plan, seconds))
    for action in actions:
        try:
            action()
        except OSError as error:  # what ended the run may be the very same
            print(f"warning: cannot write to {directory}: {manifest.reason(error)}", file=sys.stderr)


def _summarise(directory: Path, recorder: Recorder, plan: Plan, seconds: float) -> None:
    """Write summary.json: what one would compare between runs."""
    steps = [record for record in recorder.records if record.loss is not None]
    speeds = sorted(record.tokens_per_second for record in steps if record.tokens_per_second is not None)
    held_out = [record for record in recorder.records if record.held_out_loss is not None]
    summary = {
        "params": plan.params,
        "flops_per_step": plan.flops,
        "planned_bytes": plan.memory.total,
        "planned_bytes_untiled": plan.untiled and plan.untiled.total,
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


def words(directory: Path, recorder: Recorder, plan: Plan, config: configs.Resolved, seconds: float) -> str:
    """Return what is said at the end: how well it went, and where everything is."""
    held_out = [record for record in recorder.records if record.held_out_loss is not None]
    lines = []
    if len(held_out) > 1:
        what = "pairs" if config.paired else "text"
        lines.append(f"  held-out {what} before: {describe(held_out[0])}, after: {describe(held_out[-1])}")
    lines.append(f"  peak memory {table.size(hardware.used_memory()[1])}, {seconds:.0f} s altogether")
    if (other := plots.beside(recorder.records, plan.memory.weights)) and config.hardware.platform == "cpu":
        lines.append(f"  of it about {table.size(other)} of Python, JAX and its compiler")
        lines.append(f"  and {table.size(plan.memory.total)} as planned of a step")
    files = "metrics.jsonl, metrics.csv, summary.json, config.yaml, *.png"
    weights = ", weights/" if config.save.final else ""
    weights += ", adapter/" if config.save.final and isinstance(config.adapter, configs.Lora) else ""
    return "\n".join([*lines, f"Everything is in {directory}/: {files}{weights}"])
