"""The words of a command line as the user types them, and as Hydra's grammar has to see them.

A value that is text is taken as it is typed: no character of a path means anything, but `~` for the home folder. A
whole number may be written `1e3`; `auto` is said of what is chosen where nothing is said. Everything else is Hydra's to
read. In a sweep a comma separates values; a value that has a comma of its own is quoted:
`-m data.path="'a,b.txt',c.txt"`.
"""

import decimal
import os
import re
from collections.abc import Sequence
from typing import Any

from experiments.commandline.options import Option

OWN = ("objective", "optimizer", "data")  # groups of which a user may write one
FREE = ("hardware.compiler_options.", *(f"{group}.kwargs." for group in OWN))  # keys under these are the user's own
NULL, AUTO = "null", "auto"


def spelled(word: str, known: dict[str, tuple[Option, ...]]) -> str:
    """Return an override as Hydra must see it to understand what was typed."""
    key, equals, value = word.partition("=")
    if key.startswith(FREE):
        return f"+{word}" if readable(word) else f"+{key}={quoted(value)}"
    options = known.get(key, ())
    if not equals or not options or (value == NULL and all(option.optional for option in options)):
        return word
    if value == AUTO and is_auto(options):
        return f"{key}={NULL}"
    if is_text(options):
        return f"{key}={quoted(expanded(value) if _is(options, 'path') else value)}"
    if all(int in option.arms and float not in option.arms for option in options):
        whole = _whole(value)
        if whole is None and any(str in option.arms for option in options):
            return f"{key}={quoted(value)}"
        return word if whole is None else f"{key}={whole}"
    return word


def named(words: Sequence[str]) -> list[str]:
    """Return overrides written out: `objective=MODULE:FUNCTION`, `objective.fn=` by itself, the user's own keys in one.

    Those are `hardware.compiler_options={a:1,b:2}`, which is `hardware.compiler_options.a=1` and so on.
    """
    groups, found = {word.partition("=")[0] for word in words}, []
    for word in words:
        key, _, value = word.partition("=")
        group = key.removesuffix(".fn")
        if f"{key}." in FREE and value.startswith("{") and readable(word):
            found += _one_by_one(word)
            continue
        if key in OWN and ":" in value:
            found += [f"{key}=custom", f"{key}.fn={value}"]
        else:
            found += [f"{group}=custom", word] if key != group and group in OWN and group not in groups else [word]
    return found


def _one_by_one(word: str) -> list[str]:
    def said(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{said(one)}' for key, one in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(said, value))}]"
        if isinstance(value, str):
            return quoted(value)
        return NULL if value is None else str(value).lower()

    override = _parsed(word)
    return [f"{override.key_or_group}.{key}={said(value)}" for key, value in override.value().items()]


def is_auto(options: Sequence[Option]) -> bool:
    """Return whether None, which `--help` calls `auto`, has all of them chosen."""
    return bool(options) and all(option.default is None and option.field.metadata.get("auto") for option in options)


def is_text(options: Sequence[Option]) -> bool:
    """Return whether what all of them hold is text."""
    return bool(options) and all(option.arms == (str,) for option in options)


def _is(options: Sequence[Option], what: str) -> bool:
    return any(option.field.metadata.get(what) for option in options)


def quoted(text: str) -> str:
    """Return text in quotes, within which neither Hydra nor OmegaConf reads anything."""
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)  # `${` would name another key
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


def expanded(path: str) -> str:
    """Return a path with the home folder in place of its `~`; nobody's `~name` is a name like any other."""
    found = os.path.expanduser(path)
    return os.path.abspath(found) if found.startswith("~") else found


def _whole(value: str) -> str | None:
    """Return a whole number, however it was written, as its digits; None where it is none."""
    try:
        number = decimal.Decimal(value)
        return str(int(number)) if number.is_finite() and abs(number) < 10**40 and number == int(number) else None
    except (decimal.InvalidOperation, ValueError):
        return None


def _parsed(word: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(word)


def readable(word: str) -> bool:
    """Return whether Hydra can read an override."""
    return unreadable(word) is None


def unreadable(word: str) -> str | None:
    """Return why Hydra cannot read an override; None if it can."""
    from hydra.errors import HydraException

    try:
        _parsed(word)
    except HydraException as error:
        return str(error).strip().splitlines()[0]
    return None


def is_sweep(word: str) -> bool:
    """Return whether Hydra reads several values in an override."""
    return readable(word) and _parsed(word).is_sweep_override()


def swept(word: str, known: dict[str, tuple[Option, ...]]) -> list[str]:
    """Return the overrides of each run that a word of a sweep asks for, as a run is given them.

    Values that are text are split at commas outside of quotes, and lose the quotes; names that commas separate are one
    value unless they are quoted. Of other values Hydra knows several: `1,2`, `range(0,3)`, `choice(1,2)`.
    """
    key, equals, value = word.partition("=")
    options = known.get(key, ())
    if not equals:
        return [word]
    if is_text(options):
        return [f"{key}={one}" for one in _pieces(value, _is(options, "names"))]
    if not readable(word):
        return [f"{key}={one}" for one in _pieces(value)]
    override = _parsed(word)
    return [f"{key}={one}" for one in override.sweep_string_iterator()] if override.is_sweep_override() else [word]


def swept_by_hydra(word: str, known: dict[str, tuple[Option, ...]]) -> str:
    """Return a word of a sweep for Hydra's own sweepers, whose jobs have values as `typed` reads them."""
    key, equals, _ = word.partition("=")
    if not equals or not is_text(known.get(key, ())):
        return word if is_sweep(word) else spelled(word, known)
    return f"{key}={','.join(quoted(one.partition('=')[2]) for one in swept(word, known))}"


def typed(word: str, known: dict[str, tuple[Option, ...]]) -> str:
    """Return an override of one of Hydra's jobs as somebody would type it."""
    key = word.partition("=")[0]
    if not is_text(known.get(key, ())):
        return word.removeprefix("+") if key.startswith(tuple(f"+{one}" for one in FREE)) else word
    text = str(_parsed(word).value())
    text = re.sub(r"(\\+)(?=\$\{)", lambda found: found[1][: len(found[1]) // 2], text)
    return f"{key}={text}"


QUOTED = re.compile(r"""\s*(?:'(?P<single>(?:[^'\\]|\\.)*)'|"(?P<double>(?:[^"\\]|\\.)*)")\s*(?:,|$)""")


def _pieces(value: str, names: bool = False) -> list[str]:
    """Return the values that commas separate; one in quotes may have commas. Of names, all in quotes or none."""
    found, rest = [], value
    while True:
        if match := QUOTED.match(rest):
            found.append(re.sub(r"\\(['\"\\])", r"\1", match["single"] if match["double"] is None else match["double"]))
            rest, more = rest[match.end() :], match[0].endswith(",")
        elif names:
            return [value]
        else:
            one, comma, rest = rest.partition(",")
            found.append(one)
            more = bool(comma)
        if not more:
            return found
