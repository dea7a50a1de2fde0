"""Parameters and FLOPs against the models themselves. (The published totals are in test_configs.py.)"""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests.zoo.hf_cases import CASES
from tests.zoo.test_configs import read
from zoo import model_class
from zoo.accounting import count_active, count_params, forward_flops, head_flops, train_flops, visible_pairs
from zoo.config import Chunk
from zoo.huggingface.config import from_hf

CONFIGS = {case: from_hf(raw) for case, raw in CASES.items()}


@functools.cache
def shapes(config):
    return eqx.filter_eval_shape(model_class(config).init, config, key=jax.random.key(0))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_count_is_the_number_of_elements_of_the_model(config):
    assert count_params(config) == sum(leaf.size for leaf in jax.tree.leaves(shapes(config)))


def _dot_flops(jaxpr) -> int:
    """Two per multiply-add of every dot, a loop's body as often as it runs; a row of a ragged dot meets one group."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contract)
            total += 2 * depth * eqn.outvars[0].aval.size
        if eqn.primitive.name.startswith("ragged_dot"):
            total += 2 * eqn.invars[0].aval.size * eqn.outvars[0].aval.shape[1]
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = (getattr(value, "jaxpr", value) for value in eqn.params.values())
        total += sum(times * _dot_flops(sub) for sub in inner if hasattr(sub, "eqns"))
    return total


@pytest.mark.redundant("batch", "seq")
@pytest.mark.parametrize(("batch", "seq"), [(1, 3), (2, 11)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_flops_are_those_of_the_traced_dots_less_what_the_mask_hides(config, batch, seq):
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    traced = _dot_flops(jax.make_jaxpr(lambda model, tokens: model(tokens))(shapes(config), tokens).jaxpr)
    made = used = 0
    for i, (window, (_, width, value)) in enumerate(zip(config.layer_windows, config.layer_heads, strict=True)):
        seen, attends = sum(map(sum, _mask(seq, window))), i not in config.recurrent_layers
        made += attends * 2 * seq**2 * max(width, value)  # the narrower are padded
        used += attends * seen * (width + value)
    found, expected = forward_flops(config, batch, seq), traced - 2 * batch * config.num_heads * (made - used)
    if "matrices" in config.recurrent_state:  # a recurrence's products depend on its chunks: they are not counted
        assert 0.85 * expected < found < expected
    else:
        assert found == expected


def test_a_token_meets_only_the_experts_that_it_goes_to():
    config = CONFIGS["mixtral"]
    experts = 3 * config.num_layers * config.embed_dim * config.mlp_dim
    idle = config.num_experts - config.experts_per_token
    assert count_params(config) - count_active(config) == idle * experts
    assert count_active(CONFIGS["llama2"]) == count_params(CONFIGS["llama2"])


def _mask(seq, window):
    """Return which keys each query sees."""
    behind = lambda query: query % window + 1 if isinstance(window, Chunk) else window or seq
    return [[0 <= query - key < behind(query) for key in range(seq)] for query in range(seq)]


@pytest.mark.parametrize(
    ("seq", "window"),
    [(1, None), (7, None), (7, 3), (7, 1), (3, 7), (4, 4), (7, Chunk(3)), (6, Chunk(3)), (3, Chunk(7))],
)
def test_visible_pairs_are_those_of_the_mask(seq, window):
    assert visible_pairs(seq, window) == sum(map(sum, _mask(seq, window)))


def test_training_is_three_forwards_and_the_head_is_part_of_each():
    config, _ = read("gemma2b")
    assert train_flops(config, 2, 128) == 3 * forward_flops(config, 2, 128)
    assert head_flops(config, 2, 128) == 2 * 256 * 2048 * 256_000
    assert forward_flops(config, 2, 128) == 2 * forward_flops(config, 1, 128)


def test_gemma_2b_costs_six_flops_per_parameter_and_token_when_attention_is_short():
    config, _ = read("gemma2b")
    assert train_flops(config, 1, 128) / (6 * 128 * count_params(config)) == pytest.approx(1, abs=0.005)
