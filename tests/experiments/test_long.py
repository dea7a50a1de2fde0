"""Long texts: a layer a slice at a time is what it is at once, in every family, and takes a fraction of the memory."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments import configs
from experiments.commandline import schema
from experiments.commandline.overrides import with_overrides
from experiments.planning.hlo import dot_flops
from experiments.planning.resolve import resolve
from experiments.runtime import meshes
from experiments.runtime.hardware import Device
from experiments.step import tiling
from tests import quick
from tests.experiments.test_tiled import check, resolved
from tests.tiny import on_mesh
from tests.zoo import test_ulysses as ulysses
from tests.zoo.hf_cases import CASES
from tests.zoo.hf_tiny import FAST, loaded
from transforms.remat import remat
from transforms.sharding import AXES, make_mesh, sharding_of
from transforms.tiling.ir.jaxprs import equations
from zoo.accounting import recomputed_flops
from zoo.adapters import lora
from zoo.kernels.attention import KERNELS
from zoo.models.layers import Ops

LONG = configs.Tiling(n="none", heads=True, tokens=10)  # of two sequences: 5 of each at a time
LIGHT = ("gemma2_gqa", "gemma_mqa", "llama32", "olmo2", "gpt_oss", "neox")
SEGMENTS = jnp.asarray(np.repeat([[1, 2, 3], [1, 2, 3]], [4, 5, 4], axis=1))


@functools.partial(jax.jit, static_argnames=("how", "kept"), **FAST)
def gradients(model, how, segments=None, kept=None):
    """The gradients of a model, and of what it reads."""
    ids = jnp.asarray(np.random.default_rng(2).integers(3, 97, (2, 13)))

    def loss(model):
        hidden = model.hidden(ids, ops=how, segments=segments, remat=None if kept is None else remat(kept))
        return (hidden * jnp.sin(jnp.arange(hidden.size)).reshape(hidden.shape)).sum()

    return eqx.filter_grad(loss)(model)


def cut(tilings, config, attention=None):
    pieces = tiling.slices(tilings, config)
    return Ops(**pieces) if attention is None else Ops(**pieces, **KERNELS["tiled"].ops(attention))


def close(model, tilings=LONG, attention=None, **how):
    found = gradients(model, cut(tilings, model.config, attention), kept="full", **how)
    wanted = gradients(model, None, **how)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        bound = 2e-5 * np.abs(b).max() + 1e-6 * largest
        np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))


def adapted(model, *names):
    """With matrices of low rank beside some: random ones, as new ones add nothing."""
    names = ["layers.q", "layers.k", "layers.v", "layers.o", *names]
    model = lora.attach(model, names, rank=3, alpha=6.0, key=jax.random.key(0))
    b = lambda m: [getattr(m.layers, name.split(".")[1]).b for name in names]
    return eqx.tree_at(b, model, [jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape) / 9 for leaf in b(model)])


@pytest.mark.parametrize("case", LIGHT)
def test_layers_by_heads_and_tokens_have_the_gradients_of_whole_ones(case):
    close(loaded(case))


@pytest.mark.heavy
@pytest.mark.parametrize("case", sorted(set(CASES) - set(LIGHT)))
def test_every_family_by_heads_and_tokens(case):
    close(loaded(case))


@pytest.mark.parametrize(("policy", "kept"), [("full", 2), ("sqrt", 3), ("full,none", 1)])
def test_layers_that_take_turns_in_several_stacks_keep_each_its_own(policy, kept):
    """There are two in a turn; where groups are kept, the group beside them; a policy of a cycle is a whole turn's."""
    model = loaded("gemma4")
    hidden = lambda model: model.hidden(jnp.zeros((1, 13), int), remat=remat(policy)).sum()
    found = [eqn for eqn in equations(jax.make_jaxpr(hidden)(model).jaxpr) if "prevent_cse" in eqn.params]
    assert len(found) == kept, [e.primitive.name for e in found]
    inside = [eqn.params["prevent_cse"] for eqn in found]
    assert inside.count(True) == (2 if policy != "full,none" else 1)


@pytest.mark.parametrize("case", ["gemma2_gqa", "gpt_oss"])
def test_documents_that_share_a_row(case):
    close(loaded(case), segments=SEGMENTS)


def test_attention_that_is_cut_itself_inside_a_group_of_heads():
    close(loaded("gemma3"), configs.Tiling(n="none", heads=True, tokens=8), attention=3)


def test_one_without_the_other():
    close(loaded("llama32"), configs.Tiling(n="none", heads=True))
    close(loaded("llama32"), configs.Tiling(n="none", tokens=10))


def test_adapted_matrices_of_low_rank_and_their_lengths():
    model = adapted(loaded("llama32"), "layers.gate")
    q = model.layers.q
    length = jnp.sqrt((q.base**2).sum(1))
    close(eqx.tree_at(lambda m: m.layers.q.magnitude, model, length * 1.5, is_leaf=lambda leaf: leaf is None))


@pytest.mark.parametrize("kept", ["sqrt", "full/2"])
def test_a_run_as_tiling_long_makes_it(kept):
    words = [
        "tiling=long",
        "tiling.tokens=24",
        "tiling.n=3",
        f"remat={kept}" if kept == "sqrt" else f"remat.policy={kept}",
    ]
    check(resolved("tiny_gemma3", *words), "tiny_gemma3")


@pytest.mark.parametrize("batch", [[], ["tiling.batch=3"]])
def test_a_mixture_by_tokens(batch):
    check(resolved("tiny_mixtral", "tiling=long", "tiling.tokens=8", "tiling.n=3", *batch), "tiny_mixtral")


@pytest.mark.parametrize("mesh", ["context", pytest.param("all", marks=pytest.mark.heavy)])
def test_a_mixture_by_tokens_on_devices_that_share_sequences(mesh):
    """Also where a device has fewer tokens than are to be computed at a time; experts are larger than all of them."""
    config = dataclasses.replace(ulysses.CONFIGS["sinks"], num_experts=16)
    model = zoo.model_class(config).init(config, key=jax.random.key(0))
    ids = np.random.default_rng(2).integers(3, 60, (2, 32), dtype=np.int32)
    wanted = ulysses.gradients(model, ids, None, None)
    made = make_mesh(*ulysses.MESHES[mesh])
    how = Ops(**tiling.slices(configs.Tiling(n="none", heads=True, tokens=6), config), ulysses=True)
    with jax.set_mesh(made):
        put = jax.device_put(ids, sharding_of(made, "B S", ids.shape))
        found = ulysses.gradients(on_mesh(model, made, ulysses.SHARED), put, None, how)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * (np.abs(other).max() + 1))


@pytest.mark.parametrize(("kv_heads", "sizes", "count"), [(2, (1, 8), 2), (8, (2, 4), 2)])
def test_heads_by_turns_on_devices_that_share_heads(kv_heads, sizes, count):
    """All of them have some in every turn: also where kv heads are fewer than devices, and would be in turns of one."""
    config = dataclasses.replace(ulysses.CONFIGS["windows, cap"], num_kv_heads=kv_heads)
    model = zoo.model_class(config).init(config, key=jax.random.key(0))
    ids = np.random.default_rng(2).integers(3, 60, (2, 32), dtype=np.int32)
    wanted = ulysses.gradients(model, ids, None, None)
    mesh = make_mesh(*sizes)
    with jax.set_mesh(mesh):
        put = jax.device_put(ids, sharding_of(mesh, "B S", ids.shape))
        found = ulysses.gradients(meshes.placed(model, meshes.abstract(model, AXES)), put, None, cut(LONG, config, 4))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * (np.abs(other).max() + 1))
    shared = ["model.num_heads=16", f"model.num_kv_heads={kv_heads}", f"mesh.data={sizes[0]}", f"mesh.model={sizes[1]}"]
    words = with_overrides(["model=tiny_llama", "tiling=long", "batch_size=2", "seq_len=32", *shared], [])
    assert tiling.turns(resolve(schema.compose(words)[0], Device("cpu", "a test", 2**32, count=8))) == count


def error(found, wanted):
    """How far gradients are from those in float64: the root mean square of their parts' relative errors.

    But of parts that are rounding errors in float64 too: biases of keys change no score's distance from another.
    """
    found, wanted = ([np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in (found, wanted))
    norms = list(map(np.linalg.norm, wanted))
    triples = zip(found, wanted, norms, strict=True)
    return np.sqrt(
        np.mean([(np.linalg.norm(a - b) / norm) ** 2 for a, b, norm in triples if norm > 1e-12 * max(norms)])
    )


ERRORS = [
    pytest.param(
        name, mesh, packed, low_rank, marks=[] if (name, mesh, packed, low_rank) in light else [pytest.mark.heavy]
    )
    for light in [{("windows, cap", "context", True, False)}]
    for name in ulysses.CONFIGS
    for mesh in (None, "context", "all")
    for packed in (False, True)
    for low_rank in (False, True)
    if not low_rank or name in ("groups", "windows, cap", "biases")
]


@pytest.mark.optimised
@pytest.mark.parametrize(("name", "mesh", "packed", "low_rank"), ERRORS)
def test_errors_against_float64_are_those_of_whole_layers(name, mesh, packed, low_rank):
    """In float32, as XLA compiles by default: at most half as much again, of one device and of eight."""
    config = ulysses.CONFIGS[name]
    length = 32 if name == "no groups" else 256  # there are no more positions
    with quick.by_default():
        model = zoo.model_class(config).init(config, key=jax.random.key(0))
        model = adapted(model) if low_rank else model
    ids = np.random.default_rng(2).integers(3, 60, (2, length), dtype=np.int32)
    lengths = [length * 3 // 8, length // 8, length // 2]
    segments = np.repeat([[1, 2, 3]] * 2, lengths, axis=1).astype(np.int32) if packed else None
    with jax.enable_x64(True), quick.by_default():
        exact = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), model)
        wanted = ulysses.gradients(exact, ids, segments, None, {})
    own = error(ulysses.gradients(model, ids, segments, None, {}), wanted)
    long = configs.Tiling(n="none", heads=True, tokens=32)
    pieces = Ops(**tiling.slices(long, config), **KERNELS["tiled"].ops(8), ulysses=mesh is not None)
    if mesh is None:
        found = ulysses.gradients(model, ids, segments, pieces, {})
    else:
        made = make_mesh(*ulysses.MESHES[mesh])
        with jax.set_mesh(made):
            put = lambda x: None if x is None else jax.device_put(x, sharding_of(made, "B S", x.shape))
            spread = meshes.placed(model, meshes.abstract(model, ulysses.SHARED))
            found = ulysses.gradients(spread, put(ids), put(segments), pieces, {})
    assert error(found, wanted) < 1.5 * own


def compiled(seq, tilings=None, attention=None, layers=2):
    sizes = {"vocab_size": 64, "embed_dim": 32, "mlp_dim": 128, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8}
    config = zoo.LlamaConfig(num_layers=layers, **sizes)
    model = jax.eval_shape(lambda: zoo.Llama.init(config, key=jax.random.key(0)))
    ids = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    how = None if tilings is None else cut(tilings, config, attention)
    loss = lambda model, ids: model.hidden(ids, ops=how, remat=remat("full")).astype(jnp.float32).sum()
    return config, jax.jit(jax.grad(loss)).lower(model, ids).compile()


def temporary(*args, **how):
    return compiled(*args, **how)[1].memory_analysis().temp_size_in_bytes


@pytest.mark.measured
def test_products_are_those_of_two_forward_passes_and_a_backward_pass():
    """What attention has found is told to the backward pass: otherwise its forward pass would be there a third time."""
    config, step = compiled(2**13, configs.Tiling(n="none", heads=True, tokens=1024), 32)
    assert dot_flops(step.as_text()) < 1.07 * recomputed_flops(config, 1, 2**13)


@pytest.mark.measured
def test_65536_tokens_take_a_fiftieth_of_the_memory_and_twice_as_many_twice():
    long = configs.Tiling(n="none", heads=True, tokens=1024)
    found = {seq: temporary(seq, long, seq // 64) for seq in (2**15, 2**16)}
    assert 50 * found[2**16] < temporary(2**16)
    assert found[2**16] < 2.1 * found[2**15]


@pytest.mark.measured
def test_queries_keys_and_values_exist_of_one_group_at_a_time():
    """Beside what all heads see and the gradients of what is projected, of which there must be all."""
    tilings = [configs.Tiling(n="none", heads=heads, tokens=64) for heads in (False, True)]
    at_once, by_turns = (temporary(2**13, one, 64, layers=1) for one in tilings)
    assert by_turns < 0.85 * at_once


def test_the_table_says_how_layers_are_cut():
    config = resolved("tiny_llama", "tiling=long", "tiling.tokens=24")
    assert {"heads": "2 groups, one at a time", "each layer": "4 tiles of 6 x 4 tokens"}.items() <= dict(
        tiling.describe(config)
    ).items()
    assert (config.remat.policy, config.attention) == ("full", "tiled") and config.tiling.cuts
