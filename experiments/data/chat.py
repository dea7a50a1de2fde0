"""Chat templates: Jinja programs that come with a tokenizer and turn messages into the text a model was trained on.

They are read from folders that others made, so they run in Jinja's sandbox, without access to Python objects. `pieces`
tells what of the text the assistant says, which is what a model learns of it. `read_message` says what a message may
be, in a file and in a request.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.commandline import console
from experiments.data import DataError
from experiments.data.corpus import read_text

FILE = "chat_template.jinja"
BESIDE = "additional_chat_templates"  # a folder of those by other names, as transformers 4.51 and later write them
Messages = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]  # what a template is told beside messages, by the names that it reads
Pieces = list[tuple[str, bool]]  # stretches of a text, and whether they are the assistant's
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # no characters of any text: Unicode keeps them for such use
NONE: Variables = MappingProxyType({})
_OWN = frozenset({"messages", "add_generation_prompt"})  # variables that are not for others to set
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that files and templates have for one thing
_SAID = (("tool_calls",), ("function_call",), REASONING)  # beside a message's content


def read_message(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as transformers gives it to templates: without what is null, reasoning by all of its names.

    A `content` of parts is their text, and calls of tools have values for arguments, as templates write these as JSON.

    Raises:
        ValueError: a part is no text, or a call no function with its arguments.
    """
    made = {name: one for name, one in found.items() if one is not None}
    if made.get("tool_calls"):
        made = {"content": "", **made, "tool_calls": _calls(made["tool_calls"])}
    if isinstance(made.get("content"), list):
        made["content"] = "".join(_text(part, f"content[{i}]") for i, part in enumerate(made["content"]))
    reasoning = next((made[name] for name in REASONING if name in made), None)
    return made if reasoning is None else {"thinking": reasoning, **made, "reasoning_content": reasoning}


def _text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"`{where}` must be of type text, and have a `text`: a `content` is text here")
    return text


def _calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError("`tool_calls` must be a list")
    return [_call(call, f"tool_calls[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"`{where}` must be of a `function` with a `name` and `arguments`")
    made = {**function, "arguments": from_json(function.get("arguments") or {}, f"{where}.function.arguments")}
    return {**call, "function": made} if "function" in call else made


def from_json(value: Any, where: str) -> Any:
    """Return a value that may be told as text, which is JSON then.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{where}` is no JSON: {error}") from None


def unwritten(message: Mapping[str, Any], chat: "ChatTemplate | Plain") -> str | None:
    """Return the name of what a message says beside its content, if the format does not write that."""
    for names in _SAID:
        said = [name for name in names if message.get(name)]
        if said and not any(chat.takes(name) for name in said):
            return said[0]
    return None


def learned(messages: Messages, first: int = 0) -> list[int]:
    """Return which messages count from one on: the assistant's, but for those of `weight` 0, as OpenAI's format has."""
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [i for i in spoken if i >= first and messages[i].get("weight") != 0]


class Plain:
    """The format of tokenizers without a template: each message after its role, on a line of its own."""

    identity = "plain-1"
    name = "the format of tokenizers without a chat template"
    variables: frozenset[str] = frozenset()

    @property
    def for_tools(self) -> "Plain":
        """Itself."""
        return self

    def takes(self, name: str) -> bool:
        """Return whether it writes what a message has under a name."""
        return name in ("role", "content")

    def render(self, messages: Messages, variables: Variables = NONE, *, answer: bool = True) -> str:
        """Return the text of a conversation; with `answer`, up to where the assistant is to speak."""
        said = "".join(text for text, _ in self.pieces(messages, variables=variables))
        return said.replace(CLOSE, "") + "assistant: " * answer

    def pieces(self, messages: Messages, first: int = 0, variables: Variables = NONE) -> Pieces:
        """Return the text in pieces, of which the assistant's count from message `first` on; `CLOSE` ends these."""
        assert not variables
        found: Pieces = []
        counted = learned(messages, first)
        for i, message in enumerate(messages):
            spoken = message["role"] == "assistant"
            said = message["content"] + CLOSE * spoken
            found += [(f"{message['role']}: ", False), (said, i in counted), ("\n", False)]
        return found


_ALWAYS = ("bos_token", "eos_token")


def _named(source: str) -> list[str]:
    return re.findall(r"\b\w+_token\b", source)


class ChatTemplate:
    """A template and the special tokens that it may name.

    Attributes:
        identity: changes when the text of a conversation does.
        name: for people.
        variables: what the template may be told beside messages, `tools` say, by name.
        for_tools: the template for conversations with tools, which some folders have beside; else itself.
    """

    def __init__(self, source: str, special: Mapping[str, str | None], where: str, for_tools: str | None = None):
        self._special = {name: token or "" for name, token in special.items()}
        self._where, self._source, self.name = where, source, f"the chat template in {where}"
        # What a template does not name is no part of what it is: the caches of texts stay valid.
        named = {name: token for name, token in self._special.items() if name in (*_ALWAYS, *_named(source))}
        self.for_tools = self if for_tools is None else ChatTemplate(for_tools, special, where)
        self.identity = json.dumps([source, named] if for_tools is None else [source, named, self.for_tools.identity])
        try:
            import jinja2.meta
        except ImportError:
            raise DataError(f"chat templates are an extra: {console.install('hf')}") from None
        try:
            plain = _environment()
            self._template = plain.from_string(source)
            self.variables = jinja2.meta.find_undeclared_variables(plain.parse(source)) - _OWN - {*special}
            marks = re.search(r"\{%[-+]?\s*generation\b", source)
            self._marked = _environment(marked=True).from_string(source) if marks else None
        except jinja2.TemplateError as error:
            raise DataError(f"cannot read the chat template in {where}: {error}") from None

    @classmethod
    def read(
        cls, path: Path, told: Mapping[str, Mapping[str, Any]], special: Mapping[str, str | None]
    ) -> "ChatTemplate | None":
        """Return the template of a tokenizer's folder: from its own file, or the first of others that has one.

        Args:
            path: the folder.
            told: what other files hold, by their names.
            special: the tokens that a template may name.

        Raises:
            DataError: it cannot be read.
        """
        file, beside = path / FILE, path / BESIDE / "tool_use.jinja"
        if file.is_file():
            with_tools = read_text(beside, "").decode() if beside.is_file() else None
            return cls(read_text(file, "").decode(), special, str(file), with_tools)
        where = next((name for name, settings in told.items() if settings.get("chat_template")), "")
        found = told[where]["chat_template"] if where else None
        found = [{"name": name, "template": one} for name, one in found.items()] if isinstance(found, dict) else found
        listed = found if isinstance(found, list) else [{"name": "default", "template": found}]  # several by name
        named = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
        default, for_tools = (
            one if isinstance(one, str) else None for one in (named.get("default"), named.get("tool_use"))
        )
        return None if default is None else cls(default, special, str(path / where), for_tools)

    def takes(self, name: str) -> bool:
        """Return whether the template names something, of a message say; what it does not, it leaves out."""
        return re.search(rf"\b{name}\b", self._source) is not None

    def names(self, mark: str) -> bool:
        """Return whether the template has a text in it."""
        return mark in self._source

    def render(self, messages: Messages, variables: Variables = NONE, *, answer: bool = True) -> str:
        """Return the text of a conversation.

        Args:
            messages: each with a `role` (user, assistant, system) and its `content`.
            variables: what else the template is told: `tools`, functions that the model may call, as JSON schemas, and
                what it has of its own. It does not see those that are not of its `variables`.
            answer: end with what begins the model's own turn.

        Raises:
            DataError: the template refuses these messages, in its own words.
        """
        return self._render(self._template, messages, answer, variables)

    def pieces(self, messages: Messages, first: int = 0, variables: Variables = NONE) -> Pieces:
        """Return the text of a conversation in pieces, of which the assistant's count from message `first` on.

        These are what the template itself marks by `{% generation %}`; of a template without marks, what an assistant's
        message adds to the text before it.

        Raises:
            DataError: the template does not tell: a message changes the text before it, or marks are missing.
        """
        counted = learned(messages, first)
        if self._marked is None:
            return self._by_prefix(messages, counted, variables)
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found: Pieces = []
        head, *rest = self._render(self._marked, messages, False, variables).split(OPEN)
        if len(rest) != len(spoken) or any(part.count(CLOSE) != 1 for part in rest):
            raise DataError(
                f"the chat template in {self._where} marks {len(rest)} answers of a conversation that has {len(spoken)}"
            )
        for i, part in zip(spoken, rest, strict=True):
            said, after = part.split(CLOSE)
            if i in counted:
                self._check_whole(messages[i], i, said)
            found += [(said, i in counted), (after, False)]
        return [(head, False), *found]

    def _by_prefix(self, messages: Messages, counted: Sequence[int], variables: Variables) -> Pieces:
        whole, end = self._render(self._template, messages, False, variables), 0
        found: Pieces = []
        for i in counted:
            before = self._render(self._template, messages[:i], True, variables)
            after = self._render(self._template, messages[: i + 1], False, variables)
            if not after.startswith(before):  # which begins a thought, and of a message that is over there is none
                above = self._render(self._template, messages[:i], False, variables)
                alike = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
                before = before[:alike] if alike > len(above) and before.startswith(above) else before
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= end):
                raise DataError(
                    f"the chat template in {self._where} changes the text before message {i + 1}, so that what "
                    "the assistant says is not told. Mark it by {% generation %} and {% endgeneration %} there, or let "
                    'the last answer alone count: give the others `"weight": 0`.'
                )
            self._check_whole(messages[i], i, after[len(before) :])
            found += [(whole[end : len(before)], False), (whole[len(before) : len(after)], True)]
            end = len(after)
        return [*found, (whole[end:], False)]

    def _check_whole(self, message: Mapping[str, Any], i: int, said: str) -> None:
        """Raise DataError if a template leaves out some of what a model is to learn to say, blanks aside."""
        content, written = ("".join(text.split()) for text in (message["content"], said))
        if content not in written:
            raise DataError(
                f"the chat template in {self._where} leaves out a part of message {i + 1} "
                f"({message['content']!r:.60}), as some do with thoughts in its `content`. Take that part out, or "
                "change the template."
            )

    def _render(self, template: Any, messages: Messages, answer: bool, variables: Variables) -> str:
        # Templates are written for transformers, where these two are always there, and none if not given.
        told = {"tools": None, "documents": None, **self._special, **variables}
        try:
            return template.render(messages=list(messages), add_generation_prompt=answer, **told)
        except Exception as error:  # whatever a program that others wrote may raise
            raise DataError(f"the chat template in {self._where} fails: {error}") from None


def _environment(marked: bool = False) -> Any:
    """The environment that chat templates are written for: transformers' own settings, functions and tag.

    With `marked`, what stands in `{% generation %}` comes out between `OPEN` and `CLOSE`.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said; it changes no text."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = lambda text: nodes.Output([nodes.TemplateData(text)], lineno=line)
            return [mark(OPEN), *body, mark(CLOSE)] if marked else body

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    # Jinja's own `tojson` escapes for HTML.
    environment.filters["tojson"] = _json
    functions: dict[str, Any] = {"raise_exception": refuse, "strftime_now": _now}
    environment.globals.update(functions)
    return environment


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)
