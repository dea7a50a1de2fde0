"""Every family through the trainer's own loss: it trains, a mixture is balanced in training alone, and counts agree."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import zoo.accounting
from experiments import configs
from experiments.commandline import schema
from experiments.planning.hlo import dot_flops
from experiments.planning.resolve import resolve
from experiments.runtime.hardware import Device
from experiments.step.build import Programs, problem
from tests.zoo import hf_tiny
from tests.zoo.hf_tiny import FAST
from zoo import ForwardPass, Gemma, Llama, Mixture, load, model_class

MICRO = ["vocab_size=64", "num_layers=2", "embed_dim=32", "mlp_dim=48", "head_dim=16"]
TINY = {"tiny": Gemma, "tiny_gemma3": Gemma, "tiny_llama": Llama, "tiny_qwen3": Llama, "tiny_mixtral": Mixture}
KINDS = ["gemma_mqa", "mixtral", "gpt2", "gemma3n", "gemma4_small", "llama4"]
DEVICE = Device("cpu", "a test", 2**30)
TOKENS = jnp.arange(32, dtype=jnp.int32).reshape(2, 16) % 64
BATCH = (TOKENS, (TOKENS + 1) % 64, jnp.ones((2, 16)))


def resolved(name: str, *words: str) -> configs.Resolved:
    sizes = [f"model.{size}" for size in MICRO]
    overrides = [f"model={name}", *sizes, "batch_size=2", "seq_len=16", "steps=2", "tiling.n=2", "remat=full", *words]
    return resolve(schema.compose(overrides)[0], DEVICE)


@pytest.mark.parametrize("name", TINY)
def test_a_step_down_the_gradient_lowers_the_loss(name):
    config = resolved(name)
    model = Programs(config).init()
    assert type(model) is TINY[name] is model_class(config.model.config)
    assert zoo.accounting.count_params(config.model.config) == sum(leaf.size for leaf in jax.tree.leaves(model))
    loss = Programs(config).loss
    grad = eqx.filter_jit(eqx.filter_value_and_grad(lambda model: loss(model, BATCH)[0]), **FAST)
    before, grads = grad(model)
    after, _ = grad(jax.tree.map(lambda leaf, slope: leaf - 0.05 * slope, model, grads))
    assert float(after) < float(before)


@pytest.mark.parametrize("case", KINDS)
def test_the_loss_of_a_step_is_that_of_transformers(case, tmp_path):
    """What a step computes otherwise than the model alone is the same: rows of the table are looked up before."""
    folder, ids = hf_tiny.write(case, tmp_path / case), hf_tiny.tokens()
    words = [f"model.weights={folder}", "batch_size=2", "seq_len=10", "steps=2", "remat=none"]
    words += ["hardware.compute_dtype=float32", "hardware.param_dtype=float32"]
    programs = Programs(resolve(schema.compose(words)[0], DEVICE))
    batch = (jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:]), jnp.ones((2, 10)))
    assert batch[0].size < 97  # or the table is not looked up before
    grad = eqx.filter_jit(eqx.filter_value_and_grad(lambda model: programs.held_out_loss(model, batch)[0]), **FAST)
    loss, grads = grad(load(folder))
    expected = json.loads(hf_tiny.GOLDEN.read_text())[case]
    assert float(loss) == pytest.approx(expected["loss"], rel=1e-5)
    assert float(optax.tree.norm(grads)) == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "targets"), [("pythia_160m", "q,k,v,o,up,down"), ("deepseek_v2_lite", "q,o,gate,up,down,kv_down,kv")]
)
def test_an_adapter_is_of_the_matrices_that_a_family_has(name, targets):
    config = resolve(schema.compose([f"model={name}", "adapter=lora"])[0], DEVICE)
    assert isinstance(config.adapter, configs.Lora)
    assert config.adapter.targets == targets == config.chosen["adapter.targets"].value
    assert problem(config) is None


def test_a_step_of_a_mixture_takes_the_products_of_the_experts_that_tokens_go_to():
    """What groups' last blocks take too much is less than half; all four experts would be four times as much."""
    words = [*(f"model.{size}" for size in MICRO), "batch_size=8", "seq_len=128", "steps=2", "tiling.n=none"]
    programs = Programs(resolve(schema.compose(["model=tiny_mixtral", *words, "remat=none"])[0], DEVICE))
    assert dot_flops(programs.train.compiled.as_text()) < 1.5 * programs.flops


@pytest.mark.parametrize("tiling", ["none", "batch"])
def test_padding_is_not_counted_as_what_experts_share(tiling):
    """Rows are padded behind the last token whose target is learned, and have the same loss whatever stands there."""
    config = resolved("tiny_mixtral", "model.balance_weight=1", *(["tiling.batch=1"] if tiling == "batch" else []))
    programs = Programs(config)
    model = programs.init()
    router = 4 * jax.random.normal(jax.random.key(0), model.layers.router.shape)
    model = eqx.tree_at(lambda model: model.layers.router, model, router)
    learned = jnp.ones((2, 16)).at[0, 9:].set(0).at[1, 12:].set(0).at[:, :3].set(0)
    loss = eqx.filter_jit(lambda tokens: programs.loss(model, (tokens, TOKENS, learned))[0], **FAST)
    other = loss(TOKENS.at[0, 9:].set(7).at[1, 12:].set(7))
    assert float(loss(TOKENS)) == pytest.approx(float(other), rel=1e-6)
    assert float(loss(TOKENS.at[0, 8].set(7))) != pytest.approx(float(other), rel=1e-6)


def test_a_mixture_is_balanced_in_training_and_not_in_evaluation():
    config = resolved("tiny_mixtral")
    model = Programs(config).init()
    trained, held_out = (loss(model, BATCH)[0] for loss in (Programs(config).loss, Programs(config).held_out_loss))
    balance = model.forward(TOKENS, ForwardPass()).balance
    weight = config.model.config.balance_weight
    assert float(trained - held_out) == pytest.approx(weight * float(balance), rel=1e-2)
    assert float(balance) >= config.model.config.experts_per_token - 1e-3
