"""Conversations and preferences: lines of JSON to ids, with which of them count, cached by content.

A conversation is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`. A
preference is `{"prompt": ..., "chosen": ..., "rejected": ...}`, all three text or all three lists of messages; without
a prompt, what the two lists begin with alike is it.

A line's `tools` and `chat_template_kwargs` and a message's `tool_calls`, `reasoning_content` and the like are written
by the chat template, and refused where it does not name them. `tools` may be JSON in text, as in files that have a type
for each key. A message of `weight` 0 does not count. Other keys of a line are not read.
"""

import difflib
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import configs
from experiments.data import DataError, corpus
from experiments.data.chat import CLOSE, Pieces, Plain, from_json, learned, read_message, unwritten
from experiments.data.rows import Conversations, Examples, Pairs, Rows

SHIPPED = Path(__file__).parent / "examples"
Encoded = tuple[np.ndarray, np.ndarray]
ANSWERS = ("chosen", "rejected")


def open_rows(
    data: configs.Chat | configs.Preference, encoder: Any, seq_len: int, vocab_size: int
) -> tuple[Rows, Rows, str]:
    """Return conversations or pairs of them, to train on and held out; and in words what of them stands for what.

    That is what their ids stand for, and how many are left out or cut, as they go on beyond `seq_len`.

    Raises:
        DataError: what is wrong with them, or that no answer begins within `seq_len`.
    """
    parts, examples, pairs = [], example_files(data, encoder), isinstance(data, configs.Preference)
    for name, found in zip(("training", "held-out"), examples, strict=True):
        corpus.check_vocab(int(found.ids.max(initial=0)), 0, vocab_size, encoder.name)
        rows = Pairs(found, seq_len) if pairs else Conversations(found, seq_len, data.packed)
        if not len(rows):
            raise DataError(
                f"too short a seq_len={seq_len}: no answer of the {name} part begins within it. "
                f"The shortest conversation has {min(found.lengths(), default=0)} tokens."
            )
        parts.append(rows)
    plain = "; each message after its role, as there is no chat template" * isinstance(encoder.chat, Plain)
    return parts[0], parts[1], f"{encoder.name}{plain}{_beyond(examples, seq_len, pairs)}"


def _beyond(parts: Sequence[Examples], seq_len: int, pairs: bool) -> str:
    """Return in words how many conversations, or pairs of them, are left out or cut; nothing where none is."""
    found = [part.kept(seq_len, 1 + pairs) for part in parts]
    kept, cut = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    of = f"{len(kept):,} {'pairs' if pairs else 'conversations'}"
    left_out = f"; left out: {np.sum(~kept):,} of {of}, whose answers begin beyond seq_len={seq_len}"
    ends = f"; cut at seq_len={seq_len}: the answers of {np.sum(cut):,} of {of}"
    return left_out * (not kept.all()) + ends * bool(cut.any())


def example_files(config: configs.Chat | configs.Preference, encoder: Any) -> tuple[Examples, Examples]:
    """Return the (training, held-out) conversations of a configuration, made where no cache has them.

    Raises:
        DataError: there are no lines, or one is not what it should be; where, and why.
    """
    lines, places = _lines(config)
    if len(places) < 2:
        what = "conversations" if isinstance(config, configs.Chat) else "pairs"
        raise DataError(
            f"too few {what} at data.path={config.path}: {len(places)}, and it takes at least two different ones, to "
            f"train on and to hold out"
        )
    chat = encoder.chat or Plain()
    how = f"{type(config).__name__} 3 {getattr(config, 'field', '')}"
    told = encoder.identity, chat.identity, str(config.val_fraction), str(_ends(encoder))
    beside = [text.encode() for text in told]
    fields = {"ids": corpus.id_type(encoder.vocab_size), "counted": "uint8", "ends": "int64"}
    encode = functools.partial(_encode, config, places, encoder, chat)
    train, held_out = corpus.encoded_parts(config, how, lines, fields, encode, beside=beside)
    return Examples(**train), Examples(**held_out)


def _lines(config: configs.Chat | configs.Preference) -> tuple[list[bytes], dict[bytes, str]]:
    """Return every line of the files, as often as it is there, and where it first is."""
    name = "chat" if isinstance(config, configs.Chat) else "preference"
    path = SHIPPED / f"{name}.jsonl" if config.path is None else Path(config.path).expanduser()
    lines: list[bytes] = []
    places: dict[bytes, str] = {}
    for file in corpus.files_at(path, config.pattern):
        for where, line in corpus.json_lines(file):
            lines.append(line)
            places.setdefault(line, where)
    return lines, places


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
    found = _object(line)
    if found.get(field) is None:
        raise ValueError(
            f"no list of messages in {field!r}. {_others(found, field)} data.field=NAME says where they are"
        )
    chat = chat.for_tools if found.get("tools") else chat
    messages, variables = _messages(found[field], field, chat), _variables(found, chat)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise ValueError(f"the assistant says nothing in it; its roles are {roles or 'none'}, not user and assistant")
    if not learned(messages):
        raise ValueError("all that the assistant says in it has `weight` 0: leave the line out, or let something count")
    return _ids(chat.pieces(messages, variables=variables), encoder, chat)


def _pair(line: bytes, encoder: Any, chat: Any) -> list[Encoded]:
    """Return the chosen conversation, then the rejected one; what counts is what comes after the prompt."""
    found = _without_twice_told(_object(line))
    _check_pair(found)
    prompt, answers = found.get("prompt"), [found[name] for name in ANSWERS]
    if isinstance(prompt, str):
        if named := [name for name in ("tools", "chat_template_kwargs") if found.get(name)]:
            raise ValueError(f"`{named[0]}` are for messages, and its answers are text")
        return [_ids([(prompt, False), (answer + CLOSE, True)], encoder, Plain()) for answer in answers]
    chat = chat.for_tools if found.get("tools") else chat
    both = [_messages(answer, name, chat) for answer, name in zip(answers, ANSWERS, strict=True)]
    if prompt is None:
        alike = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        before, both = both[0][:alike], [messages[alike:] for messages in both]
    else:
        before = _messages(prompt, "prompt", chat)
    for messages, name in zip(both, ANSWERS, strict=True):
        if not learned(messages):
            raise ValueError(f"the assistant says nothing in {name!r} after the prompt that counts")
    variables = _variables(found, chat)
    return [_ids(chat.pieces([*before, *messages], len(before), variables), encoder, chat) for messages in both]


def _without_twice_told(found: dict[str, Any]) -> dict[str, Any]:
    """Return a line without a `prompt` of text that both answers begin with too, as UltraFeedback has it."""
    prompt, answers = found.get("prompt"), [found.get(name) for name in ANSWERS]
    begins = [answer[:2] if isinstance(answer, list) else [] for answer in answers]
    says = lambda one: isinstance(one, dict) and one.get("content") == prompt
    twice = isinstance(prompt, str) and all(any(map(says, begin)) for begin in begins)
    return {**found, "prompt": None} if twice else found


def _check_pair(found: dict[str, Any]) -> None:
    """Raise a ValueError that names the key, unless a line's prompt and answers are there and all of one kind."""
    for name in ANSWERS:
        if found.get(name) is None:
            raise ValueError(f"there is no {name!r}. {_others(found, name)}")
    given = {name: found[name] for name in ("prompt", *ANSWERS) if found.get(name) is not None}
    if "prompt" not in given:
        if close := difflib.get_close_matches("prompt", found.keys() - {"prompt"}, 1, 0.85):
            raise ValueError(f"there is no 'prompt'. Did you mean `{close[0]}`?")
        if any(isinstance(answer, str) for answer in given.values()):
            raise ValueError("there is no 'prompt', and its answers are text: give a prompt of text, or messages")
    kinds = {str: "text", list: "a list"}
    told = {name: kinds.get(type(one), f"{one!r:.20}") for name, one in given.items()}
    if len(set(told.values())) > 1:
        of = ", ".join(f"{name!r} is {kind}" for name, kind in told.items())
        raise ValueError(f"{of}: give text in all of them, or lists of messages")


def _others(found: dict[str, Any], name: str) -> str:
    """Return in words what a line has that lacks a key."""
    names = [one for one in found if one != name]
    close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean `{close[0]}`?" if close else f"It has: {', '.join(names[:12]) or 'nothing'}."


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the line is no JSON object")
    if found.get("functions"):
        raise ValueError("`functions` would not be read: give them as `tools`")
    return found


def _variables(found: dict[str, Any], chat: Any) -> dict[str, Any]:
    """Return what a line tells the chat template beside messages: functions, as JSON schemas, and its own settings."""
    tools = from_json(found.get("tools") or [], "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"`tools` is {tools!r:.40}, and no list of functions, each a JSON object")
    own = from_json(found.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(own, dict):
        raise ValueError(f"`chat_template_kwargs` is {own!r:.40}, and no JSON object")
    told = {name: one for name, one in own.items() if one is not None} | ({"tools": tools} if tools else {})
    if unread := [name for name in told if name not in chat.variables]:
        raise ValueError(f"`{unread[0]}` is told, and {chat.name} does not read it: use one that does, or leave it out")
    return told


def _messages(found: Any, field: str, chat: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found:
        raise ValueError(f"no list of messages in {field!r}")
    return [_message(message, f"message {i} in {field!r}", chat) for i, message in enumerate(found, 1)]


def _message(found: Any, where: str, chat: Any) -> dict[str, Any]:
    """Return a message as templates take it."""
    try:
        made = read_message(found) if isinstance(found, dict) else {}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not all(isinstance(made.get(name), str) for name in ("role", "content")):
        raise ValueError(f"{where} has no `role` or no `content` of text")
    if lost := unwritten(made, chat):
        raise ValueError(
            f"{where} has `{lost}`, which {chat.name} does not write: put it into `content`, or leave it out"
        )
    weight = made.get("weight", 0)
    if weight not in (0, 1) or (weight and made["role"] != "assistant"):
        raise ValueError(
            f"{where} is of role {made['role']!r} and has `weight` {weight!r:.20}: it must be 0 or 1, and 1 is for "
            "what the assistant says"
        )
    return made


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
