"""What a run reads."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
import dataclasses
from dataclasses import dataclass
from typing import Any

from experiments.configs.fields import FUNCTION, NOT_NEGATIVE, POSITIVE, Bound, choice, option, refuse

PART = Bound(lambda value: 0 < value < 1, "it must be above 0 and below 1: something is held out, to evaluate on")


@dataclass(frozen=True, kw_only=True)
class Data:
    """What every kind of text has in common."""

    val_fraction: float = option(0.03, "share of the documents held out, chosen by the hash of their content", PART)
    cache: str | None = option(None, "folder of the tokenized copy (default: your user cache)", path=True)
    tokenizer: str | None = option(
        None, "folder with a tokenizer.json (default: that of model.weights, else bytes)", path=True
    )
    packed: bool = option(False, "keep the documents that share a row apart: none sees another")


@dataclass(frozen=True, kw_only=True)
class Documents(Data):
    """Documents of text, of which rows are cut."""


@choice("data", "stdlib")
@dataclass(frozen=True, kw_only=True)
class Stdlib(Documents):
    """The source text of the Python standard library that runs this: real code and prose, no network."""


@choice("data", "pydoc")
@dataclass(frozen=True, kw_only=True)
class Pydoc(Documents):
    """The documentation topics that ship with Python (pydoc_data.topics): 0.5 MB of English prose."""


@choice("data", "text")
@dataclass(frozen=True, kw_only=True)
class Text(Documents):
    """Your own text: data=text data.path=FILE_OR_FOLDER."""

    path: str = option(dataclasses.MISSING, "file or folder", path=True)
    pattern: str = option("*.txt,*.md,*.jsonl,*.py,*.rst", "which files of a folder", names=True)
    field: str = option("text", "what holds the text in a line of a .jsonl file")


@choice("data", "tokens")
@dataclass(frozen=True, kw_only=True)
class Tokens(Data):
    """Token ids made elsewhere: data=tokens data.path=FILE.bin data.dtype=uint16."""

    path: str = option(dataclasses.MISSING, "file, folder or glob of *.bin", path=True)
    dtype: str = option("uint16", "integer type of the ids: uint16, uint32 or int32")
    bytes_per_token: float | None = option(None, "average bytes of text per token (to report bits per byte)", POSITIVE)
    separator: int | None = option(
        None, "the id that starts each document, whose prediction does not count", NOT_NEGATIVE
    )

    def __post_init__(self):
        if self.dtype not in ("uint16", "uint32", "int32"):
            raise refuse("data.dtype", self.dtype, "choose uint16, uint32 or int32")
        if self.packed and self.separator is None:
            raise refuse("data.packed", "true", "data=tokens needs data.separator=ID to tell documents apart")


@choice("data", "chat")
@dataclass(frozen=True, kw_only=True)
class Chat(Data):
    """Conversations of which what the assistant says is learned: data=chat data.path=FILE.jsonl."""

    path: str | None = option(None, "file or folder of .jsonl (default: a few short ones that come along)", path=True)
    pattern: str = option("*.jsonl", "which files of a folder", names=True)
    field: str = option("messages", "what holds the messages in a line: each has a `role` and its `content`")
    val_fraction: float = option(0.1, "share of the conversations held out, chosen by the hash of their content", PART)
    packed: bool = option(True, "put several conversations into a row; none sees another")


@choice("data", "preference")
@dataclass(frozen=True, kw_only=True)
class Preference(Data):
    """Pairs of answers, one preferred: data=preference data.path=FILE.jsonl."""

    path: str | None = option(None, "file or folder of .jsonl (default: a few short ones that come along)", path=True)
    pattern: str = option("*.jsonl", "which files of a folder", names=True)
    val_fraction: float = option(0.1, "share of the pairs held out, chosen by the hash of their content", PART)

    def __post_init__(self):
        if self.packed:
            raise refuse("data.packed", "true", "the two answers of a pair have rows of their own")


@choice("data", "grain")
@dataclass(frozen=True, kw_only=True)
class Grain(Data):
    """A Grain pipeline: data.dataset=MODULE:FUNCTION, which returns a grain.MapDataset of {"tokens": ids}."""

    dataset: str = option(
        dataclasses.MISSING, "MODULE:FUNCTION or FILE.py:FUNCTION of a finite grain.MapDataset", FUNCTION
    )


@choice("data", "synthetic")
@dataclass(frozen=True, kw_only=True)
class Synthetic(Data):
    """Random ids repeated once: the best possible loss is known."""

    vocab: int = option(64, "how many different ids", POSITIVE)

    def __post_init__(self):
        if self.packed:
            raise refuse("data.packed", "true", "random ids have no documents")


@choice("data", "custom")
@dataclass(frozen=True, kw_only=True)
class CustomData(Data):
    """Your own data: data=MODULE:FUNCTION, which returns documents of text or ids, or rows."""

    fn: str = option(
        dataclasses.MISSING, "MODULE:FUNCTION or FILE.py:FUNCTION that returns documents or rows", FUNCTION
    )
    kwargs: dict[str, Any] = option({}, "its own arguments: data.kwargs.NAME=VALUE")
