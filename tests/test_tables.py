"""The rows of parameters against the model: every leaf has a row, and the letters are those of the annotations."""

import typing

import equinox as eqx
import jax
import pytest

from tests.test_configs import SMALL
from zoo.configs import GemmaConfig
from zoo.gemma import Block, Gemma
from zoo.tables import GEMMA_1, GEMMA_2, Row, rows

CONFIGS = {"gemma": GemmaConfig(**SMALL), "gemma2": GemmaConfig(**SMALL, post_norms=True)}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_leaf_has_a_row_and_every_row_a_leaf(config):
    model = eqx.filter_eval_shape(Gemma.init, config, key=jax.random.key(0))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    assert leaves == {row.leaf: row.shape(config.dims) for row in rows(config)}


def _annotation(row: Row) -> str:
    owner, field = (Block, row.leaf.removeprefix("layers.")) if row.stacked else (Gemma, row.leaf)
    hint = typing.get_type_hints(owner)[field]
    hint = next((arm for arm in typing.get_args(hint) if arm is not type(None)), hint)
    return hint.dim_str


@pytest.mark.parametrize("row", {row.leaf: row for row in (*GEMMA_1, *GEMMA_2)}.values(), ids=lambda row: row.leaf)
def test_letters_are_those_of_the_annotations(row):
    assert tuple(_annotation(row).replace("*", "").split()) == row.letters


@pytest.mark.parametrize("row", [*GEMMA_1, *GEMMA_2], ids=lambda row: row.leaf)
def test_a_pattern_holds_the_same_letters_on_both_sides(row):
    assert sorted("".join(row.disk)) == sorted(row.letters[row.stacked :])
    assert set(row.fan_in) <= set(row.letters)


def test_no_leaf_and_no_tensor_has_two_rows():
    for table in (GEMMA_1, GEMMA_2):
        assert len({row.leaf for row in table}) == len({row.tensor for row in table}) == len(table)
