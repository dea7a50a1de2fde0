"""Measure how well a model predicts text: `python experiments/score.py model.weights=PATH data=text data.path=FILE`.

Each document is read in windows of `seq_len` tokens that move by `stride`; a window scores the tokens that the one
before it did not reach, so that none but a document's first tokens have less than `seq_len - stride` of context.
Windows are texts of an engine (`zoo.engine`), which has logits of `tile` tokens at a time, and none of mere context.
"""

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments.command import carry_out, ended
from experiments.commandline import console
from experiments.commandline.console import CommandError
from experiments.configs.commands import Score

# isort: split
import numpy as np  # last: that takes time, and Ctrl-C is heard from `command` on

PAGE = 64  # tokens whose keys and values lie together
WIDEST = 512  # tokens of a window that are read at a time
EVERY = 30  # seconds between lines where there is no terminal


@dataclass
class Document:
    """A text's ids, and the log-probability of each after the first."""

    ids: np.ndarray
    size: int  # bytes of the text that the scored tokens stand for
    logprobs: np.ndarray = field(init=False)

    def __post_init__(self):
        self.logprobs = np.zeros(max(0, len(self.ids) - 1), np.float32)

    @property
    def nats(self) -> float:
        """The negative log-likelihood of the text."""
        return -float(self.logprobs.sum(dtype=np.float64))


@dataclass(frozen=True)
class Window:
    """`ids[begin:end]` read by the model; the targets from `first` on are scored."""

    document: Document
    begin: int
    end: int
    first: int


def windows(document: Document, seq_len: int, stride: int) -> Iterator[Window]:
    """Yield windows that together score every id of a document but its first, each once."""
    last = len(document.ids) - 1  # the last id is only a target
    done = begin = 0
    while done < last:
        end = min(begin + seq_len, last)
        yield Window(document, begin, end, done)
        done, begin = end, begin + stride


def scorer(model: Any, config: Score, *, dtype: Any = None, widen: bool = False, options: Any = None) -> Any:
    """Return an engine that reads `batch_size` windows at a time, and has logits of `tile` tokens at a time."""
    from zoo.engine.engine import Engine, Settings

    width = min(WIDEST, 1 << (config.seq_len - 1).bit_length())
    rows, length = config.batch_size, config.seq_len + 1
    settings = Settings(
        length=length, rows=rows, width=width, page=PAGE, tokens=rows * -(-length // PAGE) * PAGE, queue=2 * rows,
        logits=config.tile, kv_dtype=config.kv_dtype, exact=False,
    )  # fmt: skip
    return Engine(model, settings, dtype=dtype, widen=widen, compiler_options=options)


def score(
    documents: Sequence[Document],
    engine: Any,
    config: Score,
    finished: Callable[[Document], None] = lambda document: None,
) -> int:
    """Fill in the log-probabilities of documents, saying of each in turn that it is finished.

    Returns:
        How many tokens the windows hold.
    """
    stride = config.stride or max(1, config.seq_len // 2)
    waiting = deque(documents)
    queue = (window for document in documents for window in windows(document, config.seq_len, stride))
    flying: deque[tuple[Window, Any]] = deque()
    read = 0

    while True:
        for window in islice(queue, engine.settings.queue - len(flying)):
            ids = window.document.ids[window.begin : window.end + 1].tolist()
            flying.append((window, engine.score(ids, first=window.first - window.begin + 1)))
            read += window.end - window.begin
        while waiting and not (flying and waiting[0] is flying[0][0].document):
            finished(waiting.popleft())
        if not flying:
            return read
        engine.step()
        while flying and flying[0][1].finish is not None:
            window, answer = flying.popleft()
            new = answer.scores.logprobs[window.first - window.begin :]
            window.document.logprobs[window.first : window.end] = new


def report(documents: Sequence[Document]) -> dict[str, float]:
    """Return the sums over documents: tokens, bytes, nats per token, perplexity, bits per byte."""
    tokens = sum(len(document.logprobs) for document in documents)
    size, nats = sum(document.size for document in documents), sum(document.nats for document in documents)
    mean = nats / max(1, tokens)
    return {
        "tokens": tokens,
        "bytes": size,
        "nats_per_token": mean,
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "bits_per_byte": nats / math.log(2) / max(1, size),
    }


def read_documents(config: Score, tokenizer: Any, vocab_size: int) -> list[Document]:
    """Return the documents to score, as ids.

    Raises:
        DataError: there is no text, or it has ids that the model does not know.
    """
    from experiments.data import corpus

    texts = corpus.texts_of(config.data)[: config.limit]
    found = []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        size = len(text)
        if tokenizer.start is not None:
            ids = np.concatenate([[tokenizer.start], ids]).astype(np.int32)
        else:  # nothing comes before the first id, so it cannot be scored
            size -= len(tokenizer.decode(ids[:1]).encode())
        if len(ids) and ids.max() >= vocab_size:
            raise corpus.DataError(
                f"id {ids.max()} of {tokenizer.name} is outside the model's vocabulary of {vocab_size}"
            )
        found.append(Document(ids, size))
    return found


def main(argv: list[str]) -> int:
    """Score text; return the exit status."""
    return carry_out("score", _score, argv)


def _score(config: Score, argv: list[str]) -> None:
    from experiments.step.weights import open_model

    with _opened(config.out) as file:
        _score_into(file, config, open_model(config, argv, config.data.tokenizer))


def _readable(config: Score, model: Any) -> Score:
    """Return the options with windows that the model can read: no longer than the positions that it has learned."""
    from zoo.config import learned_positions

    learned = learned_positions(model)
    if learned is None or config.seq_len <= learned:
        return config
    console.note(
        f"windows are of {learned} tokens, not seq_len={config.seq_len}: the model has learned {learned} positions"
    )
    return replace(config, seq_len=learned, stride=config.stride and min(config.stride, learned))


def _score_into(file: TextIO | None, config: Score, opened: Any) -> None:
    config = _readable(config, opened.model.config)
    console.warn_of_length(config.seq_len, opened.model.config, "a window")
    documents = read_documents(config, opened.tokenizer, opened.model.config.vocab_size)
    engine = scorer(opened.model, config, dtype=opened.dtype, widen=opened.widen, options=opened.options)
    if file is not None:
        file.truncate(0)  # what an earlier scoring left
    began = time.perf_counter()
    with Progress(documents) as progress:

        def finished(document: Document) -> None:
            if file is not None:
                file.write(_line(document))
                file.flush()
            progress.finished(document)

        read = score(documents, engine, config, finished)
    seconds = time.perf_counter() - began
    total = report(documents)
    print(
        f"{console.counted(len(documents), 'document')}, {total['tokens']} tokens, {total['bytes']} bytes: "
        f"{total['nats_per_token']:.4f} nats per token, perplexity {total['perplexity']:.4g}, "
        f"{total['bits_per_byte']:.4f} bits per byte ({read / seconds:.0f} tokens/s)"
    )


class Progress:
    """A bar on a terminal; elsewhere a line every half a minute. Both go where errors go."""

    def __init__(self, documents: Sequence[Document]):
        from tqdm import tqdm

        self._tokens, self._documents = sum(len(document.logprobs) for document in documents), len(documents)
        self._done = self._scored = 0
        self._said = time.monotonic()
        form = "  {n_fmt}/{total_fmt} tokens {bar} {remaining} left"
        self._bar = tqdm(total=self._tokens, bar_format=form, unit_scale=True, disable=None, dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def finished(self, document: Document) -> None:
        """Count a document."""
        self._done, self._scored = self._done + 1, self._scored + len(document.logprobs)
        self._bar.update(len(document.logprobs))
        if self._bar.disable and time.monotonic() - self._said > EVERY:
            self._said = time.monotonic()
            scored = (
                f"  scored {self._done} of {self._documents} documents, {self._scored:,} of {self._tokens:,} tokens"
            )
            print(scored, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _opened(out: str | None) -> Generator[TextIO | None, None, None]:
    """Open the file of scores before anything costly is done; what it holds stays until there is something else.

    Raises:
        CommandError: one may not write there.
    """
    if out is None:
        yield None
        return
    path = Path(out).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise CommandError(f"cannot write out={out}: {error.strerror} ({error.filename}). Give another FILE") from None
    with file:
        try:
            yield file
        except OSError as error:
            raise CommandError(
                f"cannot go on writing out={out}: {error.strerror}. The lines that are there are whole documents"
            ) from None


def _line(document: Document) -> str:
    values = {**report([document]), "ids": document.ids.tolist(), "logprobs": document.logprobs.tolist()}
    return json.dumps(values) + "\n"


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
