"""The paths that experiments/README.md tells a reader, followed: each file is there and defines what it is said to."""

import ast
import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

from experiments import configs
from experiments.commandline import options, schema
from experiments.configs.fields import CHOICES, choice
from experiments.planning.resolve import resolve
from experiments.runtime.hardware import Device
from experiments.step import optimizer

FOLDER = Path(__file__).parents[2] / "experiments"
TEXT = (FOLDER / "README.md").read_text()
ORDER = re.findall(r"^\| \[`(\w+)/`\]\(\1\) \|", TEXT, re.MULTILINE)


def defined(path):
    """The names of a module's functions and classes, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def test_every_link_leads_somewhere():
    local = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if not link.startswith("https://")]
    assert local and not [link for link in local if not (FOLDER / link).exists()]


@pytest.mark.parametrize("row", [line for line in TEXT.splitlines() if line.startswith("| the ") or "| how to" in line])
def test_what_is_said_to_be_in_a_file_is_there(row):
    named = re.findall(r"\(([\w/.]+\.py)\) `([\w.]+)`", row)
    named += [(file, name) for name, file in re.findall(r"`(Programs\.\w+)` in \[`[^`]*`\]\(([\w/.]+\.py)\)", row)]
    assert named or "conf/model" in row
    for file, name in named:
        assert name in defined(FOLDER / file), (file, name)


def test_the_folders_are_all_listed_and_import_only_what_stands_above_them():
    assert sorted(ORDER) == sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
    for path in FOLDER.glob("*/*.py"):
        text = path.read_text()
        used = set(re.findall(r"from experiments\.(\w+)", text)) & set(ORDER)
        wrong = {one for one in used if ORDER.index(one) > ORDER.index(path.parent.name)}
        assert not wrong, (path.name, wrong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signed(configs.Optimizer):
    """Steps of one size."""


def test_an_optimizer_takes_a_class_and_a_function():
    choice("optimizer", "signed")(Signed)
    optimizer._build.register(Signed, lambda config, rate, seed, model: optax.sign_sgd(rate))
    options.of.cache_clear()
    options.by_key.cache_clear()
    schema.register.cache_clear()
    try:
        made = resolve(schema.compose(["optimizer=signed"])[0], Device("cpu", "a test", 2**33))
        step = optimizer.build(made.optimizer, made.steps)
        updates, _ = step.update({"w": jnp.array([3.0, -2.0])}, step.init({"w": jnp.zeros(2)}))
        assert (
            made.chosen["optimizer.learning_rate"].value == 1e-3
            and float(updates["w"][1]) == -float(updates["w"][0]) > 0
        )
    finally:
        del CHOICES["optimizer"]["signed"]
        options.of.cache_clear()
        options.by_key.cache_clear()
        schema.register.cache_clear()


def test_a_choice_is_an_option_at_once(monkeypatch):
    monkeypatch.setitem(CHOICES, "optimizer", dict(CHOICES["optimizer"]))
    options.of.cache_clear()
    options.by_key.cache_clear()
    schema.register.cache_clear()
    choice("optimizer", "mine", "My own.", momentum=0.5)(configs.Sgd)
    try:
        assert "mine" in options.choices("optimizer")
        made, choices = schema.compose(["optimizer=mine"])
        assert (made.optimizer.momentum, choices["optimizer"]) == (0.5, "mine")
        assert made.optimizer.name == "sgd"
        with pytest.raises(AssertionError, match="registered twice"):
            choice("optimizer", "mine")(configs.Sgd)
    finally:
        options.of.cache_clear()
        options.by_key.cache_clear()
        schema.register.cache_clear()
