"""Conversations and preferences: lines of JSON to ids, with which of them count, cached by content.

A conversation is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`. A
preference is `{"prompt": ..., "chosen": ..., "rejected": ...}`, all three text or all three lists of messages; without
a prompt, what the two lists begin with alike is it.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import configs
from experiments.data import DataError, corpus
from experiments.data.chat import CLOSE, Pieces, Plain
from experiments.data.rows import Conversations, Examples, Pairs, Rows

SHIPPED = Path(__file__).parent / "examples"
Encoded = tuple[np.ndarray, np.ndarray]


def open_rows(
    data: configs.Chat | configs.Preference, encoder: Any, seq_len: int, vocab_size: int
) -> tuple[Rows, Rows, str]:
    """Return conversations or pairs of them, to train on and held out, and what their ids stand for, in words.

    Raises:
        DataError: what is wrong with them, or that no answer begins within `seq_len`.
    """
    parts = []
    for name, found in zip(("training", "held-out"), example_files(data, encoder), strict=True):
        corpus.check_vocab(int(found.ids.max(initial=0)), 0, vocab_size, encoder.name)
        pairs = isinstance(data, configs.Preference)
        rows = Pairs(found, seq_len) if pairs else Conversations(found, seq_len, data.packed)
        if not len(rows):
            raise DataError(
                f"too short a seq_len={seq_len}: no answer of the {name} part begins within it. "
                f"The shortest conversation has {min(found.lengths(), default=0)} tokens."
            )
        parts.append(rows)
    plain = "; each message after its role, as there is no chat template" * isinstance(encoder.chat, Plain)
    return parts[0], parts[1], f"{encoder.name}{plain}"


def example_files(config: configs.Chat | configs.Preference, encoder: Any) -> tuple[Examples, Examples]:
    """Return the (training, held-out) conversations of a configuration, made where no cache has them.

    Raises:
        DataError: there are no lines, or one is not what it should be; where, and why.
    """
    lines = _lines(config)
    if len(set(lines)) < 2:
        raise DataError(
            f"too few conversations at data.path={config.path}: it takes at least two different ones, to train on and "
            f"to hold out"
        )
    chat = encoder.chat or Plain()
    how = f"{type(config).__name__} 1 {getattr(config, 'field', '')}"
    told = encoder.identity, chat.identity, str(config.val_fraction), str(_ends(encoder))
    beside = [text.encode() for text in told]
    fields = {"ids": corpus.id_type(encoder.vocab_size), "counted": "uint8", "ends": "int64"}
    encode = functools.partial(_encode, config, lines, encoder, chat)
    train, held_out = corpus.encoded_parts(config, how, list(lines), fields, encode, beside=beside)
    return Examples(**train), Examples(**held_out)


def _lines(config: configs.Chat | configs.Preference) -> dict[bytes, str]:
    """Return every line of the files, and where it first is."""
    name = "chat" if isinstance(config, configs.Chat) else "preference"
    path = SHIPPED / f"{name}.jsonl" if config.path is None else Path(config.path).expanduser()
    found: dict[bytes, str] = {}
    for file in corpus.files_at(path, config.pattern):
        for where, line in corpus.json_lines(file):
            found.setdefault(line, where)
    return found


def _encode(
    config: Any, where: dict[bytes, str], encoder: Any, chat: Any, part: Sequence[bytes]
) -> dict[str, np.ndarray]:
    """Return the arrays of `Examples` that lines are."""
    parts: list[Encoded] = []
    for line in corpus.progress(part, "tokenizing"):
        try:
            if isinstance(config, configs.Chat):
                parts.append(_conversation(line, config.field, encoder, chat))
            else:
                parts += _pair(line, encoder, chat)
        except (ValueError, DataError) as error:
            raise DataError(f"cannot read data.path={where[line]}: {error}") from None
    ids, counted = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"ids": ids, "counted": counted, "ends": np.cumsum([len(ids) for ids, _ in parts])}


def _conversation(line: bytes, field: str, encoder: Any, chat: Any) -> Encoded:
    messages = _messages(_object(line).get(field), field)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise ValueError(f"the assistant says nothing in it; its roles are {roles or 'none'}, not user and assistant")
    return _ids(chat.pieces(messages), encoder, chat)


def _pair(line: bytes, encoder: Any, chat: Any) -> list[Encoded]:
    """Return the chosen conversation, then the rejected one; what counts is what comes after the prompt."""
    found = _object(line)
    prompt, chosen, rejected = (found.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        return [_ids([(prompt, False), (answer + CLOSE, True)], encoder, Plain()) for answer in (chosen, rejected)]
    both = [_messages(answer, name) for answer, name in ((chosen, "chosen"), (rejected, "rejected"))]
    if prompt is None:
        alike = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        before, both = both[0][:alike], [messages[alike:] for messages in both]
    else:
        before = _messages(prompt, "prompt")
    for messages, name in zip(both, ("chosen", "rejected"), strict=True):
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"the assistant says nothing in {name!r} after the prompt")
    return [_ids(chat.pieces([*before, *messages], len(before)), encoder, chat) for messages in both]


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the line is no JSON object")
    return found


def _messages(found: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found:
        raise ValueError(f"no list of messages in {field!r}")
    for message in found:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a message in {field!r} has no `role` or no `content` of text")
    return found


def _ends(encoder: Any) -> tuple[int | None, int | None]:
    """Return the id that starts a text without a template, and the one that ends an answer, as far as there are any."""
    return encoder.start, encoder.stops[0] if encoder.stops else encoder.start


def _ids(pieces: Pieces, encoder: Any, chat: Any) -> Encoded:
    """Return the ids of a text in pieces, and which of them count.

    A template writes its own special tokens; without one, a start comes first, and a stop where `CLOSE` stands.
    """
    if not isinstance(chat, Plain):
        return encoder.encode_pieces(pieces)
    ids, counted = [], []
    start, stop = _ends(encoder)
    if start is not None:
        ids, counted = [np.array([start])], [np.zeros(1, bool)]
    for text, counts in pieces:
        made = encoder.encode(text.removesuffix(CLOSE))
        if text.endswith(CLOSE):
            made = np.append(made, encoder.separator if stop is None else stop)
        ids.append(made)
        counted.append(np.full(len(made), counts))
    return np.concatenate(ids).astype(np.int32), np.concatenate(counted)
