"""What the README prints, runs; what it claims of models is what the code says."""

import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from experiments.commandline import schema
from zoo import count_params

README = Path(__file__).parent.parent.joinpath("README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MODELS = re.findall(r"^\| `(\w+)` \| .* \| ([\d,]+) \|$", README, re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_blocks_run_as_printed(block):
    exec(compile(block, "README.md", "exec"), {})


def test_what_tile_takes_is_short():
    lines = [len(block.splitlines()) for block in BLOCKS if "from transforms import tile" in block]
    assert len(lines) >= 5 and max(lines) < 10


def test_the_own_loss_is_one_that_a_run_can_have(tmp_path, monkeypatch):
    from experiments import configs
    from experiments.step import own

    (block,) = [block for block in BLOCKS if "# losses.py" in block]
    (tmp_path / "losses.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    logits, labels, mask = jnp.zeros((6, 4)), jnp.arange(6) % 4, jnp.ones(6)
    model = type("Model", (), {"logits": lambda _, hidden: hidden})()
    config = configs.Custom(fn="losses.py:focal", kwargs={"gamma": 1.0})
    value, beside = own.objective(config)((model,), (logits,), labels, mask)
    assert value == pytest.approx(0.75 * math.log(4)) and beside["cross_entropy"] == pytest.approx(math.log(4))


def test_the_plan_is_as_printed():
    names: dict = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    plan = str(names["tiled"].plan(names["weights"], names["hidden"], names["labels"]))
    (printed,) = re.findall(r"```\n(\d+ steps in .*?)```", README, re.DOTALL)
    assert plan.startswith(printed)


@pytest.mark.parametrize(("name", "parameters"), MODELS)
def test_models_have_the_parameters_of_the_table(name, parameters):
    config, _ = schema.compose([f"model={name}"])
    assert count_params(config.model.config) == int(parameters.replace(",", ""))


def test_every_model_is_in_the_table():
    files = Path(__file__).parent.parent.joinpath("conf", "model").glob("*.yaml")
    assert {f.stem for f in files} == {name for name, _ in MODELS}
