"""Answers that keep to a form: JSON schemas, regular expressions and grammars, by `llguidance`.

Before each id it says which may follow, so that whatever the model prefers, the text is of the form.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.commandline import console
from experiments.data.tokenizer import Bytes, Folder
from zoo.engine.sampling import Guide

KINDS = ("json", "regex", "grammar")


class FormError(ValueError):
    """A form that cannot be kept to."""


class Matched:
    """One text on its way through a grammar (`zoo.engine.sampling.Guide`)."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def allowed(self) -> np.ndarray:
        """Return a bit for every id."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)

    def take(self, token: int) -> bool:
        """Take an id; return whether nothing can follow.

        Raises:
            FormError: the form cannot be followed any further.
        """
        if not self._matcher.consume_token(token):
            raise FormError(f"the form cannot be followed: {_reason(self._matcher.get_error())}")
        return self._matcher.is_stopped()


class Grammars:
    """Makes guides for a tokenizer's ids.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._vocabulary = tokenizer, None

    def guides(self, form: str, source: str, count: int) -> list[Guide]:
        """Return guides of so many texts through one form.

        Args:
            form: `json` for a JSON schema, `regex`, or `grammar` in Lark's notation.
            source: the form.
            count: how many texts.

        Raises:
            FormError: the form is none, in llguidance's words; or the tokenizer or the package has none.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise FormError(f"answers of a form are an extra: {console.install('serve')}") from None
        make = {
            "json": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer)
        try:
            matcher = LLMatcher(self._vocabulary, make[form](source))
        except ValueError as error:
            raise FormError(f"the {form} cannot be followed: {_reason(str(error))}") from None
        if matcher.is_error():
            raise FormError(f"the {form} cannot be followed: {_reason(matcher.get_error())}")
        return [Matched(matcher.deep_copy()) for _ in range(count)]


def _reason(said: str) -> str:
    """Return an error of llguidance in one line: its first, and of an expression what is wrong and why."""
    first, *rest = said.strip().splitlines() or [""]
    end = next((i for i, line in enumerate(rest) if line.startswith("error: ")), None)
    shown = [] if end is None else [line.strip() for line in rest[: end + 1] if line.strip(" ^~")]
    return " ".join([first, *shown])


def calls_schema(tools: Sequence[Any]) -> str:
    """Return the JSON schema of a call of one of these tools."""
    anything = {"type": "object"}
    return json.dumps(
        {
            "x-guidance": {"whitespace_flexible": False},
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"name": {"const": tool["name"]}, "arguments": tool.get("parameters") or anything},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
                for tool in tools
            ],
        }
    )


def _vocabulary(tokenizer: Any) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    if isinstance(tokenizer, Bytes):
        return LLTokenizer(TokenizerWrapper(_OfBytes()))
    if type(tokenizer) is not Folder or not tokenizer.stops:
        raise FormError(f"answers of a form need a tokenizer.json and an id that ends texts: {tokenizer.name} has not")
    return LLTokenizer(tokenizer.json(), eos_token=list(tokenizer.stops))


class _OfBytes:
    """`Bytes` as llguidance reads tokenizers."""

    eos_token_id, bos_token_id = Bytes.stops[0], None
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids = Bytes.stops

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
