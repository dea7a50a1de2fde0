"""An engine whose model lies on several devices: the ids of one device, and nothing travels but sums and logits."""

import dataclasses
import functools
import math
import random
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments.runtime import meshes
from tests.zoo.hf_tiny import FAST
from tests.zoo.test_engine import SIZES, bits, model_of, requests
from transforms.sharding import AXES, make_mesh
from zoo.engine.engine import Engine, lowered
from zoo.engine.sampling import Sampling
from zoo.engine.sizes import Plan
from zoo.inference.generate import generate

NAMED = {letter: axes for letter, axes in AXES.items() if letter != "D"}
CASES = {  # case -> devices, dtype: kv heads are cut, or repeated where they are fewer
    "qwen3_tied": (2, "float32"),
    "gemma2_gqa": (4, "float32"),
    "mixtral": (2, "float32"),
    "gpt_oss": (4, "float32"),
    "deepseek_v3": (2, "float32"),
    "qwen3_next": (2, "float32"),
    "lfm2": (2, "float32"),
    "granite4_moe": (2, "float32"),
    "gemma4": (4, "float32"),  # two kinds of heads, more and fewer than devices
    "gemma4_small": (2, "float32"),
}


@functools.cache
def spread(case, dtype, devices):
    model = model_of(case, dtype)
    with jax.set_mesh(make_mesh(data=1, model=devices, devices=jax.devices()[:devices])):
        return meshes.placed(model, meshes.abstract(model, NAMED))


def engine_of(case, dtype, devices, **sizes):
    model = model_of(case, dtype) if devices == 1 else spread(case, dtype, devices)
    return Engine(model, dataclasses.replace(SIZES, width=2, **sizes), compiler_options=FAST["compiler_options"])


def answered(engine, chance=None):
    """What requests are answered: at once, or as chance has it."""
    (texts, scored), found = requests(1), {}
    order = list(range(len(texts)))
    if chance is not None:
        chance.shuffle(order)
    for number in order:
        ids, sampling, most, drafts = texts[number]
        found[number] = engine.submit(ids, sampling=sampling, max_tokens=most, drafts=drafts if chance else 0)[0]
        for _ in range(0 if chance is None else chance.randrange(3)):
            engine.step()
    score = engine.score(scored)
    engine.run()
    return [found[number] for number in sorted(found)], score


@pytest.mark.parametrize(
    ("case", "kv_dtype"), [*((case, None) for case in CASES), ("gemma2_gqa", "int8"), ("deepseek_v3", "int8")]
)
def test_ids_on_a_mesh_are_those_of_one_device(case, kv_dtype):
    devices, dtype = CASES[case]
    (alone, scored), (together, also) = (
        answered(engine_of(case, dtype, count, kv_dtype=kv_dtype)) for count in (1, devices)
    )
    assert [[token.id for token in answer.tokens] for answer in alone] == [
        [token.id for token in answer.tokens] for answer in together
    ]
    close = 1e-5 if kv_dtype is None else 0.05  # what is near the middle between two integers falls either way
    np.testing.assert_allclose(also.scores.logprobs, scored.scores.logprobs, atol=close)


def test_bits_on_a_mesh_do_not_depend_on_the_schedule(case="gemma2_gqa", devices=4, dtype="bfloat16"):
    expected, score = answered(engine_of(case, dtype, devices, share=False))
    for schedule in range(3):
        found, also = answered(engine_of(case, dtype, devices), random.Random(schedule))
        assert [bits(answer) for answer in found] == [bits(answer) for answer in expected]
        assert bits(also) == bits(score)


def test_each_device_holds_the_pages_of_its_own_heads():
    engine = engine_of("gpt2", "float32", 4)
    [values] = jax.tree.leaves(engine._state.pool)
    assert {shard.data.size * 4 for shard in values.addressable_shards} == {values.size}
    engine.submit([5, 6, 7], max_tokens=3)
    engine.run()
    [after] = jax.tree.leaves(engine._state.pool)
    assert after.sharding == values.sharding


def test_nothing_travels_but_sums_and_logits(devices=4):
    config = zoo.LlamaConfig(
        vocab_size=96, num_layers=3, embed_dim=32, mlp_dim=64, num_heads=8, num_kv_heads=2, head_dim=8
    )
    shapes = eqx.filter_eval_shape(lambda key: zoo.Llama.init(config, key=key), jax.random.key(0))
    with jax.set_mesh(make_mesh(data=1, model=devices, devices=jax.devices()[:devices])):
        model = meshes.abstract(shapes, NAMED)
    text = lowered(model, SIZES).compile().as_text()
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text)
    sums = [size for _, size, kind in found if kind == "all-reduce"]
    # The embedding's, and in the loop over layers attention's and the MLP's; then what makes logits whole.
    assert sums == [f"{SIZES.rows},{SIZES.width},{config.embed_dim}"] * 3
    [gathered] = [size for _, size, kind in found if kind != "all-reduce"]
    assert math.prod(map(int, gathered.split(","))) == Plan.of(model, SIZES, None).block * config.vocab_size


def test_generates_on_a_mesh_what_one_device_does():
    prompts = [[5, 6, 7, 8], [9, 10]]
    how = {"chunk": 2, "compiler_options": FAST["compiler_options"]}
    models = model_of("qwen3_tied", "float32"), spread("qwen3_tied", "float32", 2)
    sampled = {"sampling": Sampling(temperature=1.0, top_k=7), "key": jax.random.key(0)}
    one, several = (generate(model, prompts, 8, **sampled, **how) for model in models)
    assert one == several


def test_other_axes_are_refused():
    model = model_of("qwen3_tied", "float32")
    with jax.set_mesh(make_mesh(data=2, model=2, devices=jax.devices()[:4])):
        model = meshes.placed(model, meshes.abstract(model, AXES))
    with pytest.raises(ValueError, match="cannot serve a model that lies over data=2"):
        Engine(model, SIZES)


@pytest.mark.parametrize(
    ("case", "dtype"), [("qwen3_tied", "float32"), ("qwen3_tied", "bfloat16"), ("deepseek_v2", "float32")]
)
def test_keys_and_values_of_eight_bits_are_near(case, dtype):
    """Log-probabilities differ by hundredths, of models with random weights, and pages take half or less."""
    size = {}
    scores = {}
    for kind in (None, "int8"):
        engine = engine_of(case, dtype, 1, kv_dtype=kind)
        size[kind] = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._state.pool))
        answer = engine.score(requests(1)[1])
        engine.run()
        scores[kind] = answer.scores.logprobs
    width = model_of(case, dtype).config.layer_cached[0][2]
    share = (1 + 4 / width) / jnp.dtype(dtype).itemsize  # of a number: its byte, and its part of a scale
    assert size["int8"] == pytest.approx(size[None] * share)
    difference = np.abs(scores["int8"] - scores[None])
    assert 0 < difference.max() < 0.05


def test_kv_dtype_is_int8_or_none():
    with pytest.raises(ValueError, match="kv_dtype=int4"):
        dataclasses.replace(SIZES, kv_dtype="int4")
