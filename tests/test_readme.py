"""What the READMEs print, runs; what they claim of models and plans is what the code says."""

import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from experiments.commandline import schema
from experiments.runtime import own
from zoo import count_params

pytestmark = pytest.mark.symbolic
ROOT = Path(__file__).parent.parent
TEXTS = {str(p.relative_to(ROOT)): p.read_text() for p in (ROOT / "README.md", *ROOT.glob("[a-z]*/**/README.md"))}
BLOCKS = {
    f"{name}, {i}": block
    for name, text in TEXTS.items()
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
MODELS = re.findall(r"^\| `(\w+)` \| .* \| ([\d,]+) \|$", TEXTS["zoo/README.md"], re.MULTILINE)
LINKED = [ROOT / "README.md", *(ROOT / ".github").glob("*.md"), *ROOT.glob("[a-z]*/**/*.md")]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_run_as_printed(name):
    exec(compile(BLOCKS[name], name, "exec"), {})


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not page.parent.joinpath(link).exists()] == []


def test_the_readme_is_a_page():
    assert len(TEXTS["README.md"].splitlines()) <= 135


@pytest.mark.optimised
def test_memory_is_as_printed(capsys):
    exec(compile(BLOCKS["README.md, 0"], "README.md", "exec"), {})
    printed = re.findall(r"```\n([\d.]+ MiB\n[\d.]+ MiB)\n```", TEXTS["README.md"])
    size = lambda text: [float(line.split()[0]) for line in text.split("\n")]
    assert size(capsys.readouterr().out.strip()) == pytest.approx(size(printed[0]), rel=0.1)


def test_the_plan_of_the_compiler_s_readme_is_what_is_dumped(tmp_path, monkeypatch):
    (name,) = (name for name in BLOCKS if name.startswith("transforms/tiling"))
    monkeypatch.setenv("TILE_DUMP", str(tmp_path))
    exec(compile(BLOCKS[name], "loss.py", "exec"), {})
    (printed,) = re.findall(r"```\n(inputs .*?)```", TEXTS["transforms/tiling/README.md"], re.DOTALL)
    lines = lambda text: [re.sub(r"  #.*", "", line) for line in text.strip().splitlines()]
    assert any(lines(file.read_text()) == lines(printed) for file in tmp_path.iterdir())


def test_the_own_loss_is_one_that_a_run_can_have(tmp_path, monkeypatch):
    from experiments import configs

    (block,) = [block for block in BLOCKS.values() if "# losses.py" in block]
    (tmp_path / "losses.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    logits, labels, mask = jnp.zeros((6, 4)), jnp.arange(6) % 4, jnp.ones(6)
    model = type("Model", (), {"logits": lambda _, hidden: hidden})()
    config = configs.Custom(fn="losses.py:focal", kwargs={"gamma": 1.0})
    value, beside = own.objective(config)((model,), (logits,), labels, mask)
    assert value == pytest.approx(0.75 * math.log(4)) and beside["cross_entropy"] == pytest.approx(math.log(4))


def test_the_plan_is_as_printed():
    names: dict = {}
    exec(compile(BLOCKS["transforms/README.md, 0"], "README.md", "exec"), names)
    plan = str(names["tiled"].plan(names["weights"], names["hidden"], names["labels"]))
    (printed,) = re.findall(r"```\n(\d+ steps in .*?)```", TEXTS["transforms/README.md"], re.DOTALL)
    assert plan.startswith(printed)


@pytest.mark.parametrize(("name", "parameters"), MODELS)
def test_models_have_the_parameters_of_the_table(name, parameters):
    config, choices = schema.compose([f"model={name}"])
    assert choices["model"] == name
    assert count_params(config.model.config) == int(parameters.replace(",", ""))


def test_every_model_is_in_the_table():
    files = Path(__file__).parent.parent.joinpath("conf", "model").glob("*.yaml")
    assert {f.stem for f in files} == {name for name, _ in MODELS}
