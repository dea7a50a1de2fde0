"""Overrides, the words of a command line, and how some replace others."""

from collections.abc import Callable, Sequence

from experiments import configs
from experiments.commandline import schema


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


def numbered(overrides: Sequence[str], number: int) -> list[str]:
    """Return the overrides of one run of a sweep: a name that all would share gets a number."""
    return [f"{word}-{number}" if word.startswith("run=") else word for word in overrides]
