"""Reasoning parsers: what a model thinks before it answers, told apart from the answer as both come.

Models mark their thoughts in one of a few ways, and their chat templates name the marks. Most think between two of
them, the first of which some templates write themselves. gpt-oss says each thing in a channel of its own (harmony):
what it thinks in `analysis`, calls to the tool that is to receive them, all else to the user.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from experiments.data.chat import ChatTemplate, Plain
from experiments.serving.stops import begins

PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
)
START, CHANNEL, MESSAGE, END = HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


class Parser(Protocol):
    """Reads one answer."""

    def feed(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        """Take the next piece of the text; return what is new of the thoughts and of the answer."""
        ...


class Unmarked:
    """A text that is all answer."""

    def feed(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        """Return it as answer."""
        return "", piece


class Between:
    """Thoughts between two marks, then the answer, both without the blanks around the marks.

    Args:
        marks: what begins the thoughts and what ends them.
        thinking: whether the prompt has begun them. They may begin an answer otherwise, and nowhere else.
    """

    def __init__(self, marks: tuple[str, str], *, thinking: bool):
        self._open, self._close = marks
        self._thinking: bool | None = thinking or None  # None until it is known
        self._held, self._blank = "", True  # what is not told yet, and whether blanks that come first are left out

    def feed(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        """Take the next piece of the text; return what is new of the thoughts and of the answer."""
        self._held += piece
        thought, rest = "", self._held.lstrip()
        if self._thinking is None and rest.startswith(self._open):
            self._held, self._thinking = rest[len(self._open) :], True
        elif self._thinking is None and (last or not self._open.startswith(rest)):
            self._thinking = self._blank = False
        if self._thinking:
            inner, ended, rest = self._trimmed().partition(self._close)
            end = len(inner) if ended or last else len(inner) - begins(inner, self._close)
            thought = inner[:end].rstrip()
            self._held = rest if ended else inner[len(thought) :]
            self._thinking, self._blank = not ended, self._blank or bool(ended)
        if self._thinking is not False:
            return thought, ""
        said, self._held = self._trimmed(), ""
        return thought, said

    def _trimmed(self) -> str:
        found = self._held.lstrip() if self._blank else self._held
        self._blank = not found
        return found


class Channels:
    """Messages of a header and what it says to whom; what is said to a tool is told as a call of it, once it is whole.

    A text that does not begin with a header is an answer.
    """

    def __init__(self) -> None:
        self._held, self._told = "", {False: "", True: ""}  # what is not told yet, and what is: answer and thoughts
        self._header, self._thinks, self._tool = True, False, ""

    def feed(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        """Take the next piece of the text; return what is new of the thoughts and of the answer."""
        self._held += piece
        self._told = {False: "", True: ""}
        while self._read_header() if self._header else self._read_message(last):
            pass
        return self._told[True], self._told[False]

    def _read_header(self) -> bool:
        first = self._held.lstrip()
        if not any(first.startswith(mark[: len(first)]) for mark in (START, CHANNEL, "to=")):
            self._header, self._thinks, self._tool = False, False, ""
            return True
        header, ended, rest = self._held.partition(MESSAGE)
        if ended:
            tool, channel = re.search(r"\bto=(?:functions\.)?([\w.-]+)", header), header.partition(CHANNEL)[2]
            self._tool = tool[1] if tool else ""
            self._held, self._header, self._thinks = rest, False, channel.strip().startswith("analysis") and not tool
        return bool(ended)

    def _read_message(self, last: bool) -> bool:
        ends = {self._held.find(mark): mark for mark in (END, START) if mark in self._held}
        at = min(
            ends, default=len(self._held) - (0 if last else max(begins(self._held, mark) for mark in (END, START)))
        )
        said = self._held[:at]
        if self._tool and (ends or last):
            said = f'<tool_call>{{"name": {json.dumps(self._tool)}, "arguments": {said}}}</tool_call>'
        if not self._tool or ends or last:
            self._told[self._thinks] += said
            self._held = self._held[at:].removeprefix(END)
        self._header = bool(ends)
        return bool(ends)


@dataclass(frozen=True)
class Format:
    """How a model marks its thoughts.

    Attributes:
        marks: texts with the special tokens that a parser has to see.
        parser: makes the parser of an answer to a prompt.
    """

    marks: tuple[str, ...]
    parser: Callable[[str], Parser]


def of_template(chat: ChatTemplate | Plain | None) -> Format | None:
    """Return how the model of a chat template marks its thoughts, if the template names such marks."""
    if chat is None or isinstance(chat, Plain):
        return None
    if all(chat.names(mark) for mark in (CHANNEL, MESSAGE)):
        return Format((*HARMONY, "<|constrain|>"), lambda _: Channels())
    pair = next((pair for pair in PAIRS if chat.names(pair[1])), None)
    if pair is None:
        return None
    opened = pair[0].rstrip()
    return Format(pair, lambda prompt: Between(pair, thinking=prompt.rstrip().endswith(opened)))
