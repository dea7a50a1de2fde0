"""`n="auto"` takes the fewest tiles that fit, and says what would."""

import jax
import jax.numpy as jnp
import optax
import pytest

from transforms import tile
from transforms.tiling.report.plan import read_budget

S = jax.ShapeDtypeStruct
SHAPES = (S((2048, 64), jnp.float32), S((64, 4096), jnp.float32), S((2048,), jnp.int32))
MiB = 1 << 20


def loss(h, w, y):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean()


def planned(budget):
    return tile(loss, (0, None, 0), n="auto", budget=budget).plan(*SHAPES)


@pytest.mark.parametrize("budget", [70 * MiB, 40 * MiB, 13 * MiB, 5 * MiB])
def test_takes_the_fewest_tiles_that_fit(budget):
    found = planned(budget)
    assert found.gradient is not None and found.gradient.temp <= budget
    if found.tiles > 1:
        more = tile(loss, (0, None, 0), n=found.tiles - 1).plan(*SHAPES)
        assert more.gradient is not None and more.gradient.temp > budget


def test_no_fewer_tiles_fit_where_some_do_not_divide():
    """What is left over of the axis is a loop of its own: ten tiles may take more than eight."""
    attention = lambda q, k, v: jax.nn.softmax(q @ k.T / 8, -1) @ v
    tiled = lambda n, **how: tile(attention, (0, None, None), n, **how).plan(*[SHAPES[0]] * 3)
    budget = 9.9 * MiB
    taken = {n: tiled(n).gradient.temp for n in range(1, 11)}
    found = tiled("auto", budget=int(budget)).tiles
    assert found == min(n for n in taken if taken[n] <= budget) and max(taken[n] for n in range(found, 11)) > budget


def test_what_fits_is_not_tiled():
    assert planned("1GiB").tiles == 1


@pytest.mark.measured
def test_the_compiled_program_fits():
    tiled = tile(loss, (0, None, 0), n="auto", budget=10 * MiB)
    compiled = jax.jit(jax.value_and_grad(tiled, (0, 1))).lower(*SHAPES).compile()
    assert 4 * MiB < compiled.memory_analysis().temp_size_in_bytes <= 10 * MiB


def test_tiles_keep_64_rows():
    message = (
        r'n="auto" cannot keep within budget=1 MiB: the smallest possible is [\d.]+ MiB of temporary memory, gradients '
        r"included, with 32 tiles of 64 \(96\.\d+ MiB untiled\)\.\n  Raise the budget, or pass n= or size="
    )
    with pytest.raises(ValueError, match=message):
        planned(MiB)


def test_a_batch_of_sequences_may_be_cut_into_single_ones():
    fn = lambda x, w: jnp.tanh(x @ w).sum()
    shapes = S((8, 512, 64), jnp.float32), S((64, 4096), jnp.float32)
    assert tile(fn, (0, None), n="auto", budget=20 * MiB).plan(*shapes).tiles == 8  # as the compiler says, when asked
    with pytest.raises(ValueError, match=r"the smallest possible is 16\.\d+ MiB"):
        tile(fn, (0, None), n="auto", budget=10 * MiB).plan(*shapes)


def test_an_explicit_n_is_obeyed():
    assert tile(loss, (0, None, 0), n=1024).plan(*SHAPES).tiles == 1024


READS = {"2GiB": 2 << 30, "1.5 MiB": 3 << 19, "500MB": 500 * 10**6, "1kb": 1000, "64 B": 64, ".5GiB": 1 << 29}


@pytest.mark.parametrize("text", READS)
def test_reads_sizes(text):
    assert read_budget(text) == READS[text]


@pytest.mark.parametrize("wrong", ["2", "GiB", "-1MB", "2 GiBs", "1e9 B", ""])
def test_refuses_what_is_no_size(wrong):
    with pytest.raises(ValueError, match="is no number of bytes"):
        read_budget(wrong)


@pytest.mark.parametrize(
    ("wrong", "error"), [(True, TypeError), (2.0, TypeError), (-1, ValueError), ("0B", ValueError)]
)
def test_refuses_what_is_no_positive_number(wrong, error):
    with pytest.raises(error, match="budget"):
        read_budget(wrong)
