"""Where and how a step is computed: the device, the tiles, what the backward pass keeps."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
from dataclasses import dataclass
from typing import Any

from experiments.configs.fields import DType, Platform, not_negative, option, positive, refuse

REMAT = "none full block dots dots_no_batch offload names offload_names".split()  # those of `transforms.remat`
MOST_LAYERS = 10_000  # more than any model has


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
    sync: str = option(
        "once", "on a mesh, weights and their gradients travel once a step, or with every tile: less memory"
    )

    def __post_init__(self):
        named = self.n in ("auto", "none")
        if not named and (isinstance(self.n, str) or self.n < 1):
            raise refuse("tiling.n", self.n, "give a whole number of tiles (1 or more), none or auto")
        positive(self, "tiling.", "size", "mlp", "attention", "batch")
        if self.sync not in ("once", "tile"):
            raise refuse("tiling.sync", self.sync, "give once or tile")
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
class Hardware:
    """The device, the number formats and the compiler."""

    platform: Platform = option(Platform.auto, "cpu, gpu or tpu; auto: the best there is")
    param_dtype: DType | None = option(None, "how parameters are stored", auto=True)
    compute_dtype: DType | None = option(None, "what the layers compute in", auto=True)
    grad_dtype: DType | None = option(None, "what gradients and optimizer compute in (default: param_dtype)")
    memory_gib: float | None = option(None, "memory the run may plan with (default: what the device has free)")
    headroom_gib: float | None = option(None, "kept free beside the compiled step's own memory", auto=True)
    peak_tflops: float | None = option(None, "what one device can do, for MFU (default: its bfloat16 peak, if known)")
    compiler_options: dict[str, Any] = option({}, "XLA options for the compiled steps, on top of the usual ones")

    def __post_init__(self):
        positive(self, "hardware.", "memory_gib", "peak_tflops")
        not_negative(self, "hardware.", "headroom_gib")


@dataclass(frozen=True, kw_only=True)
class Remat:
    """What the backward pass keeps from the forward pass of each layer."""

    policy: str = option(
        "auto",
        "auto, none (keep everything), full or block (nothing), dots, dots_no_batch, names, offload, offload_names; "
        "several take turns over the layers: full*3,none",
        names=True,
    )
    names: str = option("attn_out,mlp_out", "the values that remat=names and offload_names keep", names=True)

    def __post_init__(self):
        if self.policy == "auto":
            return
        for part in self.policy.split(","):
            name, star, times = part.strip().partition("*")
            if name not in REMAT or (star and not (times.isdecimal() and 0 < int(times) <= MOST_LAYERS)):
                raise refuse("remat.policy", self.policy, f"choose auto, {', '.join(REMAT)}; several as full*3,none")

    @property
    def kept(self) -> list[str]:
        """The names, one by one."""
        return [name.strip() for name in self.names.split(",") if name.strip()]
