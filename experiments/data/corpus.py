"""Text to tokens on disk: documents from files, a split by content, a memory-mapped cache.

Unless there is a tokenizer, every byte is its own id (0 to 255) and `BOS` starts each document. The cache is written
once per text, tokenizer, separator and split, under their hash, so that another text or another Python never meets it.
"""

import codecs
import contextlib
import hashlib
import json
import os
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from experiments import configs
from experiments.data import DataError
from experiments.runtime.manifest import user_cache

T = TypeVar("T")
BOS = 256
BYTE_VOCAB = 257
PIECE = 16 * 1024  # bytes: a single document is cut at line ends into pieces of about this length, to hold some out
PARTS = ("train", "held_out")
CHUNK = 256  # documents that are tokenized between two looks at the clock
SKIP = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo", "ensurepip", "encodings"}


def documents(config: configs.Data) -> Iterator[bytes]:
    """Yield the documents that a configuration names, in an order that does not depend on the file system.

    Raises:
        DataError: it names none, or they cannot be read.
    """
    if isinstance(config, configs.Stdlib):
        root = Path(sysconfig.get_paths()["stdlib"])
        for path in sorted(root.rglob("*.py")):
            if not SKIP.intersection(path.relative_to(root).parts):
                yield path.read_bytes()
    elif isinstance(config, configs.Pydoc):
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield topics[name].encode()
    elif isinstance(config, configs.Text):
        yield from _text(Path(config.path).expanduser(), config)
    else:
        raise DataError("this needs text: give data=text data.path=FILE, data=pydoc or data=stdlib")


def texts_of(config: configs.Data, made: Iterable[bytes] | None = None) -> list[bytes]:
    """Return the documents that a configuration names, or those that a user's function made, but for empty ones.

    Raises:
        DataError: there are none.
    """
    found = [text for text in (documents(config) if made is None else made) if text]
    if not found:
        raise DataError(f"no text at {_where(config)}: every document is empty")
    return found


def _where(config: configs.Data) -> str:
    return next((f"data.{key}={getattr(config, key)}" for key in ("path", "fn") if hasattr(config, key)), "data")


def _text(path: Path, config: configs.Text) -> Iterator[bytes]:
    for file in files_at(path, config.pattern):
        if file.suffix.lower() == ".jsonl":
            yield from (_field(where, line, config.field) for where, line in json_lines(file))
            continue
        content = read_text(file)
        if file.suffix.lower() == ".json" and isinstance(_first_object(content).get(config.field), str):
            raise DataError(
                f"cannot read data.path={file} as one text: it holds JSON objects with text in data.field="
                f"{config.field}. Write these one a line, into a file whose name ends in .jsonl"
            )
        yield content


def _field(where: str, line: bytes, field: str) -> bytes:
    """Return the text in a line of JSON."""
    try:
        return utf8(json.loads(line)[field])
    except DataError as error:
        raise DataError(f"cannot read data.path={where}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"cannot read data.path={where}: no JSON object with text in data.field={field}") from error


def _first_object(content: bytes) -> dict[str, Any]:
    """Return the first object of lines of JSON, or of a list in JSON; an empty one where this is neither."""
    for part in (content.lstrip().partition(b"\n")[0], content):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(part)
            found = found[0] if isinstance(found, list) and found else found
            return found if isinstance(found, dict) else {}
    return {}


def read_text(file: Path, said: str = "data.path=") -> bytes:
    """Return what a file of text holds.

    Raises:
        DataError: it holds something else: a NUL, or bytes that are not UTF-8.
    """
    content = file.read_bytes()
    found = [at for at in (content.find(b"\0"), _not_utf8(content)) if at >= 0]
    if found:
        at = min(found)
        raise DataError(
            f"cannot read {said}{file} as text: the byte at offset {at:,} is 0x{content[at]:02x}, which is not of a "
            f"text in UTF-8. Unpack it or convert it to UTF-8 first, or leave it out"
        )
    return content


def _not_utf8(content: bytes, piece: int = 2**20) -> int:
    """Return the offset of the first byte that is not of UTF-8, -1 if all are; a piece is decoded at a time."""
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(content)
    for start in range(0, len(content), piece):
        before = len(decoder.getstate()[0])
        try:
            decoder.decode(view[start : start + piece], start + piece >= len(content))
        except UnicodeDecodeError as error:
            return start - before + error.start
    return -1


def utf8(text: str, what: str = "a text") -> bytes:
    """Return the bytes of a text; `what` it is, in words.

    Raises:
        DataError: it has none: half of a surrogate pair stands in it, as by a JSON escape, or by a byte of a command
            line that is not UTF-8.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = ascii(text[max(0, error.start - 20) : error.start + 20])
        raise DataError(
            f"{what} holds U+{ord(text[error.start]):04X}, half of a surrogate pair, as its character "
            f"{error.start + 1:,}, in {near}. Write the whole character, in UTF-8, or leave it out"
        ) from None


def files_at(path: Path, pattern: str) -> list[Path]:
    """Return a file, or the files of a folder that match, in an order that does not depend on the file system.

    Raises:
        DataError: there is none.
    """
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"cannot read data.path={path}: there is no such file or folder")
    patterns = [pattern.strip() for pattern in pattern.split(",")]
    files = [path] if path.is_file() else sorted({f for p in patterns for f in path.rglob(p) if f.is_file()})
    if not files:
        raise DataError(f"no text at data.path={path}: the folder has no file that matches {pattern}")
    return files


def json_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file that are not empty, each with the words for where it is."""
    for number, line in enumerate(read_text(file).split(b"\n"), 1):
        if line.strip():
            yield f"{file}:{number}", line


class Encoder(Protocol):
    """What makes ids of texts; `experiments.data.tokenizer` has them."""

    vocab_size: int
    identity: str  # changes when the ids of a text do, without what comes before or after it
    name: str  # for people

    @property
    def separator(self) -> int:
        """The id before each document."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text."""
        ...


def id_type(vocab_size: int) -> str:
    """Return the smallest type that the ids of a vocabulary are stored in."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def tokenize(texts: list[bytes], encoder: Encoder) -> np.ndarray:
    """Return documents as one array of ids, each document after the separator."""
    dtype = id_type(encoder.vocab_size)
    chunks = [texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK)]
    encoded = (ids for chunk in progress(chunks, "tokenizing") for ids in encoder.encode_batch(chunk))
    parts = [np.concatenate([[encoder.separator], ids]).astype(dtype) for ids in encoded]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """Return the items to go through, with a bar on a terminal where that takes longer than a second."""
    from tqdm import tqdm

    return tqdm(items, desc=f"  {what}", delay=1.0, leave=False, disable=None)


def split(texts: list[bytes], val_fraction: float, where: str = "data") -> tuple[list[bytes], list[bytes]]:
    """Return (training, held-out) documents, chosen by the hash of each document's content and by nothing else.

    Equal documents fall on one side. At least one document lands on each side.
    """
    if len(texts) == 1:
        texts = [piece for piece in re.findall(rb"(?s).{%d}[^\n]*\n?|.+" % PIECE, texts[0]) if piece]
    if len(set(texts)) < 2:
        raise DataError(
            f"too little text at {where}: it takes at least two different documents, to train on and to hold out; a "
            f"single one is cut at line ends into pieces of {PIECE // 1024} KiB"
        )
    draw = {text: _draw(text) for text in texts}
    bound = max(val_fraction, min(draw.values()))
    bound = bound if any(value > bound for value in draw.values()) else min(draw.values())
    return [text for text in texts if draw[text] > bound], [text for text in texts if draw[text] <= bound]


def _draw(content: bytes) -> float:
    """Return a number in [0, 1) that depends on the content alone."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def token_files(
    config: configs.Data, encoder: Encoder, texts: Iterable[bytes] | None = None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return memory-mapped (training, held-out) tokens, made where no cache has them, and bytes per token.

    They are those of `texts`, or else of the documents that the configuration names.
    """
    texts, how = texts_of(config, texts), f"{encoder.identity} {encoder.separator} {config.val_fraction}"
    encode, types = lambda part: {"": tokenize(part, encoder)}, {"": id_type(encoder.vocab_size)}
    train, held_out = (made[""] for made in encoded_parts(config, how, texts, types, encode, where=_where(config)))
    counted = sum(np.count_nonzero(part != encoder.separator) for part in (train, held_out))
    return train, held_out, sum(map(len, texts)) / max(1, counted)


def encoded_parts(
    config: configs.Data,
    how: str,
    texts: list[bytes],
    types: Mapping[str, str],
    encode: Callable[[list[bytes]], Mapping[str, np.ndarray]],
    *,
    beside: Sequence[bytes] = (),
    where: str = "data",
) -> list[dict[str, np.ndarray]]:
    """Return the arrays that are made of the texts to train on, and of those held out, made where no cache has them.

    Args:
        config: says where that is, and how much is held out.
        how: changes when what is made of the same texts does.
        texts: all of them.
        types: of the arrays, by name.
        encode: makes the arrays of some texts.
        beside: what they are made with; likewise.
        where: the texts are, in words.
    """
    label = lambda part, name: f"{part}.{name}" if name else part
    labels = {label(part, name): dtype for part in PARTS for name, dtype in types.items()}

    def make():
        for part, some in zip(PARTS, split(texts, config.val_fraction, where), strict=True):
            made = encode(some)
            yield from ((label(part, name), made[name]) for name in types)

    found = cached(config, how, [*beside, *texts], labels, make)
    return [{name: found[label(part, name)] for name in types} for part in PARTS]


def cached(
    config: configs.Data,
    how: str,
    texts: Iterable[bytes],
    types: Mapping[str, str],
    make: Callable[[], Iterable[tuple[str, np.ndarray]]],
) -> dict[str, np.ndarray]:
    """Return arrays that are made of texts, memory-mapped: under a hash of these, and of `how`, they are kept.

    Args:
        config: says where.
        how: changes when what is made of the same texts does.
        texts: what they are made of.
        types: of the arrays, by name.
        make: yields each with its name, in this order, where they are not there yet.
    """
    digest = hashlib.sha256(how.encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "big") + text)
    folder = Path(config.cache).expanduser() if config.cache else user_cache() / "tokens"
    files = {name: folder / digest.hexdigest()[:24] / f"{name}.bin" for name in types}
    if not list(files.values())[-1].exists():
        for name, array in make():
            _write_whole(files[name], array.astype(types[name], copy=False))
    return {name: _mapped(files[name], types[name]) for name in types}


def _write_whole(path: Path, tokens: np.ndarray) -> None:
    """Write whole or not at all: another process may be doing the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        tokens.tofile(file)
    os.replace(file.name, path)


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, "r")


def mapped_blocks(config: configs.Tokens) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the (training, held-out) parts of token files: whole files by hash, or blocks where there is one file."""
    pattern = Path(config.path).expanduser()
    if pattern.is_dir():
        pattern = pattern / "*.bin"
    files = sorted(file for file in pattern.parent.glob(pattern.name) if file.stat().st_size)
    if not files:
        raise DataError(f"no tokens at data.path={config.path}: no such file, or only empty ones")
    if bad := [file for file in files if file.stat().st_size % np.dtype(config.dtype).itemsize]:
        why = "its size is no multiple of the type's"
        raise DataError(f"cannot read data.path={bad[0]} as data.dtype={config.dtype}: {why}")
    arrays = [_mapped(file, config.dtype) for file in files]
    if len(arrays) == 1:
        length = max(1, min(2**20, len(arrays[0]) // 32))
        arrays = [arrays[0][start : start + length] for start in range(0, len(arrays[0]), length)]
    # By position as well as content, so that repetitive tokens can be split too.
    keys = [str(i).encode() + array[:65536].tobytes() for i, array in enumerate(arrays)]
    draws = [_draw(key) for key in keys]
    bound = max(config.val_fraction, min(draws))
    train = [array for array, draw in zip(arrays, draws, strict=True) if draw > bound]
    if not train:
        raise DataError(f"too few tokens at data.path={config.path}: nothing is left beside the held-out part")
    return train, [array for array, draw in zip(arrays, draws, strict=True) if draw <= bound]


class Ids(NamedTuple):
    """Arrays of ids to train on and held out, every one in the vocabulary.

    Attributes:
        train: to train on.
        held_out: the others.
        boundary: the id that starts each document, where there is one.
        bytes_per_token: of the text that they stand for, where that is known.
        text: what they stand for, in words.
        documents: like `train` and `held_out`, the number of each id's document, where no id starts these.
    """

    train: Sequence[np.ndarray]
    held_out: Sequence[np.ndarray]
    boundary: int | None = None
    bytes_per_token: float | None = None
    text: str | None = None
    documents: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None


def text_ids(data: configs.Data, encoder: Encoder, vocab_size: int, texts: Iterable[bytes] | None = None) -> Ids:
    """Return the ids of documents of text: of `texts`, or else of those that a configuration names.

    Raises:
        DataError: there are too few, they cannot be read, or an id is outside the vocabulary.
    """
    train, held_out, bytes_per_token = token_files(data, encoder, texts)
    # Ids that are used: a tokenizer may have more than its model, for pictures say. Of bytes, all are.
    used = max(int(part.max(initial=0)) for part in (train, held_out))
    check_vocab(max(used, encoder.separator), 0, vocab_size, encoder.name)
    return Ids([train], [held_out], encoder.separator, bytes_per_token, encoder.name)


def token_ids(data: configs.Tokens, vocab_size: int) -> Ids:
    """Return ids that were made elsewhere.

    Raises:
        DataError: there are too few, they cannot be read, or one is outside the vocabulary.
    """
    train, held_out = mapped_blocks(data)
    for array in (*train, *held_out):
        check_vocab(int(array.max()), int(array.min()), vocab_size, data.path)
    if data.separator is not None:
        check_vocab(data.separator, 0, vocab_size, "data.separator")
    return Ids(train, held_out, data.separator, data.bytes_per_token)


def own_ids(data: configs.CustomData, made: Sequence[Any], encoder: Encoder, vocab_size: int) -> Ids:
    """Return the ids of the documents, of text or of ids, that a user's function made.

    Raises:
        DataError: there are too few, they are of several kinds, or an id is outside the vocabulary.
    """
    if not isinstance(made[0], str | bytes):
        return _of_lists(made, _where(data), data.val_fraction, vocab_size)
    if other := [one for one in made if not isinstance(one, str | bytes)]:
        what = f"its first document is text, and another {type(other[0]).__name__}"
        raise DataError(f"cannot read {_where(data)}: {what}. Give all as text, or all as lists of ids")
    return text_ids(data, encoder, vocab_size, _encoded(made, _where(data)))


def _encoded(texts: Iterable[str | bytes], where: str) -> Iterator[bytes]:
    """Yield a user's documents of text as bytes."""
    for number, text in enumerate(texts):
        try:
            yield utf8(text) if isinstance(text, str) else bytes(text)
        except DataError as error:
            raise DataError(f"cannot read document {number:,} of {where}: {error}") from None


def _of_lists(documents: Sequence[Any], where: str, val_fraction: float, vocab_size: int) -> Ids:
    """Return a user's documents of ids as one array to train on and one held out, by the hash of their content."""
    arrays = [np.asarray(document) for document in documents]
    if bad := [one for one in arrays if one.ndim != 1 or not np.issubdtype(one.dtype, np.integer)]:
        raise DataError(
            f"cannot read {where}: a document is text, a list of ids or a row {{'tokens': ids}}, not "
            f"{bad[0].dtype}{list(bad[0].shape)}"
        )
    arrays = [one.astype(np.int64) for one in arrays]
    content = [one.tobytes() for one in arrays]
    if len(arrays) == 1:
        raise DataError(f"too few documents in {where}: one, to train on and to hold out; give several")
    kept = set(split(content, val_fraction, where)[0])
    side = lambda wanted: [one for one, key in zip(arrays, content, strict=True) if (key in kept) is wanted]
    sides = side(True), side(False)
    train, held_out = map(np.concatenate, sides)
    for array in (train, held_out):
        check_vocab(int(array.max(initial=0)), int(array.min(initial=0)), vocab_size, where)
    first, other = (np.repeat(np.arange(len(some), dtype=np.int32), [len(one) for one in some]) for some in sides)
    return Ids([train], [held_out], documents=([first], [other]))


def check_vocab(largest: int, smallest: int, vocab_size: int, where: str) -> None:
    """Raise a DataError unless every id is in the vocabulary, told the largest and the smallest."""
    if largest >= vocab_size or smallest < 0:
        bad = largest if largest >= vocab_size else smallest
        raise DataError(
            f"token id {bad} in {where} is outside the vocabulary: ids must lie in [0, {vocab_size}). "
            f"Choose a model whose model.vocab_size is larger, or other data."
        )
