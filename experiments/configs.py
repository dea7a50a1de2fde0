"""What a run can be told: frozen dataclasses, each field with its default and one line of help.

No JAX here: `--help` and every configuration error come from this file alone. A value of None means that
`experiments.hardware` chooses it for the device and the model's size, and says what it chose.
"""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """Return a dataclass field with a default and the line that `--help` shows."""
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def refuse(name: str, value: object, why: str) -> ValueError:
    """Return the error for a bad value, in one form: what, both values, what to do."""
    return ValueError(f"bad value {name}={value}: {why}")


def positive(config: object, group: str, *names: str) -> None:
    """Raise unless each named field of a config is None or greater than zero."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise refuse(f"{group}{name}", value, "it must be greater than zero")


class DType(StrEnum):
    """The number formats that parameters and arithmetic can have."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Platform(StrEnum):
    """The devices that a run can ask for."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"
    tpu = "tpu"


class Schedule(StrEnum):
    """How the learning rate moves after its warm-up."""

    constant = "constant"
    cosine = "cosine"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's configuration, and where its weights come from."""

    config: Any
    weights: str | None = option(None, "Hugging Face folder to start from (random weights without it)")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What is trained: this, the whole model."""


@dataclass(frozen=True, kw_only=True)
class Lora(Adapter):
    """Low-rank additions to some matrices (https://arxiv.org/abs/2106.09685), trained alone."""

    rank: int = option(8, "rank of each addition (adapter=lora)")
    alpha: float = option(16.0, "additions are scaled by alpha / rank (adapter=lora)")
    targets: str = option(
        "q,k,v,o,gate,up,down", "which matrices, by name or pattern: `q,v`, `layers.*` (adapter=lora)"
    )

    def __post_init__(self):
        positive(self, "adapter.", "rank", "alpha")

    @property
    def patterns(self) -> list[str]:
        """The targets, one by one."""
        return [target.strip() for target in self.targets.split(",") if target.strip()]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What every kind of text has in common."""

    val_fraction: float = option(0.03, "share of the documents held out, chosen by the hash of their content")
    cache: str | None = option(None, "folder of the tokenized copy (default: your user cache)")
    tokenizer: str | None = option(None, "folder with a tokenizer.json (default: that of model.weights, else bytes)")

    def __post_init__(self):
        if not 0 < self.val_fraction < 1:
            raise refuse("data.val_fraction", self.val_fraction, "it must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Stdlib(Data):
    """The source text of Python's own standard library, as bytes."""


@dataclass(frozen=True, kw_only=True)
class Pydoc(Data):
    """The English prose of Python's own documentation topics, as bytes."""


@dataclass(frozen=True, kw_only=True)
class Text(Data):
    """A text file, a .jsonl file or a folder of them, as bytes."""

    path: str = option(dataclasses.MISSING, "file or folder (data=text), *.bin (data=tokens)")
    pattern: str = option("*.txt,*.md,*.jsonl,*.py,*.rst", "which files of a folder (data=text)")
    field: str = option("text", "what holds the text in a line of a .jsonl file (data=text)")


@dataclass(frozen=True, kw_only=True)
class Tokens(Data):
    """Token ids that were made elsewhere: flat little-endian integers, memory-mapped and never copied."""

    path: str = option(dataclasses.MISSING, "file, folder or glob of *.bin")
    dtype: str = option("uint16", "integer type of the ids: uint16, uint32 or int32")
    bytes_per_token: float | None = option(None, "average bytes of text per token (to report bits per byte)")

    def __post_init__(self):
        super().__post_init__()
        if self.dtype not in ("uint16", "uint32", "int32"):
            raise refuse("data.dtype", self.dtype, "choose uint16, uint32 or int32")
        positive(self, "data.", "bytes_per_token")


@dataclass(frozen=True, kw_only=True)
class Synthetic(Data):
    """Random ids repeated once: the second half can be learned to zero loss, the first half cannot be learned."""

    vocab: int = option(64, "how many different ids")

    def __post_init__(self):
        super().__post_init__()
        positive(self, "data.", "vocab")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """What is cut into tiles: the head and its loss over tokens, and other parts where that is asked for."""

    n: int | str = option("auto", "number of tiles of the head and loss; none: untiled; auto: by size")
    size: int | None = option(None, "tokens in a tile of the head, instead of their number")
    budget: str | None = option(None, "n=auto: temporary memory that the head may take, such as 2GiB")
    lowmem: bool = option(False, "cut the head over the vocabulary too: less memory, one more product")
    mlp: int | None = option(None, "number of tiles of each MLP, over a sequence's tokens")
    attention: int | None = option(None, "number of tiles of attention, over queries; keys are whole")
    batch: int | None = option(None, "number of micro-batches (gradient accumulation)")

    def __post_init__(self):
        named = self.n in ("auto", "none")
        if not named and (isinstance(self.n, str) or self.n < 1):
            raise refuse("tiling.n", self.n, "give a whole number of tiles (1 or more), none or auto")
        positive(self, "tiling.", "size", "mlp", "attention", "batch")
        if self.size is not None and self.n != "auto":
            raise refuse("tiling.size", self.size, f"tiling.n={self.n} cuts the head already; give one of the two")
        if self.budget is not None and (self.n != "auto" or self.size is not None):
            other = f"tiling.n={self.n}" if self.size is None else f"tiling.size={self.size}"
            raise refuse("tiling.budget", self.budget, f"{other} cuts the head already; give one of the two")
        if self.lowmem and self.n == "none":
            raise refuse("tiling.lowmem", "true", "tiling.n=none leaves the head uncut; give a number of tiles or auto")

    @property
    def cuts(self) -> bool:
        """Whether anything is cut."""
        parts = self.size, self.mlp, self.attention, self.batch
        return self.n != "none" or any(part is not None for part in parts)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What every optimizer has; alone, it stands for the one that suits the device and the model's size."""

    learning_rate: float | None = option(None, "peak learning rate")
    schedule: Schedule = option(Schedule.cosine, "after the warm-up: constant, or cosine down to a tenth")
    warmup: float = option(0.05, "share of the steps over which the learning rate rises")
    clip_norm: float | None = option(None, "largest global gradient norm (None: not clipped)")

    def __post_init__(self):
        positive(self, "optimizer.", "learning_rate", "clip_norm")
        if not 0 <= self.warmup < 1:
            raise refuse("optimizer.warmup", self.warmup, "it is a share of the steps, from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """optax.adamw: 8 bytes of state per parameter in float32."""

    b1: float = option(0.9, "decay of the first moment")
    b2: float = option(0.95, "decay of the second moment")
    eps: float = option(1e-8, "added to the root of the second moment")
    weight_decay: float = option(0.1, "decoupled weight decay")


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """optax.adafactor: factored second moments, no momentum."""

    clip_rms: float = option(1.0, "largest root mean square of an update")
    decay: float = option(0.8, "second moments decay by 1 - step**-decay")


@dataclass(frozen=True, kw_only=True)
class AdafactorLayerwise(Adafactor):
    """Adafactor a layer at a time, with stochastic rounding: no whole-tree temporaries, bfloat16 parameters learn."""

    stochastic_rounding: bool = option(True, "round updated bfloat16 parameters up or down at random, without bias")


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """optax.sgd."""

    momentum: float | None = option(None, "momentum (None: no state at all)")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device, the number formats and the compiler."""

    platform: Platform = option(Platform.auto, "cpu, gpu or tpu; auto: the best there is")
    param_dtype: DType | None = option(None, "how parameters are stored")
    compute_dtype: DType | None = option(None, "what the layers compute in")
    memory_gib: float | None = option(None, "memory the run may plan with (None: what the device has free)")
    headroom_gib: float | None = option(None, "kept free beside the compiled step's own memory")
    compiler_options: dict[str, Any] = option({}, "XLA options for the compiled steps, on top of the usual ones")

    def __post_init__(self):
        positive(self, "hardware.", "memory_gib")


@dataclass(frozen=True, kw_only=True)
class Remat:
    """What the backward pass keeps from the forward pass of each layer."""

    policy: str = option("auto", "auto, none (keep everything), full (keep nothing), dots, dots_no_batch, offload")

    def __post_init__(self):
        if self.policy not in ("auto", "none", "full", "dots", "dots_no_batch", "offload"):
            raise refuse("remat.policy", self.policy, "choose auto, none, full, dots, dots_no_batch or offload")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How the held-out documents are used; they are always measured before the first and after the last step."""

    every: int | None = option(None, "also every so many steps (0: never)")
    batches: int | None = option(None, "batches per evaluation")

    def __post_init__(self):
        positive(self, "eval.", "batches")
        if self.every is not None and self.every < 0:
            raise refuse("eval.every", self.every, "give a number of steps, or 0 for never")


@dataclass(frozen=True, kw_only=True)
class Save:
    """What a run leaves beside its metrics."""

    final: bool = option(False, "write the trained weights as a Hugging Face folder")
    tensorboard: bool = option(False, "also write TensorBoard's event files (needs the extra `tb`)")
    wandb: bool = option(False, "also log to Weights & Biases (needs the extra `wandb`)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run."""

    model: Model
    adapter: Adapter
    data: Data
    tiling: Tiling
    optimizer: Optimizer
    hardware: Hardware
    remat: Remat
    eval: Evaluation
    save: Save
    run: str | None = option(None, "name of the run and of its directory (default: the model's name and a number)")
    out: str = option("runs", "where run directories go")
    seed: int = option(0, "of the initial weights and the order of the data")
    steps: int | None = option(None, "training steps")
    batch_size: int | None = option(None, "sequences per step")
    seq_len: int | None = option(None, "tokens per sequence")
    log_every: int | None = option(None, "steps between lines when the output is not a terminal")

    def __post_init__(self):
        positive(self, "", "steps", "batch_size", "seq_len", "log_every")
        if self.run is not None and (not self.run or "/" in self.run or self.run.startswith(".")):
            raise refuse("run", self.run, "it names one directory, without `/` and not starting with `.`")


@dataclass(frozen=True, kw_only=True)
class Resolved(Run):
    """One run in which nothing is left open: what `experiments.hardware.resolve` returns."""

    steps: int
    batch_size: int
    seq_len: int
    log_every: int

    @property
    def tokens_per_step(self) -> int:
        """Batch times sequence."""
        return self.batch_size * self.seq_len


def chosen(value: T | None) -> T:
    """Return a value that resolving a configuration has filled in."""
    assert value is not None, "resolve the configuration first"
    return value
