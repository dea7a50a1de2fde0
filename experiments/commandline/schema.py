"""The one file that knows both Hydra and the dataclasses: schemas in, a `Run` out, and errors in plain words.

YAML files in `conf/` hold values only; options that are classes come from the registry, and stand beside them for
Hydra. Types and names come from mutable copies of the frozen dataclasses, because OmegaConf treats frozen ones as
read-only. No JAX here.
"""

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Sequence
from typing import Any, get_args, get_origin, get_type_hints

import zoo.families
from experiments import configs
from experiments.commandline import spelling
from experiments.commandline.options import CONF, GROUPS, by_key, choose
from experiments.commandline.options import choices as options
from experiments.commandline.spelling import FREE
from experiments.configs.commands import CLASSES
from experiments.configs.fields import CHOICES

FILLS_NULL = (AttributeError, AssertionError)  # what OmegaConf raises on `part.key=value` where the part is null
RAISED = (ValueError, TypeError, *FILLS_NULL)  # beside its own errors Hydra raises these, at a group=8 or group=[1]
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
SAME = {  # what other programs call it
    "lr": "optimizer.learning_rate",
    "bs": "batch_size",
    "epochs": "steps",
    "iters": "steps",
    "max_steps": "steps",
    "lora": "adapter=lora",
    "dtype": "hardware.param_dtype",
    "weights": "model.weights",
    "model.weights": "source",  # of `convert.py`
    "name": "run",
    "output_dir": "out",
    "loss": "objective",
    "device": "hardware",
}


class ConfigError(ValueError):
    """A command line that does not describe a run."""


def build_model(
    *, family: str, weights: str | None, quantise: configs.Quantise | None = None, **fields: Any
) -> configs.Model:
    """Return the model part of a run: the family's own frozen config, where the weights are, and how they are kept."""
    if family not in zoo.families.FAMILIES:
        raise configs.refuse("model.family", family, f"choose {', '.join(zoo.families.FAMILIES)}")
    cls = zoo.families.FAMILIES[family]
    if other := sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)}):
        raise configs.refuse("model.family", family, f"it has no {', '.join(other)}; choose another model=")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return configs.Model(config=cls(**fields), weights=weights, quantise=quantise)


def schema_of(cls: Any, target: str | None = None, **extra: tuple[Any, Any]) -> type:
    """Return a mutable copy of a frozen dataclass, with its types and defaults, that `instantiate` turns back."""
    from omegaconf import MISSING

    hints = get_type_hints(cls)
    fields: list[Any] = [("_target_", str, target or f"{cls.__module__}.{cls.__qualname__}")]
    for f in dataclasses.fields(cls):
        hint = _schema_hint(hints[f.name])
        part = next((arm for arm in get_args(hint) if dataclasses.is_dataclass(arm)), None)
        if f.default_factory is not dataclasses.MISSING:
            default: Any = dataclasses.field(default_factory=f.default_factory)
        elif part is not None and dataclasses.is_dataclass(f.default):
            default = dataclasses.field(default_factory=functools.partial(part, **vars(f.default)))
        else:
            default = dataclasses.field(default=MISSING if f.default is dataclasses.MISSING else f.default)
        fields.append((f.name, hint, default))
    fields += [(name, hint, dataclasses.field(default=value)) for name, (hint, value) in extra.items()]
    return dataclasses.make_dataclass(cls.__name__, fields)


def _schema_hint(hint: Any) -> Any:
    """Return the type of a field: a part that may be left out is made of a schema too, any other part is free."""
    if dataclasses.is_dataclass(hint):
        return Any
    part = next((arm for arm in get_args(hint) if dataclasses.is_dataclass(arm)), None)
    return hint if part is None else schema_of(part) | None


@functools.cache
def register() -> None:
    """Put every schema where the `defaults` lists of the YAML files look for it, once in a process."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    vars(store)["__deepcopy__"] = lambda memo: store  # Hydra copies it, all schemas with it, to compose anything
    store.store(group="schema", name="run", node=schema_of(configs.Run), package="_global_")
    for name, cls in CLASSES.items():
        store.store(group="schema", name=name, node=schema_of(cls), package="_global_")
    for name in ("eval", "save", "distributed", "profile"):  # parts that are no groups
        store.store(group="schema", name=name, node=schema_of(get_type_hints(configs.Run)[name]), package=name)
    for group, named in CHOICES.items():
        for name, one in named.items():
            store.store(group=group, name=name, node=schema_of(one.cls)(**one.values), package=group)
    for name, cls in zoo.families.FAMILIES.items():
        target = f"{build_model.__module__}.{build_model.__name__}"
        beside = {"weights": (str | None, None), "quantise": (configs.Quantise | None, None)}
        node = schema_of(cls, target, family=(str, name), **beside)
        store.store(group="model/schema", name=name, node=node, package="model")


def compose(overrides: Sequence[str], name: str = "config") -> tuple[Any, dict[str, str]]:
    """Return the run (or another command, by `name`) that the overrides describe, and each group's option.

    Raises:
        ConfigError: an unknown key or option (naming the closest one) or a value of the wrong type.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    groups = [g for g in GROUPS if name == "config" or g in CLASSES[name].__dataclass_fields__]
    overrides = spelling.named(overrides)
    spelled = [spelling.spelled(override, by_key(name)) for override in overrides]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        try:
            composed = hydra_compose(name, overrides=spelled, return_hydra_config=True)
            extra = [override for override in overrides if override.startswith(("+", "~", "hydra"))]
            extra += [
                override for override in overrides if override.startswith(FREE) and not _takes(composed, override)
            ]
            pairs = (override.partition("=")[::2] for override in overrides)
            extra += [f"{key}={value}" for key, value in pairs if key in groups and value not in options(key)]
            if extra:
                raise HydraException(f"`{extra[0]}` would add or remove a key")
        except (HydraException, OmegaConfBaseException, *RAISED) as error:
            known = hydra_compose(name, overrides=_valid_choices(overrides, groups))
            raise ConfigError(_explain(error, name, overrides, known, groups)) from None
    choices = {key: str(value) for key, value in composed.hydra.runtime.choices.items() if key in GROUPS}
    return instantiate(composed), choices


def instantiate(composed: Any) -> Any:
    """Return a composed configuration as frozen dataclasses; nothing after this sees Hydra."""
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    with open_dict(composed):
        composed.pop("hydra", None)
    for key in _references(OmegaConf.to_container(composed)):
        try:
            OmegaConf.select(composed, key)
        except OmegaConfBaseException as error:
            raise ConfigError(f"bad value of {key}: {str(error).strip().splitlines()[0]}") from None
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError(f"missing value: {', '.join(f'{key}=...' for key in missing)} must be given")
    try:
        made = _made(OmegaConf.to_container(composed, resolve=True))
        configs.check(made)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return made


def _takes(composed: Any, override: str) -> bool:
    """Return whether the chosen option of a group has the field whose keys are the user's own."""
    group, name = override.split(".")[:2]
    return name in _target(composed[group]["_target_"]).__dataclass_fields__


def _target(name: str) -> Any:
    module, _, inside = name.rpartition(".")
    return getattr(importlib.import_module(module), inside)


def _made(values: Any) -> Any:
    """Return what a configuration stands for. (Hydra's own `instantiate` would read `${` in a text a second time.)"""
    if isinstance(values, list):
        return [_made(value) for value in values]
    if not isinstance(values, dict):
        return values
    parts = {key: _made(value) for key, value in values.items() if key != "_target_"}
    if "_target_" not in values:
        return parts
    target = _target(values["_target_"])
    if dataclasses.is_dataclass(target):  # files have lists where tables need what can be a key
        tuples = {name for name, hint in get_type_hints(target).items() if get_origin(hint) is tuple}
        parts = {name: tuple(part) if name in tuples else part for name, part in parts.items()}
    return target(**parts)


def _references(values: Any, prefix: str = "") -> list[str]:
    """Return the keys whose values name other keys: `${...}`."""
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _references(value, f"{prefix}{key}.")
        elif isinstance(value, str) and "${" in value:
            found.append(f"{prefix}{key}")
    return found


def _valid_choices(overrides: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return the overrides that pick an existing option of a group, so that the keys they bring are known."""
    pairs = [override.split("=", 1) for override in overrides if "=" in override]
    return [f"{key}={value}" for key, value in pairs if key in groups and value in options(key)]


def _keys(node: Any, prefix: str = "") -> list[str]:
    from omegaconf import DictConfig, OmegaConf

    found = []
    for key in node:
        if key == "_target_":
            continue
        found.append(prefix + str(key))
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            found += _keys(node[key], f"{prefix}{key}.")
    return found


def _explain(error: Exception, name: str, overrides: Sequence[str], known: Any, groups: Sequence[str]) -> str:
    """Return one line: which override is wrong, why, and the closest thing that exists."""
    from omegaconf import OmegaConf

    keys = sorted({*_keys(known), *groups})
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if key.split("/")[0].split(".")[0] == "hydra":
            return f"unknown override `{override}`: no part of Hydra runs here; experiments/sweep.py has its launchers"
        if not key or not (equals or override.startswith("~")):
            return f"cannot read `{override}`: overrides look like key=value, for example tiling.n=8"
        if override.startswith("~"):
            return f"cannot apply `{override}`: keys can be changed, not removed"
        if key in groups and value not in options(key):
            return f"unknown option `{override}`: {choose(key, value)}"
        free = any(key.startswith(one) and one.rstrip(".") in keys for one in FREE)
        part = key.rpartition(".")[0]
        if key not in keys and part in keys and key in by_key(name) and OmegaConf.select(known, part) is None:
            return f"cannot set {key}: `{part}` is null in this option; write an option that has it, in conf/"
        if key not in keys and not free:
            return f"unknown override `{override}`: there is no `{key}`. {_closest(key, keys)}"
        if override.startswith("+"):
            return f"cannot apply `{override}`: `{key}` is there already; write {key}={value}"
        if why := spelling.unreadable(spelling.spelled(override, by_key(name))):
            if wanted := _wanted(name, override):
                return f"bad override `{override}`: {wanted}"
            return f"cannot read `{override}`: {why}"
        options_of_key = by_key(name).get(key)
        if options_of_key and "," in value and spelling.is_sweep(override) and not spelling.is_text(options_of_key):
            wanted = None if name == "config" else _wanted(name, override) or "give one value"
            several = "it has several values; -m sweeps over them, one run after another"
            return f"bad override `{override}`: {wanted or several}"
    if isinstance(error, FILLS_NULL):
        parts = [override.partition("=")[0] for override in overrides if "{" in override or override.count(".") > 1]
        return f"cannot set {', '.join(parts)}: it is null in this option; write an option that has it, in conf/"
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    given = [o for o in overrides if str(getattr(error.__cause__, "full_key", None)) == o.split("=")[0]]
    culprit = next((o for o in given if f"'{o.partition('=')[2]}'" in reason), given[-1] if given else None)
    return f"bad override `{culprit}`: {_wanted(name, culprit) or reason}" if culprit else reason


def _wanted(name: str, override: str) -> str | None:
    """Return what belongs in the place of a value of the wrong type, in words; None where its types have none."""
    key = override.partition("=")[0]
    options = by_key(name).get(key, ())
    if not options and any(one.startswith(f"{key}.") for one in by_key(name)):
        return "it is made of parts: write an option that has them, in conf/"
    arms = dict.fromkeys(arm for option in options for arm in option.arms)
    if list(arms) == [list[int]]:
        return "give a list of whole numbers, such as [1,2]"
    if list(arms) == [float] or list(arms) == [int] or list(arms) == [bool]:
        nothing = f", or {spelling.AUTO if spelling.is_auto(options) else spelling.NULL}"
        return f"give {WANTED[next(iter(arms))]}{nothing if all(one.optional for one in options) else ''}"
    if any(get_origin(arm) is dict for arm in arms):
        return f"it holds names and values: give {key}.NAME=VALUE for each"
    return None


def _closest(key: str, keys: Sequence[str]) -> str:
    """Return the hint for an unknown key: `n` means `tiling.n`, a slip means its neighbour, else the group's keys."""
    group, _, last = key.rpartition(".")
    inside = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == group}
    same = [known for known in keys if known.rpartition(".")[2] == last]
    near = [inside[name] for name in difflib.get_close_matches(last, inside, cutoff=0.6)]
    if key in SAME:
        return f"Did you mean `{SAME[key]}`?"
    if near or same:
        return f"Did you mean `{(near or same)[0]}`?"
    if group and inside:
        return f"`{group}` has: {', '.join(inside)}."
    if near := difflib.get_close_matches(key, keys):
        return f"Did you mean `{near[0]}`?"
    return "`--help` lists what there is."
