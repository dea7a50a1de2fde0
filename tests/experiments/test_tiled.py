"""What a run cuts equals what it does not cut: every switch, alone and together; and what cannot be cut says why."""

import dataclasses
import functools

import equinox as eqx
import jax
import numpy as np
import pytest

from experiments import configs
from experiments.commandline import schema
from experiments.commandline.overrides import with_overrides
from experiments.planning import cost
from experiments.planning.resolve import resolve
from experiments.runtime import hardware
from experiments.runtime.hardware import Device
from experiments.step import tiling
from experiments.step.build import Programs, problem
from tests.zoo.hf_tiny import FAST

MICRO = ["vocab_size=96", "num_layers=2", "embed_dim=32", "mlp_dim=48", "head_dim=16", "num_heads=2", "num_kv_heads=1"]
DEVICE = Device("cpu", "a test", 2**32)
TILINGS = {
    "number of tiles": ["n=3"],
    "length of tiles": ["size=20"],
    "vocabulary": ["n=3", "lowmem=true"],
    "MLPs": ["mlp=3"],
    "attention": ["attention=3"],
    "batch": ["batch=4"],
    "tiles of micro-batches": ["batch=3", "size=20"],
    "all": ["n=2", "lowmem=true", "mlp=4", "attention=2", "batch=3"],
}


def resolved(name, *overrides):
    sizes = [f"model.{size}" for size in MICRO]
    words = [f"model={name}", *sizes, "batch_size=6", "seq_len=16", "steps=2", "tiling.n=none", *overrides]
    return resolve(schema.compose(with_overrides(words, []))[0], DEVICE)


def tilings(*words):
    words = [f"tiling.{word}" for word in words]
    return words if any(word.startswith("tiling.n=") for word in words) else ["tiling.n=auto", *words]


@functools.cache
def drawn(name):
    """A model and a batch whose sequences have from few to many tokens that count."""
    config, rng = resolved(name), np.random.default_rng(0)
    ids = rng.integers(0, 96, (6, 17)).astype(np.int32)
    mask = (rng.random((6, 16)) < np.linspace(0.1, 1, 6)[:, None]).astype(np.float32)
    return Programs(config).init(), (ids[:, :-1], ids[:, 1:], mask)


def gradients(config, name):
    """As numpy arrays: to compare jax's, each shape would be compiled for."""
    loss = Programs(config).loss
    found = eqx.filter_jit(eqx.filter_value_and_grad(lambda model, batch: loss(model, batch)[0]), **FAST)(*drawn(name))
    return jax.device_get(found)


@functools.cache
def uncut(name):
    return gradients(resolved(name), name)


def check(config, name):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: close(a, b, atol=1e-5 * max(1.0, float(abs(b).max()))), gradients(config, name), uncut(name)
    )


@pytest.mark.parametrize("words", TILINGS.values(), ids=TILINGS)
def test_loss_and_gradients_equal_uncut_ones(words):
    check(resolved("tiny_gemma3", *tilings(*words)), "tiny_gemma3")


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_all_parts_can_be_cut_under_remat(remat):
    check(resolved("tiny_llama", *tilings(*TILINGS["all"]), f"remat={remat}"), "tiny_llama")


@pytest.mark.parametrize("words", [["n=3", "lowmem=true", "attention=3"], ["n=2", "batch=4"], ["batch=3"]])
def test_a_mixture_is_cut(words):
    check(resolved("tiny_mixtral", *tilings(*words)), "tiny_mixtral")


def temps(*words):
    config = resolved("tiny", "batch_size=16", "seq_len=64", "model.vocab_size=2048", "optimizer=sgd", *words)
    hardware = dataclasses.replace(config.hardware, **FAST)
    config = dataclasses.replace(config, hardware=hardware)
    compiled = Programs(config).train
    return compiled.compiled.memory_analysis().temp_size_in_bytes


def test_micro_batches_lower_the_memory_of_a_step():
    whole, tiles = temps(), temps(*tilings("batch=4", "n=4"))
    assert tiles < 0.25 * whole


def test_what_an_adapter_leaves_frozen_has_no_gradient_in_micro_batches():
    words = tilings("mlp=2", "batch=4", "n=4")
    assert temps(*words, "adapter=lora", "adapter.rank=1") < temps(*words) - 4 * 2048 * 32


MORE = {
    "head": (["n=97"], "96 tiles of 1 tokens, not 97: there is no more to cut"),
    "head of micro-batches": (["n=17", "batch=2"], "16 tiles of 3 tokens, not 17: there is no more to cut"),
    "batch": (["batch=7"], "6 micro-batches of 1 x 16 tokens, not 7: there is no more to cut"),
    "MLPs": (["mlp=17"], "16 tiles of 6 x 1 tokens, not 17: there is no more to cut"),
    "attention": (["attention=17"], "16 tiles of 6 x 1 queries, and of keys, not 17: there is no more to cut"),
    "length": (["size=97"], "1 tiles of 96 tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "text"), MORE.values(), ids=MORE)
def test_more_tiles_than_there_is_to_cut_are_as_many_as_there_is(words, text):
    config = resolved("tiny", *tilings(*words))
    assert problem(config) is None
    assert text in dict(tiling.describe(config)).values()


def test_what_can_be_cut_is_no_problem():
    for words in TILINGS.values():
        assert problem(resolved("tiny", *tilings(*words))) is None


@pytest.mark.parametrize(
    ("length", "words", "name"), [(2048, [], "plain"), (8192, [], "tiled"), (8192, ["plain"], "plain")]
)
def test_attention_is_cut_where_all_scores_are_large(length, words, name):
    config = resolved("tiny", f"seq_len={length}", "batch_size=3", *(f"attention={word}" for word in words))
    assert (config.attention, config.tiling.attention is None) == (name, name == "plain")
    said = str(config.chosen.get("attention"))
    assert ("plain attention makes all scores at once" in said) == (name == "tiled")


def test_experts_are_not_cut():
    found = [problem(resolved("tiny_mixtral", *tilings(word))) for word in ("batch=2", "mlp=2", "attention=2")]
    assert found[0] is None and found[2] is None
    assert (
        "cannot cut MLPs into tiling.mlp=2 tiles: all 2 layers of this mixture have experts in their place" in found[1]
    )
    sizes = ["num_layers=2", "embed_dim=16", "mlp_dim=16", "num_heads=2", "num_kv_heads=1", "head_dim=8"]
    sizes += ["global_head_dim=8", "global_kv_heads=1", "attention_pattern=LG", "num_experts=2", "experts_per_token=1"]
    beside = resolved("gemma4_26b_a4b", *tilings("mlp=2"), *(f"model.{size}" for size in sizes), "model.vocab_size=300")
    assert problem(beside) is None  # whose layers have an MLP beside their experts


def test_sequences_are_no_longer_than_the_positions_that_a_model_has_learned():
    sizes = ["num_layers=1", "embed_dim=32", "num_heads=2", "num_kv_heads=2", "head_dim=16", "context_length=64"]
    small = [f"model.{size}" for size in sizes]
    assert resolved("gpt2", *small, "seq_len=null").seq_len == 64
    assert problem(resolved("gpt2", *small, "seq_len=64")) is None
    assert "this model has learned 64 positions. Give seq_len=64 or less" in problem(
        resolved("gpt2", *small, "seq_len=65")
    )


def test_a_smaller_budget_takes_more_tiles():
    sizes = ["batch_size=16", "seq_len=128", "model.vocab_size=2048"]
    found = [resolved("tiny", *sizes, *tilings(f"budget={size}")).tiling for size in ("1GiB", "16MiB", "4MiB")]
    assert found[0] == configs.Tiling(n="none")
    assert 1 < found[1].n < found[2].n


def test_a_budget_that_nothing_keeps_is_refused():
    for budget, why in (
        ("1KiB", 'n="auto" cannot keep within'),
        ("1024", "cannot keep within budget=1"),
        ("plenty", "is no number of bytes"),
    ):
        with pytest.raises(hardware.HardwareError, match=f"cannot use tiling.budget={budget}: .*{why}"):
            resolved("tiny", *tilings(f"budget={budget}"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 4, "size": 32}, "tiling.size=32: tiling.n=4 cuts the head already; give one of the two"),
        ({"n": 4, "budget": "1GiB"}, "tiling.budget=1GiB: tiling.n=4 cuts the head already"),
        ({"size": 4, "budget": "1GiB"}, "tiling.budget=1GiB: tiling.size=4 cuts the head already"),
        ({"n": "none", "lowmem": True}, "tiling.lowmem=true: tiling.n=none leaves the head uncut"),
        ({"n": "none", "gather": "any"}, "tiling.gather=any: tiling.n=none leaves the head uncut"),
        ({"gather": "large"}, "tiling.gather=large: give small, any or none"),
        ({"sync": "never"}, "tiling.sync=never: give once or tile"),
        ({"batch": 0}, "tiling.batch=0: it must be greater than zero"),
        ({"mlp": -1}, "tiling.mlp=-1: it must be greater than zero"),
    ],
)
def test_contradictions_are_refused(values, message):
    with pytest.raises(ValueError) as error:
        configs.check(configs.Tiling(**values), "tiling.")
    assert message in str(error.value)


def test_the_table_says_what_is_cut():
    config = resolved("tiny", *tilings("n=5", "lowmem=true", "mlp=4", "attention=2", "batch=4"))
    memory = cost.Memory(*[2**20] * 6)
    plan = cost.Plan(10, 10, memory, 2**30, 0, cuts=tiling.describe(config), untiled=memory)
    text = cost.render("tiny", config, plan, DEVICE)
    lines = ["3 micro-batches of 2 x 16 tokens", "4 tiles of 8 tokens; also vocabulary"]
    lines += ["4 tiles of 2 x 4 tokens", "2 tiles of 2 x 8 queries, and of keys"]
    for line in lines:
        assert line in text
    assert max(map(len, text.splitlines())) <= 80
    assert "tiled, n=" not in text
    plain = dataclasses.replace(config, tiling=configs.Tiling(n="none"))
    uncut = dataclasses.replace(plan, cuts=tiling.describe(plain))
    assert "micro-batches" not in cost.render("tiny", plain, uncut, DEVICE)
