"""Tool parsers: the calls of tools that an answer makes, in the ways in which models write them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.serving.stops import begins

Call = tuple[str, str]  # a tool's name and its arguments, as JSON
Properties = Mapping[str, Any]  # what a tool's schema says of each argument
TEXT = '<|"|>'  # stands around texts in Gemma 4's calls


def _object(text: str, _: Properties) -> Any:
    return json.loads(text)


def _bare(text: str, _: Properties) -> Any:
    """Return an object whose names have no quotes, and whose texts stand between marks."""
    parts = text.split(TEXT)
    parts[::2] = [re.sub(r"([{,]\s*)([\w.-]+)(\s*:)", r'\1"\2"\3', part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    return json.loads("".join(parts))


def _pairs(pattern: str) -> Callable[[str, Properties], Any]:
    """Return a reader of arguments that are written one by one, as the groups `name` and `value` of a pattern.

    They have no quotes: one is a text unless the tool's schema has something else in its place.
    """
    found = re.compile(pattern, re.DOTALL)
    return lambda text, schemas: {
        (name := one["name"].strip()): _value(one["value"], schemas.get(name)) for one in found.finditer(text)
    }


def _value(text: str, schema: Any) -> Any:
    types = schema.get("type") if isinstance(schema, Mapping) else "string"
    if "string" in (types if isinstance(types, list) else [types]):
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except ValueError:
        return text


@dataclass(frozen=True)
class Dialect:
    """How a model writes a call.

    Attributes:
        call: finds it in a text. Its groups are a tool's `name` and `arguments`; or `calls`, the JSON of an object of
            both, or of a list of such.
        arguments: reads these.
        marks: texts with the special tokens that it is written with.
    """

    call: str
    arguments: Callable[[str, Properties], Any] = _object
    marks: tuple[str, ...] = ()

    @property
    def pattern(self) -> re.Pattern[str]:
        """The compiled `call`."""
        return re.compile(self.call, re.DOTALL)


# DeepSeek's marks, whose bars and blanks are other letters than they look like.
_SEEK = {
    name: f"<\uff5ctool\u2581{name}\uff5c>".replace("_", "\u2581")
    for name in ("calls_begin", "call_begin", "sep", "call_end", "calls_end")
}
DIALECTS = {
    "Qwen3-Coder, Qwen 3.5": Dialect(
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>(?P<arguments>.*?)</function>\s*</tool_call>",
        _pairs(r"<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
        ("<tool_call>", "</tool_call>"),
    ),
    "GLM 4.5": Dialect(
        r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?P<arguments>(?:<arg_key>.*?)?)</tool_call>",
        _pairs(r"<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "Hermes, Qwen 2.5 and 3": Dialect(r"<tool_call>(?P<calls>.*?)</tool_call>"),  # and gpt-oss: see `reasoning`
    "Mistral": Dialect(
        r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](?P<arguments>.*?)(?=\[TOOL_CALLS\]|\Z)",
        marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "Mistral's older models": Dialect(r"\[TOOL_CALLS\](?P<calls>.*)"),
    "DeepSeek V3": Dialect(
        rf"(?:{_SEEK['calls_begin']}\s*)?{_SEEK['call_begin']}(?:function{_SEEK['sep']})?(?P<name>[\w.-]+)"
        rf"(?:{_SEEK['sep']}|\s*```json\s*)(?P<arguments>.*?)(?:```\s*)?{_SEEK['call_end']}(?:\s*{_SEEK['calls_end']})?",
        marks=tuple(_SEEK.values()),
    ),
    "Gemma 4": Dialect(
        r"<\|tool_call>call:(?P<name>[\w.-]+)(?P<arguments>\{.*?\})<tool_call\|>",
        _bare,
        ("<|tool_call>", "<tool_call|>", TEXT),
    ),
    "Llama 3": Dialect(r"\A\s*(?P<calls>[\[{].*)"),
}
MARKS = tuple(mark for dialect in DIALECTS.values() for mark in dialect.marks)
_STARTS = ("<tool_call>", "[TOOL_CALLS]", _SEEK["calls_begin"], _SEEK["call_begin"], "<|tool_call>")


def calls(text: str, tools: Sequence[Mapping[str, Any]], *, begun: bool = False) -> tuple[str, list[Call]]:
    """Return what a text says beside the calls that it makes, and these: of known tools, with objects for arguments.

    A text that has anything else in the place of a call makes none.

    Args:
        text: an answer, or with `begun` what follows of one.
        tools: that may be called.
        begun: whether something was said before.
    """
    for dialect in DIALECTS.values():
        found = [*dialect.pattern.finditer(text)] if not (begun and dialect.call.startswith(r"\A")) else []
        if found:
            try:
                made = [call for match in found for call in _read(match, dialect, tools)]
            except (ValueError, RecursionError):
                return text, []
            beside = dialect.pattern.sub("", text)
            return beside.rstrip() if begun else beside.strip(), made
    return text, []


def sayable(text: str, *, begun: bool) -> int:
    """Return how much of a text is not a part of a call, nor of the blanks before one, whatever follows.

    Args:
        text: what follows of an answer.
        begun: whether something was said before.
    """
    if not begun and text.lstrip()[:1] in ("", "{", "["):  # of which all may be a call
        return 0
    held = max(begins(text, start) for start in _STARTS)
    return len(text[: min((text.find(start) for start in _STARTS if start in text), default=len(text) - held)].rstrip())


def _read(match: re.Match[str], dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> Iterator[Call]:
    """Yield the calls of one place.

    Raises:
        ValueError: something there is none.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    groups = match.groupdict()
    if "calls" in groups:
        value = json.loads(groups["calls"])
        found = [_named(one) for one in (value if isinstance(value, list) else [value])]
    else:
        properties = schemas.get(groups["name"], {}).get("properties") or {}
        found = [(groups["name"], dialect.arguments(groups["arguments"], properties))]
    for name, given in found:
        if name not in schemas or not isinstance(given, dict):
            raise ValueError(f"{name!r} is no tool, or is called with {given!r}")
        yield name, _json(given)


def _named(one: Any) -> tuple[Any, Any]:
    return (one.get("name"), one.get("arguments", one.get("parameters"))) if isinstance(one, dict) else (None, None)


def _json(given: Mapping[str, Any]) -> str:
    """Return arguments as JSON, with escapes only where a text holds half a surrogate pair."""
    plain = json.dumps(given, ensure_ascii=False)
    return plain if plain.encode(errors="replace").decode() == plain else json.dumps(given)
