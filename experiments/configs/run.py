"""One run, which has all the parts."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import zoo.accounting
import zoo.config
from experiments.configs.compute import ATTENTION, EXPERTS, Distributed, Hardware, Mesh, Remat, Tiling
from experiments.configs.data import Chat, Data, Preference
from experiments.configs.fields import NOT_NEGATIVE, POSITIVE, OnNan, Quantise, option, part, refuse
from experiments.configs.objective import Custom, Objective, Paired, Sft
from experiments.configs.optimizer import Adapter, Lora, Optimizer
from experiments.configs.results import Checkpoint, Evaluation, Profile, Save
from zoo.families.mixture import MixtureLike


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's configuration, and where its weights come from."""

    config: Any
    weights: str | None = option(None, "Hugging Face folder to start from (random weights without it)", path=True)
    quantise: Quantise | None = option(
        None, "keep matrices in fewer bits, frozen (adapter=lora): int8, int4, nf4, or as_stored in the weights' folder"
    )

    def __post_init__(self):
        if self.quantise is Quantise.as_stored and self.weights is None:
            raise refuse("model.quantise", self.quantise, "it keeps what a folder has: give model.weights, or int8")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run."""

    model: Model = part("what is trained")
    adapter: Adapter = part("train all of it, or a LoRA adapter alone")
    data: Data = part("what it reads")
    objective: Objective = part("what it minimises")
    tiling: Tiling = part("what is cut into tiles: the head, MLPs, attention, the batch")
    optimizer: Optimizer = part("how parameters move")
    hardware: Hardware = part("device, precision, compiler")
    mesh: Mesh = part("how devices share the work")
    remat: Remat = part("what the backward pass keeps")
    eval: Evaluation
    save: Save
    checkpoint: Checkpoint = part("when the run is saved so that it can go on")
    profile: Profile
    distributed: Distributed
    run: str | None = option(None, "name of the run and of its directory: a new one, or one to go on with")
    out: str = option("runs", "where run directories go", path=True)
    seed: int = option(0, "of the initial weights and the order of the data", NOT_NEGATIVE)
    steps: int | None = option(None, "training steps", POSITIVE, auto=True)
    batch_size: int | None = option(None, "sequences per step; a pair of answers is two", POSITIVE, auto=True)
    seq_len: int | None = option(None, "tokens per sequence", POSITIVE, auto=True)
    attention: str = option("auto", "auto: the device's kernel, where it can; plain, tiled, cudnn (GPU), splash (TPU)")
    experts: str = option(
        "auto",
        "a mixture's products; auto: the fastest of XLA's; ragged, grouped, megablox (TPU), tokamax (if installed)",
    )
    on_nan: OnNan = option(OnNan.stop, "at a loss that is no number: stop, skip that step's update, or raise")
    compare: bool = option(
        False, "also compile the untiled step, to show what tiling saves: a start takes twice as long"
    )
    plan: bool = option(False, "only tell what the run will cost: compile its step, train nothing")
    compile_for: str | None = option(
        None, "only compile, for hardware that is not here: v5e-8, v7x-8, h100-8, l4-1, ..."
    )
    log_every: int | None = option(None, "steps between lines when the output is not a terminal", POSITIVE, auto=True)

    def __post_init__(self):
        data = type(self.data).__name__.lower()
        if isinstance(self.objective, Paired) and not self.paired:
            raise refuse("data", data, "this objective compares answers: use data=preference")
        if self.paired and not isinstance(self.objective, Paired | Custom):
            need = "objective=dpo, ipo, simpo, orpo or your own, MODULE:FUNCTION"
            raise refuse("data", data, f"pairs of answers are for preferences: use {need}")
        if isinstance(self.objective, Custom) and self.objective.reference is not None and not self.paired:
            why = "a loss of your own is given what a reference makes of pairs of answers: use data=preference"
            raise refuse("objective.reference", self.objective.reference, why)
        if isinstance(self.objective, Sft) and not isinstance(self.data, Chat):
            raise refuse("objective", "sft", "it learns what the assistant says in conversations: use data=chat")
        if self.attention != "auto" and self.attention not in ATTENTION:
            raise refuse("attention", self.attention, f"choose auto, {', '.join(ATTENTION)}")
        if self.experts != "auto" and self.experts not in EXPERTS:
            raise refuse("experts", self.experts, f"choose auto, {', '.join(EXPERTS)}")
        if self.tiling.attention is not None and self.attention not in ("auto", "tiled"):
            why = f"tiling.attention={self.tiling.attention} cuts queries into tiles: use attention=tiled"
            raise refuse("attention", self.attention, f"{why}, or leave one of the two out")
        if self.run is not None and (not self.run or "/" in self.run or self.run.startswith(".")):
            raise refuse("run", self.run, "it names one directory, without `/` and not starting with `.`")

    @functools.cached_property
    def params(self) -> int:
        """How many parameters the model has."""
        return zoo.accounting.count_params(self.model.config)

    @property
    def paired(self) -> bool:
        """Whether a batch is made of pairs of sequences."""
        return isinstance(self.data, Preference)

    @property
    def adapted(self) -> bool:
        """Whether an adapter learns, and the model stays as it is."""
        return isinstance(self.adapter, Lora)


@dataclass(frozen=True)
class HeadTiling:
    """How the head and its loss are cut: along the tokens of a step, or along sequences.

    Attributes:
        flat: whether all tokens of a step are one axis; those of a micro-batch, of pairs, of a user's loss or on a
            mesh, whose devices hold parts of the batch and of its sequences, are more, of which the sequence is cut.
        rows: sequences that are computed at a time: a micro-batch, or the whole batch.
        length: of the axis that is cut.
        each: tokens in each step along it.
        size: steps along it that a tile is long: all of them where it is not cut.
    """

    flat: bool
    rows: int
    length: int
    each: int
    size: int

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return -(-self.length // self.size)

    @property
    def tokens(self) -> int:
        """How many tokens' logits exist at a time."""
        return self.size * self.each


Origin = Enum("Origin", ["folder", "start", "base"])
Origin.__doc__ = """Where a frozen model is from: a folder; a copy of what the run starts from; or the model that
learns, without its adapter, which takes no memory of its own."""


@dataclass(frozen=True)
class Reference:
    """The frozen model that an objective compares with: a reference or a teacher.

    Attributes:
        origin: where it is from.
        config: its architecture.
        path: its folder, where it has one.
    """

    origin: Origin
    config: Any
    path: str | None = None


@dataclass(frozen=True)
class Choice:
    """What was chosen where a value was left open, and why.

    Attributes:
        value: what.
        why: in words, with `{}` for each of the sizes.
        sizes: in bytes, which are worded where they are printed.
    """

    value: Any
    why: str
    sizes: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Described(Run):
    """One run whose models and functions of the user's are known: what `experiments.runtime.own.described` returns.

    Attributes:
        reference: the frozen model that the objective compares with, if it does.
        sources: hashes of the files of the user's own functions, and of weights that are read whenever it goes on, by
            the options that name them.
    """

    reference: Reference | None = dataclasses.field(default=None, metadata={"beside": True})
    sources: Mapping[str, str | None] = dataclasses.field(default_factory=dict, metadata={"beside": True})

    @property
    def beside_its_base(self) -> bool:
        """Whether the frozen model is the one that learns, without its adapter."""
        return self.reference is not None and self.reference.origin is Origin.base


@dataclass(frozen=True, kw_only=True)
class Resolved(Described):
    """One run in which nothing is left open: what `experiments.planning.resolve` returns.

    Attributes:
        axes: which mesh axes cut which letter, of everything in the run.
        chosen: every value that was left open, by its dotted name, and why it is what it is.
    """

    steps: int
    batch_size: int
    seq_len: int
    log_every: int
    axes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, metadata={"beside": True})
    chosen: Mapping[str, Choice] = dataclasses.field(default_factory=dict, metadata={"beside": True}, compare=False)

    @property
    def problem(self) -> str | None:
        """Why this cannot be carried out as it is asked for, as far as sizes tell; None where they do not."""
        model = self.model.config
        if found := self.mesh.problem(self.batch_size, self.seq_len, model.num_heads, model.dims.get("E", 1)):
            return found
        if (learned := zoo.config.learned_positions(model)) is not None and self.seq_len > learned:
            return (
                f"cannot train on sequences of seq_len={self.seq_len} tokens: this model has learned {learned} "
                f"positions. Give seq_len={learned} or less."
            )
        if self.paired and self.batch_size % 2:
            return f"cannot make pairs of batch_size={self.batch_size} sequences: give an even number."
        shared = any(".shared_" in row.leaf for row in zoo.config.rows(model))  # an MLP that every token meets
        if self.tiling.mlp is not None and isinstance(model, MixtureLike) and not (model.dense_layers or shared):
            return (
                f"cannot cut MLPs into tiling.mlp={self.tiling.mlp} tiles: all {model.num_layers} layers of this "
                "mixture have experts in their place. Leave tiling.mlp out; tiling.attention and tiling.n can be set."
            )
        if (why := self.offload_problem) is not None:
            return f"cannot use hardware.offload={self.hardware.offload}: {why}."
        if self.profile.span is not None and self.profile.span[1] > self.steps:
            return f"bad value profile.steps={self.profile.steps}: the run has {self.steps} steps"
        if self.model.quantise is not None and not self.adapted:
            kept = self.model.quantise
            return (
                f"bad value model.quantise={kept}: matrices in fewer bits do not move. Train an adapter: adapter=lora"
            )
        return None

    @property
    def offload_problem(self) -> str | None:
        """Why nothing can stay in host memory as this is asked for; None where it can, or is not to."""
        offloaded, remat = self.hardware.offloaded, self.remat.policy
        if not offloaded:
            return None
        if self.mesh.devices > 1:
            return f"it is for one device, and {self.mesh.devices} share the parameters: use mesh=one, or mesh=fsdp"
        if len(set(self.model.config.layer_stacks)) > 1:
            return "this model's layers are of several kinds, in several stacks; layers of one stack are fetched"
        if not self.optimizer.layerwise:
            return "this optimizer reads several layers at once: use adamw, sgd or adafactor_layerwise"
        if self.hardware.grad_dtype not in (None, self.hardware.param_dtype):
            return f"hardware.grad_dtype={self.hardware.grad_dtype} takes a copy of all parameters: leave it out"
        if "params" not in offloaded:
            return None
        if self.tiling.batch is not None:
            return f"tiling.batch={self.tiling.batch} adds up the gradients of all layers: leave it out"
        if remat == "sqrt" or any(sign in remat for sign in "/,*"):
            return f"remat.policy={remat} takes stacks of layers apart: use one policy, such as remat=offload"
        return None

    @property
    def tokens_per_step(self) -> int:
        """Batch times sequence."""
        return self.batch_size * self.seq_len

    @functools.cached_property
    def head(self) -> HeadTiling:
        """How the head is cut."""
        pair = 2 if self.paired else 1
        rows = -(-self.batch_size // pair // (self.tiling.batch or 1)) * pair
        alone = self.tiling.batch is None and not self.paired and self.mesh.devices == 1
        flat = alone and not isinstance(self.objective, Custom)  # which may have a loss of each sequence
        length, each = (self.tokens_per_step, 1) if flat else (self.seq_len, rows)
        if self.tiling.size is not None:
            size = min(length, max(1, self.tiling.size // each))
        else:
            size = -(-length // (self.tiling.n if isinstance(self.tiling.n, int) else 1))
        return HeadTiling(flat, rows, length, each, size)
