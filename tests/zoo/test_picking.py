"""How ids are picked: distributions as asked for, numbers by (seed, position), drafts, damaged pages."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo.hf_cases import CASES
from tests.zoo.hf_tiny import FAST, loaded
from tests.zoo.test_engine import SIZES, bits, engine_of, requests
from zoo.engine.engine import Engine, Settings, guess
from zoo.engine.sampling import Rules, Sampling, pick
from zoo.inference.generate import generate

VOCAB, PLACES = 12, 20_000
LOGITS = np.random.default_rng(0).normal(0, 1.5, VOCAB).astype(np.float32)
HISTORY = [3, 5, 5, 7]
ASKED = {
    "plain": Sampling(seed=1),
    "hot": Sampling(temperature=1.8, seed=2),
    "top_k": Sampling(top_k=4, seed=3),
    "top_p": Sampling(top_p=0.8, temperature=0.7, seed=4),
    "min_p": Sampling(min_p=0.2, seed=5),
    "penalties": Sampling(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, seed=6),
    "biases": Sampling(logit_bias=((2, 1.5), (3, -100.0)), top_k=6, top_p=0.9, min_p=0.05, seed=7),
}


def rules_of(sampling, rows, length=8):
    rules = Rules.neutral(rows, length, 1)
    for row in range(rows):
        rules.put(row, sampling, HISTORY, 2)
    return rules


def expected(sampling):
    """The distribution, by the words of `Sampling`, in numpy."""
    logits = LOGITS.astype(np.float64)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for token in set(HISTORY):
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    for token in HISTORY[2:]:
        logits[token] -= sampling.frequency_penalty
    for token in set(HISTORY[2:]):
        logits[token] -= sampling.presence_penalty
    probs = np.exp(logits / sampling.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
        probs /= probs.sum()
    if sampling.top_p:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= sampling.top_p]] = 0
        probs /= probs.sum()
    if sampling.min_p:
        probs[probs < sampling.min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("name", ASKED)
def test_draws_have_the_distribution_that_was_asked_for(name):
    """A chi-square test at one in a million; a draw's two log-probabilities are those of both distributions."""
    sampling, probs = ASKED[name], expected(ASKED[name])
    rules = rules_of(sampling, 1)
    rules = jax.tree.map(lambda leaf: np.repeat(leaf, PLACES, 0) if leaf.ndim else leaf, rules)
    # Penalties look at the history up to a place's position; random numbers do beyond it too.
    positions = jnp.arange(4, 4 + PLACES, dtype=jnp.int32)[:, None]
    rules = dataclasses.replace(rules, history=np.asarray(rules.history))
    zeros = jnp.zeros(PLACES, jnp.int32)
    logits = jnp.tile(jnp.asarray(LOGITS), (PLACES, 1))
    found = jax.jit(pick, static_argnums=6)(logits, rules, positions, jnp.full((PLACES, 1), 2**20), zeros, zeros, 3)
    ids = np.asarray(found.ids)
    counts, there = np.bincount(ids, minlength=VOCAB), probs > 0
    assert not counts[~there].any()
    statistic = ((counts - PLACES * probs)[there] ** 2 / (PLACES * probs[there])).sum()
    freedom = there.sum() - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))  # Wilson, Hilferty
    assert z < 4.75
    full = LOGITS - np.log(np.exp(LOGITS).sum())
    np.testing.assert_allclose(found.full, full[ids], atol=1e-5)
    np.testing.assert_allclose(found.drawn, np.log(probs[ids]), atol=1e-5)


def test_random_numbers_belong_to_seed_and_position():
    rows = 40
    rules, order = rules_of(Sampling(), rows), np.random.default_rng(1).permutation(rows)
    rules.seed[:] = np.arange(rows) % 5
    positions, zeros = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.zeros(rows, jnp.int32)
    run = jax.jit(pick, static_argnums=6)
    draw = lambda rules, positions: np.asarray(
        run(jnp.tile(jnp.asarray(LOGITS), (rows, 1)), rules, positions, zeros[:, None], zeros, zeros, 3).ids
    )
    first = draw(rules, positions)
    moved = jax.tree.map(lambda leaf: leaf[order] if leaf.ndim else leaf, rules)
    np.testing.assert_array_equal(draw(moved, positions[order]), first[order])
    assert len(set(first)) > 4


@pytest.mark.parametrize(
    "case",
    [
        case if case in ("gemma2_odd", "olmo2", "qwen3_moe") else pytest.param(case, marks=pytest.mark.heavy)
        for case in CASES
    ],
)
def test_greedy_text_is_that_of_generate(case):
    """Which is that of transformers (`test_generate.py`), by programs of other shapes."""
    prompts = [np.random.default_rng(n).integers(3, 97, n).tolist() for n in (7, 1, 11)]
    engine = engine_of(case, rows=4, tokens=200)
    answers = [engine.submit(prompt, max_tokens=12)[0] for prompt in prompts]
    engine.run()
    texts = generate(loaded(case), prompts, 12, compiler_options=FAST["compiler_options"])
    assert [[token.id for token in answer.tokens] for answer in answers] == texts


def test_scores_are_those_of_the_logits():
    ids = np.random.default_rng(4).integers(3, 97, 30)
    engine = engine_of("gemma2_gqa", rows=5)
    answer = engine.score(ids.tolist(), first=12)
    engine.run()
    logits = jax.jit(lambda model: model(jnp.asarray(ids)[None])[0], **FAST)
    logs = np.asarray(jax.nn.log_softmax(logits(loaded("gemma2_gqa"))))[:-1]
    picked = logs[np.arange(29), ids[1:]]
    np.testing.assert_allclose(answer.scores.logprobs[11:], picked[11:], atol=2e-5)
    np.testing.assert_allclose(answer.scores.entropy[11:], -(np.exp(logs) * logs).sum(-1)[11:], atol=2e-5)
    np.testing.assert_array_equal(answer.scores.rank[11:], (logs > picked[:, None]).sum(-1)[11:])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_that_was_interrupted_is_the_same(pooling):
    """Its pages are taken, and what it had read is read again."""
    ids = np.random.default_rng(5).integers(3, 97, 38).tolist()
    engine = engine_of("gemma2_gqa", share=False, budget=5)
    alone = engine.embed(ids, pooling=pooling)
    engine.run()
    late = engine.embed(ids, pooling=pooling)
    for _ in range(4):
        engine.step()
    assert late.finish is None and late.summed > 0
    engine.scheduler._stop(late.text)
    engine.scheduler._wait(late.text)
    engine.run()
    assert bits(late) == bits(alone)
    hidden = np.asarray(jax.jit(lambda model: model.hidden(jnp.asarray([ids])), **FAST)(loaded("gemma2_gqa")))[0]
    np.testing.assert_allclose(late.embedding, hidden.mean(0) if pooling == "mean" else hidden[-1], atol=2e-5)
    with pytest.raises(ValueError, match="cannot embed with pooling=max"):
        engine.embed(ids, pooling="max")


def test_the_likeliest_ids_are_told_where_they_are_asked_for():
    engine = engine_of("gemma2_gqa")
    asked, plain = (engine.submit([5, 6, 7], max_tokens=3, top=top)[0] for top in (4, 0))
    engine.run()
    for token in asked.tokens:
        assert token.top[0] == (token.id, token.logprob)
        assert [len(asked.tokens[0].top), len(plain.tokens[0].top)] == [4, 0]
        assert sorted((p for _, p in token.top), reverse=True) == [p for _, p in token.top]


@pytest.mark.parametrize("case", ["gemma2_gqa", "qwen3_next_other"])
def test_drafts_save_steps_and_change_nothing(case):
    found = {}
    for drafts in (0, 4):
        engine = engine_of(case, flights=1)
        [answer] = engine.submit([5, 6, 7, 5, 6, 7, 5, 6], max_tokens=30, drafts=drafts)
        engine.run()
        found[drafts] = bits(answer), engine.steps
    assert found[0][0] == found[4][0]
    assert found[4][1] < found[0][1]
    assert guess([1, 2, 3, 9, 8, 1, 2, 3], 2) == [9, 8]
    assert guess([1, 2], 4) == []


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {"temperature": 1.3}, {"temperature": 0.0, "frequency_penalty": 0.4}], ids=str
)
def test_a_drafter_saves_steps_and_changes_nothing(how):
    """Guesses of another model, right and wrong: the same bits, and so the same distribution, in fewer steps.

    Penalties count the drafts before a place, in whatever row they stand.
    """
    model = loaded("gemma2_gqa")
    noise = jax.random.normal(jax.random.key(1), model.layers.down.shape) * 0.02
    near = dataclasses.replace(model, layers=dataclasses.replace(model.layers, down=model.layers.down + noise))
    drafter = Engine(near, dataclasses.replace(SIZES, tokens=200), **FAST)
    asked = [([5, 6, 7], Sampling(seed=seed, top_k=20, **how)) for seed in range(4)]
    found = []
    for guesser in ({}, {"drafter": drafter}):
        engine = Engine(model, dataclasses.replace(SIZES, rows=16, flights=1, tokens=200), **FAST, **guesser)
        answers = [
            engine.submit(ids, max_tokens=30, sampling=sampling, drafts=3 * len(guesser))[0] for ids, sampling in asked
        ]
        engine.run()
        found.append(([bits(answer) for answer in answers], engine.steps))
    assert found[0][0] == found[1][0]
    assert 8 <= found[1][1] < 0.8 * found[0][1]
    assert not drafter.busy
    with pytest.raises(ValueError, match="cannot draft with a model of 97 ids for one of 97, or for 50 texts"):
        Engine(model, dataclasses.replace(SIZES, rows=50), drafter=drafter)


def test_pages_that_hold_no_numbers_harm_nobody():
    """What another text left there, an overflow even, is never looked at."""
    texts, _ = requests(0)
    found = []
    for damage in (False, True):
        engine = engine_of("gemma2_gqa")
        if damage:
            pool = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), engine._state.pool)
            engine._state = dataclasses.replace(engine._state, pool=pool)
        answers = [engine.submit(ids, sampling=how, max_tokens=most)[0] for ids, how, most, _ in texts]
        engine.run()
        found.append([bits(answer) for answer in answers])
    assert found[0] == found[1]


def test_a_model_of_nans_says_so():
    model = jax.tree.map(lambda leaf: leaf * jnp.nan, loaded("gemma2_gqa"))
    engine = Engine(model, SIZES, compiler_options=FAST["compiler_options"])
    [answer] = engine.submit([5, 6], max_tokens=3)
    engine.run()
    assert (answer.finish, answer.tokens) == ("error", [])


def test_an_answer_ends_with_its_stop_and_a_cancelled_one_where_it_is():
    engine = engine_of("gemma2_gqa")
    [free] = engine.submit([5, 6, 7], max_tokens=9)
    engine.run()
    ids = [token.id for token in free.tokens]
    first = ids.index(ids[5])
    [stopped] = engine.submit([5, 6, 7], max_tokens=9, stop=[ids[5]])
    [watched] = engine.submit([5, 6, 7], max_tokens=9, watch=[lambda token: token == ids[5]])
    engine.run()
    for answer in (stopped, watched):
        assert ([token.id for token in answer.tokens], answer.finish) == (ids[: first + 1], "stop")
    [left] = engine.submit([5, 6, 7], max_tokens=9)
    for _ in engine.stream(left):
        engine.cancel(left)
    assert left.finish == "cancelled"
    assert not engine.scheduler.running


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda engine: engine.submit([5], max_tokens=0), "cannot make n=1 answers of max_tokens=0"),
        (lambda engine: engine.submit([500], max_tokens=1), r"token id 500 at \[0\] is outside the vocabulary of 97"),
        (lambda engine: engine.submit([5], max_tokens=100), "texts here have 1 to 40 tokens"),
        (lambda engine: engine.score([5]), "cannot score a text of 1 ids"),
        (lambda engine: engine.submit([2**70], max_tokens=1), "is outside the vocabulary of 97"),
        (
            lambda engine: engine.submit([5], max_tokens=1, sampling=Sampling(logit_bias=((-1, 1.0),))),
            "token id -1 at",
        ),
        (lambda engine: Sampling(temperature=-1), "cannot sample with temperature=-1"),
        (lambda engine: Sampling(temperature=1e300), "it must be 0, or from 1e-30 to 1e.30"),
        (lambda engine: Sampling(presence_penalty=-1e31), "cannot sample with presence_penalty=-1e.31"),
        (lambda engine: Settings(rows=0), "an engine cannot have rows=0"),
    ],
)
def test_what_cannot_be_is_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(engine_of("gemma2_gqa"))


@pytest.mark.parametrize("how", [{"temperature": 1e-30}, {"top_p": 1e-60}, {"top_k": 1}], ids=str)
def test_the_coldest_sampling_is_greedy(how):
    engine = engine_of("gemma2_gqa")
    sampled = [engine.submit([5, 6, 7], max_tokens=9, sampling=Sampling(seed=seed, **how))[0] for seed in range(2)]
    [free] = engine.submit([5, 6, 7], max_tokens=9, sampling=Sampling(top_k=2**40, seed=4))
    [plain] = engine.submit([5, 6, 7], max_tokens=9, sampling=Sampling(seed=4))
    [greedy] = engine.submit([5, 6, 7], max_tokens=9)
    engine.run()
    assert {tuple(token.id for token in answer.tokens) for answer in (*sampled, greedy)} == {
        tuple(token.id for token in greedy.tokens)
    }
    assert bits(free) == bits(plain)


def test_a_text_whose_time_is_over_before_it_runs_is_something_that_happens():
    """Whoever drives an engine is told, even if no step was run for it."""
    engine = engine_of("gemma2_gqa")
    [answer] = engine.submit([5, 6, 7], max_tokens=9, seconds=0.0)
    assert engine.step()
    assert (answer.finish, engine.busy, engine.step()) == ("time", False, False)


def test_who_fails_to_watch_or_to_guide_fails_alone():
    def broken(token):
        raise RuntimeError(f"cannot read {token}")

    class Broken(Even):
        take = staticmethod(broken)

    class Mute(Even):
        def allowed(self):
            raise KeyError

    engine = engine_of("gemma2_gqa")
    [mute] = engine.submit([5, 6, 7], max_tokens=9, guides=[Mute()])
    [watched] = engine.submit([5, 6, 7], max_tokens=9, watch=[broken])
    [guided] = engine.submit([5, 6, 7], max_tokens=9, guides=[Broken()])
    [other] = engine.submit([5, 6, 7], max_tokens=9)
    engine.run()
    assert [(one.finish, str(one.error)[:11]) for one in (watched, guided)] == [("error", "cannot read")] * 2
    assert (mute.finish, mute.error, mute.tokens) == ("error", "KeyError", [])
    assert (other.finish, other.error, len(other.tokens)) == ("length", None, 9)
    assert not engine.scheduler.running


def test_models_that_do_not_write_are_refused_at_once():
    with pytest.raises(ValueError, match=r"Use zoo.Embedder"):
        Engine(loaded("modernbert"), SIZES)


class Even:
    """Allows even ids, and is over after four."""

    def __init__(self):
        self.taken = []

    def allowed(self):
        return np.full(3, 0x55555555, np.uint32)

    def take(self, token):
        self.taken.append(token)
        return len(self.taken) == 4


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_guided_text_picks_what_is_allowed_and_others_do_not_notice(temperature):
    sampling = Sampling(temperature=temperature, seed=3, top_k=40)
    engine, guides = engine_of("gemma2_gqa"), [Even(), Even()]
    guided = engine.submit([5, 6, 7], max_tokens=9, n=2, guides=guides, sampling=sampling, drafts=3)
    [free] = engine.submit([5, 6, 7], max_tokens=9, sampling=sampling)
    engine.run()
    for guide, answer in zip(guides, guided, strict=True):
        assert guide.taken == [token.id for token in answer.tokens]
        assert (answer.finish, {token % 2 for token in guide.taken}) == ("stop", {0})
    again = engine_of("gemma2_gqa")
    [alone] = again.submit([5, 6, 7], max_tokens=9, sampling=sampling)
    again.run()
    assert bits(alone) == bits(free)
    assert any(token.id % 2 for token in free.tokens)
