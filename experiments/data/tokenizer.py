"""Text to ids and back: bytes by default, or the tokenizer of a Hugging Face folder; and training a BPE.

The packages `tokenizers` and `sentencepiece` (extra `hf`) are imported only where a folder is opened or made.
"""

import hashlib
import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.commandline import console
from experiments.data import DataError
from experiments.data.chat import BESIDE, ChatTemplate, Pieces, Plain
from experiments.data.chat import FILE as TEMPLATE
from experiments.data.corpus import BOS, BYTE_VOCAB, utf8
from zoo.huggingface.folder import said

NEAREST = 8  # ids that say how a text goes on behind them
UNKNOWN = "\ufffd"  # what bytes that are no UTF-8 become
BYTE = re.compile("<0x[0-9A-F]{2}>")
FILE = "tokenizer.json"
GENERATION = "generation_config.json"
SENTENCES = "tokenizer.model"
SETTINGS = "tokenizer_config.json"
OLDER = "chat_template.json"  # of models that see, in older folders
BYTES = "bytes"  # what data.tokenizer, and the settings of weights that were trained on bytes, call them
MOST_BYTES = 1024  # words: a larger vocabulary is hardly one of bytes
SPECIAL = "special_tokens_map.json"  # what older folders name special tokens in
_PLAIN = ("added_tokens.json", "vocab.json", "merges.txt")
FILES = (FILE, SENTENCES, SETTINGS, OLDER, SPECIAL, *_PLAIN, TEMPLATE, f"{BESIDE}/*.jinja")
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
START, STOP = "<bos>", "<eos>"  # of the tokenizers that are trained here
FOUND = ("special", "normalized", "lstrip", "rstrip", "single_word")  # how an added token is found in a text
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # what vocabularies that fall back to bytes call them


class Bytes:
    """Every byte is its own id, and id 256 starts a document. Nothing is needed and nothing is lost."""

    vocab_size = BYTE_VOCAB
    start: int | None = BOS
    stops: tuple[int, ...] = (BOS,)
    chat: ChatTemplate | Plain | None = Plain()
    identity = "bytes-1"
    name = "bytes (256 of them and one that starts each document)"
    separator = BOS

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, without a start."""
        return np.frombuffer(utf8(text) if isinstance(text, str) else text, np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, without a start."""
        return [self.encode(text) for text in texts]

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, as the model expects it to start."""
        return [BOS, *self.encode(text).tolist()]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; what is no UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids if i < BOS).decode(errors="replace")

    def spell(self, token: int) -> tuple[str, bytes | None]:
        """Return the name of an id and the bytes that it adds to a text, None where it is special."""
        return spelled(bytes([token])) if token < BOS else (START, None)

    def marks(self, texts: Sequence[str]) -> dict[int, str]:
        """Return no special tokens, for no text names any."""
        return {}

    def stream(self, before: Sequence[int] = ()) -> "Stream":
        """Return what makes text of ids as they come."""
        return Stream(self.decode, before)


class Stream:
    """Makes text of ids as they come: what of it is complete at each, and in the end the rest.

    What is given out is what the last few ids, which were given out before, and those behind them make, less what the
    former do. A character may take several ids: until then they make U+FFFD.

    Args:
        decode: makes text of ids.
        before: the ids that the text goes on from.
        is_byte: whether an id is a byte, of those tokenizers that make U+FFFD of all neighbours of a wrong one.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        before: Sequence[int] = (),
        is_byte: Callable[[int], bool] | None = None,
    ):
        self._decode, self._is_byte, self._before = decode, is_byte, before
        self._ids: list[int] = []  # the last that were given out, and those that were not
        self._shown: str | None = None  # what the former make

    def __call__(self, token: int) -> str:
        """Take an id; return the text that is now complete."""
        self._begin()
        self._ids.append(int(token))
        whole = self._decode(self._ids)
        return "" if whole.endswith(UNKNOWN) else self._given(whole)

    def rest(self) -> str:
        """Return what is left once no more ids come."""
        return "" if self._shown is None else self._given(self._decode(self._ids))

    def _given(self, whole: str) -> str:
        assert self._shown is not None
        new = whole[len(self._shown) :]
        if new:
            self._ids = self._nearest(self._ids)
            self._shown = self._decode(self._ids)
        return new

    def _begin(self) -> None:
        """Take what is before, when the first id is known to be one; of half a character there, none of it."""
        if self._shown is None:
            self._ids = self._nearest(self._before)
            most = range(min(4, len(self._ids) + 1))
            texts = (self._decode(self._ids[: len(self._ids) - half]) for half in most)
            self._shown = next((text for text in texts if not text.endswith(UNKNOWN)), "")

    def _nearest(self, ids: Sequence[int]) -> list[int]:
        """The last few ids that make some text, from none on that is a byte behind another."""
        first, made = len(ids), ""
        while first and not made:
            first = max(0, first - NEAREST)
            while first and self._is_byte is not None and self._is_byte(ids[first]) and self._is_byte(ids[first - 1]):
                first -= 1
            made = self._decode(ids[first:])
        return [int(i) for i in ids[first:]]


class Folder:
    """The tokenizer of a Hugging Face folder.

    Attributes:
        vocab_size: one more than the largest id.
        start: the id that starts a text, None where the folder names none.
        stops: the ids that end a text or a turn.
        chat: the folder's chat template, if it has one.
        identity: changes when the ids of a text do; `start` and `stops`, which come before and after it, are no part.
        name: for people.
    """

    FILE = FILE

    def __init__(self, path: Path):
        file = path / self.FILE
        self.name = f"the tokenizer in {path}"
        settings = read_json(path / SETTINGS)
        self._inner, self.vocab_size = self._open(file, settings)
        self.identity = self._hash(file)
        mapped = read_json(path / SPECIAL)
        special = {name: _content(settings.get(name)) or _content(mapped.get(name)) for name in SPECIAL_TOKENS}
        named = settings.get("extra_special_tokens")
        special |= {name: _content(token) for name, token in named.items()} if isinstance(named, Mapping) else {}
        self.start = self._id(special["bos_token"])
        self.stops = self._stops(path, special["eos_token"])
        told = {SETTINGS: settings, OLDER: read_json(path / OLDER)}
        self.chat = ChatTemplate.read(path, told, special)

    def _open(self, file: Path, settings: Mapping[str, Any]) -> tuple[Any, int]:
        """Return the package's own tokenizer, and one more than its largest id."""
        tokenizers = _package("tokenizers")
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare `Exception`s
            raise DataError(f"cannot read {file}: {error}") from None
        # Lengths that training with transformers leaves in the file, which sets them anew at every call itself.
        self._cut = inner.truncation is not None or inner.padding is not None
        inner.no_truncation()
        inner.no_padding()
        known = inner.get_vocab(with_added_tokens=True)
        self._added = {text: how for text, how in _added(file.parent, settings).items() if text not in known}
        inner.add_tokens([tokenizers.AddedToken(text, **how) for text, how in self._added.items()])
        self._whole = {i: token.content for i, token in inner.get_added_tokens_decoder().items()}
        self._bytes = _alphabet() if "ByteLevel" in repr(inner.decoder) else {}
        return inner, max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _hash(self, file: Path) -> str:
        """Return a hash of what makes ids of a text."""
        added = json.dumps(self._added) if self._added else ""
        added += "whole" * self._cut  # caches of texts that were cut are not read
        return hashlib.sha256(file.read_bytes() + added.encode()).hexdigest()

    @property
    def separator(self) -> int:
        """The id before each of many documents: the one that starts a text, or one that ends it."""
        found = self.stops[0] if self.start is None and self.stops else self.start
        if found is None:
            raise DataError(f"{self.name} names no bos_token and no eos_token to put between documents")
        return found

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, without a start."""
        return self.encode_batch([utf8(text) if isinstance(text, str) else text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, without a start; what is no UTF-8 becomes U+FFFD."""
        strings = [text.decode(errors="replace") for text in texts]
        found = self._inner.encode_batch(strings, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in found]

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the special tokens that the tokenizer itself adds."""
        return self._inner.encode(utf8(text).decode()).ids

    def json(self) -> str:
        """Return the tokenizer as its file says it."""
        return self._inner.to_str()

    def encode_pieces(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, and which of them begin in a piece that counts."""
        whole = utf8("".join(text for text, _ in pieces)).decode()
        found = self._inner.encode(whole, add_special_tokens=False)
        counts = np.repeat([counts for _, counts in pieces], [len(text) for text, _ in pieces])
        starts = np.array([start for start, _ in found.offsets], np.int64)
        return np.array(found.ids, np.int32), counts[np.minimum(starts, len(counts) - 1)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return self._inner.decode([int(i) for i in ids])

    def marks(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the special tokens, which texts leave out, that are part of any of some texts, by their ids."""
        there = {i: token for i, token in self._whole.items() if any(token in text for text in texts)}
        return {i: token for i, token in there.items() if not self.decode([i])}

    def stream(self, before: Sequence[int] = ()) -> "Stream":
        """Return what makes text of ids as they come.

        Args:
            before: the ids that the text goes on from, if it does: some tokenizers leave out the space that a text
                begins with.
        """
        return Stream(self.decode, before, self._is_byte)

    def _is_byte(self, token: int) -> bool:
        """Whether an id stands for a byte of what the vocabulary does not have."""
        return bool(BYTE.fullmatch(self._inner.id_to_token(token) or ""))

    def spell(self, token: int) -> tuple[str, bytes | None]:
        """Return the name of an id and the bytes that it adds to a text, None where it is special."""
        if token in self._whole:
            return self._whole[token], self.decode([token]).encode() or None
        text = self._inner.id_to_token(token) or ""
        if self._bytes:
            return spelled(bytes(self._bytes[letter] for letter in text))
        return _spelled_piece(text)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._inner.token_to_id(token)

    def _stops(self, path: Path, eos: str | None) -> tuple[int, ...]:
        """Collect what ends a text: ids of the generation config, or the model's; and the tokenizer's own end."""
        named = read_json(path / GENERATION).get("eos_token_id")
        named = said(read_json(path / "config.json"), "eos_token_id") if named is None else named
        found = [*named] if isinstance(named, list) else [named]
        return tuple(sorted({i for i in (*found, self._id(eos)) if isinstance(i, int)}))


class Sentences(Folder):
    """The tokenizer of a folder that has no tokenizer.json but a SentencePiece model, as Llama 2 and Gemma came with.

    Special tokens are found in a text first; what is between them is encoded by itself.
    """

    FILE = SENTENCES

    def _open(self, file: Path, settings: Mapping[str, Any]) -> tuple[Any, int]:
        sentencepiece = _package("sentencepiece")
        try:
            inner = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise DataError(f"cannot read {file}: {error}") from None
        pieces = range(inner.vocab_size())
        self._special = {inner.id_to_piece(i): i for i in pieces if inner.is_control(i)}
        self._special |= {text: int(i) for text, i in read_json(file.parent / "added_tokens.json").items()}
        decoder = settings.get("added_tokens_decoder")
        self._shown: set[int] = set()  # added tokens that are text, as `<think>` is
        for i, token in (decoder if isinstance(decoder, Mapping) else {}).items():
            if (text := _content(token)) is not None:
                self._special[text] = int(i)
                self._shown |= {int(i)} if isinstance(token, Mapping) and token.get("special") is False else set()
        self._whole = {i: text for text, i in self._special.items()}
        longest = sorted(self._special, key=len, reverse=True)
        self._split = re.compile("|".join(re.escape(text) for text in longest))
        self._starts = settings.get("add_bos_token", True)
        return inner, max([inner.vocab_size() - 1, *self._special.values()]) + 1

    def _hash(self, file: Path) -> str:
        added = json.dumps(self._special, sort_keys=True)  # which other files name too
        return hashlib.sha256(file.read_bytes() + added.encode()).hexdigest()

    def _segments(self, text: str) -> list[tuple[int, str]]:
        """Return where each stretch of a text begins, and it: a special token, or what is between two."""
        found, end = [], 0
        for match in self._split.finditer(text) if self._special else ():
            found += [(end, text[end : match.start()]), (match.start(), match[0])]
            end = match.end()
        return [(start, part) for start, part in [*found, (end, text[end:])] if part]

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return ids, and where in the text each begins."""
        ids, starts = [], []
        for start, part in self._segments(text):
            if part in self._special:
                ids, starts = [*ids, self._special[part]], [*starts, start]
                continue
            pieces = self._inner.encode(part, return_type="proto").pieces
            characters = np.repeat(np.arange(len(part)), [len(one.encode()) for one in part])  # the one of each byte
            ids += [piece.id for piece in pieces]
            starts += [start + int(characters[min(piece.begin, len(characters) - 1)]) for piece in pieces]
        return ids, starts

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, without a start; what is no UTF-8 becomes U+FFFD."""
        return [np.array(self._encode(text.decode(errors="replace"))[0], np.int32) for text in texts]

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, after the token that starts a text unless the folder says otherwise."""
        start = [self.start] if self._starts and self.start is not None else []
        return [*start, *self._encode(utf8(text).decode())[0]]

    def encode_pieces(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, and which of them begin in a piece that counts."""
        ids, starts = self._encode(utf8("".join(text for text, _ in pieces)).decode())
        counts = np.repeat([counts for _, counts in pieces], [len(text) for text, _ in pieces])
        return np.array(ids, np.int32), counts[np.minimum(np.array(starts, np.int64), len(counts) - 1)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens left out."""
        stretches = itertools.groupby((int(i) for i in ids), lambda i: i if i in self._whole else None)
        text = "".join(
            self._decoded([*own]) if added is None else self._whole[added] * len([*own])
            for added, own in stretches
            if added is None or added in self._shown
        )
        return text.removeprefix(" ")

    def _decoded(self, ids: list[int]) -> str:
        """Return the text of pieces, with the space that it may begin with."""
        return " " * self._inner.id_to_piece(ids[0]).startswith("\u2581") + self._inner.decode(ids)

    def _is_byte(self, token: int) -> bool:
        return token < self._inner.vocab_size() and self._inner.is_byte(token)

    def spell(self, token: int) -> tuple[str, bytes | None]:
        """Return the name of an id and the bytes that it adds to a text, None where it is special."""
        if token in self._whole:
            return self._whole[token], self.decode([token]).encode() or None
        return _spelled_piece(self._inner.id_to_piece(token) if token < self._inner.vocab_size() else "")

    def _id(self, token: str | None) -> int | None:
        if token is None or token in self._special:
            return self._special.get(token or "")
        found = self._inner.piece_to_id(token)
        return None if found == self._inner.unk_id() else found


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that are its tokenizer's."""
    return [file for pattern in FILES for file in folder.glob(pattern) if file.is_file()]


def open_tokenizer(path: str | Path | None, weights: str | Path | None = None) -> Bytes | Folder:
    """Return the tokenizer at a path; without one, that of the weights' folder if it has one, else bytes.

    Raises:
        DataError: the folder holds no tokenizer that can be read, the extra `hf` is missing, or nothing says that the
            weights' large vocabulary is one of bytes.
    """
    if str(path) == BYTES:
        return Bytes()
    folder = Path(path if path is not None else weights or "").expanduser()
    if path is None and weights is None:
        return Bytes()
    for cls in (Folder, Sentences):
        if (folder / cls.FILE).is_file():
            return cls(folder)
    if path is not None:
        why = f"there is no {FILE} and no {SENTENCES}" if folder.is_dir() else "there is no such folder"
        raise DataError(f"cannot read a tokenizer at {path}: {why}")
    words = _vocabulary(folder)
    if words > MOST_BYTES and read_json(folder / SETTINGS).get("tokenizer_class") != BYTES:
        raise DataError(
            f"cannot read text for {folder}: its vocabulary has {words:,} words, and it holds no {FILE} and no "
            f"{SENTENCES}. Copy one there, name a folder that has one (data.tokenizer=FOLDER, generate.py's "
            f"tokenizer=FOLDER), or say {BYTES} in its place for weights that were trained on bytes."
        )
    return Bytes()


def _vocabulary(folder: Path) -> int:
    """Return how many words the weights of a folder know; 0 where it does not say."""
    found = said(read_json(folder / "config.json"), "vocab_size")
    return found if isinstance(found, int) else 0


def train_bpe(texts: Iterable[bytes], vocab_size: int, folder: Path) -> Folder:
    """Train a byte-level BPE, write it as a folder, and return it. Every text survives a round trip.

    Raises:
        DataError: the vocabulary is smaller than the bytes and the two special tokens that it starts from.
    """
    tokenizers = _package("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 2:
        raise DataError(
            f"vocab_size={vocab_size} is too small: 256 bytes and 2 special tokens need {len(alphabet) + 2}"
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[STOP, START], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, inner.token_to_id(START))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / FILE))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": START, "eos_token": STOP}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return Folder(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no file.

    Raises:
        DataError: the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"cannot read {path}: it must hold a JSON object")
    return found


def spelled(made: bytes) -> tuple[str, bytes]:
    """Return the name of an id that stands for bytes, and these; what is no UTF-8 is named by its numbers."""
    return made.decode(errors="backslashreplace"), made


def _spelled_piece(text: str) -> tuple[str, bytes]:
    """Return likewise of a piece of a vocabulary that has signs for spaces and single bytes."""
    byte = _BYTE.fullmatch(text)
    return spelled(bytes.fromhex(byte[1]) if byte else text.replace("\u2581", " ").encode())


def _alphabet() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for, as GPT-2 has it.

    Those that can be seen are themselves in Latin-1, and the others are the letters from 256 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _added(folder: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """Return the tokens that files beside tokenizer.json name, and how each is found in a text, in their ids' order."""
    decoder = settings.get("added_tokens_decoder")
    listed = sorted(decoder.items(), key=lambda pair: int(pair[0])) if isinstance(decoder, Mapping) else []
    tokens = [(token, {}) for _, token in listed]
    tokens += [
        (text, {}) for text, _ in sorted(read_json(folder / "added_tokens.json").items(), key=lambda one: one[1])
    ]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        given = settings.get(name) or []
        tokens += [(token, {"special": True}) for token in (given.values() if isinstance(given, Mapping) else given)]
    found: dict[str, dict[str, bool]] = {}
    for token, how in tokens:
        told = {name: token[name] for name in FOUND if name in token} if isinstance(token, Mapping) else {}
        if (text := _content(token)) is not None:
            found.setdefault(text, how | told)
    return found


def _content(token: Any) -> str | None:
    """Read a special token, which is written as its text or as an object that holds it."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(
            f"tokenizers are an extra, and the package {name} is missing: {console.install('hf')}, or leave "
            f"data.tokenizer out for bytes"
        ) from None
