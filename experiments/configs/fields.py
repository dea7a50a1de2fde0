"""What the fields of every configuration are made of, and how a bad value is refused."""

import dataclasses
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """Return a dataclass field with a default and the line that `--help` shows."""
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def refuse(name: str, value: object, why: str) -> ValueError:
    """Return the error for a bad value, in one form: what, both values, what to do."""
    return ValueError(f"bad value {name}={value}: {why}")


def positive(config: object, group: str, *names: str) -> None:
    """Raise unless each named field of a config is None or greater than zero."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise refuse(f"{group}{name}", value, "it must be greater than zero")


def chosen(value: T | None) -> T:
    """Return a value that resolving a configuration has filled in."""
    assert value is not None, "resolve the configuration first"
    return value


class DType(StrEnum):
    """The number formats that parameters and arithmetic can have."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


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
