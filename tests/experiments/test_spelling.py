"""What is typed is what a run is given: text as it stands, whole numbers however they are written."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.commandline import options, schema, spelling
from experiments.results import directory

NAMES = [
    "a b.txt",
    "ünï/größe.txt",
    "a(1).txt",
    "lr=1e-3",
    "it's.txt",
    '"quoted".txt',
    "'quoted'",
    "file#1.txt",
    "&x!.txt",
    "a,b.txt",
    "[a]{b}.txt",
    "~there-is-nobody/x",
    "${seed}",
    "\\${seed}",
    "a\\",
    "a\\'b",
    "1e3",
    "true",
    "10:13",
    "  spaces  ",
    "new\nline",
    "?",
    "$HOME",
]
TEXTS = ["data.path", "model.weights", "run", "out", "data.cache", "data.tokenizer", "data.field", "data.pattern"]


@pytest.mark.parametrize("name", NAMES)
def test_text_is_taken_as_it_is_typed(name):
    keys = [key for key in TEXTS if key != "run" or "/" not in name]
    config, _ = schema.compose(["data=text", *(f"{key}={name}" for key in keys)])
    found = [config.data.path, config.model.weights, config.out, config.data.cache, config.data.tokenizer]
    assert {value if name[0] != "~" else value.rpartition("/~")[2] for value in found} == {name.lstrip("~")}
    assert (config.data.field, config.data.pattern) == (name, name)
    assert "run" not in keys or config.run == name


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*"ab'\"\\$,=()[]#&!~: ü\n?0", "${", "${a}", "\\'"]), min_size=1).map("".join))
def test_any_text_survives(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    known = options.by_key()
    word = spelling.spelled(f"data.field={text}", known)
    value = OverridesParser.create().parse_override(word).value()
    if text not in ("null", "???"):
        assert OmegaConf.create({"x": value}).x == text
    one = f"data.field={text}"
    assert text == "null" or spelling.typed(word, known) == one


def test_the_home_folder_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config, _ = schema.compose(["data=text", "data.path=~/x y.txt", "out=~", "data.field=~"])
    assert (config.data.path, config.out, config.data.field) == ("/home/somebody/x y.txt", "/home/somebody", "~")


def test_what_is_null_is_left_out():
    config, _ = schema.compose(["run=null", "model.weights=null"])
    assert config.run is None and config.model.weights is None


@pytest.mark.parametrize(("typed", "steps"), [("1e3", 1000), ("1000.0", 1000), ("1.5e1", 15), ("7", 7)])
def test_whole_numbers_may_be_written_as_others(typed, steps):
    config, _ = schema.compose([f"steps={typed}", f"tiling.n={typed}", f"model.num_layers={typed}"])
    assert (config.steps, config.tiling.n, config.model.config.num_layers) == (steps, steps, steps)


WRONG = {
    "steps=1.5": "bad override `steps=1.5`: give a whole number, or auto",
    "steps=1e-3": "bad override `steps=1e-3`: give a whole number, or auto",
    "seed=x": "bad override `seed=x`: give a whole number",
    "optimizer.warmup=much": "bad override `optimizer.warmup=much`: give a number",
    "tiling.lowmem=7e7": "bad override `tiling.lowmem=7e7`: give true or false",
    "tiling.n=2.5": "bad value tiling.n=2.5: give a whole number of tiles",
    "seed=0,1": "bad override `seed=0,1`: it has several values; -m sweeps over them",
    "lr=1e-3": "there is no `lr`. Did you mean `optimizer.learning_rate`?",
    "epochs=2": "Did you mean `steps`?",
    "data=10:13": "bad value data.fn=10:13: give MODULE:FUNCTION or FILE.py:FUNCTION",
    "objective=losses.py:": "bad value objective.fn=losses.py:: give MODULE:FUNCTION or FILE.py:FUNCTION",
    "model=google/gemma-2b": "Did you mean model=gemma2b? --models lists all",
}


@pytest.mark.parametrize("word", WRONG)
def test_what_is_wrong_is_said_in_the_users_words(word):
    with pytest.raises(schema.ConfigError) as caught:
        schema.compose([word])
    assert WRONG[word] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("typed", ["stop=END", "stop=1,2"])
def test_stop_wants_a_list(typed):
    with pytest.raises(schema.ConfigError, match=f"bad override `{typed}`: give a list of whole numbers, such as"):
        schema.compose([typed], "generate")


def test_what_help_calls_auto_can_be_said():
    keys = [one.key for one in options.of() if spelling.is_auto([one])]
    plain, _ = schema.compose([])
    said, _ = schema.compose([f"{key}=auto" for key in keys if key.partition(".")[0] not in ("adapter", "model")])
    assert {"steps", "batch_size", "seq_len", "log_every"} <= {*keys} and said == plain


SWEPT = {
    "data.path=a.txt,b.txt": ["data.path=a.txt", "data.path=b.txt"],
    "data.path='a,b.txt',ü.txt": ["data.path=a,b.txt", "data.path=ü.txt"],
    'out="it\'s, here",~/x': ["out=it's, here", "out=~/x"],
    "adapter.targets=q,v": ["adapter.targets=q,v"],
    "adapter.targets='q,v','q'": ["adapter.targets=q,v", "adapter.targets=q"],
    "seed=range(0,3)": ["seed=0", "seed=1", "seed=2"],
    "tiling.n=none,8": ["tiling.n=none", "tiling.n=8"],
    "remat.policy=full*3,none": ["remat.policy=full*3,none"],
    "steps=1e3": ["steps=1e3"],
    "run=it's": ["run=it's"],
}


@pytest.mark.parametrize("word", SWEPT)
def test_sweeps_over_text_too(word):
    known = options.by_key()
    assert spelling.swept(word, known) == SWEPT[word]
    if spelling.is_text(known[word.partition("=")[0]]):
        from hydra.core.override_parser.overrides_parser import OverridesParser

        parsed = OverridesParser.create().parse_override(spelling.swept_by_hydra(word, known))
        jobs = parsed.sweep_string_iterator() if parsed.is_sweep_override() else [parsed.get_value_element_as_str()]
        assert [spelling.typed(f"{parsed.key_or_group}={job}", known) for job in jobs] == SWEPT[word]


def test_a_run_goes_on_under_the_name_that_was_typed(tmp_path):
    folder = tmp_path / "a b=ü" / "1e3"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"overrides": ["run=1e3", "data.field=x,y"], "config": {}}))
    words = directory.resumed(["run=1e3", f"out={tmp_path}/a b=ü"], "runs")
    config, _ = schema.compose(["data=text", "data.path=x", *words])
    assert (config.run, config.data.field) == ("1e3", "x,y")


def test_a_command_reads_text_as_typed(tmp_path):
    place = tmp_path / "größe (1), it's=#1 & more!"
    script = schema.CONF.parent / "experiments" / "convert.py"
    done = subprocess.run(
        [sys.executable, script, f"source={place}", f"out={tmp_path}/x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert str(place) in done.stderr and "Traceback" not in done.stderr
