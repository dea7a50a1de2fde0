"""Every option composes, and help lists all that there are, each with the value that it has where nothing is said."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import configs, run
from experiments.commandline import options, schema, usage
from experiments.configs import commands
from experiments.configs.fields import CHOICES, classes
from experiments.planning.resolve import resolve
from zoo.config import RopeScaling
from zoo.families import FAMILIES

NEEDED = {
    "text": ["data.path=x"],
    "tokens": ["data.path=x"],
    "grain": ["data.dataset=x:y"],
    "preference": ["objective=dpo"],
    "sft": ["data=chat"],
    "distill": ["objective.teacher=x"],
    **{name: ["data=preference"] for name in ("dpo", "ipo", "simpo", "orpo")},
}


def needed(group, option):
    return [f"{group}.fn=x:y"] if option == "custom" else NEEDED.get(option, [])


def listed(text):
    """Return {key: default} of the options that a help text lists; of a key with several defaults the first."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if line.startswith("  ") and line[2:3].isalpha() and len(words) > 1 and line.find(words[1]) >= 20:
            found.setdefault(words[0], words[1])
    return found


def fields_of(cls, prefix=""):
    """Yield the keys of a dataclass, as Hydra has them."""
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        if key in CHOICES:
            for part in classes(key).values():
                yield from fields_of(part, f"{key}.")
        elif key == "model":
            yield from (f"model.{one.name}" for family in FAMILIES.values() for one in dataclasses.fields(family))
            yield from ("model.weights", "model.quantise")
        elif dataclasses.is_dataclass(field.type):
            yield from fields_of(field.type, f"{key}.")
        else:
            yield key


@pytest.mark.parametrize(("name", "cls"), [("config", configs.Run), *commands.CLASSES.items()])
def test_every_option_is_listed(name, cls):
    found = set(listed(usage.help_text(name)))
    within = {key for key in found if key.startswith("model.rope_scaling.")}
    assert len(within) in (0, len(dataclasses.fields(RopeScaling)))
    assert {*found - within, *(["model.rope_scaling"] if within else [])} == set(fields_of(cls))
    assert all(option.help for option in options.of(name))


def values(config):
    """Return {key: value} of a configuration."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        within = values(value) if dataclasses.is_dataclass(value) else None
        prefix = "" if field.name == "config" else f"{field.name}."
        found |= {field.name: value} if within is None else {prefix + key: one for key, one in within.items()}
    return found


def said(key, text, config):
    option = next(one for one in options.by_key()[key])
    value = values(config)[key]
    if option.field.default is dataclasses.MISSING and option.field.default_factory is dataclasses.MISSING:
        return text == "needed" or text == usage.shown(option, value)
    return text == usage.shown(option, value)


def test_defaults_are_those_of_a_run():
    config, _ = schema.compose([])
    wrong = {
        key: text
        for key, text in listed(usage.help_text()).items()
        if key in values(config) and not said(key, text, config)
    }
    assert not wrong
    assert listed(usage.help_text())["optimizer.ema"] == "-"
    assert listed(usage.help_text())["steps"] == "auto"


OPTIONS = [(group, option) for group in schema.GROUPS if group != "model" for option in schema.options(group)]
OPTIONS += [("model", option) for option in ("tiny", "gemma3_1b", "tiny_mixtral", "llama3_2_1b")]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_and_its_help_has_its_own_options_and_values(group, option):
    """Of `model` some: all are composed where their sizes are read (tests/test_readme.py)."""
    config, choices = schema.compose([f"{group}={option}", *needed(group, option)])
    assert choices[group] == option
    assert dataclasses.is_dataclass(getattr(config, group))
    found = listed(usage.help_text("config", [f"{group}={option}"]))
    own = {key for key in values(config) if key.startswith(f"{group}.")}
    assert own - {"model.rope_scaling"} <= set(found)
    assert not {key: text for key, text in found.items() if key in own and not said(key, text, config)}


def test_what_is_auto_is_chosen_for_the_user():
    from experiments.runtime import hardware

    config, _ = schema.compose([])
    resolved = resolve(config, hardware.Device("cpu", "a test", 2**33))
    auto = {option.key for option in options.of() if option.field.metadata.get("auto")}
    names = set(listed(usage.help_text()))
    assert {key for key in resolved.chosen if key in names} <= auto | {
        "tiling.n",
        "remat.policy",
        "hardware.platform",
        "attention",
    }
    assert not [key for key in auto if values(resolved).get(key, 0) is None]


def test_an_unknown_option_is_refused(capsys):
    assert usage.tell("config", ["optimizer=adam", "--help"]) == 2
    assert "Did you mean optimizer=adamw?" in capsys.readouterr().err


def test_it_fits_a_terminal():
    env = {**os.environ, "COLUMNS": "100"}
    script = schema.CONF.parent / "experiments" / "run.py"
    done = subprocess.run([sys.executable, script, "-h"], capture_output=True, text=True, check=True, env=env)
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_screen_cannot_encode_is_written_some_other_way(encoding):
    code = "from experiments.commandline.console import write_any_text; write_any_text(); print('── 日 ü')"
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=env, cwd=schema.CONF.parent
    )
    wanted = {"ascii": "-- \\u65e5 \\xfc", "latin-1": "-- \\u65e5 ü", "utf-8": "── 日 ü"}
    assert done.stdout.decode(encoding).strip() == wanted[encoding]


@pytest.mark.parametrize("words", [["run.py", "--help"], ["command.py"], ["score.py", "--help"]])
def test_nobody_reading_on_is_no_error(words):
    """As in `... --help | head -3`; with unbuffered output the second line already meets a closed pipe."""
    command = [sys.executable, "-u", f"experiments/{words[0]}", *words[1:]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(run.__file__).parents[1], text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_conf_has_every_option_as_help_tells_it(monkeypatch):
    monkeypatch.delenv("TILING_ZOO_CALLED", raising=False)
    monkeypatch.setenv("COLUMNS", "130")
    assert (options.CONF / "README.md").read_text() == usage.markdown()
