"""The command line's help, and a configuration as YAML. No JAX, and for the help no Hydra either."""

import dataclasses
from typing import Any

from experiments import configs, schema

GROUP_HELP = {
    "model": "what is trained",
    "adapter": "train all of it, or a LoRA adapter alone",
    "data": "what it reads",
    "objective": "what it minimises",
    "tiling": "what is cut into tiles: the head, MLPs, attention, the batch",
    "optimizer": "how parameters move",
    "hardware": "device, precision, compiler",
    "mesh": "how devices share the work",
    "remat": "what the backward pass keeps",
    "checkpoint": "when the run is saved so that it can go on",
}
PARTS = {
    "": configs.Run,
    "eval.": configs.Evaluation,
    "save.": configs.Save,
    "checkpoint.": configs.Checkpoint,
    "profile.": configs.Profile,
    "distributed.": configs.Distributed,
    "tiling.": configs.Tiling,
    "optimizer.": configs.Optimizer,
    "hardware.": configs.Hardware,
    "mesh.": configs.Mesh,
    "data.": configs.Text,
    "objective.": configs.Pretrain,
    "adapter.": configs.Lora,
}


def help_text() -> str:
    """Return what `--help` prints."""
    lines = [
        "Train a model, a slice of its head at a time.",
        "",
        "  python experiments/run.py                              a small model, two minutes on two cores",
        "  python experiments/run.py model=gemma2b tiling.n=8     all of Gemma 2B",
        "",
        "Groups (GROUP=OPTION):",
    ]
    for group in schema.GROUPS:
        lines.append(f"  {group:<10} {GROUP_HELP[group]}")
        lines += wrapped(schema.options(group), 13)
    lines += ["", "Options (KEY=VALUE); those at `auto` are chosen for the device and the model's size:"]
    lines.append(f"  {'model.weights':<26} {'':<10} {configs.Model.__dataclass_fields__['weights'].metadata['help']}")
    for prefix, cls in PARTS.items():
        for field in dataclasses.fields(cls):
            if "help" in field.metadata:
                lines.append(f"  {prefix + field.name:<26} {_default(field):<10} {field.metadata['help']}")
    lines += ["", "-m sweeps over comma-separated values: -m tiling.n=1,8     --cfg shows the configuration and stops"]
    lines.append("--models lists the models, their sizes and where they come from")
    return "\n".join(lines)


def wrapped(words: list[str], indent: int, width: int = 96) -> list[str]:
    """Return words as lines of at most `width`, indented."""
    lines, line = [], " " * indent
    for word in words:
        if len(line) + len(word) + 1 > width:
            lines.append(line.rstrip())
            line = " " * indent
        line += f"{word} "
    return [*lines, line.rstrip()]


def _default(field: dataclasses.Field) -> str:
    optional_name = field.name in (
        "run",
        "clip_norm",
        "cache",
        "size",
        "budget",
        "mlp",
        "attention",
        "batch",
        "keep_every",
        "compile_for",
    )
    if field.default_factory is not dataclasses.MISSING:
        return "{}"
    if field.default is None:
        return "-" if optional_name else "auto"
    if field.default is dataclasses.MISSING:
        return "-"
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def plain(value: Any) -> Any:
    """Return dataclasses and enumerations as the plain values that YAML and JSON hold; the kind of a part is named."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = (
            {"kind": type(value).__name__}
            if isinstance(value, configs.Data | configs.Objective | configs.Optimizer | configs.Adapter)
            else {}
        )
        return {**kind, **{field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.value if isinstance(value, configs.StrEnum) else value


def dump(config: configs.Run, argv: list[str]) -> str:
    """Return a configuration as YAML, under the command that made it."""
    import yaml

    return (
        f"# python experiments/run.py {' '.join(argv)}".rstrip() + "\n" + yaml.safe_dump(plain(config), sort_keys=False)
    )
