"""The rows of parameters against the models: every leaf has a row, and the letters are those of the annotations."""

import dataclasses
import typing

import equinox as eqx
import jax
import numpy as np
import pytest

from tests.zoo.hf_cases import CASES
from zoo import model_class
from zoo.config import Config, rows
from zoo.huggingface.config import from_hf
from zoo.parameters import Row

CONFIGS = {case: from_hf(raw) for case, raw in CASES.items()}
ROWS = [(config, row) for config in CONFIGS.values() for row in rows(config)]
DISTINCT = {(type(config).__name__, row.leaf): (config, row) for config, row in ROWS}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_leaf_has_a_row_and_every_row_a_leaf(config):
    model = eqx.filter_eval_shape(model_class(config).init, config, key=jax.random.key(0))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    assert leaves == {row.leaf: row.shape(config.dims) for row in rows(config)}


def _annotations(config: Config, row: Row) -> list[str]:
    model = model_class(config)
    owner = model.blocks[row.leaf.partition(".")[0]] if row.stack else model
    hint = typing.get_type_hints(owner)[row.leaf.rpartition(".")[2]]
    arms = (hint, *typing.get_args(hint))
    return [arm.dim_str.replace("*", "") for arm in arms if hasattr(arm, "dim_str")]


@pytest.mark.parametrize(("config", "row"), DISTINCT.values(), ids=[" ".join(key) for key in DISTINCT])
def test_letters_are_those_of_the_annotations(config, row):
    alike = lambda letters: letters.upper().replace("P", "F")  # stacks of one class have sizes of their own
    assert alike(" ".join(row.letters)) in map(alike, _annotations(config, row))


@pytest.mark.parametrize(("config", "row"), DISTINCT.values(), ids=[" ".join(key) for key in DISTINCT])
def test_a_pattern_holds_the_same_letters_on_both_sides(config, row):
    """But for those of a file alone, which are one long."""
    beside = [letter for letter in "".join(row.disk) if letter not in row.inner]
    assert [config.dims[letter] for letter in beside] == [1] * len(beside)
    assert sorted("".join(row.disk)) == sorted([*row.inner, *beside])
    assert set(row.fan_in) <= set(row.letters)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_leaf_and_no_tensor_has_two_rows(config):
    table = rows(config)
    assert len({row.leaf for row in table}) == len(table)
    names = [(name, row.part) for row in table for name, _ in row.tensors(config.dims)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parts_fill_their_tensor(config):
    """Each place of a tensor that holds several parameters belongs to one of them."""
    held: dict[str, np.ndarray] = {}
    for row in rows(config):
        for name, place in row.tensors(config.dims):
            tensor = held.setdefault(name, np.zeros(row.disk_shape(config.dims)))
            piece = np.ones([config.dims[letter] for letter in row.inner])
            assert row.turned(tensor, config.dims).shape == piece.shape, place
            row.write(row.turned(tensor, config.dims) + piece, tensor, config.dims)
    assert all((tensor == 1).all() for tensor in held.values())


@pytest.mark.parametrize("case", ["llama2", "mixtral", "qwen3_moe_mixed"])
def test_places_fill_a_leaf_without_gaps(case):
    config = CONFIGS[case]
    for row in rows(config):
        shape = row.shape(config.dims)
        spots = [place for _, place in row.tensors(config.dims)]
        assert spots == sorted(set(spots))
        assert spots[-1] == tuple(size - 1 for size in shape[: len(row.stack)])


def test_layers_without_experts_have_rows_of_their_own():
    config = CONFIGS["qwen3_moe_mixed"]
    tensors = {row.leaf: [name for name, _ in row.tensors(config.dims)] for row in rows(config)}
    assert tensors["dense.gate"] == ["model.layers.1.mlp.gate_proj.weight"]
    assert tensors["layers.router"] == [f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 2, 3)]
    assert tensors["layers.down"][6] == "model.layers.2.mlp.experts.1.down_proj.weight"


def _traced(config: Config) -> str:
    shapes = eqx.filter_eval_shape(model_class(config).init, config, key=jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 4), np.int32)
    return str(eqx.filter_make_jaxpr(lambda model, tokens: model(tokens))(shapes, tokens)[0])


def test_every_flag_of_a_family_changes_its_models():
    """In some case at least: none is passed over, as one that a family has inherited may be."""
    moves: dict[str, bool] = {}
    for config in CONFIGS.values():
        for field in dataclasses.fields(config):
            name, value = f"{type(config).__name__}.{field.name}", getattr(config, field.name)
            if not isinstance(value, bool) or moves.get(name):
                continue
            try:
                other = dataclasses.replace(config, **{field.name: not value})
            except ValueError:  # not together with the others
                continue
            moves[name] = rows(other) != rows(config) or _traced(other) != _traced(config)
    assert [name for name, known in moves.items() if not known] == []
