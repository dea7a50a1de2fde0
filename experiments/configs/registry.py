"""The registry: what `GROUP=NAME` on a command line stands for. A class is put there by `@choice`, next to its fields.

Files in `conf/GROUP/` add names for values of these classes; they are for values alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Choice:
    """One name of a group.

    Attributes:
        cls: the frozen dataclass that it makes.
        about: a line for `--help`.
        values: what it sets of the fields, beside their defaults.
    """

    cls: type
    about: str
    values: dict[str, Any]


CHOICES: dict[str, dict[str, Choice]] = {}


def choice(group: str, name: str, about: str = "", **values: Any) -> Callable[[T], T]:
    """Return a decorator that makes `group=name` stand for a dataclass, with some of its fields set.

    Args:
        group: such as `optimizer`.
        name: such as `adamw`.
        about: what `--help` says of it; the class's own first line where it is left out.
        values: of fields.
    """

    def register(cls: T) -> T:
        registered = CHOICES.setdefault(group, {})
        assert name not in registered, f"{group}={name} is registered twice"
        registered[name] = Choice(cls, about or (cls.__doc__ or "").partition("\n")[0], values)
        return cls

    return register


def classes(group: str) -> dict[str, type]:
    """Return the different classes of a group, each by the name that it has as it stands."""
    return {name: one.cls for name, one in CHOICES[group].items() if not one.values}


def name_of(group: str, value: Any) -> str:
    """Return the name of a group that stands for the class of a part."""
    return next(name for name, cls in classes(group).items() if cls is type(value))
