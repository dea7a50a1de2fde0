"""The list of models, and the README's table, which is made from it."""

import re
import subprocess
import sys
from pathlib import Path

from experiments.commandline import listing, schema

README = Path(__file__).parents[2] / "zoo" / "README.md"


def test_the_readmes_table_is_the_generated_one():
    table = re.search(r"<!-- models -->\n(.*?)\n<!-- /models -->", README.read_text(), re.DOTALL)
    assert table is not None and table.group(1) == listing.markdown()


def test_every_file_is_listed_once():
    assert sorted(one.name for one in listing.models()) == schema.options("model")


def test_a_file_read_without_hydra_is_what_hydra_makes_of_it():
    for name in ("llama3_2_1b", "gemma3_27b", "qwen3_30b_a3b", "tiny", "gemma3n_e2b"):
        assert listing.read(name).config == schema.compose([f"model={name}"])[0].model.config


def test_models_are_printed_without_jax():
    code = (
        "import sys; from experiments import run; assert run.main(['--models']) == 0; assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=README.parent.parent, check=True
    )
    assert "mixtral_8x7b" in done.stdout and "46,702,792,704" in done.stdout
