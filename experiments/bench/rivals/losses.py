"""Ordinary losses of logits, as users write them, over the array API that JAX and PyTorch share.

`xp` has the library's own cross_entropy, logsumexp and log_softmax too.

`LOSSES[name](xp, z, batch)`: logits `z` [N V]; `batch` holds, for each of N tokens, `y` labels, `m` weights, `teacher`
logits and `soft`, `multi` and `x` targets [N V], `old` and `ref` log-probabilities and an `adv`antage. Sixteen tokens
in a row are a sequence, and sequences are in pairs, the chosen one first. `KIND[name]` says what kind a loss is of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Loss = Callable[[Any, Any, dict[str, Any]], Any]
LOSSES: dict[str, Loss] = {}
KIND: dict[str, str] = {}
LENGTH = 16  # tokens of a sequence


def kind(which: str, **losses: Loss) -> None:
    for name, loss in losses.items():
        LOSSES[name], KIND[name] = loss, which


# ------------------------------------------------------------------------------------------------- what they share


def lse(xp: Any, z: Any) -> Any:
    return xp.logsumexp(z, -1)


def log_softmax(xp: Any, z: Any) -> Any:
    return xp.log_softmax(z, -1)


def logp(xp: Any, z: Any, y: Any) -> Any:
    return xp.take_along_axis(log_softmax(xp, z), y[:, None], axis=-1)[:, 0]


def nll(xp: Any, z: Any, b: dict, reduction: str = "none") -> Any:
    return xp.cross_entropy(z, b["y"], reduction)


def softplus(xp: Any, x: Any) -> Any:
    return xp.where(x > 0, x, 0 * x) + xp.log1p(xp.exp(-xp.abs(x)))


def relu(xp: Any, x: Any) -> Any:
    return xp.where(x > 0, x, 0 * x)


def sigmoid(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


def entropy(xp: Any, z: Any) -> Any:
    q = log_softmax(xp, z)
    return -xp.sum(xp.exp(q) * q, axis=-1)


def softcap(xp: Any, z: Any) -> Any:
    return 30 * xp.tanh(z / 30)


def weighted(xp: Any, each: Any, b: dict) -> Any:
    return xp.sum(each * b["m"]) / xp.sum(b["m"])


def kl(xp: Any, p: Any, q: Any) -> Any:
    """Of distributions given by logits, KL(p || q) of each token."""
    lp, lq = log_softmax(xp, p), log_softmax(xp, q)
    return xp.sum(xp.exp(lp) * (lp - lq), axis=-1)


def sequences(xp: Any, each: Any) -> Any:
    """Sums over the tokens of each sequence."""
    return xp.sum(xp.reshape(each, (-1, LENGTH)), axis=-1)


def pairs(xp: Any, z: Any, b: dict) -> tuple[Any, Any]:
    """Log-probabilities of the chosen and of the rejected sequence of each pair."""
    both = xp.reshape(sequences(xp, logp(xp, z, b["y"])), (-1, 2))
    return both[:, 0], both[:, 1]


def reference(xp: Any, b: dict) -> tuple[Any, Any]:
    both = xp.reshape(sequences(xp, b["ref"]), (-1, 2))
    return both[:, 0], both[:, 1]


def right(xp: Any, z: Any, b: dict) -> Any:
    """The logit of the label."""
    return xp.take_along_axis(z, b["y"][:, None], axis=-1)


def one_hot(xp: Any, z: Any, b: dict) -> Any:
    return xp.astype(xp.arange(z.shape[-1])[None, :] == b["y"][:, None], z.dtype)


# --------------------------------------------------------------------------------------------------- the losses

kind(
    "cross-entropy",
    mean=lambda xp, z, b: nll(xp, z, b, "mean"),
    sum=lambda xp, z, b: nll(xp, z, b, "sum"),
    masked_mean=lambda xp, z, b: (
        xp.sum(nll(xp, z, b) * xp.astype(b["m"] > 0.3, z.dtype)) / xp.sum(xp.astype(b["m"] > 0.3, z.dtype))
    ),
    weighted_mean=lambda xp, z, b: weighted(xp, nll(xp, z, b), b),
    smoothed=lambda xp, z, b: xp.mean(0.9 * nll(xp, z, b) - 0.1 * xp.mean(log_softmax(xp, z), axis=-1)),
    z_loss=lambda xp, z, b: xp.mean(nll(xp, z, b) + 1e-2 * lse(xp, z) ** 2),
    softcapped=lambda xp, z, b: nll(xp, softcap(xp, z), b, "mean"),
    softcapped_z_loss=lambda xp, z, b: weighted(
        xp, nll(xp, softcap(xp, z), b) + 1e-2 * lse(xp, softcap(xp, z)) ** 2, b
    ),
    soft_targets=lambda xp, z, b: -xp.mean(xp.sum(b["soft"] * log_softmax(xp, z), axis=-1)),
    temperature=lambda xp, z, b: nll(xp, z / 0.7, b, "mean"),
)
kind(
    "classification",
    focal=lambda xp, z, b: xp.mean((1 - xp.exp(-nll(xp, z, b))) ** 2 * nll(xp, z, b)),
    poly=lambda xp, z, b: xp.mean(nll(xp, z, b) + 1 - xp.exp(-nll(xp, z, b))),
    generalised=lambda xp, z, b: xp.mean((1 - xp.exp(-0.7 * nll(xp, z, b))) / 0.7),
    hinge=lambda xp, z, b: xp.mean(xp.sum((1 - one_hot(xp, z, b)) * relu(xp, 1 + z - right(xp, z, b)), axis=-1)),
    hardest_margin=lambda xp, z, b: xp.mean(
        relu(xp, 1 + xp.max(z - 1e4 * one_hot(xp, z, b), axis=-1) - right(xp, z, b)[:, 0])
    ),
    unlikelihood=lambda xp, z, b: -xp.mean(xp.log1p(-0.99 * xp.exp(logp(xp, z, b["y"])))),
    brier=lambda xp, z, b: xp.mean(xp.sum((xp.exp(log_softmax(xp, z)) - one_hot(xp, z, b)) ** 2, axis=-1)),
    binary=lambda xp, z, b: xp.mean(softplus(xp, z) - b["multi"] * z),
    binary_focal=lambda xp, z, b: xp.mean(
        (1 - sigmoid(xp, (2 * b["multi"] - 1) * z)) ** 2 * softplus(xp, (1 - 2 * b["multi"]) * z)
    ),
    confidence=lambda xp, z, b: nll(xp, z, b, "mean") - 0.1 * xp.mean(entropy(xp, z)),
)
kind(
    "distillation",
    forward_kl=lambda xp, z, b: xp.mean(kl(xp, b["teacher"], z)),
    reverse_kl=lambda xp, z, b: xp.mean(kl(xp, z, b["teacher"])),
    jensen_shannon=lambda xp, z, b: xp.mean(_jensen_shannon(xp, z, b["teacher"])),
    hot=lambda xp, z, b: 4 * xp.mean(kl(xp, b["teacher"] / 2, z / 2)),
    mixed=lambda xp, z, b: 0.5 * xp.mean(kl(xp, b["teacher"], z)) + 0.5 * nll(xp, z, b, "mean"),
    weighted_kl=lambda xp, z, b: weighted(xp, kl(xp, b["teacher"], z), b),
    logits_mse=lambda xp, z, b: xp.mean((z - b["teacher"]) ** 2),
    cosine=lambda xp, z, b: (
        1
        - xp.mean(
            xp.sum(z * b["teacher"], axis=-1) / xp.sqrt(xp.sum(z**2, axis=-1) * xp.sum(b["teacher"] ** 2, axis=-1))
        )
    ),
    total_variation=lambda xp, z, b: xp.mean(
        xp.sum(xp.abs(xp.exp(log_softmax(xp, z)) - xp.exp(log_softmax(xp, b["teacher"]))), axis=-1)
    ),
    hellinger=lambda xp, z, b: (
        1 - xp.mean(xp.sum(xp.exp((log_softmax(xp, z) + log_softmax(xp, b["teacher"])) / 2), axis=-1))
    ),
)


def _jensen_shannon(xp: Any, p: Any, q: Any) -> Any:
    lp, lq = log_softmax(xp, p), log_softmax(xp, q)
    middle = xp.log((xp.exp(lp) + xp.exp(lq)) / 2)
    return xp.sum(xp.exp(lp) * (lp - middle) + xp.exp(lq) * (lq - middle), axis=-1) / 2


def _margin(xp: Any, z: Any, b: dict) -> Any:
    (chosen, rejected), (good, bad) = pairs(xp, z, b), reference(xp, b)
    return 0.1 * ((chosen - good) - (rejected - bad))


def _orpo(xp: Any, z: Any, b: dict) -> Any:
    chosen, rejected = (x / LENGTH for x in pairs(xp, z, b))
    odds = lambda x: x - xp.log1p(-xp.exp(x))
    return xp.mean(softplus(xp, odds(rejected) - odds(chosen))) - xp.mean(chosen)


kind(
    "preferences",
    dpo=lambda xp, z, b: xp.mean(softplus(xp, -_margin(xp, z, b))),
    ipo=lambda xp, z, b: xp.mean((_margin(xp, z, b) - 0.5) ** 2),
    hinge_dpo=lambda xp, z, b: xp.mean(relu(xp, 1 - _margin(xp, z, b))),
    robust_dpo=lambda xp, z, b: xp.mean(0.9 * softplus(xp, -_margin(xp, z, b)) - 0.1 * softplus(xp, _margin(xp, z, b))),
    simpo=lambda xp, z, b: xp.mean(softplus(xp, 0.5 - 2 * (pairs(xp, z, b)[0] - pairs(xp, z, b)[1]) / LENGTH)),
    cpo=lambda xp, z, b: (
        xp.mean(softplus(xp, 0.1 * (pairs(xp, z, b)[1] - pairs(xp, z, b)[0]))) - xp.mean(pairs(xp, z, b)[0]) / LENGTH
    ),
    orpo=_orpo,
    kto=lambda xp, z, b: xp.mean(1 - sigmoid(xp, 0.1 * (sequences(xp, logp(xp, z, b["y"])) - sequences(xp, b["ref"])))),
)


def _ratio(xp: Any, z: Any, b: dict) -> Any:
    return xp.exp(logp(xp, z, b["y"]) - b["old"])


def _clipped(xp: Any, ratio: Any, b: dict) -> Any:
    return -xp.minimum(ratio * b["adv"], xp.clip(ratio, 0.8, 1.2) * b["adv"])


def _grpo(xp: Any, z: Any, b: dict) -> Any:
    away = b["ref"] - logp(xp, z, b["y"])
    return xp.mean(_clipped(xp, _ratio(xp, z, b), b) + 0.04 * (xp.exp(away) - away - 1))


kind(
    "policy",
    reinforce=lambda xp, z, b: -xp.mean(logp(xp, z, b["y"]) * b["adv"]),
    ppo=lambda xp, z, b: xp.mean(_clipped(xp, _ratio(xp, z, b), b)),
    ppo_entropy=lambda xp, z, b: xp.mean(_clipped(xp, _ratio(xp, z, b), b)) - 0.01 * xp.mean(entropy(xp, z)),
    ppo_masked=lambda xp, z, b: weighted(xp, _clipped(xp, _ratio(xp, z, b), b), b),
    grpo=_grpo,
    sequence_ratio=lambda xp, z, b: (
        -xp.mean(
            xp.clip(xp.exp(sequences(xp, logp(xp, z, b["y"]) - b["old"]) / LENGTH), 0.8, 1.2) * sequences(xp, b["adv"])
        )
    ),
    maximum_entropy=lambda xp, z, b: -xp.mean(entropy(xp, z)),
)
kind(
    "regression and others",
    mse=lambda xp, z, b: xp.mean((z - b["x"]) ** 2),
    huber=lambda xp, z, b: xp.mean(xp.where(xp.abs(z - b["x"]) < 1, 0.5 * (z - b["x"]) ** 2, xp.abs(z - b["x"]) - 0.5)),
    log_cosh=lambda xp, z, b: xp.mean(softplus(xp, 2 * (z - b["x"])) - (z - b["x"])),
    poisson=lambda xp, z, b: xp.mean(xp.exp(0.3 * z) - b["multi"] * 0.3 * z),
    free_energy=lambda xp, z, b: -xp.mean(lse(xp, z)),
    worst_token=lambda xp, z, b: xp.max(nll(xp, z, b)),
    perplexity=lambda xp, z, b: xp.exp(nll(xp, z, b, "mean") / 4),
    tilted=lambda xp, z, b: xp.log(xp.mean(xp.exp(0.5 * nll(xp, z, b)))),
)
