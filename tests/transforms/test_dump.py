"""Planned programs as text: one line an equation and a step, the same numbers in the graph and in the loops."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from transforms import tile
from transforms.tiling.frontend.flatten import flatten
from transforms.tiling.ir.dump import constant, graph_text, kind, loops_text, place, plan_text
from transforms.tiling.ir.graph import Value
from transforms.tiling.ir.placement import WHOLE, Partial, Stacked, Tiled

Array = jax.ShapeDtypeStruct
X, W = Array((26, 7), "float32"), Array((7, 13), "float32")


def plan(fn, axis, *args, n=4, **options):
    return tile(fn, axis, n, **options)._tracer.trace(args, {}).program.plan


def plain(text):
    """Without parameters and source lines."""
    lines = (re.sub(r" \w+=.*", "", line.split("  # ")[0]) for line in text.splitlines())
    return "\n".join(line.rstrip() for line in lines)


def centred(x, w):
    h = x @ w
    return ((h - h.sum(0)) ** 2).sum()


def test_a_program_reads_from_top_to_bottom():
    assert (
        plain(plan_text(plan(centred, (0, None), X, W)))
        == """\
inputs %0:f32[26,7]{cut 0} %1:f32[7,13]
%2:f32[26,13]{cut 0} = dot_general %0 %1
%3:f32[13]{sum} = reduce_sum %2
%4:f32[1,13]{sum} = broadcast_in_dim %3
%5:f32[26,13]{cut 0, from loop 2} = sub %2 %4(whole)
%6:f32[26,13]{cut 0, from loop 2} = integer_pow %5
%7:f32[]{sum, from loop 2} = reduce_sum %6
outputs %7

loop 1 of 2: tiles of 7 of 26
  reads %1
  %2:f32[26,13]{cut 0} = dot_general %0[slice cut 0] %1[whole]
  %3:f32[13]{sum} = reduce_sum %2
  carries %3:f32[13]{sum}
loop 2 of 2: tiles of 7 of 26
  reads %4 %1
  %2:f32[26,13]{cut 0} = dot_general %0[slice cut 0] %1[whole]
  %5:f32[26,13]{cut 0} = sub %2 %4[whole]
  %6:f32[26,13]{cut 0} = integer_pow %5
  %7:f32[]{sum} = reduce_sum %6
  carries %7:f32[]{sum}"""
    )


def test_an_equation_has_its_parameters_and_the_users_line():
    made = plan_text(plan(centred, (0, None), X, W))
    line = next(line for line in made.splitlines() if line.startswith("%3:"))
    assert re.fullmatch(r".* = reduce_sum %2 axes=\(0,\)  # \w+/test_dump.py:\d+(:\d+)? \(centred\)", line)


def test_a_graph_alone_says_nothing_of_tiles():
    graph = flatten(jax.make_jaxpr(lambda x: jnp.exp(x + 1) @ np.ones((7, 2), np.float32))(X))
    assert plain(graph_text(graph)) == (
        "inputs %0:f32[26,7]\n%1:f32[26,7] = add %0 1.0\n%2:f32[26,7] = exp %1\n"
        "%3:f32[26,2] = dot_general %2 const:f32[7,2]\noutputs %3"
    )


def test_accumulators_and_what_they_are_relative_to():
    made = plain(loops_text(plan(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, (None, 0, 0), X, X, X)))
    (anchor,) = set(re.findall(r"relative to (%\d+)", made))
    assert re.search(rf"^  {anchor}:f32\[26,1\] = running %\d+$", made, re.M)
    assert re.search(
        rf"^  carries %\d+:f32\[26,7\]{{sum}} from \(dot_general %\d+ %2\[slice cut 0\]\) relative to {anchor}$",
        made,
        re.M,
    )


def test_states_and_directions():
    def both_ways(x):
        step = lambda s, row: ((s := jnp.tanh(s + jnp.outer(row[:3], row[:3]))), s.sum())
        forward = lax.scan(step, jnp.ones((3, 3)), x)[1]
        return forward + lax.scan(step, jnp.ones((3, 3)), jnp.tanh(x), reverse=True)[1]

    made = plan_text(plan(both_ways, 0, X, gather="none"))
    assert "{last}" in made and "from tile to tile" in made
    assert [", backwards" in line for line in made.splitlines() if line.startswith("loop ")] == [False, True]


def test_rows_beside_the_tile():
    made = plan(lambda x: (jnp.tanh(x) * jnp.pad(jnp.tanh(x), ((1, 0), (0, 0)))[:-1]).sum(), 0, X)
    assert re.search(r"%\d+\[slice cut 0, 1 before and 0 after\]", loops_text(made))
    assert re.search(r"= tanh .* with 1 rows before and 0 after$", loops_text(made), re.M)


def test_bodies_stand_below_their_equation():
    made = plain(plan_text(plan(lambda x: jax.checkpoint(lambda x: jnp.sin(x) * 2)(x).sum(1), 0, X)))
    body = ["  body 0", "    inputs %0:f32[26,7]{cut 0}", "    %1:f32[26,7]{cut 0} = sin %0"]
    lines = made.splitlines()
    assert lines[lines.index(body[0]) :][:3] == body


def test_what_is_made_whole_is_listed():
    made = plan_text(plan(lambda x: jnp.sort(jnp.tanh(x[:, 0])), 0, X))
    assert re.search(r"= sort %\d+\(whole\)", made)
    assert made.splitlines()[-1].startswith("made whole: float32[26] Tiled(dim=0) for `sort` at ")


@pytest.mark.parametrize(
    ("dtype", "text"), [("bfloat16", "bf16[2]"), ("uint8", "u8[2]"), ("bool", "bool[2]"), ("complex64", "c64[2]")]
)
def test_types(dtype, text):
    assert kind(jnp.ones(2, dtype).aval) == text


def test_types_of_keys_and_of_nothing():
    assert kind(jax.random.split(jax.random.key(0), 3).aval) == "key<fry>[3]"
    assert kind(None) == "()"


def test_constants():
    of = lambda array: constant(Value(jax.typeof(array), const=array))
    found = [of(np.float32(0.5)), of(np.asarray(True)), of(np.ones(3, np.int32)), of(jnp.bfloat16(2))]
    assert found == ["0.5", "True", "const:i32[3]", "2.0"]
    assert of(jax.random.key(0)) == "const:key<fry>[]"


def test_places():
    found = [place(p) for p in (WHOLE, Tiled(1), Tiled(0, 2, 3), Tiled(0, 1, 1, 4), Partial("max"), Stacked(7))]
    assert found == ["", "cut 1", "cut 0 (2*L*3)", "cut 0 (1*L/4*1)", "max", "states"]


def test_a_dump_has_a_file_for_each_program_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("TILE_DUMP", str(tmp_path / "here"))
    x, w = jnp.ones((26, 7)), jnp.ones((7, 13))
    jax.grad(tile(centred, (0, None), 4))(x, w)
    files = sorted((tmp_path / "here").iterdir())
    assert files and all(re.fullmatch(r"\d{4}_\w+_\d_loops\.txt", path.name) for path in files)
    made = plan(centred, (0, None), X, W)
    assert sorted((tmp_path / "here").iterdir())[-1].read_text() == plan_text(made)


def test_nothing_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("TILE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    plan(centred, (0, None), X, W)
    assert not list(tmp_path.iterdir())
