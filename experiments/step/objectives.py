"""What a run minimises, as plain functions of hidden states; none knows that `tile` cuts it.

Each is `loss(models, hiddens, targets, mask) -> (scalar, dict of scalars)`. The first model is the one that learns; a
frozen reference or teacher is the second. Their hidden states, the targets and the mask lie alike: as the tokens of a
step [T], as sequences [B, S], or as the two answers of each preference [P, 2, S].

`B` batch `S` sequence `T` tokens `P` pairs `D` embed `V` vocab.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.nn import log_sigmoid

from experiments import configs
from experiments.runtime import own
from transforms.sharding import partitions

Loss = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


@functools.singledispatch
def build(config: configs.Objective, paired: bool = False) -> Loss:
    """Return the objective that a configuration describes; `paired`: of pairs of answers."""
    raise TypeError(f"no objective is registered for {type(config).__name__}")


@build.register
def _(config: configs.Pretrain, paired: bool = False) -> Loss:
    return functools.partial(cross_entropy, z_loss=config.z_loss, smoothing=config.label_smoothing)


@build.register
def _(config: configs.Distill, paired: bool = False) -> Loss:
    return functools.partial(distance, how=config)


@build.register
def _(config: configs.Paired, paired: bool = False) -> Loss:
    return functools.partial(preference, compare=functools.partial(COMPARE[type(config)], how=config))


@build.register
def _(config: configs.Custom, paired: bool = False) -> Loss:
    return own.objective(config, answer_sums if paired else None)


def held_out(config: configs.Objective, paired: bool = False) -> Loss:
    """Return what held-out text is measured by: nats per token, or of pairs of answers the objective itself.

    Beside a user's own loss, `objective` of the same text: nats are what runs of different losses can be compared by.
    """
    if paired:
        return build(config, paired)
    return functools.partial(_with_own, own=build(config)) if isinstance(config, configs.Custom) else cross_entropy


def _with_own(*args, own: Loss):
    return cross_entropy(*args)[0], {"objective": own(*args)[0]}


def cross_entropy(models, hiddens, targets, mask, *, z_loss: float = 0.0, smoothing: float = 0.0):
    """Return the mean cross-entropy of the tokens that count, in nats."""
    logits = models[0].logits(hiddens[0])
    losses = label_losses(logits, targets)
    if not (z_loss or smoothing):
        return _mean(losses, mask), {}
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    spread = (1 - smoothing) * losses + smoothing * (log_sum - logits.mean(-1))
    return _mean(spread + z_loss * log_sum**2, mask), {"cross_entropy": _mean(losses, mask)}


def label_losses(logits, targets):
    """Return the cross-entropy of each label, in nats."""
    if partitions(logits)[-1] is None:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    # Where devices hold parts of the vocabulary, one of them has a label's logit: the others add zeros.
    picked = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def distance(models, hiddens, targets, mask, *, how: configs.Distill):
    """Return the mean divergence of the student's distribution and the teacher's, mixed with cross-entropy.

    It is multiplied by the squared temperature, so that gradients do not shrink (https://arxiv.org/abs/1503.02531).
    """
    logits = [model.logits(hidden) for model, hidden in zip(models, hiddens, strict=True)]
    student, teacher = (jax.nn.log_softmax(one / how.temperature, axis=-1) for one in logits)
    pair = (student, teacher) if how.direction == "forward" else (teacher, student)
    divergence = _mean(optax.losses.kl_divergence_with_log_targets(*pair), mask) * how.temperature**2
    nats = _mean(label_losses(logits[0], targets), mask)
    loss = divergence if how.weight == 1 else how.weight * divergence + (1 - how.weight) * nats
    return loss, {"divergence": divergence, "cross_entropy": nats}


def preference(models, hiddens, targets, mask, *, compare: Callable[..., Any]):
    """Return the mean of what `compare` makes of each pair's log-probabilities; and how often the chosen one wins.

    A tie is half a win.

    `compare` is given `answer_sums`.
    """
    losses, rewards = compare(*answer_sums(models, hiddens, targets, mask))
    margins = _margin(rewards)
    return losses.mean(), {"accuracy": (jnp.sign(margins) / 2 + 0.5).mean(), "margin": margins.mean()}


def answer_sums(models, hiddens, targets, mask):
    """Return sums over each answer's tokens that count [P, 2], chosen first.

    These are log-probabilities, the model's and the reference's if there is one, and how many tokens there are, one
    where there is none.
    """
    sums = [
        -jnp.sum(label_losses(model.logits(hidden), targets) * mask, -1)
        for model, hidden in zip(models, hiddens, strict=True)
    ]
    return *sums, own.counted(mask, -1)


def dpo(policy, reference, lengths, *, how: configs.Dpo):
    rewards = how.beta * (policy - reference)
    margin, flipped = _margin(rewards), how.label_smoothing
    return -(1 - flipped) * log_sigmoid(margin) - flipped * log_sigmoid(-margin), rewards


def ipo(policy, reference, lengths, *, how: configs.Ipo):
    gained = (policy - reference) / lengths
    return (_margin(gained) - 1 / (2 * how.beta)) ** 2, how.beta * gained


def simpo(policy, lengths, *, how: configs.Simpo):
    rewards = how.beta * policy / lengths
    return -log_sigmoid(_margin(rewards) - how.margin), rewards


def orpo(policy, lengths, *, how: configs.Orpo):
    mean = policy / lengths
    odds = mean - jnp.log1p(-jnp.exp(jnp.minimum(mean, -1e-6)))
    return -mean[..., 0] - how.beta * log_sigmoid(_margin(odds)), how.beta * odds


COMPARE: dict[type, Callable[..., Any]] = {configs.Dpo: dpo, configs.Ipo: ipo, configs.Simpo: simpo, configs.Orpo: orpo}


def _margin(values):
    """Return by how much the chosen answers are ahead."""
    return values[..., 0] - values[..., 1]


def _mean(values, mask):
    return jnp.sum(values * mask) / own.counted(mask)
