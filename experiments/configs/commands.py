"""What the commands beside `run.py` can be told."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
import dataclasses
from dataclasses import dataclass
from typing import Any

from experiments.configs.compute import Hardware, Mesh
from experiments.configs.data import Data
from experiments.configs.fields import NOT_NEGATIVE, POSITIVE, DType, Quantise, option, refuse
from experiments.configs.run import Model

# What several of them can be told.
TOKENIZER = option(None, "folder of a tokenizer (default: the one of model.weights, else bytes)", path=True)
KV_DTYPE = option(None, "keys and values in 8 bits, int8, of which twice as many fit (default: as computed)")
DRAFTER = option(
    None, "folder of a smaller model of the same vocabulary that guesses instead, 4 tokens or `drafts`", path=True
)
LORA = option(None, "folder of a LoRA adapter to apply", path=True)


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Train a byte-level BPE on local text."""

    data: Data
    vocab_size: int = option(8192, "how many tokens, the 256 bytes and 2 special ones included", POSITIVE)
    out: str = option("runs/tokenizer", "folder to write; data.tokenizer=FOLDER then uses it", path=True)


def engine(config: Any) -> None:
    """Raise unless a command's engine can be as it says."""
    sizes = {f"mesh.{name}": size for name, size in config.mesh.sizes.items() if name != "model"}
    if wrong := [name for name, size in sizes.items() if size not in (None, 1)]:
        raise refuse(
            wrong[0], sizes[wrong[0]], "texts share a step, which all devices compute: use mesh=tp, mesh.model"
        )
    if config.hardware.offload != "none":
        raise refuse("hardware.offload", config.hardware.offload, "it is of training: leave it out")
    if config.kv_dtype not in (None, "int8"):
        raise refuse("kv_dtype", config.kv_dtype, "give int8, or nothing")
    if getattr(config, "drafts", 0) < 0:
        raise refuse("drafts", config.drafts, "0 guesses nothing")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Measure how well a model predicts text: log-probabilities per token, perplexity, bits per byte."""

    model: Model
    data: Data
    hardware: Hardware
    mesh: Mesh
    lora: str | None = LORA
    seq_len: int = option(2048, "tokens in a window", POSITIVE)
    stride: int | None = option(
        None, "tokens scored per window, the rest being context (default: half a window)", POSITIVE
    )
    batch_size: int = option(1, "windows at a time", POSITIVE)
    tile: int = option(256, "tokens whose logits exist at a time", POSITIVE)
    kv_dtype: str | None = KV_DTYPE
    limit: int | None = option(None, "only so many documents", POSITIVE)
    out: str | None = option(
        None, "file of JSON lines: a document's ids, log-probabilities and sums on each", path=True
    )
    seed: int = option(0, "of random weights, where model.weights is not given", NOT_NEGATIVE)

    def __post_init__(self):
        engine(self)
        if self.stride is not None and self.stride > self.seq_len:
            raise refuse("stride", self.stride, f"tokens would be left out beyond seq_len={self.seq_len}")


SAID = "default: as the folder's generation_config.json says"


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts."""

    model: Model
    hardware: Hardware
    mesh: Mesh
    prompt: Any = option(None, "text to continue; give it several times for a batch")
    system: Any = option(None, "instructions that come before the prompt (chat=true)")
    chat: bool = option(False, "the prompt is a user's message: apply the folder's chat template")
    tokenizer: str | None = TOKENIZER
    lora: str | None = LORA
    max_tokens: int = option(128, "most tokens to generate", POSITIVE)
    kv_dtype: str | None = KV_DTYPE
    temperature: float | None = option(None, f"divides the logits; 0: always the most likely token ({SAID}, or 1)")
    top_k: int | None = option(None, f"only the so many most likely tokens, 0 for all ({SAID})")
    top_p: float | None = option(None, f"only the most likely tokens that together have this probability ({SAID})")
    min_p: float | None = option(None, f"only tokens with at least this share of the largest probability ({SAID})")
    repetition_penalty: float | None = option(
        None, f"above 1: tokens that were there already become less likely ({SAID}, or 1)"
    )
    stop: list[int] | None = option(None, "ids that end the text (default: those that the tokenizer names)")
    drafts: int = option(0, "tokens guessed from the text itself and checked at once; the text is the same")
    drafter: str | None = DRAFTER
    seed: int = option(0, "of the sampling, and of random weights", NOT_NEGATIVE)

    def __post_init__(self):
        engine(self)


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Answer requests over HTTP, in OpenAI's protocol."""

    model: Model
    hardware: Hardware
    mesh: Mesh
    tokenizer: str | None = TOKENIZER
    lora: str | None = LORA
    name: str | None = option(None, "what clients call the model (default: its folder's name)")
    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 is every one of this machine")
    port: int = option(8000, "port to listen at")
    api_key: str | None = option(None, "clients must show it (default: none)")
    length: int | None = option(None, "tokens of the longest text (default: the model's, at most 4096)", POSITIVE)
    rows: int = option(16, "texts that run at once; a pass costs rows * width tokens, idle or busy", POSITIVE)
    width: int = option(1, "tokens of one text in a row of a step: 1 on CPUs, 8 on accelerators", POSITIVE)
    budget: int = option(
        256, "tokens of prompts that are read, pass after pass, while texts wait for their next token", POSITIVE
    )
    page: int = option(16, "tokens on a page of keys and values", POSITIVE)
    tokens: int | None = option(
        None, "tokens whose keys and values are kept (default: half of rows * length)", POSITIVE
    )
    kv_dtype: str | None = KV_DTYPE
    queue: int = option(1024, "texts that may wait; others are told to come again", POSITIVE)
    seconds: float = option(600.0, "after which an answer ends where it is", POSITIVE)
    drafts: int = option(0, "tokens guessed from the text itself and checked at once; answers are the same")
    drafter: str | None = DRAFTER
    exact: bool = option(True, "let no answer's bits depend on who else asks")
    sampling: bool = option(
        True, "what requests leave open of how tokens are picked is as the folder's generation_config.json says"
    )
    reasoning: bool = option(
        True,
        "what a model thinks before it answers is told apart, as reasoning_content, where its chat template marks it",
    )
    max_mib: float = option(8.0, "largest body of a request", POSITIVE)
    grace: int = option(30, "seconds to finish answers in when told to stop", POSITIVE)
    seed: int = option(0, "of random weights, where model.weights is not given", NOT_NEGATIVE)

    def __post_init__(self):
        engine(self)
        if not 0 <= self.port < 65536:
            raise refuse("port", self.port, "give a number from 0 to 65535")


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Read a model's folder and write it anew: another number format, a LoRA adapter merged in."""

    source: str = option(dataclasses.MISSING, "Hugging Face folder, one that a run saved, or a .gguf file", path=True)
    out: str = option(dataclasses.MISSING, "folder to write", path=True)
    dtype: DType | None = option(None, "how parameters are stored (default: as they are)")
    lora: str | None = option(None, "folder of a LoRA adapter to merge into the weights", path=True)
    quantise: Quantise | None = option(
        None, "keep matrices in fewer bits: int8, int4 or nf4, or as_stored in the source"
    )
    group: int | None = option(
        None, "inputs that share a scale (default: all in int8, 128 in int4, 64 in nf4)", POSITIVE
    )
    shard_gib: float = option(1.0, "largest file", POSITIVE)

    def __post_init__(self):
        if self.quantise is Quantise.as_stored and (self.lora is not None or self.group is not None):
            name, value = ("lora", self.lora) if self.lora is not None else ("group", self.group)
            raise refuse(name, value, "quantise=as_stored changes no matrix; say int8, int4 or nf4")


CLASSES = {"tokenizer": Tokenizer, "score": Score, "generate": Generate, "serve": Serve, "convert": Convert}
