"""Objectives: the values that their papers define; and the same values, gradients, in less memory, when cut."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import configs
from experiments.commandline import schema
from experiments.commandline.console import CommandError
from experiments.commandline.overrides import with_overrides
from experiments.planning.resolve import resolve
from experiments.runtime import hardware
from experiments.step import objectives, tiling
from experiments.step.build import Programs, problem
from experiments.step.loss import inputs
from tests.zoo.hf_tiny import FAST
from zoo.adapters import lora

MICRO = ["vocab_size=300", "num_layers=1", "embed_dim=16", "mlp_dim=32", "head_dim=8", "num_heads=2", "num_kv_heads=1"]
DEVICE = hardware.Device("cpu", "a test", 2**32)
OBJECTIVES = {
    "z-loss and smoothing": ["objective.z_loss=0.01", "objective.label_smoothing=0.1"],
    "sft": ["objective=sft", "data=chat"],
    "dpo": ["objective=dpo", "data=preference", "objective.label_smoothing=0.1"],
    "dpo of an adapter": ["objective=dpo", "data=preference", "adapter=lora", "adapter.rank=2"],
    "ipo": ["objective=ipo", "data=preference"],
    "simpo": ["objective=simpo", "data=preference"],
    "orpo": ["objective=orpo", "data=preference"],
    "forward": ["objective=distill", "objective.teacher={}", "objective.temperature=2"],
    "reverse": ["objective=distill", "objective.teacher={}", "objective.direction=reverse", "objective.weight=0.5"],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a wider model of the same vocabulary."""
    import zoo

    folder = tmp_path_factory.mktemp("teacher") / "weights"
    config = resolved("model.embed_dim=24", "seed=5")
    zoo.save(Programs(config).init(), folder)
    return folder


def resolved(*overrides):
    words = ["model=tiny", *(f"model.{size}" for size in MICRO), "batch_size=8", "seq_len=16", "steps=2"]
    config, _ = schema.compose(with_overrides([*words, "tiling.n=none", *overrides], []))
    return resolve(config, DEVICE)


def arrays(config):
    """A batch with uneven masks, and documents that share rows where the data packs them."""
    rng = np.random.default_rng(0)
    found = []
    for shape in Programs(dataclasses.replace(config, objective=plain(config), reference=None)).batch[:4]:
        found.append(rng.integers(0, 300, shape.shape).astype(shape.dtype))
    share = np.linspace(0.1, 1, found[2].size // 16).reshape(*found[2].shape[:-1], 1)
    found[2] = (rng.random(found[2].shape) < share).astype(np.float32)
    if len(found) == 4:
        found[3] = np.sort(found[3] % 3, axis=-1)
    return tuple(found)


def plain(config):
    """The objective without what it is compared with, whose shapes are the same."""
    return configs.Simpo() if config.paired else configs.Pretrain()


def moved(model, config):
    """A model that is no longer its own reference."""
    rng = np.random.default_rng(3)
    draw = lambda x: np.float32(0.02) * rng.standard_normal(x.shape, np.float32)
    add = lambda x, on: jnp.asarray(np.asarray(x) + draw(x)) if on else x
    return jax.tree.map(add, model, Programs(config).trainable(model))


def gradients(config, batch):
    loss, model = Programs(config).loss, moved(Programs(config).init(), config)
    given = inputs(batch, Programs(config).init_frozen())
    params, rest = eqx.partition(model, Programs(config).trainable(model))
    objective = lambda params, inputs: loss(eqx.combine(params, rest), inputs)
    return jax.device_get(eqx.filter_jit(eqx.filter_value_and_grad(objective, has_aux=True), **FAST)(params, given))


CUTS = {
    "head": ["tiling.n=3"],
    "head and batch": ["tiling.n=2", "tiling.batch=3"],
    "vocabulary": ["tiling.n=3", "tiling.lowmem=true"],
}
CASES = [
    pytest.param(words, cut, id=f"{name}, {how}", marks=[] if (i + 4 * j) % 9 in (0, 3) else pytest.mark.heavy)
    for i, (name, words) in enumerate(OBJECTIVES.items())
    for j, (how, cut) in enumerate(CUTS.items())
]


@pytest.mark.parametrize(("words", "cut"), CASES)
def test_values_and_gradients_equal_uncut_ones(words, cut, teacher):
    words = [word.format(teacher) for word in words]
    batch = arrays(resolved(*words))
    expected, actual = gradients(resolved(*words), batch), gradients(resolved(*words, *cut), batch)
    assert problem(resolved(*words, *cut)) is None
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(abs(b).max())))
    jax.tree.map(close, actual, expected)


def largest(jaxpr):
    """Elements of the largest array that a program makes, bodies included."""
    found = 0
    for equation in jaxpr.eqns:
        found = max([found, *(int(np.prod(out.aval.shape)) for out in equation.outvars if hasattr(out.aval, "shape"))])
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if isinstance(inner, jax.extend.core.ClosedJaxpr):
                    inner = inner.jaxpr
                if isinstance(inner, jax.extend.core.Jaxpr):
                    found = max(found, largest(inner))
    return found


def largest_in_step(config):
    model, batch = Programs(config).state.model, Programs(config).batch
    shapes, static = eqx.partition((model, batch), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def step(arrays):
        model, batch = eqx.combine(arrays, static)
        return eqx.filter(eqx.filter_grad(lambda model: Programs(config).loss(model, batch)[0])(model), eqx.is_array)

    return largest(jax.make_jaxpr(step)(shapes).jaxpr)


@pytest.mark.parametrize("words", OBJECTIVES.values(), ids=OBJECTIVES)
def test_no_objective_makes_the_logits_of_a_step(words, teacher):
    words, logits = [word.format(teacher) for word in words], 8 * 16 * 300
    assert largest_in_step(resolved(*words, "tiling.n=none")) >= logits
    assert largest_in_step(resolved(*words, "tiling.n=8")) <= logits // 4


def test_preferences_are_those_of_their_papers():
    """By hand, for one pair of three and two tokens."""
    policy, reference, lengths = (jnp.array([pair]) for pair in ([-3.0, -8.0], [-4.0, -6.0], [3.0, 2.0]))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    compare = lambda config, *sums: float(objectives.COMPARE[type(config)](*sums, lengths, how=config)[0][0])
    both = policy, reference
    assert compare(configs.Dpo(beta=0.5), *both) == pytest.approx(-np.log(sigmoid(0.5 * 3)), rel=1e-6)
    smooth = -0.9 * np.log(sigmoid(1.5)) - 0.1 * np.log(sigmoid(-1.5))
    assert compare(configs.Dpo(beta=0.5, label_smoothing=0.1), *both) == pytest.approx(smooth, rel=1e-6)
    assert compare(configs.Ipo(beta=0.5), *both) == pytest.approx((1 / 3 + 1 - 1) ** 2, rel=1e-5)
    assert compare(configs.Simpo(beta=2.0, margin=1.0), policy) == pytest.approx(-np.log(sigmoid(-2 + 8 - 1)), rel=1e-5)
    log_odds = (-1 - np.log(1 - np.exp(-1))) - (-4 - np.log(1 - np.exp(-4)))
    assert compare(configs.Orpo(beta=0.1), policy) == pytest.approx(1 - 0.1 * np.log(sigmoid(log_odds)), rel=1e-5)


class Head(eqx.Module):
    """Logits are the hidden states themselves."""

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distances_are_divergences(direction):
    student, teacher = np.log(np.array([[[0.5, 0.5]], [[0.9, 0.1]]], np.float32))
    how = configs.Distill(teacher="", direction=direction)
    args = jnp.zeros(1, int), jnp.ones(1)
    loss, aux = objectives.distance((Head(), Head()), (jnp.asarray(student), jnp.asarray(teacher)), *args, how=how)
    p, q = (np.array([0.9, 0.1]), np.array([0.5, 0.5]))[:: 1 if direction == "forward" else -1]
    assert float(loss) == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)
    assert float(aux["cross_entropy"]) == pytest.approx(np.log(2), rel=1e-6)


def test_smoothing_and_z_loss_are_what_they_say():
    logits = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    targets, mask = jnp.arange(5), jnp.array([1.0, 1, 0, 1, 1])
    call = functools.partial(objectives.cross_entropy, (Head(),), (jnp.asarray(logits),), targets, mask)
    log_sum = np.log(np.exp(logits).sum(-1))
    smooth = 0.9 * np.eye(7)[:5] + 0.1 / 7
    by_hand = (-(smooth * (logits - log_sum[:, None])).sum(-1) + 0.01 * log_sum**2)[[0, 1, 3, 4]].mean()
    loss, aux = call(z_loss=0.01, smoothing=0.1)
    assert float(loss) == pytest.approx(by_hand, rel=1e-5)
    assert float(aux["cross_entropy"]) == pytest.approx(float(call()[0]), rel=1e-6)
    assert call()[1] == {}


def test_an_untrained_model_is_its_own_reference():
    for words in ([], ["adapter=lora"]):
        config = resolved("objective=dpo", "data=preference", *words)
        given = inputs(arrays(config), Programs(config).init_frozen())
        value, aux = eqx.filter_jit(Programs(config).loss, **FAST)(Programs(config).init(), given)
        assert float(value) == pytest.approx(np.log(2), rel=1e-5)
        assert float(aux["margin"]) == pytest.approx(0, abs=1e-5)
        assert (config.reference is not None and config.reference.origin is configs.Origin.base) == bool(words)


def test_an_adapter_comes_off():
    config = resolved("adapter=lora")
    plain = Programs(resolved()).init()
    detached = lora.detach(Programs(config).init())
    jax.tree.map(np.testing.assert_array_equal, detached, plain)


def test_held_out_text_is_measured_in_nats_per_token(teacher):
    words = OBJECTIVES["forward"]
    config = resolved(*(word.format(teacher) for word in words))
    loss = Programs(config).held_out_loss
    model, batch = Programs(config).init(), arrays(config)
    expected = Programs(resolved()).loss(model, batch)[0]
    assert float(loss(model, batch)[0]) == pytest.approx(float(expected), rel=1e-6)


REFUSED = {
    "pairs": (["objective=dpo"], "bad value data=stdlib: this objective compares answers: use data=preference"),
    "no pairs": (["data=preference"], "bad value data=preference: pairs of answers are for preferences"),
    "no answers": (["objective=sft"], "bad value objective=sft: it learns what the assistant says"),
    "direction": (
        ["objective=distill", "objective.teacher=x", "objective.direction=back"],
        "choose forward or reverse",
    ),
    "beta": (["objective=dpo", "data=preference", "objective.beta=0"], "objective.beta=0.0: it must be greater than"),
    "smoothing": (["objective.label_smoothing=1"], "objective.label_smoothing=1.0: it must lie between 0 and below 1"),
    "teacher": (["objective=distill"], "missing value: objective.teacher=... must be given"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused(words, message):
    with pytest.raises(schema.ConfigError) as error:
        schema.compose(words)
    assert message in str(error.value)


def test_a_teacher_must_be_there_and_speak_the_same_language(teacher):
    with pytest.raises(
        CommandError, match=r"objective.teacher=.* it has a vocabulary of 300, the model that learns one of 301"
    ):
        resolved("objective=distill", f"objective.teacher={teacher}", "model.vocab_size=301")
    with pytest.raises(CommandError, match=r"cannot read objective.teacher=nowhere: No such file"):
        resolved("objective=distill", "objective.teacher=nowhere")


def test_pairs_are_cut_as_pairs():
    words = ["objective=simpo", "data=preference"]
    assert "batch_size=7 sequences: give an even number" in str(problem(resolved(*words, "batch_size=7")))
    cut = lambda *tilings: dict(tiling.describe(resolved(*words, *tilings)))
    assert cut("tiling.batch=5", "tiling.n=auto")["batch"].startswith("4 micro-batches of 2 x")
    assert cut("tiling.n=17")["head"].endswith("not 17: there is no more to cut")
