"""The command line: every slip gets one line that names what was meant, and JAX stays out."""

import dataclasses
import subprocess
import sys

import pytest
import yaml

from experiments import configs
from experiments.commandline import schema
from experiments.results import directory


def test_the_main_job_composes():
    config, choices = schema.compose(["model=gemma2b", "tiling.n=8"])
    assert config.tiling == configs.Tiling(n=8)
    assert config.model.config.vocab_size == 256_000
    assert choices["model"] == "gemma2b"
    hash(config.model.config)  # frozen: usable as a static field


WRONG = {
    "typo in a key": (["tiling.nn=8"], r"no `tiling.nn`. Did you mean `tiling.n`\?"),
    "typo in a group": (["modle=tiny"], r"no `modle`. Did you mean `model`\?"),
    "typo in an option": (["model=tinny"], r"Did you mean model=tiny\? --models lists all"),
    "typo in a nested key": (["model.num_layer=3"], r"Did you mean `model.num_layers`\?"),
    "group left out": (["n=8"], r"Did you mean `tiling.n`\?"),
    "a file without its function": (["objective=losses.py"], r"Name the function in it too: .*=losses.py:FUNCTION"),
    "a path for a model": (["model=../name"], r"Give model.weights=\.\./name for a folder of weights; --models lists"),
    "a folder for a model": (["model=org/name"], r"Give model.weights=org/name for a folder, .*hf://org/name for a"),
    "key of another option": (["optimizer=sgd", "optimizer.b2=1"], r"`optimizer` has: .*momentum"),
    "added key": (["+foo=1"], r"there is no `foo`"),
    "removed key": (["~tiling.n"], r"cannot apply `~tiling.n`: keys can be changed, not removed"),
    "not an override": (["abc"], r"cannot read `abc`"),
    "tiles not a number": (["tiling.n=abc"], r"bad value tiling.n=abc: give a whole number"),
    "no tiles": (["tiling.n=0"], r"bad value tiling.n=0"),
    "half a tile": (["tiling.n=1.5"], r"tiling.n"),
    "steps not a number": (["steps=abc"], r"bad override `steps=abc`: give a whole number"),
    "no steps": (["steps=0"], r"bad value steps=0: it must be greater than zero"),
    "not a dtype": (["hardware.param_dtype=float16"], r"expected one of \[float64, float32, bfloat16\]"),
    "not a policy": (["remat.policy=some"], r"bad value remat.policy=some: choose auto"),
    "names that nobody keeps": (
        ["remat=full", "remat.names=q"],
        r"bad value remat.names=q: remat.policy=full keeps none",
    ),
    "missing path": (["data=text"], r"data.path=... must be given"),
    "run in another folder": (["run=../x"], r"bad value run=../x"),
    "one of two": (["steps=2", "steps=2.5"], r"bad override `steps=2.5`: give a whole number"),
    "two signs": (["steps==3"], r"bad override `steps==3`: give a whole number"),
    "several options": (["tiling=[none,all]"], r"unknown option `tiling=\[none,all\]`: Did you mean tiling=none"),
    "no names and values": (["hardware.compiler_options=fast"], r"give hardware.compiler_options.NAME=VALUE for each"),
    "one value for parts": (["model=tiny_llama", "model.rope_scaling=3"], r"it is made of parts: write an option"),
    "a value of a part that is null": (
        ["model=tiny_llama", "model.rope_scaling.factor=2"],
        r"`model.rope_scaling` is null",
    ),
    "another family": (["model=tiny", "model.family=llama"], r"model.family=llama: it has no attention_pattern, .*;"),
    "impossible model": (["model.num_heads=3", "model.num_kv_heads=2"], r"num_heads=3 must be a multiple"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_command_lines_get_one_line(name):
    overrides, message = WRONG[name]
    with pytest.raises(schema.ConfigError, match=message) as caught:
        schema.compose(overrides)
    assert "\n" not in str(caught.value)


def test_lists_of_names_need_no_quotes():
    config, _ = schema.compose(
        ["adapter=lora", "adapter.targets=q,*_proj", "data=text", "data.path=x", "data.pattern=*.a,*.b"]
    )
    assert config.adapter.patterns == ["q", "*_proj"]
    assert config.data.pattern == "*.a,*.b"


def test_compiler_options_are_free():
    config, _ = schema.compose(["hardware.compiler_options.xla_dump_to=/tmp/x"])
    assert config.hardware.compiler_options == {"xla_dump_to": "/tmp/x"}


def test_names_and_values_of_ones_own_can_be_given_at_once():
    options = 'hardware.compiler_options={a:true,b:1e-3,c:"x y",d:passes,e:[1,2]}'
    config, _ = schema.compose([options, "objective=losses:focal", "objective.kwargs={gamma:2}"])
    assert config.hardware.compiler_options == {"a": True, "b": 1e-3, "c": "x y", "d": "passes", "e": [1, 2]}
    assert config.objective.kwargs == {"gamma": 2}
    with pytest.raises(schema.ConfigError, match=r"there is no `objective.kwargs.gamma`"):
        schema.compose(["objective.kwargs={gamma:2}"])


def test_schema_keeps_types_and_defaults():
    made = schema.schema_of(configs.AdamW)
    assert {f.name: f.default for f in dataclasses.fields(made) if f.name in ("b1", "eps")} == {"b1": 0.9, "eps": 1e-8}
    made().b1 = 0.5  # mutable, as OmegaConf needs


def test_configuration_survives_as_yaml():
    config, _ = schema.compose(["seed=7", "hardware.param_dtype=bfloat16"])
    loaded = yaml.safe_load(directory.dump(config, ["seed=7"]))
    assert loaded["seed"] == 7
    assert loaded["hardware"]["param_dtype"] == "bfloat16"
    assert loaded["optimizer"]["kind"] == "Optimizer"


def test_help_and_config_errors_import_no_jax():
    code = """
import sys
from experiments import run
assert run.main(["--help"]) == 0
assert "hydra" not in sys.modules
assert run.main(["tiling.nn=8"]) == 2
assert run.main(["--cfg", "model=gemma7b"]) == 0
slow = {"jax", "jaxlib", "matplotlib", "optax", "equinox"} & set(sys.modules)
assert not slow, slow
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=schema.CONF.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    for group in schema.GROUPS:
        assert f"\n  {group} " in done.stdout
    for option in ("tiling.n", "batch_size", "save.final", "data.path"):
        assert f"\n  {option} " in done.stdout
    assert done.stderr == "error: unknown override `tiling.nn=8`: there is no `tiling.nn`. Did you mean `tiling.n`?\n"


def test_a_folder_that_is_there_is_taken_for_one_of_weights(tmp_path, monkeypatch):
    (tmp_path / "tiny2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(schema.ConfigError, match=r"model=tiny2`: Give model.weights=tiny2 for a folder of weights; "):
        schema.compose(["model=tiny2"])
    with pytest.raises(schema.ConfigError, match=r"model=tiny3`: Did you mean model=tiny\?"):
        schema.compose(["model=tiny3"])
