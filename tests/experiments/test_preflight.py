"""The cost before the run: exact where it can be, refused before anything is allocated, with a remedy that works."""

import builtins
import dataclasses
import functools
import io
import itertools
import json
import re
from types import SimpleNamespace

import jax
import pytest

import zoo.accounting
from experiments import run
from experiments.commandline import schema
from experiments.commandline.overrides import variations, with_overrides
from experiments.planning import cost
from experiments.planning.resolve import resolve
from experiments.planning.suggest import _subsets as subsets
from experiments.planning.suggest import suggest
from experiments.runtime import hardware
from experiments.runtime.hardware import Device
from experiments.runtime.signals import Stop
from experiments.step import build
from experiments.step.build import Programs

MICRO = [
    "model.vocab_size=4096",
    "model.num_layers=1",
    "model.embed_dim=32",
    "model.mlp_dim=64",
    "model.num_heads=2",
    "model.head_dim=16",
    "batch_size=16",
    "seq_len=128",
    "steps=4",
    "hardware.headroom_gib=0",
]
DEVICE = Device("cpu", "a test", 2**30)


def resolved(*overrides, device=DEVICE):
    return resolve(schema.compose([*MICRO, *overrides])[0], device)


@pytest.fixture(scope="module")
def tiled():
    before = sum(array.nbytes for array in jax.live_arrays())
    plan = cost.plan(Programs(resolved("tiling.n=8", "compare=true")), DEVICE)
    allocated = sum(array.nbytes for array in jax.live_arrays()) - before
    assert allocated < plan.memory.weights / 10
    return plan


def test_plan_is_exact_about_what_is_known(tiled):
    config = resolved("tiling.n=8")
    assert tiled.params == zoo.accounting.count_params(config.model.config)
    assert tiled.flops == zoo.accounting.train_flops(config.model.config, 16, 128)
    assert tiled.memory.weights == 4 * tiled.params
    assert tiled.memory.optimizer == pytest.approx(8 * tiled.params, abs=64)
    assert sum(tiled.memory.parts.values()) == pytest.approx(tiled.memory.total, rel=0.01)


def test_tiling_shows_in_the_plan(tiled):
    logits = 4 * 16 * 128 * 4096
    assert tiled.untiled is not None
    assert tiled.untiled.head > logits
    assert tiled.memory.head < tiled.untiled.head / 3
    assert tiled.memory.total < tiled.untiled.total - logits / 2


@pytest.fixture
def compiled(monkeypatch):
    """The programs that were compiled ahead of time; one without arguments asks whether XLA knows the run's options."""
    found, real = [], jax.stages.Lowered.compile

    def compile_(self, *args, **options):
        if jax.tree.leaves(self.in_avals):
            found.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    return found


def test_a_start_compiles_its_step_and_its_evaluation_alone(start, compiled, tmp_path, capsys):
    assert start("tiling.n=4", "model.vocab_size=4096") == 0
    assert len(compiled) == 2
    assert "if it were untiled" in capsys.readouterr().out
    assert json.loads((tmp_path / "tiny-1" / "summary.json").read_text())["planned_bytes_untiled"] is None
    compiled.clear()
    assert start("tiling.n=4", "model.vocab_size=4096", "compare=true") == 0
    assert 2 < len(compiled) <= 5
    assert "tiled, n=4        untiled\n" in capsys.readouterr().out


def replace_train(monkeypatch, make):
    """Let programs make their training step so."""
    made = functools.cached_property(make)
    made.__set_name__(Programs, "train")
    monkeypatch.setattr(Programs, "train", made)


def exhausted(monkeypatch, refuses):
    """Let the compiler refuse training steps, as it does on TPUs, of the configurations that a function tells."""
    step, made = build.compile_step, []
    make = Programs.train.func

    def train(self):
        made.append(self.config)
        return make(self)

    def compile_step(*args, **options):
        if made and refuses(made[-1]):
            made.clear()
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\n{'x' * 9}")
        return step(*args, **options)

    replace_train(monkeypatch, train)
    monkeypatch.setattr(build, "compile_step", compile_step)


def test_an_untiled_step_that_does_not_compile_is_a_note(start, monkeypatch, capsys):
    exhausted(monkeypatch, lambda config: config.tiling.n == "none")
    assert start("tiling.n=4", "compare=true") == 0
    assert "note: untiled, this step does not compile here: RESOURCE_EXHAUSTED: Ran out" in capsys.readouterr().out


def test_a_step_that_does_not_compile_is_refused_with_what_does(start, monkeypatch, capsys):
    exhausted(monkeypatch, lambda config: config.batch_size > 2)
    assert start("tiling.n=4", "optimizer=adamw", "hardware.headroom_gib=0") == 1
    error = capsys.readouterr().err
    assert "tiny does not fit in 4.00 GiB: the compiler says\n  RESOURCE_EXHAUSTED: Ran out of memory" in error
    assert "This fits (" in error and "batch_size=2" in error


def test_a_device_that_runs_out_of_memory_is_told_without_a_traceback(start, monkeypatch, capsys):
    def fails(self):
        def step(*_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

        step.compiled = make(self).compiled
        return step

    make = Programs.train.func
    replace_train(monkeypatch, fails)
    assert start() == 1
    error = capsys.readouterr().err
    assert "error: out of memory, where" in error
    assert "Out of memory while trying to allocate 9 bytes" in error


def test_nothing_is_tried_where_the_headroom_is_all_there_is(compiled):
    words = [*MICRO, "hardware.memory_gib=0.01", "hardware.headroom_gib=1"]
    assert suggest(resolved(*words[len(MICRO) :]), variations(words), DEVICE) is None
    assert not compiled


def step_bytes(config):
    return cost.total_bytes(Programs(config).train, DEVICE)


def too_small(tiled, share):
    """A device with less memory than the untiled step takes."""
    return Device("cpu", "a small test", int(tiled.memory.total + share * (tiled.untiled.total - tiled.memory.total)))


def test_the_smallest_remedy_is_found_and_fits(tiled):
    device = too_small(tiled, 0.5)
    overrides = [*MICRO, "tiling.n=none", "optimizer=adamw", "hardware.param_dtype=float32", "remat=full"]
    found = suggest(resolve(schema.compose(overrides)[0], device), variations(overrides), device)
    assert found is not None
    changes, total = found
    assert len(changes) == 1  # tiling the head, or fewer sequences, is enough
    again = resolve(schema.compose(with_overrides(overrides, changes))[0], device)
    assert step_bytes(again) == total <= device.memory


def test_what_fits_in_place_of_far_too_many_tokens_takes_few_compilations(compiled):
    asked = ["batch_size=100000", "seq_len=100000", "attention=plain"]
    words, config = [*MICRO, *asked], resolved(*asked)
    assert cost.least(Programs(config), DEVICE).total > 4 * DEVICE.memory  # so that it is not compiled itself
    found = suggest(config, variations(words), DEVICE)
    assert found is not None and len(compiled) <= 5
    changes, total = found
    assert {change.split("=")[0] for change in changes} == {"batch_size", "seq_len"}
    assert DEVICE.memory / 4 < total <= DEVICE.memory  # weaker changes would not fit


@pytest.mark.parametrize(
    "words",
    [
        ["tiling.n=8"],
        ["remat=full", "tiling.n=8", "seq_len=512"],
        ["remat.policy=sqrt", "adapter=lora", "tiling.n=8"],
        ["tiling=long", "tiling.tokens=128", "tiling.n=8"],
        ["tiling.batch=4", "optimizer=sgd", "hardware.param_dtype=bfloat16"],
    ],
)
def test_no_step_takes_less_than_its_shapes_tell(words):
    config = resolved("model.num_layers=4", *words)
    least, total = cost.least(Programs(config), DEVICE), step_bytes(config)
    assert least.state and least.tokens and least.total <= total


def test_halves_of_a_batch_of_pairs_are_pairs():
    config = resolved("batch_size=24", "objective=simpo", "data=preference")
    alone = itertools.takewhile(lambda changes: len(changes) == 1, subsets(config, DEVICE))
    assert (["batch_size=12", "batch_size=6"],) in alone


def test_a_run_that_does_not_fit_stops_before_allocating(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hardware, "prepare", lambda platform: DEVICE)
    monkeypatch.setattr(Programs, "init", None)  # would fail if it were reached
    overrides = [*MICRO, "data=pydoc", f"data.cache={tmp_path}", f"out={tmp_path / 'runs'}", "hardware.memory_gib=0.03"]
    overrides += ["optimizer=adamw", "tiling.n=none"]
    assert run.carry_out(overrides, Stop()) == 1
    captured = capsys.readouterr()
    assert "DOES NOT FIT" in captured.out
    assert "tiny does not fit in 30.7 MiB" in captured.err
    remedy = captured.err.split("This fits (")[1].split("): ")[1].split()
    assert not (tmp_path / "runs").exists()
    config = resolve(schema.compose(with_overrides(overrides, remedy))[0], DEVICE)
    assert step_bytes(config) <= 0.03 * 2**30


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (
            ["remat.policy=offload", "hardware.offload=params"],
            "remat.policy=offload/2, which .* hardware.offload=none, ",
        ),
        ([], ""),
    ],
)
def test_more_than_the_machine_has_beside_its_device_is_refused(words, ways):
    config = resolved(*words)
    has = functools.partial(Device, "gpu", "a test", 2**34, count=8, host=2**30)
    assert cost.crowded(2**28, config, has(on_host=4)) is None
    told = cost.crowded(2**28 + 2**20, config, has(on_host=4))
    assert re.match(
        r"its step holds 1.00 GiB in host memory for its 4 devices, and this machine has free 1.00 GiB. "
        rf"Use {ways}fewer tokens, or a machine with more.",
        told,
    )
    assert cost.crowded(2**40, config, Device("cpu", "a test", 2**34, host=2**30)) is None
    assert cost.crowded(2**40, config, Device("gpu", "a test", 2**34)) is None


def test_a_run_that_does_not_fit_its_host_stops_before_allocating(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hardware, "prepare", lambda platform: Device("gpu", "a test", 2**30, host=2**20, on_host=2))
    monkeypatch.setattr(Programs, "init", None)  # would fail if it were reached
    monkeypatch.setattr(cost, "host_bytes", lambda compiled: 2**20)
    overrides = [*MICRO, "data=pydoc", f"data.cache={tmp_path}", f"out={tmp_path / 'runs'}", "attention=plain"]
    overrides += ["hardware.compute_dtype=float32", "tiling.n=8", "mesh=one"]
    assert run.carry_out(overrides, Stop()) == 1
    told = (
        "tiny does not fit: its step holds 2.0 MiB in host memory for its 2 devices, and this machine has free 1.0 MiB."
    )
    assert told in capsys.readouterr().err


def test_a_hopeless_model_names_one_that_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hardware, "prepare", lambda platform: DEVICE)
    overrides = ["model=gemma2_27b", "data=pydoc", f"data.cache={tmp_path}", f"out={tmp_path / 'runs'}"]
    overrides += ["hardware.headroom_gib=0.1"]
    assert run.carry_out(overrides, Stop()) == 1
    error = capsys.readouterr().err
    assert "gemma2_27b does not fit in 1.00 GiB: its weights, gradients and optimizer alone take" in error
    assert "Try model=pythia_160m" in error  # the largest that fits


def test_replacing_a_group_drops_its_own_values():
    overrides = ["optimizer=adamw", "optimizer.b2=0.9", "batch_size=8", "seed=1"]
    changed = with_overrides(overrides, ["optimizer=adafactor_layerwise", "batch_size=4"])
    assert changed == ["seed=1", "optimizer=adafactor_layerwise", "batch_size=4"]


@pytest.mark.parametrize(
    ("model", "memory", "optimizer", "dtype"),
    [
        ("tiny", 2**33, "AdamW", "float32"),
        ("gemma2b", 23 * 2**30, "AdafactorLayerwise", "bfloat16"),
        ("gemma2b", 2**37, "AdamW", "float32"),
    ],
)
def test_choices_follow_the_models_size(model, memory, optimizer, dtype):
    config = resolve(schema.compose([f"model={model}"])[0], Device("cpu", "a test", memory))
    chosen = config.chosen
    assert type(config.optimizer).__name__ == optimizer
    assert config.hardware.param_dtype == dtype
    assert ("hardware.compiler_options" in chosen) == (dtype == "bfloat16")
    assert None not in dataclasses.astuple(config.hardware)[:3]


@pytest.mark.parametrize(
    ("memory", "count", "multiplies", "dtype"),
    [
        (2**34, 1, True, "bfloat16"),
        (2**34, 1, False, "float32"),
        (2**37, 1, True, "float32"),
        (2**33, 2, True, "float32"),  # the form that has a kernel is for one device
    ],
)
def test_layers_kept_in_bfloat16_compute_in_it_where_the_processor_does(memory, count, multiplies, dtype):
    device = Device("cpu", "a test", memory, count, multiplies_bfloat16=multiplies)
    assert resolve(schema.compose(["model=gemma2b"])[0], device).hardware.compute_dtype == dtype


def test_what_the_processor_multiplies_is_read_from_its_instructions(monkeypatch):
    cpu, told = SimpleNamespace(platform="cpu"), hardware._multiplies_bfloat16
    for flags, expected in (("fpu avx512f avx512_bf16", True), ("fpu avx2", False), ("fpu avx512_bf16x", False)):
        monkeypatch.setattr(builtins, "open", lambda *_, flags=flags: io.StringIO(f"model: x\nflags\t: {flags}\n"))
        assert told(cpu) is expected
    monkeypatch.setattr(builtins, "open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    assert not told(cpu)
    assert told(SimpleNamespace(platform="tpu"))


@pytest.mark.parametrize("words", [["tiling.n=8"], ["seq_len=512", "tiling.n=4"], ["seq_len=8192", "tiling.n=32"]])
def test_the_head_of_a_large_model_can_be_cut(words):
    """Of a few tokens too, whose tiles are small beside the float32 sum of the gradient of a table in bfloat16."""
    config = schema.compose(["model=gemma2b", *words])[0]
    config = resolve(config, Device("cpu", "a test", 23 * 2**30))
    assert config.hardware.param_dtype == "bfloat16"
    assert Programs(config).head_bytes != (0, 0)


def test_what_the_user_chose_is_left_alone():
    overrides = ["batch_size=3", "hardware=gpu", "optimizer=sgd", "remat=dots", "tiling.n=5", "eval.batches=2"]
    config = resolve(schema.compose(overrides)[0], Device("gpu", "a test", 2**36))
    chosen = config.chosen
    assert (config.batch_size, config.tiling.n, config.remat.policy, config.eval.batches) == (3, 5, "dots", 2)
    assert type(config.optimizer).__name__ == "Sgd"
    assert not {"batch_size", "optimizer", "remat.policy", "tiling.n", "hardware.platform"} & chosen.keys()


def test_auto_tiles_large_vocabularies_only():
    tiles = {}
    for words in (["model=tiny"], ["model=gemma2b", "seq_len=8192"]):
        config = resolve(schema.compose(words)[0], Device("cpu", "a test", 2**36))
        tiles[words[0]] = config.tiling.n
    assert tiles["model=tiny"] == "none"
    assert tiles["model=gemma2b"] == 32  # 256 tokens each: 250 MiB of logits
