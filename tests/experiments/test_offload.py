"""State that stays in host memory: the same training to the bit, and no stack of layers on the device."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments import configs
from experiments.commandline import schema
from experiments.commandline.overrides import with_overrides
from experiments.planning import ahead, targets
from experiments.planning.resolve import resolve
from experiments.runtime import meshes
from experiments.step.build import Programs, problem
from tests import quick
from tests.experiments.test_tiled import resolved
from transforms.offload import by_layers, in_host

BOTH = "hardware.offload=params,optimizer"


def trained(*words, model="tiny_llama", steps=2):
    """The losses of some steps, and the last state."""
    config = resolved(model, *words)
    programs = Programs(config)
    with quick.by_default():
        state = programs.init_state(programs.init())
    random, losses = np.random.default_rng(0), []
    for _ in range(steps):
        ids = random.integers(
            3, config.model.config.vocab_size, (config.batch_size, config.seq_len + 1), dtype=np.int32
        )
        batch = jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:]), jnp.ones((config.batch_size, config.seq_len))
        state, metrics = programs.train(batch, state)
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tiny_llama", ["optimizer=adamw", "remat=full", "optimizer.ema=0.9"]),
        ("tiny_gemma3", ["optimizer=sgd", "optimizer.momentum=0.9", "tiling=long", "tiling.tokens=24", "tiling.n=3"]),
        ("tiny_llama", ["optimizer=adamw", "adapter=lora", "adapter.rank=2", "adapter.targets=q,down"]),
    ],
)
def test_losses_and_state_are_those_of_a_run_that_keeps_all_on_the_device(model, words):
    losses, state = trained(*words, model=model)
    others, other = trained(*words, BOTH, model=model)
    assert losses == others
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)
    assert all(in_host(leaf) == bool(leaf.ndim) for leaf in jax.tree.leaves((other.model, other.opt_state)))


def test_updates_rounded_at_random_are_those_of_each_layer():
    words = "optimizer=adafactor_layerwise", "hardware.param_dtype=bfloat16"
    losses, state = trained(*words)
    others, other = trained(*words, BOTH)
    assert losses == others
    for one, two in zip(jax.tree.leaves(state.model), jax.tree.leaves(other.model), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(two, np.float32), rtol=2**-7, atol=1e-6)


def test_a_clipped_step_is_clipped_by_the_norm_of_all_layers():
    words = "optimizer=adamw", "optimizer.clip_norm=0.01", "on_nan=skip"
    (losses, state), (others, other) = trained(*words), trained(*words, BOTH)
    np.testing.assert_allclose(losses, others, rtol=1e-6)
    for one, two in zip(jax.tree.leaves(state.model), jax.tree.leaves(other.model), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-5)


def types(jaxpr):
    for equation in jaxpr.eqns:
        yield from (var.aval for var in equation.outvars)
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner := getattr(one, "jaxpr", one), "eqns"):
                    yield from types(inner)


@pytest.mark.parametrize(("words", "there"), [((), True), ((BOTH,), False)])
def test_the_device_has_no_stack_of_layers(words, there):
    """Of matrices; the rotation's frequencies, and what layers keep, are small."""
    programs = Programs(resolved("tiny_llama", "optimizer=adamw", "remat=full", *words))
    shapes = {leaf.shape for leaf in jax.tree.leaves(programs.model.layers) if len(leaf.shape) > 2}
    step = lambda batch, state: eqx.filter(programs.step.__wrapped__(batch, state), eqx.is_array)
    found = [aval for aval in types(jax.make_jaxpr(step)(programs.batch, programs.state).jaxpr) if aval.shape in shapes]
    assert there == any(aval.memory_space == jax.memory.Space.Device for aval in found)
    assert found


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["optimizer=muon"], "reads several layers at once: use adamw, sgd or adafactor_layerwise"),
        (["tiling.batch=2"], "tiling.batch=2 adds up the gradients of all layers"),
        (["remat.policy=full/2"], "remat.policy=full/2 takes stacks of layers apart"),
        (["hardware.grad_dtype=float64"], "hardware.grad_dtype=float64 takes a copy of all parameters"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(words, why):
    assert why in problem(resolved("tiny_llama", BOTH, *words))


def test_devices_without_such_memory_and_meshes_are_refused(monkeypatch):
    config = resolved("tiny_llama", BOTH)
    monkeypatch.setattr(meshes, "HOST", "far_host")
    assert "knows no memory called far_host of a cpu, but device, pinned_host" in problem(config)
    several = dataclasses.replace(config, mesh=configs.Mesh(data=2, model=2))
    assert "it is for one device, and 4 share the parameters" in several.offload_problem
    kinds = SimpleNamespace(config=SimpleNamespace(layer_stacks=("dense", "layers")))
    assert "layers are of several kinds" in dataclasses.replace(config, model=kinds).offload_problem
    with pytest.raises(schema.ConfigError, match="choose none, params, optimizer, or both with a comma"):
        schema.compose(with_overrides(["hardware.offload=grads"], []))


def test_stacks_of_several_lengths_are_refused():
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((4, 3))}
    with pytest.raises(ValueError, match=r"the stacks have \[2, 4\] layers"):
        by_layers(lambda *_: None, lambda p: p, params, params, params, {"a": True, "b": True})


def test_a_run_goes_on_in_the_other_memory(start, tmp_path):
    """A checkpoint does not know where its arrays were. (Micro runs are compiled without what makes bits equal.)"""
    words = ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.schedule=constant", "optimizer.warmup=0"]
    words += ["model.num_layers=2", "checkpoint.every=1", "save.final=true"]
    assert start(*words, "run=stays", "steps=3") == 0
    for steps, where in ((1, BOTH), (2, "hardware.offload=none"), (3, BOTH)):
        assert start(*words, "run=moves", f"steps={steps}", where) == 0
    stays, moves = (load_file(tmp_path / run / "weights" / "model.safetensors") for run in ("stays", "moves"))
    for name, weight in stays.items():
        np.testing.assert_allclose(weight, moves[name], rtol=0, atol=2e-6)


@pytest.mark.optimised
def test_a_device_that_is_not_here_holds_none_of_it():
    """State that is in place: beside it the host has no more than the gradients."""
    if not importlib.util.find_spec("jax_cuda12_plugin"):
        pytest.skip("its compiler is not installed")
    device = targets.find("l4-1").device
    sizes = {"num_layers": 8, "embed_dim": 1024, "mlp_dim": 4096, "num_heads": 8, "head_dim": 128, "vocab_size": 1024}
    words = ["model=tiny_llama", *(f"model.{size}={value}" for size, value in sizes.items()), "batch_size=1"]
    words += ["seq_len=256", "optimizer=adamw", "remat=full", "hardware.param_dtype=float32"]
    found = []
    for more in ([], [BOTH]):
        config = resolve(schema.compose(with_overrides([*words, *more], []))[0], device)
        with meshes.spread(config.mesh, device.described):
            found.append((ahead.traffic(programs := Programs(config), device), programs))
    (here, _), (there, programs) = found
    assert here.host == 0 and there.peak < here.peak / 4
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((programs.model, programs.state.opt_state)))
    assert state < there.host < 1.35 * state
