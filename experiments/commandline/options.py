"""Every option there is, by its key, made from the dataclasses: what the command line, the help and the schemas read.

An option of a group belongs to some of its choices: `optimizer.b2` to `optimizer=adamw`. No JAX and no Hydra here.
"""

import dataclasses
import difflib
import functools
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import zoo.families
from experiments import configs
from experiments.configs.commands import CLASSES
from experiments.configs.fields import CHOICES, classes

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ROOT / "experiments" / "conf"  # in an installed package; a checkout has it at its top
CONF = PACKAGED if PACKAGED.is_dir() else ROOT / "conf"
GROUPS = {field.name: field.metadata["group"] for field in dataclasses.fields(configs.Run) if "group" in field.metadata}


@dataclasses.dataclass(frozen=True)
class Option:
    """One key of a command line.

    Attributes:
        key: such as `optimizer.b2`.
        choice: that of its group that has it as it stands (`adamw`); of `model`, the family.
        hint: the type of its value.
        default: its value where nothing is said, `dataclasses.MISSING` where something must be.
        field: what it was made from, with its metadata.
        help: a line about it.
    """

    key: str
    choice: str
    hint: Any
    default: Any
    field: dataclasses.Field
    help: str

    @property
    def group(self) -> str:
        """What stands before its last dot."""
        return self.key.rpartition(".")[0]

    @property
    def arms(self) -> tuple[Any, ...]:
        """The types that its value can have, None left out."""
        union = get_origin(self.hint) in (Union, types.UnionType)
        return tuple(arm for arm in (get_args(self.hint) if union else (self.hint,)) if arm is not type(None))

    @property
    def optional(self) -> bool:
        """Whether `null` is a value of it."""
        return type(None) in get_args(self.hint)


@functools.cache
def of(command: str = "config") -> tuple[Option, ...]:
    """Return every option of a command, `run.py` being `config`; one that several choices have comes several times."""
    return tuple(_walk(configs.Run if command == "config" else CLASSES[command], "", ""))


def _walk(cls: Any, prefix: str, choice: str, about: dict[str, str] | None = None) -> Iterator[Option]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if key == "model":
            yield from _walk(configs.Model, "model.", choice)
        elif key == "model.config":
            for family, config in zoo.families.FAMILIES.items():
                yield from _walk(config, "model.", family, attributes(config, "model."))
        elif key in CHOICES:
            for name, part in classes(key).items():
                yield from _walk(part, f"{key}.", name)
        elif part := next((arm for arm in (hint, *get_args(hint)) if dataclasses.is_dataclass(arm)), None):
            yield from _walk(part, f"{key}.", choice, attributes(part, f"{key}."))
        else:
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            yield Option(key, choice, hint, default, field, field.metadata.get("help") or (about or {}).get(key, ""))


def attributes(cls: type, prefix: str) -> dict[str, str]:
    """Return what the `Attributes:` of a class and of those that it is made from say of each, by its key."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        lines = (inspect.getdoc(one) or "").partition("Attributes:\n")[2].splitlines()
        pairs = (line.strip().partition(": ") for line in lines if line.strip())
        found |= {prefix + name: text for name, _, text in pairs if name.isidentifier()}
    return found


@functools.cache
def by_key(command: str = "config") -> dict[str, tuple[Option, ...]]:
    """Return the options of a command, all of a key together."""
    found: dict[str, tuple[Option, ...]] = {}
    for option in of(command):
        found[option.key] = (*found.get(option.key, ()), option)
    return found


def choices(group: str) -> list[str]:
    """Return the names that `group=` can take, without Hydra: those of classes, and of files of values."""
    return sorted({*CHOICES.get(group, ()), *(path.stem for path in (CONF / group).glob("*.yaml"))})


def named(group: str, name: str) -> tuple[str, dict[str, Any], str]:
    """Return what a name of a group stands for: the choice or family whose class it is, values, and a line about it."""
    if one := CHOICES.get(group, {}).get(name):
        return next(choice for choice, cls in classes(group).items() if cls is one.cls), dict(one.values), one.about
    import yaml

    text = (CONF / group / f"{name}.yaml").read_text()
    values: dict[str, Any] = yaml.safe_load(text)
    return values.pop("defaults")[0].removeprefix("schema/"), values, text.partition("\n")[0].removeprefix("# ")


def choose(group: str, value: str) -> str:
    """Return what to choose in place of an option that a group does not have."""
    if "custom" in choices(group) and ("." in value or "/" in value):
        return f"Name the function in it too: {group}={value}:FUNCTION"
    said = ""
    if group == "model" and value and (value.startswith(("/", "./", "../", "~")) or Path(value).is_dir()):
        return f"Give model.weights={value} for a folder of weights; --models lists what model= can name"
    if group == "model" and "/" in value:
        said = f"Give model.weights={value} for a folder, model.weights=hf://{value} for a model on the hub. "
    if close := difflib.get_close_matches(value, choices(group), n=1, cutoff=0.4):
        more = "--models lists all" if group == "model" else f"--help lists all of {group}"
        return f"{said}Did you mean {group}={close[0]}? {more}"
    return said.removesuffix(". ") or f"Choices for {group}: {', '.join(choices(group))}"
