"""Chat templates: Jinja programs that come with a tokenizer and turn messages into the text a model was trained on.

They are read from folders that others made, so they run in Jinja's sandbox, without access to Python objects.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.corpus import DataError

FILE = "chat_template.jinja"


class ChatTemplate:
    """A template and the special tokens that it may name."""

    def __init__(self, source: str, special: Mapping[str, str | None], where: str):
        self._special = {name: token or "" for name, token in special.items()}
        self._where = where
        try:
            import jinja2
        except ImportError:
            raise DataError("chat templates are an extra: pip install -e '.[hf]'") from None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"cannot read the chat template in {where}: {error}") from None

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any], special: Mapping[str, str | None]) -> "ChatTemplate | None":
        """Return the template of a tokenizer's folder, from its own file or from `tokenizer_config.json`."""
        file = path / FILE
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"), special, str(file))
        found = settings.get("chat_template")
        if isinstance(found, list):  # several by name
            named = {
                one["name"]: one["template"]
                for one in found
                if isinstance(one, dict) and {"name", "template"} <= set(one)
            }
            found = named.get("default")
        return cls(found, special, str(path / "tokenizer_config.json")) if isinstance(found, str) else None

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """Return the text of a conversation.

        Args:
            messages: each with a `role` (user, assistant, system) and its `content`.
            answer: end with what begins the model's own turn.

        Raises:
            DataError: the template refuses these messages, in its own words.
        """
        import jinja2

        try:
            return self._template.render(messages=list(messages), add_generation_prompt=answer, **self._special)
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"the chat template in {self._where} fails: {error}") from None


def _environment() -> Any:
    """The environment that chat templates are written for: transformers' own settings, functions and tag."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said; it changes no text."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

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
