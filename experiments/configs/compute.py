"""Where and how a step is computed: devices, their mesh, processes, the tiles, what the backward pass keeps."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
import math
from dataclasses import dataclass
from typing import Any

from experiments.configs.fields import NOT_NEGATIVE, POSITIVE, DType, Platform, choice, option, refuse

REMAT = {  # those of `transforms.remat`
    "none": "Keep every activation: fastest, most memory.",
    "full": "Keep only the input of each layer and compute the rest again.",
    "block": "As full: keep only the input of each layer (a block) and compute the rest again.",
    "dots": "Keep the results of matrix products.",
    "dots_no_batch": "Keep the results of matrix products with weights, not those of attention.",
    "offload": "As full: only the input of each layer, moved to the memory of the host (GPU and TPU).",
    "offload_dots": "As dots_no_batch, kept in the memory of the host (GPU and TPU).",
    "names": "Keep the values that remat.names lists, by default what attention and MLP add to the residual stream.",
    "offload_names": "As names, kept in the memory of the host (GPU and TPU).",
    "sqrt": "The inputs of as many groups of layers as a group has layers: one more forward pass than full.",
}
ATTENTION = {  # those of `zoo.kernels.attention`
    "plain": "scores of all queries and keys at once",
    "tiled": "queries and keys in tiles (tiling.attention)",
    "cudnn": "cuDNN's flash attention, on GPUs",
    "splash": "the splash attention kernel, on TPUs",
}
EXPERTS = {  # those of `zoo.kernels.experts`
    "ragged": "jax.lax.ragged_dot",
    "grouped": "a block of rows at a time, each with its expert's matrix",
    "megablox": "the Pallas kernel that JAX ships, on TPUs",
    "tokamax": "tokamax's kernels, where it is installed",
}
OFFLOADED = ("params", "optimizer")  # what may stay in host memory
NESTED = ("full", "block", "offload")  # those that can be for every so many layers: full/4
MOST_LAYERS = 10_000  # more than any model has


@choice("tiling", "auto", "As many tiles as keep the logits of one tile small, and no more.")
@dataclass(frozen=True, kw_only=True)
class Tiling:
    """What is cut into tiles: the head and its loss over tokens, and other parts where that is asked for."""

    n: int | str = option("auto", "number of tiles of the head and loss; none: untiled; auto: by size")
    size: int | None = option(None, "tokens in a tile of the head, instead of their number", POSITIVE)
    budget: str | None = option(None, "n=auto: temporary memory that the head may take, such as 2GiB")
    lowmem: bool = option(False, "cut the head over the vocabulary too: less memory, one more product")
    mlp: int | None = option(None, "number of tiles of each MLP, over a sequence's tokens", POSITIVE)
    attention: int | None = option(
        None,
        "number of tiles of attention, over queries and over keys (of sequences that devices share, queries alone)",
        POSITIVE,
    )
    heads: bool = option(False, "attention of one kv head's group at a time, its queries, keys and values with it")
    tokens: int | None = option(
        None, "tokens of each device at a time of all else in a layer: norms, projections, MLP", POSITIVE
    )
    batch: int | None = option(None, "number of micro-batches (gradient accumulation)", POSITIVE)
    sync: str = option(
        "once", "on a mesh, weights and their gradients travel once a step, or with every tile: less memory"
    )
    gather: str = option("small", "what an operation of the loss may need whole: small arrays, any, or none")

    def __post_init__(self):
        named = self.n in ("auto", "none")
        if not named and (isinstance(self.n, str) or self.n < 1):
            raise refuse("tiling.n", self.n, "give a whole number of tiles (1 or more), none or auto")
        if self.sync not in ("once", "tile"):
            raise refuse("tiling.sync", self.sync, "give once or tile")
        if self.gather not in ("small", "any", "none"):
            raise refuse("tiling.gather", self.gather, "give small, any or none")
        if self.size is not None and self.n != "auto":
            raise refuse("tiling.size", self.size, f"tiling.n={self.n} cuts the head already; give one of the two")
        if self.budget is not None and (self.n != "auto" or self.size is not None):
            other = f"tiling.n={self.n}" if self.size is None else f"tiling.size={self.size}"
            raise refuse("tiling.budget", self.budget, f"{other} cuts the head already; give one of the two")
        if self.lowmem and self.n == "none":
            raise refuse("tiling.lowmem", "true", "tiling.n=none leaves the head uncut; give a number of tiles or auto")
        if self.gather != "small" and self.n == "none":
            why = "tiling.n=none leaves the head uncut; give a number of tiles or auto"
            raise refuse("tiling.gather", self.gather, why)

    @property
    def cuts(self) -> bool:
        """Whether anything is cut."""
        parts = self.size, self.mlp, self.attention, self.tokens, self.batch
        return self.n != "none" or self.heads or any(part is not None for part in parts)


@choice("hardware", "auto", "The best device there is: TPU, then GPU, then CPU.")
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device, the number formats and the compiler."""

    platform: Platform = option(Platform.auto, "cpu, gpu or tpu; auto: the best there is")
    param_dtype: DType | None = option(None, "how parameters are stored", auto=True)
    compute_dtype: DType | None = option(None, "what the layers compute in", auto=True)
    grad_dtype: DType | None = option(None, "what gradients and optimizer compute in (default: param_dtype)")
    memory_gib: float | None = option(
        None, "memory the run may plan with (default: what the device has free)", POSITIVE
    )
    headroom_gib: float | None = option(
        None, "kept free beside the compiled step's own memory", NOT_NEGATIVE, auto=True
    )
    peak_tflops: float | None = option(
        None, "what one device can do, for MFU (default: its bfloat16 peak, if known)", POSITIVE
    )
    offload: str = option(
        "none",
        "what stays in host memory, on one device: params (each layer's are fetched where it runs), optimizer (its "
        "state), or params,optimizer",
        names=True,
    )
    compiler_options: dict[str, Any] = option({}, "XLA options for the run's programs, on top of the usual ones")

    def __post_init__(self):
        if self.offload != "none" and not set(self.offload.split(",")) <= set(OFFLOADED):
            raise refuse("hardware.offload", self.offload, f"choose none, {', '.join(OFFLOADED)}, or both with a comma")

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What stays in host memory."""
        return () if self.offload == "none" else tuple(self.offload.split(","))


KEPT = "attn_out,mlp_out"


@choice("remat", "auto", "Keep everything in small models, nothing in large ones.")
@dataclass(frozen=True, kw_only=True)
class Remat:
    """What the backward pass keeps from the forward pass of each layer."""

    policy: str = option(
        "auto",
        "auto, none (keep everything), full or block (nothing), dots, dots_no_batch, names; offload, offload_dots, "
        "offload_names (in host memory); sqrt, or full/4: groups of layers, then each; full*3,none: layers take turns",
        names=True,
    )
    names: str = option(KEPT, "the values that remat=names and offload_names keep", names=True)

    def __post_init__(self):
        if self.names != KEPT and "names" not in self.policy:
            raise refuse("remat.names", self.names, f"remat.policy={self.policy} keeps none by name: give remat=names")
        if self.policy == "auto":
            return
        group, nested, every = self.policy.strip().partition("/")
        if nested and group in NESTED and every.isdecimal() and 0 < int(every) <= MOST_LAYERS:
            return
        if self.policy == "sqrt":
            return
        for part in self.policy.split(","):
            name, star, times = part.strip().partition("*")
            if (
                name not in REMAT
                or name == "sqrt"
                or (star and not (times.isdecimal() and 0 < int(times) <= MOST_LAYERS))
            ):
                raise refuse(
                    "remat.policy",
                    self.policy,
                    f"choose auto, {', '.join(REMAT)}; several as full*3,none; groups as full/4",
                )

    @property
    def kept(self) -> list[str]:
        """The names, one by one."""
        return [name.strip() for name in self.names.split(",") if name.strip()]


for _name, _about in REMAT.items():
    choice("remat", _name, _about, policy=_name)(Remat)


@choice("mesh", "auto", "All accelerators that there are, as FSDP; of a CPU, one device.")
@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the mesh's axes, which multiply to the number of devices; all 1 is one device and no mesh."""

    data: int | None = option(
        None, "devices that share the batch (and under mesh.fsdp parameters); -1: the rest", auto=True
    )
    model: int = option(1, "devices that share heads, MLPs and the vocabulary; -1: the rest")
    context: int = option(1, "devices that share each sequence; -1: the rest")
    expert: int = option(1, "devices that share a mixture's experts, and the batch; -1: the rest")
    context_by: str = option(
        "gather",
        "how queries meet keys of other devices: gather all keys, or ulysses: exchange positions for heads "
        "(then parameters are cut over mesh.context too)",
    )
    fsdp: str = option("D", "which dim of parameters mesh.data cuts: D embed, V vocabulary (else D), none: copies")

    def __post_init__(self):
        for name, size in self.sizes.items():
            if size is not None and size < 1 and size != -1:
                raise refuse(f"mesh.{name}", size, "give a number of devices, or -1 for those that the others leave")
        if self.context_by not in ("gather", "ulysses"):
            raise refuse("mesh.context_by", self.context_by, "choose gather or ulysses")
        if self.fsdp not in ("D", "V", "none"):
            raise refuse("mesh.fsdp", self.fsdp, "choose D, V or none")

    @property
    def sizes(self) -> dict[str, int | None]:
        """The size of every axis by its name."""
        return {"data": self.data, "expert": self.expert, "context": self.context, "model": self.model}

    @property
    def rows(self) -> int:
        """Among how many devices the rows of a batch are shared, once every size is known."""
        return (self.data or 1) * self.expert

    @property
    def devices(self) -> int:
        """How many devices there are, once every size is known."""
        return math.prod(size or 1 for size in self.sizes.values())

    @property
    def sharing_tokens(self) -> int:
        """Among how many devices the tokens of a step are shared, once every size is known."""
        return self.devices // self.model

    @property
    def exchanges(self) -> bool:
        """Whether devices exchange heads for positions around attention, which then has whole sequences."""
        return self.context > 1 and self.context_by == "ulysses"

    @property
    def words(self) -> str:
        """The sizes in words, and how parameters are sharded over the data axis."""
        sizes = " x ".join(f"{name}={size}" for name, size in self.sizes.items() if size != 1)
        if self.data == 1:
            return sizes
        return f"{sizes}, parameters copied" if self.fsdp == "none" else f"{sizes}, parameters cut over {self.fsdp}"

    def problem(self, batch_size: int, seq_len: int, heads: int, experts: int) -> str | None:
        """Return why batches and a model of these sizes cannot be sharded so; None where they can."""
        if batch_size % self.rows:
            over = f"mesh.data={self.data}" + (f" x mesh.expert={self.expert}" if self.expert > 1 else "")
            more, fewer = -(-batch_size // self.rows) * self.rows, math.gcd(batch_size, self.rows)
            return (
                f"cannot cut batch_size={batch_size} over {over}: every device takes as many sequences. "
                f"Use batch_size={more}, or {fewer} devices for the batch."
            )
        if seq_len % self.context:
            more = -(-seq_len // self.context) * self.context
            return (
                f"cannot cut seq_len={seq_len} over mesh.context={self.context}: every device takes as many tokens. "
                f"Use seq_len={more}, or mesh.context={math.gcd(seq_len, self.context)}."
            )
        if self.context_by == "ulysses" and heads % (self.context * self.model):
            among = f"mesh.context={self.context}" + (f" x mesh.model={self.model}" if self.model > 1 else "")
            return (
                f"cannot share {heads} query heads among {among} devices: under mesh.context_by=ulysses each "
                f"takes as many. Use mesh.context={math.gcd(heads // self.model, self.context)}, or "
                "mesh.context_by=gather."
            )
        if experts % self.expert:
            what = f"this model has {experts} experts" if experts > 1 else "this model has no experts"
            size = math.gcd(experts, self.expert)
            return f"cannot cut experts over mesh.expert={self.expert}: {what}. Use mesh.expert={size}."
        return None


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Which other processes a run is carried out with; by default none."""

    auto: bool = option(False, "join the processes that SLURM, Open MPI, a TPU pod or GKE has started")
    coordinator: str | None = option(None, "HOST:PORT of process 0, where nothing of that kind is there")
    processes: int | None = option(None, "how many processes there are (with distributed.coordinator)", POSITIVE)
    process: int | None = option(None, "which of them this is, from 0 (with distributed.coordinator)")
    timeout: int = option(15, "seconds after which a process that is not heard of counts as dead", POSITIVE)

    def __post_init__(self):
        given = {"coordinator": self.coordinator, "processes": self.processes, "process": self.process}
        missing = [f"distributed.{name}=..." for name, value in given.items() if value is None]
        if 0 < len(missing) < 3:
            first = next(name for name, value in given.items() if value is not None)
            raise refuse(f"distributed.{first}", given[first], f"{' and '.join(missing)} must be given as well")
        if not missing and self.auto:
            raise refuse("distributed.auto", "true", "distributed.coordinator says already which processes there are")
        if self.processes is not None and self.process is not None and not 0 <= self.process < self.processes:
            raise refuse("distributed.process", self.process, f"there are {self.processes}, counted from 0")

    @property
    def wanted(self) -> bool:
        """Whether there are other processes."""
        return self.auto or self.coordinator is not None
