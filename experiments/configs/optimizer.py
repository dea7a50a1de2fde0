"""How parameters move, and what of a model moves at all."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
from dataclasses import dataclass

from experiments.configs.fields import Schedule, option, positive, refuse


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
