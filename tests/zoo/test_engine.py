"""The engine: the same bits whatever the schedule, the text of transformers, and distributions as asked for."""

import dataclasses
import functools
import random

import jax
import numpy as np
import pytest

import zoo
from tests.helpers import as_jax
from tests.zoo.hf_cases import CASES
from tests.zoo.hf_tiny import FAST, loaded
from zoo.engine.engine import Engine, Settings, lowered
from zoo.engine.sampling import Sampling
from zoo.huggingface.config import from_hf

OPTIONS = FAST["compiler_options"]
SIZES = Settings(length=40, rows=5, width=1, page=4, tokens=48, queue=40)
QUICK = {  # case -> dtype and width of rows
    "gemma2_gqa": ("float32", 1),
    "gemma3_stretched": ("bfloat16", 2),
    "llama_dynamic": ("float32", 3),
    "mistral": ("bfloat16", 1),
    "qwen3_tied": ("float32", 2),
    "qwen3_moe_mixed": ("float32", 1),
    "qwen2_moe": ("float32", 3),
    "qwen3_next": ("float32", 2),
    "qwen3_next_other": ("bfloat16", 3),
    "qwen3_5": ("float32", 3),
    "lfm2_moe": ("bfloat16", 2),
    "granite4_hybrid": ("float32", 3),
    "granite4_moe": ("bfloat16", 2),
    "gemma4": ("float32", 2),
    "gemma4_small": ("bfloat16", 3),
    "gemma4_moe": ("float32", 3),
    "smollm3": ("bfloat16", 1),
    "gpt2": ("float32", 2),
    "gpt_oss": ("bfloat16", 1),
    "deepseek_v2": ("float32", 2),
    "llama4": ("bfloat16", 2),
}


@functools.cache
def model_of(case, dtype):
    return as_jax(loaded(case), dtype)


def engine_of(case, dtype="float32", **sizes):
    settings = dataclasses.replace(SIZES, **sizes)
    return Engine(model_of(case, dtype), settings, compiler_options=OPTIONS)


def requests(seed):
    """Texts to answer and to score; several begin alike."""
    chance = random.Random(seed)
    beginning = [chance.randrange(3, 97) for _ in range(14)]
    found = []
    for number in range(6):
        ids = beginning[: chance.choice([0, 9, 14])] + [chance.randrange(3, 97) for _ in range(chance.randint(1, 9))]
        sampling = Sampling(
            temperature=chance.choice([0.0, 0.0, 1.3]),
            top_k=chance.choice([None, 9]),
            top_p=chance.choice([None, 0.9]),
            min_p=chance.choice([None, 0.05]),
            repetition_penalty=chance.choice([1.0, 1.4]),
            presence_penalty=chance.choice([0.0, 0.5]),
            logit_bias=chance.choice([(), ((5, 2.0),)]),
            seed=number,
        )
        found.append((ids, sampling, chance.randint(2, 12), chance.choice([0, 0, 3])))
    scored = beginning + [chance.randrange(3, 97) for _ in range(12)]
    return found, scored


def bits(answer):
    """Everything that an answer says, as bytes."""
    if answer.vector is not None:
        return answer.embedding.tobytes()
    if answer.scores is not None:
        return [each.tobytes() for each in (answer.scores.logprobs, answer.scores.entropy, answer.scores.rank)]
    return [
        (token.id, np.float32(token.logprob).tobytes(), np.float32(token.drawn).tobytes()) for token in answer.tokens
    ]


@functools.cache
def alone(case, dtype, width, seed):
    """What each request is answered when nobody else asks, without drafts and without prefixes."""
    found, (texts, scored) = [], requests(seed)
    engine = engine_of(case, dtype, width=width, share=False)
    for ids, sampling, most, _ in texts:
        [answer] = engine.submit(ids, sampling=sampling, max_tokens=most)
        engine.run()
        assert (answer.finish, len(answer.tokens)) == ("length", most)
        found.append(bits(answer))
    answer, vector = engine.score(scored), engine.embed(scored)
    engine.run()
    assert not np.isnan(answer.scores.logprobs).any()
    return found, {"score": bits(answer), "embed": bits(vector)}


def weather(case, dtype, width, seed, schedule):
    """Answer the same requests in a schedule of its own; return how many bits differ, and what happened."""
    chance = random.Random(schedule)
    budget = SIZES.rows * width * chance.choice([1, 1, 2, 4])
    sizes = {"budget": budget, "flights": chance.choice([1, 2, 3]), "share": chance.random() < 0.8}
    engine = engine_of(case, dtype, width=width, **sizes)
    scheduler = engine.scheduler
    chance.shuffle(scheduler._slots)
    for pool in scheduler.pools:
        chance.shuffle(pool.free)
    texts, scored = requests(seed)
    queue = (
        [("ask", number) for number in range(len(texts))] * chance.choice([1, 2]) + [("score", 0)] * 2 + [("embed", 0)]
    )
    queue += [("leave", number) for number in range(2)]
    chance.shuffle(queue)
    answers, leavers = [], []
    while queue or engine.busy:
        for _ in range(chance.choice([0, 1, 1, 4])):
            if not queue:
                break
            what, number = queue.pop()
            if what in ("score", "embed"):
                answers.append((what, getattr(engine, what)(scored)))
            else:
                ids, sampling, most, drafts = texts[number]
                how = {"drafts": drafts, "priority": chance.randrange(2)}
                asked = engine.submit(ids, sampling=sampling, max_tokens=most, n=chance.choice([1, 1, 2]), **how)
                if what == "leave":
                    leavers += asked
                else:
                    answers.append((number, asked[0]))
        if leavers and chance.random() < 0.2:
            engine.cancel(leavers.pop())
        scheduler.limits = dataclasses.replace(scheduler.limits, rows=chance.randint(1, SIZES.rows))
        engine.step()
    expected, read = alone(case, dtype, width, seed)
    wrong = sum(bits(answer) != (read[key] if key in read else expected[key]) for key, answer in answers)
    for kind, pool in enumerate(scheduler.pools):
        while scheduler.prefixes.evict(kind):
            pass
        assert len(pool.free) == len(pool.holders)
    return wrong, scheduler.preemptions, scheduler.reused


@pytest.mark.redundant("first")
@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("case", QUICK)
def test_bits_do_not_depend_on_the_schedule(case, first):
    dtype, width = QUICK[case]
    found = [weather(case, dtype, width, schedule % 3, schedule) for schedule in range(first, first + 5)]
    assert [wrong for wrong, *_ in found] == [0] * len(found)
    preempted, reused = (sum(each) for each in list(zip(*found, strict=True))[1:])
    assert preempted > 0 or case in (
        "mistral",
        "qwen3_moe_mixed",
        "gpt_oss",
    )  # whose pages behind the window are free again
    assert (reused > 0) == (case != "llama_dynamic" and not from_hf(CASES[case]).recurrent_layers)


@pytest.mark.parametrize("case", ["llama2", "qwen3_5_other", "gemma4", "gemma4_small"])
def test_a_step_copies_no_weights(case):
    """Layers of one stack, and of several that take turns."""
    raw = CASES[case] | {"intermediate_size": 4096}
    model = zoo.model_class(from_hf(raw)).init(from_hf(raw), key=jax.random.key(0))
    program = lowered(model, Settings(length=16, rows=1, page=16, tokens=16)).compile()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert program.memory_analysis().temp_size_in_bytes < weights / 20


def test_a_step_copies_no_pages_of_bfloat16():
    model = model_of("llama2", "bfloat16")
    few, many = (lowered(model, Settings(length=512, rows=4, tokens=tokens)).compile() for tokens in (2**10, 2**15))
    assert few.memory_analysis().temp_size_in_bytes == many.memory_analysis().temp_size_in_bytes


def test_a_text_that_has_its_tokens_of_a_step_waits_where_no_other_has_pages_to_give():
    """A step of several passes gives such texts further tokens; a schedule that ended in an error."""
    assert weather("qwen3_5_other", "float32", 3, 2, 34)[0] == 0


@pytest.mark.parametrize("case", ["gpt2", "opt", "phi3_long", "gpt_oss"])
def test_scores_are_the_models_own(case):
    """Learned positions, frequencies that grow with the text, sinks: pages know of all."""
    ids = np.random.default_rng(0).integers(3, 97, 38)
    engine = engine_of(case, width=3)
    answer = engine.score(ids.tolist())
    engine.run()
    logits = jax.jit(lambda model: model(jax.numpy.asarray(ids[None], "int32")), **FAST)(loaded(case))[0]
    expected = jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(answer.scores.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("case", ["qwen3_tied", "mistral", "llama4"])
def test_what_pages_hold_of_others_may_be_no_number(case):
    """Beyond a text, behind its window and before its chunk; several pages are read at a time, whosesoever they are."""
    told = []
    for other in (0.0, np.nan):
        engine = engine_of(case, rows=2)
        held = lambda pages, which, other=other: dataclasses.replace(pages, values=pages.values.at[:, which].set(other))
        pool = tuple(held(pages, slice(None)) for pages in engine._state.pool)
        engine._state = dataclasses.replace(engine._state, pool=pool)
        [answer] = engine.submit(range(3, 21), max_tokens=19)
        while engine.step():  # what is padding is on the last page
            pool = tuple(held(pages, -1) for pages in engine._state.pool)
            engine._state = dataclasses.replace(engine._state, pool=pool)
        told.append(bits(answer))
    assert told[0] == told[1] and len(told[0]) == 19


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_many_schedules(case, dtype):
    """140 schedules of each case and dtype: 10,000 in all."""
    width = 1 + sum(map(ord, case)) % 3
    assert sum(weather(case, dtype, width, schedule % 4, schedule)[0] for schedule in range(140)) == 0


def test_how_texts_pick_is_sent_when_it_changes_and_no_more_arrays_are_read_than_are_asked_for(monkeypatch):
    engine = engine_of("qwen3_tied", rows=2)
    works, read = [], []
    write, read_array = engine._writer.work, jax.device_get
    monkeypatch.setattr(engine._writer, "work", lambda *told: works.append(write(*told)) or works[-1])
    monkeypatch.setattr(jax, "device_get", lambda tree: read.append(len(jax.tree.leaves(tree))) or read_array(tree))
    (greedy,) = engine.submit([5, 6, 7], max_tokens=12)
    for _ in range(8):
        engine.step()
    sent = lambda: isinstance(works[-1][0].rules.temperature, np.ndarray)
    assert not sent() and set(read) == {3}
    (warm,) = engine.submit([8, 9], max_tokens=4, sampling=Sampling(temperature=0.7, seed=3), top=2)
    while len(warm.tokens) < 1:
        engine.step()
    assert sum(isinstance(work.rules.temperature, np.ndarray) for work, _ in works[-6:]) >= 2
    engine.run()
    assert max(read) > 3 and all(len(token.top) == 2 for token in warm.tokens)
    for answer, told in ((greedy, {"max_tokens": 12}), (warm, {"max_tokens": 4, "sampling": warm.sampling, "top": 2})):
        alone = engine_of("qwen3_tied", rows=2)
        (again,) = alone.submit(answer.text.ids[: answer.text.given], **told)
        alone.run()
        assert bits(again) == bits(answer)
