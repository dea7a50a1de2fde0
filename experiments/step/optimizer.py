"""Optimizers by configuration: optax's own by name, and a layerwise Adafactor for models that barely fit.

What they do not move, or not decay, is told by parameters' names: the dotted path of each leaf, such as `layers.q` or
`final_norm`, and patterns of these.
"""

import difflib
import fnmatch
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from experiments import configs
from experiments.runtime import own
from experiments.step import muon
from experiments.step.adafactor import adafactor_layerwise
from transforms.sharding import AXES, Axes
from transforms.step import norm
from zoo.adapters.lora import letters_of
from zoo.config import rows


def build(
    config: configs.Optimizer, steps: int, seed: int = 0, *, model: Any = None, axes: Axes = AXES, dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Return the optax transformation that a resolved configuration describes, for a run of `steps` steps.

    Args:
        config: the optimizer's.
        steps: how many there will be, for the schedule.
        seed: of what is rounded at random.
        model: the configuration of the model, whose matrices Muon tells from the rest.
        axes: which axes of a mesh cut which letter of them.
        dtype: what it computes in and keeps its state in; None is the parameters' own.
    """
    transformation = _build(config, schedule(config, steps), seed, functools.partial(_matrices, model, axes))
    if isinstance(config, configs.Decayed) and config.no_decay is not None:
        transformation = named(transformation, config)
    if config.clip_norm is not None:
        transformation = clipped(transformation, config.clip_norm)
    transformation = optax.with_extra_args_support(transformation)
    if dtype is not None:
        transformation = computed_in(transformation, dtype)
    return transformation if config.ema is None else averaged(transformation, config.ema)


def schedule(config: configs.Optimizer, steps: int) -> optax.Schedule:
    """Return the learning rate by step: a linear warm-up that starts above zero, then what the schedule says."""
    peak, warm = configs.chosen(config.learning_rate), max(0, round(config.warmup * steps))
    left = max(1, steps - warm)
    match config.schedule:
        case configs.Schedule.constant:
            after = optax.constant_schedule(peak)
        case configs.Schedule.cosine:
            after = optax.cosine_decay_schedule(peak, left, alpha=config.final)
        case configs.Schedule.linear:
            after = optax.linear_schedule(peak, config.final * peak, left)
        case configs.Schedule.wsd:
            falls = max(1, round(config.cooldown * steps))
            after = optax.linear_schedule(peak, config.final * peak, falls, transition_begin=max(0, left - falls))
    if not warm:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / (warm + 1), peak, warm), after], [warm])


@functools.singledispatch
def _build(config: configs.Optimizer, rate, seed: int, kinds: Any) -> optax.GradientTransformation:
    raise TypeError(f"no optimizer is registered for {type(config).__name__}")


@_build.register
def _(config: configs.AdamW, rate, seed: int, kinds: Any) -> optax.GradientTransformation:
    mask = functools.partial(decayed, config)
    return optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=mask)


@_build.register
def _(config: configs.Muon, rate, seed: int, kinds: Any) -> optax.GradientTransformation:
    mask = lambda params: jax.tree.map(lambda on: not on, matching(params, config.exempt))
    moved = optax.chain(
        muon.orthogonal(kinds, beta=config.beta, steps=config.steps, rms=config.consistent_rms),
        optax.identity(),  # of optax's own chain, whose states have this one's names: runs go on
        optax.add_decayed_weights(config.weight_decay, mask),  # is given matrices alone
        optax.scale_by_learning_rate(rate),
    )

    def labels(params):
        tree = jax.tree.structure(params)
        return tree.unflatten(["adam" if kind is None else "muon" for kind in tree.flatten_up_to(kinds(params))])

    rest = optax.adamw(rate, weight_decay=config.weight_decay, mask=mask, nesterov=True)
    return optax.partition({"muon": moved, "adam": rest}, labels)


@_build.register
def _(config: configs.Sgd, rate, seed: int, kinds: Any) -> optax.GradientTransformation:
    sgd = optax.sgd(rate, config.momentum)
    if not config.weight_decay:
        return sgd
    return optax.chain(optax.add_decayed_weights(config.weight_decay, functools.partial(decayed, config)), sgd)


@_build.register
def _(config: configs.Adafactor, rate, seed: int, kinds: Any) -> optax.GradientTransformation:
    return optax.adafactor(
        rate, decay_rate=config.decay, clipping_threshold=config.clip_rms, multiply_by_parameter_scale=True
    )


@_build.register
def _(config: configs.AdafactorLayerwise, rate, seed: int, kinds: Any) -> optax.GradientTransformation:
    return adafactor_layerwise(
        rate,
        decay=config.decay,
        clip_rms=config.clip_rms,
        stochastic_rounding=config.stochastic_rounding,
        seed=seed,
    )


@_build.register
def _(config: configs.CustomOptimizer, rate, seed: int, kinds: Any) -> optax.GradientTransformation:
    return own.optimizer(config, rate)


def decayed(config: configs.Decayed, params: Any) -> Any:
    """Return which parameters have weight decay, as a tree of bools.

    Raises:
        ValueError: a pattern of `optimizer.no_decay` names no parameter.
    """
    check(params, config.exempt or (), f"optimizer.no_decay={config.no_decay}")
    exempt = matching(params, config.exempt)
    return jax.tree.map(lambda one: not one, exempt)


def named(inner: optax.GradientTransformation, config: configs.Decayed) -> optax.GradientTransformation:
    """Return a transformation that begins only if every pattern of `optimizer.no_decay` names a parameter."""

    def init(params):
        decayed(config, params)
        return inner.init(params)

    return inner._replace(init=init)


def _matrices(model: Any, axes: Axes, params: Any) -> Any:
    """Return each layer's `muon.Matrices`, and None for all else: embedding, head, norms, biases."""
    known: dict[str, muon.Matrices] = {}
    for row in rows(model):
        if row.fan_in and row.stack:
            lead, (a, b) = len(row.lead), letters_of(row)
            known[row.leaf] = muon.Matrices("".join(row.letters), lead, row.fan_in, axes)
            known[f"{row.leaf}.a"] = muon.Matrices(a, lead, row.fan_in, axes)
            known[f"{row.leaf}.b"] = muon.Matrices(b, lead, "R", axes)
    found = [known.get(name) for name in names(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def clipped(inner: optax.GradientTransformation, most: float) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of gradients whose global norm is limited; its state is `inner`'s own.

    So a run may go on with another limit than it began with, or with none. Who has the norm already, as one who is
    given one layer at a time, says so: `grad_norm`.
    """
    inner, clip = optax.with_extra_args_support(inner), optax.clip_by_global_norm(most)

    def update(updates, state, params=None, **extra):
        if (known := extra.get("grad_norm")) is None:
            within = clip.update(updates, optax.EmptyState(), params)[0]
        else:
            factor = most / jnp.maximum(known, most)
            within = jax.tree.map(lambda update: (update * factor).astype(update.dtype), updates)
        return inner.update(within, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def finite_alone(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that leaves out a step whose loss or gradient norm is not finite.

    Its state is `inner`'s own, so that a run may begin to leave steps out where it has met the first such.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra):
        made = lambda: inner.update(updates, state, params, **extra)
        zeros = lambda: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(made)[0])
        known = extra.get("grad_norm")
        finite = jnp.isfinite(extra["value"]) & jnp.isfinite(norm(updates) if known is None else known)
        return jax.lax.cond(finite, made, lambda: (zeros(), state))

    return optax.GradientTransformationExtraArgs(inner.init, update)


def computed_in(inner: optax.GradientTransformationExtraArgs, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that works in a dtype, whatever the parameters are stored in."""

    def update(updates, state, params=None, **extra):
        wide = None if params is None else optax.tree.cast(params, dtype)
        made, state = inner.update(optax.tree.cast(updates, dtype), state, wide, **extra)
        like = updates if params is None else params
        return jax.tree.map(lambda update, one: update.astype(one.dtype), made, like), state

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(optax.tree.cast(params, dtype)), update)


class Averaged(NamedTuple):
    """The state of an optimizer, and a mean of the weights in float32 at least."""

    inner: Any
    mean: Any
    count: jax.Array


def averaged(inner: optax.GradientTransformationExtraArgs, decay: float) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that also keeps the mean of the weights, in which old steps decay.

    The first means are of few steps: step t decays what came before by `min(decay, (1 + t) / (10 + t))`.
    """

    def init(params):
        # A copy: the step is given weights and mean to overwrite, and these must not share memory.
        wide = lambda param: jnp.array(param, jnp.promote_types(param.dtype, jnp.float32), copy=True)
        return Averaged(inner.init(params), jax.tree.map(wide, params), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("a mean of the weights needs them: call update(grads, state, params).")
        made, within = inner.update(updates, state.inner, params, **extra)
        keep = jnp.minimum(decay, (1 + state.count) / (10 + state.count))

        def blend(mean, param, update):
            new = (param + update).astype(mean.dtype)
            return (mean + (1 - keep) * (new - mean)).astype(mean.dtype)

        return made, Averaged(within, jax.tree.map(blend, state.mean, params, made), state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def mean_of(state: Any) -> Any:
    """Return the model of a training state with the mean of its weights, which `averaged` keeps, in their place."""
    cast = lambda mean, leaf: None if mean is None else mean.astype(leaf.dtype)
    found = jax.tree.leaves(state.opt_state, is_leaf=lambda part: isinstance(part, Averaged))
    kept = next(part for part in found if isinstance(part, Averaged))
    mean = jax.tree.map(cast, kept.mean, state.model, is_leaf=lambda leaf: leaf is None)
    return eqx.combine(mean, state.model)


PLAIN = ("*norm", "*scale", "*bias")  # what is no matrix: scales and offsets


def names(tree: Any) -> list[str]:
    """Return the dotted path of every leaf."""
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def matching(tree: Any, patterns: Sequence[str] | None) -> Any:
    """Return a tree of bools: which leaves a pattern names, by their path or a part of it; None is `PLAIN`."""
    wanted = PLAIN if patterns is None else patterns
    return jax.tree_util.tree_map_with_path(lambda path, _: any(_hit(_name(path), one) for one in wanted), tree)


def check(tree: Any, patterns: Sequence[str], key: str) -> None:
    """Raise unless every pattern names a leaf.

    Raises:
        ValueError: naming the pattern, the closest leaf, and all there are.
    """
    known = names(tree)
    for pattern in patterns:
        if not any(_hit(name, pattern) for name in known):
            parts = sorted({part for name in known for part in (name, *name.split("."))})
            close = difflib.get_close_matches(pattern, parts, n=1)
            hint = f" Did you mean `{close[0]}`?" if close else ""
            raise ValueError(f"bad value {key}: `{pattern}` matches no parameter.{hint} There are: {', '.join(known)}")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _hit(name: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in (name, *name.split(".")))
