"""Text out: greedily what transformers generates, and at random what the rules allow."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import as_jax
from tests.zoo import hf_tiny
from tests.zoo.hf_cases import CASES
from tests.zoo.hf_tiny import FAST, loaded
from zoo.engine.engine import Engine, Settings
from zoo.engine.sampling import threshold
from zoo.inference.generate import GREEDY, Sampling, generate, stopped, stream
from zoo.models.decoder import widened

PROMPTS = [np.random.default_rng(n).integers(3, 97, n).tolist() for n in (7, 1, 11)]  # windows are 4
NEW = 12
QUICK = (
    "gemma_mqa",
    "gemma2_odd",
    "gemma3_stretched",
    "llama_dynamic",
    "mistral",
    "qwen3_tied",
    "qwen3_moe_mixed",
    "gpt2",
    "gpt_oss",
    "deepseek_v3",
    "glm4_flash",
    "mistral4",
    "llama4",
    "gemma3n",
    "gemma4",
    "gemma4_small",
    "gemma4_moe",
    "qwen3_next",
    "glm4_moe",
    "ernie4_5_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2",
    "lfm2_moe",
    "granite4_hybrid_other",
    "granite4_moe",
    "granite_moe",
)
MODEL = "gemma2_gqa"


def ours(case=MODEL, prompts=PROMPTS, new=NEW, **how):
    """What we generate, compiled fast: one program reads and writes."""
    how = {"chunk": len(prompts)} | how
    return generate(loaded(case), prompts, new, compiler_options=FAST["compiler_options"], **how)


def theirs(case=MODEL, prompts=PROMPTS, **how):
    """What transformers generates of the batch, padded on the left."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = hf_tiny.reference(case)
    model.generation_config.eos_token_id = None
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0, **how
        )
    return out[:, width:].tolist()


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.heavy) for case in CASES]
)
def test_greedy_tokens_are_those_of_transformers(case):
    """A ragged batch, whose texts grow across the windows. There, what grows with a text does so with the longest."""
    pads = CASES[case]["model_type"] == "llama4_text"  # transformers counts padding as text there
    if case in ("llama_dynamic", "phi3_long") or pads:
        expected = [theirs(case, [prompt])[0] for prompt in PROMPTS]
    else:
        expected = theirs(case)  # first: where transformers is not, nothing is compiled
    assert ours(case) == expected


def test_programs_for_windows_and_for_chunks_of_one_length_are_two():
    ours("gemma2_gqa")  # every second layer of both sees four keys
    prompt, answer = PROMPTS[0], ours("mobilellm_r1")[0]
    ids = jnp.array([[*prompt, *answer[:-1]]])
    logits = jax.jit(lambda model: model(ids), **FAST)(loaded("mobilellm_r1"))[0]
    assert np.argmax(logits[len(prompt) - 1 :], -1).tolist() == answer


def test_a_text_that_outgrows_the_length_trained_on_is_read_anew():
    """Its frequencies are others then, from the beginning on, which transformers heeds too; 8 tokens are short."""
    prompts = [np.random.default_rng(seed).integers(3, 97, size).tolist() for seed, size in ((0, 3), (1, 5), (3, 8))]
    expected = [theirs("phi3_long", [prompt])[0] for prompt in prompts]
    assert ours("phi3_long", prompts) == expected
    assert ours("phi3_long", prompts, drafts=3) == expected
    assert [ours("phi3_long", [prompt], chunk=2)[0] for prompt in prompts] == expected


def test_penalised_tokens_are_those_of_transformers():
    prompts = [prompt[:7] for prompt in PROMPTS if len(prompt) > 1]  # transformers would penalise its padding
    sampling = Sampling(temperature=0, repetition_penalty=1.7)
    expected = theirs("llama32", prompts, repetition_penalty=1.7)
    found = ours("llama32", prompts, sampling=sampling)
    assert found == expected
    assert found != ours("llama32", prompts)


def test_a_text_ends_with_its_stop():
    free = ours()
    stops = {free[0][4], free[2][0]}
    found = ours(stop=stops)
    for whole, part in zip(free, found, strict=True):
        first = next((i for i, token in enumerate(whole) if token in stops), NEW - 1)
        assert part == whole[: first + 1]
    assert stopped(found[0], stops) == found[0][:-1]
    assert stopped([], stops) == []
    steps = [step.tolist() for step in stream(loaded(MODEL), PROMPTS, NEW, stop=range(97), chunk=3, **FAST)]
    assert steps == [[row[0] for row in free]]


@pytest.mark.crossed("case", "chunk")
@pytest.mark.parametrize("case", [MODEL, "deepseek_v2", "qwen3_next_other"])
@pytest.mark.parametrize("chunk", [6, 1024])
def test_prompts_read_in_chunks_give_the_same(case, chunk):
    assert ours(case, chunk=chunk) == ours(case)


def test_pages_of_latents_hold_one_for_all_heads():
    """A latent of 20 and 8 dimensions of keys that turn, of 3 layers; four heads' keys and values would be 136."""
    engine = Engine(loaded("deepseek_v3"), Settings(length=32, rows=2))
    assert {pool.values.shape[-1] for pool in engine._state.pool} == {28}


def test_layers_that_share_keys_and_values_share_pages():
    """Three of six layers have some: two local ones, and one global."""
    engine = Engine(loaded("gemma3n"), Settings(length=32, rows=2))
    assert [pool.values.shape[0] for pool in engine._state.pool] == [2, 1]


def test_layers_that_hand_on_a_state_have_no_pages():
    """One layer of four has keys and values; of the others there are states of every text, and one more of drafts."""
    pages, states = Engine(loaded("qwen3_next"), Settings(length=32, rows=2))._state.pool
    assert pages.values.shape[0] == 1
    assert {name: leaf.shape for name, leaf in states.items()} == {
        "inputs": (3, 3, 3, 2 * 2 * 8 + 4 * 12),
        "matrices": (3, 3, 4, 8, 12),
    }


@pytest.mark.parametrize("chunk", [6, 1024])
def test_frequencies_that_grow_with_the_text_are_those_of_the_whole_prompt(chunk):
    """The prompts are longer than the 8 tokens after which dynamic frequencies grow."""
    prompts = [np.random.default_rng(n).integers(3, 97, n).tolist() for n in (11, 26)]
    assert ours("llama_dynamic", prompts, chunk=chunk) == ours("llama_dynamic", prompts)


@pytest.mark.parametrize("case", ["gemma2_gqa", "mixtral"])  # no token of these stands between two experts
def test_weights_converted_once_compute_the_same(case):
    """Logits within the rounding of 16 bits, and no program has 16-bit weights left to convert."""
    model = as_jax(loaded(case), jnp.bfloat16)
    wide = widened(model)
    ids = jnp.asarray(hf_tiny.tokens(), jnp.int32)
    run = jax.jit(lambda model: model(ids))
    exact = run(loaded(case))
    error = lambda logits: float(jnp.sqrt(jnp.mean((logits - exact) ** 2)))
    assert error(run(wide)) < 1.2 * error(run(model))
    assert {leaf.dtype for leaf in jax.tree.leaves(wide.layers) if leaf.ndim > 2} == {jnp.dtype("float32")}
    assert "bf16[48,80]" not in str(jax.make_jaxpr(lambda model: model(ids))(wide))
    assert widened(loaded(case)) is loaded(case)


def test_a_model_of_nans_generates_nothing_and_says_so():
    nan = jax.tree.map(lambda leaf: leaf * jnp.nan, loaded(MODEL))
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(ValueError, match=r"cannot generate token 1 of text 0: the model's logits are NaN.*float32"):
            generate(nan, PROMPTS, 4, sampling=sampling, key=jax.random.key(0), chunk=3, **FAST)


def test_seeds_repeat_and_a_text_does_not_depend_on_the_others():
    hot = Sampling(temperature=3.0)
    draw = lambda seed, prompts=PROMPTS: ours(prompts=prompts, sampling=hot, key=jax.random.key(seed))
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1)[0] == draw(1, [PROMPTS[0], PROMPTS[2], PROMPTS[1]])[0]
    same = draw(1, [PROMPTS[0]] * 3)
    assert same[0] != same[1] != same[2]


def test_bfloat16_generates():
    model = as_jax(loaded(MODEL), jnp.bfloat16)
    found = generate(model, PROMPTS, 3, chunk=len(PROMPTS), **FAST)
    assert [len(row) for row in found] == [3, 3, 3]


LOGITS = np.random.default_rng(3).normal(0, 3, (5, 97)).astype(np.float32)
RULES = {
    "top_k": Sampling(top_k=7),
    "top_k of all": Sampling(top_k=1000),
    "top_p": Sampling(top_p=0.6),
    "top_p of one": Sampling(top_p=1e-6),
    "min_p": Sampling(min_p=0.05),
    "all": Sampling(top_k=30, top_p=0.95, min_p=0.02),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_left_out_is_what_transformers_leaves_out(name):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    rule, scores = RULES[name], torch.tensor(LOGITS)
    for value, warper in (
        (rule.top_k, process.TopKLogitsWarper),
        (rule.top_p, process.TopPLogitsWarper),
        (rule.min_p, process.MinPLogitsWarper),
    ):
        scores = scores if value is None else warper(value)(None, scores)
    each = lambda value, plain: np.full(len(LOGITS), plain if value is None else value)
    least = threshold(jnp.asarray(LOGITS), each(rule.top_k, 2**30), each(rule.top_p, 1.0), each(rule.min_p, 0.0))
    np.testing.assert_array_equal(np.where(np.asarray(least)[:, None] > LOGITS, -np.inf, LOGITS), scores.numpy())


def test_greedy_takes_the_largest_whatever_else_is_set():
    assert ours(sampling=Sampling(temperature=0, top_k=3, top_p=0.1, min_p=1.0)) == ours()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompts": []}, "cannot generate 12 tokens"),
        ({"prompts": [[5], []]}, r"prompts of \[1, 0\] tokens"),
        ({"new": 0}, "cannot generate 0 tokens"),
        ({"prompts": [[97]]}, "token id 97 .* is outside the vocabulary of 97"),
        ({"sampling": Sampling()}, "random sampling needs a key"),
    ],
)
def test_what_cannot_be_generated_says_so(how, message):
    with pytest.raises(ValueError, match=message):
        ours(**how)


def test_text_beyond_the_learned_positions_is_refused_before_anything_is_read():
    model, beyond = loaded("gpt2"), "cannot read 65 tokens: this model has learned 64 positions"
    assert len(next(stream(model, [[5] * 60], 5, chunk=1, **FAST))) == 1
    with pytest.raises(ValueError, match=beyond):
        next(stream(model, [[5] * 60], 6))
    with pytest.raises(ValueError, match=beyond):
        jax.eval_shape(model, jnp.zeros((1, 65), "int32"))
    with pytest.raises(ValueError, match=beyond):
        Engine(model, Settings(length=66))
    loaded("neox").check_length(10**6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_wrong_settings_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"cannot sample with {name}={value}"):
        dataclasses.replace(GREEDY, **wrong)
