"""What every configuration is made of: its fields, how a bad value is refused, and what `GROUP=NAME` stands for.

A class is put into the registry by `@choice`, next to its fields. Files in `conf/GROUP/` add names for values of these
classes; they are for values alone.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

from zoo.formats import AS_STORED, Format

T = TypeVar("T")
C = TypeVar("C", bound=type)
LARGEST = 2**31 - 1  # what counts steps, tokens and ids


@dataclass(frozen=True)
class Bound:
    """What a value must be: whether it is, and what an error says where it is not."""

    allows: Callable[[Any], bool]
    why: str


POSITIVE = Bound(lambda value: value > 0, "it must be greater than zero")
NOT_NEGATIVE = Bound(lambda value: value >= 0, "it must be zero or more")
SHARE = Bound(lambda value: 0 <= value < 1, "it must lie between 0 and below 1")
FUNCTION = Bound(
    lambda name: ":" in name[1:] and all(part.isidentifier() for part in name.rpartition(":")[2].split(".")),
    "give MODULE:FUNCTION or FILE.py:FUNCTION",
)


def option(
    default: Any,
    help: str,
    bound: Bound | None = None,
    *,
    empty: bool = False,
    auto: bool = False,
    path: bool = False,
    names: bool = False,
) -> Any:
    """Return a dataclass field with a default and the line that `--help` shows.

    Args:
        default: its value where nothing is said.
        help: the line.
        bound: what its value must be, unless it is None.
        empty: its text may be empty.
        auto: None is chosen for the device and the model's size.
        path: its text is a place among the files, which may begin with `~`.
        names: commas in its text separate names, and no values of a sweep.
    """
    metadata = {"help": help, "bound": bound, "empty": empty, "auto": auto, "path": path, "names": names}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def part(help: str) -> Any:
    """Return a dataclass field that a group's choices fill: `GROUP=NAME`; with the line that `--help` shows."""
    return dataclasses.field(metadata={"group": help})


def refuse(name: str, value: object, why: str) -> ValueError:
    """Return the error for a bad value, in one form: what, both values, what to do."""
    return ValueError(f"bad value {name}={value}: {why}")


def check(config: Any, prefix: str = "") -> None:
    """Raise unless every part of a config is what its field says, and every value one that can be meant.

    Numbers are within their bounds and finite, whole ones of a size that counts something, text is not empty.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint, name = getattr(config, field.name), hints[field.name], f"{prefix}{field.name}"
        bound = field.metadata.get("bound")
        if dataclasses.is_dataclass(hint) and not isinstance(value, hint):
            inside = ", ".join(f"{name}.{part.name}" for part in dataclasses.fields(hint))
            raise refuse(name, value, f"it is made of parts: give {inside}")
        if dataclasses.is_dataclass(value):
            check(value, "model." if name == "model.config" else f"{name}.")
        elif bound is not None and value is not None and not bound.allows(value):
            raise refuse(name, value, bound.why)
        elif isinstance(value, float) and not math.isfinite(value):
            raise refuse(name, value, "give a finite number")
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise refuse(name, value, f"it is too large: give {LARGEST} at most")
        elif value == "" and not field.metadata.get("empty"):
            raise refuse(name, "", "it is empty: give a value, or leave it out")


def chosen(value: T | None) -> T:
    """Return a value that resolving a configuration has filled in."""
    assert value is not None, "resolve the configuration first"
    return value


class DType(StrEnum):
    """The number formats that parameters and arithmetic can have."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Quantise(StrEnum):
    """How frozen matrices are kept in fewer bits."""

    as_stored = AS_STORED
    int8 = Format.int8
    int4 = Format.int4
    nf4 = Format.nf4


class Platform(StrEnum):
    """The devices that a run can ask for."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"
    tpu = "tpu"


class Schedule(StrEnum):
    """How the learning rate moves after its warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"


OnNan = StrEnum("OnNan", ["stop", "skip", "raise"])
OnNan.__doc__ = "What a run does at a loss or a gradient that is no finite number."


@dataclass(frozen=True)
class Named:
    """One name of a group.

    Attributes:
        cls: the frozen dataclass that it makes.
        about: a line for `--help`.
        values: what it sets of the fields, beside their defaults.
    """

    cls: type
    about: str
    values: dict[str, Any]


CHOICES: dict[str, dict[str, Named]] = {}


def choice(group: str, name: str, about: str = "", **values: Any) -> Callable[[C], C]:
    """Return a decorator that makes `group=name` stand for a dataclass, with some of its fields set.

    Args:
        group: such as `optimizer`.
        name: such as `adamw`.
        about: what `--help` says of it; the class's own first line where it is left out.
        values: of fields.
    """

    def register(cls: C) -> C:
        registered = CHOICES.setdefault(group, {})
        assert name not in registered, f"{group}={name} is registered twice"
        registered[name] = Named(cls, about or (cls.__doc__ or "").partition("\n")[0], values)
        return cls

    return register


def classes(group: str) -> dict[str, type]:
    """Return the different classes of a group, each by the name that it has as it stands."""
    return {name: one.cls for name, one in CHOICES[group].items() if not one.values}
