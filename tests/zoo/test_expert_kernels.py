"""Products of experts by kernels: each against `jax.lax.ragged_dot`, what it refuses, and which one suits."""

import functools
import importlib.machinery
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments.configs.compute import EXPERTS
from experiments.planning import targets
from experiments.step import tiling
from experiments.step.build import problem
from tests.experiments.test_tiled import resolved
from tests.zoo.test_grouped import SIZES, drawn, found
from transforms.sharding import make_mesh
from zoo.kernels.experts import KERNELS, choose, megablox, tokamax
from zoo.models.mixtures.experts import experts
from zoo.models.mixtures.grouped import ragged

MEGABLOX = functools.partial(megablox, interpret=True)


@pytest.fixture
def installed(monkeypatch):
    """A tokamax that is JAX's own product, and leaves in rows that are no group's what a kernel may leave there."""
    made = types.ModuleType("tokamax")
    made.__spec__ = importlib.machinery.ModuleSpec("tokamax", None)

    @jax.custom_vjp
    def ragged_dot(x, weight, counts):
        left = jnp.arange(len(x))[:, None] >= counts.sum()
        return jnp.where(left, jnp.nan, jax.lax.ragged_dot(x, weight, counts))

    def backward(kept, slope):
        x, weight, counts = kept
        of_x, of_weight = jax.vjp(lambda x, weight: jax.lax.ragged_dot(x, weight, counts), x, weight)[1](slope)
        return jnp.where(jnp.arange(len(x))[:, None] >= counts.sum(), jnp.nan, of_x), of_weight, None

    ragged_dot.defvjp(lambda *args: (ragged_dot(*args), args), backward)
    made.ragged_dot = ragged_dot  # ty: ignore[unresolved-attribute]
    monkeypatch.setitem(sys.modules, "tokamax", made)


CASES = [
    pytest.param(sizes, left, dtype, marks=[] if (sizes, left, dtype) in light else [pytest.mark.heavy])
    for light in [{("few and many", 130, jnp.float32), ("none", 130, jnp.bfloat16)}]
    for sizes in SIZES
    for left in (0, 130)
    for dtype in (jnp.float32, jnp.bfloat16)
]


def close(product, args, dtype):
    for ours, theirs in zip(found(product, *args), found(ragged, *args), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        ours, theirs = (np.asarray(one, np.float32) for one in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=jnp.finfo(dtype).eps * 8 * max(1, abs(theirs).max()))


@pytest.mark.parametrize(("sizes", "left", "dtype"), CASES)
def test_megablox_is_ragged_dot(sizes, left, dtype):
    close(MEGABLOX, drawn(SIZES[sizes], max(left, 512 - sum(SIZES[sizes])), dtype), dtype)


def test_tokamax_is_ragged_dot_whatever_it_leaves_in_rows_of_no_group(installed):
    close(tokamax, drawn(SIZES["few and many"], 130, jnp.float32), jnp.float32)


MESHES = {  # and where tokens lie, and the dimensions of matrices
    "context": ({"data": 2, "context": 4}, ("data", "context"), (None, None)),
    "model": ({"data": 2, "model": 4}, ("data",), (None, "model")),
    "expert": ({"data": 1, "expert": 2, "context": 4}, ("expert", "context"), ("expert", None)),
}
SPREAD = [None, "context", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("model", "expert"))]


@pytest.mark.parametrize("name", SPREAD)
def test_experts_by_megablox_are_cut_by_tokens(name):
    draw = np.random.default_rng(0).normal
    args = [jnp.asarray(draw(size=size), jnp.float32) for size in ((2, 32, 8), (8, 4), *((4, 8, 8),) * 3)]

    def gradients(run, *args):
        def loss(*args):
            out, routed = run(*args, 2, normalise=True)
            return jnp.sin(out / 8).sum() + jnp.square(routed[1]).sum()

        return jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*args)

    cut = functools.partial(experts, at_once=16, product=MEGABLOX, typed=False)
    wanted = gradients(experts, *args)
    if name is None:
        made = gradients(cut, *args)
    else:
        sizes, tokens, (of_experts, hidden) = MESHES[name]
        matrices = PartitionSpec(of_experts, None, hidden), PartitionSpec(of_experts, hidden)
        mesh = make_mesh(**sizes)
        with jax.set_mesh(mesh):
            specs = PartitionSpec(*tokens), PartitionSpec(), matrices[0], *matrices
            put = lambda array, spec: jax.device_put(array, jax.NamedSharding(mesh, spec))
            made = gradients(cut, *map(put, args, specs))
    for one, other in zip(made, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "message"),
    [
        ("megablox", "gpu", "bfloat16", "runs on tpu, and this is a gpu"),
        ("megablox", "tpu", "float64", "computes in float32 or bfloat16, and this run in float64: set hardware.comp"),
        ("tokamax", "cpu", "bfloat16", "runs on gpu and tpu, and this is a cpu"),
        ("tokamax", "gpu", "bfloat16", "is not installed: pip install tokamax"),
    ],
)
def test_what_a_kernel_cannot_do_is_said(name, platform, dtype, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert message in KERNELS[name].refusal(platform, dtype)


def test_a_package_that_is_there_is_no_reason(installed):
    assert KERNELS["tokamax"].refusal("gpu", "bfloat16") is None


def test_what_suits_is_chosen_with_the_reason():
    assert choose("tpu") == ("ragged", "XLA has a kernel of a TPU for it")
    assert choose("gpu")[0] == choose("cpu")[0] == "grouped"
    config = resolved("tiny_mixtral")
    assert config.experts == config.chosen["experts"].value == "grouped" and problem(config) is None
    assert resolved("tiny").experts == "auto" and "experts" not in resolved("tiny").chosen


def test_the_configuration_names_the_kernels():
    assert set(EXPERTS) == set(KERNELS)


def test_a_run_that_asks_for_what_cannot_be_is_refused():
    assert problem(resolved("tiny_mixtral", "experts=ragged")) is None
    why = "cannot run with experts=megablox: megablox runs on tpu, and this is a cpu; or use experts=auto."
    assert problem(resolved("tiny_mixtral", "experts=megablox")) == why
    assert "experts=ragged: this model has no experts" in problem(resolved("tiny", "experts=ragged"))
    with pytest.raises(ValueError, match="experts=mega: choose auto, ragged, grouped, megablox, tokamax"):
        resolved("tiny", "experts=mega")


@pytest.mark.parametrize("name", ["ragged", "grouped"])
def test_a_run_has_the_products_that_it_asks_for(name):
    config = resolved("tiny_mixtral", f"experts={name}")
    ops = tiling.ops(config, config.model.config)
    assert ops is not None and ops.experts is not None
    assert ops.experts.keywords == {"product": KERNELS[name].product, "typed": True}


@pytest.mark.optimised
def test_megablox_compiles_for_a_tpu_that_is_not_there():
    if not importlib.util.find_spec("libtpu"):
        pytest.skip("the compiler for TPUs is not installed")
    mesh = make_mesh(8, devices=targets.find("v5e-8").devices)
    with jax.set_mesh(mesh):
        shape = lambda size, dtype, *spec: jax.ShapeDtypeStruct(
            size, dtype, sharding=jax.NamedSharding(mesh, PartitionSpec(*spec))
        )
        x, weight = shape((8 * 1000, 320), jnp.bfloat16, "data"), shape((8, 320, 640), jnp.bfloat16)
        specs = PartitionSpec("data"), PartitionSpec(), PartitionSpec()
        spread = jax.shard_map(megablox, in_specs=specs, out_specs=PartitionSpec("data"), check_vma=False)
        loss = lambda *args: spread(*args).astype(jnp.float32).sum()
        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, weight, shape((8,), jnp.int32)).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
