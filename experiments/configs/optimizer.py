"""How parameters move, and what of a model moves at all."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

from experiments.configs.fields import (
    FUNCTION,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Bound,
    Schedule,
    choice,
    classes,
    option,
    refuse,
)

OF_STEPS = Bound(lambda value: 0 <= value < 1, "it is a share of the steps, from 0 to below 1")
OF_PEAK = Bound(lambda value: 0 <= value <= 1, "it is a share of the peak")


@choice("adapter", "none", "Train every parameter.")
@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What is trained: this, the whole model."""


@choice("adapter", "lora")
@dataclass(frozen=True, kw_only=True)
class Lora(Adapter):
    """Train low-rank additions to the matrices of every layer, and nothing else.

    https://arxiv.org/abs/2106.09685
    """

    rank: int = option(8, "rank of each addition", POSITIVE)
    alpha: float = option(16.0, "additions are scaled by alpha / rank", POSITIVE)
    targets: str | None = option(
        None,
        "which matrices, by name or pattern: `q,v`, `layers.*` (default: attention's and MLPs')",
        auto=True,
        names=True,
    )

    @property
    def patterns(self) -> list[str]:
        """The targets, one by one."""
        return [target.strip() for target in (self.targets or "").split(",") if target.strip()]


@choice("optimizer", "auto", "AdamW where its state fits, layerwise Adafactor where it does not.")
@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What every optimizer has; alone, it stands for the one that suits the device and the model's size."""

    peak: ClassVar[float] = 1e-3  # the learning rate that suits it, for a model of 3 million parameters
    layerwise: ClassVar[bool] = False  # whether it moves each layer of a stack alike and on its own
    scales: ClassVar[bool] = False  # whether that falls with the root of the model's size
    learning_rate: float | None = option(None, "peak learning rate", POSITIVE, auto=True)
    schedule: Schedule = option(
        Schedule.cosine, "after the warm-up: constant, cosine, linear, or wsd (constant, then a linear cool-down)"
    )
    warmup: float = option(0.05, "share of the steps over which the learning rate rises", OF_STEPS)
    cooldown: float = option(0.2, "share of the steps over which it falls at the end (wsd)", OF_STEPS)
    final: float = option(0.1, "share of the peak that is left at the end (cosine, linear, wsd)", OF_PEAK)
    clip_norm: float | None = option(None, "largest global gradient norm (default: not clipped)", POSITIVE)
    ema: float | None = option(
        None,
        "keep a mean of the weights that decays so each step, at step t by no more than (1+t)/(10+t); it is "
        "measured and saved",
        POSITIVE,
    )

    def __post_init__(self):
        if self.schedule is Schedule.wsd and self.warmup + self.cooldown > 1:
            raise refuse("optimizer.cooldown", self.cooldown, f"with warmup={self.warmup} it takes more than all steps")
        usual, schedule = Optimizer.__dataclass_fields__, f"schedule={self.schedule.value}"
        if self.cooldown != usual["cooldown"].default and self.schedule is not Schedule.wsd:
            why = (
                f"{schedule} has none: give optimizer.schedule=wsd" if OF_STEPS.allows(self.cooldown) else OF_STEPS.why
            )
            raise refuse("optimizer.cooldown", self.cooldown, why)
        if self.final != usual["final"].default and self.schedule is Schedule.constant:
            raise refuse("optimizer.final", self.final, f"{schedule} ends at its peak: take another schedule")
        if self.ema is not None and not self.ema < 1:
            raise refuse("optimizer.ema", self.ema, "the weights of old steps must decay: give less than 1")

    @property
    def name(self) -> str:
        """What `optimizer=` calls it."""
        return next(name for name, cls in classes("optimizer").items() if cls is type(self))


@dataclass(frozen=True, kw_only=True)
class Decayed(Optimizer):
    """What an optimizer with weight decay has."""

    weight_decay: float = option(0.1, "decoupled weight decay", NOT_NEGATIVE)
    no_decay: str | None = option(
        None,
        "parameters without it, by name or pattern: `embed,*norm` (default: norms, scales and biases)",
        empty=True,
        names=True,
    )

    @property
    def exempt(self) -> list[str] | None:
        """The patterns, one by one."""
        return None if self.no_decay is None else [one.strip() for one in self.no_decay.split(",") if one.strip()]


@choice("optimizer", "adamw")
@dataclass(frozen=True, kw_only=True)
class AdamW(Decayed):
    """optax.adamw: 8 bytes of state per parameter in float32."""

    peak, scales, layerwise = 3e-3, True, True
    b1: float = option(0.9, "decay of the first moment", SHARE)
    b2: float = option(0.95, "decay of the second moment", SHARE)
    eps: float = option(1e-8, "added to the root of the second moment", POSITIVE)


@choice("optimizer", "muon")
@dataclass(frozen=True, kw_only=True)
class Muon(Decayed):
    """Orthogonal steps for matrices, Adam for the rest."""

    peak, scales = 3e-3, True
    beta: float = option(0.95, "decay of the momentum", SHARE)
    steps: int = option(5, "Newton-Schulz iterations that make a step orthogonal", POSITIVE)
    consistent_rms: float | None = option(
        0.2, "root mean square of a step, as AdamW's (None: by the matrix's shape)", POSITIVE
    )


@choice("optimizer", "adafactor")
@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """optax.adafactor: factored second moments, no momentum."""

    peak = 2e-2
    clip_rms: float = option(1.0, "largest root mean square of an update", POSITIVE)
    decay: float = option(0.8, "second moments decay by 1 - step**-decay", POSITIVE)


@choice("optimizer", "adafactor_layerwise")
@dataclass(frozen=True, kw_only=True)
class AdafactorLayerwise(Adafactor):
    """Adafactor a layer at a time, with stochastic rounding, for models that barely fit."""

    layerwise = True
    stochastic_rounding: bool = option(True, "round updated bfloat16 parameters up or down at random, without bias")


@choice("optimizer", "sgd")
@dataclass(frozen=True, kw_only=True)
class Sgd(Decayed):
    """optax.sgd."""

    peak, layerwise = 1e-1, True
    weight_decay: float = option(0.0, "weight decay")
    momentum: float | None = option(None, "momentum (default: no state at all)", SHARE)


@choice("optimizer", "custom")
@dataclass(frozen=True, kw_only=True)
class CustomOptimizer(Optimizer):
    """Any optax optimizer, or your own: optimizer=optax:lion."""

    scales = True
    fn: str = option(MISSING, "MODULE:FUNCTION or FILE.py:FUNCTION of a learning_rate, which is a schedule", FUNCTION)
    kwargs: dict[str, Any] = option({}, "its own arguments: optimizer.kwargs.NAME=VALUE")
