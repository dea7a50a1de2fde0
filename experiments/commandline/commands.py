"""What the other commands can be told (`run.py` has `experiments.configs`), and how each starts. No JAX here."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.configs import Data, DType, Hardware, Model, option, positive, refuse

CONSOLE = "tiling-zoo"  # the installed command, whose first word is what these are called
TEXTS = ("prompt", "system")  # values that are the user's own words, which Hydra must not read


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Train a byte-level BPE on local text."""

    data: Data
    vocab_size: int = option(8192, "how many tokens, the 256 bytes and 2 special ones included")
    out: str = option("runs/tokenizer", "folder to write; data.tokenizer=FOLDER then uses it", path=True)

    def __post_init__(self):
        positive(self, "", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Measure how well a model predicts text: log-probabilities per token, perplexity, bits per byte."""

    model: Model
    data: Data
    hardware: Hardware
    lora: str | None = option(None, "folder of a LoRA adapter to apply", path=True)
    seq_len: int = option(2048, "tokens in a window")
    stride: int | None = option(None, "tokens scored per window, the rest being context (default: half a window)")
    batch_size: int = option(1, "windows at a time")
    tile: int = option(256, "tokens whose logits exist at a time")
    limit: int | None = option(None, "only so many documents")
    out: str | None = option(
        None, "file of JSON lines: a document's ids, log-probabilities and sums on each", path=True
    )
    seed: int = option(0, "of random weights, where model.weights is not given")

    def __post_init__(self):
        positive(self, "", "seq_len", "stride", "batch_size", "tile", "limit")
        if self.stride is not None and self.stride > self.seq_len:
            raise refuse("stride", self.stride, f"tokens would be left out beyond seq_len={self.seq_len}")


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts."""

    model: Model
    hardware: Hardware
    prompt: Any = option(None, "text to continue; give it several times for a batch")
    system: Any = option(None, "instructions that come before the prompt (chat=true)")
    chat: bool = option(False, "the prompt is a user's message: apply the folder's chat template")
    tokenizer: str | None = option(
        None, "folder of a tokenizer (default: the one of model.weights, else bytes)", path=True
    )
    lora: str | None = option(None, "folder of a LoRA adapter to apply", path=True)
    max_tokens: int = option(128, "most tokens to generate")
    temperature: float = option(1.0, "divides the logits; 0: always the most likely token")
    top_k: int | None = option(None, "only the so many most likely tokens")
    top_p: float | None = option(None, "only the most likely tokens that together have this probability")
    min_p: float | None = option(None, "only tokens with at least this share of the largest probability")
    repetition_penalty: float = option(1.0, "above 1: tokens that were there already become less likely")
    stop: list[int] | None = option(None, "ids that end the text (default: those that the tokenizer names)")
    seed: int = option(0, "of the sampling, and of random weights")

    def __post_init__(self):
        positive(self, "", "max_tokens")


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Read a model's folder and write it anew: another number format, a LoRA adapter merged in."""

    source: str = option(dataclasses.MISSING, "Hugging Face folder, or one that a run saved", path=True)
    out: str = option(dataclasses.MISSING, "folder to write", path=True)
    dtype: DType | None = option(None, "how parameters are stored (default: as they are)")
    lora: str | None = option(None, "folder of a LoRA adapter to merge into the weights", path=True)
    shard_gib: float = option(1.0, "largest file")

    def __post_init__(self):
        positive(self, "", "shard_gib")


CLASSES = {"tokenizer": Tokenizer, "score": Score, "generate": Generate, "convert": Convert}


class CommandError(RuntimeError):
    """A command that cannot do what it was asked for, in words for the user."""


def note(text: str) -> None:
    """Say something about a command's work, beside what it prints."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def warn_of_length(length: int, config: Any, what: str) -> None:
    """Say if a sequence is longer than those that a model was made for."""
    if length > config.context_length:
        note(f"{what} of {length:,} tokens is beyond the {config.context_length:,} that this model was made for")


def main(name: str, action: Callable[[Any, list[str]], None], argv: list[str]) -> int:
    """Compose a command's configuration, carry it out, and return the exit status: 0, 1 failed, 2 misconfigured."""
    from experiments.commandline import schema, usage
    from experiments.data.corpus import DataError

    if {"-h", "--help"}.intersection(argv):
        return usage.tell(name, argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own log: errors only
    texts = {key: [word[len(key) + 1 :] for word in argv if word.startswith(f"{key}=")] for key in TEXTS}
    words = [word for word in argv if word.partition("=")[0] not in TEXTS or name != "generate"]
    try:
        config, _ = schema.compose(words, name)
        if name == "generate":
            config = dataclasses.replace(config, **{key: found or None for key, found in texts.items()})
        action(config, argv)
    except (schema.ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def called(name: str = "config") -> str:
    """Return how the user calls a command: as it was called now, where that is known."""
    name = {"config": "train"}.get(name, name)
    if console := os.environ.get("TILING_ZOO_CALLED"):
        return f"{console} {name}"
    first = Path(sys.argv[0])
    file = {"train": "run"}.get(name, name)
    known = first.suffix == ".py" and first.stem == file
    return f"python {sys.argv[0] if known and not first.is_absolute() else f'experiments/{file}.py'}"


def install(extra: str) -> str:
    """Return the command that installs an extra: from a checkout, or of the installed package."""
    checkout = (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()
    return f"pip install {'-e ' if checkout else ''}'{'.' if checkout else CONSOLE}[{extra}]'"
