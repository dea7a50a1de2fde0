"""Runs on meshes of eight CPU devices: what is chosen, what is refused, and the same losses on every layout."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import configs
from experiments.commandline import schema
from experiments.commandline.console import CommandError
from experiments.data import batches
from experiments.planning import cost
from experiments.planning.hlo import collectives
from experiments.planning.resolve import resolve
from experiments.runtime import hardware, meshes
from experiments.step.build import Programs
from experiments.step.loss import inputs
from tests.quick import QUICK

SIZES = ["model.num_layers=2", "model.embed_dim=32", "model.mlp_dim=64", "model.num_heads=8", "model.head_dim=4"]
SIZES += ["batch_size=8", "seq_len=16", "steps=5", "optimizer.learning_rate=0.01", "hardware.param_dtype=float32"]
SYNTHETIC = ["model.vocab_size=64", "data=synthetic", "data.vocab=32"]
PAIRS = ["model.vocab_size=320", "data=preference", "seq_len=128"]
GEMMA = ["model=gemma2_2b", "model.num_kv_heads=4", "model.window=5", "model.attn_softcap=5", "model.final_softcap=5"]
LLAMA = ["model=tiny_llama", "model.num_kv_heads=2", "model.tied=false"]
LAYOUTS = ["dp", "fsdp", "fsdp_v", "tp", "cp", "fsdp_tp", "fsdp_cp", "ulysses"]
CASES = [(LLAMA if LAYOUTS.index(name) % 2 else GEMMA, name) for name in LAYOUTS]


def resolved(*words, count=8, platform="cpu"):
    device = hardware.Device(platform, "a test", 2**33, count)
    read = [] if set(PAIRS).issubset(words) else SYNTHETIC
    return resolve(schema.compose([*SIZES, *read, "tiling=none", *words])[0], device)


def quickly(config):
    options = config.hardware.compiler_options | QUICK["compiler_options"]
    return dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, compiler_options=options))


def losses(*words, model=None):
    """The loss of every step of a run, from weights that it draws where they lie, or from a model."""
    config = quickly(resolved(*words))
    assert config.problem is None
    source = batches.open_source(config)
    with meshes.spread(config.mesh):
        programs, put, found = Programs(config), meshes.feeder(source.batch_size), []
        made = programs.init() if model is None else jax.device_put(meshes.placed(model, programs.model))
        state = programs.init_state(made)
        frozen = programs.init_frozen()
        for index in range(config.steps):
            batch = put(lambda rows, index=index: source.batch(index, rows).arrays)
            state, metrics = programs.train(inputs(batch, frozen), state)
            found.append(float(metrics["loss"]))
        for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(programs.state), strict=True):
            if shape.sharding is not None:
                assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
    return np.array(found)


@functools.cache
def drawn(*words):
    """A model, drawn once, as numpy arrays: `tests/zoo/test_init.py` has that every mesh draws the same."""
    return jax.device_get(Programs(quickly(resolved("mesh=one", *words))).init())


@pytest.fixture(scope="module")
def alone():
    """The losses of one device, computed once for each run."""
    known = {}

    def run(*words):
        if words not in known:
            known[words] = losses("mesh=one", *words, model=drawn(*words))
            assert known[words][-1] < known[words][0] - 0.1
        return known[words]

    return run


@pytest.mark.parametrize(("model", "layout"), CASES, ids=LAYOUTS)
def test_a_run_is_the_same_on_a_mesh(alone, model, layout):
    np.testing.assert_allclose(losses(f"mesh={layout}", *model, model=drawn(*model)), alone(*model), atol=1e-5)


@pytest.mark.parametrize(("model", "layout"), [(GEMMA, "fsdp_tp"), (LLAMA, "fsdp_cp")])
def test_a_tiled_run_is_the_same_on_a_mesh(alone, model, layout):
    found = losses(f"mesh={layout}", "tiling.n=3", *model, model=drawn(*model))
    np.testing.assert_allclose(found, alone(*model), atol=1e-5)


def test_muon_is_the_same_on_a_mesh_whose_layers_do_not_divide(alone):
    words = ["optimizer=muon", *LLAMA, "model.num_layers=3"]
    np.testing.assert_allclose(losses("mesh=fsdp_tp", *words), alone(*words), atol=1e-5)


@pytest.mark.parametrize("layout", ["fsdp", "fsdp_tp"])
def test_devices_trade_pieces_of_matrices_for_whole_ones(layout):
    """Once before Newton-Schulz iterations and once after, gradient and momentum: nothing more is gathered."""

    def sent(which):
        config = resolved(f"mesh={layout}", f"optimizer={which}", *LLAMA, "model.num_layers=8", "model.num_kv_heads=8")
        with meshes.spread(config.mesh):
            every = collectives(Programs(config).train.compiled.as_text(), 8)
            layers = jax.tree.leaves(Programs(config).model.layers)
        of = lambda op: sum(one.bytes for one in every if one.op == op)
        return of("all-gather"), of("all-to-all"), 4 * sum(leaf.size for leaf in layers) / 8

    (gathered, traded, held), (before, traded_before, _) = sent("muon"), sent("adamw")
    assert gathered <= before * 1.01
    assert 0.5 * held < traded - traded_before <= 4 * held * len(layout.split("_"))


@pytest.mark.parametrize("tiling", [["tiling.batch=2"], ["tiling.n=2"]])
def test_devices_exchange_with_every_micro_batch_where_that_is_asked_for(tiling):
    def in_loops(sync):
        config = resolved("mesh=fsdp", "batch_size=16", f"tiling.sync={sync}", *tiling, *LLAMA, "model.num_layers=1")
        with meshes.spread(config.mesh):
            text = Programs(config).train.compiled.as_text()
        return sum(c.bytes for c in collectives(text, 8) if c.looped)

    assert in_loops("once") < in_loops("tile")


@pytest.mark.parametrize("layout", ["fsdp_ep", pytest.param("fsdp_cp", marks=pytest.mark.heavy)])
def test_a_mixture_accumulates_gradients_on_a_mesh(alone, layout):
    words = ["model=tiny_mixtral", "batch_size=16", "model.num_layers=1", "model.num_heads=4", "model.num_kv_heads=2"]
    np.testing.assert_allclose(losses(f"mesh={layout}", "tiling.batch=2", *words), alone(*words), atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "tiling",
    [
        "tiling.n=2",
        "tiling.mlp=2",
        "tiling.attention=2",
        "tiling.batch=2",
        "tiling.batch=2 tiling.sync=tile",
        "tiling=long tiling.tokens=64",
    ],
)
@pytest.mark.parametrize("layout", ["dp", "fsdp", "fsdp_tp", "fsdp_cp"])
def test_every_part_is_cut_on_a_mesh(alone, layout, tiling):
    words = ["batch_size=16", *LLAMA]
    np.testing.assert_allclose(losses(f"mesh={layout}", *tiling.split(), *words), alone(*words), atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("model", [LLAMA, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_the_same_on_every_mesh(alone, model, layout):
    np.testing.assert_allclose(losses(f"mesh={layout}", *model), alone(*model), atol=1e-5)


OTHERS = {
    "experts": ["model=tiny_mixtral", "mesh=fsdp_ep"],
    "adafactor": [*LLAMA, "mesh=fsdp_tp", "optimizer=adafactor", "model.embed_dim=128", "model.mlp_dim=128"],
    "layerwise": [*LLAMA, "mesh=fsdp_tp", "optimizer=adafactor_layerwise", "model.embed_dim=128", "model.mlp_dim=128"],
    "lora": [*LLAMA, "mesh=fsdp_tp", "adapter=lora"],
    "clipped": [*LLAMA, "mesh=fsdp_cp", "optimizer.clip_norm=0.5", "remat=full"],
    "preferences": [*LLAMA, *PAIRS, "mesh=fsdp_cp", "objective=simpo", "optimizer=sgd"],
}


@pytest.mark.heavy
@pytest.mark.parametrize("words", OTHERS.values(), ids=OTHERS)
def test_other_runs_are_the_same_on_a_mesh(words):
    plain = [word for word in words if not word.startswith("mesh=")]
    np.testing.assert_allclose(losses(*words), losses("mesh=one", *plain), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "count", "platform", "sizes"),
    [
        ([], 1, "gpu", {}),
        ([], 8, "cpu", {}),  # the devices of a CPU share its cores
        ([], 8, "tpu", {"data": 8}),
        (["batch_size=4"], 8, "gpu", {"data": 4, "context": 2}),
        (["mesh=one"], 8, "gpu", {}),
        (["mesh=fsdp_tp"], 8, "cpu", {"data": 4, "model": 2}),
        (["mesh=tp"], 8, "cpu", {"model": 8}),
        (["mesh.model=4"], 8, "cpu", {"data": 2, "model": 4}),
        (["mesh=fsdp", "mesh.data=2", "mesh.context=-1"], 8, "cpu", {"data": 2, "context": 4}),
    ],
)
def test_the_mesh_suits_the_devices(words, count, platform, sizes):
    config = resolved(*words, count=count, platform=platform)
    chosen = config.chosen
    assert {name: size for name, size in config.mesh.sizes.items() if size != 1} == sizes
    assert config.problem is None
    if platform != "cpu" and not any(word.startswith("mesh") for word in words) and count > 1:
        assert chosen["mesh.data"].value == sizes["data"]


def test_long_texts_are_read_by_ulysses_where_the_mesh_is_left_open():
    chosen = lambda *words: resolved("batch_size=1", *words, platform="gpu").mesh
    assert chosen() == configs.Mesh(data=1, context=8, context_by="gather")
    assert chosen("tiling=long") == configs.Mesh(data=1, context=8, context_by="ulysses")
    assert chosen("tiling=long", "mesh=cp").context_by == "gather"


def test_a_batch_that_is_left_open_divides_over_the_devices():
    words = [word for word in SIZES if not word.startswith("batch_size")]
    device = hardware.Device("gpu", "a test", 2**33, 6)
    config = resolve(schema.compose([*words, "tiling=none"])[0], device)
    assert config.mesh.data == 6
    assert config.batch_size % 6 == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mesh.data=3"], r"mesh.data=3: it takes 3 devices, and there are 8. The sizes must multiply to 8"),
        (["mesh.data=-1", "mesh.model=3"], r"mesh.data=-1 x mesh.model=3: it takes a multiple of 3 devices"),
        (["mesh=tp", "mesh.data=-1"], r"mesh.data=-1 x mesh.model=-1: one axis can take the rest"),
    ],
)
def test_sizes_that_do_not_make_the_devices_are_refused(words, message):
    with pytest.raises(hardware.HardwareError, match=message):
        resolved(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mesh=fsdp", "batch_size=6"], r"batch_size=6 over mesh.data=8: .* Use batch_size=8, or 2 devices"),
        (["mesh=fsdp_ep", "batch_size=6", "model=tiny_mixtral"], r"over mesh.data=4 x mesh.expert=2"),
        (["mesh=cp", "seq_len=20"], r"seq_len=20 over mesh.context=8: .* Use seq_len=24, or mesh.context=4"),
        (["mesh=ulysses", "model.num_heads=4"], r"share 4 query heads among mesh.context=8 .* Use mesh.context=4, or"),
        (["mesh=ep"], r"mesh.expert=8: this model has no experts. Use mesh.expert=1"),
        (["mesh=ep", "model=tiny_mixtral", "model.num_experts=6"], r"this model has 6 experts. Use mesh.expert=2"),
    ],
)
def test_what_cannot_be_cut_over_the_mesh_is_refused(words, message):
    problem = resolved(*words).problem
    assert problem is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(problem)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mesh.data=0"], "mesh.data=0: give a number of devices"),
        (["mesh.fsdp=X"], "mesh.fsdp=X: choose D, V or none"),
        (["mesh.context_by=X"], "mesh.context_by=X: choose gather or ulysses"),
    ],
)
def test_bad_sizes_are_refused(words, message):
    with pytest.raises(schema.ConfigError, match=message):
        schema.compose(words)


MIXTURE = ["model=tiny_mixtral", "model.num_experts=8"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mesh=ulysses", *LLAMA], "float32 parameters, gradients and two moments of {}"),
        (["mesh=fsdp_cp", *LLAMA], "moments of {}"),
        (["mesh=fsdp_v", *LLAMA], "moments of {}"),
        (["mesh=tp", *LLAMA], "moments of {}"),  # not those of kv heads, which are two
        (["mesh=ep", *MIXTURE], "moments of {}"),
        (["mesh=fsdp_ep", *MIXTURE], "moments of {}"),
        (
            ["mesh=fsdp", "adapter=lora", *LLAMA],
            "float32 parameters, and gradients and two moments of an adapter of {}",
        ),
        (["mesh=one", "adapter=lora", "model.quantise=nf4", *LLAMA], "float32 parameters, matrices in fewer bits, and"),
    ],
)
def test_precision_is_chosen_by_what_a_device_keeps(words, said):
    asked = [word for word in SIZES if not word.startswith("hardware.param_dtype")]
    device = hardware.Device("cpu", "a test", 2**33, 8)
    config = resolve(schema.compose([*asked, *SYNTHETIC, "tiling=none", "optimizer=adamw", *words])[0], device)
    chosen = config.chosen["hardware.param_dtype"]
    assert said in chosen.why and chosen.why.endswith(" fit")
    with meshes.spread(config.mesh):
        counted = cost.least(Programs(config), device).state
    assert 0 <= counted - chosen.sizes[0] <= 64  # how many steps there were, and the like


def test_what_does_not_fit_a_device_s_share_is_kept_in_bfloat16():
    words = ["model=llama3_1_8b", "batch_size=8", "seq_len=4096"]
    kinds = {}
    for layout in ("ulysses", "fsdp", "cp"):
        config = resolve(schema.compose([*words, f"mesh={layout}"])[0], hardware.Device("gpu", "a test", 2**36, 8))
        kinds[layout] = config.hardware.param_dtype.value, type(config.optimizer)
    alone = ("bfloat16", configs.AdafactorLayerwise)
    assert kinds == {"ulysses": ("float32", configs.AdamW), "fsdp": ("float32", configs.AdamW), "cp": alone}


@pytest.mark.parametrize(("vocabulary", "tiles", "cut"), [(151_936, 10, 8), (151_937, 75, 1)])
def test_logits_that_devices_share_take_fewer_tiles(vocabulary, tiles, cut):
    words = ["model=qwen2_0_5b", "mesh=tp", "batch_size=8", "seq_len=4096", f"model.vocab_size={vocabulary}"]
    config = resolve(schema.compose(words)[0], hardware.Device("gpu", "a test", 2**36, 8))
    assert config.tiling.n == tiles
    assert config.chosen["tiling.n"].sizes[0] == 4 * 8 * 4096 * vocabulary // cut


@pytest.mark.parametrize(("heads", "cut"), [(16, 8), (14, 1)])
def test_scores_that_devices_share_take_fewer_tiles(heads, cut):
    words = ["model=qwen2_0_5b", "mesh=tp", "batch_size=8", "seq_len=4096", f"model.num_heads={heads}"]
    config = resolve(schema.compose([*words, "attention=tiled"])[0], hardware.Device("gpu", "a test", 2**36, 8))
    assert config.chosen["tiling.attention"].sizes[0] == 4 * 8 * heads * 4096**2 // cut


def test_an_adapter_of_no_matrix_is_refused():
    with pytest.raises(CommandError, match=r"bad value adapter.targets=query: .* matches no matrix"):
        resolved("adapter=lora", "adapter.targets=query")


def test_dimensions_that_stay_whole_are_told():
    config = resolved("mesh=tp", *LLAMA)
    assert Programs(config).whole == ["K=2 stays whole: mesh.model=8 does not divide it"]
    assert config.mesh.words == "model=8"
    assert configs.Mesh(data=4, fsdp="none").words == "data=4, parameters copied"


def test_other_threads_put_batches_where_they_belong():
    from concurrent.futures import ThreadPoolExecutor

    config = resolved("mesh=fsdp_cp")
    with meshes.spread(config.mesh), ThreadPoolExecutor(1) as thread:
        (array,) = thread.submit(meshes.feeder(8), lambda rows: (np.zeros((8, 16), np.int32)[rows],)).result()
        assert tuple(array.sharding.spec) == ("data", "context")
        (pairs,) = meshes.feeder(4)(lambda rows: (np.zeros((4, 2, 16), np.int32)[rows],))
        assert tuple(pairs.sharding.spec) == ("data", None, "context")
    assert jnp.ones(3).sharding.device_set == {jax.devices()[0]}


SUMS_APART = """
import sys
from experiments.configs import Platform
from experiments.runtime import hardware

hardware.prepare(Platform.cpu)
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P

jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)))

@jax.jit
@jax.shard_map(in_specs=P("x"), out_specs=(P("x"), P()))
def step(x):
    body = lambda _, x: jnp.tanh(x @ x.T @ x + jax.lax.pmean(x, "x"))
    return jax.lax.fori_loop(0, 3, body, x), jax.lax.psum(jnp.tanh(x @ x.T).sum(), "x")

x = jax.device_put(jnp.ones((512, 64)), P("x"))
for _ in range(1000):
    out = step(x)
jax.block_until_ready(out)
"""


@pytest.mark.parametrize("count", ["XLA_FLAGS", "JAX_NUM_CPU_DEVICES"])
def test_cpu_devices_that_begin_with_different_sums_do_not_wait_for_ever(count, tmp_path):
    """Without threads enough, XLA ends the process after 40 seconds, in nine of ten runs on two cores."""
    told = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "8"}[count]
    kept = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    environment = {**kept, count: told, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SUMS_APART], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("devices", "cores", "threads"), [(1, 2, None), (2, 4, "8"), (2, 64, "64"), (8, None, "32")])
def test_threads_are_those_of_the_cores_and_enough_for_the_devices(devices, cores, threads, monkeypatch):
    monkeypatch.delenv("NPROC")
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    hardware._let_cpu_devices_wait(devices)
    assert os.environ.get("NPROC") == threads
    monkeypatch.setenv("NPROC", "5")
    hardware._let_cpu_devices_wait(devices)
    assert os.environ["NPROC"] == "5", "what somebody has set stays"
