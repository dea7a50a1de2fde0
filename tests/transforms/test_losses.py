"""Every loss in `optax.losses`, cut over every axis where it is defined: as untiled, or refused for a reason.

Dimension key: `B` examples, `V` classes, `D` features, `S` time steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.scipy.special import logsumexp

from tests.helpers import assert_tiles

B, V, S = 6, 5, 7
losses = optax.losses


def data(seed=0):
    rng = np.random.default_rng(seed)
    logits, other, third = rng.normal(size=(3, B, V))
    mask = rng.random((B, V)) < 0.7
    mask[:, 0] = True
    return {
        "logits": logits,
        "other": other,
        "third": third,
        "targets": np.exp(other) / np.exp(other).sum(1, keepdims=True),
        "hot": np.eye(V)[rng.integers(V, size=B)],
        "signs": np.where(other > 0, 1.0, -1.0),
        "labels": rng.integers(V, size=B).astype(np.int32),
        "groups": np.array([0, 1, 0, 2, 1, 2], np.int32),
        "mask": mask,
        "wide": rng.normal(size=(B, 3 * B)),
    }


def on(loss, *names, **kwargs):
    """A loss of two matrices of examples and classes, cut over either; one value for each example, or element."""
    return names, lambda *args: loss(*args, **kwargs)


def where(loss, *names):
    """The same, of the classes that a mask leaves."""
    return (*names, "mask"), lambda *args: loss(*args[:-1], where=args[-1])


# name: (the arrays that it takes, a function of them). Matrices are `[B, V]`, vectors `[B]`.
LOSSES = {
    "binary_dice_loss": on(losses.binary_dice_loss, "logits", "targets"),
    "convex_kl_divergence": on(losses.convex_kl_divergence, "logits", "targets"),
    "cosine_distance": on(losses.cosine_distance, "logits", "other"),
    "cosine_similarity": on(losses.cosine_similarity, "logits", "other"),
    "dice_loss": on(losses.dice_loss, "logits", "hot"),
    "generalized_kl_divergence": on(losses.generalized_kl_divergence, "logits", "targets"),
    "hinge_loss": on(losses.hinge_loss, "logits", "signs"),
    "huber_loss": on(losses.huber_loss, "logits", "other"),
    "kl_divergence": on(losses.kl_divergence, "logits", "targets"),
    "kl_divergence_with_log_targets": on(losses.kl_divergence_with_log_targets, "logits", "other"),
    "l2_loss": on(losses.l2_loss, "logits", "other"),
    "log_cosh": on(losses.log_cosh, "logits", "other"),
    "make_fenchel_young_loss": on(losses.make_fenchel_young_loss(lambda x: logsumexp(x, axis=-1)), "logits", "targets"),
    "multiclass_generalized_dice_loss": on(losses.multiclass_generalized_dice_loss, "logits", "hot"),
    "multiclass_hinge_loss": on(losses.multiclass_hinge_loss, "logits", "labels"),
    "multiclass_perceptron_loss": on(losses.multiclass_perceptron_loss, "logits", "labels"),
    "multiclass_sparsemax_loss": on(losses.multiclass_sparsemax_loss, "logits", "labels"),
    "ntxent": on(losses.ntxent, "logits", "groups"),
    "ntxent of many features": on(losses.ntxent, "wide", "groups"),
    "perceptron_loss": on(losses.perceptron_loss, "logits", "signs"),
    "poly_loss_cross_entropy": on(losses.poly_loss_cross_entropy, "logits", "targets"),
    "ranking_softmax_loss": on(losses.ranking_softmax_loss, "logits", "targets"),
    "safe_softmax_cross_entropy": on(losses.safe_softmax_cross_entropy, "logits", "hot"),
    "sigmoid_binary_cross_entropy": on(losses.sigmoid_binary_cross_entropy, "logits", "targets"),
    "sigmoid_focal_loss": on(losses.sigmoid_focal_loss, "logits", "targets", alpha=0.3),
    "smooth_labels": on(losses.smooth_labels, "targets", alpha=0.1),
    "softmax_cross_entropy": on(losses.softmax_cross_entropy, "logits", "targets"),
    "softmax_cross_entropy_with_integer_labels": on(
        losses.softmax_cross_entropy_with_integer_labels, "logits", "labels"
    ),
    "sparsemax_loss": on(losses.sparsemax_loss, "logits", "hot"),
    "squared_error": on(losses.squared_error, "logits", "other"),
    "triplet_margin_loss": on(losses.triplet_margin_loss, "logits", "other", "third"),
    "convex_kl_divergence of some": where(losses.convex_kl_divergence, "logits", "targets"),
    "cosine_similarity of some": where(losses.cosine_similarity, "logits", "other"),
    "kl_divergence of some": where(losses.kl_divergence, "logits", "targets"),
    "poly_loss_cross_entropy of some": where(losses.poly_loss_cross_entropy, "logits", "targets"),
    "ranking_softmax_loss of some": where(losses.ranking_softmax_loss, "logits", "targets"),
    "softmax_cross_entropy of some": where(losses.softmax_cross_entropy, "logits", "targets"),
    "softmax_cross_entropy_with_integer_labels of some": where(
        losses.softmax_cross_entropy_with_integer_labels, "logits", "labels"
    ),
}
SEQUENCES = {"ctc_loss": losses.ctc_loss, "ctc_loss_with_forward_probs": losses.ctc_loss_with_forward_probs}


def cut(names, axis):
    """Over examples everything is cut; over classes, the matrices are."""
    if axis == 0:
        return (0,) * len(names)
    return tuple(None if name in ("labels", "groups") else 1 for name in names)


def test_every_loss_has_a_case():
    there = {n for n in dir(losses) if callable(getattr(losses, n)) and not n.startswith("_")}
    assert there == {name.split()[0] for name in LOSSES} | set(SEQUENCES)


# What is refused, and why: all pairs of examples are more than their features.


def check(fn, axes, args):
    """A total that is nonlinear in the mean, its gradients, and what the loss is for each example."""

    def total(*args):
        values = fn(*args)
        return jnp.log(1 + jnp.mean(values**2)), values

    with jax.enable_x64(True):
        assert assert_tiles(total, axes, 4, args, has_aux=True, dtype=jnp.float64, fast=True, floor=1e-3)


@pytest.mark.filterwarnings("ignore:The function convex_kl_divergence is deprecated")
@pytest.mark.parametrize("axis", [0, 1], ids=["examples", "classes"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_equals_untiled(name, axis):
    names, fn = LOSSES[name]
    args = tuple(data()[n] for n in names)
    check(fn, cut(names, axis), args)


def sequences():
    """Logits [B, S, V] and labels [B, 3], with padding."""
    rng = np.random.default_rng(0)
    lengths, labels = rng.integers(5, S + 1, B), rng.integers(1, 4, B)
    paddings = [(np.arange(n) >= x[:, None]).astype(float) for n, x in ((S, lengths), (3, labels))]
    return rng.normal(size=(B, S, V)), paddings[0], rng.integers(1, V, (B, 3)).astype(np.int32), paddings[1]


@pytest.mark.crossed("name", "axes")
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (1, 1, None, None), (2, None, None, None)], ids="BSV")
@pytest.mark.parametrize("name", SEQUENCES)
def test_loss_of_sequences_equals_untiled(name, axes):
    loss = SEQUENCES[name]
    check(lambda *args: jax.tree.leaves(loss(*args))[0], axes, sequences())
