"""What a run that goes on takes from its start, whatever is left of it."""

import functools
import json

import pytest

from experiments.commandline import schema
from experiments.results import directory


def test_what_a_run_wrote_about_itself_is_also_in_its_checkpoints(tmp_path):
    saved = {"overrides": ["run=x", "steps=9"], "config": {"steps": 9}}
    for step in (3, 20):
        (tmp_path / "x" / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "x" / "checkpoints" / str(step) / "run.json").write_text(json.dumps({**saved, "step": step}))
    resumed = functools.partial(directory.resumed, ["run=x", "seed=1", f"out={tmp_path}"], "runs")
    assert resumed() == ["steps=9", "run=x", "seed=1", f"out={tmp_path}"]
    (tmp_path / "x" / "run.json").write_bytes(b'{"overrides": ["st\xff')
    assert resumed()[0] == "steps=9"
    for file in tmp_path.rglob("run.json"):
        file.write_text("{")
    with pytest.raises(
        schema.ConfigError, match=r"cannot go on with the run at .*x: .*run.json cannot be read .*another run=NAME"
    ):
        resumed()


@pytest.mark.parametrize(
    "text", ['{"overrides": "abc", "config": {}}', '{"overrides": [3], "config": {}}', '{"overrides": [], "config": 3}']
)
def test_a_file_that_is_no_record_of_a_run_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(schema.ConfigError, match=r"run.json is no record of a run"):
        directory.read(tmp_path)


def test_a_name_that_no_folder_can_have_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(schema.ConfigError, match=r"cannot look for a run at .*/aaa.*: File name too long"):
        directory.resumed([f"run={'a' * 300}"], str(tmp_path))
