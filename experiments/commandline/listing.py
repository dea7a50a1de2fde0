"""The models that `model=` can name: `python experiments/run.py --models`. The README's table is made here. No JAX."""

from dataclasses import dataclass
from typing import Any

import zoo.families
from experiments.commandline import options
from zoo.accounting import count_active, count_params
from zoo.config import Config, RopeScaling, RopeType

_HUB = "https://huggingface.co/"


@dataclass(frozen=True)
class Listed:
    """One file of `conf/model`.

    Attributes:
        name: what follows `model=`.
        family: its schema.
        about: the checkpoint on the hub, or a few words.
        config: the architecture.
    """

    name: str
    family: str
    about: str
    config: Config


def models() -> list[Listed]:
    """Return every model, family by family, small ones first."""
    listed = [read(name) for name in options.choices("model")]
    order = {family: index for index, family in enumerate(zoo.families.FAMILIES)}
    return sorted(listed, key=lambda one: (order[one.family], count_params(one.config)))


def read(name: str) -> Listed:
    """Return a model by the name of its file, without Hydra."""
    family, fields, about = options.named("model", name)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    if scaling := fields.pop("rope_scaling", None):
        fields["rope_scaling"] = RopeScaling(**scaling | {"rope_type": RopeType(scaling["rope_type"])})
    return Listed(name, family, about.rpartition(":")[0].removeprefix(_HUB), zoo.families.FAMILIES[family](**fields))


def markdown() -> str:
    """Return the README's table."""
    lines = ["| `model=` | checkpoint | parameters |", "|---|---|---|"]
    for one in models():
        total, active = count_params(one.config), count_active(one.config)
        part = f"; a token meets {active:,}" if active < total else ""
        lines.append(f"| `{one.name}` | {one.about}{part} | {total:,} |")
    return "\n".join(lines)


def plain() -> str:
    """Return what `--models` prints."""
    rows = [(one.name, f"{count_params(one.config):,}", one.about) for one in models()]
    width, digits = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {name:<{width}}  {count:>{digits}}  {about}" for name, count, about in rows)
