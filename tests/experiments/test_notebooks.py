"""The notebooks run from top to bottom, and what their text says of the numbers is so."""

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"


def carried_out(name, capsys):
    return runpy.run_path(str(FOLDER / f"{name}.py")), capsys.readouterr().out


def test_a_loss_of_one_s_own(capsys):
    found, said = carried_out("own_loss", capsys)
    assert found["difference"] < 1e-5 and float(found["value"]) == pytest.approx(
        float(found["value_in_tiles"]), rel=1e-6
    )
    assert found["memory"]["tiled"] < found["memory"]["whole"] / 3
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert f"{found['memory']['tiled']:.1f} MiB" in said


def test_lora(capsys):
    found, _ = carried_out("lora", capsys)
    assert found["unchanged"] == found["before"] and found["after"] < found["before"] - 0.1
    nats = found["nats"]
    assert nats(found["again"]) == pytest.approx(found["after"], abs=1e-5)
    assert nats(found["merged"]) == pytest.approx(found["after"], abs=1e-4)
    assert nats(found["base"]) == found["before"]  # what is frozen has not moved


def test_reading_a_plan(capsys):
    found, said = carried_out("reading_a_plan", capsys)
    assert len(found["plan"].gradient.loops) == 1
    assert found["compiled"]["tiled"] < found["compiled"]["untiled"] / 10
    assert 1 <= found["plan"].gradient.temp / found["compiled"]["tiled"] < 2  # what is alive at once, at most
    assert found["fitted"].tiles > 8 and found["fitted"].size >= 128
    assert [len(run.loops) for run in (found["two"].value, found["two"].gradient)] == [2, 3]
    assert "sort" in found["refusal"] and "reading_a_plan.py" in found["refusal"] and found["refusal"] in said


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_notebook_is_cells_that_begin_with_a_title(path):
    cells = re.split(r"^# %%", path.read_text(), flags=re.MULTILINE)
    assert cells[0] == "" and cells[1].startswith(" [markdown]\n# # ")
    assert f'"{path.stem}"' in Path(__file__).read_text()
    linked = [(FOLDER.parents[1] / name).read_text() for name in ("README.md", "experiments/README.md")]
    assert f"notebooks/{path.name}" in linked[1] and "experiments/notebooks" in linked[0]
