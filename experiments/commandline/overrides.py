"""Overrides, the words of a command line: how some replace others; and what a run writes of them, to go on with."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import configs
from experiments.commandline import console, schema, spelling

RUN = "run.json"  # in a run's directory and in each checkpoint: its overrides and its configuration
WHEREABOUTS = ("run", "out", "distributed", "compare")  # where a run is and what is shown of it, not what it is
PINNED = ("steps", "batch_size", "seq_len", "optimizer", "optimizer.learning_rate", "eval.every", "eval.batches")
PINNED += ("hardware.param_dtype", "hardware.compute_dtype")
PINNED += ("model.weights", "objective.reference", "objective.teacher", "data.tokenizer")  # the hub's, by revision


def with_overrides(overrides: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return overrides with some replaced: a group's new option also drops the old option's own values."""
    keys = [change.split("=")[0] for change in changes]
    keys += ["tiling.size", "tiling.budget"] if "tiling.n" in keys else []  # they say the same in other words
    replaced = lambda key: any(key == k or (k in schema.GROUPS and key.startswith(f"{k}.")) for k in keys)
    return [override for override in overrides if not replaced(override.lstrip("+").split("=")[0])] + list(changes)


def variations(overrides: Sequence[str]) -> Callable[[Sequence[str]], configs.Run | None]:
    """Return what composes a run anew with some of its overrides changed; None where there is no such run."""

    def changed(changes: Sequence[str]) -> configs.Run | None:
        try:
            return schema.compose(with_overrides(overrides, changes))[0]
        except schema.ConfigError:
            return None

    return changed


def pinned(overrides: Sequence[str], chosen: Mapping[str, configs.Choice]) -> list[str]:
    """Return overrides with what was chosen for the user added, where another device would choose otherwise."""
    return [*overrides, *(f"{key}={choice.value}" for key, choice in chosen.items() if key in PINNED)]


def resumed(
    overrides: Sequence[str], out: str, folder: Callable[[str, str], Path] = lambda out, run: Path(out) / run
) -> list[str]:
    """Return the overrides of a run that `run=NAME` goes on with, replaced by those that are given now.

    Args:
        overrides: the command line's.
        out: where run directories are, unless the command line says.
        folder: returns a run's directory, given `out` and its name.

    Raises:
        ConfigError: the run's own record of its overrides cannot be read, nor that of a checkpoint.
    """
    said = dict(override.split("=", 1) for override in overrides if "=" in override)
    if "run" not in said:
        return list(overrides)
    before = read(folder(spelling.expanded(said.get("out", out)), said["run"]))
    if before is None:
        return list(overrides)
    kept = [word for word in before["overrides"] if not word.startswith("distributed.")]
    return with_overrides(kept, overrides)


def numbered(overrides: Sequence[str], number: int) -> list[str]:
    """Return the overrides of one run of a sweep: a name that all would share gets a number."""
    return [f"{word}-{number}" if word.startswith("run=") else word for word in overrides]


def read(folder: Path) -> dict[str, Any] | None:
    """Return what a run wrote about itself in its directory, or else in its newest checkpoint; None if it never did.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        saved = [path for path in folder.glob(f"checkpoints/*/{RUN}") if path.parent.name.isdecimal()]
    except OSError as error:
        raise schema.ConfigError(f"cannot look for a run at {folder}: {error.strerror}") from None
    files = [folder / RUN, *sorted(saved, key=lambda path: -int(path.parent.name))]
    problems = []
    for file in files:
        try:
            found = json.loads(file.read_text())
            words, config, sources = found["overrides"], found["config"], found.get("sources", {})
            if isinstance(words, list) and all(isinstance(word, str) for word in words) and isinstance(config, dict):
                return {"overrides": words, "config": config, "data": found.get("data"), "sources": sources}
            problems.append(f"{file} is no record of a run")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{file} cannot be read ({error})")
    if problems:
        remedy = "Copy one back, or give another run=NAME"
        raise schema.ConfigError(f"cannot go on with the run at {folder}: {'; '.join(problems[:2])}. {remedy}")
    return None


@dataclasses.dataclass(frozen=True)
class About:
    """What a run writes about itself.

    Attributes:
        told: the overrides that describe it in full, its configuration and hashes, as JSON holds them.
        text: the same for people, as YAML.
        changed: what differs from before, where it goes on.
    """

    told: dict[str, Any]
    text: str
    changed: Sequence[str] = ()


def about(
    config: configs.Run,
    argv: Sequence[str],
    chosen: Mapping[str, configs.Choice],
    before: dict[str, Any] | None = None,
    **hashes: Any,
) -> About:
    """Return what a run writes about itself: of `data` that it reads, and of the user's own `sources`, the hashes.

    `before` is what it wrote then (`read`), where it goes on.
    """
    told = {"overrides": pinned(argv, chosen), "config": plain(config), **hashes}
    return About(told, dump(config, argv), () if before is None else changed(before, told))


def changed(before: dict[str, Any], about: dict[str, Any]) -> list[str]:
    """Return what differs from before: the configuration, hashes of what is read and of the user's own files.

    Args:
        before: what `read` returned.
        about: what the run writes about itself now.
    """
    drop = lambda values: {key: value for key, value in values.items() if key not in WHEREABOUTS}
    lines = differences(drop(before["config"]), drop(json.loads(json.dumps(about["config"]))))
    if about["data"] is not None and before["data"] not in (None, about["data"]):
        lines.append("data: what it reads is not what it was: another text, tokenizer or split")
    for key, source in about["sources"].items():
        if None not in (source, known := before["sources"].get(key)) and source != known:
            lines.append(f"{key}: the file that the function is in is not what it was")
    return lines


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the differences between two configurations, `key: before -> now` for each."""
    lines = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {old} -> {new}")
    return lines


def plain(value: Any) -> Any:
    """Return dataclasses and enumerations as the plain values that YAML and JSON hold; the kind of a part is named."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = isinstance(value, configs.Data | configs.Objective | configs.Optimizer | configs.Adapter)
        fields = [field.name for field in dataclasses.fields(value) if "beside" not in field.metadata]
        made = {name: plain(getattr(value, name)) for name in fields}
        return {"kind": type(value).__name__, **made} if named else made
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.value if isinstance(value, configs.StrEnum) else value


def dump(config: configs.Run, argv: Sequence[str]) -> str:
    """Return a configuration as YAML, under the command that made it."""
    import yaml

    command = f"# {console.called('config')} {shlex.join(argv)}".rstrip().replace("\n", "\n# ")
    return f"{command}\n{yaml.safe_dump(plain(config), sort_keys=False)}"
