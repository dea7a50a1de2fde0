"""The commands' help, made from the dataclasses; a configuration as YAML. No JAX, and for the help no Hydra either."""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from experiments.commandline import console, options, spelling
from experiments.commandline.options import CONF, GROUPS, Option
from experiments.configs.commands import CLASSES

KEY, DEFAULT = 28, 8  # widths of the columns
TRAIN = """Train a model, a slice of its head at a time.

  {command:<50} a small model, two minutes on two cores
  {command} {gemma:<{rest}} all of Gemma 2B"""
MORE = """-m sweeps over comma-separated values: -m tiling.n=1,8
--cfg shows the configuration and stops
--models lists the models, their sizes and where they come from"""


def help_text(name: str = "config", words: Sequence[str] = ()) -> str:
    """Return what a command's `--help` prints, or what is to be said of the options of groups among its words.

    Raises:
        KeyError: a group has no such option.
    """
    pairs = (word.partition("=") for word in spelling.named(words))
    asked = {group: option for group, _, option in pairs if group in GROUPS}
    groups = [group for group in GROUPS if any(one.key.startswith(f"{group}.") for one in options.of(name))]
    for group, option in asked.items():
        if option not in options.choices(group):
            raise KeyError(f"{group}={option}")
    chosen = {**_defaults(name), **asked}
    if asked:
        return "\n\n".join(
            _about(group, option, _lines(name, chosen, group, only=True)) for group, option in asked.items()
        )
    lines = [_title(name), "", f"Groups (GROUP=OPTION); {console.called(name)} GROUP=OPTION --help tells more of one:"]
    for group in groups:
        lines.append(f"  {group:<10} {GROUPS[group]}; by default {chosen[group]}")
        lines += wrapped(options.choices(group), 13)
    lines += ["", "Options (KEY=VALUE); those at `auto` are chosen for the device and the model's size:"]
    for group in ("", *dict.fromkeys(one.group.partition(".")[0] for one in options.of(name) if one.group)):
        lines += _lines(name, chosen, group)
    return "\n".join([*lines, "", MORE] if name == "config" else lines)


def tell(name: str, argv: Sequence[str]) -> int:
    """Print a command's help; return the exit status."""
    try:
        print(help_text(name, argv))
    except KeyError as error:
        group, _, value = error.args[0].partition("=")
        print(f"error: unknown option `{group}={value}`: {options.choose(group, value)}", file=sys.stderr)
        return 2
    return 0


def markdown() -> str:
    """Return `conf/README.md`: every option of every command, and what each choice of a group has of its own."""
    lines = [
        "# conf",
        "",
        "Hydra's files: values only. What can be set, made by `python -m experiments.commandline.usage`.",
    ]
    for name in ("config", *CLASSES):
        lines += ["", f"## {console.called(name)}", "", "```", help_text(name), "```"]
    lines += ["", "## What each choice has of its own"]
    for group in (group for group in GROUPS if group != "model"):
        own = [help_text("config", [f"{group}={option}"]) for option in options.choices(group)]
        lines += ["", f"### {group}", "", "```", "\n\n".join(own), "```"]
    return "\n".join(lines) + "\n"


def _title(name: str) -> str:
    if name != "config":
        return CLASSES[name].__doc__ or ""
    command, gemma = console.called("config"), "model=gemma2b tiling.n=8"
    return TRAIN.format(command=command, gemma=gemma, rest=max(0, 49 - len(command)))


def _about(group: str, option: str, lines: list[str]) -> str:
    """Return what one option of a group is, what it has and what it sets."""
    about = options.named(group, option)[2]
    return "\n".join([f"{group}={option}: {about}", *(lines or ["  nothing more can be set"])])


def _defaults(name: str) -> dict[str, str]:
    """Return the option of each group that a command has where nothing is said."""
    import yaml

    listed = yaml.safe_load((CONF / f"{name}.yaml").read_text())["defaults"]
    return {key: value for one in listed if isinstance(one, dict) for key, value in one.items() if key in GROUPS}


def _lines(name: str, chosen: dict[str, str], group: str, *, only: bool = False) -> list[str]:
    """Return a line for every option of a group (`""` is none), or of its chosen option alone."""
    within = [one for one in options.of(name) if one.group.partition(".")[0] == group]
    picked, values, _ = options.named(group, chosen[group]) if group in chosen else ("", {}, "")
    several, said = {one.choice for one in within}, {}
    own = {one.key for one in within if one.choice == picked}
    for one in within:
        again = group == "model" and one.key in own  # a model's file sets nearly all
        if one.choice not in (picked, "") and (only or again):
            continue
        path = one.key.removeprefix(f"{group}.").split(".")
        given = one.default if one.choice != picked else _given(values, path, one.default)
        said.setdefault((one.key, shown(one, given), one.help), []).append(one.choice)
    lines, columns = [], shutil.get_terminal_size((130, 24)).columns
    for (key, default, help), owners in said.items():
        everywhere = only or (set(owners) <= {picked, ""} and group == "model") or len(owners) >= len(several)
        where = "" if everywhere else f" ({', '.join(owners)})"
        long = len(key) > KEY or len(default) > DEFAULT
        texts = textwrap.wrap(f"{help}{where}", max(40, columns - KEY - DEFAULT - 5))
        first = "" if long or not texts else texts.pop(0)
        lines += [f"  {key:<{KEY}} {default:<{DEFAULT}} {first}".rstrip()]
        lines += [f"{'':<{KEY + DEFAULT + 4}}{text}" for text in texts]
    return lines


def _given(values: Any, path: Sequence[str], default: Any) -> Any:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return default
        values = values[part]
    return values


def shown(option: Option, value: Any) -> str:
    """Return a value as help shows it: `auto` where it is chosen later, `-` where there is none."""
    if value is None:
        return "auto" if option.field.metadata.get("auto") else "-"
    if value is dataclasses.MISSING:
        return "needed"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def wrapped(words: list[str], indent: int, width: int = 96) -> list[str]:
    """Return words as lines of at most `width`, indented."""
    lines, line = [], " " * indent
    for word in words:
        if len(line) + len(word) + 1 > width:
            lines.append(line.rstrip())
            line = " " * indent
        line += f"{word} "
    return [*lines, line.rstrip()]


if __name__ == "__main__":
    CONF.joinpath("README.md").write_text(markdown())
