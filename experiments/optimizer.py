"""Optimizers by configuration: optax's own by name, and a layerwise Adafactor for models that barely fit."""

import functools

import optax

from experiments import configs
from experiments.adafactor import adafactor_layerwise


def build(config: configs.Optimizer, steps: int, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Return the optax transformation that a resolved configuration describes, for a run of `steps` steps."""
    transformation = _build(config, schedule(config, steps), seed)
    if config.clip_norm is not None:
        transformation = optax.chain(optax.clip_by_global_norm(config.clip_norm), transformation)
    return optax.with_extra_args_support(transformation)


def schedule(config: configs.Optimizer, steps: int) -> optax.Schedule:
    """Return the learning rate by step: a linear warm-up that starts above zero, then constant or half a cosine."""
    peak, warm = configs.chosen(config.learning_rate), max(0, round(config.warmup * steps))
    after = optax.constant_schedule(peak)
    if config.schedule is configs.Schedule.cosine:
        after = optax.cosine_decay_schedule(peak, max(1, steps - warm), alpha=0.1)
    if not warm:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / (warm + 1), peak, warm), after], [warm])


@functools.singledispatch
def _build(config: configs.Optimizer, rate, seed: int) -> optax.GradientTransformation:
    raise TypeError(f"no optimizer is registered for {type(config).__name__}")


@_build.register
def _(config: configs.AdamW, rate, seed: int) -> optax.GradientTransformation:
    return optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay)


@_build.register
def _(config: configs.Sgd, rate, seed: int) -> optax.GradientTransformation:
    return optax.sgd(rate, config.momentum)


@_build.register
def _(config: configs.Adafactor, rate, seed: int) -> optax.GradientTransformation:
    return optax.adafactor(
        rate, decay_rate=config.decay, clipping_threshold=config.clip_rms, multiply_by_parameter_scale=True
    )


@_build.register
def _(config: configs.AdafactorLayerwise, rate, seed: int) -> optax.GradientTransformation:
    return adafactor_layerwise(
        rate,
        decay=config.decay,
        clip_rms=config.clip_rms,
        stochastic_rounding=config.stochastic_rounding,
        seed=seed,
    )
