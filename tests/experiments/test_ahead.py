"""Compiling for hardware that is not here: names, errors, what is printed, and what would fit."""

import importlib.util
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from experiments.commandline import schema
from experiments.planning import ahead, cost, hlo, targets
from experiments.planning.resolve import resolve
from experiments.planning.targets import Accelerator, Target, TargetError
from experiments.runtime.hardware import Device
from experiments.step.build import Programs
from transforms.sharding import make_mesh, place
from zoo.accounting import forward_flops

pytestmark = pytest.mark.measured

WORDS = ["model.num_layers=2", "model.embed_dim=32", "model.mlp_dim=64", "model.num_heads=4", "model.head_dim=8"]
WORDS += ["model.vocab_size=512", "batch_size=8", "seq_len=64", "steps=3", "compile_for=v5e-8", "tiling=none"]
WORDS += ["attention=plain"]  # what is compiled for here is a CPU


@pytest.fixture
def compile_for(monkeypatch, tmp_path):
    """Compile for eight CPU devices of some GiB, and return the exit status."""
    monkeypatch.setattr(ahead, "user_cache", lambda: tmp_path)
    before = jax.config.jax_compilation_cache_dir

    def run(*words, memory=16.0, host=None):
        target = Target("v5e-8", Accelerator(platform="gpu", memory=memory, host=host), jax.devices())
        monkeypatch.setattr(targets, "find", lambda name: target)
        words = [*WORDS, *words]
        return ahead.start(*schema.compose(words), words)

    yield run
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_cost_of_a_step_is_printed(compile_for, capsys):
    assert compile_for("mesh=fsdp_tp", "optimizer=adamw") == 0
    out = capsys.readouterr().out
    assert "data=4 x model=2, parameters cut over D" in out
    assert "512   8 x 64, 64 of each device" in out
    for part in ("peak", "matrix products", "all-gather", "all-reduce"):
        assert part in out


def test_a_step_that_does_not_fit_is_told_with_what_does(compile_for, capsys):
    assert compile_for("mesh=dp", "optimizer=sgd", memory=2.0**-10) == 1
    error = capsys.readouterr().err
    assert "tiny does not fit v5e-8" in error
    assert "a device has 1.0 MiB" in error
    assert "This fits" in error


def test_more_than_a_host_has_is_told(compile_for, capsys, monkeypatch):
    monkeypatch.setattr(cost, "host_bytes", lambda compiled: 2**30)
    for host, told in ((7.9, True), (8.0, False), (None, False)):
        assert compile_for("mesh=fsdp", host=host) == 0
        out = " ".join(capsys.readouterr().out.split())
        note = "note: its step holds 8.00 GiB in host memory for its 8 devices, and a host has 7.90 GiB. Use fewer"
        assert (note in out) == told
        assert "8.00 GiB for all devices" in out


@pytest.mark.parametrize(
    ("name", "cores", "count", "on_host"),
    [("v5e-8", 1, 8, 8), ("v5p-2", 2, 1, 1), ("v5p-16", 2, 8, 4), ("v7x-16", 2, 16, 8), ("h100-16", 1, 16, 8)],
)
def test_a_host_has_so_many_devices(name, cores, count, on_host):
    """Chips whose cores are devices have two of those."""
    known = targets.ACCELERATORS[name.partition("-")[0]]
    device = Target(name, known, [SimpleNamespace(device_kind="a test")] * count).device
    assert (known.cores, device.on_host, device.host) == (cores, on_host, int(known.host * 2**30))


def test_attention_that_a_device_cannot_have_is_refused_with_the_reason(compile_for, capsys):
    assert compile_for("attention=splash") == 2
    assert "cannot run with attention=splash: splash runs on tpu, and this is a gpu" in capsys.readouterr().err
    assert compile_for("attention=cudnn", "hardware.compute_dtype=float32") == 2
    assert "cudnn computes in bfloat16, and this run in float32" in capsys.readouterr().err


def test_attention_is_chosen_and_the_reason_printed(compile_for, capsys):
    assert compile_for("attention=auto", "hardware.compute_dtype=float32") == 0
    out = capsys.readouterr().out
    assert "attention=plain" in out and "cudnn computes in bfloat16" in out
    assert compile_for("attention=auto", "tiling.attention=2") == 0
    assert "attention=tiled" in capsys.readouterr().out
    assert compile_for("attention=tiled") == 0
    assert "tiling.attention=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tpu",
            "compile_for=tpu: there is no such hardware. Known are v4-16, v5e-8, v5p-16, v6e-8, v7x-16, h100-8, h200-8",
        ),
        ("v5e-9", "there is no slice of that size. There are v5e-1, v5e-4, v5e-8"),
        ("v5p-4", "There are v5p-2, v5p-8, v5p-16"),
        ("h100-9", "hosts have 8 devices"),
    ],
)
def test_other_hardware_is_refused(name, message):
    with pytest.raises(TargetError, match=message):
        targets.find(name)


@pytest.mark.parametrize(
    ("name", "count", "kind"),
    [
        ("v5e-1", 1, "TPU v5 lite"),
        ("v6e-1", 1, "TPU v6 lite"),
        ("v5p-2", 1, "TPU v5"),
        ("v7x-2", 2, "TPU7x"),
        ("v7x-8", 8, "TPU7x"),
        ("h200-8", 8, "NVIDIA H200"),
        ("b200-1", 1, "NVIDIA B200"),
        ("l4-1", 1, "NVIDIA L4"),
        ("rtx4090-2", 2, "NVIDIA GeForce RTX 4090"),
    ],
)
def test_a_product_is_compiled_for_every_kind(name, count, kind):
    if not importlib.util.find_spec(
        "libtpu" if targets.ACCELERATORS[name.split("-")[0]].shapes else "jax_cuda12_plugin"
    ):
        pytest.skip("its compiler is not installed")
    target = targets.find(name)
    assert (len(target.devices), target.devices[0].device_kind) == (count, kind)
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(target.devices[0]))
    assert jax.jit(lambda x: x @ x).lower(x).compile().memory_analysis().output_size_in_bytes == 2 * 256 * 256


class Stats:
    """What a compiler says of an offloaded step: its peak counts the host's memory."""

    argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes, temp_size_in_bytes = 100, 100, 90, 30
    host_argument_size_in_bytes, host_output_size_in_bytes, host_alias_size_in_bytes = 7, 7, 6
    peak_memory_in_bytes = 400

    def __init__(self, host):
        self.host_temp_size_in_bytes = host
        if not host:
            self.host_argument_size_in_bytes = self.host_output_size_in_bytes = self.host_alias_size_in_bytes = 0

    compiled = property(lambda self: self)
    memory_analysis = lambda self: self


def test_the_host_s_memory_is_counted_apart():
    device = Device("tpu", "a test", 2**34)
    assert cost.host_bytes(Stats(256)) == 256 + 7 + 1
    assert cost.total_bytes(Stats(256), device) == 100 + 10 + 30
    assert cost.total_bytes(Stats(0), device) == 400


@pytest.mark.parametrize(("name", "module"), [("v5e-8", "libtpu"), ("h100-8", "jax_cuda12_plugin")])
def test_a_compiler_that_is_missing_is_named(name, module):
    if importlib.util.find_spec(module):
        pytest.skip("it is installed")
    with pytest.raises(TargetError, match=r"pip install -e '\.\[compile-(tpu|gpu)\]'"):
        targets.find(name)


def test_collectives_are_counted_with_the_turns_of_their_loops():
    with jax.set_mesh(make_mesh(8)):
        x = place(jnp.ones((16, 32)), PartitionSpec("data"))

        def body(total, _):
            return total + jnp.sin(jnp.einsum("bd,be->de", x + total[0, 0], x, out_sharding=PartitionSpec())), None

        run = jax.jit(lambda: jax.lax.scan(body, jnp.zeros((32, 32)), length=5)[0])
        (found,) = hlo.collectives(run.lower().compile().as_text(), 8)
    assert (found.op, found.times, found.looped) == ("all-reduce", 5, True)
    assert found.bytes == 2 * 7 / 8 * 32 * 32 * 4


_BLOCKS = "s8[1,16,16]{2,1,0}, s8[1,16,16]{2,1,0}"
_FEW = "s8[1,16,3]{2,1,0}, s8[1,16,3]{2,1,0}"
_READ = "bf16[1,4,8192,128]{3,2,1,0}, bf16[1,8192,128]{2,1,0}, bf16[1,8192,128]{2,1,0}"
_GIVEN = "f32[1,4,8,8192]{3,2,1,0}, bf16[1,4,8192,128]{3,2,1,0}, f32[1,4,8,8192]{3,2,1,0}"
_SEEN = "f32[1,512,128]{2,1,0:T(8,128)}, bf16[1,4,8192,128]{3,2,1,0:T(8,128)(2,1)}, f32[1,4,8192,128]{3,2,1,0:T(8,128)}"
_KEYS = "bf16[1,8192,128]{2,1,0:T(8,128)(2,1)}, bf16[1,8192,128]{2,1,0:T(8,128)(2,1)}"
_FUSED = f"f32[1,512,128]{{2,1,0}}, bf16[1,16,4,8192,128]{{4,3,2,1,0:T(8,128)(2,1)}}, {_KEYS}"
_ONE, _ONE_READ = (part.replace("1,4,8192", "1,1,8192") for part in (_SEEN, _READ.replace("16[1,8192", "16[8192")))
_PLACES, _DOCUMENTS = "s32[8192,128]{1,0}", "s32[8192,128]{1,0}, s32[8,8192]{1,0}"


@pytest.mark.parametrize(
    ("made", "read", "products", "blocks"),
    [
        (_ONE, f"{_BLOCKS}, {_ONE_READ}", 0.5, 256),  # of four heads
        (_FUSED.replace("16,4,", "16,1,"), f"{_BLOCKS}, {_ONE_READ}, {_GIVEN.replace('1,4,', '1,1,')}", 1.25, 256),
        (_SEEN, f"{_BLOCKS}, {_READ}", 2, 256),
        (_SEEN, f"{_BLOCKS}, {_READ}, {_PLACES}", 2, 136),
        (_SEEN, f"{_BLOCKS}, {_READ}, {_DOCUMENTS}", 2, 256),
        (_SEEN, f"{_FEW}, {_READ}, {_DOCUMENTS}, {_PLACES}", 2, 48),
        (_FUSED, f"{_BLOCKS}, {_READ}, {_GIVEN}, {_PLACES}", 5, 136),
        (_FUSED.split(", bf16[1,16")[0] + f", {_KEYS}", f"{_BLOCKS}, {_READ}, {_GIVEN}", 4, 256),
        ("f32[1,512,128]{2,1,0}, bf16[1,4,8192,128]{3,2,1,0}", f"{_BLOCKS}, {_READ}, {_GIVEN}", 3, 256),
    ],
)
def test_splash_attention_has_the_products_of_its_blocks(made, read, products, blocks):
    """As compilers for TPUs write it, who do not say what a kernel computes."""
    call = f'custom_call_target="tpu_custom_call", operand_layout_constraints={{{read}}}, frontend_attributes={{k={{'
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %k.1 = ({made}) custom-call(%c.1, %c.2), {call}\n}}"
    assert hlo.dot_flops(text) == 2 * products * 4 * blocks * 512**2 * 128


@pytest.mark.parametrize(
    ("words", "passes"),
    [([], 3), (["data=preference", "objective=dpo"], 4), (["adapter=lora", "adapter.targets=q"], 2)],
    ids=["loss", "preferences", "adapter"],
)
def test_products_are_compared_with_those_that_the_objective_needs(words, passes):
    """A reference makes one pass, what is frozen hands gradients on and has none."""
    device = Device("cpu", "a test", 2**32)
    words = ["model=tiny", "steps=2", "seq_len=256", "batch_size=8", *words]
    programs = Programs(resolve(schema.compose(words)[0], device))
    once = forward_flops(programs.config.model.config, 8, 256)
    found = ahead.Traffic(2**20, 2**21, 0, [], passes * once)
    said = ahead._table("tiny", programs, found, device)
    times = float(re.search(r"([\d.]+) x those of the mathematics", said).group(1))
    assert times == pytest.approx(1, abs=0.02)


def test_a_ragged_product_has_those_of_its_rows():
    """By the kernel that XLA has on TPUs, which is told where groups begin, and then the rows and the matrices."""
    read = "s32[1]{0}, s32[9]{0}, bf16[4096,256]{1,0}, bf16[8,256,128]{2,1,0}"
    call = f'custom_call_target="tpu_custom_call", operand_layout_constraints={{{read}}}, frontend_attributes='
    call += '{mosaic_fusion_entry_point="true",ragged_dot_tiling="128,256,128"}'
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %r.1 = bf16[4096,128]{{1,0}} custom-call(%c.1, %c.2), {call}\n}}"
    assert hlo.dot_flops(text) == 2 * 4096 * 256 * 128


TPU = """
%fused (p: bf16[1,32]) -> (bf16[1,32], bf16[1,128]) {
  %all-gather.1 = bf16[1,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={1}
}

%fused.2 (p: bf16[1,32]) -> bf16[1,128] {
  %all-gather.2 = bf16[1,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={1}
}

%all-reduce-scatter (p: f32[8,8]) -> f32[1,8] {
  %all-reduce.1 = f32[8,8]{1,0} all-reduce(%p), channel_id=8, replica_groups=mesh['a'=2,'b'=4] {'a','b'}, to_apply=%add
}

%condition (p: (s32[], f32[])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[]{:T(512)} compare(%p, %constant.3), direction=LT
}

%pairs (p: (s32[], f32[])) -> pred[] {
  %constant.4 = u32[]{:T(128)} constant(4)
  %counter = u32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %lt = pred[]{:T(512)} compare(%counter, %constant.4), direction=LT
}

%ring (p: (s32[], f32[])) -> (s32[], f32[]) {
  %two = u32[]{:T(128)} constant(2)
  %counter = u32[]{:T(128)} get-tuple-element(%p), index=1
  %sent = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=9, source_target_pairs={{0,1}}
  %next = u32[]{:T(128)} add(%counter, %two)
  ROOT %tuple = (f32[8]{0}, u32[]{:T(128)}) tuple(%sent, %next)
}

%body (p: (s32[], f32[])) -> (s32[], f32[]) {
  %start = (bf16[1,32], bf16[1,128]) fusion(%p), kind=kCustom, calls=%fused
  %done = bf16[1,128]{1,0} fusion(%start), kind=kCustom, calls=%fused.2
}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %w = (s32[], f32[]) while(%p), condition=%condition, body=%body
  %v = (s32[], f32[]) while(%p), condition=%pairs, body=%ring
  %r = f32[1,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_the_text_of_a_tpu_program_is_read():
    gather, permute, scatter = hlo.collectives(TPU, 8)
    assert (gather.op, gather.times, gather.looped, gather.bytes) == ("all-gather", 3, True, 3 / 4 * 256)
    # Four turns, of which the compiler joined pairs; a start names what is read before what is made.
    assert (permute.op, permute.times, permute.looped, permute.bytes) == ("collective-permute", 2, True, 32)
    assert (scatter.op, scatter.times, scatter.looped, scatter.bytes) == ("reduce-scatter", 1, False, 7 / 8 * 256)


@pytest.mark.parametrize(
    ("groups", "among"),
    [
        ("[2,4]<=[8]", 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", 4),
        ("mesh['a'=8] {'a':(2)2}", 2),
    ],
)
def test_how_many_devices_a_collective_is_among_is_read(groups, among):
    line = f"  %g.1 = f32[64]{{0}} all-gather(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    [gather] = hlo.collectives(f"ENTRY %main (p: f32[8]) -> f32[64] {{\n{line}\n}}", 8)
    assert gather.bytes == (among - 1) / among * 256


@pytest.mark.parametrize(
    ("made", "op", "sent"),
    [
        ("f32[8]{0}", "all-reduce", 2 * 3 / 4 * 32),
        ("(f32[8]{0}, f32[4]{0})", "all-reduce", 2 * 3 / 4 * 48),
        ("((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}))", "all-reduce", 2 * 3 / 4 * 48),
        ("((f32[8]{0}), f32[8]{0})", "all-reduce", 2 * 3 / 4 * 32),
        ("(f32[8]{0}, f32[32]{0})", "all-gather", 3 / 4 * 128),
        ("((f32[8]{0}), f32[32]{0})", "all-gather", 3 / 4 * 128),
        ("((f32[32]{0}), f32[8]{0})", "reduce-scatter", 3 * 32),
        ("((f32[4,8]{1,0}), f32[4,8]{1,0})", "all-to-all", 3 / 4 * 128),
    ],
)
def test_what_an_asynchronous_start_reads_is_not_what_it_makes(made, op, sent):
    """As compilers for GPUs write it: older ones leave out what an all-reduce reads, newer ones nothing."""
    line = f"  %s.1 = {made} {op}-start(%p), channel_id=1, replica_groups=[2,4]<=[8]"
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{line}\n}}"
    (one,) = hlo.collectives(text, 8)
    assert (one.op, one.bytes) == (op, sent)


@pytest.mark.parametrize(
    ("window", "labels", "product"),
    [
        ("size=1", "0bf_io0->0bf", 2 * 64 * 8),
        ("size=1x4", "0b1f_1io0->0bf1", 2 * 64 * 4 * 4),  # four heads are summed
        ("size=1x4 pad=0_0x3_3 rhs_reversal=0x1", "0bf1_i1o0->0b1f", 2 * 64 * 8),  # four heads are made
        ("size=4x4 stride=3x3 lhs_dilate=4x4", "0b1f_0o1i->01bf", 2 * 64 * 2),  # batches
    ],
)
def test_a_tpu_s_convolutions_are_products(window, labels, product):
    text = f"""
ENTRY %main (p: f32[8]) -> f32[8] {{
  %x = bf16[2,4,8]{{1,0}} parameter(0)
  %w = bf16[8,4,4,2]{{1,0}} parameter(1)
  %c = bf16[4,16]{{1,0}} convolution(%x, %w), window={{{window}}}, dim_labels={labels}
}}
"""
    assert hlo.dot_flops(text) == product
