"""What the commands beside `run.py` can be told."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
import dataclasses
from dataclasses import dataclass
from typing import Any

from experiments.configs.compute import Hardware
from experiments.configs.data import Data
from experiments.configs.fields import DType, option, positive, refuse
from experiments.configs.run import Model


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
