"""The measurements: the READMEs print what is committed, it can be measured again, and a changed figure is seen."""

import copy
import json
import re
import statistics
import subprocess
import sys
import venv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments.bench import check, context, loop, serve
from experiments.bench.rivals import compare, coverage, figures, step_jax, steps
from experiments.bench.rivals.losses import KIND, LOSSES
from experiments.bench.rivals.oracle import oracle
from experiments.bench.rivals.table import SYSTEMS
from experiments.bench.rivals.with_jax import NAMESPACE, untiled
from experiments.planning import hlo
from tests import quick
from transforms import tile
from zoo import accounting

README = compare.FOLDER.parent / "README.md"
SIZES = (64, 16, 256)


def committed(name):
    return json.loads((compare.RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["rivals", "rivals_bfloat16", "rivals_gpu"])
def test_tables_of_the_readme_are_drawn_from_what_is_committed(name):
    assert compare.table(committed(name)) in README.read_text()


def test_steps_on_a_gpu_are_those_that_are_committed():
    rows = committed("train_gpu")["rows"]
    told = {name: (statistics.median(row["seconds"]), row["peak GiB"]) for name, row in rows.items()}
    words = " ".join(README.read_text().split())
    for name, (seconds, peak) in told.items():
        assert f"{seconds:.3f} s and {peak:.1f} GiB with `{name}`" in words
    ahead = [row["compiled ahead, GiB"] for row in rows.values()]
    assert "`compile_for=h200-1` says {:.1f} and {:.1f} GiB".format(*ahead) in words
    assert len({tuple(row["losses"]) for row in rows.values()}) == 1 and "the same losses to four digits" in words


def test_what_sums_in_a_fixed_order_cost_is_what_is_committed():
    found = committed("train_gpu")["in a fixed order"]
    before, after = (statistics.median(found["seconds"][name]) for name in ("", "with it"))
    more = found["peak GiB"]["with it"] - found["peak GiB"][""]
    words = " ".join((compare.FOLDER.parents[1] / "README.md").read_text().split())
    assert f"`{found['option']}` makes sure of it, for {after / before - 1:.0%} more time and {more:.1f} GiB" in words


def test_lengths_of_the_readme_are_those_that_are_committed():
    figures = json.loads(context.FIGURES.read_text())
    assert context.table(figures) in README.read_text()
    assert set(figures["rows"]) == set(context.ROWS) and figures["setting"] == context.SETTING
    assert (
        f"{figures['rows']['h100-1']['tokens']:,} tokens on one H100"
        in (compare.FOLDER.parents[2] / "README.md").read_text()
    )
    assert (
        f"{figures['rows']['h100-8']['tokens']:,} by Ulysses" in (compare.FOLDER.parents[2] / "README.md").read_text()
    )


def test_rates_of_the_readme_are_those_that_are_committed():
    figures = json.loads(serve.FIGURES.read_text())
    assert serve.table(figures) in README.read_text()
    assert all(same for name, same in figures["same text"].items() if not name.startswith("llama.cpp"))
    steps = set(figures["steps to the first token"].values())
    assert steps == {2} and "has its first token in two steps" in README.read_text()


def test_ratios_to_a_loop_by_hand_are_those_that_are_committed():
    figures = json.loads(loop.FIGURES.read_text())
    assert loop.table(figures) in README.read_text()
    texts = {row["dtype"]: set(row["same"].values()) for row in figures["rows"]}
    assert texts["float32"] == {figures["tokens"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_by_hand_writes_the_text_that_the_engine_writes(dtype):
    row = loop.measure(loop.SMALL, dtype, length=5, tokens=6, rounds=1)
    assert row["same"] == {"scanned": 6, "written out": 6} and all(ratio > 0 for ratio in row["over"].values())


@pytest.mark.parametrize("guess", [1, 3, 11, 12, 40])
@pytest.mark.parametrize("most", [0, 1, 12, 26])
def test_the_longest_that_fits_is_found_from_any_guess(guess, most):
    tried = []

    def fits(tokens):
        tried.append(tokens)
        return tokens if tokens <= most * context.STEP else None

    assert context.longest(fits, guess) == (most * context.STEP, most * context.STEP or None)
    assert len(tried) == len(set(tried)) <= 12


def test_rows_are_measured_anew_beside_the_others(tmp_path, monkeypatch):
    sizes = {"device": 1.0, "host": 3.0, "products": 1.0}
    row = {"tokens": 9, **sizes}
    known = {"made": {"jax": jax.__version__}, "rows": {"h100-1": row, "h200-1": row}}
    monkeypatch.setattr(context, "FIGURES", tmp_path / "context.json")
    monkeypatch.setattr(context, "measure", lambda target, tokens, words: None if tokens > 2**18 else sizes)
    context.FIGURES.write_text(json.dumps(known))
    context.main(["h200-1", "seq_len=7"])
    assert json.loads(context.FIGURES.read_text()) == known
    context.main(["h200-1"])
    assert json.loads(context.FIGURES.read_text())["rows"] == {
        "h100-1": row,
        "h200-1": {"tokens": 2**18, **sizes},
    }
    context.FIGURES.write_text(json.dumps(known | {"made": {"jax": "0.1"}}))
    with pytest.raises(SystemExit, match="the other rows were made with JAX 0"):
        context.main(["h200-1"])


def test_losses_of_the_readme_are_those_that_are_committed():
    figures = committed("losses")
    assert coverage.table(figures) in README.read_text()
    assert set(figures["losses"]["tile"]) == set(LOSSES) == set(KIND)


def test_oracle_is_the_loss_in_float64():
    given = compare.draw(*SIZES, "bfloat16")
    assert all(np.asarray(given[k], jnp.bfloat16).astype(np.float32).tolist() == given[k].tolist() for k in "hw")
    h, w, y = (jnp.asarray(x) for x in given.values())
    loss, (dh, dw) = jax.value_and_grad(untiled(*SIZES[::2], 1), (0, 1))(h, w, y)
    true = oracle(np, **given)
    for found, name in ((loss, "loss"), (dh, "dh"), (dw, "dw")):
        assert 0 < compare.error(np.asarray(found, np.float64), true[name]) < 1e-5


def test_systems_take_turns_in_processes_of_their_own():
    names = ["JAX, untiled", "tile", "scan + checkpoint", "MaxText's algorithm"]
    found = compare.measure(names, SIZES, "float32", slices=4, rounds=2)
    assert not found["missing"]
    rows = found["systems"]
    assert {name: row["products"] for name, row in rows.items()} == dict(zip(names, (3.0, 3.0, 4.0, 4.0), strict=True))
    assert all(row["temporaries"] < rows["JAX, untiled"]["temporaries"] / 2 for row in list(rows.values())[1:])
    assert all(row["error of dw"] < 1e-5 and row["time"] > 0 for row in rows.values())
    assert all(f"| {name}" in compare.table(found).replace("*", "") for name in names)

    changed = copy.deepcopy(rows)
    assert list(check.differences(rows, changed)) == []
    changed["tile"]["temporaries"] += 8
    changed["tile"]["error of dh"] *= 3
    changed["tile"]["time"] = 99.0
    said = list(check.differences(rows, changed))
    assert len(said) == 2
    assert all(line.startswith("tile: ") for line in said)


@pytest.mark.parametrize("name", ["steps", "steps_bfloat16"])
def test_steps_of_the_readme_are_those_that_are_committed(name):
    figures = committed(name)
    assert steps.table(figures) in README.read_text()
    losses = [row["losses"] for row in figures["systems"].values()]
    assert len(losses) == 6 and not figures["missing"]
    close = 1e-6 if name == "steps" else 1e-3  # the same weights, tokens and AdamW
    np.testing.assert_allclose(losses, [losses[0]] * 6, rtol=close)


def test_a_step_by_hand_is_the_one_of_run(monkeypatch, tmp_path):
    small = {"vocab_size": 160, "num_layers": 2, "embed_dim": 32, "mlp_dim": 48, "head_dim": 16, "context_length": 16}
    monkeypatch.setattr(steps, "SIZES", steps.SIZES | small)
    steps.saved(str(tmp_path))
    ids = np.random.default_rng(0).integers(0, 160, (2, 16)).astype(np.int32)
    losses = []
    for build in (step_jax.run_tiled, step_jax.by_hand):
        _, step = build(str(tmp_path), ids, "float32")
        losses.append([step() for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-6)
    assert losses[0][2] < losses[0][0]


def test_pictures_are_those_of_what_is_committed(tmp_path):
    of = {"memory": figures.draw_memory, "errors": figures.draw_errors}
    for name, draw in of.items():
        draw(committed("figures")[name], tmp_path / f"compare_{name}.svg")
    figures.draw_losses(committed("losses"), tmp_path / "compare_losses.svg")
    for name in ("memory", "errors", "losses"):
        drawn = (tmp_path / f"compare_{name}.svg").read_text()
        text = lambda svg: re.findall(r"<!-- (.*?) -->", svg)  # words, whichever fonts there are
        assert text(drawn) == text((figures.PICTURES / f"compare_{name}.svg").read_text())


def test_points_are_measured_in_one_process_each():
    names = ["JAX, untiled", "tile", "scan + checkpoint"]
    points = [((64, 16, 256), 2), ((64, 16, 256), 4)]
    found = figures.swept(names[:2], points, "float32", None)
    assert found["JAX, untiled"][0] == found["JAX, untiled"][1] > found["tile"][0] > found["tile"][1]
    found = figures.swept(names, points, "bfloat16", "dw")
    assert all(1e-4 < error < 1e-2 for errors in found.values() for error in errors)


def linked(python):
    """In place of an environment, which takes ten seconds to make."""
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)


def test_system_that_cannot_be_installed_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(venv, "create", lambda home, with_pip: linked(home / "bin" / "python"))
    found = compare.measure(["JAX, untiled", "tokamax"], SIZES, "float32", slices=4, rounds=0)
    assert list(found["systems"]) == ["JAX, untiled"]
    assert "Not measured: tokamax: ERROR: No matching distribution found" in compare.table(found)
    assert not list(tmp_path.rglob("complete"))


def test_command_that_is_not_there_is_one_error():
    words = [sys.executable, "-m", "experiments.bench", "rivlas"]
    told = subprocess.run(words, capture_output=True, text=True)
    assert told.returncode == 2
    assert told.stdout.startswith("error: no measurement is called 'rivlas'; there are: rivals, losses,")


@pytest.fixture(scope="module")
def batch():
    return {name: jnp.asarray(array) for name, array in coverage.draw().items()}


@pytest.mark.parametrize("kind", sorted(set(KIND.values())))
def test_ordinary_losses_are_right(kind, batch):
    """All of a kind in one program, so that it is compiled once."""
    given = {k: v for k, v in batch.items() if k not in ("h", "w")}

    def both(h, w, given):  # an argument: XLA would compute with constants while it compiles
        found = {}
        for name in (name for name in LOSSES if KIND[name] == kind):
            loss = lambda h, w, given, fn=LOSSES[name]: fn(NAMESPACE, h @ w, given)
            for fn in (loss, tile(loss, (0, None, 0), 4)):
                triple = lambda h, w, fn=fn: 3 * fn(h, w, given)
                found.setdefault(name, []).append(jax.value_and_grad(triple, (0, 1))(h, w))
        return found

    for name, (want, got) in quick.jit(both)(batch["h"], batch["w"], given).items():
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert compare.error(np.asarray(one, np.float64), np.asarray(other, np.float64)) < 2e-5, name


def test_every_system_is_built_by_a_function_that_is_there():
    for system in SYSTEMS.values():
        source = (compare.FOLDER / f"{system.side}.py").read_text()
        assert f"def {system.build}(" in source


KERNEL = (
    "ENTRY %main (p: bf16[2,512,8,64]) -> bf16[2,8,512,64] {{\n"
    "  %out = (bf16[2,8,512,64]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %v), "
    'custom_call_target="__cudnn$fmhaSoftmax{way}", operand_layout_constraints={{bf16[2,512,8,64]{{3,2,1,0}}, '
    'bf16[2,512,2,64]{{3,2,1,0}}}}, backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": '
    '{{"element_type": "BF16", "dimensions": ["2", "8", "512", "512"]}}, "mask_type": "{mask}", '
    '"sliding_window_length": {window}}}}}\n}}'
)


@pytest.mark.parametrize(
    ("way", "mask", "window", "products", "pairs"),
    [
        ("", "CAUSAL", 0, 2, 512 * 513 // 2),
        ("Backward", "CAUSAL", 0, 5, 512 * 513 // 2),
        ("", "CAUSAL", 1, 2, 512),
        ("Backward", "NO_MASK", 0, 5, 512 * 512),
    ],
)
def test_products_within_a_kernel_are_counted(way, mask, window, products, pairs):
    text = KERNEL.format(way=way, mask=mask, window=window)
    assert hlo.dot_flops(text) == products * 2 * 2 * 8 * pairs * 64


def test_products_that_cublas_makes_are_counted():
    """It returns a workspace beside the product."""
    shape = lambda dims: f"bf16[{dims}]{{1,0}}"
    numbers = '"lhs_contracting_dimensions":["1"],"rhs_batch_dimensions":[],"rhs_contracting_dimensions":["0"]'
    text = (
        f"ENTRY %main (a: {shape('64,16')}, b: {shape('16,256')}) -> {shape('64,256')} {{\n"
        f"  %a = {shape('64,16')} parameter(0)\n  %b = {shape('16,256')} parameter(1)\n"
        f"  %both = ({shape('64,256')}, s8[33554432]{{0}}) custom-call(%a, %b), "
        f'custom_call_target="__cublas$lt$matmul", backend_config={{"dot_dimension_numbers":{{{numbers}}}}}\n'
        f"  ROOT %out = {shape('64,256')} get-tuple-element(%both), index=0\n}}"
    )
    assert hlo.dot_flops(text) == 2 * 64 * 16 * 256


@pytest.mark.parametrize("left", [True, False])
def test_solving_with_a_triangle_is_half_a_product(left):
    """Of 128 right-hand sides, each with a triangle of 64 rows."""
    made, turned = ("64,128", "{2,3,1,0}") if left else ("128,64", "{3,2,1,0}")
    text = (
        "ENTRY %main (a: f32[1,48,64,64], b: f32[1,48,64,128]) -> f32[8] {\n"
        f"  %solve = (f32[1,48,{made}]{turned}, s8[768]{{0}}) custom-call(%a, %b), "
        f'custom_call_target="__cublas$triangularSolve", backend_config={{"left_side":{str(left).lower()}}}\n'
        '  %other = f32[64]{0} custom-call(%a), custom_call_target="__cublas$unheard_of"\n}'
    )
    assert hlo.dot_flops(text) == 48 * 128 * 64 * 64


@pytest.mark.parametrize("target", ["gemm", "lt$matmul", "lt$matmul$f8", "lt$groupedMatmul"])
def test_all_products_of_cublas_are_counted(target):
    numbers = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
    text = (
        "ENTRY %main (a: f32[64,16], b: f32[16,256]) -> f32[64,256] {\n"
        "  %a = f32[64,16]{1,0} parameter(0)\n  %b = f32[16,256]{1,0} parameter(1)\n"
        f'  ROOT %out = f32[64,256]{{1,0}} custom-call(%a, %b), custom_call_target="__cublas${target}", '
        f'backend_config={{"dot_dimension_numbers":{numbers}}}\n}}'
    )
    assert hlo.dot_flops(text) == 2 * 64 * 16 * 256


def test_two_forward_passes_and_a_backward_pass_of_attention_have_nine_products():
    config = zoo.LlamaConfig(
        vocab_size=64, num_layers=1, embed_dim=16, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8
    )
    forward, length = accounting.forward_flops(config, 1, 100), 100
    product = 2 * length * (length + 1) // 2 * 2 * 8
    assert accounting.recomputed_flops(config, 1, length) == 4 * (forward - 2 * product) + 9 * product


@pytest.mark.optimised
def test_bytes_that_a_program_reads_are_those_of_what_it_slices():
    """A loop over half of a stack reads half of it, and a row that is looked up is no table."""
    stack, table = jnp.zeros((16, 64, 64)), jnp.zeros((1000, 64))

    def program(stack, table, turns, row):
        step = lambda i, x: jnp.tanh(x @ stack[i])
        with jax.named_scope("turns"):
            return jax.lax.fori_loop(0, turns, step, table[row][None])

    text = jax.jit(program).lower(stack, table, 4, 3).compile().as_text()
    for turns in (4, 8):
        read = hlo.bytes_read(text, {"turns": turns}, least=table.nbytes // 2)  # of arguments alone
        assert read == turns * 64 * 64 * 4 + 64 * 4
        assert hlo.dot_flops(text, {"turns": turns}) in (turns * 2 * 64 * 64, 0)  # XLA:CPU may make a call of it
